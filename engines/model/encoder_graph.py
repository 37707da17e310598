"""Steps of encoders alone that take several operations, for `ProgramGraph`."""

from __future__ import annotations

import math
from functools import reduce

from edgellm.engines.model.encoder_steps import AveragePool, EncoderAttention
from edgellm.engines.model.operations import Operations, Scoring, Tensor

#: Scores of attention that are held at a time, in elements: beyond it queries are taken in blocks. At 4,096 patches and
#: 16 heads all of them would be a gigabyte.
_MOST_SCORES = 1 << 26


def encoder_attention(
    operations: Operations[Tensor], step: EncoderAttention, value: Tensor, rotary: Tensor | None, mask: Tensor | None
) -> Tensor:
    """What the step gives of the values that it names."""
    heads, size = step.heads, step.head_size
    count, rows = step.windows
    x = operations.reshape(value, (count, rows, 3 * heads * size))
    rotated, values = operations.split(operations.split_heads(x, 3 * heads), (2 * heads, heads), axis=1)
    if rotary is not None:
        cos_sin = operations.to_compute(rotary)
        rotated = operations.rotary_embedding(rotated, operations.reshape(cos_sin, (count, rows, size)))
    query, key = operations.split(rotated, (heads, heads), axis=1)
    blocks = _query_blocks(count * heads, rows)
    parts = operations.split(query, blocks, axis=2) if len(blocks) > 1 else [query]
    contexts = [operations.attention(part, key, values, mask, Scoring(size**-0.5)) for part in parts]
    context = operations.concatenate(contexts, axis=2) if len(blocks) > 1 else contexts[0]
    return operations.reshape(operations.merge_heads(context), (1, count * rows, heads * size))


def average_pool(operations: Operations[Tensor], step: AveragePool, value: Tensor) -> Tensor:
    """What the step gives of its value."""
    size, width = step.size, step.width
    squares = step.side // size

    def total(x: Tensor) -> Tensor:
        first, *others = operations.split(x, (1,) * size, axis=1)
        return reduce(operations.add, others, first)

    rows = operations.reshape(operations.to_float32(value), (squares, size, step.side * width))
    columns = total(operations.reshape(total(rows), (squares**2, size, width)))
    mean = operations.scale(operations.reshape(columns, (1, squares**2, width)), 1 / size**2)
    return operations.to_compute(mean)


def _query_blocks(heads: int, rows: int) -> tuple[int, ...]:
    """How many queries each the attention of `rows` rows is cut into; `heads` are those of all sequences together."""
    count = min(rows, math.ceil(heads * rows * rows / _MOST_SCORES))
    size = -(-rows // max(1, count))
    return tuple(min(size, rows - start) for start in range(0, rows, size))
