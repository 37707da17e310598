"""Fills the buffers that engines take (`WeightSpec`) from the tensors of a checkpoint."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint, converted, not_finite_error
from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.digests import is_known_finite, remember_finite
from edgellm.engines.formats.tensors import STORAGE, as_float32, contiguous, float32_into
from edgellm.engines.model.config import DraftConfig, WeightSpec
from edgellm.engines.model.draft_decoder import MAPPING
from edgellm.engines.quantization.stored import StoredWeight
from edgellm.kernels.sampling.twin import first_not_finite

#: Elements converted at a time: large tensors must not be in memory twice.
_PIECE = 1 << 22
#: NumPy asks for huge pages for one large array, not for many small ones; buffers start on a cache line.
_ALIGNMENT = 64
#: More than a few threads wait for memory.
_THREADS = 4
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")
#: What gives a packed weight, or values and their dtype, as they are in the file.
_Part = Callable[[], StoredWeight] | tuple[Callable[[], np.ndarray], str]


class FiniteCheck:
    """Which of the tensors that are loaded for `specs` are to be looked at for infinities and NaN, and what follows.

    What was found once is remembered with the digests of the files: as long as they stay as they are, no tensor is.
    Single numbers are bounds, which may be infinite.
    """

    def __init__(self, checkpoint: Checkpoint, specs: Sequence[WeightSpec]) -> None:
        self._checkpoint = checkpoint
        parts = [part for spec in specs for part in spec.parts]
        # Packed ones are looked at whenever they are read.
        infos = {
            name: checkpoint.info(name) for name, shape in parts if shape and checkpoint.layout(name, shape) is None
        }
        loaded: dict[Path, set[str]] = {}
        for info in infos.values():
            loaded.setdefault(info.file, set()).add(info.name)
        #: The tensors' names by their file, of files that are not known to be good.
        self._due = {
            file: names for file, names in loaded.items() if not is_known_finite(file, checkpoint.status(file), names)
        }
        self._names = {name for name, info in infos.items() if info.file in self._due}

    def is_due(self, name: str) -> bool:
        return name in self._names

    def conclude(self, found: Mapping[str, int]) -> None:
        """Take what was `found` in each tensor that is due: the index, in C order, of its first value that is infinite
        or NaN, -1 for none. Raises CheckpointError for the first tensor that has one."""
        for name, index in found.items():
            if index >= 0:
                raise not_finite_error(self._checkpoint.info(name), self._checkpoint.raw(name), index)
        for file, names in self._due.items():
            remember_finite(file, self._checkpoint.status(file), names)


class ExpertMatrices:
    """The matrices of a mixture's experts, as they are in the file: each becomes float32 where it is used. `parts` are
    what stands behind each other in the `shape` [E * N, K] of all."""

    def __init__(self, spec: WeightSpec, parts: Sequence[_Part]) -> None:
        self.shape = spec.shape
        count = len(parts) // spec.experts
        self._parts = [parts[start : start + count] for start in range(0, len(parts), count)]

    def rows(self, begin: int, end: int) -> ExpertMatrices:
        """Those of the experts whose rows of all are these."""
        found, size = copy(self), self.shape[0] // len(self._parts)
        found.shape, found._parts = (end - begin, self.shape[1]), self._parts[begin // size : end // size]
        return found

    def of(self, expert: int) -> np.ndarray:
        """The matrix [N, K] of one expert, float32: a view of the file where that has it so."""
        found = [_float32(part) for part in self._parts[expert]]
        return found[0] if len(found) == 1 else np.concatenate(found)


def _float32(part: _Part) -> np.ndarray:
    if callable(part):
        packed = part().unpacked()
        return packed.values() if packed.input_scales is None else packed.values() * packed.input_scales
    values, dtype = part
    return as_float32(values(), dtype)


def load_numpy_weights(
    checkpoint: Checkpoint, specs: Sequence[WeightSpec], progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Every buffer by name as a C-contiguous float32 array of the spec's shape; `progress` gets bytes of them done and
    in all. Those of a mixture's experts are `ExpertMatrices`, which take none of it.

    Packed weights are dequantized, each with what its inputs are scaled by: like all others they take 4 bytes for each
    element, and while they are made, those of a few threads 1 byte more for each of theirs and pieces of 16 MiB.
    Raises CheckpointError for tensors that are missing, have another shape, or values that are infinite or NaN.
    """
    of_experts = [spec for spec in specs if spec.experts]
    are_kept = bool(of_experts) and checkpoint.keep()
    check = FiniteCheck(checkpoint, specs)
    specs = [spec for spec in specs if not spec.experts]
    step = _ALIGNMENT // 4
    sizes = [-(-math.prod(spec.shape) // step) * step for spec in specs]
    arena = np.empty(sum(sizes) + step, np.float32)
    position = -(arena.ctypes.data // 4) % step
    weights: dict[str, Any] = {}
    for spec, size in zip(specs, sizes, strict=True):
        weights[spec.name] = arena[position : position + math.prod(spec.shape)].reshape(spec.shape)
        position += size
    shapes = (shape for spec in specs for _, shape in spec.parts)
    places = zip(part_places(specs), shapes, strict=True)
    parts = [
        (name, weights[spec.name].reshape(-1)[place].reshape(shape), spec.kernel)
        for (spec, name, place), shape in places
    ]

    def expert_part(name: str, shape: tuple[int, int]) -> _Part:
        if (read := checkpoint.reader(name, shape)) is not None:
            read()  # what is wrong is found now
            return read
        values = _part(checkpoint, name, shape)
        if check.is_due(name):
            found[name] = first_not_finite(values.reshape(-1))
        again = partial(_part, checkpoint, name, shape) if are_kept else lambda: values
        return again, checkpoint.info(name).dtype

    def convert_part(name: str, target: np.ndarray, kernel: int) -> tuple[str, int]:
        if (packed := checkpoint.packed(name, target.shape)) is not None:
            rows = max(1, _PIECE // target.shape[1])
            for start in range(0, len(target), rows):
                piece = target[start : start + rows]
                piece[...] = packed.rows(start, start + rows).values()
                if packed.input_scales is not None:
                    piece *= packed.input_scales
                piece[...] = _neighbours_first(piece, kernel)
            return name, -1
        values = _part(checkpoint, name, target.shape)
        found = first_not_finite(values.reshape(-1)) if check.is_due(name) else -1
        float32_into(_neighbours_first(values, kernel), checkpoint.info(name).dtype, target)
        return name, found

    found: dict[str, int] = {}
    with ThreadPoolExecutor(_THREADS) as pool:  # NumPy lets other threads run while it looks and converts
        advance = counted(sum(target.nbytes for _, target, _ in parts), progress)
        finished = pool.map(lambda part: convert_part(*part), parts)
        for (_, target, _), (name, index) in zip(parts, finished, strict=True):
            found[name] = index
            advance(target.nbytes)
        for spec in of_experts:
            weights[spec.name] = ExpertMatrices(spec, list(pool.map(expert_part, *zip(*spec.parts, strict=True))))
    check.conclude(found)
    return weights


def check_finite(checkpoint: Checkpoint, specs: Sequence[WeightSpec]) -> None:
    """Look at the tensors of specs that are due by `FiniteCheck`, on the host. Raises CheckpointError for one that has
    an infinity or NaN."""
    check = FiniteCheck(checkpoint, specs)
    due = [name for _, name, _ in part_places(specs) if check.is_due(name)]
    check.conclude(dict(computed_ahead(lambda name: first_not_finite(checkpoint.raw(name).reshape(-1)), due)))


def counted(total: int, progress: Callable[[int, int], None] | None) -> Callable[[int], None]:
    """What takes each further count, and tells `progress` how much is done, `total` at most, and of how much."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done = min(total, done + count)
        if progress is not None:
            progress(done, total)

    return advance


def computed_ahead(
    function: Callable[[_Item], _Found], items: Iterable[_Item], threads: int = _THREADS
) -> Iterator[tuple[_Item, _Found]]:
    """Each item with what a function gives for it, in their order. Threads compute a few that are to come, and no more,
    so that few results are in memory."""
    waiting: deque[tuple[_Item, Future[_Found]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) > threads:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def described_parts(checkpoint: Checkpoint, specs: Sequence[WeightSpec]) -> dict[str, tuple[int, int]]:
    """How many weights are stored how, in words, and their bytes in the files; none is read."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in (part for spec in specs for part in spec.parts):
        layout, format = checkpoint.layout(name, shape), checkpoint.weight_format(name, shape)
        words = "dense" if layout is None else f"{layout.name}: {format}"
        count, size = found.get(words, (0, 0))
        found[words] = count + 1, size + sum(info.nbytes for info in checkpoint.part_infos(name, shape))
    return found


def part_places(specs: Sequence[WeightSpec]) -> Iterator[tuple[WeightSpec, str, slice]]:
    """Every tensor that fills a buffer: the buffer's spec, the tensor's name, its place among the buffer's elements."""
    for spec in specs:
        start = 0
        for name, shape in spec.parts:
            end = start + math.prod(shape)
            yield spec, name, slice(start, end)
            start = end


def iterate_weight_parts(
    checkpoint: Checkpoint, specs: Sequence[WeightSpec], dtype: str
) -> Iterator[tuple[WeightSpec, int, np.ndarray]]:
    """Yield (spec, offset in bytes, values [n] in `dtype`, bfloat16 as uint16) until every buffer is filled.

    A spec of a dtype of its own has values of that. `offset` is where the values belong in the spec's buffer. A tensor
    that has the dtype already comes whole, as a read-only view of the memory map; others are converted piece by piece,
    packed ones, which are dense where they are needed, dequantized.
    Raises CheckpointError as `load_numpy_weights` does, and for finite values that the dtype cannot hold.
    """
    shapes = (shape for spec in specs for _, shape in spec.parts)
    for (spec, name, place), shape in zip(part_places(specs), shapes, strict=True):
        own = dtype if spec.dtype == "compute" else spec.dtype
        if (packed := checkpoint.packed(name, shape)) is not None:
            step, (info, *_) = max(1, _PIECE // shape[1]), checkpoint.part_infos(name, shape)
            for start in range(0, shape[0], step):
                values = _neighbours_first(packed.rows(start, start + step).values(), spec.kernel).reshape(-1)
                piece = converted(info, values, own, "float32")
                yield spec, (place.start + start * shape[1]) * STORAGE[own].itemsize, piece
            continue
        values = contiguous(_neighbours_first(_part(checkpoint, name, shape), spec.kernel)).reshape(-1)
        info = checkpoint.info(name)
        step = max(1, values.size) if info.dtype == own else _PIECE
        for start in range(0, values.size, step):
            piece = converted(info, values[start : start + step], own)
            yield spec, (place.start + start) * STORAGE[own].itemsize, piece


def _part(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = checkpoint.raw(name)
    if values.shape != tuple(shape):
        raise CheckpointError(
            f"{checkpoint.info(name).file}: tensor {name!r} has the shape {list(values.shape)}, expected "
            f"{list(shape)}. Take config.json and weights of one and the same model"
        )
    return values


def _neighbours_first(values: np.ndarray, kernel: int) -> np.ndarray:
    """The rows [N, K] of a convolution with the columns of each neighbour side by side; see `WeightSpec`."""
    if kernel == 1:
        return values
    return values.reshape(len(values), -1, kernel).swapaxes(1, 2).reshape(values.shape)


def load_draft_to_target(checkpoint: Checkpoint, config: DraftConfig) -> np.ndarray:
    """The base's token id of each draft id, int32 [draft_vocab_size]: `d2t` holds what must be added to the draft id.
    Raises CheckpointError where `d2t` is missing or not of a whole-number type."""
    own = np.arange(config.draft_vocab_size, dtype=np.int64)
    return (own + checkpoint.integers(MAPPING) if config.has_mapping else own).astype(np.int32)
