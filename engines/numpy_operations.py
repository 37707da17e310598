"""The interpreter of operations that computes with NumPy in float32, at once.

It is the oracle of the GPU and the engine of machines without one, so it is written for speed at one token a step: one
BLAS call a projection on contiguous [N, K] weights, KV rows written in place, attention over the key range only.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import numpy as np

from edgellm.engines.errors import EngineError
from edgellm.engines.operations import Operations

_DTYPES = {"compute": np.float32, "float32": np.float32, "int32": np.int32, "bool": np.bool_}
#: Added to scores of keys that are not visible; exp of it is 0 in float32.
_HIDDEN = np.float32(-1e30)


class NumpyOperations(Operations[np.ndarray]):
    """Computes on `bindings` (inputs by name; outputs are written there) and `weights`.

    An output array that is bound already is filled in place, otherwise the result is bound.
    """

    def __init__(self, bindings: MutableMapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> None:
        self._bindings = bindings
        self._weights = weights

    def input(self, name: str, shape: Sequence[int], dtype: str) -> np.ndarray:
        """The bound array; raises EngineError if it is missing or another shape or dtype."""
        return _checked(self._bindings, name, shape, _DTYPES[dtype])

    def weight(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """The weight; raises EngineError if it is missing or another shape or dtype."""
        return _checked(self._weights, name, shape, np.float32)

    def output(self, name: str, tensor: np.ndarray) -> None:
        """Write the result; caches are outputs on their own memory."""
        bound = self._bindings.get(name)
        if bound is None:
            self._bindings[name] = tensor
        elif bound is not tensor:
            np.copyto(bound, tensor)

    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """A matrix-vector product for one token, a matrix product for more."""
        if x.size == x.shape[-1]:
            product = np.dot(weight, x.reshape(-1)).reshape(*x.shape[:-1], -1)
        else:
            product = np.dot(x.reshape(-1, x.shape[-1]), weight.T).reshape(*x.shape[:-1], -1)
        if bias is not None:
            product += bias
        return product

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
        """The mean of squares as one dot product."""
        if x.size == x.shape[-1]:
            row = x.reshape(-1)
            scale = 1.0 / np.sqrt(np.dot(row, row) / np.float32(row.size) + np.float32(epsilon))
            return x * np.float32(scale) * weight
        mean = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
        mean += np.float32(epsilon)
        return x / np.sqrt(mean, out=mean) * weight

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The sum."""
        return a + b

    def split(self, x: np.ndarray, sizes: Sequence[int], axis: int) -> list[np.ndarray]:
        """Views."""
        parts, start = [], 0
        before = (slice(None),) * axis
        for size in sizes:
            parts.append(x[(*before, slice(start, start + size))])
            start += size
        return parts

    def split_heads(self, x: np.ndarray, heads: int) -> np.ndarray:
        """A view."""
        batch, tokens, width = x.shape
        return x.reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3)

    def merge_heads(self, x: np.ndarray) -> np.ndarray:
        """A copy where T > 1."""
        batch, heads, tokens, size = x.shape
        return x.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * size)

    def rotary_embedding(self, x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
        """(a, b) to (a cos - b sin, b cos + a sin) for the two halves of the rotated part."""
        half = cos_sin.shape[-1] // 2
        cos, sin = cos_sin[:, None, :, :half], cos_sin[:, None, :, half:]
        first, second = x[..., :half], x[..., half : 2 * half]
        rotated = np.empty_like(x, order="C")
        np.subtract(first * cos, second * sin, out=rotated[..., :half])
        np.add(second * cos, first * sin, out=rotated[..., half : 2 * half])
        if x.shape[-1] > 2 * half:
            rotated[..., 2 * half :] = x[..., 2 * half :]
        return rotated

    def kv_cache_update(self, cache: np.ndarray, update: np.ndarray, start_index: np.ndarray) -> np.ndarray:
        """Write the rows; raises EngineError where they lie outside the cache."""
        tokens, rows = update.shape[2], cache.shape[2]
        for index, start in enumerate(start_index.tolist()):
            if start < 0 or start + tokens > rows:
                raise EngineError(f"KV rows {start}..{start + tokens - 1} lie outside a cache of {rows} rows")
            cache[index, :, start : start + tokens] = update[index]
        return cache

    def attention(
        self, query: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray, scale: float
    ) -> np.ndarray:
        """Query heads of one key-value head are rows of one matrix, so that no key or value is repeated."""
        batch, heads, tokens, size = query.shape
        kv_heads, seen = keys.shape[1], mask.shape[3]
        group = heads // kv_heads
        rows = query.reshape(batch, kv_heads, group * tokens, size) * np.float32(scale)
        scores = np.matmul(rows, keys[:, :, :seen].transpose(0, 1, 3, 2))
        if not mask.all():
            visible = np.broadcast_to(mask[:, :, None], (batch, kv_heads, group, tokens, seen))
            np.copyto(scores.reshape(visible.shape), _HIDDEN, where=~visible)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        context = np.matmul(scores, values[:, :, :seen])
        context /= total
        return context.reshape(batch, heads, tokens, size)

    def silu_mul(self, gate_up: np.ndarray) -> np.ndarray:
        """x * sigmoid(x) * up, without overflow: sigmoid(x) = (1 + tanh(x / 2)) / 2."""
        half = gate_up.shape[-1] // 2
        gate = gate_up[..., :half]
        sigmoid = np.tanh(gate * np.float32(0.5))
        sigmoid += np.float32(1.0)
        sigmoid *= np.float32(0.5)
        sigmoid *= gate
        sigmoid *= gate_up[..., half:]
        return sigmoid

    def gather_rows(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The named rows."""
        return x[np.arange(x.shape[0])[:, None], rows]

    def concatenate(self, tensors: Sequence[np.ndarray], axis: int) -> np.ndarray:
        """One array."""
        return np.concatenate(tensors, axis=axis)

    def to_float32(self, x: np.ndarray) -> np.ndarray:
        """x itself: everything is float32 here."""
        return x


def _checked(arrays: Mapping[str, np.ndarray], name: str, shape: Sequence[int], dtype: type) -> np.ndarray:
    array = arrays.get(name)
    if array is None:
        raise EngineError(f"no array is bound to {name}; the engine needs {dtype.__name__} {tuple(shape)}")
    if array.shape != tuple(shape) or array.dtype != dtype:
        raise EngineError(f"{name} is {array.dtype} {array.shape}, the engine expects {dtype.__name__} {tuple(shape)}")
    return array
