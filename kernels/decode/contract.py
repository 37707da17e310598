"""What the kernels of linear layers and attention take: bundles, limits, and which shapes they refuse.

`Array` is a NumPy array (float32 where the device has the compute dtype) for the twins `NumpyDecodeKernels` and
`NumpyTiledKernels` (`tests/helpers/decode_twins.py`), which define what is computed, and a `DeviceArray` for the
launchers. R rows stand for the new tokens of all sequences: B in a decode step, B T in a verify or draft step.
"compute" is the model's dtype, float16 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.device_layout import InputPermutation, PackedMatrix
from edgellm.kernels.quantization.packed_weight import PackedWeight
from edgellm.kernels.quantization.row_runs import PackedRuns

#: Rises when the order of a sum changes, and with it the bits of rows: 1 since prompts have those of decode steps, 2
#: since attention norms values.
ARITHMETIC = 2
#: The most rows that kernels of few rows take: the tensor-core instruction multiplies sixteen.
MAX_ROWS = 16
#: The most rows that kernels of many rows take.
MAX_TILED_ROWS = 64
#: The most new tokens of a sequence that attention takes, query heads a key-value head, and elements of a head.
MAX_TOKENS, MAX_GROUP, MAX_HEAD_SIZE = 64, 16, 512
#: The largest rank of LoRA adapters, how many may be in use at once, and how many layers be fused in one.
MAX_LORA_RANK, MAX_LORA_PLACES, MAX_FUSED = 64, 8, 3
#: The most parts of a row that one launch norms where they are: queries and keys.
MAX_PARTS = 2
#: Columns that the sums of the squares of such parts have where ranks add them: as many as these add at once.
SQUARE_SUMS = 8
#: What the sum of a token's own embeddings and of what is projected for them is multiplied by (Gemma 3n).
TOKEN_SHARE = 0.5**0.5
#: What a gated layer applies to its gate, and the number by which the kernels know it.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

#: A linear layer's sums over K: so many slices of it, in steps of so many columns.
SLICES, STEP = 16, 32


class AddedTo(NamedTuple):
    """What rows are added to before a linear layer takes them, as `norm_residual` adds them: `output` [R, K] float32 =
    `residual` [R, K] float32 + the rows normed by `weight` [K], times a `factor` [1] float32 where there is one.

    The output is no memory that the launch reads: each of its blocks reads the residual.
    """

    residual: OwnArray
    output: OwnArray
    weight: OwnArray
    epsilon: float
    offset: float = 0.0
    factor: OwnArray | None = None


class NormedInput(NamedTuple):
    """What a linear layer takes once it is normalized: rows whose columns `first` to `first + width` count.

    `values` [R, C] float32 or compute; `weight` [width] of the RMS norm, to which `offset` is added in float32 (Gemma:
    1), None for the values as they are, rounded to compute. `width` None: all columns. `added`: what is normed are not
    the values, but what becomes of them there.
    """

    values: OwnArray
    weight: OwnArray | None
    epsilon: float = 0.0
    offset: float = 0.0
    first: int = 0
    width: int | None = None
    added: AddedTo | None = None

    @property
    def columns(self) -> int:
        """How many columns count. Raises KernelError where the values or the weight have others."""
        whole = self.values.shape[-1]
        width = whole - self.first if self.width is None else self.width
        if not 0 <= self.first <= self.first + width <= whole or not width:
            raise KernelError(f"columns {self.first} to {self.first + width} of an input of {whole} columns")
        if self.weight is not None and self.weight.size != width:
            raise KernelError(f"a norm of {self.weight.size} weights for {width} columns; expected as many")
        return width


class LinearAdapters(NamedTuple):
    """LoRA adapters (Hu et al. 2021) of a linear layer [N, K], in S places: each row x gets (x a^T * scales) b more.

    `a` [S P, K], `b` [S P, N] and `scales` [B, S] compute; each of B sequences has as many rows. `modules` are the rows
    of the layers that are fused in this one, N in all, whose ranks P / len(modules) follow each other in P; b is zero
    where it would add ranks of one to another. `low` uint32 of `low_words` is the launch's own memory, zeros before; it
    clears `next_low`, which must not be `low`.
    """

    a: OwnArray
    b: OwnArray
    scales: OwnArray
    modules: tuple[int, ...]
    low: OwnArray
    next_low: OwnArray


class LinearWeights(NamedTuple):
    """`weight` [N, K] as published, `bias` [N], both compute; of a gated layer N are the gates, then the ups.

    Or a packed weight: a `PackedMatrix`, which takes x arranged as its `inputs` say, or of the twins a `PackedWeight`,
    which takes it as it is. Of `PackedRuns` the kernels take `runs`, each by itself: the first of its rows and the
    width of the whole, which adapters are of, are its `place`. So are those of a layer whose outputs are the first
    columns of wider rows; it has no adapters.
    """

    weight: OwnArray
    bias: OwnArray | None = None
    adapters: LinearAdapters | None = None
    place: tuple[int, int] | None = None

    @property
    def runs(self) -> tuple[LinearWeights, ...]:
        """The layers of one format each that this one is."""
        if not isinstance(self.weight, PackedRuns):
            return (self,)
        found, first, width = [], 0, self.width
        for run in self.weight.runs:
            end = first + run.shape[0]
            bias = None if self.bias is None else self.bias[first:end]
            found.append(LinearWeights(run, bias, self.adapters, (first, width)))
            first = end
        return tuple(found)

    @property
    def width(self) -> int:
        """Rows of the whole weight."""
        return self.weight.shape[0] if self.place is None else self.place[1]

    @property
    def is_packed(self) -> bool:
        """Whether the weight is of 4 to 8 bits."""
        return isinstance(self.weight, PackedWeight | PackedMatrix)

    @property
    def arranged(self) -> InputPermutation | None:
        """How a packed weight's activations are arranged before it is multiplied; None: they are not.

        Raises KernelError for a weight that does not say so though its format does.
        """
        if not isinstance(self.weight, PackedMatrix):
            return None
        format, inputs = self.weight.layout.format, self.weight.inputs
        order, scales = inputs or (None, None)
        if (format.permuted and order is None) or (format.scaled and scales is None):
            raise KernelError(f"a weight of {format} does not say how its inputs are arranged (`InputPermutation`)")
        return inputs

    @property
    def ranks(self) -> int:
        """`padded_ranks` of LoRA adapters."""
        if self.adapters is None:
            return 0
        places = self.adapters.scales.shape[1]
        return padded_ranks(places, self.low_rows // (places * len(self.adapters.modules)))

    @property
    def low_rows(self) -> int:
        """Rows of their a, which are multiplied like rows of the weight."""
        return 0 if self.adapters is None else self.adapters.a.shape[0]


class Kept(NamedTuple):
    """Where a kernel also leaves what it normalized, or what that was before (`raw`), or the residual it read.

    Columns `place` width to `(place + 1) width` of `target` [R, n width] compute.
    """

    target: OwnArray
    place: int = 0
    raw: bool = False


class AttentionWeights(NamedTuple):
    """How a layer's heads are made ready: norms of q and k [D] (`offset` as in `NormedInput`), scale of the scores.

    `rotary` False: no rotary embedding. `rotary_part`: the first of the columns of the rotary rows that it takes, and
    how many; None: all. `sinks` [n_q] compute are scores of each query head beside those of keys, which have no value.
    Queries take columns `query_columns` further on. `neighbours`: elements 2j and 2j + 1 are rotated together; queries
    and keys are then kept as rotated halves. `norms_behind`: norms stand behind the rotation. With a `cap` above 0
    scaled scores become cap tanh(score / cap). `values_normed`: values are, as keys, but without a weight.
    """

    q_norm: OwnArray | None
    k_norm: OwnArray | None
    epsilon: float
    offset: float
    scale: float
    rotary: bool = True
    rotary_part: tuple[int, int] | None = None
    sinks: OwnArray | None = None
    query_columns: int = 0
    neighbours: bool = False
    norms_behind: bool = False
    cap: float = 0.0
    values_normed: bool = False


class AttentionStep(NamedTuple):
    """The tokens of a step and a layer's KV rows, which get theirs.

    `rope_rotary_cos_sin` [B, T, rotary] compute, `kvcache_start_index` [B] int32, `attention_mask` [B, 1, T, L] bool
    (None: T is 1), caches [B, n_kv, rows, D] compute. `masks_all`: the mask decides about the rows before
    start_index[b] too. With a `window` a token sees the latest so many of the rows that it would see, its own included,
    and the caches are rings: position p is in row p modulo their rows, which are whole tiles of 64. Caches of int8 have
    scales [B, n_kv, rows, 1] float32; a token's own row, and those of the other new ones, are read as they are kept
    (`edgellm.kernels.quantization.rows`).
    """

    rope_rotary_cos_sin: OwnArray
    kvcache_start_index: OwnArray
    attention_mask: OwnArray | None
    k_cache: OwnArray
    v_cache: OwnArray
    masks_all: bool = False
    k_scale: OwnArray | None = None
    v_scale: OwnArray | None = None
    window: int | None = None


class AttentionScratch(NamedTuple):
    """A launch's own memory: `partial` float32 of `attention_partials`, `counters` uint32 of `attention_counters`, zero
    before and after."""

    partial: OwnArray
    counters: OwnArray


def slice_steps(columns: int) -> int:
    """Steps of 32 columns in each of the slices whose sums are added."""
    return -(-columns // (SLICES * STEP))


def padded_columns(columns: int) -> int:
    """Columns of all slices."""
    return SLICES * STEP * slice_steps(columns)


def low_words(rows: int, places: int, modules: int, rank: int) -> int:
    """Words of memory for what adapters' a makes of so many rows: two products of 16 bits each."""
    return rows * places * modules * rank // 2


def padded_ranks(places: int, rank: int) -> int:
    """The ranks of adapters in all places that kernels multiply, in steps of 16."""
    return places * -(-rank // 16) * 16


def adapters_refusal(places: int, rank: int, modules: Sequence[int]) -> str | None:
    """Why linear layers do not take LoRA adapters of a rank in so many places, or None if they do."""
    fits = places <= MAX_LORA_PLACES and rank <= MAX_LORA_RANK and rank % 8 == 0
    if fits and len(modules) <= MAX_FUSED and not any(rows % 8 for rows in modules):
        return None
    return (
        f"LoRA adapters are applied in up to {MAX_LORA_PLACES} places, of ranks up to {MAX_LORA_RANK} in eights, to up "
        f"to {MAX_FUSED} fused layers of rows in eights, not in {places} places, of rank {rank}, to layers of "
        f"{', '.join(map(str, modules))} rows"
    )


def attention_refusal(
    heads: int, kv_heads: int, size: int, int8: bool = False, group: int | None = MAX_GROUP
) -> str | None:
    """Why attention does not take such heads, or None if it does; `int8`: KV rows are. `group`: the most query heads a
    key-value head that the kernel takes; None: that of prompts, which takes any number."""
    what = "prefill attention" if group is None else "decode attention"
    if int8 and size % 16:
        return f"{what} takes KV caches of int8 for head sizes in multiples of 16, not {size}"
    fits = size % 8 == 0 and (0 < size <= 256 or size == MAX_HEAD_SIZE) and heads % kv_heads == 0
    if fits and (group is None or heads <= group * kv_heads):
        return None
    most = "query heads that are a multiple of the key-value heads"
    most = most if group is None else f"up to {group} query heads a key-value head"
    return (
        f"{what} takes head sizes up to 256 (multiples of 8) and {MAX_HEAD_SIZE}, and {most}, not {heads} query and "
        f"{kv_heads} key-value heads of {size}"
    )


def activation_number(activation: str) -> int:
    """The number by which the kernels know an activation. Raises KernelError for others."""
    if activation not in ACTIVATIONS:
        raise KernelError(f"decode kernels have no activation {activation}, only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]
