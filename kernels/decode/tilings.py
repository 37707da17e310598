"""How the linear layers of up to 64 rows of activations are spread over a GPU: which tiles, and who shares K.

What decides is time alone: every choice gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.kernels.decode.contract import SLICES

#: Bytes of a row in a step, and the most stages of a ring, as the device takes them.
STEP_BYTES, MOST_STAGES = 64, 8
_GROUPS = 4
#: Of tiles (rows, weight rows): microseconds that a block takes to start and to end, and for 2048 columns, on an H200
#: whose other multiprocessors are idle.
_MICROSECONDS = {(32, 64): (2.6, 6.4), (32, 128): (3.6, 10.3), (64, 64): (4.4, 12.8), (64, 128): (5.7, 16.0)}
#: Microseconds that blocks of a cluster wait for each other. They share a part of the GPU, of which some
#: multiprocessors are left over.
_MEETING, _OF_CLUSTERS = 0.5, 0.85


@dataclass(frozen=True)
class TiledGpu:
    """What decides of a GPU: its multiprocessors, the shared memory of a block in bytes, whether it has clusters."""

    multiprocessors: int
    shared_limit: int
    has_clusters: bool


@dataclass(frozen=True)
class Tiling:
    """Tiles of `weight_rows` (64 or 128) times `rows` (32 or 64) of activations.

    K is shared by teams of warps in a block and by `splits` blocks of a cluster.
    """

    rows: int
    weight_rows: int
    splits: int

    @property
    def teams(self) -> int:
        """Of warps in a block."""
        return 4 if (self.rows, self.weight_rows) == (32, 64) else 2

    @property
    def resident(self) -> int:
        """Blocks that the registers of a multiprocessor hold."""
        return 1 if (self.rows, self.weight_rows) == (64, 128) else 2

    def shared_bytes(self, stages: int, gpu: TiledGpu) -> int:
        """Of the teams' rings, which also take sums of theirs, of sums where a team leaves more, and of barriers."""
        sums = self.rows * (self.weight_rows + 4) * 4
        stage_steps = 2 if gpu.has_clusters else 1
        ring = max(stages * stage_steps * (self.rows + self.weight_rows) * STEP_BYTES, sums)
        parts = self.teams * self.splits
        leaves_two = (SLICES if parts > _GROUPS else _GROUPS) > parts
        return self.teams * (ring + (sums if leaves_two else 0) + 8 * MOST_STAGES)

    def stages(self, gpu: TiledGpu) -> int:
        """Of a ring: as many as fit (2 at least), beside a second block if registers allow one and 2 stages fit so."""
        half = gpu.shared_limit // 2 - 1024
        beside = self.resident > 1 and self.shared_bytes(2, gpu) <= half
        limit = half if beside else gpu.shared_limit
        fitting = (stages for stages in range(MOST_STAGES, 2, -1) if self.shared_bytes(stages, gpu) <= limit)
        return next(fitting, 2)

    def blocks(self, rows: int) -> int:
        """Of a matrix of `rows`."""
        return -(-rows // self.weight_rows) * self.splits


def fastest_tiling(count: int, rows: int, columns: int, gpu: TiledGpu) -> Tiling:
    """For `count` rows of activations times a matrix [rows, columns]."""

    def cost(tiling: Tiling) -> float:
        once, streaming = _MICROSECONDS[tiling.rows, tiling.weight_rows]
        once, streaming = once + _MEETING * (tiling.splits > 1), streaming * columns / 2048 / tiling.splits
        if tiling.rows == 32:  # memory is what limits: a second block of a multiprocessor takes nothing away
            return once + max(1, tiling.blocks(rows) / gpu.multiprocessors) * streaming
        places = int(gpu.multiprocessors * (_OF_CLUSTERS if tiling.splits > 2 else 1))
        return -(-tiling.blocks(rows) // places) * (once + streaming)

    return min(tilings(count, gpu), key=cost)


def tilings(count: int, gpu: TiledGpu) -> list[Tiling]:
    """All that take `count` rows of activations in the shared memory that a block gets; at least one."""
    rows = 32 if count <= 32 else 64
    splits = (1, 2, 4) if gpu.has_clusters else (1,)
    every = [Tiling(rows, weight_rows, own) for weight_rows in (64, 128) for own in splits]
    return [tiling for tiling in every if tiling.shared_bytes(2, gpu) <= gpu.shared_limit] or every[:1]
