"""Mixtures of experts for many rows on the GPU, as prompts have: pairs of rows and experts are sorted by expert, and
those of an expert multiplied together in tiles.

Each method has the arguments of its NumPy twin in `twin` and returns a `Launch`. No number of pairs is read by
the host: grids and arrays have room for whatever may be chosen. No bit depends on the tiles.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache

from edgellm.kernels.arrays import DeviceArray, members
from edgellm.kernels.decode.arguments import (
    CUDA_TYPES,
    addresses,
    check_room,
    check_rounded,
    decode_kernel,
    linear_argument,
)
from edgellm.kernels.decode.tiled_linear import TiledLinear
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.errors import KernelError
from edgellm.kernels.experts import contract
from edgellm.kernels.experts.launcher import CudaExperts
from edgellm.kernels.launch import Kernel, Launch
from edgellm.kernels.prefill.linear import REGISTERS, SHARED, PromptTiling, dequantizing
from edgellm.kernels.quantization.device_layout import DeviceLayout

#: Tilings of dense weights, and of packed ones, the most rows first: an expert has few rows of a prompt.
TILINGS = (
    PromptTiling(2, 8, 2, 2, 2, SHARED),
    PromptTiling(2, 4, 2, 2, 2, REGISTERS),
    PromptTiling(2, 4, 1, 4, 2, REGISTERS),
    PromptTiling(1, 4, 2, 2, 3, REGISTERS),
    PromptTiling(1, 4, 1, 4, 3, REGISTERS),
)
PACKED_TILINGS = (
    PromptTiling(4, 4, 1, 4, 2, SHARED),
    PromptTiling(2, 4, 2, 2, 2, REGISTERS),
    PromptTiling(2, 4, 1, 4, 2, REGISTERS),
    PromptTiling(2, 2, 1, 4, 3, REGISTERS),
    PromptTiling(1, 4, 1, 4, 3, REGISTERS),
)
#: Threads of the block that sorts.
_SORTING_THREADS = 1024


class _Sorting(ctypes.Structure):
    """`Sorting` of sorted.cu."""

    _fields_ = members("void* ids rows which expert tiles", "int pairs chosen experts tile")


class _SortedRows(ctypes.Structure):
    """`SortedRows` of prefill/linear_tiles.cuh."""

    _fields_ = members("void* source target expert tiles", "ulonglong weight_bytes", "int bias_elements")


class _SortedProduct(ctypes.Structure):
    """`SortedProduct` of prompt_rows.cu."""

    _fields_ = [("tiled", TiledLinear), ("sorted", _SortedRows), *members("float limit")]


SORTING = decode_kernel(
    "experts/sorted.cu",
    "experts::sort_pairs",
    (("HOST_SORTING_THREADS", _SORTING_THREADS), ("HOST_SORTING_BYTES", ctypes.sizeof(_Sorting))),
)


def expert_tilings(tile: int, gpu: Capacity, layout: DeviceLayout | None) -> list[PromptTiling]:
    """Those of `tile` rows whose blocks find room in a GPU's shared memory, the largest first. `layout`: of packed
    weights."""
    block_bytes = 0 if layout is None else layout.block_bytes
    every = [each._replace(block_bytes=block_bytes) for each in (TILINGS if layout is None else PACKED_TILINGS)]
    return [each for each in every if each.rows == tile and each.resident(2, gpu)]


@cache
def expert_tiling(
    tile: int, pairs: int, experts: int, shape: tuple[int, int], gpu: Capacity, layout: DeviceLayout | None
) -> PromptTiling:
    """The fastest tiling of `tile` rows for so many pairs with matrices of a shape, if experts are chosen alike often.
    Raises KernelError where none fits."""
    found = expert_tilings(tile, gpu, layout)
    if not found:
        raise KernelError(f"experts have no tiles of {tile} rows in {gpu.shared_limit} bytes of shared memory")
    own = min(experts, pairs)  # tiles are about full but for each expert's last
    rows = tile * (max(pairs - own * tile // 2, 0) // tile + own)
    return min(found, key=lambda tiling: tiling.clocks(rows, *shape, gpu, dequantizing(layout)))


def product_kernel(
    how: contract.Activation, dtype: str, tiling: PromptTiling, stages: int, layout: DeviceLayout | None = None
) -> Kernel:
    """The kernel of prompt_rows.cu that gives what is made of sums."""
    macros = (
        ("HOST_STAGES", stages),
        ("HOST_STAGE_BYTES", tiling.stage_bytes),
        ("HOST_TILED_LINEAR_BYTES", ctypes.sizeof(TiledLinear)),
        ("HOST_SORTED_PRODUCT_BYTES", ctypes.sizeof(_SortedProduct)),
        ("HOST_GATE", how.number),
    )
    sizes = [*tiling[:6], *(() if layout is None else (layout.scales, layout.mode))]
    arguments = ", ".join((CUDA_TYPES[dtype], f"experts::{how.kind.upper()}", *map(str, sizes)))
    return decode_kernel("experts/prompt_rows.cu", f"experts::prompt_rows<{arguments}>", macros)


class CudaSortedExperts(CudaExperts):
    """`CudaExperts`, and what many rows take; each kernel is loaded when a launch first needs it.

    `tiling`: other than the fastest, of the same rows.
    """

    tiling: PromptTiling | None = None

    def load(
        self,
        how: contract.Activation,
        pairs: int,
        experts: int,
        shape: tuple[int, int],
        layout: DeviceLayout | None = None,
    ) -> None:
        """Compile and load what so many pairs need with matrices of a shape; `layout`: of one expert's packed ones."""
        self.module.load(SORTING.source)
        tiling = expert_tiling(contract.rows_of_tiles(pairs, experts), pairs, experts, shape, self.gpu, layout)
        self.module.load(product_kernel(how, self.dtype, tiling, tiling.stages(self.gpu), layout).source)

    def sort(self, expert_ids, experts, sorted_pairs):
        chosen, tile = expert_ids.shape[-1], contract.check_sorted(sorted_pairs, expert_ids.size, experts)
        arguments = _Sorting(*addresses(expert_ids, *sorted_pairs), expert_ids.size, chosen, experts, tile)
        shared = _SORTING_THREADS // 32 * experts * 4
        return Launch(self.module, SORTING, (1, 1, 1), _SORTING_THREADS, shared, (arguments,))

    def sorted_gate_up(self, x, sorted_pairs, experts, how, output):
        pairs = output.size * how.sums // experts.shape[0]
        return self._sorted_product(x, sorted_pairs.rows, sorted_pairs, experts, output, pairs, how)

    def sorted_down(self, x, sorted_pairs, experts, output):
        pairs = output.size // experts.shape[0]
        check_room("x", x, pairs, experts.shape[1])
        return self._sorted_product(x, sorted_pairs.pairs, sorted_pairs, experts, output, pairs, contract.SUMS)

    def _sorted_product(
        self,
        x: DeviceArray,
        source: DeviceArray,
        sorted_pairs: contract.SortedPairs,
        experts: contract.ExpertWeights,
        output: DeviceArray,
        pairs: int,
        how: contract.Activation,
    ) -> Launch:
        """The product of all pairs; `source` says of which rows of x."""
        (rows, columns), layout, gated = experts.shape, experts.layout, how.kind == "gated"
        tile = contract.check_sorted(sorted_pairs, pairs, experts.experts)
        reason = contract.matrix_refusal(rows, columns, gated, layout)
        wanted = "float32" if how == contract.SUMS else self.dtype
        if reason is not None or (x.dtype, output.dtype) != (self.dtype, wanted):
            raise KernelError(reason or f"experts multiply {self.dtype} to {wanted}, not {x.dtype} to {output.dtype}")
        if layout is not None:
            check_rounded(layout, self.dtype)
        one = layout and replace(layout, rows=rows)
        tiling = self.tiling or expert_tiling(tile, pairs, experts.experts, experts.shape, self.gpu, one)
        batch, stages = contract.most_tiles(pairs, experts.experts, tile) * tile, tiling.stages(self.gpu)
        linear = linear_argument(experts.linear, batch, rows // 2 if gated else rows, 1.0)
        tiled = TiledLinear(linear=linear, input=x.pointer, output=output.pointer, stride=columns, stages=stages)
        weight_bytes = experts.linear.weight.data.nbytes if layout else experts.linear.weight.nbytes
        places = _SortedRows(
            *addresses(source, sorted_pairs.pairs, sorted_pairs.expert, sorted_pairs.tiles),
            *(weight_bytes // experts.experts, rows),
        )
        kernel = product_kernel(how, self.dtype, tiling, stages, one)
        grid, shared = tiling.grid(batch, rows, self.gpu), tiling.shared_bytes(stages)
        arguments = _SortedProduct(tiled, places, how.limit)
        return Launch(self.module, kernel, grid, tiling.threads, shared, (arguments,))
