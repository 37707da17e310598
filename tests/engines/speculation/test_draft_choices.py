"""Trees of choices: what is refused, and the plan against a drawing of the tree by hand."""

from __future__ import annotations

import random

import pytest

from edgellm.engines.errors import EngineError
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.speculation.draft_plan import checked_choices, choices_plan


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "expected a list of paths"),
        ({"0": 1}, "expected a list of paths"),
        ("mc_sim", "expected a list of paths"),
        ([[0], []], "malformed"),
        ([[0], 1], "malformed"),
        ([[0], [-1]], "malformed"),
        ([[0], [True]], "malformed"),
        ([[0], [0.0]], "malformed"),
        ([["0"]], "malformed"),
        ([[0], [0]], r"\[0\] is there twice"),
        ([[0], [1, 0]], r"\[1, 0\] has no parent: \[1\] is missing"),
        ([[0], [0, 0, 0]], r"no parent: \[0, 0\] is missing"),
        ([[1]], r"gap before the choice \[1\]: the likelier \[0\] is missing"),
        ([[0], [1], [0, 0], [0, 2]], r"gap before the choice \[0, 2\]: the likelier \[0, 1\]"),
    ],
)
def test_malformed_trees_are_refused_by_the_choice(choices: object, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        checked_choices(choices)


def test_the_order_of_the_list_does_not_matter() -> None:
    nodes = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
    shuffled = random.Random(3).sample(nodes, len(nodes))
    assert choices_plan(shuffled) == choices_plan(nodes)


def test_a_small_tree_by_hand() -> None:
    """Root: 0 1 2; 0 has the children 3 and 4, 2 (slot 1) the child 6; 4 (slot 0 of level 2) the child 12."""
    plan = choices_plan([[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0]])
    assert (plan.top_k, plan.steps, plan.tree_size) == (3, 3, 8)
    assert plan.frontiers == ((0, 2, -1), (4, -1, -1))
    assert plan.selection == (0, 1, 2, 3, 4, 6, 12)


def test_width_follows_from_the_widest_frontier_too() -> None:
    plan = choices_plan([[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]])
    assert plan.top_k == 2
    assert plan.frontiers == ((0, 1), (2, 4))
    assert plan.selection == (0, 1, 2, 4, 6, 8)


def test_a_shortened_tree_keeps_its_first_levels() -> None:
    plan = choices_plan([[0], [1], [0, 0], [0, 1], [0, 0, 0]]).shortened(2)
    assert plan.choices == ((0,), (1,), (0, 0), (0, 1))
    assert (plan.steps, plan.tree_size) == (2, 5)
    assert plan.selection == (0, 1, 2, 3)


def test_a_deep_narrow_tree_is_widened_for_wider_engines() -> None:
    plan = choices_plan([[0], [0, 0], [0, 1], [0, 1, 0]]).for_engines(EngineLimits(1, 16, 96, 5, 3, 16), True)
    assert plan.frontiers == ((0, -1, -1, -1, -1), (6, -1, -1, -1, -1))
    assert plan.selection == (0, 5, 6, 30)
