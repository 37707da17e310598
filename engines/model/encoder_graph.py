"""What computes the steps of encoders alone, for `ProgramGraph`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, Protocol

from edgellm.engines.model import encoder_steps
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.operations import Operations, Scoring, Tensor
from edgellm.engines.model.steps import Norm

#: Scores of attention that are held at a time, in elements: beyond it queries are taken in blocks. At 4,096 patches and
#: 16 heads all of them would be a gigabyte.
_MOST_SCORES = 1 << 26


class Running(Protocol[Tensor]):
    """What of a `ProgramGraph` computes steps."""

    operations: Operations[Tensor]
    values: dict[str, Tensor]
    weights: dict[str, Tensor]
    to_residual: Callable[[Tensor], Tensor]

    def normed_parts(self, x: Tensor, norms: tuple[Norm, ...], rest: int = 0) -> Tensor:
        """See `ProgramGraph.normed_parts`."""


def _attention(graph: Running[Tensor], step: encoder_steps.EncoderAttention) -> Tensor:
    operations, given = graph.operations, graph.values
    heads, size = step.heads, step.head_size
    value, rotary = operations.to_compute(given[step.value]), given.get(step.rotary or "")
    mask = given.get(step.mask or "")
    if step.qk_norms is not None:
        value = graph.normed_parts(value, step.qk_norms, heads * size)
    count, rows = step.windows
    x = operations.reshape(value, (count, rows, 3 * heads * size))
    rotated, values = operations.split(operations.split_heads(x, 3 * heads), (2 * heads, heads), axis=1)
    if rotary is not None:
        cos_sin = operations.to_compute(rotary)
        rotated = operations.rotary_embedding(rotated, operations.reshape(cos_sin, (count, rows, size)))
    query, key = operations.split(rotated, (heads, heads), axis=1)
    if step.past:
        own, kept = operations.concatenate((query, key, values), axis=0), given[encoder_steps.KEPT_ROWS]
        context = operations.past_attention(step, own, kept, given[encoder_steps.FIRST_ROW])
    else:
        blocks = _query_blocks(count * heads, rows)
        parts = operations.split(query, blocks, axis=2) if len(blocks) > 1 else [query]
        contexts = [operations.attention(part, (key, values), mask, Scoring(size**-0.5)) for part in parts]
        context = operations.concatenate(contexts, axis=2) if len(blocks) > 1 else contexts[0]
    return operations.reshape(operations.merge_heads(context), (1, count * rows, heads * size))


def _query_blocks(heads: int, rows: int) -> tuple[int, ...]:
    """How many queries each the attention of `rows` rows is cut into; `heads` are those of all sequences together."""
    count = min(rows, math.ceil(heads * rows * rows / _MOST_SCORES))
    size = -(-rows // max(1, count))
    return tuple(min(size, rows - start) for start in range(0, rows, size))


def _average_pool(graph: Running[Tensor], step: encoder_steps.AveragePool) -> Tensor:
    operations, size, width = graph.operations, step.size, step.width
    squares, bands = step.side // size, (step.height or step.side) // size

    def total(x: Tensor) -> Tensor:
        first, *others = operations.split(x, (1,) * size, axis=1)
        return reduce(operations.add, others, first)

    rows = operations.reshape(operations.to_float32(graph.values[step.value]), (bands, size, step.side * width))
    columns = total(operations.reshape(total(rows), (bands * squares, size, width)))
    mean = operations.scale(operations.reshape(columns, (1, bands * squares, width)), 1 / size**2)
    return operations.to_compute(mean)


def _prepend(graph: Running[Tensor], step: encoder_steps.Prepend) -> Tensor:
    row = graph.operations.reshape(graph.weights[step.row.name], (1, 1, *step.row.shape))
    return graph.operations.concatenate([graph.to_residual(each) for each in (row, graph.values[step.value])], axis=1)


def _scaled_residual(graph: Running[Tensor], step: encoder_steps.ScaledResidual) -> Tensor:
    operations, (width,) = graph.operations, step.weight.shape
    weight = operations.reshape(operations.to_float32(graph.weights[step.weight.name]), (1, 1, width))
    added = operations.multiply(operations.to_float32(graph.values[step.value]), weight)
    residual = graph.to_residual(graph.values[step.residual])
    return operations.add(residual, graph.to_residual(added))


def _product(graph: Running[Tensor], step: encoder_steps.Product) -> Tensor:
    operations = graph.operations
    product = operations.product(graph.values[step.value], graph.weights[step.weight.name])
    return operations.to_compute(operations.scale(product, step.scale))


def _clipped(graph: Running[Tensor], value: str, bounds: WeightSpec) -> Tensor:
    operations = graph.operations
    low, high = operations.split(operations.to_float32(graph.weights[bounds.name]), (1, 1), axis=0)
    low, high = (operations.reshape(each, (1, 1, 1)) for each in (low, high))
    return operations.to_compute(operations.clip(operations.to_float32(graph.values[value]), low, high))


def _clip(graph: Running[Tensor], step: encoder_steps.Clip) -> Tensor:
    parts = [_clipped(graph, value, bounds) for value, bounds in step.parts]
    return graph.operations.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]


def _clipped_gate(graph: Running[Tensor], step: encoder_steps.ClippedGate) -> Tensor:
    gate, value = (_clipped(graph, *each) for each in zip((step.gate, step.value), step.bounds, strict=True))
    return graph.operations.multiply(graph.operations.activation(gate, step.activation), value)


def _normed_heads(graph: Running[Tensor], step: encoder_steps.NormedHeads) -> Tensor:
    operations, heads, size = graph.operations, step.heads, step.head_size
    parts = operations.split(operations.split_heads(graph.values[step.value], 3 * heads), (heads,) * 3, axis=1)
    turned = []
    for part, norm, factor in zip(parts, step.norms, (size**0.5, 1.0), strict=False):
        normed = operations.rms_norm(part, graph.weights[norm.weight.name], norm.epsilon)
        quarters = operations.split(normed, (size // 4,) * 4, axis=3)
        ordered = operations.concatenate([quarters[place] for place in (2, 0, 3, 1)], axis=3)
        turned.append(ordered if factor == 1.0 else operations.scale(ordered, factor))
    values = operations.rms_norm(parts[2], None, step.norms[0].epsilon)
    return operations.merge_heads(operations.concatenate([*turned, values], axis=1))


def _standard_norm(graph: Running[Tensor], step: encoder_steps.StandardNorm) -> Tensor:
    operations = graph.operations
    value = operations.scale(operations.to_float32(graph.values[step.value]), step.factor)
    if step.standard is not None:
        (width,) = step.standard[0].shape
        bias, scale = (
            operations.reshape(operations.to_float32(graph.weights[each.name]), (1, 1, width)) for each in step.standard
        )
        value = operations.multiply(operations.add(value, operations.scale(bias, -1.0)), scale)
    return operations.to_compute(operations.rms_norm(value, None, step.epsilon))


def _centered_norm(graph: Running[Tensor], step: encoder_steps.CenteredNorm) -> Tensor:
    operations, weight = graph.operations, graph.weights[step.weight.name]
    normed = operations.layer_norm(graph.values[step.value], weight, operations.scale(weight, 0.0), step.epsilon)
    positive = operations.activation(normed, "relu")
    mask = None if step.mask is None else operations.to_compute(graph.values[step.mask])
    return positive if mask is None else operations.multiply(positive, mask)


def _normed_residual(graph: Running[Tensor], step: encoder_steps.NormedResidual) -> Tensor:
    normed = graph.to_residual(graph.normed_parts(graph.values[step.value], (step.norm,)))
    added = normed if step.share == 1.0 else graph.operations.scale(normed, step.share)
    return graph.operations.add(graph.to_residual(graph.values[step.residual]), added)


def _gated_convolution(graph: Running[Tensor], step: encoder_steps.GatedConvolution) -> Tensor:
    operations, width = graph.operations, step.weight.shape[0]
    first, second = operations.split(graph.values[step.value], (width,) * 2, axis=2)
    gated = operations.multiply(first, operations.activation(second, "sigmoid"))
    convolved = operations.depthwise_convolution(gated, graph.weights[step.weight.name])
    return operations.activation(graph.normed_parts(convolved, (step.norm,)), "silu")


#: What gives the output of each kind of step.
ENCODER_STEPS: dict[type, Callable[[Any, Any], Any]] = {
    encoder_steps.EncoderAttention: _attention,
    encoder_steps.AveragePool: _average_pool,
    encoder_steps.Prepend: _prepend,
    encoder_steps.ScaledResidual: _scaled_residual,
    encoder_steps.Product: _product,
    encoder_steps.Clip: _clip,
    encoder_steps.ClippedGate: _clipped_gate,
    encoder_steps.NormedHeads: _normed_heads,
    encoder_steps.StandardNorm: _standard_norm,
    encoder_steps.Gather: lambda graph, step: graph.operations.gather_rows(
        graph.values[step.value], graph.values[step.rows]
    ),
    encoder_steps.DropFirst: lambda graph, step: graph.operations.split(
        graph.values[step.value], (1, step.rows), axis=1
    )[1],
    encoder_steps.Activate: lambda graph, step: graph.operations.activation(graph.values[step.value], step.activation),
    encoder_steps.CenteredNorm: _centered_norm,
    encoder_steps.NormedResidual: _normed_residual,
    encoder_steps.GatedConvolution: _gated_convolution,
    encoder_steps.LocalAttention: lambda graph, step: graph.operations.local_attention(
        step, graph.values[step.value], graph.values[step.relative], graph.weights[step.scale.name]
    ),
    encoder_steps.Unfold: lambda graph, step: graph.operations.unfold(step, graph.values[step.value]),
}
