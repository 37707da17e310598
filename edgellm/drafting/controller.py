"""Adapts drafting to what rounds cost on this device and to how much of the draft the text lets through.

Of the captured configurations (chains of several lengths, trees of several sizes, no draft) the controller picks the
one with the most tokens per second. With R tokens per second in reach, a configuration is worth E - R * C: its expected
tokens less what its time would have given otherwise; so a further node pays while its probability of being reached is
at least R times the time it adds. Choices follow from finished rounds alone, never from a draft that is under way, so
they cannot bias the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edgellm.drafting.acceptance import AcceptanceModel, expected_tokens, tree_gain
from edgellm.drafting.choosers import Ready
from edgellm.drafting.costs import PLAIN, RoundCosts
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, tree

if TYPE_CHECKING:
    from edgellm.drafting.config import DraftingConfig
    from edgellm.engines.model.limits import EngineLimits


#: Lengths of the chains that compete with a longer one. A chain of 1 costs one and a half to two plain
#: steps, for two tokens at most: a chain of 2 or no draft is better.
CHAIN_LENGTHS = (2, 3, 5, 8, 12)
#: Verified nodes (which engines exist for) and levels of the trees that compete with a larger one.
SMALL_TREES = ((8, 3), (16, 4), (32, 5))
#: The share of the time that may be lost by trying configurations that do not look best.
EXPLORATION_SHARE = 0.02
#: The share of a round that a try counts as losing at least: what looks nearly as good need not be tried all the time.
LEAST_LOSS = 0.1
#: What looks best must be this much better than what is in use.
SWITCHING_GAIN = 0.02


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


class DraftingController:
    """Picks the drafting configuration of each round among `plans` and plain decoding.

    `costs` must know every plan's name and "plain" (`edgellm.drafting.costs.PLAIN`); `costs_are_wrong` is called, once,
    when finished rounds have shown them to be wrong by far. Deterministic: the same calls give the same choices.
    """

    def __init__(
        self, plans: Sequence[DraftPlan], costs: RoundCosts, costs_are_wrong: Callable[[], None] | None = None
    ) -> None:
        self.plans: Sequence[DraftPlan] = tuple(plans)
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
        self._costs_are_wrong = costs_are_wrong
        self._current = self._plain
        self._unused = {candidate.name: 0.0 for candidate in self._candidates}
        self._rounds: dict[str, int] = {}
        self._explored = 0
        self._batch = 1
        self._outlook: dict[str, Forecast] = {}

    def next_plan(self, room: int, batch: int, ready: Ready = None) -> DraftPlan | None:
        """The plan of the next round, or None for a plain step.

        `room` is how many tokens the sequence with the least room may still get, `batch` the number of sequences. Only
        plans that are `ready` and cannot emit more than `room` tokens are considered.
        """
        possible, best = self._best(room, batch, ready)
        self._current = best
        tried = self._worth_trying(possible)
        if tried is None:
            return best.plan
        self._explored += 1
        self._unused[tried.name] = 0.0  # one try at a time, also where the next round is launched before it is read
        return tried.plan

    def likely(self, room: int, batch: int) -> DraftPlan | None:
        """What `next_plan` would give now, tries aside; nothing is noted."""
        return self._best(room, batch, None)[1].plan

    def plain_seconds(self, batch: int) -> float | None:
        """What a plain step should take."""
        return self._costs.seconds(PLAIN, batch)

    def _best(self, room: int, batch: int, ready: Ready) -> tuple[list[Candidate], Candidate]:
        """The candidates that are ready and for which there is room, and what looks best of them."""
        if batch != self._batch or not self._outlook:
            self._batch = batch
            self._outlook = self._look_ahead()
        possible = [
            candidate
            for candidate in self._candidates
            if candidate.steps < max(1, room) and (ready is None or candidate.plan is None or ready(candidate.plan))
        ]
        best = max(possible, key=self._rate)
        if self._current in possible and self._rate(self._current) * (1.0 + SWITCHING_GAIN) >= self._rate(best):
            best = self._current
        return possible, best

    def record(self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float) -> None:
        """Take notice of a finished round: tokens emitted by each active sequence (at least 1), and its time."""
        candidate = self._plain if plan is None else self._by_plan[plan]
        self._costs.record(candidate.name, len(emitted), seconds)
        if self._costs_are_wrong is not None and self._costs.contradicted:
            self._costs_are_wrong()
            self._costs_are_wrong = None
        if plan is None:
            self._acceptance.age()
        else:
            self._acceptance.record(candidate.group, candidate.steps, emitted)
        for name in self._unused:
            self._unused[name] += seconds
        self._unused[candidate.name] = 0.0
        self._rounds[candidate.name] = self._rounds.get(candidate.name, 0) + 1
        self._outlook = {}

    def report(self) -> DraftingReport:
        """What was chosen for the latest batch size, and the figures behind it."""
        outlook = self._look_ahead()
        return DraftingReport(
            chosen=self._current.name,
            reason=self._reason(outlook),
            rounds=dict(self._rounds),
            explored=self._explored,
            acceptance=self._acceptance.estimates(),
            forecasts=sorted(outlook.values(), key=lambda forecast: -forecast.tokens_per_second),
        )

    def _look_ahead(self) -> dict[str, Forecast]:
        """The forecast for each configuration."""
        estimates = self._acceptance.estimates()
        found = {}
        for candidate in self._candidates:
            seconds = self._costs.seconds(candidate.name, self._batch)
            tokens = expected_tokens(estimates.get(candidate.group, [])[: candidate.steps])
            found[candidate.name] = Forecast(candidate.name, tokens, seconds, self._batch * tokens / seconds)
        return found

    def _rate(self, candidate: Candidate) -> float:
        return self._outlook[candidate.name].tokens_per_second

    def _worth_trying(self, possible: Sequence[Candidate]) -> Candidate | None:
        """A candidate whose share of the time without it has grown to what a round of it should lose.

        While decoding plainly all draft configurations save together, for the cheapest.
        """
        rate = self._rate(self._current)
        drafts = [candidate for candidate in self._candidates if candidate.plan is not None]
        undrafted = min((self._unused[candidate.name] for candidate in drafts), default=0.0)

        def credit(candidate: Candidate) -> float:
            forecast = self._outlook[candidate.name]
            loss = forecast.seconds * max(LEAST_LOSS, 1.0 - forecast.tokens_per_second / rate)
            saved = undrafted if self._current is self._plain else self._unused[candidate.name] / len(drafts)
            return EXPLORATION_SHARE * saved - loss

        others = [candidate for candidate in possible if candidate is not self._current]
        tried = max(others, key=credit, default=None)
        return tried if tried is not None and credit(tried) > 0.0 else None

    def _reason(self, outlook: Mapping[str, Forecast]) -> str:
        chosen, plain = outlook[self._current.name], outlook[PLAIN]
        drafts = [outlook[candidate.name] for candidate in self._candidates if candidate.plan is not None]
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


#: Standard deviations of logarithms: how far the load of the machine and a measured cost may be from what was measured,
LOAD_DOUBT = 1.0
COST_DOUBT = 0.3
#: how far they move from one round to the next,
LOAD_DRIFT = 0.1
COST_DRIFT = 0.01
#: and how much rounds alike differ.
ROUND_NOISE = 0.15
#: No round counts as slower or faster than expected by more than this factor: it was interrupted.
LARGEST_SURPRISE = 2.0
#: A measured cost is wrong by far where its ratio to the first one turns out to be another by this factor, once the
#: doubt about that is down to `SURE`.
WRONG_COST = 1.5
SURE = 0.15


class CostModel:
    """Seconds of a round of each configuration in `names`.

    The logarithm of what a round takes over what was measured is the sum of the load of the machine (other work,
    clocks, length of the context), which all configurations share and which changes quickly, and of the
    configuration's own correction. Both follow finished rounds by a Kalman filter: what a round takes longer than
    expected counts as load until rounds of other configurations say otherwise.
    """

    def __init__(self, costs: RoundCosts, names: Sequence[str]) -> None:
        self._costs = costs
        self._index = {name: index for index, name in enumerate(names, 1)}
        # State 0 is the load, the others are the configurations' own corrections.
        self._logs = np.zeros(1 + len(names))
        self._covariance = np.diag([LOAD_DOUBT**2, *[COST_DOUBT**2] * len(names)])
        self._drift = np.diag([LOAD_DRIFT**2, *[COST_DRIFT**2] * len(names)])

    def seconds(self, name: str, batch: int) -> float:
        """The expected time of a round."""
        return self._costs.seconds(name, batch) * math.exp(self._logs[0] + self._logs[self._index[name]])

    def record(self, name: str, batch: int, seconds: float) -> None:
        """Take notice of a finished round."""
        surprise = math.log(max(seconds, 1e-9) / self.seconds(name, batch))
        limit = math.log(LARGEST_SURPRISE)
        self._covariance += self._drift
        shared = self._covariance[0] + self._covariance[self._index[name]]
        gain = shared / (shared[0] + shared[self._index[name]] + ROUND_NOISE**2)
        self._logs += gain * max(-limit, min(limit, surprise))
        self._covariance -= np.outer(gain, shared)

    @property
    def contradicted(self) -> bool:
        """Whether rounds have shown a measured cost to be wrong by far, relative to that of the first of `names`."""
        own, covariance = self._logs[1:], self._covariance[1:, 1:]
        doubt = np.diag(covariance) + covariance[0, 0] - 2.0 * covariance[0]
        return bool(np.any((np.abs(own - own[0]) > math.log(WRONG_COST)) & (doubt < SURE**2)))
