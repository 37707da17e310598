"""Quantized mixtures of experts: what is written, how often experts were chosen, and what the model computes then."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mtp_checkpoints import golden_checkpoint
from quantized_checkpoints import dense_again, dequantized, logits, stored
from safetensors.numpy import load_file, save_file
from tiny_families import MIXTURES

from edgellm.commands.quantize import report_lines
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.families import decoder_config
from edgellm.engines.families.drafts import read_mtp
from edgellm.engines.quantizer import calibration
from edgellm.engines.quantizer.options import QuantizationOptions
from edgellm.engines.quantizer.quantizer import quantize_checkpoint

Make = Callable[..., Path]
TEXTS = [[(7 * index + 3) % 250 for index in range(60)], [(11 * index + 5) % 250 for index in range(50)]]
TOKENS = sum(map(len, TEXTS))
EXPERTS, CHOSEN = 8, 3


def choose_the_first(source: Path) -> None:
    """Let the router of the first layer score all experts alike: ties go to the lower ids."""
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.gate.weight"][:] = 0
    save_file(tensors, source / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "options", "most"),
    [
        ("qwen3_moe", QuantizationOptions(4, 32, True, "awq"), 0.6),
        ("qwen3_moe", QuantizationOptions(4, 32, False, "gptq"), 0.6),
        ("qwen3_5_moe", QuantizationOptions(8, None, True, "awq"), 0.1),
        pytest.param("lfm2_moe", QuantizationOptions(8, None, True, "gptq"), 0.1, marks=pytest.mark.slow),
        ("granitemoe", QuantizationOptions(8, None, True, "rtn"), 0.6),
        pytest.param("granite4_moe", QuantizationOptions(4, 32, False, "gptq"), 0.6, marks=pytest.mark.slow),
        ("nemotron_h_moe", QuantizationOptions(8, None, True, "awq"), 0.1),
    ],
)
def test_each_expert_is_packed_by_itself(
    family: str,
    options: QuantizationOptions,
    most: float,
    make_checkpoint: Make,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, rows in (("_SAMPLED", 16), ("_SAMPLED_OF_EXPERT", 8)):  # of so few tokens some are left for moments
        monkeypatch.setattr(calibration, name, rows)
    source, target = make_checkpoint(tmp_path / "model", 5, **MIXTURES[family]), tmp_path / "target"
    report = quantize_checkpoint(source, target, options, TEXTS if options.method != "rtn" else ())
    tensors = stored(target)
    packed = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
    published = load_file(source / "model.safetensors")
    of_experts = {name.removesuffix(".weight") for name in published if ".experts." in name}
    assert of_experts and of_experts <= packed
    routers = [name for name in published if re.search(r"(\.gate|router\.layer|shared_expert_gate)\.weight$", name)]
    for name in routers:
        np.testing.assert_array_equal(tensors[name], published[name])
    ignored = json.loads((target / "config.json").read_text())["quantization_config"]["ignore"]
    patterns = [each.removeprefix("re:") for each in ignored if each.startswith("re:")]
    assert all(any(re.match(each, name.removesuffix(".weight")) for each in patterns) for name in routers)
    assert not any(re.match(each, name) for each in patterns for name in of_experts)
    for layer in report.chosen.values():
        assert len(layer) == EXPERTS and sum(layer) == CHOSEN * TOKENS
    assert (not report.chosen) == (options.method == "rtn")
    found, twin = (
        logits(target, TEXTS[:1]),
        logits(dense_again(source, target, tmp_path / "twin", options.bits), TEXTS[:1]),
    )
    expected = logits(source, TEXTS[:1])
    np.testing.assert_allclose(found, twin, rtol=0, atol=0.02 * np.abs(expected).max())
    # Random experts amplify: one that is chosen otherwise is another function.
    apart = np.abs(found - expected).mean() / np.abs(expected).mean()
    assert apart < most
    if options.method == "rtn":  # where no columns are scaled
        for module in sorted(of_experts)[::7]:
            weight = published[f"{module}.weight"].astype(np.float32)
            difference = np.abs(dequantized(tensors, module, options.bits) - weight)
            assert difference.max() <= 0.01 * np.abs(weight).max()


@pytest.mark.parametrize("method", [pytest.param("awq", marks=pytest.mark.slow), "gptq"])
def test_experts_that_no_text_reached_are_rounded_to_nearest_and_named(
    method: str, make_checkpoint: Make, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "model", 5, **MIXTURES["qwen3_moe"])
    choose_the_first(source)
    report = quantize_checkpoint(source, tmp_path / "target", QuantizationOptions(4, 32, True, method), TEXTS)
    assert report.chosen[0] == [TOKENS] * CHOSEN + [0] * (EXPERTS - CHOSEN)
    said = next(line for line in report_lines(report) if line.startswith("  experts"))
    assert f"each chosen by 0 to {TOKENS} tokens" in said and "rounded to nearest (layer 0: 3, 4, 5, 6, 7" in said
    nearest = quantize_checkpoint(source, tmp_path / "nearest", QuantizationOptions(4, 32, True, "rtn"))
    assert nearest.chosen == {} and not any(line.startswith("  experts") for line in report_lines(nearest))
    found, expected = stored(tmp_path / "target"), stored(tmp_path / "nearest")
    for expert in range(CHOSEN, EXPERTS):
        for part in ("gate_proj", "up_proj", "down_proj"):
            module = f"model.layers.0.mlp.experts.{expert}.{part}"
            for kind in ("weight_packed", "weight_scale"):
                np.testing.assert_array_equal(found[f"{module}.{kind}"], expected[f"{module}.{kind}"])
    module = "model.layers.2.mlp.experts.0.up_proj"
    assert (found[f"{module}.weight_packed"] != expected[f"{module}.weight_packed"]).any()


def test_what_was_counted_is_kept_with_the_layers_that_are_done(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", 5, **MIXTURES["qwen3_moe"])
    options = QuantizationOptions(8, None, True, "rtn")
    whole = quantize_checkpoint(source, tmp_path / "whole", options, TEXTS)

    def stop(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("layers", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "target", options, TEXTS, progress=stop)
    again = quantize_checkpoint(source, tmp_path / "target", options, TEXTS)
    assert again.resumed == 2 and again.chosen == whole.chosen and len(again.chosen) == 2
    for name, values in stored(tmp_path / "whole").items():
        np.testing.assert_array_equal(stored(tmp_path / "target")[name], values)


def test_stacks_become_tensors_of_each_expert(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", 5, **MIXTURES["qwen3_moe"])
    options = QuantizationOptions(4, 32, True, "rtn")
    quantize_checkpoint(source, tmp_path / "apart", options)
    tensors = load_file(source / "model.safetensors")
    for layer in (0, 2):
        module = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{module}.{expert}.{part}_proj.weight") for expert in range(EXPERTS)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{module}.gate_up_proj": np.concatenate((gate, up), 1), f"{module}.down_proj": down}
    save_file(tensors, source / "model.safetensors")
    quantize_checkpoint(source, tmp_path / "stacked", options)
    apart, stacked = stored(tmp_path / "apart"), stored(tmp_path / "stacked")
    assert apart.keys() == stacked.keys()
    for name, values in apart.items():
        np.testing.assert_array_equal(stacked[name], values)


def through_expert(
    weights: dict[str, np.ndarray], published: dict[str, np.ndarray], expert: int, rows: np.ndarray
) -> np.ndarray:
    """What one of gpt-oss's experts gives for `rows`, float64: `weights` [N, K], the biases as `published`."""
    module = "model.layers.1.mlp.experts"
    biases = {
        part: published[f"{module}.{part}_bias"][expert].astype(np.float64) for part in ("gate_up_proj", "down_proj")
    }
    both = rows @ weights["gate_up_proj"].T.astype(np.float64) + biases["gate_up_proj"]
    gate, up = np.minimum(both[:, 0::2], 7), np.clip(both[:, 1::2], -7, 7)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate)) @ weights["down_proj"].T.astype(np.float64) + biases[
        "down_proj"
    ]


@pytest.mark.parametrize(
    "options", [QuantizationOptions(4, 32, True, "gptq"), QuantizationOptions(4, 32, False, "awq")]
)
def test_gpt_oss_s_stacks_are_turned_and_keep_gate_and_up_in_turn(
    options: QuantizationOptions, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, rows in (("_SAMPLED", 16), ("_SAMPLED_OF_EXPERT", 8)):
        monkeypatch.setattr(calibration, name, rows)
    source = make_checkpoint(tmp_path / "model", 5, **MIXTURES["gpt_oss"])
    published = load_file(source / "model.safetensors")
    for layer in range(3):  # as it is published: [E, H, 2 I] and [E, I, H]
        module = f"model.layers.{layer}.mlp.experts"
        for part in ("gate_up_proj", "down_proj"):
            apart = [published.pop(f"{module}.{expert}.{part}.weight").T for expert in range(EXPERTS)]
            published[f"{module}.{part}"] = np.ascontiguousarray(np.stack(apart))
    save_file(published, source / "model.safetensors")
    report = quantize_checkpoint(source, tmp_path / "target", options, TEXTS)
    assert report.tokens == TOKENS  # although texts are longer than its window
    assert all(sum(layer) == CHOSEN * TOKENS for layer in report.chosen.values()) and len(report.chosen) == 3
    tensors = stored(tmp_path / "target")
    names = [name for name in tensors if ".experts." in name and name.endswith(".weight_packed")]
    assert len(names) == 3 * EXPERTS * 2
    generator = np.random.default_rng(1)
    for expert in range(EXPERTS):
        module = f"model.layers.1.mlp.experts.{expert}"
        parts = ("gate_up_proj", "down_proj")
        exact = {part: published[f"model.layers.1.mlp.experts.{part}"][expert].T for part in parts}
        found = {part: dequantized(tensors, f"{module}.{part}", 4) for part in parts}
        rows = generator.standard_normal((5, exact["gate_up_proj"].shape[1]))
        expected, computed = (through_expert(each, published, expert, rows) for each in (exact, found))
        assert np.abs(computed - expected).mean() < 0.2 * np.abs(expected).mean()
    for part in ("gate_up_proj_bias", "down_proj_bias"):
        name = f"model.layers.1.mlp.experts.{part}"
        np.testing.assert_array_equal(tensors[name], published[name])
    found = logits(tmp_path / "target", TEXTS[:1])
    twin = logits(dense_again(source, tmp_path / "target", tmp_path / "twin", 4), TEXTS[:1])
    np.testing.assert_allclose(found, twin, rtol=0, atol=0.02 * np.abs(twin).max())


def test_a_head_that_has_experts_stays_as_published(tmp_path: Path) -> None:
    """It is published with stacks, which are written as tensors of each expert."""
    source, target = golden_checkpoint("qwen3_5_moe_text", tmp_path / "model"), tmp_path / "target"
    quantize_checkpoint(source, target, QuantizationOptions(8, None, True, "rtn"))
    with Checkpoint.open(source) as published, Checkpoint.open(target) as found:
        config = decoder_config(found.config)
        assert read_mtp(found, config) == read_mtp(published, config)
        experts = [name for name in published.tensors if name.startswith("mtp.") and ".experts." in name]
        assert len(experts) == 3 * 6
        for name in experts:
            np.testing.assert_array_equal(found.raw(name), published.raw(name))
        assert "mtp.layers.0.mlp.experts.5.down_proj.weight" in stored(target)
