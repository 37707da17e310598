"""Drafts without a model: tokens that rules force, and what followed the last time that these tokens were said.

They cost the host some microseconds, and the device the verification alone. A round of them is taken where it is
expected to give more tokens a second than what is done otherwise. What candidates promise follows from the tokens that
came, whichever step gave them; what rounds cost follows from finished ones.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from edgellm.drafting.controller import CostModel, DraftingReport, Forecast
from edgellm.drafting.costs import PLAIN, RoundCosts
from edgellm.engines.errors import ConstraintError
from edgellm.engines.speculation.constraints import TokenConstraint
from edgellm.engines.speculation.draft_plan import DraftPlan, given
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.suffix_index import Proposal

#: Nodes of the trees, the root included: where every shape is captured, and where any is computed at once.
CAPTURED_TREES, COMPUTED_TREES = (4, 8, 16, 32), (3, 5, 8, 12, 16, 24, 32)
#: A first guess of a round's time over a plain step's: of the round, and of each of its tokens.
CAPTURED_COST, COMPUTED_COST = (1.1, 0.005), (1.4, 0.07)
#: Rounds of a tree that are not timed: the first loads code, the second captures a graph.
CAPTURED_WARM_UPS, COMPUTED_WARM_UPS = 2, 1
#: The most candidates below one token.
WIDTH = 3
#: A round must promise so many times the tokens a second of what is done otherwise.
GAIN = 1.15
#: After so many rounds one step is taken without, so that what they are compared with stays known as load changes.
MOST_ROUNDS = 50
#: How likely a forced token is: the text is forced, but other tokens may spell it.
FORCED_CHANCE = 0.97
#: How quickly the tokens of other steps follow what is seen.
_PACE = 0.15


class Drafted(Protocol):
    """A sequence that is drafted for; `said` is what `GivenDrafting` keeps of it."""

    said: Said | None
    is_over: bool

    @property
    def constraint(self) -> TokenConstraint | None:
        """The rules on its next token."""

    @property
    def finished(self) -> bool:
        """Whether its answer has ended, or failed."""


class Runs(Protocol):
    """The runner, as far as it matters here."""

    def takes_given(self, batch: int, plan: DraftPlan) -> bool:
        """Whether a round of the plan can run now."""


class Proposer(Protocol):
    """Proposes what may follow a sequence that it knows: `SuffixIndex`, which says what each of these does."""

    def open(self, prompt_tokens: Sequence[int]) -> Any:
        """A sequence with this prompt."""

    def extend(self, sequence: Any, tokens: Sequence[int]) -> None:
        """Take note of its tokens."""

    def close(self, sequence: Any) -> None:
        """It has ended."""

    def propose(self, sequence: Any, nodes: int, depth: int, width: int) -> Proposal:
        """A tree of what may follow."""


class GivenDrafting:
    """Proposes what the host knows, and chooses between rounds of it and what is done otherwise.

    Tokens that rules force are always proposed; an `index` of what was said is asked where there is one. `deepest` is
    the most candidates that the engines take one after the other, `captured` whether they take only some shapes, which
    are captured. Deterministic but for the seconds that it is told.
    """

    def __init__(self, deepest: int, captured: bool, index: Proposer | None = None) -> None:
        self.index = index
        sizes = CAPTURED_TREES if captured else COMPUTED_TREES
        self.plans = tuple(given(nodes - 1, min(nodes - 1, deepest)) for nodes in sizes)
        self._first_cost, self._warm_ups = (
            (CAPTURED_COST, CAPTURED_WARM_UPS) if captured else (COMPUTED_COST, COMPUTED_WARM_UPS)
        )
        self._rates: dict[tuple[int, bool], _Rates] = {}
        self._trust = _Trust()
        self._rounds: dict[str, int] = {}
        self._latest: tuple[Forecast, Forecast] | None = None

    def open(self, sequence: Drafted, prompt_ids: Sequence[int]) -> None:
        """A sequence begins."""
        if self.index is not None:
            sequence.said = Said(self.index.open(prompt_ids))

    def take(self, sequence: Drafted, tokens: Sequence[int]) -> None:
        """A sequence said these tokens, by whichever step."""
        said = sequence.said
        if said is not None and self.index is not None and tokens:
            if said.proposed is not None:
                self._trust.learn(said.proposed, tokens)
            self.index.extend(said.history, tokens)
            said.proposed = None

    def close(self, sequence: Drafted) -> None:
        """A sequence has ended: later ones may say what it said."""
        said, sequence.said = sequence.said, None
        if said is not None and self.index is not None:
            self.index.close(said.history)

    def choose(self, runner: Runs, sequences: Sequence[Drafted], room: int) -> tuple[DraftPlan, list[GivenTree]] | None:
        """The best round of given candidates for sequences in the leading slots, all of whose tokens are known and none
        of which takes more than `room` tokens; None where something else is better, or there is nothing to propose."""
        found = [self._proposed(sequence, room - 1) for sequence in sequences]
        best = self._best(runner, found, any(sequence.constraint is not None for sequence in sequences), room)
        return None if best is None else (best, [_cut(each.tree, best) for each in found])

    def promises(self, runner: Runs, sequences: Sequence[Drafted], room: int) -> bool:
        """Whether a round of what is proposed now would be taken, so that the tokens under way are worth waiting for:
        what follows them is mostly as likely."""
        if self.index is None:
            return False
        found = [self._proposed(sequence, room - 1) for sequence in sequences]
        return self._best(runner, found, False, room) is not None

    def record(self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float, ruled: bool = False) -> None:
        """A step has ended that gave each running sequence so many tokens, under rules or not; see
        `PlanChooser.record`."""
        name = plan.name if plan is not None and plan.is_given else PLAIN
        self._rounds[name] = self._rounds.get(name, 0) + 1
        key = len(emitted), ruled
        if key in self._rates:
            self._rates[key].record(name, sum(emitted), seconds)
        elif name == PLAIN:
            self._rates[key] = _Rates(self._guesses(len(emitted), seconds), sum(emitted), self._warm_ups)

    def report(self) -> DraftingReport:
        """What was chosen so far, and the forecasts of the latest choice between a round and what is done otherwise."""
        forecasts = sorted(self._latest or (), key=lambda forecast: -forecast.tokens_per_second)
        words = [f"{each.name}: {each.tokens:.2f} tokens in {each.seconds * 1000:.2f} ms" for each in forecasts]
        reason = "; ".join(words) or "nothing was said before"
        chosen = forecasts[0].name if forecasts else "plain"
        return DraftingReport(chosen, reason, dict(self._rounds), 0, self._trust.shares(), forecasts)

    def _best(self, runner: Runs, found: Sequence[Proposed], ruled: bool, room: int) -> DraftPlan | None:
        batch, longest = len(found), max(len(each.chances) for each in found)
        rates = self._rates.get((batch, ruled))
        if not longest or rates is None or rates.rounds >= MOST_ROUNDS:
            return None
        other = rates.forecast(PLAIN, rates.tokens)  # a draft model's rounds count here, too
        best, forecast, least = None, None, GAIN * other.tokens_per_second
        for plan in self.plans:
            if plan.longest > room or not runner.takes_given(batch, plan):
                continue
            tokens = batch + sum(float(each.chances[: plan.top_k].sum()) for each in found)
            seen = rates.forecast(plan.name, tokens)
            if forecast is None or seen.tokens_per_second > forecast.tokens_per_second:
                best, forecast = plan, seen
            if longest <= plan.top_k:
                break
        if forecast is None:
            return None
        self._latest = other, forecast
        return best if forecast.tokens_per_second > least else None

    def _proposed(self, sequence: Drafted, most: int) -> Proposed:
        """What may follow the tokens of a sequence that are known, the likeliest first: of what rules force, `most`."""
        constraint, said = sequence.constraint, sequence.said
        if most < 1 or sequence.is_over or sequence.finished:
            return _NOTHING
        forced: list[int] = []
        if constraint is not None:
            try:
                forced = constraint.forced(min(most, self.plans[-1].steps))
            except ConstraintError:
                return _NOTHING  # whoever asks for the mask hears of it
        if forced:
            return Proposed(_chain(forced), FORCED_CHANCE ** np.arange(len(forced)), [], [])
        if said is None or self.index is None:
            return _NOTHING
        if said.proposed is None:
            largest = self.plans[-1]
            proposal = self.index.propose(said.history, largest.top_k, largest.steps, WIDTH)
            said.proposed = self._trust.weighed(proposal if constraint is None else _allowed(constraint, proposal))
        return said.proposed

    def _guesses(self, batch: int, seconds: float) -> Mapping[str, float]:
        """Seconds of the steps of a batch, before rounds were timed."""
        once, each = self._first_cost
        rounds = {plan.name: seconds * (once + each * batch * plan.tree_size) for plan in self.plans}
        return {PLAIN: seconds, **rounds}


class Proposed(NamedTuple):
    """A tree of candidates, the likeliest first, with the probability `chances` [N] that each comes.

    `promises` say for each how likely it is if its parent comes, by the index, and `kinds` which of the counts of
    `_Trust` it belongs to; both are empty where the index was not asked.
    """

    tree: GivenTree
    chances: np.ndarray
    promises: Sequence[float]
    kinds: Sequence[int]


class Said:
    """What is kept of a running sequence: its `history` in the index, and what was `proposed` for its end."""

    def __init__(self, history: Any) -> None:
        self.history = history
        self.proposed: Proposed | None = None


class _Trust:
    """How often candidates came whose parent had come, over what the index promised: by the promise, and by how much
    was found again. Recent ones count most."""

    #: Where the kinds begin, by promise and by the length of the match; what each kind comes at over its promise
    #: before anything was seen; and for how many promised tokens this first guess counts, and what was seen at most.
    PROMISES, MATCHES = (0.0, 0.35, 0.6, 0.8), (0, 8)
    FIRST = (0.5, 0.7, 0.85, 0.95)
    FIRST_EVIDENCE, MEMORY = 6.0, 64.0
    MOST = 0.99

    def __init__(self) -> None:
        kinds = len(self.PROMISES) * len(self.MATCHES)
        self._promised, self._came = [0.0] * kinds, [0.0] * kinds

    def weighed(self, proposal: Proposal) -> Proposed:
        """A proposal with the probabilities that were seen in place of those that the index promises."""
        tokens, parents, scores = proposal.tokens.tolist(), proposal.parents.tolist(), proposal.scores.tolist()
        first = len(self.PROMISES) * (sum(proposal.match >= least for least in self.MATCHES) - 1)
        ratios = self._ratios()
        chances: list[float] = []
        promises: list[float] = []
        kinds: list[int] = []
        for parent, score in zip(parents, scores, strict=True):
            promise = math.exp(score - (scores[parent] if parent >= 0 else 0.0))
            kind = first + bisect_right(self.PROMISES, promise) - 1
            chance = min(self.MOST, promise * ratios[kind])
            chances.append(chance * (chances[parent] if parent >= 0 else 1.0))
            promises.append(promise)
            kinds.append(kind)
        return Proposed(GivenTree(tokens, parents), np.array(chances), promises, kinds)

    def learn(self, proposed: Proposed, tokens: Sequence[int]) -> None:
        """Take note of the tokens that came where a tree was proposed."""
        if not proposed.kinds:
            return
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(proposed.tree.parents):
            children.setdefault(int(parent), []).append(node)
        place = -1
        for token in tokens:
            following = None
            for node in children.get(place, ()):
                kind, came = proposed.kinds[node], proposed.tree.tokens[node] == token
                fading = min(1.0, self.MEMORY / (self._promised[kind] + 1.0))
                self._promised[kind] = fading * self._promised[kind] + proposed.promises[node]
                self._came[kind] = fading * self._came[kind] + came
                following = node if came else following
            if following is None:
                return
            place = following

    def shares(self) -> dict[str, list[float]]:
        """By the kind of match, the ratio for each kind of promise."""
        ratios, size = self._ratios(), len(self.PROMISES)
        return {
            f"match of {least} or more": ratios[size * row : size * (row + 1)] for row, least in enumerate(self.MATCHES)
        }

    def _ratios(self) -> list[float]:
        first = self.FIRST * len(self.MATCHES)
        return [
            (came + self.FIRST_EVIDENCE * guess) / (promised + self.FIRST_EVIDENCE)
            for came, promised, guess in zip(self._came, self._promised, first, strict=True)
        ]


class _Rates:
    """What the steps of one batch size take, the `tokens` that those without given candidates give, and how many
    `rounds` were taken since the latest of these."""

    def __init__(self, guesses: Mapping[str, float], tokens: float, warm_ups: int) -> None:
        self.tokens, self.rounds = tokens, 0
        self._costs = CostModel(RoundCosts({name: {1: value} for name, value in guesses.items()}), list(guesses))
        self._warm_ups = {name: 0 if name == PLAIN else warm_ups for name in guesses}

    def record(self, name: str, tokens: int, seconds: float) -> None:
        """A step has ended."""
        self.rounds = 0 if name == PLAIN else self.rounds + 1
        if self._warm_ups[name]:
            self._warm_ups[name] -= 1
            return
        self._costs.record(name, 1, seconds)
        if name == PLAIN:
            self.tokens += _PACE * (tokens - self.tokens)

    def forecast(self, name: str, tokens: float) -> Forecast:
        """What a step should give that is expected to give so many tokens."""
        seconds = self._costs.seconds(name, 1)
        return Forecast(name, tokens, seconds, tokens / seconds)


def _chain(tokens: Sequence[int]) -> GivenTree:
    return GivenTree(tokens, range(-1, len(tokens) - 1))


_NOTHING = Proposed(_chain([]), np.zeros(0), [], [])


def _cut(tree: GivenTree, plan: DraftPlan) -> GivenTree:
    """The first candidates of a tree, as far as a plan has places and levels for them."""
    depths: list[int] = []
    places: dict[int, int] = {-1: -1}
    tokens: list[int] = []
    parents: list[int] = []
    for number, (token, parent) in enumerate(zip(tree.tokens[: plan.top_k], tree.parents[: plan.top_k], strict=True)):
        above = places.get(int(parent))
        if above is None or (above >= 0 and depths[above] >= plan.steps):
            continue
        places[number] = len(tokens)
        depths.append(1 if above < 0 else depths[above] + 1)
        tokens.append(int(token))
        parents.append(above)
    return GivenTree(tokens, parents)


def _allowed(constraint: TokenConstraint, found: Proposal) -> Proposal:
    """What rules allow of a proposal: the likeliest path alone, since a chain is tried at the least cost."""
    path: list[int] = []
    try:
        for node, parent in enumerate(found.parents.tolist()):
            if parent == (path[-1] if path else -1) and constraint.try_advance(int(found.tokens[node])):
                path.append(node)
    except ConstraintError:
        pass  # the path ends there
    finally:
        constraint.rollback(len(path))
    return Proposal(found.tokens[path], np.arange(-1, len(path) - 1, dtype=np.int32), found.scores[path], found.match)
