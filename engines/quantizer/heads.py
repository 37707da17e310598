"""Packs a model's head, or the embedding table that is its head, or a draft's, while it is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint, converted, not_finite_error
from edgellm.engines.checkpoints.weights import computed_ahead
from edgellm.engines.formats.tensors import STORAGE, as_float32, convert
from edgellm.engines.model.decoder import HEAD
from edgellm.engines.quantizer.rounding import Clipping, quantize_rows
from edgellm.engines.quantizer.written_layout import StoredTensor, StreamedTensor, packed_codes
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.kernels.sampling.twin import first_not_finite

#: Elements that a thread packs at a time, and how many threads: NumPy lets go of Python's lock.
_PIECE, _THREADS = 1 << 20, min(8, os.cpu_count() or 1)
#: Which shares of the full scale are tried: of whole rows of 8 bits the best clip little (2 to 4 % less squared error
#: than clipping nothing), of groups of 4 bits up to half (30 % less; twice as many shares would take off 1 % more).
_CLIPPING: dict[str, Clipping] = {
    "int8": tuple(1 - step / 64 for step in range(9)),
    "int4": tuple(1 - step / 32 for step in range(19)),
}


def packed_head(
    checkpoint: Checkpoint,
    source: str,
    format: WeightFormat,
    advance: Callable[[int], None],
    chosen: np.ndarray | None = None,
) -> dict[str, StoredTensor | StreamedTensor]:
    """The tensors of a head in an integer `format`, in compressed-tensors' layout "pack-quantized": of the tensor
    `source` [N, K] of a checkpoint, or of the rows `chosen` [n] of it.

    Scales are those of the least squared error (`quantize_rows`). It is packed while it is written: only a few pieces
    of some million elements are in memory at a time, and all scales; `advance` gets the rows of each piece. Writing it
    raises CheckpointError for values that are infinite or NaN, or too large for the format's dtype.
    """
    rows, columns = checkpoint.info(source).shape
    chosen = np.arange(rows) if chosen is None else chosen
    rows = len(chosen)
    scales = np.empty((rows, format.groups(columns)), STORAGE[format.dtype])

    def piece(own: slice) -> np.ndarray:
        values = _values(checkpoint, source, chosen[own], format.dtype)
        weight = quantize_rows(values, format, clipping=_CLIPPING[format.codes])
        scales[own], _ = convert(weight.scales, "float32", format.dtype)
        return packed_codes(weight.codes, format.bits).reshape(-1).view(np.uint8)

    def codes() -> Iterator[np.ndarray]:
        step = max(1, _PIECE // columns)
        parts = (slice(start, min(rows, start + step)) for start in range(0, rows, step))
        for own, packed in computed_ahead(piece, parts, _THREADS):
            yield packed
            advance(own.stop - own.start)

    module = HEAD.removesuffix("weight")
    tensors: dict[str, StoredTensor | StreamedTensor] = {
        "weight_packed": StreamedTensor("int32", (rows, -(-columns * format.bits // 32)), codes),
        "weight_scale": StoredTensor(format.dtype, scales),  # written behind the codes, with which they are found
        "weight_shape": StoredTensor("int64", np.array([rows, columns], np.int64)),
    }
    return {f"{module}{ending}": tensor for ending, tensor in tensors.items()}


def _values(checkpoint: Checkpoint, source: str, rows: np.ndarray, dtype: str) -> np.ndarray:
    """Some rows as float32, which `dtype` can hold."""
    info, stored = checkpoint.info(source), checkpoint.raw(source)[rows]
    index = first_not_finite(stored.reshape(-1))
    if index >= 0:
        row, column = divmod(index, info.shape[1])
        raise not_finite_error(info, checkpoint.raw(source), int(rows[row]) * info.shape[1] + column)
    converted(info, stored, dtype)
    return as_float32(stored, info.dtype)
