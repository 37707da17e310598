"""Which rounds of given candidates are taken: by what steps took and gave, as told, and by what came of candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from drafted_conversations import ask_freely

from edgellm.drafting import learner as learner_module
from edgellm.drafting.given import COMPUTED_TREES, MOST_PATIENCE, MOST_ROUNDS, GivenDrafting
from edgellm.drafting.said import Said
from edgellm.drafting.seconds import PLAIN
from edgellm.engines.speculation.constraints import AllowedTokens
from edgellm.engines.speculation.draft_plan import DraftPlan, chain
from edgellm.engines.speculation.suffix_index import SuffixIndex

DEEPEST = 16
TEXT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]


@dataclass
class Answer:
    """As `Drafted` has it."""

    constraint: AllowedTokens | None = None
    said: Said | None = None
    is_over: bool = False
    finished: bool = False


class Takes:
    """A runner that takes trees of up to so many candidates."""

    def __init__(self, most: int = 31) -> None:
        self._most = most

    def takes_given(self, batch: int, plan: DraftPlan, ruled: bool = False) -> bool:
        return plan.top_k <= self._most


@pytest.fixture(scope="module", autouse=True)
def asks_freely() -> Iterator[None]:
    """What is taken does not depend on how long the index takes on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        ask_freely(patch)
        yield


def drafting(captured: bool = False, index: bool = True) -> GivenDrafting:
    return GivenDrafting(DEEPEST, captured, SuffixIndex() if index else None)


def opened(drafts: GivenDrafting, prompt: Sequence[int]) -> Answer:
    sequence = Answer()
    drafts.open(sequence, prompt)
    return sequence


def record(drafts: GivenDrafting, plan: DraftPlan | None, seconds: float, times: int, tokens: int = 1) -> None:
    for _ in range(times):
        drafts.record(plan, [tokens], seconds)


def test_nothing_is_taken_before_a_step_was_timed_nor_where_nothing_was_said() -> None:
    drafts = drafting()
    repeats, news = opened(drafts, [*TEXT, *TEXT[:12]]), opened(drafts, TEXT)
    assert drafts.choose(Takes(), [repeats], 100) is None
    record(drafts, None, 0.01, 1)
    assert drafts.choose(Takes(), [news], 100) is None
    plan, (tree,) = drafts.choose(Takes(), [repeats], 100)
    assert list(tree.tokens[:4]) == TEXT[12:16] and list(tree.parents[:4]) == [-1, 0, 1, 2]
    assert plan in drafts.plans


def test_rounds_are_taken_where_they_pay_and_not_where_they_do_not() -> None:
    for round_seconds, taken in ((0.02, True), (0.3, False)):
        drafts = drafting()
        sequence = opened(drafts, [*TEXT, *TEXT[:12]])
        for plan in drafts.plans:
            for _ in range(5):
                record(drafts, None, 0.01, 1)
                record(drafts, plan, round_seconds, 5)
        record(drafts, None, 0.01, 1)
        assert (drafts.choose(Takes(), [sequence], 100) is not None) == taken
        assert drafts.promises(Takes(), [sequence], 100) == taken
        report = drafts.report()
        assert (report.chosen == PLAIN) != taken
        assert report.rounds[PLAIN] == 5 * len(drafts.plans) + 1
        assert report.forecasts[0].tokens_per_second > report.forecasts[1].tokens_per_second


def test_the_cheapest_of_the_rounds_that_say_the_same_is_taken() -> None:
    drafts = drafting()
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    record(drafts, None, 0.01, 3)
    for plan in drafts.plans:
        record(drafts, plan, 0.01 if plan.top_k == 7 else 0.1, 30)
        record(drafts, None, 0.01, 3)
    assert drafts.choose(Takes(), [sequence], 100)[0].top_k == 7
    assert drafts.choose(Takes(4), [sequence], 100) is None  # a tenth of the speed
    plan, (tree,) = drafts.choose(Takes(), [sequence], 9) or (None, [None])
    assert plan.longest <= 9 and len(tree.tokens) <= 8


def test_no_round_outgrows_the_room() -> None:
    drafts = drafting()
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    record(drafts, None, 0.01, 1)
    for room in range(1, 40):
        chosen = drafts.choose(Takes(), [sequence], room)
        assert (chosen is None) == (room < COMPUTED_TREES[0])
        assert chosen is None or chosen[0].longest <= room


def test_warm_up_rounds_are_no_cost() -> None:
    """Loading code and capturing a graph take a hundred times as long."""
    drafts = drafting(captured=True)
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    record(drafts, None, 0.001, 10)
    for plan in drafts.plans:
        record(drafts, plan, 0.1, 2, tokens=5)
    assert drafts.choose(Takes(), [sequence], 100) is not None


def test_a_step_without_is_taken_now_and_then() -> None:
    drafts = drafting()
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    record(drafts, None, 0.01, 1)
    rounds = 0
    while (chosen := drafts.choose(Takes(), [sequence], 100)) is not None:
        record(drafts, chosen[0], 0.01, 1, tokens=10)
        rounds += 1
    assert rounds == MOST_ROUNDS
    record(drafts, None, 0.01, 1)
    assert drafts.choose(Takes(), [sequence], 100) is not None


def test_steps_of_a_draft_model_are_what_rounds_compete_with() -> None:
    drafts = drafting()
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    for tokens, taken in ((1, True), (30, False)):
        for _ in range(60):
            drafts.record(chain(5), [tokens], 0.015)
        assert (drafts.choose(Takes(), [sequence], 100) is not None) == taken


def test_batches_and_rules_have_costs_of_their_own() -> None:
    drafts = drafting(captured=True)
    one, other = opened(drafts, [*TEXT, *TEXT[:12]]), opened(drafts, TEXT)
    record(drafts, None, 0.01, 3)
    assert drafts.choose(Takes(), [one, other], 100) is None  # two were not timed
    for _ in range(3):
        drafts.record(None, [1, 1], 0.01)
    _, trees = drafts.choose(Takes(), [one, other], 100)
    assert len(trees[0].tokens) > 0 and len(trees[1].tokens) == 0
    ruled = Answer(AllowedTokens([3], 50))
    assert drafts.choose(Takes(), [ruled], 100) is None
    for _ in range(3):
        drafts.record(None, [1], 0.01, True)
    _, (forced,) = drafts.choose(Takes(), [ruled], 100)
    assert set(forced.tokens) == {3} and list(forced.parents) == list(range(-1, len(forced.tokens) - 1))


def test_rules_prune_what_was_said() -> None:
    drafts = drafting()
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    sequence.constraint = AllowedTokens([*TEXT[12:15], 40], 50)
    drafts.record(None, [1], 0.01, True)
    _, (tree,) = drafts.choose(Takes(), [sequence], 100)
    assert list(tree.tokens) == TEXT[12:15]


def test_ended_sequences_get_nothing() -> None:
    drafts = drafting()
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    record(drafts, None, 0.01, 1)
    for state in ("is_over", "finished"):
        setattr(sequence, state, True)
        assert drafts.choose(Takes(), [sequence], 100) is None
        setattr(sequence, state, False)
    assert drafts.choose(Takes(), [sequence], 100) is not None


def test_what_does_not_come_is_trusted_less_and_what_comes_again_more() -> None:
    """Also where no round is taken: the tokens of plain steps tell."""
    drafts = drafting()

    def asked() -> tuple[Answer, bool]:
        record(drafts, None, 0.1, 1)
        sequence = opened(drafts, [*TEXT, *TEXT[:12]])
        return sequence, drafts.choose(Takes(), [sequence], 100) is not None

    def promised() -> float:
        return sum(asked()[0].said.proposed.chances)

    at_first = promised()
    for wrong in range(60):
        drafts.take(asked()[0], [100 + wrong])
    distrusted = promised()
    assert distrusted < 0.5 * at_first
    assert not asked()[1]
    for _ in range(60):
        drafts.take(asked()[0], TEXT[12:18])
    assert promised() > 2 * distrusted


class Clock:
    """A clock that stands still but for what it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("hidden", [False, True])
def test_a_model_whose_steps_are_quick_is_not_slowed_by_asking(hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is said again, what asking costs is lost: a hundredth of the steps' time. What the device hides
    costs nothing, so that the index is asked as often as it would be otherwise."""
    for name, value in (("FIRST_CREDIT", 2.0), ("MOST_CREDIT", 20.0), ("FIRST_SECONDS", 0.0)):
        monkeypatch.setattr(f"edgellm.drafting.worth.{name}", value)
    clock, step = Clock(), 1e-4
    monkeypatch.setattr(learner_module, "time", clock)
    monkeypatch.setattr(learner_module, "MOST_PATIENCE", 0)  # as eager as can be
    drafts = drafting()
    propose, asked = drafts.index.propose, []

    def slow(*arguments: Any) -> Any:
        asked.append(1)
        clock.now += step / 2
        return propose(*arguments)

    drafts.index.propose = slow
    sequence, lost = opened(drafts, TEXT), 0.0
    record(drafts, None, step, 1)
    for token in range(2000):
        began = clock.now
        drafts.look_up(Takes(), [sequence], 100)
        late = 0.0 if hidden else clock.now - began
        lost += late
        drafts.take(sequence, [100 + token])
        record(drafts, None, step + late, 1)
    assert len(asked) == 2000 if hidden else lost <= 2 * step + 0.01 * 2000 * step + step
    if not hidden:
        assert len(asked) > 20, "now and then it is tried again"
        record(drafts, drafts.plans[0], step, 2, tokens=11)  # the first warms up
        count = len(asked)
        for token in range(30):
            drafts.look_up(Takes(), [sequence], 100)
            drafts.take(sequence, [5000 + token])
            record(drafts, None, step * 1.5, 1)
        assert len(asked) == count + 30, "what a round has saved may be spent"


def test_rounds_that_lose_are_left_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each of them promises more than it gives."""
    for name, value in (("FIRST_CREDIT", 4.0), ("MOST_CREDIT", 8.0), ("FIRST_SECONDS", 0.0)):
        monkeypatch.setattr(f"edgellm.drafting.worth.{name}", value)
    drafts, taken = drafting(), 0
    record(drafts, None, 0.01, 1)
    for _ in range(400):
        sequence = opened(drafts, [*TEXT, *TEXT[:12]])
        chosen = drafts.choose(Takes(), [sequence], 100)
        drafts.record(None if chosen is None else chosen[0], [1], 0.01 if chosen is None else 0.02)
        taken += chosen is not None
        drafts.close(sequence)
    assert len(drafts.plans) < taken < 30


def test_a_slow_first_step_is_not_what_steps_take() -> None:
    """Where the index is seldom asked, steps are still timed."""
    drafts = drafting(captured=True)
    record(drafts, None, 0.05, 2)
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    record(drafts, None, 0.002, 40)
    plan, _ = drafts.choose(Takes(), [sequence], 100)
    assert plan.top_k >= 7
    forecast = {each.name: each.seconds for each in drafts.report().forecasts}
    assert forecast[PLAIN] == pytest.approx(0.002, rel=0.2)


def test_chances_fall_along_a_path_and_children_come_after_their_parents() -> None:
    drafts = drafting()
    record(drafts, None, 0.01, 1)
    sequence = opened(drafts, [*TEXT, *TEXT[:8], 99, *TEXT[:8]])
    plan, (tree,) = drafts.choose(Takes(), [sequence], 100)
    proposed = sequence.said.proposed
    assert {12 + 7, 99} <= {int(token) for token in proposed.tree.tokens}
    for node, parent in enumerate(proposed.tree.parents):
        assert parent < node
        assert 0 < proposed.chances[node] <= (proposed.chances[parent] if parent >= 0 else 1)
    assert all(parent < node for node, parent in enumerate(tree.parents)) and len(tree.tokens) <= plan.top_k


def test_the_index_lives_as_long_as_its_sequences() -> None:
    drafts = drafting()
    first = opened(drafts, TEXT[:3])
    drafts.take(first, TEXT[3:])
    record(drafts, None, 0.01, 1)
    later = opened(drafts, TEXT[:9])
    assert drafts.choose(Takes(), [later], 100) is None  # what runs beside is not seen
    drafts.close(first)
    assert first.said is None
    later = opened(drafts, TEXT[:9])
    _, (tree,) = drafts.choose(Takes(), [later], 100)
    assert list(tree.tokens[:3]) == TEXT[9:12]
    drafts.close(first)  # again: nothing happens


def test_without_an_index_only_rules_propose() -> None:
    drafts = drafting(index=False)
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    record(drafts, None, 0.01, 1)
    assert sequence.said is None
    assert drafts.choose(Takes(), [sequence], 100) is None and not drafts.promises(Takes(), [sequence], 100)
    drafts.take(sequence, [1, 2])
    drafts.close(sequence)


@pytest.mark.parametrize("captured", [False, True])
def test_plans_grow(captured: bool) -> None:
    plans = drafting(captured).plans
    assert all(small.top_k < large.top_k for small, large in pairwise(plans))
    assert all(plan.steps <= DEEPEST for plan in plans)
    assert np.all([plan.is_given for plan in plans])


def test_plain_steps_begin_early_where_no_round_is_likely() -> None:
    """The more the device would wait for the host, and the less often a round was best behind such a step."""
    drafts = drafting(captured=True, index=False)
    for _ in range(3):
        drafts.record(None, [1], 0.001, True)
    free, forced = Answer(AllowedTokens([3, 4], 50)), Answer(AllowedTokens([3], 50))
    assert drafts.expects_round(1, 0.0001) and not drafts.expects_round(1, 0.002)
    for _ in range(30):
        assert drafts.choose(Takes(), [free], 100) is None
    assert not drafts.expects_round(1, 0.0001)
    assert drafts.choose(Takes(), [forced], 100, begun=True) is None
    assert drafts.expects_round(1, 1.0), "what is forced behind the step that began is given in the next one"
    assert drafts.choose(Takes(), [forced], 100) is not None
    assert drafts.expects_round(1, 0.0001), "nothing is known of what follows rounds"
    for _ in range(30):
        assert drafts.choose(Takes(), [free], 100) is None
        drafts.choose(Takes(), [forced], 100)
    assert not drafts.expects_round(1, 0.0001), "behind a round there was always a choice"
    assert drafts.choose(Takes(), [free], 100) is None
    assert drafts.expects_round(1, 0.0001), "behind a choice there was always a round"


def test_rounds_are_weighed_against_what_is_the_alternative() -> None:
    """Before the host waits for tokens, waiting belongs to the round; once it has waited, a plain step would be behind
    that as well."""
    drafts = drafting(captured=True)
    sequence = opened(drafts, [*TEXT, *TEXT[:12]])
    for _ in range(60):
        drafts.record(None, [1], 0.001)
        drafts.record(None, [1], 0.004, waited=True)
        for plan in drafts.plans:
            record(drafts, plan, 0.004, 1)
    drafts.record(None, [1], 0.001)
    drafts.look_up(Takes(), [sequence], 100)
    expected, first = sequence.said.proposed.sums[-1] + 1, sequence.said.proposed.first
    assert 5 < expected < 20 and 0.5 < first < 1

    def told(seconds: float) -> tuple[bool, bool, bool]:
        for _ in range(80):
            for plan in drafts.plans:
                record(drafts, plan, seconds, 1)
            drafts.record(None, [1], 0.001)
        chosen = drafts.choose(Takes(), [sequence], 100), drafts.choose(Takes(), [sequence], 100, waited=True)
        return drafts.promises(Takes(), [sequence], 100), chosen[0] is not None, chosen[1] is not None

    assert told(0.001 * expected / 2) == (True, True, True)
    assert told(0.001 * expected) == (False, False, True), "three of these milliseconds are lost in any case"
    assert told(0.001 * expected + 0.004) == (False, False, False)


def test_what_is_proposed_in_vain_is_asked_for_less_and_less() -> None:
    drafts = drafting()
    record(drafts, None, 0.01, 1)
    sequence, asked, propose = opened(drafts, TEXT), [], drafts.index.propose
    drafts.index.propose = lambda *arguments: (asked.append(len(said)), propose(*arguments))[1]
    said: list[int] = []

    def say(token: int) -> None:
        drafts.look_up(Takes(), [sequence], 100)
        drafts.take(sequence, [token])
        said.append(token)

    for token in range(100, 160):
        say(token)
    assert asked == [0, 1, 4, 11, *range(26, 60, MOST_PATIENCE)]
    drafts.close(sequence)
    sequence = opened(drafts, [*TEXT, 200])
    count = len(asked)
    for token in range(300, 310):
        say(token)
    assert len(asked) == count + 1, "the next answer begins with half of that patience"
    sequence = opened(drafts, TEXT)
    drafts.take(sequence, TEXT[:12])
    sequence.said.quiet = 0
    count = len(asked)
    drafts.look_up(Takes(), [sequence], 100)
    assert drafts.promises(Takes(), [sequence], 100) and sequence.said.patience == 0
    drafts.take(sequence, TEXT[12:13])
    assert drafts.promises(Takes(), [sequence], 100) and len(asked) == count + 1, "what is left was proposed already"
    drafts.take(sequence, [*TEXT[13:], *TEXT[:1]])
    drafts.look_up(Takes(), [sequence], 100)
    assert len(asked) == count + 2, "less than half of it is left"
    drafts.take(sequence, [999])
    assert not drafts.promises(Takes(), [sequence], 100) and len(asked) == count + 2, "and nothing now"
    drafts.look_up(Takes(), [sequence], 100)
    assert len(asked) == count + 3, "where it pays it is asked each time"


def test_nothing_is_asked_while_the_device_waits_but_behind_a_round() -> None:
    drafts = drafting(captured=True)
    record(drafts, None, 0.001, 3)
    sequence, asked, propose = opened(drafts, [*TEXT, *TEXT[:12]]), [], drafts.index.propose
    drafts.index.propose = lambda *arguments: (asked.append(1), propose(*arguments))[1]
    assert drafts.choose(Takes(), [sequence], 100, waited=True) is None and not asked
    assert not drafts.promises(Takes(), [sequence], 100) and not asked
    drafts.look_up(Takes(), [sequence], 100)
    drafts.take(sequence, TEXT[12:13])
    _, (tree,) = drafts.choose(Takes(), [sequence], 100, waited=True)
    assert list(tree.tokens[:3]) == TEXT[13:16] and len(asked) == 1
    drafts.take(sequence, [*TEXT[13:15], 5])
    drafts.choose(Takes(), [sequence], 100, waited=True)
    assert len(asked) == 2
    drafts.take(sequence, [6])
    drafts.choose(Takes(), [sequence], 100, waited=True)
    assert len(asked) == 2


def test_a_plain_step_stands_behind_a_round_unless_another_is_likely() -> None:
    drafts = drafting(captured=True)
    record(drafts, None, 0.001, 3)
    assert drafts.goes_on(1, 0.0001)
    assert not drafts.goes_on(1, 0.01) and not drafts.goes_on(2, 0.0001)
    for _ in range(40):
        sequence = opened(drafts, [*TEXT, *TEXT[:12]])
        assert drafts.choose(Takes(), [sequence], 100) is not None
        drafts.take(sequence, [*TEXT[12:18], 7])
        assert drafts.choose(Takes(), [sequence], 100) is None
        record(drafts, drafts.plans[0], 0.001, 1, tokens=7)
        record(drafts, None, 0.001, 1)
    assert not drafts.goes_on(1, 0.0001), "behind a round there never was one"
    assert drafts.goes_on(1, 0.000001)
