"""The kernels of long prompts on the GPU."""

from __future__ import annotations

from functools import lru_cache

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.contracts import Contracts, cuda_header
from edgellm.kernels.decode.arguments import CUDA_TYPES, MACROS
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.prefill.contract import HeadNorms, KeyValueRows, PrefillKernels

_WARPS, _STAGES, _HEADS_THREADS = 4, 2, 256
#: Queries of a block, and keys of a tile, by the size that heads are padded to.
_ROWS = {64: 128, 128: 128, 256: 64}
_KEYS = {64: 64, 128: 64, 256: 32}


def attention_bytes(size: int) -> int:
    """Shared memory of a block of `causal_attention`, for heads of `size` elements."""
    padded = _padded(size)
    return 2 * padded * (_ROWS[padded] + 2 * _STAGES * _KEYS[padded])


def _padded(size: int) -> int:
    return next(padded for padded in _ROWS if padded >= size)


@lru_cache
def heads_kernel(dtype: str) -> Kernel:
    """`prepare_heads` for a model of `dtype`."""
    expression = f"prefill::prepare_heads<{CUDA_TYPES[dtype]}>"
    return Kernel(_source(f"prefill_heads_{dtype}", "heads.cu", expression, MACROS), expression)


@lru_cache
def attention_kernel(dtype: str, size: int) -> Kernel:
    """`causal_attention` for heads of `size` elements."""
    padded = _padded(size)
    expression = f"prefill::causal_attention<{CUDA_TYPES[dtype]}, {padded}>"
    sizes = ((f"HOST_BYTES_{each}", attention_bytes(each)) for each in _ROWS)
    macros = (*MACROS, ("HOST_WARPS", _WARPS), ("HOST_STAGES", _STAGES), *sizes)
    name = f"prefill_attention_{dtype}_{padded}"
    return Kernel(_source(name, "attention.cu", expression, macros), expression)


def _source(name: str, file: str, expression: str, macros: tuple[tuple[str, int | str], ...]) -> ModuleSource:
    header = ("prefill/arguments.cuh", cuda_header(PrefillKernels))
    return ModuleSource(name, (f"prefill/{file}",), (expression,), macros, (header,))


class CudaPrefill:
    """See `edgellm.kernels.prefill.contract.PrefillKernels`; arrays are `DeviceArray`, a call gives a `Launch`."""

    def __init__(self, module: KernelModule) -> None:
        self._module = module
        self._check = Contracts(PrefillKernels, DeviceArray)

    def prepare_heads(
        self, qkv: DeviceArray, norms: HeadNorms | None, rotary: DeviceArray | None, rows: KeyValueRows
    ) -> Launch:
        """Norm, rotation and KV rows; see the contract."""
        arguments = (qkv, norms, rotary, rows)
        sizes = self._check("prepare_heads", *arguments)
        packed = self._check.pack("prepare_heads", sizes, *arguments)
        grid = (sizes["T"], sizes["B"], 1)
        return Launch(self._module, heads_kernel(qkv.dtype), grid, _HEADS_THREADS, 0, (packed,))

    def causal_attention(self, qkv: DeviceArray, rows: KeyValueRows, scale: float, context: DeviceArray) -> Launch:
        """Attention over the rows up to each token's own; see the contract."""
        arguments = (qkv, rows, scale, context)
        sizes = self._check("causal_attention", *arguments)
        packed = self._check.pack("causal_attention", sizes, *arguments)
        size, blocks = sizes["D"], -(-sizes["T"] // _ROWS[_padded(sizes["D"])])
        grid, shared = (sizes["E"] // size, sizes["B"], blocks), attention_bytes(size)
        return Launch(self._module, attention_kernel(qkv.dtype, size), grid, 32 * _WARPS, shared, (packed,))
