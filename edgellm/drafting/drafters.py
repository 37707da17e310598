"""What drafts: for each setting that was used the chooser of the draft model's plans, and what the host proposes."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.drafting.adaptive import adaptive_drafting
from edgellm.drafting.choosers import FixedDrafting, PlanChooser
from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.controller import DraftingController, DraftingReport
from edgellm.drafting.given import GivenDrafting
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.engines.speculation.suffix_index import SuffixIndex
from edgellm.errors import EngineError, RequestError


class Drafters:
    """The drafters of a runner; what they learned for a setting (None: no drafting) is kept for it.

    `chooser` and `given` are those of the setting in use, as `DecodingLoop` takes them; `index` is of what was said
    under any setting that asks for it (None: none did).
    """

    def __init__(self, directory: EngineDirectory, runner: DecodingRunner) -> None:
        self._directory = directory
        self._runner: DecodingRunner | None = runner
        self.index: SuffixIndex | None = None
        self._made: dict[DraftingConfig | None, tuple[GivenDrafting | None, PlanChooser | None]] = {}
        self.setting: DraftingConfig | None = None
        self.chooser: PlanChooser | None = None
        self.given: GivenDrafting | None = None
        self.use(None)

    def use(self, setting: DraftingConfig | None) -> bool:
        """Draft as a setting says from now on; says whether the slots were used to measure costs.

        Raises RequestError where no draft model is loaded that it needs, EngineError where the engines cannot serve it.
        """
        is_new = setting not in self._made
        if is_new:
            chooser = self._chooser_for(setting)
            self._made[setting] = self._given_for(setting, chooser), chooser
        (self.given, self.chooser), self.setting = self._made[setting], setting
        return is_new and isinstance(self.chooser, DraftingController)

    def close(self) -> None:
        """Let go of the runner, which is closed."""
        self._runner = None

    @property
    def can_draft(self) -> bool:
        """Whether answers may be drafted, so that their responses say what drafting did."""
        return (self._runner is not None and self._runner.draft is not None) or self._proposes

    @property
    def plans(self) -> tuple[Sequence[DraftPlan], Sequence[DraftPlan]]:
        """What rounds are taken of, and of what beside that under rules alone, which force tokens."""
        chosen = () if self.chooser is None else self.chooser.plans
        own, joint = ((), ()) if self.given is None else (self.given.plans, self.given.joint_plans)
        return ([*chosen, *own, *joint], ()) if self._proposes else (chosen, [*own, *joint])

    def report(self) -> DraftingReport | None:
        """What adaptive drafting, or drafting from what was said alone, chose so far, and why; else None."""
        if isinstance(self.chooser, DraftingController):
            return self.chooser.report()
        return self.given.report() if self.chooser is None and self.given is not None and self._proposes else None

    @property
    def _proposes(self) -> bool:
        return self.setting is not None and self.setting.proposes_given

    def _chooser_for(self, setting: DraftingConfig | None) -> PlanChooser | None:
        """What picks the plans of the draft model, if that is to propose."""
        if setting is None or not setting.needs_draft_model:
            return None
        if self._runner is None or self._runner.draft is None:
            raise RequestError("no draft model is loaded: open the model with drafting, on a directory that has one")
        plan = setting.plan(self._directory.limits)
        return adaptive_drafting(setting, self._directory, self._runner) if setting.adaptive else FixedDrafting(plan)

    def _given_for(self, setting: DraftingConfig | None, chooser: PlanChooser | None) -> GivenDrafting | None:
        """What proposes tokens that rules force and, where the setting says so, what was said, alone or beside what the
        `chooser` takes. None where the tokens would show which of the drafts was faster."""
        if setting is not None and not setting.gives_plain_tokens:
            return None
        assert self._runner is not None
        runner, verification = self._runner, self._runner.verification
        asked = setting is not None and setting.proposes_given
        if asked and self.index is None:
            self.index = SuffixIndex()
        given = GivenDrafting(
            verification.most_given,
            runner.backend.fixed_shapes,
            self.index if asked else None,
            chooser,
            verification.most_nodes,
        )
        if asked and not any(runner.takes_given(1, plan) for plan in given.plans):
            raise EngineError(
                f"drafts from what was said cannot be verified with {self._directory.path} on this device: neither its "
                "plans nor the kernels compute trees of this model. Leave suffix drafts out"
            )
        if asked:
            verification.reserve(verification.most_nodes)
        return given
