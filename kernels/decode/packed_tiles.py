"""The kernels of linear layers over weights of 4 bits and many rows: which tiles they take, and their launches."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.kernels.decode.arguments import CUDA_TYPES, decode_kernel
from edgellm.kernels.decode.contract import SLICES, STEP, slice_steps
from edgellm.kernels.decode.packed_linear import PackedTiling
from edgellm.kernels.decode.tilings import Capacity, slices_end_every
from edgellm.kernels.launch import Kernel
from edgellm.kernels.quantization.device_layout import BLOCK_COLUMNS, DeviceLayout

#: Bytes of the places where rows begin; steps of a block of weights.
_BEGINS, _BLOCK_STEPS = 256, BLOCK_COLUMNS // STEP


@dataclass(frozen=True)
class PackedTiles:
    """Tiles of `row_warps` times `weight_tiles` times 16 weight rows, times `token_tiles` times 8 rows of activations.

    `k_warps` teams of `row_warps` have parts of K, and blocks of a `cluster` (1 or 4): in all 1, 4 (a group of slices
    each) or 16 (a slice). `depth` blocks of each warp's weights find room, and for each team `stages` of `chunk` steps
    of activations; 0: those are copied once and stay. `blocks` are on a multiprocessor.
    """

    token_tiles: int
    weight_tiles: int
    row_warps: int
    k_warps: int
    cluster: int
    depth: int
    stages: int
    chunk: int = 1
    blocks: int = 1

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.row_warps * self.k_warps

    @property
    def weight_rows(self) -> int:
        """Of a tile."""
        return 16 * self.weight_tiles * self.row_warps

    @property
    def parts(self) -> int:
        """Of K."""
        return self.k_warps * self.cluster

    def shared_bytes(self, block_bytes: int, columns: int) -> int:
        """Of a block: where rows begin, rings of weights, sums, activations. `block_bytes`: of `DeviceLayout`."""
        weights = self.warps * self.depth * 2 * self.weight_tiles * block_bytes
        steps = SLICES * slice_steps(columns) // self.parts if self.stages == 0 else self.stages * self.chunk
        rings = weights + self.k_warps * steps * self.token_tiles * 512
        sums = self.k_warps * 8 * self.token_tiles * (self.weight_rows + 4) * 4
        if self.parts == 1:
            fragments = self.weight_tiles * self.token_tiles
            sums = 16 * fragments * 32 * self.warps if fragments > 8 else 0
        return _BEGINS + (max(rings, sums) if self.cluster > 1 else rings + sums)

    def grid(self, rows: int, gpu: Capacity) -> tuple[int, int, int]:
        """Blocks that walk over a matrix's tiles, or clusters of one tile each."""
        tiles = -(-rows // self.weight_rows)
        return tiles if self.cluster > 1 else min(tiles, self.blocks * gpu.multiprocessors), self.cluster, 1


def tiles_kernel(name: str, dtype: str, tiling: PackedTiles, layout: DeviceLayout, argument_bytes: int) -> Kernel:
    """A kernel of packed_tiles.cu, whose structure of arguments has so many bytes."""
    every, mode = slices_end_every(layout.columns), 2 if layout.format.zeros else int(layout.small)
    sizes = tiling.token_tiles, tiling.weight_tiles, tiling.row_warps, tiling.k_warps, tiling.cluster, tiling.depth
    sizes += tiling.stages, tiling.chunk, every, layout.scales, mode, tiling.blocks
    macros = (
        ("HOST_TILED_LINEAR_BYTES", argument_bytes),
        ("HOST_PACKED_BYTES", PackedTiling(2, 1, 4, 3, 1, 8).shared_bytes(576, 0, 0)),
        ("HOST_STAYING_BYTES", PackedTiling(1, 2, 16, 2, 1, 0).shared_bytes(528, 2048, 3)),
        ("HOST_JOINED_BYTES", PackedTiles(8, 2, 2, 4, 4, 3, 5).shared_bytes(528, 2048)),
        ("HOST_ALL_BYTES", PackedTiles(8, 2, 8, 1, 1, 2, 0).shared_bytes(544, 2048)),
    )
    chosen = ", ".join(map(str, sizes))
    return decode_kernel("packed_tiles.cu", f"decode::packed::tiles_{name}<{CUDA_TYPES[dtype]}, {chosen}>", macros)
