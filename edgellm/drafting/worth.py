"""What given candidates are worth: how likely they come, what their rounds take, and what asking for them may take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from edgellm.drafting.controller import Forecast
from edgellm.drafting.costs import PLAIN
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.suffix_index import Proposal

#: What drafting may lose of the time of all steps, and beyond, in plain steps: at first, and at most, where rounds
#: saved time before. A debt is forgotten beyond the last of these.
LOSS_SHARE, FIRST_CREDIT, MOST_CREDIT, MOST_DEBT = 0.01, 16.0, 16.0, 1.0
#: What a round saves over its time, as a first guess.
FIRST_SAVED = 0.5
#: At first as many seconds at least: the first look-ups take much longer than all others.
FIRST_SECONDS = 0.003
#: No round, and no plain step that was waited for, counts as having lost more plain steps: it was interrupted.
MOST_LOSS = 3.0
#: Asking the index for longer than this share of a plain step may have delayed what was to be launched.
DISTURBING = 0.15
#: A plain step before which the device waited for the host: for its tokens, and for it to choose.
WAITED = "waited"
#: How quickly the tokens of other steps follow what is seen, the time of any, that of faster plain ones, and what
#: rounds are worth.
_PACE, _TIME_PACE, _FASTER_PACE, _WORTH_PACE = 0.15, 0.08, 0.2, 0.1
#: A step counts as at most so many times slower or faster than expected.
_SURPRISE = 2.0
#: What joint rounds give at first over what they promise, for how many tokens this first guess counts, and what was
#: seen at most. Both drafts are often right at the same places, so it is less than two that know nothing of each other
#: give.
JOINT_FIRST, JOINT_EVIDENCE, JOINT_MEMORY = 0.95, 16.0, 160.0


def rate_name(plan: DraftPlan) -> str:
    """The name under which the time of a plan of given candidates is kept: joint ones by what is given, whichever plan
    of the draft model's that is beside, since their times follow those of its rounds."""
    return f"joint {plan.given_nodes}" if plan.is_joint else plan.name


class Proposed(NamedTuple):
    """A tree of candidates, the likeliest first, with the probability `chances` of each that it comes, and the `sums`
    of these up to each, with 0 before the first.

    `promises` say for each how likely it is if its parent comes, by the index, and `kinds` which of the counts of
    `Trust` it belongs to; both are empty where the index was not asked.
    """

    tree: GivenTree
    chances: Sequence[float]
    sums: Sequence[float]
    promises: Sequence[float]
    kinds: Sequence[int]

    @classmethod
    def of(
        cls, tree: GivenTree, chances: Sequence[float], promises: Sequence[float] = (), kinds: Sequence[int] = ()
    ) -> Proposed:
        """The values with the sums."""
        return cls(tree, chances, [*accumulate(chances, initial=0.0)], promises, kinds)

    def expected(self, count: int) -> float:
        """How many of the first `count` candidates should come."""
        return self.sums[min(count, len(self.chances))]

    def behind(self, tokens: Sequence[int]) -> Proposed | None:
        """What is left of it behind tokens that came; None where they are not a path of candidates, or nothing is."""
        said, parents = self.tree.tokens, self.tree.parents
        count, place = len(said), -1
        for token in tokens:
            for node in range(place + 1, count):
                if parents[node] == place and said[node] == token:
                    place = node
                    break
            else:
                return None
        kept: list[int] = []
        moved, places = {place: -1}, []
        for node in range(place + 1, count):
            parent = moved.get(int(parents[node]))
            if parent is not None:
                moved[node] = len(kept)
                kept.append(node)
                places.append(parent)
        if not kept:
            return None
        came = self.chances[place]
        return Proposed.of(
            GivenTree([said[node] for node in kept], places),
            [self.chances[node] / came for node in kept],
            [self.promises[node] for node in kept] if self.promises else (),
            [self.kinds[node] for node in kept] if self.kinds else (),
        )

    @property
    def first(self) -> float:
        """How likely the next token is one of the candidates."""
        parents = self.tree.parents
        return sum([chance for parent, chance in zip(parents, self.chances, strict=True) if parent < 0])

    def expected_beside(self, plan: DraftPlan, reach: Sequence[float]) -> float:
        """How many more tokens than its draft model's a joint plan should give with these candidates: where these come
        and that one's do not, which come to depth d + 1 with probability `reach[d]`, whatever comes of the others; and
        those that come behind a chain that leads."""
        count = plan.given_nodes
        if self.tree.leads:
            chances = self.chances[:count]
            behind = chances[-1] * sum(reach[: max(0, plan.steps - len(chances))]) if chances else 0.0
            return max(0.0, sum(chances) + behind - sum(reach))
        depths: list[int] = []
        found = 0.0
        for parent, chance in zip(self.tree.parents[:count], self.chances, strict=False):
            depth = 0 if parent < 0 else depths[parent] + 1
            depths.append(depth)
            found += chance * (1.0 - reach[depth] if depth < len(reach) else 1.0)
        return found


class Trust:
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
        self._ratios = [*self.FIRST] * len(self.MATCHES)

    def weighed(self, proposal: Proposal) -> Proposed:
        """A proposal with the probabilities that were seen in place of those that the index promises."""
        tokens, parents, _, promises, match = proposal
        first = len(self.PROMISES) * (sum([match >= least for least in self.MATCHES]) - 1) - 1
        ratios, bounds, most = self._ratios, self.PROMISES, self.MOST
        chances: list[float] = []
        kinds: list[int] = []
        for parent, promise in zip(parents, promises, strict=True):
            kind = first + bisect_right(bounds, promise)
            chance = promise * ratios[kind]
            chance = most if chance > most else chance
            chances.append(chance * chances[parent] if parent >= 0 else chance)
            kinds.append(kind)
        return Proposed.of(GivenTree(tokens, parents), chances, promises, kinds)

    def learn(self, proposed: Proposed, tokens: Sequence[int]) -> None:
        """Take note of the tokens that came where a tree was proposed."""
        reached, promises, kinds = {-1: 0}, proposed.promises, proposed.kinds
        said, parents = proposed.tree.tokens, proposed.tree.parents
        for node, kind in enumerate(kinds):
            depth = reached.get(parents[node])
            if depth is None or depth == len(tokens):
                continue
            came = said[node] == tokens[depth]
            fading = min(1.0, self.MEMORY / (self._promised[kind] + 1.0))
            self._promised[kind] = fading * self._promised[kind] + promises[node]
            self._came[kind] = fading * self._came[kind] + came
            guessed = self.FIRST_EVIDENCE * self.FIRST[kind % len(self.FIRST)]
            self._ratios[kind] = (self._came[kind] + guessed) / (self._promised[kind] + self.FIRST_EVIDENCE)
            if came:
                reached[node] = depth + 1

    def shares(self) -> dict[str, list[float]]:
        """The ratio by the kind of match for each kind of promise."""
        ratios, size = self._ratios, len(self.PROMISES)
        return {
            f"match of {least} or more": ratios[size * row : size * (row + 1)] for row, least in enumerate(self.MATCHES)
        }


class Rates:
    """What the steps of one batch size take, the `tokens` that those without given candidates give, how many `rounds`
    were taken since the latest of these, and what drafting may lose.

    Times of other steps are kept over that of a plain one which nothing disturbed, so that load, clocks and the length
    of the context change all alike.
    """

    def __init__(self, guesses: Mapping[str, float], tokens: float, warm_ups: int) -> None:
        self.tokens, self.rounds = tokens, 0
        self._plain = guesses[PLAIN]
        self._over = {name: value / self._plain for name, value in guesses.items()}
        self._seen = dict.fromkeys(guesses, 0)
        self._most_warm_ups = warm_ups
        self._warm_ups: dict[str, int] = {}
        #: In seconds, what may be lost, and what was lately by asking; and what rounds saved over their time.
        self._credit, self._late, self._saved = max(FIRST_SECONDS, FIRST_CREDIT * self._plain), 0.0, FIRST_SAVED
        #: How often the draft model's own rounds came to each depth; what joint rounds promised and gave.
        self._reach: list[float] = []
        self._promise, self._promised, self._came = 0.0, JOINT_EVIDENCE, JOINT_FIRST * JOINT_EVIDENCE

    def record(
        self,
        plan: DraftPlan | None,
        emitted: Sequence[int],
        seconds: float,
        waited: bool = False,
        asked: float = 0.0,
        indexed: bool = True,
    ) -> None:
        """A step has ended, of a plan that took given candidates or (None) another one; for `asked` seconds of it or of
        the step before the host was asking the index, when it should have launched something, perhaps. Rounds of what
        was not `indexed`, but forced, neither pay for asking nor are paid for."""
        name, tokens = (WAITED if waited else PLAIN) if plan is None else rate_name(plan), sum(emitted)
        self.rounds = 0 if plan is None else self.rounds + 1
        if plan is not None and plan.is_joint and self._promise:
            fading = min(1.0, JOINT_MEMORY / self._promised)
            self._promised = fading * self._promised + self._promise
            self._came = fading * self._came + tokens
        saved = tokens * self._plain / self.tokens - seconds
        if plan is not None and self._warm_ups.setdefault(plan.name, 0) < self._most_warm_ups:
            self._warm_ups[plan.name] += 1
            self._credit += max(0.0, saved) if indexed else 0.0
            return
        if plan is None:
            self.tokens += _PACE * (tokens - self.tokens)
            self._follow(emitted)
        else:
            self._saved += _WORTH_PACE * (saved / seconds - self._saved)
        disturbed = asked > DISTURBING * self._plain
        if plan is not None or waited:
            saved = max(saved, -MOST_LOSS * self._plain) if indexed else 0.0
        else:  # what was launched late is made up for by what the device had still to do
            saved = max(-asked, min(saved, self._late)) if disturbed else 0.0
            self._late = max(0.0, self._late - saved) if disturbed else 0.0
        change = LOSS_SHARE * seconds + saved
        most = max(self._credit, MOST_CREDIT * self._plain)
        self._credit = max(-MOST_DEBT * self._plain, min(most, self._credit + change))
        if name != PLAIN or not disturbed:
            self._time(name, seconds)

    def _time(self, name: str, seconds: float) -> None:
        expected = self.seconds(name)
        seen = min(max(seconds, expected / _SURPRISE), expected * _SURPRISE)
        count = self._seen[name] = self._seen[name] + 1
        pace = _TIME_PACE if name != PLAIN or seen > expected else _FASTER_PACE  # what disturbs makes steps slower
        change = max(pace, 1.0 / (count + 1)) * (seen - expected)
        if name == PLAIN:
            self._plain += change
        else:
            self._over[name] += change / self._plain
        if self._seen[WAITED] and self._over[WAITED] < 1.0:  # no step is slower for not having been waited for
            less = self._over[WAITED]
            self._plain *= less
            self._over = {each: over if each == PLAIN else over / less for each, over in self._over.items()}

    def _follow(self, emitted: Sequence[int]) -> None:
        reach, most = self._reach, max(emitted) - 1
        if most < 1 and not reach:
            return
        reach += [0.0] * (most - len(reach))
        for depth in range(len(reach)):
            reached = sum([count > depth + 1 for count in emitted]) / len(emitted)
            reach[depth] += _PACE * (reached - reach[depth])

    def joined(self, plan: DraftPlan, proposals: Sequence[Proposed]) -> float:
        """The tokens that a joint round should give: those of the draft model's rounds, and what is proposed for each
        sequence beside; as far as earlier joint rounds gave what that says."""
        extra = sum([each.expected_beside(plan, self._reach) for each in proposals])
        return (self.tokens + extra) * self._came / self._promised

    def promise(self, tokens: float) -> None:
        """A joint round is taken that should give so many tokens."""
        self._promise = tokens * self._promised / self._came

    def seconds(self, name: str) -> float:
        """What a step should take."""
        return self._plain * self._over[name]

    @property
    def waiting(self) -> float:
        """How much longer a plain step takes where the device waits for the host before."""
        return max(0.0, self.seconds(WAITED) - self._plain)

    def waits_for(self, chance: float, seconds: float) -> bool:
        """Whether no plain step should be launched where a round comes with this `chance`, though the device waits so
        many seconds for the host then. Behind a plain step the round may still come: what that draws the round would
        have given for less, and it hides half of the waiting."""
        seconds = max(seconds, self.waiting)
        return chance * (self._plain * self._saved + 0.5 * seconds) > seconds

    @property
    def affords(self) -> bool:
        """Whether more may be lost: by asking the index, and by rounds."""
        return self._credit > 0.0

    def other(self) -> Forecast:
        """What steps without given candidates should give."""
        return Forecast(PLAIN, self.tokens, self._plain, self.tokens / self._plain)
