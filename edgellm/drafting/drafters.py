"""What drafts under each setting that was used, with what it has learned."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.drafter import FixedDrafter, Policy, fitting_plans
from edgellm.drafting.learner import Learner
from edgellm.drafting.report import DraftingReport
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights, embedding_name, head_weight_name
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, tree
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.engines.speculation.suffix_index import SuffixIndex
from edgellm.errors import EngineError, RequestError

#: Lengths of the chains that compete with a longer one. A chain of 1 costs one and a half to two plain
#: steps, for two tokens at most: a chain of 2 or no draft is better.
CHAIN_LENGTHS = (2, 3, 5, 8, 12)
#: Verified nodes (which engines exist for) and levels of the trees that compete with a larger one.
SMALL_TREES = ((8, 3), (16, 4), (32, 5))


def candidate_plans(config: DraftingConfig, limits: EngineLimits) -> list[DraftPlan]:
    """The plans that adaptive drafting chooses among: the configured one and smaller ones.

    A tree competes with smaller trees and with chains, a chain with shorter chains, a tree of choices with what is left
    of it at smaller depths. Raises EngineError if engines of `limits` cannot serve the configured plan.
    """
    full = config.plan(limits)
    if full.kind == "choices":
        return [full.shortened(steps) for steps in range(1, full.steps + 1)]
    rule = {
        "acceptance": full.acceptance,
        "posterior_threshold": full.posterior_threshold,
        "posterior_alpha": full.posterior_alpha,
    }
    lengths = [steps for steps in CHAIN_LENGTHS if steps < full.steps] + [full.steps]
    plans = [chain(steps, sampled=full.sampled, **rule) for steps in lengths]
    if full.kind == "tree":
        smaller = [
            tree(full.top_k, min(steps, full.steps), size, **rule)
            for size, steps in SMALL_TREES
            if size < full.tree_size
        ]
        plans += [*smaller, full]
    return list(dict.fromkeys(plans))


def experts_read(config: DecoderConfig) -> tuple[float, float]:
    """Of a mixture's experts the share that a token goes through, and what share these are of the weights that a step
    of one token reads, by their numbers; (1, 0) of other models."""
    if config.mixture is None:
        return 1.0, 0.0
    chosen, specs = config.mixture.chosen / config.mixture.experts, decoder_weights(config)
    own = chosen * sum(math.prod(spec.shape) for spec in specs if spec.experts)
    table = () if embedding_name(config) == head_weight_name(config) else (embedding_name(config),)
    others = sum(math.prod(spec.shape) for spec in specs if not spec.experts and spec.name not in table)
    return chosen, own / (own + others)


class Drafters:
    """The drafters of a runner; what they learned for a setting (None: no drafting) is kept for it.

    `drafter` is that of the setting in use; `index` is of what was said under any setting that asks for it (None: none
    did).
    """

    def __init__(self, directory: EngineDirectory, runner: DecodingRunner) -> None:
        self._directory = directory
        self._runner: DecodingRunner | None = runner
        self.index: SuffixIndex | None = None
        self._made: dict[DraftingConfig | None, Policy] = {}
        self.setting: DraftingConfig | None = None
        self.drafter: Policy = Policy()
        self.use(None)

    def use(self, setting: DraftingConfig | None) -> None:
        """Draft as a setting says from now on.

        Raises RequestError where no draft model is loaded that it needs, EngineError where the engines cannot serve it.
        """
        if setting not in self._made:
            self._made[setting] = self._make(setting)
        self.drafter, self.setting = self._made[setting], setting

    def close(self) -> None:
        """Let go of the runner, which is closed."""
        self._runner = None

    @property
    def can_draft(self) -> bool:
        """Whether answers may be drafted, so that their responses say what drafting did."""
        return (self._runner is not None and self._runner.draft.has_model) or self.drafter.looks_up

    def report(self) -> DraftingReport | None:
        """What adaptive drafting, or drafting from what was said alone, chose so far, and why; else None."""
        setting, drafter = self.setting, self.drafter
        learns = setting is not None and (setting.adaptive or not setting.needs_draft_model)
        return drafter.report() if learns and isinstance(drafter, Learner) else None

    def _make(self, setting: DraftingConfig | None) -> Policy:
        """Where the tokens would show which of the drafts was faster, nothing is proposed beside the draft model."""
        assert self._runner is not None
        runner, verification, limits = self._runner, self._runner.verification, self._directory.limits
        if self._directory.config.adds_sound:  # rounds bring no rows of sound
            if setting is None:
                return Policy()
            raise EngineError(
                f"{self._directory.path} is a model that hears as it writes: nothing is drafted for it. Open it without"
            )
        own: Sequence[DraftPlan] = ()
        adaptive = True
        if setting is not None and setting.needs_draft_model:
            if not runner.draft.has_model:
                raise RequestError(
                    "no draft model is loaded: open the model with drafting, on a directory that has one"
                )
            plan, adaptive = setting.plan(limits), setting.adaptive
            if not adaptive and not setting.gives_plain_tokens:
                return FixedDrafter(plan)
            own = candidate_plans(setting, limits) if adaptive else fitting_plans(plan)
        asked, gives = setting is not None and setting.proposes_given, setting is None or setting.gives_plain_tokens
        if asked and self.index is None:
            self.index = SuffixIndex()
        index, most = self.index if asked else None, verification.most_given if gives else 0
        ahead, at_once = runner.backend.fixed_shapes, limits.draft_block > 0
        learner = Learner(most, ahead, index, own, adaptive, at_once, experts_read(self._directory.config))
        if asked and not any(runner.takes_given(1, plan) for plan in learner.given_plans):
            raise EngineError(
                f"drafts from what was said cannot be verified with {self._directory.path} on this device: neither its "
                "plans nor the kernels compute trees of this model. Leave suffix drafts out"
            )
        if asked:
            verification.reserve(verification.most_nodes)
        return learner
