"""The kernels of few rows on the GPU, with norms, columns and attention, prepared once and launched every step.

Each method has the arguments of its NumPy twin, which defines what it computes, and returns a `Launch`
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
    AddedArgument,
    KeptArgument,
    LinearArgument,
    NormedArgument,
    added_argument,
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
from edgellm.kernels.decode.contract import LinearWeights, NormedInput
from edgellm.kernels.decode.geometries import Geometry
from edgellm.kernels.decode.norms import CudaNorms
from edgellm.kernels.decode.packed_rows import MAX_PACKED_ROWS, packed_rows, packed_rows_kernel
from edgellm.kernels.decode.tiled_linear import capacity_of
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Argument, Kernel, KernelModule, Launch


class NormLinearArgument(Argument):
    """`NormLinear` of linear.cu."""

    holds_next = waits_late = True
    _fields_ = (
        ("inputs", NormedArgument * 2),
        ("linear", LinearArgument),
        ("kept", KeptArgument),
        *members("void* output", "int next_early activation beside"),
    )


class _AddedNormLinear(NormLinearArgument):
    """`AddedNormLinear` of few_rows.cuh. What follows takes the residual stream, which its blocks write."""

    holds_next = False
    _fields_ = (("added", AddedArgument),)


class _LinearResidual(ctypes.Structure):
    """`LinearResidual` of linear.cu."""

    _fields_ = [
        ("linear", LinearArgument),
        ("kept", KeptArgument),
        *members("void* input residual output selected", "int residual_float tokens stage"),
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
    ("HOST_ADDED_LINEAR_BYTES", ctypes.sizeof(_AddedNormLinear)),
    ("HOST_LINEAR_RESIDUAL_BYTES", ctypes.sizeof(_LinearResidual)),
)


def linear_kernel(name: str, *types: str) -> Kernel:
    """A kernel of linear.cu, with the arguments of its template."""
    return decode_kernel("linear.cu", f"decode::{name}<{', '.join(types)}>", LINEAR_MACROS)


class CudaDecodeKernels(CudaColumns, CudaNorms):
    """See `NumpyDecodeKernels`: for one GPU, stream and dtype; the GPU's primary context must be current."""

    def __init__(self, module: KernelModule, dtype: str, head_size: int) -> None:
        """Have compiled and loaded what steps of one token need; the rest is, when a launch is first prepared.

        Raises MissingDependencyError or KernelError.
        """
        self.module, self.dtype, self.head_size, self.gpu = module, dtype, head_size, capacity_of(module)
        self._type = kind = cuda_type(dtype)
        staged = geometries.staged_geometry(1, contract.STEP, self.gpu) or geometries.NARROW
        normed = geometries.norm_geometry(1, [contract.STEP], self.gpu, False, 0).name
        kernels = (("norm_linear", normed), ("norm_gate_up", f"{normed}Pairs"), ("linear_residual", staged.name))
        linear = [linear_kernel(name, kind, f"decode::{geometry}") for name, geometry in kernels]
        for kernel in (*linear, attention_kernel(dtype, head_size)):
            module.load(kernel.source)

    def takes(self, linear: LinearWeights, rows: int, normed: bool) -> bool:
        """Whether these kernels compute a layer whose weight is packed, or some rows of which are, for so many rows,
        with norms inside where `normed`: for few, without adapters."""
        if linear.adapters is not None or rows > MAX_PACKED_ROWS:
            return False
        if linear.is_packed:
            return packed_rows(rows, linear.weight.layout, self.gpu, normed) is not None
        limit = self.module.shared_limit
        return geometries.norm_linear_shared_bytes(rows, [linear.weight.shape[1]], limit) <= limit

    def norm_linear(self, inputs, linear, output, scale=1.0, kept=None, next_early=True):
        """See `NumpyDecodeKernels.norm_linear`.

        `next_early` False: a kernel that overlaps this one starts only when the one before this one has finished. Of
        two inputs, which are as wide as each other and normed alike, the first is of the compute dtype.
        """
        rows, widths = linear.weight.shape[0], [each.columns for each in inputs]
        batch = self._batch(inputs, linear)
        check_room("output", output, batch, linear.width)
        layer, place = linear_argument(linear, batch, rows, scale), own_rows(output, linear)
        prefix, arguments = self._arguments(inputs, layer, kept_argument(kept, widths[-1]), place, next_early)
        if linear.is_packed and len(inputs) == 1:
            name = "rounded_linear" if inputs[0].weight is None else "norm_linear"
            return self._packed(prefix + name, linear, arguments)
        if len(inputs) == 1:
            return self._dense(f"{prefix}norm_linear", inputs[0], linear, arguments, 1)
        second = "float" if inputs[1].values.dtype == "float32" else self._type
        kernel, geometry = linear_kernel("norms_linear", self._type, second), geometries.WIDE
        shared = geometry.norm_bytes(1, len(inputs), batch, sum(widths))
        return self._launch(kernel, geometry, 1, linear, shared, arguments)

    def norm_gate_up(self, normed: NormedInput, linear: LinearWeights, activation: str, output: DeviceArray) -> Launch:
        rows, batch = linear.weight.shape[0] // 2, self._batch([normed], linear)
        check_room("output", output, batch, rows)
        layer, number = linear_argument(linear, batch, rows, 1.0), contract.activation_number(activation)
        prefix, arguments = self._arguments([normed], layer, KeptArgument(), output.pointer, True, number)
        if linear.is_packed:
            name = "norm_" if normed.weight is not None else "rounded_" if normed.values.dtype == "float32" else ""
            return self._packed(f"{prefix}{name}gate_up", linear, arguments)
        return self._dense(f"{prefix}norm_gate_up", normed, linear, arguments, 2)

    def token_gate_linear(self, normed, linear, activation, through, output):
        """See `NumpyDecodeKernels.token_gate_linear`."""
        rows, batch = linear.weight.shape[0], self._batch([normed], linear)
        check_room("output", output, batch, rows)
        fits = (through.columns, through.values.dtype) == (rows, "float32")
        if normed.weight is not None or linear.place is not None or not fits:
            raise KernelError(
                f"{rows} gates of an input with a norm, of a part of a layer, or for columns {through.values.dtype} of "
                f"{through.columns}; expected an input as it is, a whole layer, and as many columns of float32"
            )
        layer, number = linear_argument(linear, batch, rows, 1.0), contract.activation_number(activation)
        own = layer, KeptArgument(), output.pointer, True, number
        prefix, arguments = self._arguments([normed], *own, beside=(normed_argument(through, self.dtype),))
        if linear.is_packed:
            return self._packed(f"{prefix}token_gate", linear, arguments)
        return self._dense(f"{prefix}token_gate", normed, linear, arguments, 1)

    def linear_residual(self, x, linear, residual, output, scale=1.0, kept=None, selected=None):
        rows, columns = linear.weight.shape
        batch = output.size // linear.width if selected is None else selected.size
        _check_rows(batch, columns, batch * columns, linear)
        check_room("x", x, batch, columns)
        check_room("output", output, batch, linear.width)
        limit, ranks = self.module.shared_limit, linear.ranks
        # Few rows are staged once, for all units; those of more come with the weights, which needs less memory.
        staged = geometries.staged_geometry(batch, columns, self.gpu, ranks)
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

    def _arguments(
        self, inputs: Sequence[NormedInput], *others: Any, beside: tuple[NormedArgument, ...] = ()
    ) -> tuple[str, NormLinearArgument]:
        """What the kernel's name begins with, and its arguments, of which `others` follow the inputs and what is
        `beside` these: another where an input is added to a residual first. Raises KernelError for two of such."""
        given = (NormedArgument * 2)(*(normed_argument(each, self.dtype) for each in inputs), *beside)
        if all(each.added is None for each in inputs):
            return "", NormLinearArgument(given, *others)
        if len(inputs) > 1 or inputs[0].added is None:
            raise KernelError("of two inputs side by side none is added to a residual first")
        return "added_", _AddedNormLinear(given, *others, added=added_argument(inputs[0].added, inputs[0].values))

    def _packed(self, name: str, linear: LinearWeights, arguments: Any) -> Launch:
        """The launch of the same arguments by packed_rows.cu."""
        layout, batch, normed = linear.weight.layout, arguments.linear.batch, "norm_" in name
        way = packed_rows(batch, layout, self.gpu, normed)
        if way is None or linear.adapters is not None or (name.endswith("gate_up") and layout.rows % 16):
            raise KernelError(
                f"packed layers of few rows take up to {MAX_PACKED_ROWS} that fit into shared memory, no LoRA adapters "
                f"and gates in eights, found {batch} rows times {linear.weight.shape}"
            )
        check_rounded(layout, self.dtype)
        kernel = packed_rows_kernel(name, self.dtype, way, layout, LINEAR_MACROS)
        shared = way.shared_bytes(layout.block_bytes, layout.columns, batch, normed)
        return Launch(self.module, kernel, way.grid(layout.rows, self.gpu), THREADS, shared, (arguments,))

    def _dense(
        self, name: str, normed: NormedInput, linear: LinearWeights, arguments: NormLinearArgument, tiles: int
    ) -> Launch:
        """The launch of a kernel that takes one input, for units of `tiles` times 8 weight rows."""
        batch, columns, ranks = arguments.linear.batch, normed.columns, linear.ranks
        geometry = geometries.norm_geometry(batch, [columns], self.gpu, tiles == 2, ranks)
        is_normed = normed.weight is not None or name.endswith("token_gate")  # which norms nothing in any case
        kernel = self._kernel(name, geometry.name + ("Pairs" if tiles == 2 else ""), linear, is_normed)
        shared = geometry.norm_bytes(tiles, 1, batch, columns, ranks)
        return self._launch(kernel, geometry, tiles, linear, shared, arguments)

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
