"""What slots hold of texts, and which slot a prompt takes, so that requests that begin alike are computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from edgellm.engines.runners.media import TokenIdentity, before_span
from edgellm.snapshots.kept_on_host import StateKeeper
from edgellm.text.turns import OngoingConversation

#: Stands for whatever adapter the rows are bound to.
_BOUND = "\0bound"
_uses = count(1)


def common_beginning(first: Sequence[TokenIdentity], second: Sequence[TokenIdentity]) -> int:
    """How many tokens two texts begin with alike."""
    longest = min(len(first), len(second))
    if list(first[:longest]) == list(second[:longest]):  # the usual case is decided at once
        return longest
    return next(i for i in range(longest) if first[i] != second[i])


def reusable_rows(common: int, prompt_tokens: int, draft_rows: int | None = None) -> int:
    """How many KV rows a prompt of `prompt_tokens` can take over that shares its first `common` tokens with them.

    The prompt's last token is always computed. A draft, of which `draft_rows` rows are there (None: there is no
    draft), needs of each row the token after it, too.
    """
    rows = min(common, prompt_tokens - 1)
    if draft_rows is not None:
        rows = min(rows, draft_rows, common - 1)
    return max(0, rows)


class KVContents:
    """Which tokens the KV rows of a slot belong to, so that the next request can reuse the prefix they share.

    A draft's row i was made of base rows up to i and of token i + 1. What of it is missing is recomputed from the
    base's features, so the base recomputes these rows, too. Rows are bound to the adapter that they were computed with,
    those of the draft, too: it takes the base's features. A token of an image is identified by the image's content,
    not by its id alone (`PromptMedia.identities`).

    A model with recurrent states can go on from a slot's rows where it has such a state, too: at the `place` where the
    slot is, or at those of which `kept` has states (None: the model has none, and goes on anywhere). Windows go on as
    far back as `cut` says (see `LayerState.cut`; None: anywhere). With `whole_media` nothing goes on inside a span
    of media: its tokens see all of it.
    """

    def __init__(
        self, kept: StateKeeper | None = None, cut: Callable[[int, int], int] | None = None, whole_media: bool = False
    ) -> None:
        self._ids: list[TokenIdentity] = []
        self._kept, self._cut, self._whole_media = kept, cut, whole_media
        #: How many tokens the rows have held since they began anew: those of windows lie over each other.
        self._most = 0
        #: How many tokens the slot's recurrent states have taken; 0 where they are of no use.
        self.place = 0
        self._draft_rows: int | None = None
        self._adapter: str | None = None
        #: A number that is the larger the later the rows were used; 0 where there are none.
        self.last_use = 0
        #: The conversation that wrote them last.
        self.conversation: OngoingConversation | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def bind(self, adapter: str | None) -> None:
        """Rows for this adapter's digest (None: no adapter) are wanted or written from now on: others are let go."""
        if adapter != self._adapter:
            self._ids, self._adapter, self.last_use, self.place, self._most = [], adapter, 0, 0, 0
            self._draft_rows = None if self._draft_rows is None else 0

    def reusable(self, prompt_ids: Sequence[TokenIdentity], adapter: str | None = _BOUND) -> int:
        """How much of a prompt to reuse: the longest common prefix, but never the prompt's last token; of that, with
        recurrent states, what is before the latest place of one, and where media are whole, what is before one.

        It is nothing for an adapter's digest (None: no adapter) that the rows are not bound to, where one is given.
        """
        rows = reusable_rows(self.common(prompt_ids, adapter), len(prompt_ids), self._draft_rows)
        rows = before_span(prompt_ids, rows) if self._whole_media else rows
        rows = rows if self._cut is None else self._cut(self._most, rows)
        if self._kept is None or not rows:
            return rows
        kept = self._kept.latest(prompt_ids, self._adapter, rows)
        return max(kept, self.place) if self.place <= rows else kept

    def common(self, prompt_ids: Sequence[TokenIdentity], adapter: str | None = _BOUND) -> int:
        """How many rows hold a prompt's first tokens, computed with an adapter."""
        if adapter not in (_BOUND, self._adapter):
            return 0
        return common_beginning(self._ids, prompt_ids)

    @property
    def has_all_rows(self) -> bool:
        """Whether no row was written over another, as later tokens' are in windows."""
        return self._cut is None or self._cut(self._most, 1) == 1

    def use_all(self, prompt_ids: Sequence[TokenIdentity], adapter: str | None) -> bool:
        """Whether the rows hold all of a prompt, computed with an adapter; they are then used."""
        found = self.has_all_rows and self.common(prompt_ids, adapter) == len(prompt_ids)
        self.last_use = next(_uses) if found else self.last_use
        return found

    def replace(
        self, token_ids: Sequence[TokenIdentity], draft_rows: int | None = None, place: int = 0, held: int = 0
    ) -> None:
        """The rows now hold exactly these tokens, the first of those before or, of none, anew; so many rows of the
        draft hold theirs (None: there is no draft), and recurrent states have taken the first `place` of them. `held`:
        how many tokens were written, or are about to be."""
        self._ids, self._draft_rows, self.place = list(token_ids), draft_rows, place
        self._most = max(self._most, held, len(self._ids)) if self._ids else 0
        self.last_use = next(_uses) if self._ids else 0
        self.conversation = None

    def copy_from(self, other: KVContents) -> None:
        """The rows of another slot were copied here."""
        self._ids, self._draft_rows, self._adapter = list(other._ids), other._draft_rows, other._adapter
        self.place, self._most = other.place, other._most
        self.last_use, self.conversation = next(_uses), None


class SlotChoice(NamedTuple):
    """Take the slot `taken`; where `copied` is not None, let it hold that slot's rows first."""

    taken: int
    copied: int | None = None


def choose_slot(
    contents: Sequence[KVContents],
    idle: range,
    tokens: Sequence[TokenIdentity],
    adapter: str | None,
    shortened: OngoingConversation | None = None,
    system_tokens: int = 0,
) -> SlotChoice:
    """The idle slot for a prompt of `tokens`, computed with an adapter's digest (None: without one).

    The slot with the longest common prefix is taken where half of its rows or more are of use, those of the prompt's
    first `system_tokens` apart, with which every conversation of an agent begins: the prompt goes on with what it
    holds. Else it is another conversation that begins alike: it is left as it is, and the prefix is copied to the slot
    that was used least recently. So it is of several that hold as much of the prompt, which goes on with none of them.
    Where the prompt is that of a conversation that was `shortened`, nobody needs what its slot holds beyond the prefix:
    it takes that one.
    """
    reusable = {slot: contents[slot].reusable(tokens, adapter) for slot in idle}
    own = [slot for slot in idle if shortened is not None and contents[slot].conversation is shortened]
    best = max(idle, key=lambda slot: (reusable[slot], slot in own, -contents[slot].last_use, -slot))
    spare = min(own or idle, key=lambda slot: (contents[slot].last_use, slot))
    if reusable[best] == 0:
        return SlotChoice(spare)
    shared = min(system_tokens, reusable[best])
    if 2 * (reusable[best] - shared) >= len(contents[best]) - shared or best == spare:
        return SlotChoice(best)
    return SlotChoice(spare, best if reusable[best] > reusable[spare] else None)
