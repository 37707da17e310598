"""What a linear layer costs on a GPU, and how those of many rows are spread over it: which tiles, and who shares K.

What decides is time alone: every choice gives the same bits. The times are estimates, in clocks, of what limits a
layer: memory, shared memory or tensor cores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import gcd
from typing import ClassVar, TypeVar

from edgellm.kernels.decode.contract import SLICES, STEP, slice_steps
from edgellm.kernels.fitted import fitted

#: Warps of a block; bytes of a row in a stage (two steps); bytes of a stage's barriers; the most stages.
WARPS, ROW_BYTES, BARRIER_BYTES, MOST_STAGES = 8, 128, 16, 8
#: What `fitted.json` says of each.
_FITTED = "linear layers of many rows"
_SPEEDS, _STREAMED, _SHARED, _CACHED = fitted(_FITTED, "speeds", "streamed", "shared", "cached")
_DIRECT_STREAMED, _DIRECT_ALONE = fitted(_FITTED, "direct_streamed", "direct_alone")
_END_LEFT, _END_ALONE, _APART, _DIRECT_APART = fitted(_FITTED, "end_left", "end_alone", "apart", "direct_apart")
_STARTS, _ENDS, _JOINS, _GROUPS_JOIN, _OF_CLUSTERS = fitted(
    _FITTED, "starts", "ends", "joins", "groups_join", "of_clusters"
)
_STAGES, _NOT_AHEAD, _FEW_MULTIPROCESSORS, _FEW_WARPS = fitted(
    _FITTED, "stages", "not_ahead", "few_multiprocessors", "few_warps"
)
_OVERLAPPING, _OVERLAPPING_GATED, _EARLY, _NO_ROOM, _DEEP = fitted(
    _FITTED, "overlapping", "overlapping_gated", "early", "no_room", "deep"
)
_LATENCY, _AS_FAST, _NORMED, _NORM_STARTS = fitted(_FITTED, "latency", "as_fast", "normed", "norm_starts")
#: Clocks of a norm as a launch of its own.
(NORM_CLOCKS,) = fitted(_FITTED, "norm_clocks")


@dataclass(frozen=True)
class Capacity:
    """What decides of a GPU: its multiprocessors, the shared memory of a block in bytes, whether it has clusters (and
    kernels that overlap), and its compute capability, as "sm_90" or "compute_87", by which its speeds are estimated.

    By itself an H200.
    """

    multiprocessors: int = 132
    shared_limit: int = 232_448
    has_clusters: bool = True
    architecture: str = "sm_90"

    @property
    def is_small(self) -> bool:
        """Whether it has so few multiprocessors, as boards have, that what was found fast there is fast on it."""
        return self.multiprocessors <= _FEW_MULTIPROCESSORS

    @cached_property
    def speeds(self) -> tuple[int, int]:
        """Bytes from memory, and multiply-adds of a multiprocessor, in a clock."""
        number = int(re.sub(r"\D", "", self.architecture))
        return _SPEEDS[max((known for known in _SPEEDS if known <= number), default=80)]


@dataclass(frozen=True)
class Tiling:
    """Tiles of `weight_rows` times `rows` (16, 32 or 64) of activations.

    `splits` blocks of a cluster share K: 1, or 4, each with one of the groups of slices.
    """

    rows: int
    weight_rows: int
    splits: int

    @property
    def row_warps(self) -> int:
        """Warps that have the rows of activations beside each other."""
        return 2 if self.rows == 64 else 1

    @property
    def row_tiles(self) -> int:
        """Tiles of a warp, 16 rows of activations each."""
        return self.rows // (16 * self.row_warps)

    @property
    def column_tiles(self) -> int:
        """Tiles of a warp, 8 weight rows each."""
        return self.weight_rows * self.row_warps // (8 * WARPS)

    def resident(self, gpu: Capacity) -> int:
        """Blocks that the registers of a multiprocessor hold: the next kernel's begins beside the last one's."""
        return 2 if gpu.has_clusters and self.row_tiles * self.column_tiles <= 4 else 1

    @property
    def ahead(self) -> bool:
        """Whether registers hold the next step's fragments: `Geometry::AHEAD` of a block alone."""
        sums, fragments = 12 * self.row_tiles * self.column_tiles, 8 * self.row_tiles + 4 * self.column_tiles
        return sums + 2 * fragments <= 180

    @property
    def stage_bytes(self) -> int:
        """Bytes of weights and activations, 64 columns of each."""
        return (self.weight_rows + self.rows) * ROW_BYTES

    @property
    def area_bytes(self) -> int:
        """What a block of a cluster leaves in the ring's memory: sums; the last one as much of what adapters add."""
        return self.rows * (self.weight_rows + 4) * 4

    def shared_bytes(self, stages: int, adapted: bool = False) -> int:
        """Bytes of a ring and its barriers; `adapted`: and of products of LoRA adapters' rows, 16 of each of two
        modules."""
        return stages * (self.stage_bytes + BARRIER_BYTES) + adapted * self.rows * 64

    def stages(self, gpu: Capacity, adapted: bool = False) -> int:
        """Stages of the ring: as many as fit (2 at least), where kernels overlap beside the next kernel's block if 3 do
        so."""
        beside = self.resident(gpu) > 1 and self.shared_bytes(3, adapted) <= _beside(gpu)
        limit = _beside(gpu) if beside else gpu.shared_limit
        return max(2, min(MOST_STAGES, (limit - self.shared_bytes(0, adapted)) // self.shared_bytes(1)))

    def tiles(self, rows: int) -> int:
        """Tiles of a matrix of `rows`."""
        return -(-rows // self.weight_rows)

    def grid(self, rows: int, gpu: Capacity, low_rows: int = 0) -> tuple[int, int, int]:
        """Blocks that walk over a matrix's tiles and those of `low_rows` rows of LoRA adapters, or clusters of one tile
        each."""
        tiles = self.tiles(rows) + self.tiles(low_rows)
        return (min(tiles, gpu.multiprocessors) if self.splits == 1 else tiles), self.splits, 1

    def clocks(self, rows: int, columns: int, gpu: Capacity) -> float:
        """Clocks of a matrix [rows, columns]."""
        tiles = self.tiles(rows)
        blocks = min(tiles * self.splits, gpu.multiprocessors)
        weights, activations = (count * STEP * 2 for count in (self.weight_rows, self.rows))
        fragments = WARPS * (16 * self.row_tiles + 8 * self.column_tiles) * STEP * 2
        shared = weights + activations + fragments
        products = self.rows * self.weight_rows * STEP
        step = _overlapped(gpu, blocks, weights, activations, shared, products)
        if not gpu.has_clusters:  # warps that wait for each other each stage read at once, then multiply at once
            alone = shared / _SHARED + products / gpu.speeds[1] + _STAGES / 2
            step = max(step, alone * (1 if self.ahead else _NOT_AHEAD))
        steps = -(-columns // STEP)
        if self.splits == 1:
            return _STARTS + -(-tiles // blocks) * (steps * step + _END_LEFT * _ENDS) + _ENDS
        places = max(1, int(_OF_CLUSTERS * gpu.multiprocessors * self.resident(gpu)))
        waves = -(-tiles * self.splits // places)
        on_each = max(1, min(tiles * self.splits, places) / gpu.multiprocessors)
        return waves * (_STARTS + on_each * steps / self.splits * step + _JOINS + _ENDS)


@dataclass(frozen=True)
class DirectTiling:
    """Tiles of the kernels whose threads copy the weights that they multiply: `warps` of `weight_tiles` times 8 weight
    rows each, times `rows` of activations, 16 to 64.

    `depth` steps of weights are under way; activations come in chunks of `chunk_steps`.
    """

    rows: int
    weight_tiles: int
    warps: int
    depth: int
    chunk_steps: int

    @property
    def weight_rows(self) -> int:
        """Weight rows of a tile."""
        return 8 * self.weight_tiles * self.warps

    @property
    def stage_bytes(self) -> int:
        """Bytes of a chunk of activations."""
        return self.chunk_steps * self.rows * STEP * 2

    @property
    def own_bytes(self) -> int:
        """Bytes of the threads' rings, and of sums for which registers have no room: `Geometry::STAGES`."""
        sums, threads = self.rows // 4 * self.weight_tiles, 32 * self.warps
        leaves = 3 * sums + 8 * self.weight_tiles + 56 > min(255, 65_536 // threads)
        return (self.depth * self.weight_tiles * 16 + leaves * sums * 4) * threads

    @property
    def least_stages(self) -> int:
        """One that is read, and as many more as the copies take that are under way: 3 or 4."""
        return 2 + -(-self.depth // self.chunk_steps)

    def shared_bytes(self, stages: int) -> int:
        """Bytes of a block."""
        return self.own_bytes + stages * self.stage_bytes

    def stages(self, columns: int, gpu: Capacity) -> int:
        """Stages of the ring: as many as K has chunks, which are copied once, or four or three."""
        room, chunks = (gpu.shared_limit - self.own_bytes) // self.stage_bytes, -(-columns // (self.chunk_steps * STEP))
        return chunks if chunks <= room else max(self.least_stages, min(4, room))

    def grid(self, rows: int, gpu: Capacity) -> tuple[int, int, int]:
        """Blocks that walk over a matrix's tiles."""
        return min(-(-rows // self.weight_rows), gpu.multiprocessors), 1, 1

    def clocks(self, rows: int, columns: int, gpu: Capacity) -> float:
        """Clocks of a matrix [rows, columns]."""
        tiles, steps = -(-rows // self.weight_rows), -(-columns // STEP)
        blocks = min(tiles, gpu.multiprocessors)
        stay = self.stages(columns, gpu) * self.chunk_steps >= steps
        weights, activations = (count * STEP * 2 for count in (self.weight_rows, self.rows))
        # Weights are written and read once.
        shared = self.warps * activations + 2 * weights + (0 if stay else activations)
        products = self.rows * self.weight_rows * STEP * -(-self.warps // 4) * 4 / self.warps  # four schedulers
        alone = (shared / _SHARED + products / gpu.speeds[1]) * _DIRECT_ALONE
        few_warps = self.warps <= 4
        alone *= _FEW_WARPS if few_warps and self.rows > 16 else 1
        streamed = _streamed(gpu, blocks, weights, 0 if stay else activations, _DIRECT_STREAMED)
        streamed = max(streamed, _LATENCY / self.depth)
        step = (1 - _DIRECT_APART) * max(streamed, alone) + _DIRECT_APART * (streamed + alone)
        own_tiles = -(-tiles // blocks)
        unhidden = _END_ALONE * (own_tiles - 1) if few_warps else 0
        return _STARTS + own_tiles * (steps * step + _END_LEFT * _ENDS) + (1 + unhidden) * _ENDS


@dataclass(frozen=True)
class GroupTiling:
    """Tiles of the kernels whose four warps have a group of slices of K each: `weight_tiles` times 8 weight rows, times
    `rows` of activations, 16 to 64; `depth` steps of each warp find room, `blocks` of them are on a multiprocessor."""

    rows: int
    weight_tiles: int
    depth: int
    blocks: int = 1
    warps: ClassVar[int] = 4

    @property
    def weight_rows(self) -> int:
        """Weight rows of a tile."""
        return 8 * self.weight_tiles

    @property
    def step_bytes(self) -> tuple[int, int]:
        """Bytes of weights and of activations, a step of each warp."""
        return self.warps * self.weight_rows * STEP * 2, self.warps * self.rows * STEP * 2

    def shared_bytes(self, stages: int) -> int:
        """Bytes of a block: the ring, and the sums of all groups."""
        return stages * sum(self.step_bytes) + self.warps * self.rows * self.weight_rows * 4

    def stages(self, columns: int, gpu: Capacity) -> int:
        """Stages of the ring, whatever K and the GPU are."""
        return self.depth

    def grid(self, rows: int, gpu: Capacity) -> tuple[int, int, int]:
        """Blocks that walk over a matrix's tiles."""
        return min(-(-rows // self.weight_rows), self.blocks * gpu.multiprocessors), 1, 1

    def clocks(self, rows: int, columns: int, gpu: Capacity) -> float:
        """Clocks of a matrix [rows, columns]."""
        tiles, (weights, activations) = -(-rows // self.weight_rows), self.step_bytes
        blocks, copied = self.grid(rows, gpu)[0], weights + activations
        beside = -(-blocks // gpu.multiprocessors)
        products = self.warps * self.rows * self.weight_rows * STEP
        # All is written to shared memory and read once.
        own = (beside * each for each in (weights, activations, 2 * copied, products))
        step = _overlapped(gpu, min(blocks, gpu.multiprocessors), *own)
        step = max(step, copied * blocks / _CACHED) / (_DEEP if self.depth > 8 else 1)
        step = max(step, _LATENCY / (self.depth - 1))
        clocks = _STARTS + -(-tiles // blocks) * (4 * slice_steps(columns) * step + _GROUPS_JOIN) + _ENDS
        if not gpu.has_clusters:
            return clocks
        early = _EARLY * min(1, blocks / gpu.multiprocessors)
        return clocks - early + (_NO_ROOM if self.shared_bytes(self.depth) > _beside(gpu) else 0)


AnyTiling = Tiling | DirectTiling | GroupTiling
_Choice = TypeVar("_Choice")


def _beside(gpu: Capacity) -> int:
    """Bytes of shared memory that a block may have beside another one."""
    return gpu.shared_limit // 2 - 1024


def slices_end_every(columns: int) -> int:
    """Slices of direct kernels end behind as many steps, or a multiple of it."""
    return gcd(4, slice_steps(columns))


def _overlapped(
    gpu: Capacity, blocks: int, weights: float, activations: float, shared: float, products: float
) -> float:
    """Clocks of a block that takes so many bytes of weights from memory and of activations from the cache, reads and
    writes so many bytes of shared memory and multiplies and adds so often, while `blocks` multiprocessors do so."""
    spans = _streamed(gpu, blocks, weights, activations), shared / _SHARED, products / gpu.speeds[1]
    return (1 - _APART) * max(spans) + _APART * sum(spans)  # they overlap, but not wholly


def _streamed(gpu: Capacity, blocks: int, weights: float, activations: float, most: float = _STREAMED) -> float:
    """Clocks in which a block gets so many bytes of weights from memory, and of activations from the cache, `most` a
    clock."""
    return max(weights * blocks / gpu.speeds[0], (weights + activations) / most)


@cache
def few_rows_clocks(count: int, rows: int, columns: int, normed: bool, gpu: Capacity) -> float:
    """Clocks of `count` rows of activations times a matrix [rows, columns] by the kernels of few rows, which norm
    inside where `normed`: each multiprocessor for itself."""
    weights = 2 * rows * columns / gpu.multiprocessors
    # Weights are written and read once; with each 8 or 16 rows of them, activations are read, and written if streamed.
    activations = weights * count / 8
    norms = _NORMED * count * columns + (0 if gpu.has_clusters else _NORM_STARTS) if normed else 0
    # Without the next kernel's blocks beside them, nothing hides that activations are read.
    hidden, alone = (activations, 0) if gpu.has_clusters else (0, activations * (count - 1) / count)
    step = _overlapped(gpu, gpu.multiprocessors, weights, 0, 2 * weights + hidden, 0)
    return _STARTS + norms + step + alone / _SHARED + _ENDS


@cache
def fastest_tiling(
    count: int, rows: int, columns: int, gpu: Capacity, gated: bool = False, adapted: bool = False
) -> AnyTiling:
    """The fastest tiling for `count` rows of activations times a matrix [rows, columns]; `gated`: of gates and ups;
    `adapted`: with LoRA adapters, which direct kernels do not apply."""

    def clocks(tiling: AnyTiling, gpu: Capacity) -> float:
        return tiling.clocks(rows, columns, gpu)

    direct = [] if adapted else direct_tilings(count, gpu, gated)
    return fastest([*direct, *tilings(count, gpu, gated, adapted)], clocks, gpu)


def fastest(choices: Sequence[_Choice], clocks: Callable[[_Choice, Capacity], float], gpu: Capacity) -> _Choice:
    """The fastest of some choices, by their clocks on a GPU. Without clusters, of those that are as fast, the one that
    would be the fastest with more memory bandwidth: where memory hides the rest, it leaves the most to hide."""
    if len(choices) == 1:
        return choices[0]
    least = min(clocks(choice, gpu) for choice in choices)
    as_fast = [choice for choice in choices if clocks(choice, gpu) <= least * (1 if gpu.has_clusters else _AS_FAST)]
    return min(as_fast, key=lambda choice: clocks(choice, replace(gpu, architecture="sm_90")))


def direct_tilings(count: int, gpu: Capacity, gated: bool = False) -> list[DirectTiling | GroupTiling]:
    """All that take `count` rows of activations and whose threads copy what they multiply: where a GPU has a tensor
    memory accelerator, those that were found fast on many multiprocessors; else all, but those that do not share K on
    few multiprocessors alone."""
    rows = -(-count // 16) * 16
    if gpu.has_clusters:
        fast = () if gpu.is_small else (_OVERLAPPING_GATED if gated else _OVERLAPPING).get(rows, ())
        groups = [GroupTiling(rows, *sizes) for sizes in fast]
        return [tiling for tiling in groups if tiling.shared_bytes(tiling.depth) <= gpu.shared_limit]
    found: list[DirectTiling | GroupTiling] = []
    for weight_tiles, warps in ((2, 4), (2, 8), (4, 4), (3, 8), (4, 6), (4, 8)):
        depths = (8, 6, 4, 3) if weight_tiles * warps <= 16 else (4, 3)
        for depth, chunk_steps in product(depths, (16, 8, 4)):
            tiling = DirectTiling(rows, weight_tiles, warps, depth, chunk_steps)
            if not gpu.is_small or (gated and weight_tiles % 2):
                continue
            if tiling.least_stages <= 4 and tiling.shared_bytes(tiling.least_stages) <= gpu.shared_limit:
                found.append(tiling)
                break
    for weight_tiles in (2, 4) if gated else (1, 2, 3, 4):
        shared = (GroupTiling(rows, weight_tiles, depth) for depth in (8, 6, 5, 4, 3))
        found += [tiling for tiling in shared if tiling.shared_bytes(tiling.depth) <= gpu.shared_limit][:1]
    return found


def tilings(count: int, gpu: Capacity, gated: bool = False, adapted: bool = False) -> list[Tiling]:
    """All that take `count` rows of activations in the shared memory that a block gets; at least one."""
    rows = 16 if count <= 16 else 32 if count <= 32 else 64
    splits = (1, SLICES // 4) if gpu.has_clusters else (1,)
    every = [Tiling(rows, weight_rows, own) for weight_rows in (64, 96, 128, 160, 192, 256) for own in splits]
    possible = [
        tiling
        for tiling in every
        if tiling.weight_rows * tiling.row_warps % (16 * WARPS if gated else 8 * WARPS) == 0
        and tiling.row_tiles * tiling.column_tiles <= 16
        and (tiling.splits == 1 or 2 * tiling.area_bytes <= tiling.stages(gpu, adapted) * tiling.stage_bytes)
    ]
    return [tiling for tiling in possible if tiling.shared_bytes(3, adapted) <= gpu.shared_limit] or possible[:1]
