"""The costs of rounds as finished rounds correct them: load of the machine, and measured costs that were wrong."""

from __future__ import annotations

import pytest

from edgellm.drafting.controller import CostModel
from edgellm.drafting.costs import PLAIN, RoundCosts

NAMES = (PLAIN, "chain 3", "chain 5")
COSTS = RoundCosts({PLAIN: {1: 0.004, 2: 0.006}, "chain 3": {1: 0.010, 2: 0.015}, "chain 5": {1: 0.012, 2: 0.02}})


def test_before_any_round_costs_are_those_measured():
    model = CostModel(COSTS, NAMES)
    assert [model.seconds(name, 2) for name in NAMES] == [0.006, 0.015, 0.02]


def test_load_raises_what_was_not_in_use_as_well():
    model = CostModel(COSTS, NAMES)
    for _ in range(20):
        model.record("chain 5", 1, 3 * 0.012)
    assert model.seconds("chain 5", 1) == pytest.approx(0.036, rel=0.05)
    assert model.seconds(PLAIN, 1) == pytest.approx(0.012, rel=0.15)
    assert not model.contradicted


def test_rounds_of_two_configurations_tell_load_from_a_wrong_cost():
    model = CostModel(COSTS, NAMES)
    for _ in range(30):
        model.record("chain 5", 1, 2 * 0.012)
        model.record(PLAIN, 1, 0.004)
    assert model.seconds("chain 5", 1) == pytest.approx(0.024, rel=0.05)
    assert model.seconds(PLAIN, 1) == pytest.approx(0.004, rel=0.05)
    assert model.seconds("chain 3", 1) < 0.017  # between both: it may be either
    assert model.contradicted


def test_one_interrupted_round_counts_little():
    model = CostModel(COSTS, NAMES)
    for _ in range(20):
        model.record("chain 5", 1, 0.012)
        model.record(PLAIN, 1, 0.004)
    model.record("chain 5", 1, 60.0)
    assert model.seconds("chain 5", 1) < 2 * 0.012
    assert model.seconds("chain 5", 1) / model.seconds(PLAIN, 1) < 1.2 * 3
    assert not model.contradicted
