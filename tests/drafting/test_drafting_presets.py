"""Drafting presets, settings and their combination with options."""

from __future__ import annotations

import math

import pytest

from edgellm.drafting.config import (
    SIZES,
    DraftingConfig,
    checked_drafting,
    default_drafting,
    drafting_config,
    load_presets,
    merged_drafting,
    preset_values,
)
from edgellm.engines.model.limits import EngineLimits
from edgellm.errors import RequestError

LIMITS = EngineLimits(draft_top_k=10, draft_steps=6, verify_tree_size=64)


def test_presets_are_complete_and_can_be_served():
    presets = load_presets()
    assert set(presets) == {"cpu", "h200", "rtx", "thor", "orin"}
    capabilities = [name for values in presets.values() for name in values["compute_capabilities"]]
    assert len(capabilities) == len(set(capabilities)) and {"sm_87", "sm_90", "sm_110", "sm_120"} <= set(capabilities)
    for name, values in presets.items():
        assert set(values) == {"compute_capabilities", "adaptive", *SIZES}
        plan = drafting_config(LIMITS, "numpy", preset=name).plan(LIMITS)
        size = values["draft_steps"] + 1 if values["draft_top_k"] == 1 else values["verify_tree_size"]
        assert (plan.top_k, plan.steps, plan.tree_size) == (values["draft_top_k"], values["draft_steps"], size)


def test_a_preset_is_cut_to_what_the_engines_serve():
    small = EngineLimits(draft_top_k=3, draft_steps=2, verify_tree_size=8)
    for preset in load_presets():
        config = drafting_config(small, "numpy", preset=preset)
        assert (config.draft_top_k, config.draft_steps, config.verify_tree_size) == (1 if preset == "cpu" else 3, 2, 8)
        config.plan(small)
    assert default_drafting(small, "numpy").adaptive
    assert default_drafting(EngineLimits(), "numpy") is None


def test_on_a_gpu_trees_are_as_wide_as_the_plans():
    assert preset_values(LIMITS, "tensorrt", "orin")["draft_top_k"] == 10
    assert preset_values(LIMITS, "numpy", "orin")["draft_top_k"] == 8


def test_what_is_asked_for_comes_on_top():
    config = drafting_config(LIMITS, "numpy", {"draft_steps": 3, "adaptive": False}, "h200")
    assert (config.draft_top_k, config.draft_steps, config.adaptive) == (10, 3, False)
    assert drafting_config(LIMITS, "numpy", {"draft_top_k": 1}, "h200").plan(LIMITS).name == "chain 6"
    tree = drafting_config(LIMITS, "numpy", {"choices": "eagle_25"})
    assert tree.kind == "choices" and tree.plan(LIMITS).tree_size == 26
    assert drafting_config(LIMITS, "numpy", {"draft_steps": 6}).plan(LIMITS).name == "chain 6"
    assert drafting_config(LIMITS, "numpy", {"verify_tree_size": 9}).plan(LIMITS).name == "tree 10/5/9"
    assert drafting_config(LIMITS, "numpy", {"draft_top_k": 4}).plan(LIMITS).name == "tree 4/5/60"
    chain = drafting_config(LIMITS, "numpy", {"sampled": True, "draft_steps": 4})
    assert (chain.kind, chain.draft_steps, chain.adaptive) == ("chain", 4, False)


def test_typical_acceptance_takes_alpha_from_the_threshold_and_is_not_adaptive_by_itself():
    config = drafting_config(LIMITS, "numpy", {"acceptance": "typical", "posterior_threshold": 0.16})
    assert math.isclose(config.posterior_alpha, 0.4) and not config.adaptive
    given = {"acceptance": "typical", "posterior_threshold": 0.16, "posterior_alpha": 0.7, "adaptive": True}
    assert drafting_config(LIMITS, "numpy", given).posterior_alpha == 0.7
    assert drafting_config(LIMITS, "numpy", given).adaptive
    default = DraftingConfig(acceptance="typical")
    assert math.isclose(default.posterior_alpha, math.sqrt(default.posterior_threshold))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"draft_tip_k": 3}, "there is no drafting setting 'draft_tip_k': did you mean draft_top_k"),
        ({"draft": "yes"}, "draft is 'yes': expected true, false or null"),
        ({"preset": "laptop"}, "preset is 'laptop': expected one of cpu, h200"),
        ({"draft_top_k": 0}, "draft_top_k is 0: expected a whole number from 1 to 64"),
        ({"draft_steps": -2}, "draft_steps is -2"),
        ({"verify_tree_size": 1}, "verify_tree_size is 1: expected a whole number from 2 to 64"),
        ({"draft_steps": True}, "draft_steps is True"),
        ({"acceptance": "lenient"}, "acceptance is 'lenient': expected one of exact, typical"),
        ({"posterior_alpha": 0.2}, "posterior_alpha is given, but acceptance is exact"),
        ({"acceptance": "typical", "posterior_threshold": 0.0}, "posterior_threshold is 0.0"),
        ({"draft": False, "draft_steps": 3}, "draft_steps is given, but draft is false"),
        ({"choices": "eagle_25", "draft_top_k": 4}, "draft_top_k is given beside choices"),
        ({"choices": [[0], [0, 0, 0]]}, r"the choice \[0, 0, 0\] has no parent"),
        ({"choices": "missing.yaml"}, "choices file .*missing.yaml cannot be read"),
        ({"sampled": True, "acceptance": "typical"}, "a sampled chain has its own exact test"),
        ({"sampled": True, "kind": "tree"}, "only a chain can be sampled"),
    ],
)
def test_wrong_settings_are_named(values, message):
    with pytest.raises(RequestError, match=message):
        checked_drafting(values)


def test_a_choices_file_is_read_relative_to_its_folder(tmp_path):
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    assert checked_drafting({"choices": "tree.json"}, tmp_path) == {"choices": ((0,), (1,), (0, 0))}
    assert checked_drafting({"choices": None, "draft": None}) == {}


def test_options_win_over_settings_that_contradict_them():
    settings = {"choices": "eagle_25", "adaptive": False}
    assert merged_drafting(settings, {"draft_top_k": 4}) == {"adaptive": False, "draft_top_k": 4}
    assert merged_drafting({"draft_top_k": 4, "sampled": True}, {"choices": "eagle_25"}) == {"choices": "eagle_25"}
    assert merged_drafting({"draft": True, "draft_steps": 4}, {"draft": False}) == {"draft": False}
    assert merged_drafting({"draft": False}, {"draft_steps": 4}) == {"draft_steps": 4}
    typical = {"acceptance": "typical", "posterior_threshold": 0.2}
    assert merged_drafting(typical, {"acceptance": "exact"}) == {"acceptance": "exact"}
    assert merged_drafting(typical, {"posterior_threshold": 0.1}) == typical | {"posterior_threshold": 0.1}
    assert merged_drafting({"draft_steps": 2}, {}) == {"draft_steps": 2}
    assert merged_drafting({"kind": "choices", "adaptive": True}, {"draft_steps": 2}) == {
        "adaptive": True,
        "draft_steps": 2,
    }
