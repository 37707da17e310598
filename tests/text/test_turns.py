"""Which turns of a conversation leave where it outgrows the context."""

from __future__ import annotations

import random

import pytest

from edgellm import ContextError, RequestError
from edgellm.text.turns import OngoingConversation, turn_starts, turns_to_drop, without_oldest


def spoken(roles: str) -> list[dict[str, str]]:
    """Messages by the first letters of their roles; the content is the place."""
    names = {role[0]: role for role in ("system", "developer", "user", "assistant", "tool")}
    return [{"role": names[letter], "content": str(place)} for place, letter in enumerate(roles)]


@pytest.mark.parametrize(
    ("roles", "starts"),
    [
        ("", []),
        ("s", []),
        ("sduaua", [2, 4]),
        ("uau", [0, 2]),
        ("suatatauau", [1, 7, 9]),  # calls of tools and their results belong to the turn
        ("saua", [1, 2]),  # a greeting
        ("suasuau", [1, 3, 6]),  # a system message later on stands before its turn
        ("suu", [1, 2]),
        ("suas", [1]),  # behind the last one it leaves the user's question where it is
    ],
)
def test_a_turn_is_a_message_of_the_user_with_all_that_answers_it(roles: str, starts: list[int]) -> None:
    assert turn_starts(spoken(roles)) == starts


def test_the_system_prompt_stays() -> None:
    messages = spoken("sduatauaua")
    assert without_oldest(messages, 0) == messages
    assert without_oldest(messages, 4) == [*messages[:2], *messages[6:]]
    assert without_oldest(spoken("s"), 0) == spoken("s")
    messages = spoken("suasuaua")
    assert without_oldest(messages, 4) == [messages[0], messages[3], *messages[6:]]


class Prompts:
    """Prompts of turns with these lengths behind a system prompt, and how often they were counted."""

    def __init__(self, system: int, lengths: list[int]) -> None:
        self.system, self.lengths, self.counted = system, lengths, set()

    def tokens(self, dropped: int) -> int:
        self.counted.add(dropped)
        return self.system + sum(self.lengths[dropped:])


def test_so_many_leave_that_half_of_the_context_is_free_again() -> None:
    prompts = Prompts(100, [30] * 23)  # 790 tokens; a quarter of 1,024 is kept for the answer
    assert turns_to_drop(Prompts(100, [30] * 22).tokens, 22, 1024) == 0
    dropped = turns_to_drop(prompts.tokens, 23, 1024)
    assert 430 < prompts.tokens(dropped) <= 512
    assert turns_to_drop(prompts.tokens, 23, 1024, max_tokens=120) == 0


@pytest.mark.parametrize("max_tokens", [None, 1, 120, 256, 500, 700, 1000, 10**6])
def test_room_is_kept_and_the_newest_turns_stay(max_tokens: int | None) -> None:
    chosen = random.Random(max_tokens)
    for _ in range(300):
        system, count = chosen.choice((0, 20, 100, 600, 900)), chosen.randrange(1, 60)
        prompts = Prompts(system, [chosen.choice((5, 20, 50, 200)) for _ in range(count)])
        whole, least = prompts.tokens(0), prompts.tokens(count - 1)
        if least >= 1024:
            with pytest.raises(ContextError) as raised:
                turns_to_drop(prompts.tokens, count, 1024, max_tokens)
            assert (raised.value.needed, raised.value.limit) == (least + 1, 1024)
            continue
        prompts.counted.clear()
        dropped = turns_to_drop(prompts.tokens, count, 1024, max_tokens)
        assert len(prompts.counted) <= 2 + 4 + count.bit_length()
        kept = prompts.tokens(dropped)
        assert 0 <= dropped < count
        limits = (1024 - (max_tokens if max_tokens and max_tokens < 1024 else 256), 768, (least + 1024) // 2)
        limit = next(limit for limit in limits if least <= limit)
        assert kept <= limit  # the room is there
        if dropped:
            assert whole > limit  # nothing leaves without need
            assert kept <= max((least + limit) // 2, min(512, limit * 2 // 3))  # and then several turns' worth
            assert max(kept / 0.85, prompts.tokens(dropped - 1)) > min(512, limit * 2 // 3)  # and no more


def test_few_renderings_find_the_place() -> None:
    """Where turns are about alike, however long the conversation is: of everything, the least, and a guess or two."""
    chosen = random.Random(3)
    for _ in range(100):
        prompts = Prompts(100, [chosen.randrange(10, 100) for _ in range(3000)])
        assert turns_to_drop(prompts.tokens, 3000, 65536) > 0
        assert len(prompts.counted) <= 4


def test_templates_that_write_less_of_the_last_turns_do_no_harm() -> None:
    """Tokens need not fall with every turn that leaves: what is chosen was counted."""
    chosen = random.Random(1)
    for _ in range(300):
        count = chosen.randrange(2, 40)
        tokens = [1200 - 25 * place + chosen.randrange(60) for place in range(count)]
        tokens[-1] = 150
        dropped = turns_to_drop(lambda place, tokens=tokens: tokens[place], count, 1024)
        assert tokens[dropped] <= 512


@pytest.mark.parametrize("value", ["drop", None, 5, "ERROR", []])
def test_an_unknown_policy_is_named(value: object) -> None:
    with pytest.raises(RequestError, match=r"overflow is .*: expected 'drop_oldest' or 'error'"):
        OngoingConversation(value)
