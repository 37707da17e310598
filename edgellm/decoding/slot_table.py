"""Who has which slot: sequences come in, leave, and give way to others; and what of texts the slots hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edgellm.decoding.sequence import DecodingSequence, StepMasks
from edgellm.drafting.drafter import Policy
from edgellm.engines.backends.base import Readback
from edgellm.engines.runners.media import PromptMedia, TokenIdentity
from edgellm.engines.runners.prefill import Stops
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import EngineError
from edgellm.snapshots.contents import KVContents, choose_slot, common_beginning
from edgellm.snapshots.kept_on_host import RowKeeper, StateKeeper
from edgellm.snapshots.slots import SlotSnapshots

if TYPE_CHECKING:
    from edgellm.media.encoders import PreparedMedia


class HeldSlots:
    """The slots of a runner whose rows others read: nothing is computed there until these give them back.

    Sequences have the slots in front of all that are held, so the last ones are to be held first.
    """

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._returned: deque[int] = deque()

    def usable(self, runner: DecodingRunner) -> int:
        """How many of the runner's first slots are not held; EngineError where none is. Of the engine's thread."""
        while self._returned:
            if (lost := runner.backend.lost()) is not None:  # waits for readers that still run on the device
                raise lost
            self._held.discard(self._returned.popleft())
        usable = min(self._held, default=runner.limits.max_batch)
        if not usable:
            raise EngineError(
                "all slots of the model hold states that prefill() handed out: let go of these (and of what was made "
                "of them) first, or build with a larger --max-batch"
            )
        return usable

    def hold(self, slot: int) -> Callable[[], None]:
        """Hold a slot; gives what gives it back, which any thread may call, once."""
        self._held.add(slot)
        return partial(self._returned.append, slot)


class SlotTable:
    """The slots of a runner. No step is under way when anything changes.

    `contents` are those of the slots, exchanged with them; `encode` encodes the media of a prompt; `drafter` drafts
    (None: nothing is drafted); `keeper` keeps rows of sequences that give way (None: they are computed again), `states`
    recurrent states (None: the model has none); slots that are `held` are left alone.
    """

    def __init__(
        self,
        runner: DecodingRunner,
        contents: list[KVContents],
        snapshots: SlotSnapshots | None = None,
        encode: Callable[[Sequence[int], Sequence[PreparedMedia]], PromptMedia] | None = None,
        drafter: Policy | None = None,
        keeper: RowKeeper | None = None,
        states: StateKeeper | None = None,
        held: HeldSlots | None = None,
    ) -> None:
        self._held = held or HeldSlots()
        self.runner, self._contents, self._snapshots, self._encode = runner, contents, snapshots, encode
        self.drafter, self._keeper, self._states = drafter or Policy(), keeper, states
        #: The sequences that have a slot, in the slots' order.
        self.running: list[DecodingSequence] = []

    def has_place(self, sequence: DecodingSequence, leaving: Sequence[DecodingSequence] = ()) -> bool:
        """Whether a slot is free, and the engines hold its adapter or can, once those that are `leaving` have left:
        else it waits until others are finished.

        Raises AdapterError for an adapter that is not loaded, EngineError where all slots are held.
        """
        slots = [self.running.index(each) for each in leaving]
        has_slot = len(self.running) - len(slots) < self._held.usable(self.runner)
        return has_slot and self.runner.base.has_adapter_place(sequence.adapter, *slots)

    @property
    def movable(self) -> list[DecodingSequence]:
        """Those that can give way: what stands for an image is not to be computed again as part of an answer."""
        media = {kind.token_id for kind in self.runner.base.config.media.values()}
        return [each for each in self.running if not each.finished and media.isdisjoint(each.answer.token_ids)]

    def admit(self, sequence: DecodingSequence) -> Readback | None:
        """Give a slot to a sequence that has a place, and launch its prefill, whose token is returned. One that gave
        way goes on: with its rows, and without a launch (None), where these were kept; else all of its text that is not
        in a slot's rows any more is computed.

        What it raises is that sequence's failure: it has no slot then, and nothing has changed for the others.
        """
        slot, base, first = len(self.running), self.runner.base, None
        sequence.clock.begin()
        self._encode_media(sequence)
        if sequence.tally is not None:
            sequence.tally.start()
        try:
            base.set_adapter(slot, sequence.adapter)
            sequence.bind(base.adapter_digest(sequence.adapter))
            if sequence.kept is None:
                first = self._start(slot, sequence)
            else:
                self._put_back(slot, sequence)
            if not sequence.known:
                self.drafter.open(sequence, sequence.prompt_ids)
        except BaseException:
            base.await_rows()
            base.set_adapter(slot, None)  # the slot stays idle: it must not keep an adapter's place
            raise
        self._release_rows(sequence)
        sequence.room = self.runner.limits.kv_capacity - len(sequence.prompt_ids)
        sequence.wanted = sequence.room if sequence.max_tokens is None else min(sequence.room, sequence.max_tokens)
        sequence.least = sequence.most = sequence.known + (first is not None)
        self.running.append(sequence)
        return first

    def holding(self, sequence: DecodingSequence) -> int | None:
        """The idle slot that holds the rows of all of a prompt, which need not be computed; None: there is none."""
        self._encode_media(sequence)
        adapter = self.runner.base.adapter_digest(sequence.adapter)
        idle = range(len(self.running), self._held.usable(self.runner))
        return next((slot for slot in idle if self._contents[slot].use_all(sequence.identities, adapter)), None)

    def prove(self, slot: int, logits: np.ndarray) -> None:
        """Raise SnapshotError where the first logits [1, V] behind rows of a snapshot are not numbers."""
        assert self._snapshots is not None
        self._snapshots.prove(slot, logits)
        self.running[slot].is_unproven = False

    def give_way(self, sequence: DecodingSequence) -> None:
        """Take a sequence that runs out of its slot: `admit` lets it go on as if nothing had been, `forget` gives it
        up. Its rows are kept where there is a keeper that has room for them."""
        slot = self.running.index(sequence)
        sequence.clock.give_way()
        if sequence.tally is not None:
            sequence.tally.pause()
        if self._keeper is not None:
            rows = len(sequence.prompt_ids) + sequence.known - 1
            sequence.kept = self._keeper.keep(slot, rows, self.runner.draft.rows(slot))
        sequence.lost_rows = sequence.lost_rows or sequence.kept is None
        self._leave(slot)

    def release(self, slot: int, keep_rows: bool = True) -> None:
        """Leave a slot whose sequence has ended, to reuse what it holds (`keep_rows`) or nothing of it."""
        sequence, last = self.running[slot], len(self.running) - 1
        if keep_rows and self._states is not None:
            self.runner.draft.complete(slot, last + 1)  # a next turn goes on where the states are, or not at all
        self._leave(slot)
        if not keep_rows or sequence.is_unproven:
            self.forget_rows(last)
        self.forget(sequence)

    def forget(self, sequence: DecodingSequence) -> None:
        """Let go of what is kept for a sequence that has no slot, and wants none any more."""
        self.drafter.close(sequence)
        self._release_rows(sequence)
        sequence.prepared_media, sequence.media = (), None  # whoever keeps the answer does not keep these

    def forget_rows(self, slot: int) -> None:
        """Reuse nothing of a slot's rows."""
        self._contents[slot].replace((), None if self.runner.draft.rows(slot) is None else 0)

    def _start(self, slot: int, sequence: DecodingSequence) -> Readback:
        """Compute a text, as far as its rows are nowhere."""
        runner, known, restored = self.runner, sequence.known, 0
        text_ids, tokens = sequence.text_ids, sequence.identities
        media = None if sequence.media is None else sequence.media.followed_by(known)
        contents = self._bring_rows(slot, tokens, sequence)
        try:
            if self._snapshots is not None:
                restored = self._snapshots.restore(slot, text_ids, contents, sequence.adapter_digest, media)
            is_fresh = sequence.is_fresh or (sequence.needs_all_rows and not contents.has_all_rows)
            reused = 0 if is_fresh else contents.reusable(tokens)
            stops = self._bring_states(slot, tokens, reused, sequence, restored)
            # What a failure from here on leaves behind.
            draft_rows = None if runner.draft.rows(slot) is None else reused
            contents.replace(tokens[:reused], draft_rows, held=len(tokens))
            rules = None if sequence.constraint is None else StepMasks([sequence])
            first = runner.start(slot, text_ids, reused, sequence.sampling, media, rules, known, stops)
        except BaseException:
            if restored:  # others' steps write the row after an idle slot's latest sequence, which was another one
                self.forget_rows(slot)
            raise
        sequence.is_unproven = restored > 0
        if not known:
            sequence.reused_tokens = reused
        return first

    def _encode_media(self, sequence: DecodingSequence) -> None:
        """Let the engines have the media of a prompt."""
        if sequence.prepared_media and sequence.media is None and self._encode is not None:
            sequence.media = self._encode(sequence.prompt_ids, sequence.prepared_media)
            sequence.prepared_media = ()  # which are larger

    def _put_back(self, slot: int, sequence: DecodingSequence) -> None:
        """Let a slot hold the rows that were kept, and go on with them."""
        assert self._keeper is not None and sequence.kept is not None
        self._bring_rows(slot, (), sequence)
        self.forget_rows(slot)
        self._keeper.put_back(slot, sequence.kept)
        text_ids, known, draft_rows = sequence.text_ids, sequence.known, sequence.kept.draft_rows
        self.runner.resume(slot, text_ids, known, draft_rows, sequence.sampling, sequence.media)

    def _release_rows(self, sequence: DecodingSequence) -> None:
        kept, sequence.kept = sequence.kept, None
        if kept is not None and self._keeper is not None:
            self._keeper.release(kept)

    def _leave(self, slot: int) -> None:
        """Leave a slot idle, its rows reusable; unless it is the last one, the last one's sequence moves there."""
        sequence, runner = self.running[slot], self.runner
        runner.stop(slot)
        self._contents[slot].bind(sequence.adapter_digest)
        rows = sequence.identities[: len(sequence.prompt_ids) + max(0, sequence.answer.token_count - 1)]
        place = 0
        if self._states is not None and sequence.drawn:  # states have taken all but the last drawn, wanted or not
            rows = [*sequence.identities[: len(sequence.prompt_ids)], *sequence.drawn]
            place = len(rows) - 1
            rows = rows if runner.draft.has_model else rows[:-1]  # a draft's row has the token after it, too
        self._contents[slot].replace(rows, runner.draft.rows(slot), place)
        self._contents[slot].conversation = sequence.conversation
        last = len(self.running) - 1
        if slot < last:
            runner.move(last, slot)
            self._exchange_contents(last, slot)
            self.running[slot] = self.running[last]
        self.running.pop()

    def _bring_rows(self, slot: int, tokens: Sequence[TokenIdentity], sequence: DecodingSequence) -> KVContents:
        """Let the next slot hold the rows that are best for a sequence's text, of all that idle slots hold, and be
        bound to its adapter."""
        shortened = sequence.conversation if sequence.dropped.turns else None
        idle = range(slot, self._held.usable(self.runner))
        adapter, system = sequence.adapter_digest, sequence.system_tokens
        taken, copied = choose_slot(self._contents, idle, tokens, adapter, shortened, system)
        if taken != slot:
            self.runner.swap_rows(taken, slot)
            self._exchange_contents(taken, slot)
        if copied is not None:
            copied = taken if copied == slot else copied
            self.runner.copy_rows(copied, slot)
            self._contents[slot].copy_from(self._contents[copied])
        self._contents[slot].bind(sequence.adapter_digest)
        return self._contents[slot]

    def _bring_states(
        self, slot: int, tokens: Sequence[TokenIdentity], reused: int, sequence: DecodingSequence, restored: int
    ) -> Stops | None:
        """Let the recurrent states of a slot be those of a text's first `reused` tokens, of which `restored` come from
        a snapshot; at what places of the rest they are to be kept."""
        states, contents, adapter = self._states, self._contents, sequence.adapter_digest
        if states is None:
            return None
        place, contents[slot].place = contents[slot].place, 0
        if reused != place:
            self.runner.base.await_rows()  # a snapshot's states are not to arrive behind these
            if reused:
                states.put_back(slot, tokens, reused, adapter)
        elif reused - states.latest(tokens, adapter, reused) >= states.least and not restored:
            states.keep(slot, tokens, reused, adapter)  # an answer's end: it is about to be written over
        others = [each.common(tokens, adapter) for each in contents]
        others += [common_beginning(each.identities[: len(each.prompt_ids)], tokens) for each in self.running]
        seen = () if sequence.media is None else sequence.media.spans[-1:]  # another question may follow
        shared = [sequence.system_tokens, *(span.stop for span in seen), *sorted(others)]  # the most share few
        chosen = states.chosen(tokens, reused, shared, adapter)
        return {place: partial(states.keep, slot, tokens, place, adapter) for place in chosen}

    def _exchange_contents(self, first: int, second: int) -> None:
        self._contents[first], self._contents[second] = self._contents[second], self._contents[first]
