"""Who picks the plan of a step: the interface that decoding knows, and always the same plan (`learner` weighs)."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.drafting.proposals import Drafted
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner

#: The plan of a step (None: a plain one), and the candidates of each slot for a plan that takes some.
Choice = tuple[DraftPlan | None, list[GivenTree] | None]


class Policy:
    """Chooses the plan of each step. It sees finished rounds only, so that it cannot bias what they emit. This one
    takes the first of its plans that fits, without any a plain step; every method says what another one may do."""

    #: Whether steps without rules may be drafted, and whether what was said before is looked up.
    drafts = looks_up = False
    #: So many of the next steps of this batch size, under rules or not, are plain ones for which nothing is asked; the
    #: loop counts them, and how many of them have ended in how many seconds.
    rest, rests_as = 0, (0, False)
    rested_steps, rested_seconds = 0, 0.0
    #: What rounds are taken of, where there is room, and what beside that under rules alone, which force tokens.
    plans: Sequence[DraftPlan] = ()
    forced_plans: Sequence[DraftPlan] = ()

    def open(self, sequence: Drafted, prompt_ids: Sequence[int]) -> None:
        """A sequence begins; `sequence.said` is what is kept of it."""

    def close(self, sequence: Drafted) -> None:
        """It has ended."""

    def choose(
        self,
        runner: DecodingRunner,
        sequences: Sequence[Drafted],
        room: int,
        ruled: bool,
        known: bool = True,
        begun: bool = False,
        waited: bool = False,
    ) -> Choice:
        """The next step of sequences in the leading slots, under rules or not, none of which takes more than `room`
        tokens. Candidates are given only where all their tokens are `known`. A step that has `begun` is a plain one.
        `waited` says whether the device has nothing to do meanwhile."""
        return first_fitting(self.plans, runner, len(sequences), room, ruled), None

    def record(
        self,
        plan: DraftPlan | None,
        emitted: Sequence[int],
        seconds: float,
        ruled: bool = False,
        waited: bool = False,
        blocked: float = 0.0,
    ) -> None:
        """A step of `seconds` has ended that gave each running sequence so many tokens, under rules or not. A
        plain one may have `waited` for the host; for `blocked` seconds the host waited for the device.
        """

    def look_up(self, runner: DecodingRunner, sequences: Sequence[Drafted], room: int) -> None:
        """The device has what to do: time to ask what was said behind the tokens that are known."""

    def promises(self, runner: DecodingRunner, sequences: Sequence[Drafted], room: int) -> bool:
        """Whether a round should follow the step under way, so that its tokens are worth waiting for."""
        return False

    def goes_on(self, batch: int, waits: float) -> bool:
        """Whether no step should be launched behind a round of given candidates, though the device `waits` so many
        seconds for the host then."""
        return False

    def expects_round(self, batch: int, waits: float) -> bool:
        """Whether under rules no plain step should begin before the host knows the tokens under way."""
        return False


class FixedDrafter(Policy):
    """Always the same plan, shorter where there is less room."""

    drafts = True

    def __init__(self, plan: DraftPlan) -> None:
        self.plans = fitting_plans(plan)

    def expects_round(self, batch: int, waits: float) -> bool:
        """Always."""
        return True


def fitting_plans(plan: DraftPlan) -> Sequence[DraftPlan]:
    """A plan, and what is left of it where there is less room."""
    return plan, *(plan.shortened(steps) for steps in range(plan.steps - 1, 0, -1))


def first_fitting(
    plans: Sequence[DraftPlan], runner: DecodingRunner, batch: int, room: int, ruled: bool
) -> DraftPlan | None:
    """The first of `plans` that is ready and cannot emit more than `room` tokens; None decodes plainly."""
    return next((plan for plan in plans if plan.longest <= room and runner.is_ready(batch, plan, ruled)), None)
