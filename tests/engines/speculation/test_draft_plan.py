"""Plans: sizes, numbering of static trees, shortening, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgellm.drafting.config import DraftingConfig, load_choices, named_choices
from edgellm.drafting.drafter import first_fitting, fitting_plans
from edgellm.engines.errors import EngineError
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, choices_plan, tree
from edgellm.errors import RequestError
from edgellm.kernels.tree.contract import candidate_count

LIMITS = EngineLimits(1, 16, 96, 10, 6, 60)

READY = SimpleNamespace(is_ready=lambda *_: True)


def test_a_chain_is_a_static_tree_of_width_one() -> None:
    plan = chain(3)
    assert (plan.top_k, plan.steps, plan.tree_size, plan.longest, plan.candidates) == (1, 3, 4, 4, 3)
    assert plan.frontiers == ((0,), (1,))
    assert plan.selection == (0, 1, 2)
    assert tree(1, 5, 60) == chain(5)
    assert chain(1).frontiers == ()


def test_candidates_are_numbered_by_level_frontier_slot_and_rank() -> None:
    assert candidate_count(6, 10) == 10 + 5 * 100
    plan = choices_plan([[0], [1], [2], [0, 0], [2, 0], [2, 1], [2, 0, 0], [2, 0, 1]])
    assert plan.top_k == 3
    assert plan.selection == (0, 1, 2, 3, 6, 7, 12, 13)


def test_a_dynamic_tree_has_no_more_nodes_than_candidates() -> None:
    assert tree(3, 1, 60).tree_size == 4
    assert tree(2, 2, 60).tree_size == 7
    with pytest.raises(EngineError, match="verify_tree_size is 8"):
        DraftPlan("tree", 2, 2, 8)


@pytest.mark.parametrize("size", [-1, 0, 1])
def test_a_tree_of_its_root_alone_is_refused_however_narrow_it_is(size: int) -> None:
    for top_k in (1, 2):
        with pytest.raises(EngineError, match=rf"verify_tree_size is {size}: expected at least 2"):
            tree(top_k, 3, size)


@pytest.mark.parametrize(
    ("plan", "room", "steps", "size"),
    [
        (tree(4, 4, 16), 99, 4, 16),
        (tree(4, 4, 16), 5, 4, 16),
        (tree(4, 4, 16), 4, 3, 16),
        (tree(4, 4, 16), 2, 1, 5),
        (chain(4), 3, 2, 3),
    ],
)
def test_a_plan_is_shortened_to_the_room_there_is(plan: DraftPlan, room: int, steps: int, size: int) -> None:
    fitting = first_fitting(fitting_plans(plan), READY, 1, room, False)
    assert fitting is not None
    assert (fitting.steps, fitting.tree_size, fitting.longest <= room) == (steps, size, True)


def test_no_plan_fits_where_only_one_token_is_left() -> None:
    assert first_fitting(fitting_plans(tree(4, 4, 16)), READY, 1, 1, False) is None
    assert first_fitting(fitting_plans(chain(2)), READY, 1, 1, False) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_top_k": 0}, "draft_top_k is 0: expected a whole number from 1 to 64"),
        ({"draft_top_k": -3}, "draft_top_k is -3"),
        ({"draft_steps": 0}, "draft_steps is 0"),
        ({"draft_steps": 2.5}, "draft_steps is 2.5"),
        ({"draft_steps": True}, "draft_steps is True"),
        ({"verify_tree_size": 1}, "verify_tree_size is 1: expected a whole number from 2 to 64"),
        ({"verify_tree_size": -60}, "verify_tree_size is -60"),
        ({"kind": "forest"}, "tree, chain, choices"),
        ({"acceptance": "generous"}, "exact, typical"),
        ({"acceptance": "typical", "posterior_threshold": 0.0}, "posterior_threshold is 0.0"),
        ({"posterior_alpha": float("nan")}, "posterior_alpha is nan"),
        ({"posterior_alpha": 1.5}, "posterior_alpha is 1.5"),
        ({"sampled": True}, "only a chain can be sampled"),
        ({"sampled": 1, "kind": "chain"}, "expected true or false"),
        ({"sampled": True, "kind": "chain", "acceptance": "typical"}, "exact test"),
        ({"verify_tree_size": 65}, "verify_tree_size is 65: expected a whole number from 2 to 64"),
        ({"draft_steps": 10**12}, "draft_steps is 1000000000000: expected a whole number from 1 to 32"),
        ({"choices": [[0]]}, "kind 'choices' only"),
        ({"kind": "choices", "choices": "mc_sim"}, "mc_sim_7b_63, eagle_25"),
        ({"kind": "choices", "choices": [[0], [2]]}, r"\[1\] is missing"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        DraftingConfig(**settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            DraftingConfig(draft_top_k=11),
            "draft_top_k is 11 for a tree: the engines were built for at most 10.*--draft-top-k 11",
        ),
        (DraftingConfig(draft_steps=7), "draft_steps is 7 for a tree"),
        (DraftingConfig(kind="chain", draft_steps=7), "draft_steps is 7 for a chain"),
        (
            DraftingConfig(kind="choices", choices=[[0] * n for n in range(1, 8)]),
            "draft_steps is 7 for a tree of 7 choices",
        ),
        (
            DraftingConfig(kind="choices", choices=[[n] for n in range(11)]),
            "draft_top_k is 11 for a tree of 11 choices",
        ),
    ],
)
def test_a_plan_beyond_the_engines_is_refused_with_the_remedy(config: DraftingConfig, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        config.plan(LIMITS)


def test_a_tree_of_more_nodes_than_the_engines_verify_is_refused() -> None:
    with pytest.raises(EngineError, match="verify_tree_size is 33 for a tree: the engines were built for at most 32"):
        DraftingConfig(verify_tree_size=33).plan(EngineLimits(1, 16, 96, 10, 6, 30))


def test_a_directory_without_a_draft_is_refused() -> None:
    with pytest.raises(EngineError, match="no draft model"):
        DraftingConfig().plan(EngineLimits(1, 16, 96))


def test_the_defaults_and_the_largest_plan_of_engines() -> None:
    assert DraftingConfig().plan(LIMITS) == tree(10, 6, 60)
    assert DraftingConfig.largest(EngineLimits(1, 16, 96, 4, 3, 12)).plan(EngineLimits(1, 16, 96, 4, 3, 12)) == tree(
        4, 3, 12
    )


def test_engines_of_fixed_shapes_take_their_own_widths() -> None:
    narrow = DraftingConfig(kind="choices", choices="eagle_25").plan(LIMITS)
    assert narrow.top_k == 4
    wide = narrow.for_engines(LIMITS, fixed_shapes=True)
    assert (wide.top_k, wide.choices, len(wide.selection)) == (10, narrow.choices, 25)
    assert narrow.for_engines(LIMITS, fixed_shapes=False) is narrow
    assert chain(5).for_engines(LIMITS, fixed_shapes=True) == chain(5)
    padded = tree(4, 3, 12).for_engines(LIMITS, fixed_shapes=True)
    assert (padded.top_k, padded.columns, padded.candidates, padded.longest) == (4, 10, 210, 4)
    assert (padded.shortened(2).columns, padded.name) == (10, "tree 4/3/12")
    assert tree(4, 3, 12).for_engines(LIMITS, fixed_shapes=False) == tree(4, 3, 12)
    assert tree(4, 1, 4).for_engines(LIMITS, fixed_shapes=True) == tree(4, 1, 4)
    with pytest.raises(EngineError, match=r"draft_top_k is 12 .* at most 10.* build with --draft-top-k 12"):
        tree(12, 3, 12).for_engines(LIMITS, fixed_shapes=True)


@pytest.mark.parametrize(("name", "levels"), [("mc_sim_7b_63", [10, 28, 23, 2]), ("eagle_25", [4, 8, 8, 3, 2])])
def test_the_named_trees_have_the_published_shapes(name: str, levels: list[int]) -> None:
    nodes = named_choices(name)
    assert [sum(len(node) == depth for node in nodes) for depth in range(1, len(levels) + 1)] == levels
    plan = DraftingConfig(kind="choices", choices=name).plan(LIMITS)
    assert plan.tree_size == sum(levels) + 1
    assert all(sum(slot >= 0 for slot in frontier) <= 10 for frontier in plan.frontiers)


def test_choices_come_from_json_and_yaml_files(tmp_path) -> None:
    file = tmp_path / "tree.json"
    file.write_text("[[0], [1], [0, 0]]")
    assert load_choices(file) == ((0,), (1,), (0, 0))
    file.write_text("- [0]\n- [0, 1]\n")
    with pytest.raises(RequestError, match=r"tree\.json: there is a gap before the choice \[0, 1\]"):
        load_choices(file)
    file.write_text("[[0]")
    with pytest.raises(RequestError, match="not valid YAML"):
        load_choices(file)
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        load_choices(tmp_path / "missing.json")
