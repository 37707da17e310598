"""Activation-aware scaling (Lin et al. 2023): columns that matter are made larger before they are rounded.

The elements of a linear layer's input are divided by scales, and the columns of its weight multiplied: the output stays
what it was, and columns with large activations keep more of their values. The division costs nothing: it is folded into
the norm or into the rows of the linear layer that makes the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.steps import Attention, Experts, Linear, LinearResidual, Norm, NormLinear, NormParts, Step
from edgellm.engines.quantizer.arithmetic import NUMPY, Arithmetic
from edgellm.engines.quantizer.rounding import COARSE_CLIPPING, rounded
from edgellm.engines.quantizer.statistics import InputStatistics
from edgellm.kernels.quantization.packed_weight import WeightFormat

#: Exponents of the activations that are tried.
_EXPONENTS = tuple(step / 10 for step in range(11))
#: Errors are computed for so many rows of a weight.
_SAMPLED_ROWS = 256
#: Activations and weights are taken to be no smaller than this share of their mean; scales stay within the factor.
_SMALLEST_SHARE, _LARGEST_SCALE = 1e-3, 64.0


@dataclass(frozen=True)
class Folding:
    """Where what a linear layer's input is divided by can go: into `norm`, or into rows `start` and on of `linear`."""

    norm: Norm | None = None
    linear: Linear | None = None
    start: int = 0


#: Of a step the linear layers whose input can be scaled, and what its output's columns are products of.
_Found = tuple[Iterable[tuple[Linear, Folding | None]], Folding | None]
_Rows = Mapping[str, Folding | None]


def foldings(steps: Sequence[Step]) -> dict[str, Folding]:
    """A layer's linear layers, by their names, whose input can be scaled.

    The input of a step behind attention is made by the rows of the value projection, where each query head has a
    key-value head of its own; that of a step behind a gate, and of `down` of an expert, by the second half of the rows.
    What all experts take is not scaled: its norm is the router's, too. Nor is what `down` takes of experts with
    `Mixture.limit`, or without gates: limits, the 1 that is added and squares do not scale.
    """
    rows: dict[str, Folding | None] = {}  # by the values whose columns are products of them
    found: dict[str, Folding] = {}
    for step in steps:
        scaled, rows[step.output] = _KINDS[type(step)](step, rows) if type(step) in _KINDS else ((), None)
        found |= {linear.name: place for linear, place in scaled if place is not None}
    return found


def _of_norm_linear(step: NormLinear, rows: _Rows) -> _Found:
    norms, is_linear = step.inputs[0].norms, step.gated or (step.activation is None and step.into is None)
    scaled = [(step.linear, Folding(norm=norms[0]))] if len(step.inputs) == len(norms) == 1 else []
    return scaled, _rows_of(step.linear, 2 if step.gated else 0) if is_linear else None


def _of_attention(step: Attention, rows: _Rows) -> _Found:
    (heads, kv_heads, size), projected = step.heads, rows.get(step.value)
    if heads != kv_heads or projected is None:
        return (), None
    return (), replace(projected, start=((2 * heads if step.gated else heads) + kv_heads) * size)


def _of_experts(step: Experts, rows: _Rows) -> _Found:
    pairs: list[Any] = [] if step.mixture.activation.kind != "gated" else [*expert_linears(step)]
    pairs += [step.shared[:2]] if step.shared and step.mixture.gated else []
    return [(down, _rows_of(gate_up, 2)) for gate_up, down in pairs], None


def _rows_of(linear: Linear, parts: int) -> Folding:
    """The last of so many equal parts of the rows, or all."""
    return Folding(linear=linear, start=linear.weight.shape[0] // parts if parts else 0)


_KINDS: dict[type, Callable[[Any, _Rows], _Found]] = {
    NormLinear: _of_norm_linear,
    LinearResidual: lambda step, rows: ([(step.linear, rows.get(step.value))], None),
    Attention: _of_attention,
    Experts: _of_experts,
    NormParts: lambda step, rows: ((), rows.get(step.value)),  # behind attention are columns that it leaves as they are
}


def expert_linears(step: Experts) -> list[tuple[Linear, Linear]]:
    """Gate and up, and down, of each of a mixture's experts, as linear layers without their biases."""
    gates_ups, downs = (
        [Linear(spec.name.removesuffix(".weight"), spec, None) for spec in experts_apart(stack.weight)]
        for stack in (step.gate_up, step.down)
    )
    return list(zip(gates_ups, downs, strict=True))


def experts_apart(spec: WeightSpec) -> list[WeightSpec]:
    """The weight of each expert by itself, of that of all: expert e of NAME.weight is NAME.e.weight."""
    count, shape = len(spec.parts) // spec.experts, (spec.shape[0] // spec.experts, *spec.shape[1:])
    found, name = [], spec.name.removesuffix(".weight")
    for expert in range(spec.experts):
        parts = spec.parts[expert * count : (expert + 1) * count]
        found.append(replace(spec, name=f"{name}.{expert}.weight", shape=shape, parts=parts, experts=0))
    return found


def search_scales(
    weights: np.ndarray, seen: InputStatistics, format: WeightFormat, arithmetic: Arithmetic = NUMPY
) -> np.ndarray:
    """The scales float32 [K] for a weight float32 [N, K] that leave the least squared error of the outputs.

    Tried are mean|x_k|^a and mean|x_k|^a / mean|w_k|^(1 - a) for a from 0 to 1 (equation 5 of Lin et al. 2023, and its
    published program), divided by the root of the product of the largest and the smallest; with a = 0 the former are 1.
    """
    sampled = sampled_rows(weights)
    candidates = list(_candidates(seen.magnitude, np.abs(weights).mean(0)))
    errors = arithmetic.each(lambda scales: output_error(sampled, scales, seen, format, arithmetic), candidates)
    return candidates[int(np.argmin(errors))]


def sampled_rows(weights: np.ndarray) -> np.ndarray:
    """Rows of a weight that stand for all, where errors decide about one number."""
    return weights[np.linspace(0, len(weights) - 1, min(_SAMPLED_ROWS, len(weights))).astype(np.int64)]


def output_error(
    weights: np.ndarray, scales: np.ndarray, seen: InputStatistics, format: WeightFormat, arithmetic: Arithmetic = NUMPY
) -> float:
    """The squared error of the outputs for the sampled inputs, with the weight quantized under `scales`."""
    packed = arithmetic.quantize_rows(weights * scales, format, seen.scaled_factors(scales), COARSE_CLIPPING)
    difference = packed.values()
    difference /= scales
    difference -= weights
    return seen.squared_outputs(difference)


def scale_norm(weight: np.ndarray, offset: float, scales: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """A norm's weight float32 [K] such that weight + offset is divided by `scales`, as values of `dtype`; and the
    scales that it was divided by in truth, its rounding included. An element that has no place in `dtype` is left."""
    whole = weight + np.float32(offset)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        folded = rounded(whole / scales - np.float32(offset), dtype)
        exact = whole / (folded + np.float32(offset))
        kept = np.isfinite(exact) & (np.abs(exact / scales - 1) < 0.1)
    return np.where(kept, folded, weight), np.where(kept, exact, np.float32(1)).astype(np.float32)


def _candidates(activations: np.ndarray, weights: np.ndarray) -> Iterator[np.ndarray]:
    activations, weights = (np.maximum(each, each.mean() * _SMALLEST_SHARE) for each in (activations, weights))
    for exponent in _EXPONENTS:
        alone = activations**exponent
        for scales in (alone, alone / weights ** (1 - exponent)) if exponent < 1 else (alone,):
            centred = scales / np.sqrt(scales.max() * scales.min())
            yield np.clip(centred, 1 / _LARGEST_SCALE, _LARGEST_SCALE).astype(np.float32)
