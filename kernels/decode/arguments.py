"""Structures that the kernels take by value, and the constants that they share with the device.

The device asserts the size of each structure, and what the launchers count of a block's shared memory, against macros
named HOST_...: a source that fits no longer is refused when it is compiled.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from itertools import accumulate

from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray, members
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.decode import contract
from edgellm.kernels.decode.contract import AddedTo, Kept, LinearAdapters, LinearWeights, NormedInput
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel
from edgellm.kernels.quantization.device_layout import DeviceLayout

#: Threads of a block of the kernels of few rows and of norms.
THREADS = 32 * contract.SLICES
#: A column behind those of every layer.
_BEHIND_ALL = 2**31 - 1
#: By dtype, its name on the device.
CUDA_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16"}


class KeptArgument(ctypes.Structure):
    """`Kept` of common.cuh."""

    _fields_ = members("void* target", "int stride raw")


class AdaptersArgument(ctypes.Structure):
    """`Adapters` of common.cuh."""

    _fields_ = [
        *members("void* a b scales low next_low", "int places modules rank tokens next_words low_units low_blocks"),
        ("ends", ctypes.c_int * (contract.MAX_FUSED - 1)),
    ]


class LinearArgument(ctypes.Structure):
    """`Linear` of common.cuh."""

    _fields_ = [
        *members("void* weight bias", "float scale", "int batch rows columns steps first width"),
        ("adapters", AdaptersArgument),
    ]


class NormedArgument(ctypes.Structure):
    """`NormedInput` of activations.cuh."""

    _fields_ = members("void* values weight", "float epsilon offset", "int stride is_float")


class AddedArgument(ctypes.Structure):
    """`AddedTo` of few_rows.cuh."""

    _fields_ = members("void* residual output weight factor", "float epsilon offset")


#: What every source of this folder asserts or takes.
MACROS = (
    ("HOST_SLICES", contract.SLICES),
    ("HOST_THREADS", THREADS),
    ("HOST_GELU_TANH", contract.ACTIVATIONS["gelu_tanh"]),
    ("HOST_KEPT_BYTES", ctypes.sizeof(KeptArgument)),
    ("HOST_LINEAR_BYTES", ctypes.sizeof(LinearArgument)),
    ("HOST_MOST_PLACES", contract.MAX_LORA_PLACES),
    ("HOST_NORMED_INPUT_BYTES", ctypes.sizeof(NormedArgument)),
)


def cuda_type(dtype: str, kernels: str = "decode kernels") -> str:
    """A dtype's name on the device. Raises KernelError for one that the `kernels` do not compute in."""
    if dtype not in CUDA_TYPES:
        raise KernelError(f"{kernels} compute in {' and '.join(CUDA_TYPES)}, not in {dtype}")
    return CUDA_TYPES[dtype]


def check_rounded(layout: DeviceLayout, dtype: str) -> None:
    """KernelError for a packed weight that is for kernels of another compute dtype."""
    if layout.compute != dtype:
        raise KernelError(f"a weight that is rounded in {layout.compute} was given to kernels of {dtype}")


@cache
def decode_kernel(
    file: str, expression: str, macros: tuple[tuple[str, int | str], ...], *headers: tuple[str, str]
) -> Kernel:
    """A kernel of decode/`file`, or of a path below kernels/, that is compiled alone: what no step asks for is never
    compiled. `headers`: see `ModuleSource`."""
    name, path = re.sub(r"\W+", "-", expression).strip("-"), file if "/" in file else f"decode/{file}"
    return Kernel(ModuleSource(name, (path,), (expression,), (*MACROS, *macros), headers), expression)


def kept_argument(kept: Kept | None, width: int) -> KeptArgument:
    """Where a kernel leaves `width` columns more. Raises KernelError if the target has no such place."""
    if kept is None:
        return KeptArgument()
    target, stride = kept.target, kept.target.shape[-1]
    if stride % width or not 0 <= kept.place < stride // width:
        raise KernelError(f"features of {target.shape} have no place {kept.place} of width {width}")
    return KeptArgument(target.pointer + kept.place * width * ITEM_SIZES[target.dtype], stride, kept.raw)


def linear_argument(linear: LinearWeights, batch: int, rows: int, scale: float) -> LinearArgument:
    """A linear layer of `rows` outputs for `batch` rows of activations."""
    columns, (first, width) = linear.weight.shape[1], linear.place or (0, rows)
    if rows % 8 and width != rows:
        raise KernelError(f"layers whose rows have launches of their own have them in eights, found {rows} of {width}")
    return LinearArgument(
        *addresses(linear.weight, linear.bias),
        scale,
        *(batch, rows, columns, contract.slice_steps(columns), first, width),
        AdaptersArgument() if linear.adapters is None else adapters_argument(linear.adapters, linear, batch),
    )


def adapters_argument(adapters: LinearAdapters, linear: LinearWeights, batch: int) -> AdaptersArgument:
    """The LoRA adapters of a linear layer. Raises KernelError for those that no kernel takes."""
    sequences, places = adapters.scales.shape
    modules, outputs, columns = adapters.modules, linear.width, linear.weight.shape[1]
    rank, rest = divmod(adapters.a.shape[0], places * len(modules))
    if (reason := contract.adapters_refusal(places, rank, modules)) is not None:
        raise KernelError(reason)
    sizes = (places * len(modules) * rank, columns), (places * len(modules) * rank, outputs)
    words = contract.low_words(batch, places, len(modules), rank)
    if rest or (adapters.a.shape, adapters.b.shape) != sizes or sum(modules) != outputs or batch % sequences:
        raise KernelError(
            f"LoRA adapters a {adapters.a.shape}, b {adapters.b.shape}, scales {adapters.scales.shape} of layers of "
            f"{modules} rows do not fit a linear layer {linear.weight.shape} for {batch} rows"
        )
    if adapters.low.size < words or adapters.low.pointer == adapters.next_low.pointer:
        raise KernelError(f"LoRA adapters need {words} words of memory that the next launch does not use")
    # A tile may reach behind the last row: what is there belongs to the last module, whose products there are.
    ends = [*accumulate(modules[:-1]), *[_BEHIND_ALL] * contract.MAX_FUSED][: contract.MAX_FUSED - 1]
    return AdaptersArgument(
        *addresses(*adapters[:3], adapters.low, adapters.next_low),
        *(places, len(modules), rank, batch // sequences, adapters.next_low.size, 0, 0),
        (ctypes.c_int * (contract.MAX_FUSED - 1))(*ends),
    )


def normed_argument(normed: NormedInput, dtype: str) -> NormedArgument:
    """An input of float32 or of the compute dtype. Raises KernelError for another, or one that is not aligned."""
    values, stride = normed.values, normed.values.shape[-1]
    if values.dtype not in ("float32", dtype) or normed.first % 8 or normed.columns % 8 or stride % 8:
        raise KernelError(
            f"decode kernels take inputs of float32 or {dtype} whose columns come in eights, found columns "
            f"{normed.first} to {normed.first + normed.columns} of {values.dtype} {list(values.shape)}"
        )
    first = values.pointer + normed.first * ITEM_SIZES[values.dtype]
    return NormedArgument(
        first, *addresses(normed.weight), normed.epsilon, normed.offset, stride, values.dtype == "float32"
    )


def added_argument(added: AddedTo, values: DeviceArray) -> AddedArgument:
    """What rows of float32 are added to. Raises KernelError for what does not fit, or is read and written."""
    residual, output, weight = added.residual, added.output, added.weight
    kinds = {(each.size, each.shape[-1], each.dtype) for each in (residual, output, values)}
    if kinds != {(values.size, weight.size, "float32")} or output.pointer in (residual.pointer, values.pointer):
        raise KernelError(
            f"{values.dtype} {list(values.shape)} are not added to {residual.dtype} {list(residual.shape)} behind a "
            f"norm of {weight.size} weights; expected as many elements of float32, and another place for the sum"
        )
    return AddedArgument(*addresses(residual, output, weight, added.factor), added.epsilon, added.offset)


def addresses(*arrays: DeviceArray | None) -> tuple[int, ...]:
    """The addresses of arrays; 0 for None."""
    return tuple(0 if array is None else array.pointer for array in arrays)


def own_rows(
    output: DeviceArray, linear: LinearWeights, residual: DeviceArray | None = None, kept: Kept | None = None
) -> int:
    """Where the outputs of a layer begin in those of the whole. Raises KernelError for a layer of some rows that is
    given a residual, or a place for it: kernels find these by rows of their own."""
    if linear.place is None:
        return output.pointer
    if residual is not None or kept is not None or output.dtype != "float32":
        raise KernelError(
            "a layer whose rows have launches of their own gives float32 and takes no residual, found "
            f"{output.dtype}{'' if residual is None and kept is None else ' and a residual'}"
        )
    return output.pointer + linear.place[0] * ITEM_SIZES[output.dtype]


def rows_of(array: DeviceArray) -> int:
    """Rows of an array, all axes but the last together."""
    return array.size // array.shape[-1]


def check_room(name: str, array: DeviceArray, batch: int, width: int) -> None:
    """KernelError if an array does not hold `batch` rows of `width` elements."""
    if array.size < batch * width:
        raise KernelError(f"{name} has shape {list(array.shape)}; expected at least {batch} rows of {width} elements")
