"""What is left of a proposal, what steps take, and what drafting without a model may lose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from edgellm.drafting.seconds import PLAIN
from edgellm.drafting.worth import FIRST_CREDIT, FIRST_SECONDS, MOST_CREDIT, WAITED, Proposed, Rates
from edgellm.engines.speculation import draft_plan
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
    whole = Proposed.of(GivenTree(tokens, parents), chances, promises, [*range(len(tokens))])

    def paths(proposed: Proposed) -> dict[tuple[int, ...], tuple[float, float, int]]:
        found: list[tuple[int, ...]] = []
        for token, parent in zip(proposed.tree.tokens, proposed.tree.parents, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        return {
            path: (round(proposed.chances[node], 9), proposed.promises[node], proposed.kinds[node])
            for node, path in enumerate(found)
        }

    all_paths, left = paths(whole), whole.behind(came)
    before = all_paths.get(tuple(came), (1.0, 0.0, 0))[0]
    expected = {path[len(came) :]: each for path, each in all_paths.items() if path[: len(came)] == tuple(came)}
    expected.pop((), None)
    if left is None:
        assert not expected
        return
    assert paths(left).keys() == expected.keys()
    for path, (chance, promise, kind) in paths(left).items():
        assert chance == pytest.approx(expected[path][0] / before, rel=1e-6)
        assert (promise, kind) == expected[path][1:]
    assert left.sums[-1] == pytest.approx(sum(left.chances))


# What steps take, and what drafting may lose.


def rates(warm_ups: int = 0) -> Rates:
    return Rates({PLAIN: 0.001, WAITED: 0.001, "given 7": 0.0012}, 1.0, warm_ups)


ROUND = draft_plan.given(7, 7)


def test_a_round_costs_more_as_all_steps_do() -> None:
    found = rates()
    for _ in range(60):
        found.record(None, [1], 0.001)
        found.record(ROUND, [1], 0.003)
    assert found.seconds("given 7") == pytest.approx(0.003, rel=0.02)
    for _ in range(100):
        found.record(None, [1], 0.002)
    assert found.seconds(PLAIN) == pytest.approx(0.002, rel=0.02)
    assert found.seconds("given 7") == pytest.approx(0.006, rel=0.05)
    found.record(ROUND, [1], 1.0)
    assert found.seconds("given 7") < 0.007, "an interrupted step says little"


def test_what_the_index_may_have_delayed_is_no_cost_of_plain_steps() -> None:
    found = rates()
    for _ in range(100):
        found.record(None, [1], 0.0015, asked=0.0005)
    assert found.seconds(PLAIN) == 0.001
    for _ in range(100):
        found.record(None, [1], 0.0009, waited=True)
    assert found.seconds(PLAIN) <= found.seconds(WAITED) < 0.00092, "a step is no slower for not having been waited for"
    assert found.waiting == pytest.approx(0.0, abs=1e-6)


def test_what_may_be_lost_is_bounded_and_what_was_saved_may_be_spent() -> None:
    found, lost = rates(), 0.0
    while found.affords:
        found.record(ROUND, [1], 0.002)
        lost += 0.001
    assert lost <= max(FIRST_SECONDS, FIRST_CREDIT * 0.001) * 1.1 + 0.001
    count = 0
    while not found.affords:
        found.record(None, [1], 0.001)
        count += 1
    assert 10 <= count <= 102, "a debt of one step at most is paid with a hundredth of the time"
    found.record(ROUND, [8], 0.002)
    for _ in range(4):
        assert found.affords
        found.record(ROUND, [1], 0.002)
    for _ in range(1000):
        found.record(ROUND, [8], 0.001)
    spent = 0
    while found.affords:
        found.record(None, [1], 0.0015, asked=0.0005)
        spent += 1
    assert spent == pytest.approx(MOST_CREDIT / 0.485, rel=0.1)
    while not found.affords:
        found.record(None, [1], 0.001)
    late: Sequence[float] = np.tile([0.0014, 0.0006], 100).tolist()
    for seconds in late:  # what was late is made up for, so that nothing is lost
        found.record(None, [1], seconds, asked=0.0005)
    assert found.affords
