"""The kernels of encoders in NumPy, float32: they define what `CudaEncoder` computes."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
from decode_twins import NumpyTiledKernels, product
from launched_twins import launched

from edgellm.kernels.contracts import Contracts
from edgellm.kernels.decode.contract import LinearWeights
from edgellm.kernels.decode.heads_twin import rms_norm
from edgellm.kernels.encoder.contract import ACTIVATIONS, NO_ACTIVATION, Convolution, EncoderKernels
from edgellm.kernels.encoder.local_attention import local_attention, past_attention
from edgellm.kernels.numpy_launch import checked_launch

_check = Contracts(EncoderKernels, np.ndarray)
#: Scores that are held at a time.
_MOST_SCORES = 1 << 24
_NAMES = {number: name for name, number in ACTIVATIONS.items()}


class NumpyEncoder:
    """See `edgellm.kernels.encoder.contract.EncoderKernels`."""

    @checked_launch(_check)
    def norm(self, values, weight, bias, epsilon, offset, output, next_early=True):
        x = values if bias is None else values - values.mean(axis=-1, keepdims=True)
        normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(epsilon))
        _write(output, normed * (weight + np.float32(offset)) if bias is None else normed * weight + bias)

    @checked_launch(_check)
    def activate(self, values: np.ndarray, activation: int, output: np.ndarray) -> None:
        _write(output, activated(values, _NAMES[activation]))

    @checked_launch(_check)
    def copy_rows(self, values: np.ndarray, rows: np.ndarray | None, output: np.ndarray, column: int) -> None:
        chosen = values[: len(output)] if rows is None else values[np.clip(rows, 0, len(values) - 1)]
        _write(output[:, column:], chosen)

    @checked_launch(_check)
    def add_rows(self, values: np.ndarray, other: np.ndarray, output: np.ndarray) -> None:
        np.copyto(output, values + other)

    @checked_launch(_check)
    def add_scaled_rows(self, values, other, scale, output):
        np.copyto(output, values + other * scale)

    @checked_launch(_check)
    def average_pool(self, values: np.ndarray, side: int, size: int, output: np.ndarray) -> None:
        squares = values.reshape(-1, size, side // size, size, values.shape[1])
        columns = reduce(np.add, (squares[:, row] for row in range(size)))
        total = reduce(np.add, (columns[:, :, column] for column in range(size)))
        np.copyto(output, (total * np.float32(1 / size**2)).reshape(output.shape))

    @checked_launch(_check)
    def clip_rows(self, values: np.ndarray, bounds: np.ndarray, output: np.ndarray, column: int) -> None:
        _write(output[:, column:], values.clip(*bounds))

    @checked_launch(_check)
    def clipped_gate(self, gate, values, gate_bounds, bounds, activation, output):
        np.copyto(output, activated(gate.clip(*gate_bounds), _NAMES[activation]) * values.clip(*bounds))

    @checked_launch(_check)
    def normed_heads(self, qkv, query_weight, key_weight, epsilon, output):
        size = len(query_weight)
        heads = qkv.reshape(len(qkv), 3, -1, size)
        normed = heads / np.sqrt((heads * heads).mean(axis=-1, keepdims=True) + np.float32(epsilon))
        normed[:, 0] *= query_weight * np.float32(size**0.5)
        normed[:, 1] *= key_weight
        quarters = np.arange(size).reshape(4, -1)[[2, 0, 3, 1]].reshape(-1)
        normed[:, :2] = normed[:, :2, :, quarters]
        np.copyto(output, normed.reshape(qkv.shape))

    @checked_launch(_check)
    def standard_norm(self, values, bias, scale, factor, epsilon, output):
        x = values * np.float32(factor)
        x = x if bias is None else (x - bias) * scale
        np.copyto(output, x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(epsilon)))

    @checked_launch(_check)
    def unfold(self, values: np.ndarray, convolution: Convolution, output: np.ndarray) -> None:
        channels, height, width, down, across, stride, above, left = convolution
        images = values[:, :channels].reshape(-1, height, width, channels)
        padded = np.pad(images, ((0, 0), (above, above), (left, left), (0, 0)))
        seen = np.lib.stride_tricks.sliding_window_view(padded, (down, across), (1, 2))[:, ::stride, ::stride]
        _write(output, seen.reshape(len(output), -1))

    @checked_launch(_check)
    def centered_norm(self, values, weight, mask, epsilon, output):
        x = values[:, : len(weight)]
        x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + np.float32(epsilon)) * weight
        np.maximum(x if mask is None else x * mask, 0, out=output)

    @checked_launch(_check)
    def add_normed(self, values, weight, epsilon, residual, share, output):
        np.copyto(output, residual + np.float32(share) * rms_norm(values, weight, epsilon))

    @checked_launch(_check)
    def gated_convolution(self, values, weight, norm, epsilon, output):
        taps, gate = weight.shape[1], values[:, len(weight) :]
        padded = np.pad(values[:, : len(weight)] / (1 + np.exp(-gate)), ((taps - 1, 0), (0, 0)))
        seen = np.lib.stride_tricks.sliding_window_view(padded, taps, 0)
        np.copyto(output, activated(rms_norm((seen * weight).sum(axis=2), norm, epsilon), "silu"))

    @checked_launch(_check)
    def local_attention(self, qkv, relative, first, past, cap, scale, context):
        np.copyto(context, local_attention(qkv, relative, first, past, cap, scale))

    @checked_launch(_check)
    def past_attention(self, heads, kept, first, past, scale, context):
        np.copyto(context, past_attention(heads, kept, int(first[0]), past, scale))

    @checked_launch(_check)
    def product(self, values: np.ndarray, weight: np.ndarray, scale: float, output: np.ndarray) -> None:
        np.copyto(output, values @ weight * np.float32(scale))

    @checked_launch(_check)
    def prepare_heads(self, qkv: np.ndarray, rotary: np.ndarray | None, heads: np.ndarray) -> None:
        _, count, rows, size = heads.shape
        np.copyto(heads, qkv.reshape(rows, 3, count, size).transpose(1, 2, 0, 3))
        if rotary is not None:
            cosine, sine = np.split(rotary, 2, axis=1)
            low, high = np.split(heads[:2], 2, axis=-1)
            heads[:2] = np.concatenate((low * cosine - high * sine, high * cosine + low * sine), axis=-1)

    @checked_launch(_check)
    def attention(self, heads, window, visible, scale, context):
        step = max(1, _MOST_SCORES // (heads.shape[1] * window))
        for begin in range(0, len(context), window):
            own = np.arange(begin, begin + window)
            seen = own if visible is None else own[visible[own]]
            for first in range(begin, begin + window, step):
                chosen = slice(first, min(first + step, begin + window))
                _attend(heads, chosen, seen, scale, context[chosen])


class NumpyEncoderLinear(NumpyTiledKernels):
    """The twins of linear layers of any number of rows, `CudaPromptLinear`."""

    @launched
    def activated(self, x: np.ndarray, linear: LinearWeights, activation: int, output: np.ndarray) -> None:
        """`output` [R, N] compute = activation(x weight^T + bias), one of `ACTIVATIONS` or `NO_ACTIVATION`."""
        sums = product(x, linear)
        np.copyto(output, sums if activation == NO_ACTIVATION else activated(sums, _NAMES[activation]))


def activated(x: np.ndarray, activation: str) -> np.ndarray:
    """One of `ACTIVATIONS` of each element, in the dtype of x."""
    if activation == "gelu":
        return x * (1 + _erf(x * x.dtype.type(math.sqrt(0.5)))) * x.dtype.type(0.5)
    if activation == "gelu_tanh":
        inner = x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x**3)
        return x * (1 + np.tanh(inner)) * x.dtype.type(0.5)
    if activation == "relu_squared":
        return np.square(np.maximum(x, 0))
    slope = x.dtype.type(1.702 if activation == "quick_gelu" else 1)
    with np.errstate(over="ignore"):  # exp of a large number: infinity, and the result is 0
        return x / (1 + np.exp(-slope * x))


def _erf(x: np.ndarray) -> np.ndarray:
    """The error function, of which NumPy has none, element by element."""
    return np.vectorize(math.erf, otypes=[x.dtype])(x) if x.size else x


def _attend(heads: np.ndarray, chosen: slice, seen: np.ndarray, scale: float, context: np.ndarray) -> None:
    """`context` [n, E] of the `chosen` n queries over the rows `seen`."""
    query, keys, values = heads[0, :, chosen], heads[1][:, seen], heads[2][:, seen]
    if not len(seen):
        context[...] = 0
        return
    scores = query @ keys.swapaxes(1, 2) * np.float32(scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended = weights @ values / weights.sum(axis=-1, keepdims=True)
    context[...] = attended.swapaxes(0, 1).reshape(context.shape)


def _write(output: np.ndarray, values: np.ndarray) -> None:
    """`values` [R, K] to the first columns of an output [R, P], zeros behind."""
    output[:, : values.shape[1]] = values
    output[:, values.shape[1] :] = 0
