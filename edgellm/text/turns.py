"""The turns of a conversation, and how many of the oldest leave where it outgrows the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal, NamedTuple, get_args

from edgellm.errors import ContextError, require
from edgellm.text.messages import SYSTEM_ROLES

#: What a conversation does that outgrows the context: its oldest turns leave, or its next message raises ContextError.
Overflow = Literal["drop_oldest", "error"]

#: Of the tokens that are to stay: with so many the search for more of them ends.
_NEAR = 0.85
#: How often it is guessed as if turns were alike; then the search halves what is left.
_GUESSES = 4


@dataclass(frozen=True, eq=False)
class OngoingConversation:
    """What requests have in common that go on one conversation: each object is another one."""

    overflow: Overflow = "drop_oldest"

    def __post_init__(self) -> None:
        known = get_args(Overflow)
        require(self.overflow in known, "overflow", self.overflow, " or ".join(map(repr, known)))


class Dropped(NamedTuple):
    """What left a conversation before an answer: turns, and messages in all; system messages stay."""

    turns: int = 0
    messages: int = 0


def turn_starts(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Where the turns of a conversation begin; what comes before the first is its system prompt.

    A turn is a user's message with all that answers it: calls of tools, their results, the model's words. A system
    message later on belongs to the turn that it stands before, behind the user's last message to that. Where a
    conversation does not begin with the user, what comes before his first message is a turn, too.
    """
    roles = [message["role"] for message in messages]
    first = next((place for place, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
    last = max((place for place, role in enumerate(roles) if role == "user"), default=first)
    return [
        place
        for place in range(first, len(roles))
        if place == first
        or (place <= last and roles[place] in ("user", *SYSTEM_ROLES) and roles[place - 1] not in SYSTEM_ROLES)
    ]


def stays(messages: Sequence[dict[str, Any]], place: int) -> list[bool]:
    """Whether each message stays when a conversation is to begin at `place`: system messages always do."""
    return [at >= place or message["role"] in SYSTEM_ROLES for at, message in enumerate(messages)]


def without_oldest(messages: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """A conversation without its first `count` messages that are no system messages."""
    spoken = [place for place, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES]
    place = [*spoken, len(messages)][min(count, len(spoken))]
    return list(compress(messages, stays(messages, place)))


def turns_to_drop(
    prompt_tokens: Callable[[int], int], turns: int, context_length: int, max_tokens: int | None = None
) -> int:
    """How many of the oldest of so many `turns` leave before the last one, which stays, is answered.

    `prompt_tokens(n)` are the tokens of the prompt without the n oldest turns, which takes a rendering to say.

    None leave where room is left for an answer: for `max_tokens`; for a quarter of the context where there is no such
    limit, or so much room cannot be made; where that cannot be made either, for half of what the system prompt and the
    last turn leave. Else so many leave at once, down to about half of the context, that several turns fit before it
    comes to that again: these find all that stayed in the KV cache. (With more room than a quarter it is two thirds of
    what that leaves, and never less than the middle between that and what has to stay.)

    Raises ContextError where the last turn does not even fit alone, behind the system prompt.
    """
    quarter = max(1, context_length // 4)
    room = quarter if max_tokens is None or max_tokens >= context_length else max_tokens
    if prompt_tokens(0) <= context_length - room:
        return 0
    least = prompt_tokens(turns - 1)
    if least >= context_length:
        raise ContextError(
            f"the prompt has {least} tokens{', even without the earlier turns,' if turns > 1 else ''} and the context "
            f"{context_length}, of which at least one is for the answer: shorten the message or the system prompt, or "
            "build with a larger --kv-capacity",
            least + 1,
            context_length,
        )
    limits = context_length - room, context_length - quarter, (least + context_length) // 2
    limit = next(limit for limit in limits if least <= limit)
    if prompt_tokens(0) <= limit:
        return 0
    goal = max(min(context_length // 2, limit * 2 // 3), (least + limit) // 2)
    # The fewest, or a few more, without which a prompt has as many as that: some, and fewer than all.
    low, high, guesses = 0, turns - 1, 0
    while high - low > 1 and prompt_tokens(high) < _NEAR * goal:
        before, after = prompt_tokens(low), prompt_tokens(high)
        share = (before - (1 + _NEAR) / 2 * goal) / max(1, before - after)
        place = low + round(share * (high - low))
        middle = (low + high) // 2 if guesses >= _GUESSES else min(max(place, low + 1), high - 1)
        guesses += 1
        if prompt_tokens(middle) <= goal:
            high = middle
        else:
            low = middle
    return high
