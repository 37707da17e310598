"""The kernels of linear layers over packed weights and many rows: which tiles they take, and their launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from edgellm.kernels.decode.arguments import CUDA_TYPES, decode_kernel
from edgellm.kernels.decode.contract import SLICES, STEP, slice_steps
from edgellm.kernels.decode.packed_linear import PackedTiling, no_room, packed_tilings
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.errors import KernelError
from edgellm.kernels.fitted import fitted
from edgellm.kernels.launch import Kernel
from edgellm.kernels.quantization.code_words import BLOCK_COLUMNS, BLOCK_ROWS
from edgellm.kernels.quantization.device_layout import DeviceLayout

#: Bytes of the places where rows begin; steps of a block of weights.
_BEGINS, _BLOCK_STEPS = 256, BLOCK_COLUMNS // STEP
#: Tiles of activations that kernels are made for.
_TOKEN_TILES = (1, 2, 3, 4, 6, 8)
#: The fewest rows of activations that have tiles alone, unless layers have adapters.
LEAST_ROWS = 9
#: What `fitted.json` says of each.
_FITTED = "packed layers of 9 to 64 rows"
_OF_MANY, _OF_FEW = fitted(_FITTED, "many", "few")
_NARROW, _WIDE = fitted(_FITTED, "narrow", "wide")
_STARTS, _COPIED, _JOINS, _UNHIDDEN, _DEQUANTIZES, _BARRIERS, _FEW_WARPS = fitted(
    _FITTED, "starts", "copied", "joins", "unhidden", "dequantizes", "barriers", "few_warps"
)


@dataclass(frozen=True)
class PackedTiles:
    """Tiles of `row_warps` times `weight_tiles` times 16 weight rows, times `token_tiles` times 8 rows of activations.

    `k_warps` teams of `row_warps` share K: 1, 4 (a group of slices each) or 16 (a slice). `depth` blocks of each warp's
    weights find room, and for each team `stages` of `chunk` steps of activations; 0: those are copied once and stay.
    `blocks` are on a multiprocessor. More rows of activations than a tile has are other blocks'.
    """

    token_tiles: int
    weight_tiles: int
    row_warps: int
    k_warps: int
    depth: int
    stages: int
    chunk: int = 1
    blocks: int = 1

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.row_warps * self.k_warps

    @property
    def weight_rows(self) -> int:
        """Weight rows of a tile."""
        return 16 * self.weight_tiles * self.row_warps

    def shared_bytes(self, block_bytes: int, columns: int) -> int:
        """Bytes of a block: where rows begin, rings of weights, sums, activations. `block_bytes`: of `DeviceLayout`."""
        weights = self.warps * self.depth * 2 * self.weight_tiles * block_bytes
        fragments = self.weight_tiles * self.token_tiles
        sums = self.k_warps * 8 * self.token_tiles * (self.weight_rows + 4) * 4
        if self.k_warps == 1:
            sums = 512 * fragments * self.warps if fragments > 8 else 0
        steps = self.stages * self.chunk or SLICES * slice_steps(columns) // self.k_warps
        return _BEGINS + weights + sums + self.k_warps * steps * self.token_tiles * 512

    def grid(self, batch: int, rows: int, gpu: Capacity) -> tuple[int, int, int]:
        """Blocks that walk over a matrix's tiles, for each part of `batch` rows of activations."""
        parts = -(-batch // (8 * self.token_tiles))
        places = max(1, self.blocks * gpu.multiprocessors // parts)
        return min(-(-rows // self.weight_rows), places), parts, 1

    def clocks(self, batch: int, rows: int, columns: int, gpu: Capacity) -> float:
        """An estimate for `batch` rows of activations times a matrix [rows, columns]."""
        across, parts, _ = self.grid(batch, rows, gpu)
        blocks, fragments = across * parts, self.weight_tiles * self.token_tiles
        beside = min(self.blocks, -(-blocks // gpu.multiprocessors))
        codes, rows_read = 132 * self.warps * self.weight_tiles, 512 * self.token_tiles
        copied = self.k_warps * rows_read if self.stages else 0
        instructions = 2 * self.weight_tiles * _DEQUANTIZES + self.token_tiles + 3 * fragments
        spans = (
            (self.warps * rows_read + copied + 2 * codes) / 128,
            16 * 8 * STEP * self.warps * fragments / gpu.speeds[1],
            (self.warps * instructions + copied / 100) / 4,
            codes * min(blocks / beside, gpu.multiprocessors) / gpu.speeds[0] / parts,
        )
        step = beside * ((1 - _UNHIDDEN) * max(spans) + _UNHIDDEN * sum(spans))
        step *= _FEW_WARPS if self.warps * beside <= 4 else 1
        step += _BARRIERS / self.chunk if self.stages and self.row_warps > 1 else 0
        once = 0 if self.stages else 16 * self.token_tiles * columns / _COPIED
        tiles = -(-rows // (self.weight_rows * across))  # of a block
        steps = tiles * SLICES * slice_steps(columns) / self.k_warps
        return _STARTS + once + steps * step + (tiles - 1) * _JOINS * self.k_warps


def packed_tiling(batch: int, layout: DeviceLayout, gpu: Capacity, adapted: bool = False) -> PackedTiles | PackedTiling:
    """The fastest known, for `batch` rows of activations that kernels of few rows do not take. Raises KernelError."""
    tiles = layout.rows / (2 * BLOCK_ROWS * gpu.multiprocessors)
    in_tiles = batch >= LEAST_ROWS or (is_plain(layout) and not _NARROW < tiles < _WIDE)
    if in_tiles and not adapted:
        try:
            return packed_tiles(batch, layout, gpu)[0]
        except KernelError:
            if batch >= LEAST_ROWS:
                raise
    return packed_tilings(batch, layout, gpu, adapted)[0]


def is_plain(layout: DeviceLayout) -> bool:
    """Whether weights have codes of 4 bits or fewer in one group a block of columns, as those that were measured."""
    return layout.format.bits <= 4 and layout.scales == 1


def packed_tiles(batch: int, layout: DeviceLayout, gpu: Capacity) -> list[PackedTiles]:
    """All that take `batch` rows of activations in the shared memory that a block gets, the fastest first."""
    forms = _OF_FEW if gpu.is_small else _OF_MANY
    chosen = forms[next(most for most in forms if most >= batch)]
    fitting = [_fitting(PackedTiles(*sizes), batch, layout, gpu) for sizes in chosen]
    found = [tiling for tiling in fitting if tiling is not None]
    if not found:
        raise no_room(batch, layout, gpu)
    return sorted(found, key=lambda tiling: tiling.clocks(batch, layout.rows, layout.columns, gpu))


def _fitting(tiling: PackedTiles, batch: int, layout: DeviceLayout, gpu: Capacity) -> PackedTiles | None:
    """A tiling with no more tiles of activations than it needs, and rings that fit; None if none do.

    Where a warp's part of K is short, its rings are: what is left is room for the next kernel's blocks.
    """
    if tiling.k_warps == SLICES and slice_steps(layout.columns) % _BLOCK_STEPS:
        return None  # a warp's slice is whole blocks of weights
    tiles = -(-batch // 8)
    needed = -(-tiles // -(-tiles // tiling.token_tiles))
    tiling = replace(tiling, token_tiles=next(count for count in _TOKEN_TILES if count >= needed))
    steps = SLICES * slice_steps(layout.columns) // tiling.k_warps
    longest = min(tiling.stages, max(3, steps // tiling.chunk - 1))
    stages = [longest, *(fewer for fewer in (8, 6, 5, 4, 3) if fewer < (longest or 9))]
    room = gpu.shared_limit // tiling.blocks - 1024 * (tiling.blocks > 1)
    for own, depth in product(stages, range(min(tiling.depth, max(2, steps // _BLOCK_STEPS)), 1, -1)):
        found = replace(tiling, stages=own, depth=depth)
        early = own == 0 or (depth - 1) * _BLOCK_STEPS // tiling.chunk >= own - 2  # weights come before activations
        if early and found.shared_bytes(layout.block_bytes, layout.columns) <= room:
            return found
    return None if tiling.blocks == 1 else _fitting(replace(tiling, blocks=tiling.blocks - 1), batch, layout, gpu)


def tiles_kernel(name: str, dtype: str, tiling: PackedTiles, layout: DeviceLayout, argument_bytes: int) -> Kernel:
    """A kernel of packed_tiles.cu, whose structure of arguments has so many bytes."""
    sizes = (
        *(tiling.token_tiles, tiling.weight_tiles, tiling.row_warps, tiling.k_warps, tiling.depth, tiling.stages),
        *(tiling.chunk, slice_steps(layout.columns), layout.scales, layout.mode, tiling.blocks),
    )
    macros = (
        ("HOST_TILED_LINEAR_BYTES", argument_bytes),
        ("HOST_JOINED_BYTES", PackedTiles(8, 2, 2, 4, 3, 5).shared_bytes(528, 2048)),
        ("HOST_ALL_BYTES", PackedTiles(8, 2, 8, 1, 2, 0).shared_bytes(544, 2048)),
    )
    chosen = ", ".join(map(str, sizes))
    return decode_kernel("packed_tiles.cu", f"decode::packed::tiles_{name}<{CUDA_TYPES[dtype]}, {chosen}>", macros)
