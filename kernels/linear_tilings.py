"""How the linear layers of 17 to 64 rows of activations are spread over a GPU: which tiles, and who shares K.

What decides is time alone: every choice gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

_WARPS, _THREADS = 8, 256
_STEP_COLUMNS, _STEP_BYTES, _SLICES, _GROUPS = 32, 64, 16, 4
_MOST_STAGES = 8
#: What a block costs beside its streaming, in bytes that it could have streamed: its start, and adding up its sums.
_BLOCK_BYTES = 64 << 10


@dataclass(frozen=True)
class Tiling:
    """Tiles of `weight_rows` times `rows` (32 or 64) of activations.

    K is shared by `teams` of warps in a block and by `splits` blocks of a cluster.
    """

    rows: int
    teams: int
    splits: int

    @property
    def weight_rows(self) -> int:
        """Of a tile: 32 of each warp of a team."""
        return 32 * _WARPS // self.teams

    def shared_bytes(self, stages: int) -> int:
        """The rings of the teams, which also take sums of theirs, and more sums where a team leaves two of each."""
        sums = self.rows * (self.weight_rows + 8) * 4
        ring = max(stages * (self.rows + self.weight_rows) * _STEP_BYTES, sums)
        parts = self.teams * self.splits
        leaves_more = (_SLICES if parts > _GROUPS else _GROUPS) > parts
        return self.teams * (ring + (sums if leaves_more else 0))

    def stages_within(self, shared_limit: int) -> int:
        """How many stages of a ring fit, up to 8; 2 where not even these do."""
        fitting = (stages for stages in range(_MOST_STAGES, 2, -1) if self.shared_bytes(stages) <= shared_limit)
        return next(fitting, 2)

    def blocks(self, rows: int) -> int:
        """Of a matrix of `rows`."""
        return -(-rows // self.weight_rows) * self.splits


def fastest_tiling(
    count: int, rows: int, columns: int, multiprocessors: int, shared_limit: int, has_clusters: bool
) -> Tiling:
    """For `count` rows of activations times a matrix [rows, columns]: all blocks stream at the same speed."""

    def cost(tiling: Tiling) -> int:
        waves = -(-tiling.blocks(rows) // multiprocessors)
        return waves * ((tiling.weight_rows + tiling.rows) * columns * 2 // tiling.splits + _BLOCK_BYTES)

    return min(tilings(count, shared_limit, has_clusters), key=cost)


def tilings(count: int, shared_limit: int, has_clusters: bool) -> list[Tiling]:
    """All that take `count` rows of activations in the shared memory that a block gets; at least one."""
    rows = 32 if count <= 32 else 64
    splits = (1, 2, 4) if has_clusters else (1,)
    every = [Tiling(rows, teams, own) for teams in (4, 2) for own in splits]
    return [tiling for tiling in every if tiling.shared_bytes(2) <= shared_limit] or every[:1]
