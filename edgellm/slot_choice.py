"""Which idle slot's KV rows a request takes, so that conversations find their own again and few others are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgellm.engines.runners.prompt_images import TokenIdentity
from edgellm.decoding.slots import KVContents


class SlotChoice(NamedTuple):
    """Take the slot `taken`; where `copied` is not None, let it hold that slot's rows first."""

    taken: int
    copied: int | None = None


def choose_slot(
    contents: Sequence[KVContents], idle: range, tokens: Sequence[TokenIdentity], adapter: str | None
) -> SlotChoice:
    """The idle slot for a prompt of `tokens`, computed with an adapter's digest (None: without one).

    The slot with the longest common prefix is taken where half of its rows or more are of use: the prompt goes on with
    what it holds. Else it is another conversation that begins alike: it is left as it is, and the prefix is copied to
    the slot that was used least recently.
    """
    reusable = {slot: contents[slot].reusable(tokens, adapter) for slot in idle}
    best = max(idle, key=lambda slot: (reusable[slot], contents[slot].last_use, -slot))
    oldest = min(idle, key=lambda slot: (contents[slot].last_use, slot))
    if reusable[best] == 0:
        return SlotChoice(oldest)
    if 2 * reusable[best] >= len(contents[best]) or best == oldest:
        return SlotChoice(best)
    return SlotChoice(oldest, best if reusable[best] > reusable[oldest] else None)
