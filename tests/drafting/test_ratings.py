"""What is left of a proposal, what steps take, and what drafting may lose."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from edgellm.drafting.own_plans import Account
from edgellm.drafting.proposals import Proposed
from edgellm.drafting.seconds import CAPTURED, Seconds
from edgellm.engines.speculation import draft_plan
from edgellm.engines.speculation.draft_plan import chain
from edgellm.engines.speculation.round import GivenTree

TREES = st.lists(st.integers(0, 2), min_size=1, max_size=20)


@examples(TREES, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_what_is_left_is_what_stood_behind(tokens: list[int], came: list[int], random: Any) -> None:
    parents = [random.randrange(-1, node) if node else -1 for node in range(len(tokens))]
    seen: set[tuple[int, int]] = set()
    kept = [node for node, pair in enumerate(zip(parents, tokens, strict=True)) if not (pair in seen or seen.add(pair))]
    if len(kept) < len(tokens):  # equal siblings: no index proposes them
        return
    promises = [random.uniform(0.1, 1.0) for _ in tokens]
    chances: list[float] = []
    for parent, promise in zip(parents, promises, strict=True):
        chances.append(promise * (chances[parent] if parent >= 0 else 1.0))
    whole = Proposed(GivenTree(tokens, parents), chances, promises)

    def paths(proposed: Proposed) -> dict[tuple[int, ...], tuple[float, float]]:
        found: list[tuple[int, ...]] = []
        for token, parent in zip(proposed.tree.tokens, proposed.tree.parents, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        return {path: (round(proposed.chances[node], 9), proposed.promises[node]) for node, path in enumerate(found)}

    all_paths, left = paths(whole), whole.behind(came)
    before = all_paths.get(tuple(came), (1.0, 0.0))[0]
    expected = {path[len(came) :]: each for path, each in all_paths.items() if path[: len(came)] == tuple(came)}
    expected.pop((), None)
    if left is None:
        assert not expected
        return
    assert paths(left).keys() == expected.keys()
    for path, (chance, promise) in paths(left).items():
        assert chance == pytest.approx(expected[path][0] / before, rel=1e-6)
        assert promise == expected[path][1]


# What steps take.

ROUND, LARGER, CHAIN = draft_plan.given(7, 7), draft_plan.given(15, 15), draft_plan.chain(3)


def seconds_of(batch: int = 1, like: Seconds | None = None) -> Seconds:
    return Seconds([ROUND, LARGER, CHAIN], CAPTURED, batch, 0.001, like)


def test_before_any_round_costs_are_guessed_and_grow_with_the_batch() -> None:
    alone, together = seconds_of(), seconds_of(8)
    assert alone.plain == alone.of(None) == 0.001
    assert 0.001 < alone.of(ROUND) < alone.of(LARGER) < alone.of(CHAIN)
    assert together.of(LARGER) > 1.5 * alone.of(LARGER)


def test_a_round_costs_more_as_all_steps_do() -> None:
    found = seconds_of()
    for _ in range(60):
        found.record(None, 0.001)
        found.record(ROUND, 0.003)
    assert found.of(ROUND) == pytest.approx(0.003, rel=0.05)
    assert found.plain == pytest.approx(0.001, rel=0.05)
    assert found.of(LARGER) > 0.0013, "the others as far as they share the error"
    for _ in range(100):
        found.record(None, 0.002)
    assert found.plain == pytest.approx(0.002, rel=0.02)
    assert found.of(ROUND) == pytest.approx(0.006, rel=0.2), "what is not seen goes back to the guess"
    found.record(ROUND, 1.0)
    assert found.of(ROUND) < 0.009, "an interrupted step says little"


def test_what_one_batch_size_has_shown_is_the_guess_for_another() -> None:
    known = seconds_of()
    for _ in range(40):
        known.record(None, 0.002)
        known.record(ROUND, 0.005)
    other = seconds_of(2, known)
    assert other.plain == 0.001, "but for the load, which may be another one"
    assert other.of(ROUND) == pytest.approx(2.5 * 0.001, rel=0.15)


def test_waiting_is_what_plain_steps_take_longer_for_it() -> None:
    found = seconds_of()
    for _ in range(60):
        found.record(None, 0.001)
        found.record(None, 0.0013, waited=True)
    assert found.of(None) - found.plain == pytest.approx(0.0003, rel=0.2)


def test_whatever_steps_take_figures_stay_numbers() -> None:
    """Rounds, waiting and late steps in any order, some of which take a thousand times as long."""
    rng = random.Random(0)
    for _ in range(40):
        found = seconds_of()
        for _ in range(400):
            plan = rng.choice([None, None, ROUND, LARGER, CHAIN])
            seconds = rng.choice([0.0008, 0.001, 0.002, 0.004, 1e-5, 0.5])
            found.record(plan, seconds, rng.random() < 0.3, rng.random() < 0.4, rng.choice([1, 1, 7]))
            assert 1e-9 < found.plain < 1e3 and all(1e-6 < found.ratio(each) < 1e6 for each in (None, ROUND, CHAIN))
            assert min(found._variance, *found._variances) > 0.0


# What drafting may lose.


def test_no_window_loses_more_than_the_account_holds() -> None:
    """Rounds are taken as long as they are affordable, and give nothing; what was saved before pays for a few more, as
    long as these should pay."""
    for saved, cost, pays in ((0.0, 0.4, True), (500.0, 0.4, True), (500.0, 1.1, True), (500.0, 0.4, False)):
        account, lost = Account(), []
        for _ in range(200):
            account.ended(2.0, saved / 200)
            lost += [-saved / 400] * 2
        for _ in range(3000):
            taken = cost <= account.affordable(cost, pays)
            account.risks.append(cost if taken else 0.0)
            account.ended(1.0, -cost if taken else 0.0)
            lost.append(cost if taken else 0.0)
        sums = np.cumsum([0.0, *lost])
        worst = max(sums[Account.WINDOW :] - sums[: -Account.WINDOW])
        assert 0.6 * Account.MOST_LOST < worst <= Account.MOST_LOST + (Account.MOST_EARNED if saved and pays else 0.0)
        assert sum(lost[-1500:]) > 2 * cost, "what was lost is forgotten behind the window"


def test_a_spell_is_soon_over_and_the_rest_is_for_later() -> None:
    account = Account()
    account.ended(1.0, 3.0)

    def lose() -> int:
        count = 0
        while account.affordable(0.5, pays=False) >= 0.5:
            account.ended(1.0, -0.5)
            count += 1
        return count

    assert 4 <= lose() <= 7
    waits = []
    while len(waits) < 3:
        waited = 0
        while not lose():
            account.ended(1.0, 0.0)
            waited += 1
        waits.append(waited)
    assert waits == sorted(waits) and waits[0] < 30 and sum(waits) < Account.WINDOW


def test_what_is_under_way_is_spent_until_it_has_ended() -> None:
    account = Account()
    for _ in range(3):
        account.risks.append(1.5)
    assert account.left(True) < 0.2 and account.affordable(0.1, True) < 0.1
    for _ in range(3):
        account.ended(3.0, 0.8)
    left = account.left(True)
    assert 0.0 < left - account.left(False) <= Account.EARNED_SHARE * 3 * 0.8, "what pays may lose what was saved"
    account.risks.append(3.0)
    account.risks.clear()
    assert account.left(True) == left


def test_only_the_cheapest_round_may_lose_what_is_left() -> None:
    account = Account()
    account.ended(1.0, 3.0)
    assert account.affordable(0.4, False) >= 1.5
    account.ended(1.0, -2.6)
    assert 0.4 <= account.affordable(0.4, False) < 0.45


def test_a_draft_in_one_pass_is_not_guessed_by_levels() -> None:
    once, long, short = CAPTURED.in_one_pass(), chain(12), chain(2)
    assert once.ratio(long, 1) - once.ratio(short, 1) == pytest.approx(10 * CAPTURED.node)
    assert once.ratio(short, 1) == pytest.approx(CAPTURED.ratio(short, 1))
