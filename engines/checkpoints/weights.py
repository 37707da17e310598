"""Fills the buffers that engines take (`WeightSpec`) from the tensors of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint, overflow_error, storage_of
from edgellm.engines.checkpoints.tensors import convert, float32_into
from edgellm.engines.errors import CheckpointError
from edgellm.engines.model.config import WeightSpec

#: Elements converted at a time: large tensors must not be in memory twice.
_PIECE = 1 << 22
#: NumPy asks for huge pages for one large array, not for many small ones; buffers start on a cache line.
_ALIGNMENT = 64
#: More than a few threads wait for memory.
_THREADS = 4


def load_numpy_weights(
    checkpoint: Checkpoint, specs: Sequence[WeightSpec], progress: Callable[[int, int], None] | None = None
) -> dict[str, np.ndarray]:
    """Every buffer by name as a C-contiguous float32 array of the spec's shape; `progress` gets bytes of them done and
    in all.

    Raises CheckpointError for tensors that are missing or have another shape.
    """
    step = _ALIGNMENT // 4
    sizes = [-(-math.prod(spec.shape) // step) * step for spec in specs]
    arena = np.empty(sum(sizes) + step, np.float32)
    position = -(arena.ctypes.data // 4) % step
    weights, conversions = {}, []
    for spec, size in zip(specs, sizes, strict=True):
        buffer = arena[position : position + math.prod(spec.shape)]
        filled = 0
        for name, shape in spec.parts:
            values = _part(checkpoint, name, shape)
            target = buffer[filled : filled + values.size].reshape(values.shape)
            conversions.append((values, checkpoint.info(name).dtype, target))
            filled += values.size
        weights[spec.name] = buffer.reshape(spec.shape)
        position += size
    with ThreadPoolExecutor(_THREADS) as pool:  # NumPy lets other threads run while it converts
        done, total = 0, sum(target.nbytes for *_, target in conversions)
        finished = pool.map(lambda each: float32_into(*each), conversions)
        for (*_, target), _ in zip(conversions, finished, strict=True):
            done += target.nbytes
            if progress is not None:
                progress(done, total)
    return weights


def iterate_weight_parts(
    checkpoint: Checkpoint, specs: Sequence[WeightSpec], dtype: str
) -> Iterator[tuple[WeightSpec, int, np.ndarray]]:
    """Yield (spec, offset in bytes, values [n] in `dtype`, bfloat16 as uint16) until every buffer is filled.

    `offset` is where the values belong in the spec's buffer. A tensor that has the dtype already comes whole, as a
    read-only view of the memory map; others are converted piece by piece. Raises CheckpointError as
    `load_numpy_weights` does, and for finite values that `dtype` cannot hold.
    """
    item_size = storage_of(dtype).itemsize
    for spec in specs:
        offset = 0
        for name, shape in spec.parts:
            values, info = _part(checkpoint, name, shape).reshape(-1), checkpoint.info(name)
            step = max(1, values.size) if info.dtype == dtype else _PIECE
            for start in range(0, values.size, step):
                piece, overflowed = convert(values[start : start + step], info.dtype, dtype)
                if overflowed:
                    raise overflow_error(info, dtype, overflowed)
                yield spec, offset + start * item_size, piece
            offset += values.size * item_size


def _part(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = checkpoint.raw(name)
    if values.shape != tuple(shape):
        raise CheckpointError(
            f"{checkpoint.info(name).file}: tensor {name!r} has the shape {list(values.shape)}, expected "
            f"{list(shape)}. Take config.json and weights of one and the same model"
        )
    return values
