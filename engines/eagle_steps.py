"""What the host knows of a drafting runner's slots while the device runs ahead, and the tokens that its steps give."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.engines.backends.base import Readback
from edgellm.engines.speculation.draft_plan import DraftPlan


class SlotProgress:
    """Bounds that become exact as steps are read.

    Of each slot: `pending` entries that the draft has not seen, never too few; `base_rows` and `draft_rows` that were
    committed by the steps which were read. `lengths` are those of `BaseEngineRunner`, which rounds change, too.
    """

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self.pending, self.base_rows, self.draft_rows = ([0] * len(lengths) for _ in range(3))
        self._latest: StepReadback | None = None

    def start(self, slot: int, count: int) -> None:
        """A prompt of `count` tokens was prefilled: the last one's feature waits for the token drawn after it."""
        self.pending[slot], self.base_rows[slot], self.draft_rows[slot] = 1, count, count - 1

    def stop(self, slot: int) -> None:
        """The slot is idle."""
        self.pending[slot] = 0

    def move(self, source: int, target: int) -> None:
        """The sequence of slot `source` goes on in slot `target`."""
        for known in (self.pending, self.base_rows, self.draft_rows):
            known[target] = known[source]

    def draft_took_pending(self, batch: int) -> None:
        """The draft has seen everything of the leading slots."""
        self.pending[:batch] = [0] * batch

    def launched(self, step: StepReadback) -> StepReadback:
        """A step is under way; of a plain one the base has counted the token already."""
        for slot in range(step.batch):
            if not self._lengths[slot]:
                continue
            if step.plan is None:
                self.pending[slot] += 1
            else:
                self._lengths[slot] += step.plan.longest
                self.pending[slot] = step.plan.longest
        self._latest = step
        return step

    def finish(self, step: StepReadback, counts: Sequence[int]) -> None:
        """A step was read, which gave each slot so many tokens."""
        for slot, count in enumerate(counts):
            if count == 0:
                continue
            if step.draft_accepted:
                self.draft_rows[slot] = self.base_rows[slot]
            self.base_rows[slot] += count
            if step.plan is not None:
                self._lengths[slot] += count - step.plan.longest
                if step is self._latest:
                    self.pending[slot] = count
        if step is self._latest:
            self._latest = None


class StepReadback:
    """The tokens of a round or, without a `plan`, of a plain step of `batch` slots, on their way to the host.

    `draft_accepted` says whether the step began with the draft taking its pending entries.
    """

    def __init__(
        self, progress: SlotProgress, batch: int, plan: DraftPlan | None, emitted: Readback, draft_accepted: bool
    ) -> None:
        self._progress, self._emitted = progress, emitted
        self.batch, self.plan, self.draft_accepted = batch, plan, draft_accepted
        self._tokens: list[list[int]] | None = None

    def wait(self) -> list[list[int]]:
        """The tokens of each slot, in order: none for an idle one, else at least one."""
        if self._tokens is None:
            values = self._emitted.wait()[: self.batch].tolist()
            if self.plan is None:
                self._tokens = [[token] if token >= 0 else [] for token in values]
            else:
                self._tokens = [row[1 : 1 + row[0]] for row in values]
            self._progress.finish(self, [len(tokens) for tokens in self._tokens])
        return self._tokens
