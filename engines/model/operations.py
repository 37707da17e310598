"""The operations that the steps of a program are made of.

`ProgramGraph` runs a program as calls on an `Operations` object. `TensorRTOperations` turns the calls into a TensorRT
network, `NumpyOperations` computes them at once in float32; so nobody may look into a tensor, only pass it on. Axis
letters: B sequences, T tokens of each, H hidden size, n heads, D head size, C rows that a KV cache holds, L of them
that attention reads (the key range), V vocabulary, R rotary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from edgellm.engines.model.encoder_steps import EncoderAttention, LocalAttention, Unfold
from edgellm.engines.model.recurrent_steps import GatedDelta, ShortConvolution
from edgellm.engines.model.steps import Experts, Norm

Tensor = TypeVar("Tensor")


@dataclass(frozen=True)
class Scoring(Generic[Tensor]):
    """How the products of queries and keys become the scores of a softmax: times `scale`, and with a `cap` above 0
    then cap tanh(score / cap), all before a mask hides some. `sinks` [nq] are scores beside those of keys, which count
    in the softmax of their head alone."""

    scale: float
    cap: float = 0.0
    sinks: Tensor | None = None


class Operations(Protocol[Tensor]):
    """One implementation of the operations."""

    def input(self, name: str, shape: Sequence[int], dtype: str) -> Tensor:
        """Declare the engine input `name`; `dtype` is "compute", "float32", "int32" or "bool"."""

    def weight(self, name: str, shape: Sequence[int]) -> Tensor:
        """Declare (once) the weight `name`, an engine input in compute dtype; matrices are [N, K]."""

    def output(self, name: str, tensor: Tensor) -> None:
        """Make `tensor` the engine output `name`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., K] times the transpose of [N, K], plus [N]: [..., N]."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """[..., K] times [K, N], a weight that is published so: [..., N] float32."""

    def adapt(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor) -> Tensor:
        """y + (x a^T * scales) b: what LoRA adapters (Hu et al. 2021) add to `y` [B, T, N], the projection of x.

        x is [B, T, K]. `a` [S * P, K] and `b` [S * P, N] hold the P rows of each of S adapters one behind the other;
        `scales` [B, S] says how much of each adapter each sequence takes. `y` is not to be used afterwards.
        """

    def rms_norm(self, x: Tensor, weight: Tensor | None, epsilon: float, offset: float = 0.0) -> Tensor:
        """x / sqrt(mean(x^2) + epsilon) * (weight + offset) over the last axis, the mean and what is multiplied by in
        float32 (Zhang and Sennrich 2019); without a weight times 1."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        """(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias over the last axis, mean and variance in float32.

        Ba et al. 2016; the variance is divided by the number of elements.
        """

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """One of these functions of each element: "silu" x sigmoid(x); "gelu" x Phi(x), with the normal distribution;
        "gelu_tanh" its approximation by tanh, and "quick_gelu" that by sigmoid(1.702 x) (Hendrycks and Gimpel 2016);
        "relu" max(x, 0), and "relu_squared" its square; "sigmoid"; "tanh"."""

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """The sum of two tensors of one shape."""

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """The product, element by element, of two tensors of one shape, or of rows and a column of factors."""

    def clip(self, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """x, where it is less than `low` that, where it is more than `high` that: single elements [1, 1, 1]."""

    def split(self, x: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
        """Cut x along `axis` into parts of the given sizes."""

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of what all ranks have, added in the order of ranks: the same bits on each."""

    def square_sums(self, x: Tensor, widths: Sequence[int], counted: Sequence[bool]) -> Tensor:
        """What `SquareSums` says, [B, T, `SQUARE_SUMS`] in float32."""

    def rms_norm_of_ranks(self, x: Tensor, weight: Tensor, squares: Tensor, whole: int, norm: Norm) -> Tensor:
        """`rms_norm` of a rank's columns x of `whole` columns, of which `squares` [B, T, 1] is the sum of squares."""

    def assemble(self, x: Tensor) -> Tensor:
        """What all ranks have side by side along the last axis."""

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """The same elements in the same order under another shape."""

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        """[B, T, heads * D] to [B, heads, T, D]."""

    def merge_heads(self, x: Tensor) -> Tensor:
        """[B, heads, T, D] to [B, T, heads * D]."""

    def rotary_embedding(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Rotate the first R of D in [B, heads, T, D] by `cos_sin` [B, T, R], cosine half then sine half.

        Element j is paired with element j + R/2 (the layout of Hugging Face's Llama, not the interleaved one).
        """

    def pairs_apart(self, x: Tensor, rotary: int) -> Tensor:
        """Of the first `rotary` elements of D in [B, heads, T, D] those of even numbers, then those of odd ones."""

    def kv_cache_update(
        self, cache: Tensor, update: Tensor, start_index: Tensor, scales: Tensor | None = None, wraps: bool = False
    ) -> Tensor:
        """Write `update` [B, n, T, D] to rows start_index[b]..start_index[b]+T-1 of `cache` [B, n, C, D], in place; if
        it `wraps`, to these rows modulo C.

        With `scales` [B, n, C, 1] float32, which are written too, the cache is int8, and each row is quantized as
        `edgellm.kernels.quantization.rows` says.
        """

    def attention(
        self, query: Tensor, caches: Sequence[Tensor], mask: Tensor | None, scoring: Scoring[Tensor]
    ) -> Tensor:
        """Grouped-query attention of [B, nq, T, D] over the first L rows of keys and values [B, nkv, C, D], the
        `caches`.

        `mask` [B, 1, T, L], or [B, 1, 1, L] for all T alike, is True where a key is visible; None shows every row. The
        softmax is computed in float32. Behind keys and values of int8 stand their scales [B, nkv, C, 1], which multiply
        scores and weights. Query head h uses key-value head h // (nq / nkv).
        """

    def short_convolution(
        self,
        step: ShortConvolution,
        value: Tensor,
        columns: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parents: Tensor | None,
        tokens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What the step computes of `value` [B, T, ..]: the output [B, T, C], and what is convolved, [B, T, C] float32.

        `columns` [B, C, W - 1] float32 are the inputs before, the latest last; `weight` is [C, W], `bias` [C]. Each row
        follows the one before it or, with `parents` [B, T], the row of that number; -1 follows the columns. With
        `tokens` [B] the columns become, in place, those behind so many rows; what rows behind these get is no matter.
        """

    def update_matrices(
        self,
        step: GatedDelta,
        rows: Tensor,
        projected: Tensor,
        matrices: Tensor,
        numbers: tuple[Tensor, ...],
        parents: Tensor | None,
        tokens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What the step computes of `rows` [B, T, 2 Hk Dk + Hv Dv]: the output [B, T, Hv Dv], and g, then beta, of each
        value head, [B, T, 2 Hv]; both float32. `numbers` [Hv] each are the step's own, a_log and dt_bias, and of a
        `SelectiveScan` skip.

        b and a stand in `projected` [B, T, ..]. `matrices` [B, Hv, Dv, Dk] float32 are the turned ones of the tokens
        before; `parents` and `tokens` are those of `short_convolution`, of the matrices.
        """

    def experts(
        self,
        step: Experts,
        x: Tensor,
        scores: Tensor,
        correction: Tensor | None,
        gate_up: tuple[Any, Tensor | None],
        down: tuple[Any, Tensor | None],
    ) -> Tensor:
        """The sum of what the step's experts give of `x` [B, T, H] where the router gave `scores` [B, T, E]:
        [B, T, H] float32. `gate_up` and `down` are weights of experts, which `weight` may give in a form of their
        own, and their biases [E, N].
        """

    def window_attention(
        self,
        query: Tensor,
        caches: Sequence[Tensor],
        mask: Tensor,
        start_index: Tensor,
        window: int,
        scoring: Scoring[Tensor],
    ) -> Tensor:
        """The same within a window, of rows that are a ring: position p in row p modulo C.

        A token has the positions before start_index[b] and those of the new ones that the mask shows it, and sees the
        latest `window` of these.
        """

    def attention_ahead(
        self,
        query: Tensor,
        caches: Sequence[Tensor],
        start_index: Tensor,
        last_seen: Tensor,
        window: int | None,
        scoring: Scoring[Tensor],
    ) -> Tensor:
        """The same where the token at position p = start_index[b] + t sees the positions up to last_seen[b, t], which
        is p or that of a later token of the step; with a `window`, where rows are a ring, those behind p - window."""

    def gated(self, gate_up: Tensor, kind: str) -> Tensor:
        """activation(first half, kind) * second half over the last axis: [B, T, 2F] to [B, T, F]."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """factor * x."""

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rows of [B, T, H] named by `rows` [B, S] int32: [B, S, H]."""

    def unfold(self, step: Unfold, x: Tensor) -> Tensor:
        """What each place of a convolution reads of x (see `Unfold`)."""

    def depthwise_convolution(self, x: Tensor, weight: Tensor) -> Tensor:
        """Each column of x [1, T, C] convolved with its own of `weight` [C, W] (see `GatedConvolution`)."""

    def local_attention(self, step: LocalAttention, x: Tensor, relative: Tensor, scale: Tensor) -> Tensor:
        """What rows [1, T, 3 n D] get of those before them: [1, T, n D] (see `LocalAttention`)."""

    def past_attention(self, step: EncoderAttention, heads: Tensor, kept: Tensor, first: Tensor) -> Tensor:
        """What rows of query, key and value `heads` [3, n, T, D] get of themselves and those before them: [1, n, T, D]
        (see `EncoderAttention`, whose inputs `kept` and `first` are)."""

    def concatenate(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        """Join tensors along `axis`."""

    def to_float32(self, x: Tensor) -> Tensor:
        """x in float32."""

    def to_compute(self, x: Tensor) -> Tensor:
        """x in compute dtype."""
