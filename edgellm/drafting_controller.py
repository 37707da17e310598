"""Adapts drafting to what rounds cost on this device and to how much of the draft the text lets through.

Of the captured configurations (chains of several lengths, trees of several sizes, no draft) the controller picks the
one with the most tokens per second. With R tokens per second in reach, a configuration is worth E - R * C: its expected
tokens less what its time would have given otherwise; so a further node pays while its probability of being reached is
at least R times the time it adds. Choices follow from finished rounds alone, never from a draft that is under way, so
they cannot bias the output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgellm.acceptance_model import AcceptanceModel, expected_tokens, tree_gain
from edgellm.engines.draft_plan import DraftPlan, chain, tree
from edgellm.round_costs import PLAIN, RoundCosts

if TYPE_CHECKING:
    from edgellm.drafting import DraftingConfig
    from edgellm.engines.decoder_config import EngineLimits

#: Lengths of the chains that compete with a longer one.
CHAIN_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
#: Verified nodes (which engines exist for) and levels of the trees that compete with a larger one.
SMALL_TREES = ((8, 3), (16, 4), (32, 5))
#: The share of the time that may go into trying what does not look best.
EXPLORATION_SHARE = 0.02
#: What looks best must be this much better than what is in use.
SWITCHING_GAIN = 0.02
#: Standard errors by which acceptance is overrated when deciding whether a configuration deserves a try.
OPTIMISM = 1.0
#: Rounds over which observed times correct measured costs.
COST_MEMORY = 16.0
#: Rounds after which the correction of a configuration that is not in use has faded.
IDLE_COST_MEMORY = 256.0
#: No round counts as slower or faster than expected by more than this factor: it was interrupted.
_LARGEST_COST_RATIO = 2.0


@dataclass(frozen=True)
class Candidate:
    """A configuration, or plain decoding (`plan` None). Those of one `group` share their acceptance by depth."""

    plan: DraftPlan | None
    name: str
    steps: int
    group: str

    @classmethod
    def of(cls, plan: DraftPlan) -> Candidate:
        """The candidate for a plan; the first levels of a chain or a tree of choices are alike at every depth."""
        return cls(plan, plan.name, plan.steps, plan.name if plan.kind == "tree" else plan.kind)


@dataclass(frozen=True)
class Forecast:
    """What a configuration should give: tokens of a sequence and seconds in a round, tokens per second of all."""

    name: str
    tokens: float
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class DraftingReport:
    """What the controller chose, and why.

    `rounds` counts finished rounds by configuration, plain steps included; `explored` those that were tried against
    the forecast. `acceptance` holds, by group, the estimated probability that depth 1, 2, ... is accepted once the
    depth before was. `forecasts` are sorted, the fastest first.
    """

    chosen: str
    reason: str
    rounds: dict[str, int]
    explored: int
    acceptance: dict[str, list[float]]
    forecasts: list[Forecast]


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


class CostModel:
    """Seconds of a round: as measured once, corrected by what rounds take now.

    One factor follows the device as a whole (clocks, other load, length of the context), one factor each
    configuration.
    """

    def __init__(self, costs: RoundCosts, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._costs = costs
        self._device = 0.0
        self._own = dict.fromkeys(names, 0.0)

    def seconds(self, name: str, batch: int) -> float:
        """The expected time of a round."""
        return self._costs.seconds(name, batch) * math.exp(self._device + self._own[name])

    def record(self, name: str, batch: int, seconds: float) -> None:
        """Take notice of a finished round."""
        limit = math.log(_LARGEST_COST_RATIO)
        surprise = math.log(max(seconds, 1e-9) / self.seconds(name, batch))
        surprise = max(-limit, min(limit, surprise))
        for other in self._own:
            self._own[other] *= 1.0 - 1.0 / IDLE_COST_MEMORY
        self._own[name] += surprise / COST_MEMORY / 2
        self._device += surprise / COST_MEMORY / 2


@dataclass
class _Counts:
    """What has happened so far."""

    rounds: dict[str, int] = field(default_factory=dict)
    explored: int = 0


class DraftingController:
    """Picks the drafting configuration of each round among `plans` and plain decoding.

    `costs` must know every plan's name and "plain" (`round_costs.PLAIN`). Deterministic: the same calls give the same
    choices.
    """

    def __init__(self, plans: Sequence[DraftPlan], costs: RoundCosts) -> None:
        self._plain = Candidate(None, PLAIN, 0, "")
        self._candidates = [self._plain, *map(Candidate.of, plans)]
        # Where nothing is drawn at random a round takes the deterministic form of its plan.
        self._by_plan = {
            form: candidate
            for candidate in self._candidates
            if (plan := candidate.plan) is not None
            for form in (plan, plan.deterministic())
        }
        gains = {
            candidate.group: tree_gain(plan.tree_size - 1, plan.steps)
            for candidate in self._candidates
            if (plan := candidate.plan) is not None
        }
        depth = max((plan.steps for plan in plans), default=0)
        self._acceptance = AcceptanceModel(gains, depth)
        self._costs = CostModel(costs, [candidate.name for candidate in self._candidates])
        self._allowance = 0.0
        self._current = self._plain
        self._after_plain = False
        self._counts = _Counts()
        self._batch = 1
        self._outlook: dict[str, tuple[Forecast, float]] = {}

    def next_plan(self, room: int, batch: int) -> DraftPlan | None:
        """The plan of the next round, or None for a plain step.

        `room` is how many tokens the sequence with the least room may still get, `batch` the number of sequences. Only
        plans that cannot emit more than `room` tokens are considered.
        """
        if batch != self._batch or not self._outlook:
            self._batch = batch
            self._outlook = self._look_ahead()
        possible = [candidate for candidate in self._candidates if candidate.steps < max(1, room)]
        best = max(possible, key=self._rate)
        if self._current in possible and self._rate(self._current) * (1.0 + SWITCHING_GAIN) >= self._rate(best):
            best = self._current
        self._current = best
        tried = self._worth_trying(possible)
        if tried is None:
            return best.plan
        self._counts.explored += 1
        return tried.plan

    def record(self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float) -> None:
        """Take notice of a finished round: tokens emitted by each active sequence (at least 1), and its time."""
        candidate = self._plain if plan is None else self._by_plan[plan]
        batch = max(1, len(emitted))
        seconds = min(seconds, _LARGEST_COST_RATIO * self._costs.seconds(candidate.name, batch))
        # What a try lost is paid, and what it won may be spent on further tries.
        self._allowance += EXPLORATION_SHARE * seconds
        if candidate is not self._current and self._outlook:
            self._allowance -= seconds - sum(emitted) / self._rate(self._current)
        self._allowance = min(
            self._allowance, 2.0 * max(self._costs.seconds(name, batch) for name in self._costs.names)
        )
        # The first round after plain steps also drafts for the tokens that these skipped.
        if plan is None or not self._after_plain:
            self._costs.record(candidate.name, batch, seconds)
        if plan is None:
            self._acceptance.record_plain()
        else:
            self._acceptance.record(candidate.group, candidate.steps, emitted)
        self._after_plain = plan is None
        self._counts.rounds[candidate.name] = self._counts.rounds.get(candidate.name, 0) + 1
        self._outlook = {}

    def report(self) -> DraftingReport:
        """What was chosen for the latest batch size, and the figures behind it."""
        outlook = self._look_ahead()
        forecasts = [outlook[candidate.name][0] for candidate in self._candidates]
        acceptance = {
            group: [mean for mean, _ in estimates] for group, estimates in self._acceptance.estimates().items()
        }
        return DraftingReport(
            chosen=self._current.name,
            reason=self._reason(outlook),
            rounds=dict(self._counts.rounds),
            explored=self._counts.explored,
            acceptance=acceptance,
            forecasts=sorted(forecasts, key=lambda forecast: -forecast.tokens_per_second),
        )

    def _look_ahead(self) -> dict[str, tuple[Forecast, float]]:
        """For each configuration its forecast, and the tokens per second that an optimist would hope for."""
        estimates = self._acceptance.estimates()
        found = {}
        for candidate in self._candidates:
            seconds = self._costs.seconds(candidate.name, self._batch)
            depths = estimates.get(candidate.group, [])
            tokens = expected_tokens(depths, candidate.steps)
            hope = self._batch * expected_tokens(depths, candidate.steps, OPTIMISM) / seconds
            found[candidate.name] = (Forecast(candidate.name, tokens, seconds, self._batch * tokens / seconds), hope)
        return found

    def _rate(self, candidate: Candidate) -> float:
        return self._outlook[candidate.name][0].tokens_per_second

    def _worth_trying(self, possible: Sequence[Candidate]) -> Candidate | None:
        """A candidate that could turn out faster than the current one, where the allowance pays for a failure."""
        rate = self._rate(self._current)
        others = [candidate for candidate in possible if candidate.plan is not None and candidate is not self._current]
        if not others:
            return None
        forecast, hope = max((self._outlook[candidate.name] for candidate in others), key=lambda found: found[1])
        if hope <= rate or forecast.seconds - self._batch / rate > self._allowance:
            return None
        return next(candidate for candidate in others if candidate.name == forecast.name)

    def _reason(self, outlook: Mapping[str, tuple[Forecast, float]]) -> str:
        chosen, plain = outlook[self._current.name][0], outlook[PLAIN][0]
        drafts = [outlook[candidate.name][0] for candidate in self._candidates if candidate.plan is not None]
        if self._current is not self._plain:
            return f"{chosen.name}: {_figures(chosen)}; {PLAIN}: {_figures(plain)}"
        if not drafts:
            return "there is no drafting configuration"
        best = max(drafts, key=lambda forecast: forecast.tokens_per_second)
        return f"{PLAIN}: {_figures(plain)}; the best draft, {best.name}: {_figures(best)}"


def _figures(forecast: Forecast) -> str:
    return (
        f"{forecast.tokens:.2f} tokens in {forecast.seconds * 1000:.2f} ms, {forecast.tokens_per_second:.0f} tokens/s"
    )
