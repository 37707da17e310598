"""The interpreter that computes a description at once, in float32 with NumPy.

It is the backend where there is no GPU, and the reference of the other interpreter. One token of one sequence is the
common case, and there Python's own time counts: few calls, no copies, nothing computed twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from edgellm.engines.backends.numpy_nonlinear import (
    ACTIVATIONS,
    VisibleKeys,
    attention,
    attention_ahead,
    mixed,
    window_attention,
)
from edgellm.engines.backends.ranks import Exchange, Rank
from edgellm.engines.errors import EngineError
from edgellm.engines.model.encoder_steps import EncoderAttention, LocalAttention, Unfold
from edgellm.engines.model.operations import Operations
from edgellm.engines.model.steps import Norm
from edgellm.kernels.decode.heads_twin import pairs_apart, rms_norm, square_sums
from edgellm.kernels.encoder.local_attention import local_attention, past_attention
from edgellm.kernels.quantization.rows import write_ring_rows, write_rows
from edgellm.kernels.recurrent.contract import Convolution, DeltaGates, ScanGates
from edgellm.kernels.recurrent.twin import convolved, delta_gates, delta_nodes, delta_walk, scan_gates, take_columns

_DTYPES = {
    "compute": np.dtype(np.float32),
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "int8": np.dtype(np.int8),
    "bool": np.dtype(np.bool_),
}
_ONE = np.float32(1)
#: OpenBLAS copies a matrix into an order of its own before it multiplies, which costs as much as reading it twice more;
#: but not where M * N * K is small (on x86-64 with AVX-512). Up to so many tokens, pieces of that size are faster.
_FEW_TOKENS, _UNPACKED = 8, 300_000
#: For one token OpenBLAS reads matrices of short rows at half of what memory gives (x86-64, AVX-512), and its threads
#: wait for each other actively, which takes ten times as long where others compute, too. So rows are multiplied one by
#: one, by as many threads as get so many bytes of them: waking one for less takes longer than it saves. But not rows so
#: long that OpenBLAS shares out each.
_BYTES_OF_THREAD, _LONG_ROW = 32 << 20, 8192
#: Elements of a weight that are float64 at a time: they stay in the processor's cache.
_WIDENED = 60_000


class NumpyOperations(Operations[np.ndarray]):
    """Takes inputs from `bindings` and weights from `weights` by name, and puts outputs into `bindings`.

    With `wide` all is computed in float64, from and to arrays of float32, in twice the time. It is for KV rows of 8
    bits: where float32 rounds otherwise in a batch or a tree, a value between two steps of 8 bits would take the other
    one, which tokens may show; float64's roundings do not reach that far.

    `threads` share the rows of a weight, read from memory, for one token; 0: weights stay in the processor's cache.
    `rank`: one of several that compute the parts of a program together.

    Inputs and weights are looked up at every call, so one object serves many runs, whatever is bound in between. An
    output goes into the array that the caller has bound under its name (float32, same shape), else `bindings` gets an
    array; a KV cache that was updated in place is its own output. EngineError names a tensor that is missing or has
    another shape or dtype than the description declares.
    """

    # NumPy's own functions, whose types say more than the operations'. All is float32: asarray gives back what it gets.
    add = staticmethod(np.add)  # type: ignore[assignment]
    multiply = staticmethod(np.multiply)  # type: ignore[assignment]
    concatenate = staticmethod(np.concatenate)  # type: ignore[assignment]
    to_float32 = to_compute = staticmethod(np.asarray)  # type: ignore[assignment]
    window_attention, attention_ahead = staticmethod(window_attention), staticmethod(attention_ahead)

    def __init__(
        self,
        bindings: MutableMapping[str, np.ndarray],
        weights: Mapping[str, np.ndarray],
        wide: bool = False,
        threads: int = 0,
        rank: Rank | None = None,
    ) -> None:
        self._bindings, self._wide, self._threads = bindings, wide, threads
        self._weights, self._rank = weights, rank or Rank(0, Exchange(1))
        self._own_outputs: set[str] = set()
        self._mask: np.ndarray | None = None
        self._visible: VisibleKeys | None = None
        self._cos_sin: np.ndarray | None = None
        self._rotation: tuple[np.ndarray, np.ndarray] | None = None
        self._scales: np.ndarray | None = None
        self._adapted: list[tuple[int, int, np.float32]] = []

    def input(self, name: str, shape: Sequence[int], dtype: str) -> np.ndarray:
        array = self._bindings.get(name)
        if array is None:
            raise EngineError(f"the input {name!r} is not bound: expected {dtype} {list(shape)}")
        if array.shape != shape and array.shape != tuple(shape):
            raise EngineError(f"the input {name!r} has the shape {list(array.shape)}, expected {list(shape)}")
        if array.dtype != _DTYPES[dtype]:
            raise EngineError(f"the input {name!r} is {array.dtype}, expected {_DTYPES[dtype]}")
        if self._wide and dtype == "compute":
            return array.astype(np.float64)
        # What layers derive from an input must not outlive its values: the caller may have filled the array anew.
        if array is self._mask:
            self._mask = None
        elif array is self._cos_sin:
            self._cos_sin = None
        elif array is self._scales:
            self._scales = None
        return array

    def weight(self, name: str, shape: Sequence[int]) -> np.ndarray:
        array = self._weights.get(name)
        if array is None:
            raise EngineError(f"the weight {name!r} is missing: expected float32 {list(shape)}")
        if array.shape != shape and array.shape != tuple(shape):
            raise EngineError(f"the weight {name!r} has the shape {list(array.shape)}, expected {list(shape)}")
        return array

    def output(self, name: str, tensor: np.ndarray) -> None:
        bound = self._bindings.get(name)
        if bound is tensor:
            return
        if bound is None or name in self._own_outputs:
            self._own_outputs.add(name)
            self._bindings[name] = tensor
        elif bound.shape != tensor.shape or not np.can_cast(tensor.dtype, bound.dtype, "same_kind"):
            raise EngineError(
                f"the output {name!r} is bound to {bound.dtype} {list(bound.shape)}, expected {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        elif not np.may_share_memory(bound, tensor) or bound.__array_interface__ != tensor.__array_interface__:
            bound[...] = tensor  # else they are the same elements

    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        rows, columns = weight.shape
        tokens = x.size // columns
        if self._wide:
            result = _wide_linear(x.reshape(tokens, columns), weight)
        elif tokens == 1 and self._threads and columns <= _LONG_ROW:
            result = _streamed_linear(x.reshape(columns), weight, self._threads)
        elif tokens == 1:  # matrix times vector, each row of the weight read once, in order
            result = np.dot(weight, x.reshape(columns))
        elif tokens <= _FEW_TOKENS:
            result = _few_tokens_linear(np.ascontiguousarray(x).reshape(tokens, columns), weight)
        else:  # OpenBLAS is up to three times slower at x times weight^T where there are few tokens
            result = np.ascontiguousarray(np.dot(weight, x.reshape(-1, columns).T).T)
        if bias is not None:
            result += bias
        return result.reshape(*x.shape[:-1], rows)

    def reduce(self, x: np.ndarray) -> np.ndarray:
        first, *others = self._rank.all(x)
        total = first.copy() if others else first
        for each in others:
            total += each
        return total

    def square_sums(self, x: np.ndarray, widths: Sequence[int], counted: Sequence[bool]) -> np.ndarray:
        return square_sums(self.split(x, [*widths, x.shape[-1] - sum(widths)], axis=x.ndim - 1)[:-1], counted)

    def rms_norm_of_ranks(
        self, x: np.ndarray, weight: np.ndarray, squares: np.ndarray, whole: int, norm: Norm
    ) -> np.ndarray:
        return rms_norm(x, weight, norm.epsilon, norm.offset, squares / np.float32(whole))

    def assemble(self, x: np.ndarray) -> np.ndarray:
        return np.concatenate(self._rank.all(x), axis=-1)

    def product(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return np.asarray(np.matmul(x, weight))

    def adapt(self, y: np.ndarray, x: np.ndarray, a: np.ndarray, b: np.ndarray, scales: np.ndarray) -> np.ndarray:
        size = a.shape[0] // scales.shape[1]
        for sequence, adapter, scale in self._adapted_sequences(scales):
            rows = slice(adapter * size, (adapter + 1) * size)
            if x.shape[1] == 1:
                low = np.dot(a[rows], x[sequence, 0])
                if scale != _ONE:
                    low *= scale
                y[sequence, 0] += np.dot(low, b[rows])
            else:
                low = np.dot(a[rows], x[sequence].T)
                if scale != _ONE:
                    low *= scale
                y[sequence] += np.dot(low.T, b[rows])
        return y

    def rms_norm(self, x: np.ndarray, weight: np.ndarray | None, epsilon: float, offset: float = 0.0) -> np.ndarray:
        size = x.shape[-1]
        if x.size == size:
            flat = x.reshape(size)
            result = x * x.dtype.type(1 / math.sqrt(float(np.dot(flat, flat)) / size + epsilon))
        else:
            scale = np.einsum("...k,...k->...", x, x)[..., None]
            scale /= size
            scale += epsilon
            np.sqrt(scale, out=scale)
            result = x / scale
        if weight is not None:
            result *= weight if offset == 0.0 else weight + np.float32(offset)
        return result

    def layer_norm(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, epsilon: float) -> np.ndarray:
        result = x - x.mean(axis=-1, keepdims=True)
        scale = np.einsum("...k,...k->...", result, result)[..., None]
        scale /= x.shape[-1]
        scale += epsilon
        np.sqrt(scale, out=scale)
        result /= scale
        result *= weight
        result += bias
        return result

    def activation(self, x: np.ndarray, kind: str) -> np.ndarray:
        return ACTIVATIONS[kind](x)

    def split(self, x: np.ndarray, sizes: Sequence[int], axis: int) -> list[np.ndarray]:
        leading = (slice(None),) * (axis % x.ndim)
        parts, start = [], 0
        for size in sizes:
            parts.append(x[(*leading, slice(start, start + size))])
            start += size
        return parts

    def reshape(self, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return x.reshape(shape)

    def split_heads(self, x: np.ndarray, heads: int) -> np.ndarray:
        batch, tokens, width = x.shape
        return x.reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3)

    def merge_heads(self, x: np.ndarray) -> np.ndarray:
        batch, heads, tokens, size = x.shape
        return x.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * size)

    def rotary_embedding(self, x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
        rotated = cos_sin.shape[-1]
        cos, sin = self._rotation_of(cos_sin)
        rest = x.shape[-1] - rotated
        turning = x[..., :rotated] if rest else x
        pairs = (*turning.shape[:-1], 2, rotated // 2)
        swapped = turning.reshape(pairs)[..., ::-1, :]
        result = turning * cos
        result.reshape(pairs)[...] += swapped * sin
        return np.concatenate((result, x[..., rotated:]), axis=-1) if rest else result

    def pairs_apart(self, x: np.ndarray, rotary: int) -> np.ndarray:
        return pairs_apart(x, rotary)

    def kv_cache_update(self, cache, update, start_index, scales=None, wraps=False):
        tokens, rows = update.shape[2], cache.shape[2]
        for sequence, start in enumerate(start_index.tolist()):
            if wraps:
                write_ring_rows(sequence, start, update[sequence], cache, scales)
                continue
            if not 0 <= start <= rows - tokens:
                raise EngineError(f"rows {start} to {start + tokens - 1} are outside of a KV cache of {rows} rows")
            write_rows((sequence, slice(None), slice(start, start + tokens)), update[sequence], cache, scales)
        return cache

    def attention(self, query, caches, mask, scoring):
        mask = np.ones((1, 1, 1, caches[0].shape[2]), np.bool_) if mask is None else mask
        if self._visible is None or mask is not self._mask:
            self._visible, self._mask = VisibleKeys(mask), mask  # same for all layers
        return attention(query, caches, self._visible, scoring)

    def short_convolution(self, step, value, columns, weight, bias, parents, tokens):
        convolution = Convolution(weight, step.activation == "silu", step.gated, step.first)
        output, inputs = convolved(value, convolution, bias, columns, parents)
        if tokens is not None:
            take_columns(columns, inputs, [np.arange(count) for count in tokens.tolist()])
        return output, inputs

    def update_matrices(self, step, rows, projected, matrices, numbers, parents, tokens):
        a_log, dt_bias, *skips = numbers
        skip = skips[0] if skips else None
        if skip is None:
            gates = delta_gates(projected, DeltaGates(a_log, dt_bias, step.first))
        else:
            gates = scan_gates(projected, ScanGates(a_log, dt_bias, skip, step.first))
        if tokens is None:
            return delta_nodes(rows, gates, matrices, parents, skip), gates
        output = np.zeros((*rows.shape[:2], *matrices.shape[1:3]), np.float32)
        for slot, count in enumerate(tokens.tolist()):
            output[slot, :count] = delta_walk(rows[slot], gates[slot], matrices[slot], range(count), skip=skip)
        return output.reshape(*rows.shape[:2], -1), gates

    def experts(self, step, x, scores, correction, gate_up, down):
        return mixed(step.mixture, x, scores, correction, gate_up, down, self.linear, step.own)

    def clip(self, x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return np.minimum(np.maximum(x, low), high)

    def gated(self, gate_up: np.ndarray, kind: str) -> np.ndarray:
        half = gate_up.shape[-1] // 2
        result = ACTIVATIONS[kind](gate_up[..., :half])
        result *= gate_up[..., half:]
        return result

    def scale(self, x: np.ndarray, factor: float) -> np.ndarray:
        return x * np.float32(factor)

    def gather_rows(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if rows.size and (rows.min() < 0 or rows.max() >= x.shape[1]):
            raise EngineError(f"the rows {rows.ravel().tolist()} are to be gathered of {x.shape[1]}")
        return x[np.arange(x.shape[0])[:, None], rows]

    def unfold(self, step: Unfold, x: np.ndarray) -> np.ndarray:
        above, left = step.padding
        padded = np.pad(x.reshape(*step.grid, step.channels), ((0, 0), (above, above), (left, left), (0, 0)))
        places = np.lib.stride_tricks.sliding_window_view(padded, step.kernel, (1, 2))
        return places[:, :: step.stride, :: step.stride].reshape(1, step.places, -1)

    def depthwise_convolution(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        padded = np.pad(x[0], ((weight.shape[1] - 1, 0), (0, 0)))
        return np.asarray(sum(padded[k : k + x.shape[1]] * weight[:, k] for k in range(weight.shape[1])))[None]

    def local_attention(
        self, step: LocalAttention, x: np.ndarray, relative: np.ndarray, scale: np.ndarray
    ) -> np.ndarray:
        return local_attention(x[0], relative[0], step.first, step.past, step.cap, scale)[None]

    def past_attention(
        self, step: EncoderAttention, heads: np.ndarray, kept: np.ndarray, first: np.ndarray
    ) -> np.ndarray:
        _, count, rows, size = heads.shape
        context = past_attention(heads, kept[0, step.layer], int(first[0]), step.past, size**-0.5)
        return context.reshape(1, rows, count, size).swapaxes(1, 2)

    def _adapted_sequences(self, scales: np.ndarray) -> list[tuple[int, int, np.float32]]:
        """(sequence, adapter, scale) where the scale is not 0; same for all layers."""
        if scales is not self._scales:
            sequences, adapters = np.nonzero(scales)
            self._adapted = list(zip(sequences.tolist(), adapters.tolist(), scales[sequences, adapters], strict=True))
            self._scales = scales
        return self._adapted

    def _rotation_of(self, cos_sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[B, 1, T, R] cosines twice, and [B, 1, T, 2, R/2] sines, negative for the first half; same for all layers."""
        if self._rotation is None or cos_sin is not self._cos_sin:
            half = cos_sin.shape[-1] // 2
            cos, sin = cos_sin[:, None, :, :half], cos_sin[:, None, :, half:]
            self._rotation = np.concatenate((cos, cos), axis=-1), np.stack((-sin, sin), axis=-2)
            self._cos_sin = cos_sin
        return self._rotation


def _streamed_linear(x: np.ndarray, weight: np.ndarray, threads: int) -> np.ndarray:
    """[N, K] times x [K], row by row, by up to so many threads: [N]."""
    step = max(1, -(-len(weight) // max(1, min(threads, weight.nbytes // _BYTES_OF_THREAD))))
    others = [_pool().submit(_row_sums, weight[at : at + step], x) for at in range(step, len(weight), step)]
    return np.concatenate((_row_sums(weight[:step], x), *(each.result() for each in others)))


def _row_sums(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.asarray(np.dot(weight[:, None], x)).reshape(-1)  # of three dimensions: a call of OpenBLAS for each row


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "edgellm-rows")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads stay behind


def _few_tokens_linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [M, K] times the transpose of [N, K], a piece of the weight's rows at a time: [M, N]."""
    result = np.empty((x.shape[0], weight.shape[0]), np.float32)
    step = max(16, _UNPACKED // x.size // 16 * 16)
    for start in range(0, weight.shape[0], step):
        result[:, start : start + step] = np.dot(x, weight[start : start + step].T)
    return result


def _wide_linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [M, K] float64 times the transpose of [N, K] float32, which becomes float64 piece by piece: [M, N]."""
    result = np.empty((x.shape[0], weight.shape[0]))
    step = max(1, _WIDENED // x.shape[1])
    for start in range(0, weight.shape[0], step):
        piece = weight[start : start + step].astype(np.float64)
        result[:, start : start + step] = np.dot(piece, x[0]) if x.shape[0] == 1 else np.dot(x, piece.T)
    return result
