"""What layers keep of the tokens before: the state of each, as engines take it, memory holds it and snapshots save it.

A kind of state says which tensors it has (`tensors`), what of them a snapshot holds (`saved`) and to which earlier
place it can be cut (`cut`); `ModelStates` of the runners does the same with each kind. Nobody else builds the names of
these tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from edgellm.engines.model.config import DecoderConfig
from edgellm.kernels.arrays import ITEM_SIZES

#: Shape and dtype ("compute", or one of `ITEM_SIZES`) by name.
Edge = dict[str, tuple[tuple[int, ...], str]]

#: What begins the name of the output by which an engine says that it changed a state in its own memory.
PRESENT = "present_"
_NAME = re.compile(r"[kv]_(cache|scale)_(?:0|[1-9][0-9]{0,3})")


@dataclass(frozen=True)
class KVRows:
    """Keys and values of attention layer `index`: a row of `size` elements for each token and key-value head.

    `dtype` is "compute" or "int8"; rows of int8 have a scale each (`edgellm.kernels.quantization.rows`).
    """

    index: int
    heads: int
    size: int
    dtype: str = "compute"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of its tensors: keys, values and, of rows of int8, the scales of both."""
        parts = ("cache",) if self.dtype == "compute" else ("cache", "scale")
        return tuple(f"{kind}_{part}_{self.index}" for part in parts for kind in ("k", "v"))

    def tensors(self, slots: int, rows: int) -> Edge:
        """Of so many sequences and rows: [B, n_kv, rows, D] of `dtype`, and scales [B, n_kv, rows, 1] float32."""
        return {name: ((slots, *shape), dtype) for name, (shape, dtype) in self.saved(rows).items()}

    def saved(self, tokens: int) -> Edge:
        """What a snapshot holds of one sequence of so many tokens: their rows."""
        kinds = ((self.size, self.dtype),) * 2 + ((1, "float32"),) * 2
        return {
            name: ((self.heads, tokens, width), dtype) for name, (width, dtype) in zip(self.names, kinds, strict=False)
        }

    def cut(self, held: int, wanted: int) -> int:
        """Which place, at most `wanted`, a state of `held` tokens can be cut to: any, by dropping rows."""
        return min(held, wanted)


def decoder_states(config: DecoderConfig, kv_cache: str = "compute") -> list[KVRows]:
    """The states of a decoder's layers, in their order."""
    return [KVRows(index, config.num_kv_heads, config.head_dim, kv_cache) for index in range(config.num_layers)]


def state_edge(states: Iterable[KVRows], slots: int, rows: int) -> Edge:
    """The tensors of several layers' states, layer by layer."""
    return {name: kind for state in states for name, kind in state.tensors(slots, rows).items()}


def saved_dtype(name: str, kv_cache: str) -> str | None:
    """The dtype of the tensor `name` of a state whose rows are of `kv_cache`; None for a name that it has not."""
    match = _NAME.fullmatch(name)
    if match is None or (match[1] == "scale" and kv_cache == "compute"):
        return None
    return kv_cache if match[1] == "cache" else "float32"


def state_bytes(edge: Edge, compute_dtype: str) -> int:
    """The bytes of tensors."""
    return sum(math.prod(shape) * _item_size(dtype, compute_dtype) for shape, dtype in edge.values())


def exchange_sizes(edge: Edge) -> dict[str, int]:
    """Of each dtype the most elements of a sequence that a tensor has: what an exchange of two sequences needs."""
    sizes: dict[str, int] = {}
    for (_, *shape), dtype in edge.values():
        sizes[dtype] = max(sizes.get(dtype, 0), math.prod(shape))
    return sizes


def exchange_bytes(edge: Edge, compute_dtype: str) -> int:
    """The bytes that an exchange of two sequences needs."""
    return sum(size * _item_size(dtype, compute_dtype) for dtype, size in exchange_sizes(edge).items())


def _item_size(dtype: str, compute_dtype: str) -> int:
    return ITEM_SIZES[compute_dtype if dtype == "compute" else dtype]
