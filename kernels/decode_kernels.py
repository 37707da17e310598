"""The kernels of decode and verify steps on the GPU, prepared once and launched every step.

Each method has the arguments of its NumPy twin in `numpy_decode_kernels`, which defines what it computes, and returns
a `Launch` that enqueues it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.cuda_kernels import OTHER_KERNELS
from edgellm.kernels.decode_attention import attention_launch, attention_shared_bytes
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch, pointer

#: The most rows of a step (its tokens, of all sequences together): the tensor-core instruction multiplies sixteen.
MAX_ROWS = 16

_WARPS, _STEP = 16, 32


@dataclass(frozen=True)
class _Geometry:
    """How decode_linear.cu's kernels of one width work.

    `rows` is the most rows of activations; a thread has `depth` copies of 16 bytes of weights in flight; `twice`: units
    of `linear_residual` are 16 weight rows, not 8.
    """

    suffix: str
    rows: int
    depth: int
    blocks_per_multiprocessor: int
    twice: bool

    def ring_bytes(self, tiles: int) -> int:
        """Shared memory of the ring and of the partial sums, for units of `tiles` times 8 weight rows."""
        return self.depth * 32 * _WARPS * 16 + 2 * _WARPS * tiles * self.rows * 8 * 4

    def norm_bytes(self, tiles: int, parts: int, batch: int, columns: int) -> int:
        """The same with what is normalized: its activations, its norms' weights and the sums of `parts` norms."""
        slices = _WARPS * slice_steps(columns)
        return self.ring_bytes(tiles) + parts * self.rows * (_WARPS + 1) * 4 + slices * _STEP * 2 * (1 + batch)

    def staged_bytes(self, batch: int, columns: int) -> int:
        """Ring, partial sums and the activations of `linear_residual`, where they are staged."""
        return self.ring_bytes(2 if self.twice else 1) + _WARPS * slice_steps(columns) * _STEP * 2 * batch

    def streamed_bytes(self, batch: int) -> int:
        """The same with a ring of activations."""
        tiles = 2 if self.twice else 1
        return self.ring_bytes(tiles) + self.depth // tiles * _WARPS * batch * _STEP * 2


_NARROW = _Geometry("", 8, 4, 2, False)
_WIDE = _Geometry("_wide", 16, 8, 1, True)
#: More rows are served by the wide kernels, where the GPU has the shared memory.
_NARROW_ROWS = 2


class CudaDecodeKernels(KernelModule):
    """The kernels for one GPU and stream; the GPU's primary context must be current."""

    def norm_linear(
        self,
        hidden: DeviceArray,
        norm_weight: DeviceArray,
        epsilon: float,
        weight: DeviceArray,
        bias: DeviceArray | None,
        output: DeviceArray,
        features: DeviceArray | None = None,
        place: int = 0,
        keeps_raw: bool = False,
        next_early: bool = True,
    ) -> Launch:
        """See `numpy_decode_kernels.norm_linear`.

        `next_early` False: a kernel that overlaps this one starts only when the one before this one has finished.
        """
        extra = (
            ctypes.c_int(next_early),
            *feature_arguments(features, place, weight.shape[1]),
            ctypes.c_int(keeps_raw),
        )
        return self._norm("decode_norm_linear", 1, hidden, norm_weight, epsilon, weight, bias, output, extra)

    def norm_gate_up(
        self,
        hidden: DeviceArray,
        norm_weight: DeviceArray,
        epsilon: float,
        weight: DeviceArray,
        bias: DeviceArray | None,
        output: DeviceArray,
    ) -> Launch:
        """See `numpy_decode_kernels.norm_gate_up`."""
        return self._norm("decode_norm_gate_up", 2, hidden, norm_weight, epsilon, weight, bias, output, ())

    def _norm(
        self,
        name: str,
        tiles: int,
        hidden: DeviceArray,
        norm_weight: DeviceArray,
        epsilon: float,
        weight: DeviceArray,
        bias: DeviceArray | None,
        output: DeviceArray,
        extra: tuple[Any, ...],
    ) -> Launch:
        batch, columns = _sizes(hidden.size, weight)
        rows = weight.shape[0] // tiles
        check_room("output", output, batch, rows)
        geometry = _geometry(batch, lambda each: each.norm_bytes(tiles, 1, batch, columns), self.shared_limit)
        arguments = (
            pointer(weight),
            pointer(bias),
            pointer(hidden),
            ctypes.c_int(hidden.dtype == "float32"),
            pointer(norm_weight),
            ctypes.c_float(epsilon),
            pointer(output),
            *map(ctypes.c_int, (batch, rows, columns, slice_steps(columns))),
            *extra,
        )
        shared = geometry.norm_bytes(tiles, 1, batch, columns)
        return self._linear(f"{name}{geometry.suffix}_{weight.dtype}", geometry, rows, 8, shared, arguments)

    def norms_linear(
        self,
        first: DeviceArray,
        first_norm: DeviceArray,
        second: DeviceArray,
        second_norm: DeviceArray,
        epsilon: float,
        weight: DeviceArray,
        bias: DeviceArray | None,
        output: DeviceArray,
        normed: DeviceArray | None = None,
    ) -> Launch:
        """See `numpy_decode_kernels.norms_linear`; a kernel that overlaps it starts when its predecessor is done."""
        batch, columns = _sizes(2 * first.size, weight)
        if first.dtype != weight.dtype or second.size != first.size:
            raise KernelError(
                f"the two inputs of a linear layer are {first.dtype} {first.shape} and {second.dtype} {second.shape}; "
                f"expected {weight.dtype}, then as many elements"
            )
        check_room("output", output, batch, weight.shape[0])
        arguments = (
            pointer(weight),
            pointer(bias),
            pointer(first),
            pointer(first_norm),
            pointer(second),
            pointer(second_norm),
            ctypes.c_float(epsilon),
            pointer(output),
            *map(ctypes.c_int, (batch, weight.shape[0], columns, slice_steps(columns))),
            pointer(normed),
        )
        inputs = f"float_{weight.dtype}" if second.dtype == "float32" else weight.dtype
        name, shared = f"decode_norms_linear_wide_{inputs}", _WIDE.norm_bytes(1, 2, batch, columns)
        return self._linear(name, _WIDE, weight.shape[0], 8, shared, arguments)

    def linear_residual(
        self,
        x: DeviceArray,
        weight: DeviceArray,
        bias: DeviceArray | None,
        residual: DeviceArray | None,
        output: DeviceArray,
        features: DeviceArray | None = None,
        place: int = 0,
        selected: DeviceArray | None = None,
    ) -> Launch:
        """See `numpy_decode_kernels.linear_residual`."""
        rows, columns = weight.shape
        batch = output.size // rows if selected is None else selected.size
        _sizes(batch * columns, weight)
        check_room("x", x, batch, columns)
        check_room("output", output, batch, rows)
        tokens = 1 if selected is None else x.size // columns // batch
        geometry = _geometry(batch, lambda each: each.streamed_bytes(batch), self.shared_limit)
        # Few rows are staged once, for all units; those of more come with the weights, which needs less memory.
        stage = batch <= _NARROW_ROWS and geometry.staged_bytes(batch, columns) <= self.shared_limit
        shared = geometry.staged_bytes(batch, columns) if stage else geometry.streamed_bytes(batch)
        arguments = (
            pointer(weight),
            pointer(bias),
            pointer(x),
            pointer(residual),
            ctypes.c_int(residual is not None and residual.dtype == "float32"),
            pointer(output),
            *map(ctypes.c_int, (batch, rows, columns, slice_steps(columns), stage)),
            pointer(selected),
            ctypes.c_int(tokens),
            *feature_arguments(features, place, rows),
        )
        name, unit = f"decode_linear_residual{geometry.suffix}_{weight.dtype}", 16 if geometry.twice else 8
        return self._linear(name, geometry, rows, unit, shared, arguments)

    def _linear(
        self, name: str, geometry: _Geometry, rows: int, unit: int, shared_bytes: int, arguments: Sequence[Any]
    ) -> Launch:
        blocks = min(-(-rows // unit), self.multiprocessors * geometry.blocks_per_multiprocessor)
        return Launch(self, Kernel(OTHER_KERNELS, name), (blocks, 1, 1), 32 * _WARPS, shared_bytes, arguments)

    attention = attention_launch


def shared_bytes(batch: int, tokens: int, hidden_size: int, head_size: int, shared_limit: int) -> int:
    """The most shared memory that a block of any kernel of a decode or verify step needs, where a GPU has a limit.

    Widths other than the hidden size do not count: what `linear_residual` takes streams through a ring.
    """
    rows = batch * tokens
    return max(
        *(_norm_bytes(tiles, rows, hidden_size, shared_limit) for tiles in (1, 2)),
        streamed_shared_bytes(rows, shared_limit),
        attention_shared_bytes(tokens, head_size),
    )


def draft_shared_bytes(batch: int, tokens: int, hidden_size: int, head_size: int, shared_limit: int) -> int:
    """The same of a draft step, whose first linear layer takes two inputs of the hidden size side by side."""
    own = _WIDE.norm_bytes(1, 2, batch * tokens, 2 * hidden_size)
    return max(own, shared_bytes(batch, tokens, hidden_size, head_size, shared_limit))


def _norm_bytes(tiles: int, batch: int, columns: int, shared_limit: int) -> int:
    def needed(geometry: _Geometry) -> int:
        return geometry.norm_bytes(tiles, 1, batch, columns)

    return needed(_geometry(batch, needed, shared_limit))


def streamed_shared_bytes(batch: int, shared_limit: int) -> int:
    """The same of `linear_residual` alone, whose input of `batch` rows comes with the weights."""

    def needed(geometry: _Geometry) -> int:
        return geometry.streamed_bytes(batch)

    return needed(_geometry(batch, needed, shared_limit))


def _geometry(batch: int, needed: Callable[[_Geometry], int], shared_limit: int) -> _Geometry:
    """The kernels that serve `batch` rows: the wide ones for more than a few, if a block gets the memory they need."""
    if batch <= _NARROW_ROWS or (batch <= _NARROW.rows and needed(_WIDE) > shared_limit):
        return _NARROW
    return _WIDE


def _sizes(elements: int, weight: DeviceArray) -> tuple[int, int]:
    """Rows and columns of activations that have so many elements."""
    columns = weight.shape[1]
    batch = elements // columns
    if not 1 <= batch <= MAX_ROWS or columns % 8 or batch * columns != elements:
        raise KernelError(
            f"decode kernels take 1 to {MAX_ROWS} rows of a width that is a multiple of 8, "
            f"found {elements} elements times {weight.shape}"
        )
    return batch, columns


def check_room(name: str, array: DeviceArray, batch: int, width: int) -> None:
    """KernelError if an array does not hold `batch` rows of `width` elements."""
    if array.size < batch * width:
        raise KernelError(f"{name} has shape {list(array.shape)}; expected at least {batch} rows of {width} elements")


def slice_steps(columns: int) -> int:
    """Steps of 32 columns in each of the slices whose sums are added."""
    return -(-columns // (_WARPS * _STEP))


def padded_columns(columns: int) -> int:
    """Columns of all slices."""
    return _WARPS * _STEP * slice_steps(columns)


def feature_arguments(features: DeviceArray | None, place: int, width: int) -> tuple[Any, Any]:
    """Where a kernel writes its columns of `features` [rows, n width], and the distance of two rows in elements."""
    if features is None:
        return ctypes.c_void_p(0), ctypes.c_int(0)
    stride = features.shape[-1]
    if stride % width or not 0 <= place < stride // width:
        raise KernelError(f"features of {features.shape} have no place {place} of width {width}")
    return ctypes.c_void_p(features.pointer + place * width * ITEM_SIZES[features.dtype]), ctypes.c_int(stride)
