"""The kernels of few rows on the GPU, of norms and of attention, prepared once and launched every step.

Each method has the arguments of its NumPy twin in `numpy_twins`, which defines what it computes, and returns a `Launch`
that enqueues it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.arguments import (
    CUDA_TYPES,
    THREADS,
    KeptArgument,
    LinearArgument,
    NormedArgument,
    addresses,
    check_room,
    decode_kernel,
    kept_argument,
    linear_argument,
    normed_argument,
    rows_of,
)
from edgellm.kernels.decode.attention import attention_kernel, attention_launch
from edgellm.kernels.decode.contract import (
    MAX_ROWS,
    SLICES,
    STEP,
    AttentionScratch,
    AttentionStep,
    AttentionWeights,
    Kept,
    LinearWeights,
    NormedInput,
    activation_number,
    padded_columns,
    slice_steps,
)
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch

#: Bytes of shared memory that CUDA takes of each block.
_RESERVED = 1024
#: Shared memory of a norm's sums in norm.cu.
_NORM_SUMS_BYTES = 8 * (SLICES + 1) * 4


@dataclass(frozen=True)
class _Geometry:
    """How linear.cu's kernels of one width work.

    `rows` is the most rows of activations; a thread has `depth` copies of 16 bytes of weights in flight; `twice`: units
    of `linear_residual` are 16 weight rows, not 8.
    """

    name: str
    rows: int
    depth: int
    blocks_per_multiprocessor: int
    twice: bool

    @property
    def residual_tiles(self) -> int:
        """Of 8 weight rows in a unit of `linear_residual`."""
        return 2 if self.twice else 1

    def ring_bytes(self, tiles: int, ranks: int = 0) -> int:
        """Shared memory of the ring, partial sums, and what LoRA adapters of so many `padded_ranks` need, for units of
        `tiles` times 8 weight rows: for each place the sums that it adds and its rows of B, twice."""
        sums = tiles * self.rows * 8 * 4
        return self.depth * THREADS * 16 + 2 * SLICES * sums + 2 * (ranks // 16 * sums + ranks * tiles * 16)

    def norm_bytes(self, tiles: int, parts: int, batch: int, columns: int, ranks: int = 0) -> int:
        """The same with what is normalized: its activations, its norms' weights and the sums of `parts` norms."""
        slices = SLICES * slice_steps(columns)
        own = parts * self.rows * (SLICES + 1) * 4 + slices * STEP * 2 * (1 + batch)
        return self.ring_bytes(tiles, ranks) + own

    def staged_bytes(self, batch: int, columns: int, ranks: int = 0) -> int:
        """Of `linear_residual`, where its activations are staged."""
        return self.ring_bytes(self.residual_tiles, ranks) + SLICES * slice_steps(columns) * STEP * 2 * batch

    def streamed_bytes(self, batch: int, ranks: int = 0) -> int:
        """The same with a ring of activations."""
        ring = self.ring_bytes(self.residual_tiles, ranks)
        return ring + self.depth // self.residual_tiles * SLICES * batch * STEP * 2


_NARROW = _Geometry("Narrow", 8, 4, 2, False)
#: For `linear_residual`, whose rows are the longest: more of them is there before the input is.
_DEEP = _Geometry("Deep", 8, 8, 2, False)
_WIDE = _Geometry("Wide", 16, 8, 1, True)
#: More rows are served by the wide kernels, where the GPU has the shared memory.
_NARROW_ROWS = 2


class _NormLinear(ctypes.Structure):
    """`NormLinear` of linear.cu."""

    _fields_ = [
        ("inputs", NormedArgument * 2),
        ("linear", LinearArgument),
        ("kept", KeptArgument),
        ("output", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("next_early", "activation")),
    ]


class _LinearResidual(ctypes.Structure):
    """`LinearResidual` of linear.cu."""

    _fields_ = [
        ("linear", LinearArgument),
        ("kept", KeptArgument),
        *((name, ctypes.c_void_p) for name in ("input", "residual", "output", "selected")),
        *((name, ctypes.c_int) for name in ("residual_float", "tokens", "stage")),
    ]


class _Norm(ctypes.Structure):
    """`Norm` of norm.cu."""

    _fields_ = [
        ("input", NormedArgument),
        ("kept", KeptArgument),
        ("output", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("stride", "width", "begin", "steps", "next_early")),
    ]


#: Columns of three steps in each slice, for which linear.cu asserts what its kernels need.
_COLUMNS = 3 * SLICES * STEP
_LINEAR_MACROS = (
    ("HOST_NARROW_DEPTH", _NARROW.depth),
    ("HOST_DEEP_DEPTH", _DEEP.depth),
    ("HOST_WIDE_DEPTH", _WIDE.depth),
    ("HOST_NARROW_BYTES", _NARROW.norm_bytes(1, 1, 2, _COLUMNS)),
    ("HOST_NARROW_PAIRS_BYTES", _NARROW.norm_bytes(2, 1, 2, _COLUMNS)),
    ("HOST_WIDE_BYTES", _WIDE.norm_bytes(1, 2, 9, _COLUMNS)),
    ("HOST_WIDE_PAIRS_BYTES", _WIDE.norm_bytes(2, 1, 9, _COLUMNS)),
    ("HOST_STAGED_BYTES", _NARROW.staged_bytes(2, _COLUMNS)),
    ("HOST_STREAMED_BYTES", _WIDE.streamed_bytes(9)),
    ("HOST_NORM_LINEAR_BYTES", ctypes.sizeof(_NormLinear)),
    ("HOST_LINEAR_RESIDUAL_BYTES", ctypes.sizeof(_LinearResidual)),
)
_NORM_MACROS = (("HOST_NORM_BYTES", ctypes.sizeof(_Norm)), ("HOST_NORM_SUMS_BYTES", _NORM_SUMS_BYTES))


def linear_kernel(name: str, *types: str) -> Kernel:
    """A kernel of linear.cu, with the arguments of its template."""
    return decode_kernel("linear.cu", f"decode::{name}<{', '.join(types)}>", _LINEAR_MACROS)


def norm_kernel(name: str, kind: str) -> Kernel:
    """A kernel of norm.cu, for a dtype by its name on the device."""
    return decode_kernel("norm.cu", f"decode::{name}<{kind}>", _NORM_MACROS)


class CudaDecodeKernels:
    """The kernels for one GPU, stream and dtype; the GPU's primary context must be current."""

    def __init__(self, module: KernelModule, dtype: str, head_size: int) -> None:
        """Have compiled and loaded what steps of one token need; the rest is, when a launch is first prepared.

        Raises MissingDependencyError or KernelError.
        """
        if dtype not in CUDA_TYPES:
            raise KernelError(f"decode kernels compute in {' and '.join(CUDA_TYPES)}, not in {dtype}")
        self.module, self.dtype, self.head_size = module, dtype, head_size
        self._type = kind = CUDA_TYPES[dtype]
        staged = _staged_geometry(1, STEP, module.shared_limit) or _NARROW
        kernels = (("norm_linear", "Narrow"), ("norm_gate_up", "NarrowPairs"), ("linear_residual", staged.name))
        linear = [linear_kernel(name, kind, f"decode::{geometry}") for name, geometry in kernels]
        for kernel in (*linear, attention_kernel(dtype, head_size)):
            module.load(kernel.source)

    def norm_linear(
        self,
        inputs: Sequence[NormedInput],
        linear: LinearWeights,
        output: DeviceArray,
        scale: float = 1.0,
        kept: Kept | None = None,
        next_early: bool = True,
    ) -> Launch:
        """See `NumpyDecodeKernels.norm_linear`.

        `next_early` False: a kernel that overlaps this one starts only when the one before this one has finished. Of
        two inputs, which are as wide as each other and normed alike, the first is of the compute dtype.
        """
        rows, widths = linear.weight.shape[0], [each.columns for each in inputs]
        batch, ranks = self._batch(inputs, linear), linear.ranks
        check_room("output", output, batch, rows)
        arguments = _NormLinear(
            (NormedArgument * 2)(*(normed_argument(each, self.dtype) for each in inputs)),
            linear_argument(linear, batch, rows, scale),
            kept_argument(kept, widths[-1]),
            output.pointer,
            next_early,
        )
        if len(inputs) == 1:
            geometry = _norm_geometry(batch, widths, self.module.shared_limit, False, ranks)
            kernel = self._kernel("norm_linear", geometry.name, linear)
        else:
            second = "float" if inputs[1].values.dtype == "float32" else self._type
            kernel, geometry = linear_kernel("norms_linear", self._type, second), _WIDE
        shared = geometry.norm_bytes(1, len(inputs), batch, sum(widths), ranks)
        return self._launch(kernel, geometry, 1, linear, shared, arguments)

    def norm_gate_up(self, normed: NormedInput, linear: LinearWeights, activation: str, output: DeviceArray) -> Launch:
        """See `NumpyDecodeKernels.norm_gate_up`."""
        rows, batch = linear.weight.shape[0] // 2, self._batch([normed], linear)
        check_room("output", output, batch, rows)
        arguments = _NormLinear(
            (NormedArgument * 2)(normed_argument(normed, self.dtype)),
            linear_argument(linear, batch, rows, 1.0),
            KeptArgument(),
            output.pointer,
            True,
            activation_number(activation),
        )
        geometry = _norm_geometry(batch, [normed.columns], self.module.shared_limit, True, linear.ranks)
        kernel = self._kernel("norm_gate_up", f"{geometry.name}Pairs", linear)
        shared = geometry.norm_bytes(2, 1, batch, normed.columns, linear.ranks)
        return self._launch(kernel, geometry, 2, linear, shared, arguments)

    def linear_residual(
        self,
        x: DeviceArray,
        linear: LinearWeights,
        residual: DeviceArray | None,
        output: DeviceArray,
        scale: float = 1.0,
        kept: Kept | None = None,
        selected: DeviceArray | None = None,
    ) -> Launch:
        """See `NumpyDecodeKernels.linear_residual`."""
        rows, columns = linear.weight.shape
        batch = output.size // rows if selected is None else selected.size
        _check_rows(batch, columns, batch * columns, linear)
        check_room("x", x, batch, columns)
        check_room("output", output, batch, rows)
        limit, ranks = self.module.shared_limit, linear.ranks
        # Few rows are staged once, for all units; those of more come with the weights, which needs less memory.
        staged = _staged_geometry(batch, columns, limit, ranks)
        geometry = staged or _residual_geometry(batch, limit, ranks)
        arguments = _LinearResidual(
            linear_argument(linear, batch, rows, scale),
            kept_argument(kept, rows),
            *addresses(x, residual, output, selected),
            residual is not None and residual.dtype == "float32",
            1 if selected is None else x.size // columns // batch,
            staged is not None,
        )
        shared = geometry.staged_bytes(batch, columns, ranks) if staged else geometry.streamed_bytes(batch, ranks)
        # So few registers would let more blocks on a multiprocessor, and none on others.
        shared = max(shared, _share(limit, geometry.blocks_per_multiprocessor + 1) + 16)
        kernel = self._kernel("linear_residual", "WideTwice" if geometry.twice else geometry.name, linear)
        return self._launch(kernel, geometry, geometry.residual_tiles, linear, shared, arguments)

    def attention(
        self,
        qkv: DeviceArray,
        weights: AttentionWeights,
        step: AttentionStep,
        scratch: AttentionScratch,
        context: DeviceArray,
    ) -> Launch:
        """See `NumpyDecodeKernels.attention`."""
        return attention_launch(self.module, qkv, weights, step, scratch, context)

    def scale_rows(self, x: DeviceArray, factor: float, output: DeviceArray) -> Launch:
        """See `NumpyDecodeKernels.scale_rows`; at most 2^31 - 8 elements, a multiple of 8."""
        if x.dtype != self.dtype or x.size % 8 or not 0 < x.size <= (1 << 31) - 8:
            raise KernelError(
                f"rows to scale are {x.dtype} {list(x.shape)}; expected {self.dtype}, a multiple of 8 elements up to "
                "2^31 - 8"
            )
        check_room("output", output, rows_of(x), x.shape[-1])
        arguments = (
            ctypes.c_void_p(x.pointer),
            ctypes.c_float(factor),
            ctypes.c_void_p(output.pointer),
            ctypes.c_int(x.size),
        )
        kernel = norm_kernel("scale_rows", self._type)
        return Launch(self.module, kernel, (-(-x.size // (8 * THREADS)), 1, 1), THREADS, 0, arguments)

    def norm(
        self,
        normed: NormedInput,
        output: DeviceArray,
        column: int = 0,
        kept: Kept | None = None,
        next_early: bool = True,
    ) -> Launch:
        """See `NumpyDecodeKernels.norm`, of up to 65,535 rows; `next_early` as for `norm_linear`."""
        rows, width, stride = rows_of(normed.values), normed.columns, output.shape[-1]
        if column % 8 or stride % 8 or not 0 <= column <= stride - width or output.dtype != self.dtype:
            raise KernelError(
                f"columns {column} to {column + width} of {output.dtype} {list(output.shape)} take no normed input; "
                f"expected {self.dtype} with columns in eights"
            )
        check_room("output", output, rows, stride)
        arguments = _Norm(
            normed_argument(normed, self.dtype),
            kept_argument(kept, width),
            output.pointer,
            *(stride, width, column, slice_steps(stride), next_early),
        )
        kernel = norm_kernel("norm", self._type)
        return Launch(self.module, kernel, (1, rows, 1), THREADS, norm_shared_bytes(width), (arguments,))

    def _batch(self, inputs: Sequence[NormedInput], linear: LinearWeights) -> int:
        """Rows of inputs that norm_linear takes side by side. Raises KernelError for others."""
        batch, columns = rows_of(inputs[0].values), sum(each.columns for each in inputs)
        _check_rows(batch, columns, sum(each.values.size for each in inputs), linear)
        if len(inputs) == 2 and linear.adapters is not None:
            raise KernelError("norm_linear applies LoRA adapters to one input, not to two side by side")
        if any(each.weight is None for each in inputs):
            raise KernelError("norm_linear takes inputs with norms; others are the input of a tiled or residual layer")
        if len(inputs) == 2 and (
            inputs[0].values.dtype != self.dtype
            or len({(rows_of(each.values), each.columns, each.epsilon, each.offset) for each in inputs}) > 1
        ):
            found = " and ".join(f"{each.values.dtype} {list(each.values.shape)}" for each in inputs)
            raise KernelError(
                f"the two inputs of a linear layer are {found}; expected {self.dtype}, then as many rows and columns, "
                "with norms of one epsilon and offset"
            )
        return batch

    def _kernel(self, name: str, geometry: str, linear: LinearWeights) -> Kernel:
        adapted = () if linear.adapters is None else ("true",)
        return linear_kernel(name, self._type, f"decode::{geometry}", *adapted)

    def _launch(
        self,
        kernel: Kernel,
        geometry: _Geometry,
        tiles: int,
        linear: LinearWeights,
        shared_bytes: int,
        arguments: Any,
    ) -> Launch:
        """With units of `tiles` times 8 weight rows."""
        units, low_units = (-(-rows // (8 * tiles)) for rows in (linear.weight.shape[0], linear.low_rows))
        blocks = min(units + low_units, self.module.multiprocessors * geometry.blocks_per_multiprocessor)
        adapters = arguments.linear.adapters
        # At most one block of a multiprocessor has such units: others wait for it, which may come before it otherwise.
        adapters.low_units = low_units
        adapters.low_blocks = min(low_units, -(-blocks // geometry.blocks_per_multiprocessor))
        return Launch(self.module, kernel, (blocks, 1, 1), THREADS, shared_bytes, (arguments,))


def norm_linear_shared_bytes(
    rows: int, widths: Sequence[int], shared_limit: int, gated: bool = False, ranks: int = 0
) -> int:
    """Shared memory that a block of `norm_linear` or `norm_gate_up` needs on such a GPU: inputs of such widths, LoRA
    adapters of so many `padded_ranks`."""
    geometry = _norm_geometry(rows, widths, shared_limit, gated, ranks)
    return geometry.norm_bytes(1 + gated, len(widths), rows, sum(widths), ranks)


def linear_residual_shared_bytes(rows: int, shared_limit: int, ranks: int = 0) -> int:
    """The same of `linear_residual`, whose input comes with the weights, however wide it is."""
    return _residual_geometry(rows, shared_limit, ranks).streamed_bytes(rows, ranks)


def norm_shared_bytes(columns: int) -> int:
    """The same of `norm`."""
    return _NORM_SUMS_BYTES + 2 * padded_columns(columns)


def _norm_geometry(rows: int, widths: Sequence[int], shared_limit: int, gated: bool, ranks: int) -> _Geometry:
    def needed(geometry: _Geometry) -> int:
        return geometry.norm_bytes(1 + gated, len(widths), rows, sum(widths), ranks)

    return _WIDE if len(widths) > 1 else _geometry(rows, needed, shared_limit)


def _residual_geometry(rows: int, shared_limit: int, ranks: int) -> _Geometry:
    return _geometry(rows, lambda geometry: geometry.streamed_bytes(rows, ranks), shared_limit)


def _geometry(rows: int, needed: Callable[[_Geometry], int], shared_limit: int) -> _Geometry:
    """The kernels that serve so many rows: the wide ones for more than a few, if a block gets the memory they need."""
    if rows <= _NARROW_ROWS or (rows <= _NARROW.rows and needed(_WIDE) > shared_limit):
        return _NARROW
    return _WIDE


def _staged_geometry(batch: int, columns: int, shared_limit: int, ranks: int = 0) -> _Geometry | None:
    """Of `linear_residual`, where it stages so many rows: the deep ring if that leaves room for as many blocks."""
    limits = (_DEEP, _share(shared_limit, _DEEP.blocks_per_multiprocessor)), (_NARROW, shared_limit)
    if batch > _NARROW_ROWS:
        return None
    return next((each for each, limit in limits if each.staged_bytes(batch, columns, ranks) <= limit), None)


def _share(shared_limit: int, blocks: int) -> int:
    """Shared memory of a block where so many are on a multiprocessor, which has what a block may have alone."""
    return (shared_limit + _RESERVED) // blocks - _RESERVED


def _check_rows(batch: int, columns: int, elements: int, linear: LinearWeights) -> None:
    if not 1 <= batch <= MAX_ROWS or columns % 8 or columns != linear.weight.shape[1]:
        raise KernelError(
            f"decode kernels take 1 to {MAX_ROWS} rows of a width that is a multiple of 8, "
            f"found {elements} elements times {linear.weight.shape}"
        )
