"""The kernels of norm.cu on the GPU: norms of rows and of their parts, rows that are scaled, capped, gated or added.
Methods have the arguments of their twins, `NumpyDecodeKernels`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from edgellm.kernels.arrays import DeviceArray, members
from edgellm.kernels.decode import contract, geometries
from edgellm.kernels.decode.arguments import (
    THREADS,
    KeptArgument,
    NormedArgument,
    addresses,
    check_room,
    decode_kernel,
    kept_argument,
    normed_argument,
    rows_of,
)
from edgellm.kernels.decode.contract import NormedInput
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Argument, Kernel, KernelModule, Launch


class _Norm(Argument):
    """`Norm` of norm.cu."""

    holds_next = True
    _fields_ = (
        ("input", NormedArgument),
        ("kept", KeptArgument),
        *members("void* output order scales", "int stride width begin steps next_early"),
    )


class _NormResidual(ctypes.Structure):
    """`NormResidual` of norm.cu."""

    _fields_ = [
        ("input", NormedArgument),
        *members("void* residual selected output", "int width tokens adds_float", "void* factor"),
    ]


class _NormParts(Argument):
    """`NormParts` of norm.cu."""

    holds_next = True
    _fields_ = (
        ("parts", NormedArgument * contract.MAX_PARTS),
        ("widths", ctypes.c_int * contract.MAX_PARTS),
        ("next_early", ctypes.c_int),
        ("wholes", ctypes.c_int * contract.MAX_PARTS),
        *members("void* squares"),
    )


_NORM_MACROS = (
    ("HOST_NORM_BYTES", ctypes.sizeof(_Norm)),
    ("HOST_NORM_RESIDUAL_BYTES", ctypes.sizeof(_NormResidual)),
    ("HOST_NORM_SUMS_BYTES", geometries.NORM_SUMS_BYTES),
    ("HOST_NORM_PARTS_BYTES", ctypes.sizeof(_NormParts)),
    ("HOST_NORM_MOST_PARTS", contract.MAX_PARTS),
    ("HOST_SQUARE_SUMS", contract.SQUARE_SUMS),
)
#: Of norm_parts: what only adds squares.
_SQUARES = "decode::SQUARES"


def norm_kernel(name: str, kind: str) -> Kernel:
    """A kernel of norm.cu, for a dtype by its name on the device."""
    return decode_kernel("norm.cu", f"decode::{name}<{kind}>", _NORM_MACROS)


class CudaNorms:
    """What `CudaDecodeKernels` have of norms and whole rows."""

    module: KernelModule
    dtype: str
    _type: str

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

    def _parts(
        self, parts: Sequence[NormedInput], next_early: bool, kind: str, squares: DeviceArray | None, wholes: Any
    ) -> Launch:
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
            check_room("squares", squares, rows_of(values), contract.SQUARE_SUMS)
        kernel, grid = norm_kernel("norm_parts", self._type + (kind and f", {kind}")), (len(parts), rows_of(values), 1)
        return Launch(self.module, kernel, grid, THREADS, 0, (arguments,))
