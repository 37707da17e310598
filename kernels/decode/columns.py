"""The kernels of columns.cu on the GPU: parts of rows, columns of rows, and tokens' own embeddings. Methods have the
arguments of their twins, `NumpyDecodeKernels`."""

from __future__ import annotations

import ctypes

from edgellm.kernels.decode.arguments import addresses, check_room, decode_kernel, normed_argument, rows_of
from edgellm.kernels.decode.contract import TOKEN_SHARE, activation_number
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch

#: Lanes of a warp, which a block is; each has 8 columns at a time.
_LANES = 32


def column_kernel(name: str, kind: str) -> Kernel:
    """A kernel of columns.cu, for a dtype by its name on the device."""
    return decode_kernel("columns.cu", f"decode::{name}<{kind}>", ())


class CudaColumns:
    """What `CudaDecodeKernels` have of columns; rows are up to 65,535."""

    module: KernelModule
    dtype: str
    _type: str

    def insert_columns(self, columns, rows):
        """See `NumpyDecodeKernels.insert_columns`."""
        width, stride = columns.shape[-1], rows.shape[-1]
        are_floats = columns.dtype == rows.dtype == "float32"
        if not are_floats or width % 8 or stride % 8 or width > stride or rows_of(columns) != rows_of(rows):
            raise KernelError(
                f"columns {columns.dtype} {list(columns.shape)} have no place in {rows.dtype} {list(rows.shape)}; "
                "expected as many rows of float32, and columns in eights"
            )
        arguments = *map(ctypes.c_void_p, addresses(columns, rows)), ctypes.c_int(width), ctypes.c_int(stride)
        return self._of_rows("insert_columns", -(-width // (8 * _LANES)), rows_of(rows), arguments)

    def token_inputs(self, values, own, weight, epsilon, offset, scale):
        """See `NumpyDecodeKernels.token_inputs`."""
        width, stride, rows = weight.size, values.shape[-1], rows_of(values)
        dtypes, sizes = (values.dtype, own.dtype), (own.shape[-1], rows_of(own))
        if dtypes != ("float32", self.dtype) or sizes != (stride, rows) or width % 8 or stride % width:
            raise KernelError(
                f"values {values.dtype} {list(values.shape)} and embeddings {own.dtype} {list(own.shape)} in parts of "
                f"{width} do not fit; expected float32 and {self.dtype} of as many elements, and whole parts in eights"
            )
        numbers = map(ctypes.c_float, (epsilon, offset, scale, TOKEN_SHARE))
        widths = ctypes.c_int(width), ctypes.c_int(stride)
        arguments = *map(ctypes.c_void_p, addresses(values, own, weight)), *widths, *numbers
        return self._of_rows("token_inputs", stride // width, rows, arguments)

    def token_gate(self, gate, activation, through, output):
        """See `NumpyDecodeKernels.token_gate`."""
        width, rows = gate.shape[-1], rows_of(gate)
        found = gate.dtype, through.values.dtype, output.dtype, through.columns, rows_of(through.values)
        if found != ("float32", "float32", self.dtype, width, rows):
            raise KernelError(
                f"gates {gate.dtype} {list(gate.shape)} and {through.columns} columns of {through.values.dtype} "
                f"{list(through.values.shape)} give no {output.dtype}; expected float32, as many, and {self.dtype}"
            )
        check_room("output", output, rows, width)
        own = normed_argument(through, self.dtype)
        pointers = map(ctypes.c_void_p, (gate.pointer, own.values, output.pointer))
        arguments = *pointers, *map(ctypes.c_int, (width, own.stride, activation_number(activation)))
        return self._of_rows("token_gate", -(-width // (8 * _LANES)), rows, arguments)

    def _of_rows(self, name: str, blocks: int, rows: int, arguments: tuple) -> Launch:
        return Launch(self.module, column_kernel(name, self._type), (blocks, rows, 1), _LANES, 0, arguments)
