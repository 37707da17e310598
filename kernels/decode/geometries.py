"""How the kernels of few rows work: which of them serve a layer on a GPU, and the shared memory of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgellm.kernels.decode.arguments import THREADS
from edgellm.kernels.decode.contract import SLICES, STEP, padded_columns, slice_steps
from edgellm.kernels.decode.tilings import Capacity

#: Bytes of shared memory that CUDA takes of each block.
_RESERVED = 1024
#: Shared memory of a norm's sums in norm.cu.
NORM_SUMS_BYTES = 8 * (SLICES + 1) * 4


@dataclass(frozen=True)
class Geometry:
    """How linear.cu's kernels of one width work.

    `rows` is the most rows of activations; a thread has `depth` copies of 16 bytes of weights in flight; `twice`: units
    of `linear_residual` are 16 weight rows, not 8.
    """

    name: str
    rows: int
    depth: int
    blocks_per_multiprocessor: int
    twice: bool

    @property
    def residual_tiles(self) -> int:
        """Tiles of 8 weight rows in a unit of `linear_residual`."""
        return 2 if self.twice else 1

    def ring_bytes(self, tiles: int, ranks: int = 0) -> int:
        """Shared memory of the ring, partial sums, and what LoRA adapters of so many `padded_ranks` need, for units of
        `tiles` times 8 weight rows: for each place the sums that it adds and its rows of B, twice."""
        sums = tiles * self.rows * 8 * 4
        return self.depth * THREADS * 16 + 2 * SLICES * sums + 2 * (ranks // 16 * sums + ranks * tiles * 16)

    def norm_bytes(self, tiles: int, parts: int, batch: int, columns: int, ranks: int = 0) -> int:
        """The same with what is normalized: its activations, its norms' weights and the sums of `parts` norms."""
        slices = SLICES * slice_steps(columns)
        own = parts * self.rows * (SLICES + 1) * 4 + slices * STEP * 2 * (1 + batch)
        return self.ring_bytes(tiles, ranks) + own

    def staged_bytes(self, batch: int, columns: int, ranks: int = 0) -> int:
        """Bytes of `linear_residual` where its activations are staged."""
        return self.ring_bytes(self.residual_tiles, ranks) + SLICES * slice_steps(columns) * STEP * 2 * batch

    def streamed_bytes(self, batch: int, ranks: int = 0) -> int:
        """The same with a ring of activations."""
        ring = self.ring_bytes(self.residual_tiles, ranks)
        return ring + self.depth // self.residual_tiles * SLICES * batch * STEP * 2


NARROW = Geometry("Narrow", 8, 4, 2, False)
#: For `linear_residual`, whose rows are the longest: more of them is there before the input is.
DEEP = Geometry("Deep", 8, 8, 2, False)
#: The same in pieces of whole lines of memory, of rows that are staged and without adapters, on few multiprocessors.
LINES = Geometry("Lines", 8, 8, 2, False)
WIDE = Geometry("Wide", 16, 8, 1, True)
#: More rows are served by the wide kernels, where the GPU has the shared memory.
_NARROW_ROWS = 2


def norm_linear_shared_bytes(
    rows: int, widths: Sequence[int], shared_limit: int, gated: bool = False, ranks: int = 0
) -> int:
    """Shared memory that a block of `norm_linear` or `norm_gate_up` needs on such a GPU: inputs of such widths, LoRA
    adapters of so many `padded_ranks`."""
    geometry = norm_geometry(rows, widths, Capacity(shared_limit=shared_limit), gated, ranks)
    return geometry.norm_bytes(1 + gated, len(widths), rows, sum(widths), ranks)


def linear_residual_shared_bytes(rows: int, shared_limit: int, ranks: int = 0) -> int:
    """The same of `linear_residual`, whose input comes with the weights, however wide it is."""
    return residual_geometry(rows, shared_limit, ranks).streamed_bytes(rows, ranks)


def norm_shared_bytes(columns: int, arranged: bool = False) -> int:
    """The same of `norm`; `arranged`: of rows that are `InputPermutation`."""
    return NORM_SUMS_BYTES + 2 * padded_columns(columns) * (1 + arranged)


def norm_geometry(rows: int, widths: Sequence[int], gpu: Capacity, gated: bool, ranks: int) -> Geometry:
    """The kernels that norm such inputs and multiply them."""

    def needed(geometry: Geometry) -> int:
        return geometry.norm_bytes(1 + gated, len(widths), rows, sum(widths), ranks)

    if len(widths) > 1:
        return WIDE
    return LINES if takes_lines(rows, needed(LINES), gpu, ranks) else _geometry(rows, needed, gpu.shared_limit)


def residual_geometry(rows: int, shared_limit: int, ranks: int) -> Geometry:
    """Those of `linear_residual`, where its input comes with the weights."""
    return _geometry(rows, lambda geometry: geometry.streamed_bytes(rows, ranks), shared_limit)


def _geometry(rows: int, needed: Callable[[Geometry], int], shared_limit: int) -> Geometry:
    """The kernels that serve so many rows: the wide ones for more than a few, if a block gets the memory they need."""
    if rows <= _NARROW_ROWS or (rows <= NARROW.rows and needed(WIDE) > shared_limit):
        return NARROW
    return WIDE


def staged_geometry(batch: int, columns: int, gpu: Capacity, ranks: int = 0) -> Geometry | None:
    """Those of `linear_residual`, where it stages so many rows: with the deep ring if that leaves room for as many."""
    limits = (DEEP, block_share(gpu.shared_limit, DEEP.blocks_per_multiprocessor)), (NARROW, gpu.shared_limit)
    if batch > _NARROW_ROWS:
        return None
    if takes_lines(batch, LINES.staged_bytes(batch, columns, ranks), gpu, ranks):
        return LINES
    return next((each for each, limit in limits if each.staged_bytes(batch, columns, ranks) <= limit), None)


def takes_lines(batch: int, needed: int, gpu: Capacity, ranks: int = 0) -> bool:
    """Whether so many rows are multiplied by `LINES`, whose blocks need so much shared memory."""
    few = batch <= _NARROW_ROWS and not ranks and gpu.is_small
    return few and needed <= block_share(gpu.shared_limit, LINES.blocks_per_multiprocessor)


def block_share(shared_limit: int, blocks: int) -> int:
    """Shared memory of a block where so many are on a multiprocessor, which has what a block may have alone."""
    return (shared_limit + _RESERVED) // blocks - _RESERVED
