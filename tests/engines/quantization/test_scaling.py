"""Scaled columns: where scales are folded, that the layer computes what it did, and what they gain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_families import FAMILIES, WINDOWED

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.families import decoder_config
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.quantizer.calibration import CalibrationRows, InputStatistics, layer_program
from edgellm.engines.quantizer.layers import linears, scale_layer
from edgellm.engines.quantizer.rounding import quantize_rows
from edgellm.engines.quantizer.scaling import foldings, output_error, scale_norm, search_scales
from edgellm.kernels.quantization.packed_weight import WeightFormat

TEXTS = [[(7 * index + 3) % 250 for index in range(40)], [(11 * index + 5) % 250 for index in range(33)]]
#: As many key-value heads as query heads, so that the output projection can be scaled too.
WHOLE_HEADS = {"num_key_value_heads": 4}
Opened = Callable[..., tuple[Checkpoint, DecoderConfig]]


@pytest.fixture
def opened(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> Opened:
    def open_checkpoint(**overrides: Any) -> tuple[Checkpoint, DecoderConfig]:
        checkpoint = Checkpoint.open(make_checkpoint(tmp_path / "checkpoint", **overrides))
        return checkpoint, decoder_config(checkpoint.config, dtype=checkpoint.dtype)

    return open_checkpoint


def statistics(inputs: np.ndarray, group: int) -> InputStatistics:
    """Those of rows [M, K], in the plainest way."""
    grouped = inputs.reshape(len(inputs), -1, group).astype(np.float64)
    products = np.einsum("mgi,mgj->gij", grouped, grouped) / len(inputs)
    factors = np.stack([np.linalg.cholesky(each + 1e-6 * np.eye(group)) for each in products])
    return InputStatistics(np.abs(inputs).mean(0), factors.astype(np.float32), inputs[:256])


def test_scales_are_folded_where_shapes_allow(opened: Opened) -> None:
    _, config = opened()
    program = layer_program(config, 1, 4)
    attention, output, gate_up, down = (linear.name for linear in linears(program))
    found = foldings(program.steps)
    assert output not in found  # several query heads share a row of v
    assert found[attention].norm is not None and found[gate_up].norm is not None
    assert found[attention].norm.weight.name == "model.layers.1.input_layernorm.weight"
    assert found[gate_up].norm.weight.name == "model.layers.1.post_attention_layernorm.weight"
    assert found[down].linear is not None and (found[down].linear.name, found[down].start) == (gate_up, 128)


def test_the_value_projection_takes_the_scales_of_the_output_projection(opened: Opened) -> None:
    _, config = opened(**WHOLE_HEADS)
    attention, output, *_ = (linear.name for linear in linears(layer_program(config, 0, 4)))
    place = foldings(layer_program(config, 0, 4).steps)[output]
    assert place.linear is not None and (place.linear.name, place.start) == (attention, 128)


def test_where_nothing_is_normed_before_layers_what_projections_make_is_scaled(opened: Opened) -> None:
    _, config = opened(**FAMILIES["olmo2"] | WHOLE_HEADS)
    program = layer_program(config, 0, 4)
    attention, output, gate_up, down = (linear.name for linear in linears(program))
    found = foldings(program.steps)
    assert found.keys() == {output, down}
    assert found[output].linear.name == attention and found[down].linear.name == gate_up


@pytest.mark.parametrize(
    ("family", "heads"),  # every family with one of the two, and one with both
    [
        *((family, WHOLE_HEADS if number % 2 else {}) for number, family in enumerate([*FAMILIES, "exaone4", "olmo3"])),
        ("llama", WHOLE_HEADS),
        ("gemma", WHOLE_HEADS),
    ],
    ids=lambda value: value if isinstance(value, str) else "whole" if value else "grouped",
)
def test_a_scaled_layer_computes_what_it_did(opened: Opened, family: str, heads: dict[str, int]) -> None:
    if family == "gemma" and heads:
        heads = {"num_key_value_heads": 2}
    checkpoint, config = opened(**(FAMILIES | WINDOWED)[family] | heads)
    rows, again = (CalibrationRows(config, checkpoint, TEXTS, 32) for _ in range(2))
    program = layer_program(config, 0, 1)
    weights = load_numpy_weights(checkpoint, list(program.weights.values()))
    before = {name: weight.copy() for name, weight in weights.items()}
    seen = rows.observe_layer(0, weights)
    dtypes = dict.fromkeys(weights, "float16")
    format = WeightFormat("int4", 32, False, "float16")
    factors = scale_layer(program, weights, seen, format, dtypes)
    assert set(factors) == {linear.name for linear in linears(program)}
    changed = {name for name in weights if not np.array_equal(weights[name], before[name])}
    assert any(name.endswith("gate_up_proj.weight") for name in changed)
    again.pass_layer(0, weights)
    for found, expected in zip(again.texts, rows.texts, strict=True):
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    for name in {place.norm.weight.name for place in foldings(program.steps).values() if place.norm is not None}:
        assert np.array_equal(weights[name], weights[name].astype(np.float16).astype(np.float32))


def test_what_a_layer_takes_is_counted_over_all_texts(opened: Opened) -> None:
    checkpoint, config = opened()
    rows = CalibrationRows(config, checkpoint, TEXTS, 32)
    inputs = np.concatenate(rows.texts)
    weights = load_numpy_weights(checkpoint, list(layer_program(config, 0, 1).weights.values()))
    seen = rows.observe_layer(0, weights)["model.layers.0.self_attn.qkv_proj"]
    norm = weights["model.layers.0.input_layernorm.weight"]
    normed = inputs / np.sqrt(np.square(inputs).mean(-1, keepdims=True) + config.rms_norm_eps) * norm
    assert seen.sample.shape == normed.shape and np.allclose(seen.sample, normed, atol=1e-4)
    assert np.allclose(seen.magnitude, np.abs(normed).mean(0), atol=1e-4)
    for place, factor in enumerate(seen.factors):
        part = normed[:, place * 32 : place * 32 + 32]
        products = part.T @ part / len(normed)
        damped = products + 0.01 * np.eye(32) * np.trace(products) / 32
        assert np.allclose(factor @ factor.T, damped, atol=1e-3)


def test_norms_are_divided_by_what_their_dtype_holds() -> None:
    random = np.random.default_rng(4)
    weight = rounded_to_half(random.standard_normal(64))
    weight[3] = 0  # nothing divides it
    scales = np.exp(random.standard_normal(64)).astype(np.float32)
    for offset in (0.0, 1.0):
        folded, exact = scale_norm(weight, offset, scales, "float16")
        assert np.array_equal(folded, rounded_to_half(folded))
        assert np.allclose((folded + offset) * exact, weight + offset, rtol=1e-6)
        assert np.allclose(np.delete(exact, 3), np.delete(scales, 3), rtol=0.1)
    assert scale_norm(weight, 0.0, scales, "float16")[1][3] == 1


def rounded_to_half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def outlier_layer(where: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A weight [N, K], and inputs for calibration and others: of `where` 1 column in 100 is 20 times larger."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((192, 512)).astype(np.float32) * np.float32(0.05)
    inputs = [random.standard_normal((600, 512)).astype(np.float32) for _ in range(2)]
    outliers = random.choice(512, 5, replace=False)
    for array in inputs if where == "activations" else [weight]:
        array[:, outliers] *= 20
    return weight, inputs[0], inputs[1]


@pytest.mark.parametrize(
    ("group", "zeros", "most"), [(64, False, 0.47), (128, False, 0.51), (64, True, 0.5), (128, True, 0.53)]
)
@pytest.mark.parametrize("where", ["activations", "weights"])
def test_outlier_channels_cost_about_half(where: str, group: int, zeros: bool, most: float) -> None:
    """Of plain rounding to nearest, on inputs that were not used for calibration."""
    format, shares = WeightFormat("int4", group, zeros, "bfloat16"), []
    for seed in range(2):
        weight, inputs, others = outlier_layer(where, seed)
        seen = statistics(inputs, group)
        scales = search_scales(weight, seen, format)
        values = quantize_rows(weight * scales, format, seen.scaled_factors(scales)).values() / scales
        errors = [np.linalg.norm(others @ (found - weight).T) for found in (values, plainly_rounded(weight, format))]
        shares.append(errors[0] / errors[1])
    assert np.mean(shares) <= most


def plainly_rounded(weights: np.ndarray, format: WeightFormat) -> np.ndarray:
    """To nearest, with the scale that the whole range of a group asks for, as compressed-tensors has it."""
    grouped = weights.reshape(len(weights), -1, format.group or weights.shape[1])
    low, high = np.minimum(grouped.min(-1, keepdims=True), 0), np.maximum(grouped.max(-1, keepdims=True), 0)
    if not format.zeros:
        scales = np.abs(grouped).max(-1, keepdims=True) / 7.5
        return (np.clip(np.rint(grouped / scales), -8, 7) * scales).reshape(weights.shape)
    scales = (high - low) / 15
    zeros = np.rint(-low / scales)
    return ((np.clip(np.rint(grouped / scales) + zeros, 0, 15) - zeros) * scales).reshape(weights.shape)


def test_the_best_of_the_scales_is_taken() -> None:
    weight, inputs, _ = outlier_layer("activations", 9)
    seen, format = statistics(inputs, 64), WeightFormat("int4", 64, False, "float16")
    found = output_error(weight, search_scales(weight, seen, format), seen, format)
    for exponent in (0.0, 0.2, 0.5, 0.8, 1.0):
        scales = seen.magnitude**exponent
        scales = (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
        assert found <= output_error(weight, scales, seen, format) * 1.001
