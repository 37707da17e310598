"""What picks the plans of a draft model: the interface, and always the same plan (`controller` has adaptive ones)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from edgellm.engines.speculation.draft_plan import DraftPlan

#: Whether a round of a plan can be launched now, since it waits for no capture (see `DecodingRunner.is_ready`); None
#: where all are.
Ready = Callable[[DraftPlan], bool] | None


class PlanChooser(Protocol):
    """Picks the plan of each round. It sees finished rounds only, so that it cannot bias what they emit."""

    #: What it picks of, where there is room.
    plans: Sequence[DraftPlan]

    def next_plan(self, room: int, batch: int, ready: Ready = None) -> DraftPlan | None:
        """The plan, one that is `ready`, for `batch` sequences that may emit at most `room` tokens each; None decodes
        one token plainly."""

    def likely(self, room: int, batch: int) -> DraftPlan | None:
        """What `next_plan` would give now, tries aside; nothing is noted."""

    def plain_seconds(self, batch: int) -> float | None:
        """What a plain step should take; None where that was not measured."""

    def record(self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float) -> None:
        """A round (None: a plain step) of `seconds` ended; each running sequence got `emitted` tokens by it."""


class FixedDrafting:
    """Always the same plan, shorter where there is less room."""

    def __init__(self, plan: DraftPlan) -> None:
        shorter = [plan.shortened(steps) for steps in range(plan.steps - 1, 0, -1)]
        self.plans: Sequence[DraftPlan] = (plan, *shorter)

    def next_plan(self, room: int, batch: int, ready: Ready = None) -> DraftPlan | None:
        """See `PlanChooser`."""
        for plan in self.plans:
            if plan.longest <= room and (ready is None or ready(plan)):
                return plan
        return None

    def likely(self, room: int, batch: int) -> DraftPlan | None:
        """The same."""
        return self.next_plan(room, batch)

    def plain_seconds(self, batch: int) -> float | None:
        """Nothing is measured."""
        return None

    def record(self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float) -> None:
        """Nothing is learned."""
