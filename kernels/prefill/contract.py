"""The contract of the kernels of long prompts: `NumpyPrefill` defines what they compute, `CudaPrefill` computes it.

They are attention without a matrix of scores. B sequences, T new tokens of each, W columns of query, key and value
heads together, G key-value heads, C rows that a cache holds, D elements of a head, E columns of query heads alone, R
rotary size. A call gives what enqueues it, so that a step is prepared once.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Protocol

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.contracts import limited
from edgellm.kernels.decode.contract import attention_refusal
from edgellm.kernels.numpy_launch import Enqueued

#: Rings have a multiple of so many rows.
RING_STEP = 64


class HeadNorms(NamedTuple):
    """RMS norms of each query and each key head, to whose weights `offset` is added in float32; with `behind` they
    stand behind the rotation. `values`: each value head is normed, too, without a weight."""

    query: Annotated[OwnArray, "D compute"]
    key: Annotated[OwnArray, "D compute"]
    epsilon: float
    offset: float
    behind: bool = False
    values: bool = False


class RotaryPart(NamedTuple):
    """Which columns of rotary rows a layer takes: `size` of them, from column `first` on, and for queries from
    `further` behind that on. `neighbours`: elements 2j and 2j + 1 of a head are rotated together, and kept as halves.
    """

    first: int
    size: int
    further: int = 0
    neighbours: bool = False


class KeyValueRows(NamedTuple):
    """A layer's KV caches, compute or int8; the new tokens' rows begin at `start` [B], and lie within them.

    With a `window` (0: none) they are rings, in whole tiles of 64 rows: position p is in row p modulo C.
    """

    k_cache: Annotated[OwnArray, "BGCD rows"]
    v_cache: Annotated[OwnArray, "BGCD rows"]
    start: Annotated[OwnArray, "B int32"]
    window: int = 0


class RowScales(NamedTuple):
    """Those of rows of int8 (`edgellm.kernels.quantization.rows`)."""

    key: Annotated[OwnArray, "BGC1 float32"]
    value: Annotated[OwnArray, "BGC1 float32"]


def _check_heads(sizes: dict[str, Any]) -> str | None:
    size, kv_heads, has_scales = sizes["D"], sizes["G"], "row_scales.key" in sizes
    if has_scales != (sizes["rows.k_cache"] == "int8"):
        return f"KV caches of {sizes['rows.k_cache']} {'with' if has_scales else 'without'} scales"
    heads = sizes.get("E", 0) // size
    if "E" in sizes and (heads < 1 or sizes["E"] % size):
        return f"queries have {sizes['E']} columns; expected those of heads of {size}"
    width = (heads + 2 * kv_heads) * size
    if sizes.get("W", width) != width:
        return f"qkv has {sizes['W']} columns; expected {width}, those of {heads} query and {kv_heads} key-value heads"
    if sizes.get("N", heads) != heads:
        return f"{sizes['N']} sinks of {heads} query heads; expected one of each"
    first, rotary = sizes.get("part.first", 0), sizes.get("part.size", sizes.get("R", 0))
    further = sizes.get("part.further", 0)
    if rotary > size or rotary % 4 or first % 4 or further % 4 or first + rotary + further > sizes.get("R", 0):
        return f"{rotary} elements of heads of {size} to rotate; expected fours of them, at most a head"
    window, rows = sizes["rows.window"], sizes["C"]
    if window and (rows % RING_STEP or window + sizes["T"] - 1 > rows):
        return (
            f"a ring of {rows} rows for a window of {window} and {sizes['T']} new tokens; expected at least both, in "
            f"whole tiles of {RING_STEP}"
        )
    return attention_refusal(heads, kv_heads, size, group=None)


class PrefillKernels(Protocol):
    """One implementation of all."""

    @limited(_check_heads)
    def prepare_heads(
        self,
        qkv: Annotated[OwnArray, "BTW mixed"],
        norms: HeadNorms | None,
        rotary: Annotated[OwnArray, "BTR compute"] | None,
        rows: KeyValueRows,
        row_scales: RowScales | None,
        part: RotaryPart | None,
        queries: Annotated[OwnArray, "BTE compute"] | None,
    ) -> Enqueued:
        """Make heads ready: norm, then rotary embedding by `rotary`, or `part` of it, cosine half then sine half (None:
        without).

        `qkv` has query heads, key heads, value heads. Queries go to `queries`; keys and values go to rows start[b] ..
        start[b] + T - 1 of the caches, quantized where there are `row_scales`. They have the bits that decode attention
        gives them, which takes `qkv` in float32. Where `queries` is None there are no query heads, and rows are
        compute.
        """

    @limited(_check_heads)
    def causal_attention(
        self,
        queries: Annotated[OwnArray, "BTE compute"],
        rows: KeyValueRows,
        scale: float,
        context: Annotated[OwnArray, "BTE compute"],
        row_scales: RowScales | None,
        sinks: Annotated[OwnArray, "N compute"] | None,
        cap: float,
    ) -> Enqueued:
        """`context`: each query's softmax of scale * scores over the rows before its own and its own, times values.

        Query head h uses key-value head h // (E / D / G). Token t stands at row start[b] + t. Its result has the bits
        of its decode step (`edgellm.kernels.decode`), whatever t is, so however a prompt is cut: keys are divided by
        how many a token sees, and a tile without a key that it sees changes nothing. With a window a token sees the
        latest so many rows up to its own. `row_scales` multiply scores, and weights before they meet values. `sinks`
        are scores of each query head beside those of keys, which have no value. With a `cap` above 0 scaled scores
        become cap tanh(score / cap). `context` may be `queries` itself.
        """

    @limited(_check_heads)
    def attention_ahead(
        self,
        queries: Annotated[OwnArray, "BTE compute"],
        rows: KeyValueRows,
        scale: float,
        context: Annotated[OwnArray, "BTE compute"],
        row_scales: RowScales | None,
        last_seen: Annotated[OwnArray, "BT int32"],
        cap: float,
    ) -> Enqueued:
        """The same where token t sees the rows up to `last_seen` [b, t], as the tokens of an image see all of it.

        That is its own row, start[b] + t, or that of a later of the new tokens, and never less than for the token
        before; a window still begins so many rows before the token's own. A token that sees no further than its own
        row has the bits of `causal_attention`.
        """
