"""The tokens of a step beside a drafter, on their way to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgellm.engines.backends.base import Readback
from edgellm.engines.speculation.draft_plan import DraftPlan


@dataclass(eq=False)
class StepReadback:
    """The tokens of a round or, without a `plan`, of a plain step beside a draft model, of `batch` slots, on their way
    to the host.

    `emitted` reads them, and `read` is told how many each slot was given; `lengths` are those of `BaseEngineRunner`,
    bounds that become exact; `caught_up` says whether the draft took in a backlog before.
    """

    read: Callable[[StepReadback, Sequence[int]], None]
    lengths: list[int]
    batch: int
    plan: DraftPlan | None
    emitted: Readback
    caught_up: bool = False
    _tokens: list[list[int]] | None = None

    def wait(self) -> list[list[int]]:
        """The tokens of each slot, in order: none for an idle one, else at least one."""
        if self._tokens is None:
            values = self.emitted.wait()[: self.batch].tolist()
            if self.plan is None:
                self._tokens = [[token] if token >= 0 else [] for token in values]
            else:
                self._tokens = [row[1 : 1 + row[0]] for row in values]
                for slot, tokens in enumerate(self._tokens):
                    if tokens:
                        self.lengths[slot] += len(tokens) - self.plan.longest
            self.read(self, [len(tokens) for tokens in self._tokens])
        return self._tokens
