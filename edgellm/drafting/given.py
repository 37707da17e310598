"""Drafts without a model: tokens that rules force, and what followed the last time that these tokens were said.

They cost the host some microseconds, and the device the verification alone. A round of them, or of them beside a draft
model's in one tree, is taken where it is expected to give more tokens a second than what is done otherwise. What
candidates promise follows from the tokens that came, whichever step gave them; what rounds cost from finished ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from edgellm.drafting.choosers import PlanChooser
from edgellm.drafting.controller import DraftingReport, Forecast
from edgellm.drafting.costs import PLAIN
from edgellm.drafting.worth import ASKING_SHARE, WAITED, Budget, Proposed, Rates, Trust, rate_name
from edgellm.engines.errors import ConstraintError
from edgellm.engines.speculation.constraints import TokenConstraint
from edgellm.engines.speculation.draft_plan import DraftPlan, given
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.suffix_index import Proposal

#: Nodes of the trees, the root included: where every shape is captured, and where any is computed at once.
CAPTURED_TREES, COMPUTED_TREES = (4, 8, 16, 32), (3, 5, 8, 12, 16, 24, 32)
#: A first guess of a round's time over a plain step's: of the round, and of each of its tokens.
CAPTURED_COST, COMPUTED_COST = (1.1, 0.005), (1.4, 0.07)
#: The most given candidates of joint trees, and a first guess of what each adds to the draft model's rounds.
CAPTURED_JOINT, COMPUTED_JOINT = (7,), (3, 7)
CAPTURED_JOINT_COST, COMPUTED_JOINT_COST = 0.005, 0.03
#: Rounds of a tree that are not timed: the first loads code, the second captures a graph.
CAPTURED_WARM_UPS, COMPUTED_WARM_UPS = 2, 1
#: The most candidates below one token.
WIDTH = 3
#: A round must promise so many times the tokens a second of what is done otherwise.
GAIN = 1.15
#: So many times, of a joint round: where the given candidates do not come it still gives what the draft model proposes.
JOINT_GAIN = 1.05
#: After so many rounds one step is taken without, so that what they are compared with stays known as load changes.
MOST_ROUNDS = 50
#: How quickly the share of steps under rules that could have been rounds follows what is seen.
_PACE = 0.1
#: Where what the index proposed was not worth a round, it is asked again after so many tokens at the most.
MOST_PATIENCE = 15
#: How likely a forced token is: the text is forced, but other tokens may spell it.
FORCED_CHANCE = 0.97


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
    are captured. What `chooser` would take of a draft model is joined with given candidates in one tree of at most
    `most_nodes`. Deterministic but for the seconds that it is told.
    """

    def __init__(
        self,
        deepest: int,
        captured: bool,
        index: Proposer | None = None,
        chooser: PlanChooser | None = None,
        most_nodes: int = 0,
    ) -> None:
        self.index, self._chooser = index, chooser
        counts = CAPTURED_JOINT if captured else COMPUTED_JOINT
        self._joint_cost = CAPTURED_JOINT_COST if captured else COMPUTED_JOINT_COST
        self._joined: Callable[[DraftPlan], tuple[DraftPlan, ...]] = cache(
            lambda plan: tuple(plan.joined(count, min(count, deepest), most_nodes) for count in counts)
        )
        sizes = CAPTURED_TREES if captured else COMPUTED_TREES
        self.plans = tuple(given(nodes - 1, min(nodes - 1, deepest)) for nodes in sizes)
        self._first_cost, self._warm_ups = (
            (CAPTURED_COST, CAPTURED_WARM_UPS) if captured else (COMPUTED_COST, COMPUTED_WARM_UPS)
        )
        self._untimed = CAPTURED_WARM_UPS if captured else 0  # plain steps
        self._rates: dict[tuple[int, bool], Rates] = {}
        self._trust, self._budget = Trust(), Budget()
        self._lessons: list[tuple[Proposed, Sequence[int]]] = []  # learned when the next step is under way
        self._rounds: dict[str, int] = {}
        self._steps: dict[tuple[int, bool], int] = {}
        self._latest: tuple[Forecast, Forecast] | None = None
        #: Under rules: how often a round was best, behind a plain step and behind a round; whether the latest step was
        #: one; and whether it could have been, but had begun as a plain one.
        self._shares, self._was_round, self._missed = [0.5, 0.5], False, False

    @property
    def joint_plans(self) -> list[DraftPlan]:
        """The joint plans of all that the draft model may propose."""
        own = () if self._chooser is None else self._chooser.plans
        return [plan for each in own for plan in self._joined(each)]

    def open(self, sequence: Drafted, prompt_ids: Sequence[int]) -> None:
        """A sequence begins."""
        if self.index is not None:
            sequence.said = Said(self.index.open(prompt_ids))

    def take(self, sequence: Drafted, tokens: Sequence[int]) -> None:
        """A sequence said these tokens, by whichever step."""
        said = sequence.said
        if said is not None and tokens:
            if said.proposed is not None:
                self._lessons.append((said.proposed, tokens))
            said.news += tokens
            said.proposed = None
            said.quiet -= len(tokens)

    def close(self, sequence: Drafted) -> None:
        """A sequence has ended: later ones may say what it said."""
        said, sequence.said = sequence.said, None
        if said is not None and self.index is not None:
            self._tell(said)
            self.index.close(said.history)

    def choose(
        self, runner: Runs, sequences: Sequence[Drafted], room: int, begun: bool = False
    ) -> tuple[DraftPlan, list[GivenTree]] | None:
        """The best round of given candidates for sequences in the leading slots, all of whose tokens are known and none
        of which takes more than `room` tokens; None where something else is better, there is nothing to propose, or a
        plain step has `begun`."""
        ruled = any(sequence.constraint is not None for sequence in sequences)
        if not ruled and (self.index is None or not self._budget.affords):
            return None
        found, best = self._asked(runner, sequences, room, ruled, not begun)
        if ruled:
            self._shares[self._was_round] += _PACE * ((best is not None) - self._shares[self._was_round])
            self._was_round, self._missed = best is not None and not begun, best is not None and begun
        return None if best is None or begun else (best, [_cut(each.tree, best) for each in found])

    def expects_round(self, batch: int, waits: float) -> bool:
        """Whether a round is so likely to be the next step under rules that nothing should begin before the host knows
        the tokens under way, though the device `waits` so many seconds for it then. A plain step that begins in a
        round's place draws the first token of what would have been given; the rest is given in the step behind it."""
        rates = self._rates.get((batch, True))
        if self._missed or rates is None:
            return self._missed
        share = 0.0 if rates.rounds >= MOST_ROUNDS else self._shares[self._was_round]
        return share * rates.seconds(PLAIN) > (1.0 - share) * waits

    def promises(self, runner: Runs, sequences: Sequence[Drafted], room: int) -> bool:
        """Whether a round of what is proposed now would be taken, so that the tokens under way are worth waiting for:
        what follows them is mostly as likely."""
        if self.index is None or not self._budget.affords:
            return False
        return self._asked(runner, sequences, room, False, False)[1] is not None

    def _asked(
        self, runner: Runs, sequences: Sequence[Drafted], room: int, ruled: bool, waited: bool
    ) -> tuple[list[Proposed], DraftPlan | None]:
        """What is proposed for each sequence, and the best round of it where the device has `waited` for the host, or
        would have to."""
        began = time.perf_counter()
        found = [self._proposed(sequence, room - 1) for sequence in sequences]
        best = self._best(runner, found, ruled, room, waited)
        if best is None:
            self._ask_less(sequences, found)
        else:
            for sequence in sequences:
                if sequence.said is not None:
                    sequence.said.patience = 0
        if not ruled:
            self._budget.spend(time.perf_counter() - began)
        return found, best

    def record(
        self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float, ruled: bool = False, waited: bool = False
    ) -> None:
        """A step has ended that gave each running sequence so many tokens, under rules or not; see
        `PlanChooser.record`. `waited` says whether the device did until the host had chosen it."""
        for lesson in self._lessons:
            self._trust.learn(*lesson)
        self._lessons.clear()
        taken = plan if plan is not None and plan.takes_given else None
        name = PLAIN if taken is None else taken.name
        self._rounds[name] = self._rounds.get(name, 0) + 1
        key, saved = (len(emitted), ruled), 0.0
        rates = self._rates.get(key)
        if rates is not None:
            if taken is not None:
                saved = max(0.0, sum(emitted) * rates.seconds(PLAIN) / rates.tokens - seconds)
            rates.record(taken, emitted, seconds, waited)
        elif taken is None:
            self._steps[key] = self._steps.get(key, 0) + 1
            if self._steps[key] > self._untimed:
                self._rates[key] = Rates(self._guesses(len(emitted), seconds), sum(emitted), self._warm_ups)
        self._budget.earn(ASKING_SHARE * seconds + saved)

    def report(self) -> DraftingReport:
        """What was chosen so far, and the forecasts of the latest choice between a round and what is done otherwise."""
        forecasts = sorted(self._latest or (), key=lambda forecast: -forecast.tokens_per_second)
        words = [f"{each.name}: {each.tokens:.2f} tokens in {each.seconds * 1000:.2f} ms" for each in forecasts]
        reason = "; ".join(words) or "nothing was said before"
        chosen = forecasts[0].name if forecasts else "plain"
        return DraftingReport(chosen, reason, dict(self._rounds), 0, self._trust.shares(), forecasts)

    def _best(self, runner: Runs, found: Sequence[Proposed], ruled: bool, room: int, waited: bool) -> DraftPlan | None:
        batch, longest = len(found), max(len(each.chances) for each in found)
        rates = self._rates.get((batch, ruled))
        if not longest or rates is None or rates.rounds >= MOST_ROUNDS:
            return None
        beside = None if self._chooser is None else self._chooser.likely(room, batch)
        other = rates.other(waited)  # a draft model's rounds count here, too
        best, forecast, ahead = None, other, -math.inf
        for plans, gain in ((self.plans, GAIN), (() if beside is None else self._joined(beside), JOINT_GAIN)):
            for plan in plans:
                if plan.longest <= room:
                    tokens = self._expected(plan, found, rates)
                    seconds = rates.seconds(rate_name(plan))
                    margin = tokens / seconds - gain * other.tokens_per_second
                    if margin > ahead and runner.takes_given(batch, plan):
                        best, forecast, ahead = plan, Forecast(plan.name, tokens, seconds, tokens / seconds), margin
                if longest <= plan.given_nodes:
                    break
        if best is None:
            return None
        self._latest = other, forecast
        if best.is_joint:
            rates.promise(forecast.tokens)
        return best if ahead > 0.0 else None

    @staticmethod
    def _expected(plan: DraftPlan, found: Sequence[Proposed], rates: Rates) -> float:
        """The tokens that a round of the plan should give all sequences."""
        if plan.is_joint:
            return rates.joined(plan, found)
        return len(found) + sum([each.expected(plan.given_nodes) for each in found])

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
            return Proposed.of(_chain(forced, True), [FORCED_CHANCE**depth for depth in range(len(forced))])
        if said is None or self.index is None:
            return _NOTHING
        if said.proposed is None:
            if said.quiet > 0:
                return _NOTHING
            self._tell(said)
            largest = self.plans[-1]
            proposal = self.index.propose(said.history, largest.top_k, largest.steps, WIDTH)
            said.proposed = self._trust.weighed(proposal if constraint is None else _allowed(constraint, proposal))
        return said.proposed

    def _ask_less(self, sequences: Sequence[Drafted], found: Sequence[Proposed]) -> None:
        """What the index proposed was not worth a round: let more and more tokens go before it is asked again."""
        for sequence, proposed in zip(sequences, found, strict=True):
            said = sequence.said
            if said is not None and said.proposed is proposed and said.quiet <= 0:
                said.patience = min(2 * said.patience + 1, MOST_PATIENCE)
                said.quiet = said.patience

    def _tell(self, said: Said) -> None:
        """Let the index know the tokens that it does not know yet."""
        if said.news and self.index is not None:
            self.index.extend(said.history, said.news)
            said.news = []

    def _guesses(self, batch: int, seconds: float) -> Mapping[str, float]:
        """Seconds of the steps of a batch, one of which took `seconds`, before rounds were timed: those of given
        candidates alone need no draft model, and cost what plain steps do."""
        once, each = self._first_cost
        plain = (None if self._chooser is None else self._chooser.plain_seconds(batch)) or seconds
        guessed = {PLAIN: seconds, WAITED: seconds}
        guessed |= {rate_name(plan): plain * (once + each * batch * plan.tree_size) for plan in self.plans}
        return guessed | {
            rate_name(plan): seconds * (1.0 + self._joint_cost * batch * plan.given_nodes) for plan in self.joint_plans
        }


class Said:
    """What is kept of a running sequence: its `history` in the index, the `news` that it does not know yet, and what
    was `proposed` for its end."""

    def __init__(self, history: Any) -> None:
        self.history = history
        self.news: list[int] = []
        self.proposed: Proposed | None = None
        #: How many tokens are let go after it was asked in vain, and how many of these are to come.
        self.patience = self.quiet = 0


def _chain(tokens: Sequence[int], leads: bool = False) -> GivenTree:
    return GivenTree(tokens, range(-1, len(tokens) - 1), leads)


_NOTHING = Proposed.of(_chain([]), [])


def _cut(tree: GivenTree, plan: DraftPlan) -> GivenTree:
    """The first candidates of a tree, as far as a plan has places for them: it has the levels then, too."""
    return GivenTree(tree.tokens[: plan.given_nodes], tree.parents[: plan.given_nodes], tree.leads)


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
