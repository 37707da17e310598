"""Which rounds of given candidates are taken: by what steps took and gave, as told, and by what came of candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from drafted_conversations import ask_freely

from edgellm.drafting import learner
from edgellm.drafting.learner import CAPTURED_TREES, Learner
from edgellm.drafting.own_plans import Account, Search
from edgellm.drafting.proposals import Said
from edgellm.drafting.seconds import PLAIN
from edgellm.engines.speculation.constraints import AllowedTokens
from edgellm.engines.speculation.draft_plan import DraftPlan, chain
from edgellm.engines.speculation.suffix_index import SuffixIndex

DEEPEST = 16
IS_DUE = Search.is_due  # which the tests change
TEXT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]


@dataclass
class Answer:
    """As `Drafted` has it."""

    constraint: AllowedTokens | None = None
    said: Said | None = None
    is_over: bool = False
    finished: bool = False
    drawn: list[int] = field(default_factory=list)
    known: int = 0

    def say(self, tokens: Sequence[int]) -> None:
        """Tokens were read."""
        self.drawn += tokens
        self.known += len(tokens)


class Takes:
    """A runner that takes trees of up to so many candidates."""

    def __init__(self, most: int = 31) -> None:
        self._most = most

    def takes_given(self, batch: int, plan: DraftPlan, ruled: bool = False) -> bool:
        return plan.top_k <= self._most

    def is_ready(self, batch: int, plan: DraftPlan, ruled: bool = False) -> bool:
        return True


def choice(
    drafts: Learner, sequences: Sequence[Answer], room: int, most: int = 31, begun: bool = False, waited: bool = False
) -> Any:
    """The round of given candidates that is chosen, and their trees; None where there is none."""
    ruled = any(sequence.constraint is not None for sequence in sequences)
    plan, trees = drafts.choose(Takes(most), sequences, room, ruled, True, begun, waited)
    return None if trees is None else (plan, trees)


def plain_step(drafts: Learner, sequence: Answer, seconds: float, blocked: float = 0.0, known: bool = False) -> None:
    """A plain step as the decoding loop takes it, whose tokens are `known` or under way."""
    if drafts.rest > 0:
        drafts.rest, drafts.rested_steps = drafts.rest - 1, drafts.rested_steps + 1
        drafts.rested_seconds += seconds
        return
    plan, _ = drafts.choose(Takes(), [sequence], 100, False, known)
    assert plan is None
    if not known:
        drafts.look_up(Takes(), [sequence], 100)
    drafts.record(None, [1], seconds, blocked=blocked)


class Clock:
    """A clock that stands still but for what it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(scope="module", autouse=True)
def asks_freely() -> Iterator[None]:
    """What is taken does not depend on how long the index takes on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        ask_freely(patch)
        patch.setattr(learner, "time", Clock())
        yield


def drafting(captured: bool = False, index: bool = True) -> Learner:
    return Learner(DEEPEST, captured, SuffixIndex() if index else None)


def opened(drafts: Learner, prompt: Sequence[int]) -> Answer:
    sequence = Answer()
    drafts.open(sequence, prompt)
    return sequence


def record(drafts: Learner, plan: DraftPlan | None, seconds: float, times: int, tokens: int = 1) -> None:
    for _ in range(times):
        drafts.record(plan, [tokens], seconds)


def test_nothing_is_taken_before_a_step_was_timed_nor_where_nothing_was_said() -> None:
    drafts = drafting()
    repeats, news = opened(drafts, [*TEXT, *TEXT[:12]]), opened(drafts, TEXT)
    assert choice(drafts, [repeats], 100, most=31) is None
    record(drafts, None, 0.01, 1)
    assert choice(drafts, [news], 100, most=31) is None
    plan, (tree,) = choice(drafts, [repeats], 100, most=31)
    assert list(tree.tokens[:4]) == TEXT[12:16] and list(tree.parents[:4]) == [-1, 0, 1, 2]
    assert plan in drafts.given_plans


def test_rounds_are_taken_where_they_pay_and_not_where_they_do_not() -> None:
    for round_seconds, taken in ((0.02, True), (0.3, False)):
        drafts = drafting()
        sequence = opened(drafts, [*TEXT, *TEXT[:12]])
        for plan in drafts.given_plans:
            for _ in range(5):
                record(drafts, None, 0.01, 1)
                record(drafts, plan, round_seconds, 5)
        record(drafts, None, 0.01, 1)
        assert (choice(drafts, [sequence], 100, most=31) is not None) == taken
        assert drafts.promises(Takes(), [sequence], 100) == taken
        report = drafts.report()
        assert (report.chosen == PLAIN) != taken
        assert report.rounds[PLAIN] == 5 * len(drafts.given_plans) + 1
        assert report.forecasts[0].tokens_per_second > report.forecasts[1].tokens_per_second


def test_the_cheapest_of_the_rounds_that_say_the_same_is_taken() -> None:
    drafts = drafting()
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    record(drafts, None, 0.01, 3)
    for plan in drafts.given_plans:
        record(drafts, plan, 0.01 if plan.top_k == 7 else 0.1, 30)
        record(drafts, None, 0.01, 3)
    assert choice(drafts, [sequence], 100, most=31)[0].top_k == 7
    assert choice(drafts, [sequence], 100, most=4) is None  # a tenth of the speed
    plan, (tree,) = choice(drafts, [sequence], 9, most=31) or (None, [None])
    assert plan.longest <= 9 and len(tree.tokens) <= 8


def test_no_round_outgrows_the_room() -> None:
    drafts = drafting(captured=True)
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    record(drafts, None, 0.01, 1)
    for room in range(1, 40):
        chosen = choice(drafts, [sequence], room, most=31)
        assert (chosen is None) == (room < CAPTURED_TREES[0])
        assert chosen is None or chosen[0].longest <= room


def test_cold_rounds_are_no_cost() -> None:
    """Loading code takes a hundred times as long, once."""
    drafts = drafting(captured=True)
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    record(drafts, None, 0.001, 10)
    for plan in drafts.given_plans:
        record(drafts, plan, 0.1, 1, tokens=5)
    assert choice(drafts, [sequence], 100) is not None


def test_steps_of_a_draft_model_are_what_rounds_compete_with() -> None:
    own = chain(5)
    drafts = Learner(DEEPEST, False, SuffixIndex(), [own], adaptive=False)
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    for tokens, taken in ((1, True), (6, False)):
        for _ in range(60):
            drafts.record(own, [tokens], 0.015)
            for plan in drafts.given_plans:
                record(drafts, plan, 0.03, 1, tokens=5)
        drafts.record(own, [tokens], 0.015)
        assert (choice(drafts, [sequence], 100) is not None) == taken


def test_batches_and_rules_have_costs_of_their_own() -> None:
    drafts = drafting(captured=True)
    one, other = opened(drafts, [*TEXT, *TEXT[:12]]), opened(drafts, TEXT)
    record(drafts, None, 0.01, 3)
    assert choice(drafts, [one, other], 100, most=31) is None  # two were not timed
    for _ in range(3):
        drafts.record(None, [1, 1], 0.01)
    _, trees = choice(drafts, [one, other], 100, most=31)
    assert len(trees[0].tokens) > 0 and len(trees[1].tokens) == 0
    ruled = Answer(AllowedTokens([3], 50))
    assert choice(drafts, [ruled], 100, most=31) is None
    for _ in range(3):
        drafts.record(None, [1], 0.01, True)
    _, (forced,) = choice(drafts, [ruled], 100, most=31)
    assert set(forced.tokens) == {3} and list(forced.parents) == list(range(-1, len(forced.tokens) - 1))


def test_ended_sequences_get_nothing() -> None:
    drafts = drafting()
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    record(drafts, None, 0.01, 1)
    for state in ("is_over", "finished"):
        setattr(sequence, state, True)
        assert choice(drafts, [sequence], 100, most=31) is None
        setattr(sequence, state, False)
    assert choice(drafts, [sequence], 100, most=31) is not None


def test_what_does_not_come_is_trusted_less_and_what_comes_again_more() -> None:
    """Also where no round is taken: the tokens of plain steps tell."""
    drafts = drafting()

    def asked() -> tuple[Answer, bool]:
        record(drafts, None, 0.1, 1)
        sequence = opened(drafts, [*TEXT, *TEXT[:12]])
        return sequence, choice(drafts, [sequence], 100, most=31) is not None

    def promised() -> float:
        return sum(asked()[0].said.proposed.chances)

    at_first = promised()
    for wrong in range(60):
        sequence, _ = asked()
        sequence.say([100 + wrong])
        choice(drafts, [sequence], 100)
    distrusted = promised()
    assert distrusted < 0.5 * at_first
    assert not asked()[1]
    for _ in range(60):
        sequence, _ = asked()
        sequence.say(TEXT[12:18])
        choice(drafts, [sequence], 100)
    assert promised() > 2 * distrusted


@pytest.mark.parametrize("ahead", [False, True])
def test_a_model_whose_steps_are_quick_is_not_slowed_by_asking(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is said again, what asking costs is lost: a part of a hundredth of the steps' time. What the device
    hides costs nothing, so that the index is asked each time."""
    clock, step = Clock(), 1e-4
    monkeypatch.setattr(learner, "time", clock)
    drafts = drafting(captured=ahead)
    propose, asked = drafts.host.index.propose, []

    def slow(*arguments: Any) -> Any:
        asked.append(1)
        clock.now += step / 5
        return propose(*arguments)

    drafts.host.index.propose = slow
    sequence = opened(drafts, TEXT)
    record(drafts, None, step, 1)
    monkeypatch.setattr(Search, "is_due", IS_DUE)
    for token in range(2000):
        began = clock.now
        sequence.say([100 + token])
        spent = step + (0.0 if ahead else step / 5 * (drafts.rest <= 0))
        plain_step(drafts, sequence, spent, 0.8 * step, not ahead)
        clock.now = began + spent
    assert len(asked) > 1900 if ahead else len(asked) > 20
    assert ahead or len(asked) / 5 <= Account.MOST_LOST * 2000 / Account.WINDOW + Account.MOST_LOST


def test_rounds_that_lose_are_left_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each of them promises more than it gives."""
    monkeypatch.setattr(Search, "is_due", IS_DUE)
    drafts, taken = drafting(), 0
    record(drafts, None, 0.01, 1)
    for _ in range(400):
        sequence = opened(drafts, [*TEXT, *TEXT[:12]])
        chosen = choice(drafts, [sequence], 100)
        drafts.record(None if chosen is None else chosen[0], [1], 0.01 if chosen is None else 0.02)
        taken += chosen is not None
        drafts.close(sequence)
    assert 0 < taken <= 8


def test_a_slow_first_step_is_not_what_steps_take() -> None:
    """Where the index is seldom asked, steps are still timed."""
    drafts = drafting(captured=True)
    record(drafts, None, 0.05, 2)
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    record(drafts, None, 0.002, 40)
    plan, _ = choice(drafts, [sequence], 100, most=31)
    assert plan.top_k >= 7
    forecast = {each.name: each.seconds for each in drafts.report().forecasts}
    assert forecast[PLAIN] == pytest.approx(0.002, rel=0.2)


def test_chances_fall_along_a_path_and_children_come_after_their_parents() -> None:
    drafts = drafting(captured=True)
    record(drafts, None, 0.01, 1)
    sequence = opened(drafts, [*TEXT, *TEXT[:8], 99, *TEXT[:8]])
    plan, (tree,) = choice(drafts, [sequence], 100, most=31)
    proposed = sequence.said.proposed
    assert {12 + 7, 99} <= {int(token) for token in proposed.tree.tokens}
    for node, parent in enumerate(proposed.tree.parents):
        assert parent < node
        assert 0 < proposed.chances[node] <= (proposed.chances[parent] if parent >= 0 else 1)
    assert all(parent < node for node, parent in enumerate(tree.parents)) and len(tree.tokens) <= plan.top_k


def test_the_index_lives_as_long_as_its_sequences() -> None:
    drafts = drafting(captured=True)
    first = opened(drafts, TEXT[:3])
    first.say(TEXT[3:])
    record(drafts, None, 0.01, 1)
    later = opened(drafts, TEXT[:9])
    assert choice(drafts, [later], 100, most=31) is None  # what runs beside is not seen
    drafts.close(first)
    assert first.said is None
    later = opened(drafts, TEXT[:9])
    _, (tree,) = choice(drafts, [later], 100, most=31)
    assert list(tree.tokens[:3]) == TEXT[9:12]
    drafts.close(first)  # again: nothing happens


def test_plain_steps_begin_early_where_no_round_is_likely() -> None:
    """The more the device would wait for the host, and the less often a round was best behind such a step."""
    drafts = drafting(captured=True, index=False)
    for _ in range(3):
        drafts.record(None, [1], 0.001, True)
    free, forced = Answer(AllowedTokens([3, 4], 50)), Answer(AllowedTokens([3], 50))
    assert drafts.expects_round(1, 0.0001) and not drafts.expects_round(1, 0.002)
    for _ in range(30):
        assert choice(drafts, [free], 100, most=31) is None
    assert not drafts.expects_round(1, 0.0001)
    assert choice(drafts, [forced], 100, most=31, begun=True) is None
    assert drafts.expects_round(1, 1.0), "what is forced behind the step that began is given in the next one"
    assert choice(drafts, [forced], 100, most=31) is not None


def test_what_is_proposed_in_vain_is_asked_for_less_where_that_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = drafting()
    record(drafts, None, 0.01, 1)
    clock = Clock()
    monkeypatch.setattr(learner, "time", clock)
    sequence, asked, propose, takes = opened(drafts, TEXT), [], drafts.host.index.propose, 0.0
    said: list[int] = []

    def slow(*arguments: Any) -> Any:
        asked.append(len(said))
        clock.now += takes
        return propose(*arguments)

    drafts.host.index.propose = slow

    def say(token: int) -> None:
        sequence.say([token])
        plain_step(drafts, sequence, 0.01)
        said.append(token)

    for token in range(100, 160):
        say(token)
    assert asked == [*range(60)], "it costs nothing that shows"
    takes = 0.01
    for token in range(160, 1300):
        say(token)
    assert min(np.diff(asked)[-3:]) == 1 / Search.LOOK_SHARE + 1
    takes = 0.0
    sequence = opened(drafts, TEXT)
    sequence.say(TEXT[:12])
    drafts.searches[False].begins = 0
    count = len(asked)
    drafts.look_up(Takes(), [sequence], 100)
    assert drafts.promises(Takes(), [sequence], 100)
    sequence.say(TEXT[12:13])
    assert drafts.promises(Takes(), [sequence], 100) and len(asked) == count + 1, "what is left was proposed already"
    sequence.say([*TEXT[13:], *TEXT[:1]])
    drafts.look_up(Takes(), [sequence], 100)
    assert len(asked) == count + 2, "less than half of it is left"
    sequence.say([999])
    assert not drafts.promises(Takes(), [sequence], 100) and len(asked) == count + 2, "and nothing now"


def test_nothing_is_asked_while_the_device_waits_but_behind_a_round() -> None:
    drafts = drafting(captured=True)
    record(drafts, None, 0.001, 3)
    sequence, asked, propose = opened(drafts, [*TEXT, *TEXT[:12]]), [], drafts.host.index.propose
    drafts.host.index.propose = lambda *arguments: (asked.append(1), propose(*arguments))[1]
    assert choice(drafts, [sequence], 100, most=31, waited=True) is None and not asked
    assert not drafts.promises(Takes(), [sequence], 100) and not asked
    drafts.searches[False].begins = 0
    drafts.look_up(Takes(), [sequence], 100)
    sequence.say(TEXT[12:13])
    _, (tree,) = choice(drafts, [sequence], 100, most=31, waited=True)
    assert list(tree.tokens[:3]) == TEXT[13:16] and len(asked) == 1
    sequence.say([*TEXT[13:15], 5])
    choice(drafts, [sequence], 100, most=31, waited=True)
    assert len(asked) == 2
    sequence.say([6])
    choice(drafts, [sequence], 100, most=31, waited=True)
    assert len(asked) == 2


def test_a_plain_step_stands_behind_a_round_unless_another_is_likely() -> None:
    drafts = drafting(captured=True)
    record(drafts, None, 0.001, 3)
    assert drafts.goes_on(1, 0.0001)
    assert not drafts.goes_on(1, 0.01) and not drafts.goes_on(2, 0.0001)


@pytest.mark.parametrize(("blocked", "rests"), [(0.0, True), (0.0009, False)])
def test_where_the_host_is_slower_than_the_device_plain_steps_are_timed_alone(blocked: float, rests: bool) -> None:
    """All that is asked for makes steps longer there, so that rounds would seem to gain."""
    drafts, rested = drafting(captured=True, index=False), 0
    forced = Answer(AllowedTokens([3], 50))
    drafts.record(None, [1], 0.001, True, blocked=blocked)
    for _ in range(400):
        if drafts.rest > 0:
            drafts.rest, drafts.rested_steps, rested = drafts.rest - 1, drafts.rested_steps + 1, rested + 1
            drafts.rested_seconds += 0.001
            continue
        plan, _ = drafts.choose(Takes(), [forced], 100, True)
        drafts.record(plan, [1 if plan is None else 8], 0.002, True, blocked=blocked)
    assert (10 < rested < 40) == rests and (rested > 0) == rests
