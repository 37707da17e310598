"""What the descriptions of all vision encoders have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

from edgellm.engines.model.config import EngineShape, WeightSpec
from edgellm.engines.model.decoder import single_weight
from edgellm.engines.model.operations import Operations, Tensor
from edgellm.engines.model.vision import VisionConfig

#: Scores of attention that are held at a time, in elements: beyond it queries are taken in blocks. At 4,096 patches and
#: 16 heads all of them would be a gigabyte.
_MOST_SCORES = 1 << 26


class VisionDescription(ABC, Generic[Tensor]):
    """Describes a vision encoder to an interpreter of operations, for one engine shape.

    `shape.tokens` is R, the rows of patches, padding included.
    """

    def __init__(
        self, operations: Operations[Tensor], config: VisionConfig, shape: EngineShape, specs: Sequence[WeightSpec]
    ) -> None:
        self.operations, self.config, self.shape = operations, config, shape
        self._weight_shapes = {spec.name: spec.shape for spec in specs}

    @abstractmethod
    def describe(self) -> None:
        """Declare inputs, compute, declare outputs."""

    def weight(self, name: str) -> Tensor:
        """The weight, which must be there."""
        return self.operations.weight(name, self._weight_shapes[name])

    def linear(self, x: Tensor, name: str) -> Tensor:
        """The linear layer `name` of x [B, T, K], with its bias where it has one."""
        bias = f"{name}.bias"
        return self.operations.linear(
            x, self.weight(f"{name}.weight"), self.weight(bias) if bias in self._weight_shapes else None
        )

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        """Layer norm by the weights `name`."""
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return self.operations.layer_norm(x, weight, bias, self.config.norm_eps)

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm by the weight `name`."""
        return self.operations.rms_norm(x, self.weight(f"{name}.weight"), self.config.norm_eps)

    def attention(
        self, x: Tensor, qkv: str, projection: str, sizes: tuple[int, int], mask: Tensor | None, cos_sin: Tensor | None
    ) -> Tensor:
        """Attention of all T rows of x [B, T, H] to each other; `sizes` are B and T.

        `mask` [B, 1, 1, T] is True where a row may be seen; `cos_sin` [B, T, D] rotates queries and keys.
        """
        ops, heads = self.operations, self.config.num_heads
        rotated, value = ops.split(ops.split_heads(self.linear(x, qkv), 3 * heads), (2 * heads, heads), axis=1)
        if cos_sin is not None:
            rotated = ops.rotary_embedding(rotated, cos_sin)
        query, key = ops.split(rotated, (heads, heads), axis=1)
        blocks = _query_blocks(sizes[0] * heads, sizes[1])
        scale = self.config.head_dim**-0.5
        parts = ops.split(query, blocks, axis=2) if len(blocks) > 1 else [query]
        contexts = [ops.attention(part, key, value, mask, scale) for part in parts]
        context = ops.concatenate(contexts, axis=2) if len(blocks) > 1 else contexts[0]
        return self.linear(ops.merge_heads(context), projection)

    def merged(self, x: Tensor) -> Tensor:
        """[1, R, H] to [1, R / patches of a token, patches of a token * H]: the patches of a token side by side."""
        count = self.config.merge_patches
        return self.operations.reshape(x, (1, self.shape.tokens // count, count * self.config.hidden_size))


def _query_blocks(heads: int, rows: int) -> tuple[int, ...]:
    """Into how many queries each the attention of `rows` rows is cut; `heads` are those of all sequences together."""
    count = min(rows, math.ceil(heads * rows * rows / _MOST_SCORES))
    size = -(-rows // max(1, count))
    return tuple(min(size, rows - start) for start in range(0, rows, size))


class WeightNames:
    """Makes the weights of one part of a checkpoint: `engine` begins their names, `source` those of the tensors."""

    def __init__(self, engine: str, source: str) -> None:
        self._engine, self._source = engine, source

    def single(self, name: str, *shape: int) -> WeightSpec:
        """One tensor as it is."""
        return single_weight(f"{self._engine}{name}", *shape, source=f"{self._source}{name}")

    def linear(self, name: str, rows: int, columns: int, bias: bool = True) -> list[WeightSpec]:
        """Weight [N, K] and bias [N]."""
        weight = self.single(f"{name}.weight", rows, columns)
        return [weight, self.single(f"{name}.bias", rows)] if bias else [weight]

    def fused(self, name: str, parts: Sequence[str], rows: int, columns: int) -> list[WeightSpec]:
        """Weights [N, K] and biases [N] of several layers, one behind the other, as one layer `name`."""
        count = len(parts) * rows
        return [
            WeightSpec(
                f"{self._engine}{name}.weight",
                (count, columns),
                tuple((f"{self._source}{part}.weight", (rows, columns)) for part in parts),
            ),
            WeightSpec(
                f"{self._engine}{name}.bias",
                (count,),
                tuple((f"{self._source}{part}.bias", (rows,)) for part in parts),
            ),
        ]

    def norm(self, name: str, size: int) -> list[WeightSpec]:
        """Weight and bias [H] of a layer norm."""
        return [self.single(f"{name}.weight", size), self.single(f"{name}.bias", size)]

    def convolution(self, name: str, rows: int, *kernel: int) -> WeightSpec:
        """A convolution whose stride is its kernel: one linear layer over flattened patches, [N, product of kernel]."""
        source = (f"{self._source}{name}.weight", (rows, *kernel))
        return WeightSpec(f"{self._engine}{name}.weight", (rows, math.prod(kernel)), (source,))
