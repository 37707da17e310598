"""The kernels of few rows on the GPU, of norms and of attention, prepared once and launched every step.

Each method has the arguments of its NumPy twin in `numpy_twins`, which defines what it computes, and returns a `Launch`
that enqueues it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from edgellm.kernels.arrays import DeviceArray, members
from edgellm.kernels.decode import contract, geometries
from edgellm.kernels.decode.arguments import (
    THREADS,
    KeptArgument,
    LinearArgument,
    NormedArgument,
    addresses,
    check_room,
    check_rounded,
    cuda_type,
    decode_kernel,
    kept_argument,
    linear_argument,
    normed_argument,
    own_rows,
    rows_of,
)
from edgellm.kernels.decode.attention import attention_kernel, attention_launch
from edgellm.kernels.decode.columns import CudaColumns
from edgellm.kernels.decode.contract import SQUARE_SUMS, LinearWeights, NormedInput
from edgellm.kernels.decode.geometries import Geometry
from edgellm.kernels.decode.packed_rows import MAX_PACKED_ROWS, packed_rows, packed_rows_kernel
from edgellm.kernels.decode.tiled_linear import capacity_of
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch


class NormLinearArgument(ctypes.Structure):
    """`NormLinear` of linear.cu."""

    _fields_ = [
        ("inputs", NormedArgument * 2),
        ("linear", LinearArgument),
        ("kept", KeptArgument),
        *members("void* output", "int next_early activation"),
    ]


class _LinearResidual(ctypes.Structure):
    """`LinearResidual` of linear.cu."""

    _fields_ = [
        ("linear", LinearArgument),
        ("kept", KeptArgument),
        *members("void* input residual output selected", "int residual_float tokens stage"),
    ]


class _Norm(ctypes.Structure):
    """`Norm` of norm.cu."""

    _fields_ = [
        ("input", NormedArgument),
        ("kept", KeptArgument),
        *members("void* output order scales", "int stride width begin steps next_early"),
    ]


class _NormResidual(ctypes.Structure):
    """`NormResidual` of norm.cu."""

    _fields_ = [
        ("input", NormedArgument),
        *members("void* residual selected output", "int width tokens adds_float", "void* factor"),
    ]


class _NormParts(ctypes.Structure):
    """`NormParts` of norm.cu."""

    _fields_ = [
        ("parts", NormedArgument * contract.MAX_PARTS),
        ("widths", ctypes.c_int * contract.MAX_PARTS),
        ("next_early", ctypes.c_int),
        ("wholes", ctypes.c_int * contract.MAX_PARTS),
        *members("void* squares"),
    ]


#: Columns of three steps in each slice, for which linear.cu asserts what its kernels need.
_COLUMNS = 3 * contract.SLICES * contract.STEP
#: What the kernels of few rows assert or take.
LINEAR_MACROS = (
    ("HOST_NARROW_DEPTH", geometries.NARROW.depth),
    ("HOST_DEEP_DEPTH", geometries.DEEP.depth),
    ("HOST_WIDE_DEPTH", geometries.WIDE.depth),
    ("HOST_NARROW_BYTES", geometries.NARROW.norm_bytes(1, 1, 2, _COLUMNS)),
    ("HOST_NARROW_PAIRS_BYTES", geometries.NARROW.norm_bytes(2, 1, 2, _COLUMNS)),
    ("HOST_WIDE_BYTES", geometries.WIDE.norm_bytes(1, 2, 9, _COLUMNS)),
    ("HOST_WIDE_PAIRS_BYTES", geometries.WIDE.norm_bytes(2, 1, 9, _COLUMNS)),
    ("HOST_STAGED_BYTES", geometries.NARROW.staged_bytes(2, _COLUMNS)),
    ("HOST_STREAMED_BYTES", geometries.WIDE.streamed_bytes(9)),
    ("HOST_NORM_LINEAR_BYTES", ctypes.sizeof(NormLinearArgument)),
    ("HOST_LINEAR_RESIDUAL_BYTES", ctypes.sizeof(_LinearResidual)),
)
_NORM_MACROS = (
    ("HOST_NORM_BYTES", ctypes.sizeof(_Norm)),
    ("HOST_NORM_RESIDUAL_BYTES", ctypes.sizeof(_NormResidual)),
    ("HOST_NORM_SUMS_BYTES", geometries.NORM_SUMS_BYTES),
    ("HOST_NORM_PARTS_BYTES", ctypes.sizeof(_NormParts)),
    ("HOST_NORM_MOST_PARTS", contract.MAX_PARTS),
    ("HOST_SQUARE_SUMS", SQUARE_SUMS),
)


#: Of norm_parts: what only adds squares.
_SQUARES = "decode::SQUARES"


def linear_kernel(name: str, *types: str) -> Kernel:
    """A kernel of linear.cu, with the arguments of its template."""
    return decode_kernel("linear.cu", f"decode::{name}<{', '.join(types)}>", LINEAR_MACROS)


def norm_kernel(name: str, kind: str) -> Kernel:
    """A kernel of norm.cu, for a dtype by its name on the device."""
    return decode_kernel("norm.cu", f"decode::{name}<{kind}>", _NORM_MACROS)


class CudaDecodeKernels(CudaColumns):
    """See `NumpyDecodeKernels`: for one GPU, stream and dtype; the GPU's primary context must be current."""

    def __init__(self, module: KernelModule, dtype: str, head_size: int) -> None:
        """Have compiled and loaded what steps of one token need; the rest is, when a launch is first prepared.

        Raises MissingDependencyError or KernelError.
        """
        self.module, self.dtype, self.head_size = module, dtype, head_size
        self._type = kind = cuda_type(dtype)
        staged = geometries.staged_geometry(1, contract.STEP, module.shared_limit) or geometries.NARROW
        kernels = (("norm_linear", "Narrow"), ("norm_gate_up", "NarrowPairs"), ("linear_residual", staged.name))
        linear = [linear_kernel(name, kind, f"decode::{geometry}") for name, geometry in kernels]
        for kernel in (*linear, attention_kernel(dtype, head_size)):
            module.load(kernel.source)

    def takes(self, linear: LinearWeights, rows: int, normed: bool) -> bool:
        """Whether these kernels compute a layer for so many rows, with norms inside where `normed`: packed ones for
        few, without adapters."""
        if not linear.is_packed or linear.adapters is not None:
            return not linear.is_packed
        return packed_rows(rows, linear.weight.layout, capacity_of(self.module), normed) is not None

    def norm_linear(self, inputs, linear, output, scale=1.0, kept=None, next_early=True):
        """See `NumpyDecodeKernels.norm_linear`.

        `next_early` False: a kernel that overlaps this one starts only when the one before this one has finished. Of
        two inputs, which are as wide as each other and normed alike, the first is of the compute dtype.
        """
        rows, widths = linear.weight.shape[0], [each.columns for each in inputs]
        batch, ranks = self._batch(inputs, linear), linear.ranks
        check_room("output", output, batch, linear.width)
        arguments = NormLinearArgument(
            (NormedArgument * 2)(*(normed_argument(each, self.dtype) for each in inputs)),
            linear_argument(linear, batch, rows, scale),
            kept_argument(kept, widths[-1]),
            own_rows(output, linear),
            next_early,
        )
        if linear.is_packed and len(inputs) == 1:
            return self._packed("rounded_linear" if inputs[0].weight is None else "norm_linear", linear, arguments)
        if len(inputs) == 1:
            geometry = geometries.norm_geometry(batch, widths, self.module.shared_limit, False, ranks)
            kernel = self._kernel("norm_linear", geometry.name, linear, inputs[0].weight is not None)
        else:
            second = "float" if inputs[1].values.dtype == "float32" else self._type
            kernel, geometry = linear_kernel("norms_linear", self._type, second), geometries.WIDE
        shared = geometry.norm_bytes(1, len(inputs), batch, sum(widths), ranks)
        return self._launch(kernel, geometry, 1, linear, shared, arguments)

    def norm_gate_up(self, normed: NormedInput, linear: LinearWeights, activation: str, output: DeviceArray) -> Launch:
        is_normed = normed.weight is not None
        rows, batch = linear.weight.shape[0] // 2, self._batch([normed], linear)
        check_room("output", output, batch, rows)
        arguments = NormLinearArgument(
            (NormedArgument * 2)(normed_argument(normed, self.dtype)),
            linear_argument(linear, batch, rows, 1.0),
            KeptArgument(),
            output.pointer,
            True,
            contract.activation_number(activation),
        )
        if linear.is_packed:
            name = "norm_" if is_normed else "rounded_" if normed.values.dtype == "float32" else ""
            return self._packed(f"{name}gate_up", linear, arguments)
        geometry = geometries.norm_geometry(batch, [normed.columns], self.module.shared_limit, True, linear.ranks)
        kernel = self._kernel("norm_gate_up", f"{geometry.name}Pairs", linear, is_normed)
        shared = geometry.norm_bytes(2, 1, batch, normed.columns, linear.ranks)
        return self._launch(kernel, geometry, 2, linear, shared, arguments)

    def linear_residual(self, x, linear, residual, output, scale=1.0, kept=None, selected=None):
        rows, columns = linear.weight.shape
        batch = output.size // linear.width if selected is None else selected.size
        _check_rows(batch, columns, batch * columns, linear)
        check_room("x", x, batch, columns)
        check_room("output", output, batch, linear.width)
        limit, ranks = self.module.shared_limit, linear.ranks
        # Few rows are staged once, for all units; those of more come with the weights, which needs less memory.
        staged = geometries.staged_geometry(batch, columns, limit, ranks)
        geometry = staged or geometries.residual_geometry(batch, limit, ranks)
        arguments = _LinearResidual(
            linear_argument(linear, batch, rows, scale),
            kept_argument(kept, rows),
            *(*addresses(x, residual), own_rows(output, linear, residual, kept), *addresses(selected)),
            residual is not None and residual.dtype == "float32",
            1 if selected is None else x.size // columns // batch,
            staged is not None,
        )
        if linear.is_packed:
            return self._packed("linear_residual", linear, arguments)
        shared = geometry.staged_bytes(batch, columns, ranks) if staged else geometry.streamed_bytes(batch, ranks)
        # So few registers would let more blocks on a multiprocessor, and none on others.
        shared = max(shared, geometries.block_share(limit, geometry.blocks_per_multiprocessor + 1) + 16)
        kernel = self._kernel("linear_residual", "WideTwice" if geometry.twice else geometry.name, linear)
        return self._launch(kernel, geometry, geometry.residual_tiles, linear, shared, arguments)

    def attention(self, qkv, weights, step, scratch, context):
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

    def cap_rows(self, x: DeviceArray, cap: float) -> Launch:
        """See `NumpyDecodeKernels.cap_rows`; at most 2^31 - 2^10 elements."""
        if x.dtype != "float32" or not 0 < x.size <= (1 << 31) - (1 << 10):
            raise KernelError(
                f"rows to cap are {x.dtype} {list(x.shape)}; expected float32, up to 2^31 - 2^10 elements"
            )
        arguments = ctypes.c_void_p(x.pointer), ctypes.c_float(cap), ctypes.c_float(1 / cap), ctypes.c_int(x.size)
        kernel = norm_kernel("cap_rows", self._type)
        return Launch(self.module, kernel, (-(-x.size // THREADS), 1, 1), THREADS, 0, arguments)

    def gate_rows(self, gates_and_ups: DeviceArray, activation: str, output: DeviceArray) -> Launch:
        """See `NumpyDecodeKernels.gate_rows`, of up to 65,535 rows."""
        rows, width = rows_of(output), output.shape[-1]
        if (gates_and_ups.dtype, output.dtype, width % 8, gates_and_ups.size) != (
            "float32",
            self.dtype,
            0,
            2 * output.size,
        ):
            raise KernelError(
                f"gates and ups {gates_and_ups.dtype} {list(gates_and_ups.shape)} give no {output.dtype} "
                f"{list(output.shape)}; expected float32, {self.dtype} of half as many columns, in eights"
            )
        numbers = ctypes.c_int(width), ctypes.c_int(contract.activation_number(activation))
        arguments = *(ctypes.c_void_p(each.pointer) for each in (gates_and_ups, output)), *numbers
        grid = -(-width // (8 * THREADS)), rows, 1
        return Launch(self.module, norm_kernel("gate_rows", self._type), grid, THREADS, 0, arguments)

    def norm_residual(self, normed, residual, output, selected=None, factor=None):
        """See `NumpyDecodeKernels.norm_residual`, of up to 65,535 rows; the output may be the residual where no rows
        are selected."""
        rows, width = rows_of(normed.values), normed.columns
        if width != normed.values.shape[-1] or residual.shape[-1] != width:
            raise KernelError(
                f"a residual {list(residual.shape)} gets no normed {list(normed.values.shape)}; expected as many "
                "columns"
            )
        if residual.dtype not in ("float32", self.dtype) or output.dtype != "float32":
            raise KernelError(f"a residual of {residual.dtype} gives {output.dtype}; expected float32")
        if rows_of(residual) % rows or (selected is None and rows_of(residual) != rows):
            raise KernelError(f"a residual of {rows_of(residual)} rows for {rows} rows")
        check_room("output", output, rows, width)
        arguments = _NormResidual(
            normed_argument(normed, self.dtype),
            *addresses(residual, selected, output),
            *(width, rows_of(residual) // rows, residual.dtype == "float32"),
            *addresses(factor),
        )
        kernel = norm_kernel("norm_residual", self._type + ("" if factor is None else ", true"))
        return Launch(self.module, kernel, (1, rows, 1), THREADS, 0, (arguments,))

    def norm(self, normed, output, column=0, kept=None, next_early=True, arranged=None):
        """See `NumpyDecodeKernels.norm`, of up to 65,535 rows; `next_early` as for `norm_linear`."""
        rows, width, stride = rows_of(normed.values), normed.columns, output.shape[-1]
        order, scales = arranged or (None, None)
        if arranged and (column or {each.shape for each in arranged if each is not None} != {(width,)}):
            raise KernelError(f"inputs {column} to {column + width} are not the whole rows that are to be arranged")
        if column % 8 or stride % 8 or not 0 <= column <= stride - width or output.dtype != self.dtype:
            raise KernelError(
                f"columns {column} to {column + width} of {output.dtype} {list(output.shape)} take no normed input; "
                f"expected {self.dtype} with columns in eights"
            )
        check_room("output", output, rows, stride)
        arguments = _Norm(
            normed_argument(normed, self.dtype),
            kept_argument(kept, width),
            *addresses(output, order, scales),
            *(stride, width, column, contract.slice_steps(stride), next_early),
        )
        kernel = norm_kernel("norm", self._type + (", true" if arranged else ""))
        shared = geometries.norm_shared_bytes(width) if arranged is None else geometries.norm_shared_bytes(stride, True)
        return Launch(self.module, kernel, (1, rows, 1), THREADS, shared, (arguments,))

    def norm_parts(self, parts, next_early=True, squares=None, wholes=()):
        """See `NumpyDecodeKernels.norm_parts`, of up to 65,535 rows and `MAX_PARTS` parts; `next_early` as for
        `norm_linear`."""
        return self._parts(parts, next_early, "" if squares is None else "decode::RANKS", squares, wholes)

    def square_sums(self, parts, counted, squares, next_early=True):
        """See `NumpyDecodeKernels.square_sums`; as for `norm_parts`."""
        return self._parts(parts, next_early, _SQUARES, squares, counted)

    def _parts(self, parts: Sequence[NormedInput], next_early: bool, kind: str, squares: Any, wholes: Any) -> Launch:
        """A launch of norm_parts of a kind."""
        values = parts[0].values
        if not 1 <= len(parts) <= contract.MAX_PARTS or any(
            (each.weight is None and kind != _SQUARES)
            or (each.values.pointer, each.values.shape) != (values.pointer, values.shape)
            for each in parts
        ):
            raise KernelError(
                f"{len(parts)} parts of rows; expected 1 to {contract.MAX_PARTS} of one array, each with a weight"
            )
        if values.dtype != "float32":
            raise KernelError(f"parts of rows of {values.dtype} are normed where they are; expected float32")
        arguments = _NormParts(
            (NormedArgument * contract.MAX_PARTS)(*(normed_argument(each, self.dtype) for each in parts)),
            (ctypes.c_int * contract.MAX_PARTS)(*(each.columns for each in parts)),
            next_early,
            (ctypes.c_int * contract.MAX_PARTS)(*wholes),
            *addresses(squares),
        )
        if squares is not None:
            check_room("squares", squares, rows_of(values), SQUARE_SUMS)
        kernel, grid = norm_kernel("norm_parts", self._type + (kind and f", {kind}")), (len(parts), rows_of(values), 1)
        return Launch(self.module, kernel, grid, THREADS, 0, (arguments,))

    def _batch(self, inputs: Sequence[NormedInput], linear: LinearWeights) -> int:
        """Rows of inputs that norm_linear takes side by side, or of one. Raises KernelError for others."""
        batch, columns = rows_of(inputs[0].values), sum(each.columns for each in inputs)
        _check_rows(batch, columns, sum(each.values.size for each in inputs), linear)
        if len(inputs) == 2 and linear.adapters is not None:
            raise KernelError("norm_linear applies LoRA adapters to one input, not to two side by side")
        if len(inputs) == 2 and any(each.weight is None for each in inputs):
            raise KernelError(
                "norm_linear takes two inputs with norms; others are the input of a tiled or residual layer"
            )
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

    def _packed(self, name: str, linear: LinearWeights, arguments: Any) -> Launch:
        """The launch of the same arguments by packed_rows.cu."""
        layout, batch, normed = linear.weight.layout, arguments.linear.batch, name.startswith("norm")
        way = packed_rows(batch, layout, capacity_of(self.module), normed)
        if way is None or linear.adapters is not None or (name.endswith("gate_up") and layout.rows % 16):
            raise KernelError(
                f"packed layers of few rows take up to {MAX_PACKED_ROWS} that fit into shared memory, no LoRA adapters "
                f"and gates in eights, found {batch} rows times {linear.weight.shape}"
            )
        check_rounded(layout, self.dtype)
        kernel = packed_rows_kernel(name, self.dtype, way, layout, LINEAR_MACROS)
        shared = way.shared_bytes(layout.block_bytes, layout.columns, batch, normed)
        return Launch(
            self.module, kernel, way.grid(layout.rows, capacity_of(self.module)), THREADS, shared, (arguments,)
        )

    def _kernel(self, name: str, geometry: str, linear: LinearWeights, normed: bool = True) -> Kernel:
        adapted = "false" if linear.adapters is None else "true"
        switches = (adapted, "false") if not normed else (adapted,) if linear.adapters is not None else ()
        return linear_kernel(name, self._type, f"decode::{geometry}", *switches)

    def _launch(
        self, kernel: Kernel, geometry: Geometry, tiles: int, linear: LinearWeights, shared_bytes: int, arguments: Any
    ) -> Launch:
        """The launch with units of `tiles` times 8 weight rows."""
        units, low_units = (-(-rows // (8 * tiles)) for rows in (linear.weight.shape[0], linear.low_rows))
        blocks = min(units + low_units, self.module.multiprocessors * geometry.blocks_per_multiprocessor)
        adapters = arguments.linear.adapters
        # At most one block of a multiprocessor has such units: others wait for it, which may come before it otherwise.
        adapters.low_units = low_units
        adapters.low_blocks = min(low_units, -(-blocks // geometry.blocks_per_multiprocessor))
        return Launch(self.module, kernel, (blocks, 1, 1), THREADS, shared_bytes, (arguments,))


def _check_rows(batch: int, columns: int, elements: int, linear: LinearWeights) -> None:
    if not 1 <= batch <= contract.MAX_ROWS or columns % 8 or columns != linear.weight.shape[1]:
        raise KernelError(
            f"decode kernels take 1 to {contract.MAX_ROWS} rows of a width that is a multiple of 8, "
            f"found {elements} elements times {linear.weight.shape}"
        )
