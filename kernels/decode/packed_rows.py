"""The kernels of few rows over packed weights: how they work, and the shared memory of their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from edgellm.kernels.decode.arguments import CUDA_TYPES, decode_kernel
from edgellm.kernels.decode.contract import MAX_TILED_ROWS, SLICES, STEP, padded_columns, slice_steps
from edgellm.kernels.decode.geometries import NORM_SUMS_BYTES, block_share
from edgellm.kernels.decode.packed_tiles import is_plain, packed_tiling
from edgellm.kernels.decode.tilings import Capacity, slices_end_every
from edgellm.kernels.errors import KernelError
from edgellm.kernels.fitted import fitted
from edgellm.kernels.launch import Kernel
from edgellm.kernels.quantization.code_words import BLOCK_COLUMNS, BLOCK_ROWS
from edgellm.kernels.quantization.device_layout import DeviceLayout

#: The most rows of activations, and of those whose norms are inside a layer: each block norms all of them.
MAX_PACKED_ROWS, MAX_NORMED_ROWS = 8, 2
#: What `fitted.json` says of each.
_FITTED = "packed layers of few rows"
_OVERLAPPING, _ALONE, _BY_TILES, _EIGHT_TILES, _MORE_TILES, _DEEP_TILES, _FINE_BYTES, _EXPERTS = fitted(
    _FITTED, *("overlapping", "alone", "by_tiles", "eight_tiles", "more_tiles", "deep_tiles", "fine_bytes", "experts")
)
_K_EXPERTS, _K_TYPES = fitted(_FITTED, "k_experts", "k_types")
#: By rows and columns, of plain layouts where there are many multiprocessors.
_MEASURED = {tuple(each[:2]): each[2:] for each in fitted(_FITTED, "measured")[0]}
_MOST_PLAIN_ROWS, _APART, _FILLING, _FILLING_ALONE = fitted(
    _FITTED, *("most_plain_rows", "apart", "filling", "filling_alone")
)


@dataclass(frozen=True)
class PackedRows:
    """How blocks of 16 warps work.

    `sharing` (16, 8 or 4) share K of a tile of `weight_tiles` times 16 weight rows; each has room for `depth` blocks of
    weights of it in shared memory; 0: they come straight into registers. Sums of `at_once` tiles are added at once.
    `blocks` are on a multiprocessor, where `resident` have registers. `one`: a row of activations alone. `late`: the
    next kernel starts when all weights are under way. `bulk`: blocks of weights are copied at once where all tiles and
    slices are whole.
    """

    one: bool
    sharing: int
    weight_tiles: int
    depth: int
    at_once: int
    blocks: int
    resident: int = 2
    late: bool = False
    bulk: bool = False

    def shared_bytes(self, block_bytes: int, columns: int, batch: int, normed: bool) -> int:
        """Bytes of a block. `block_bytes`: of `DeviceLayout`."""
        rows = 1 if self.one else 8
        weights = SLICES * self.depth * (2 * self.weight_tiles * block_bytes + 8 * self.bulk)
        sums = 2 * SLICES * self.at_once * rows * (16 * self.weight_tiles + 4) * 4
        staged = SLICES * slice_steps(columns) * 64
        return weights + sums + staged * batch + (NORM_SUMS_BYTES + staged if normed else 0)

    def smaller(self) -> Iterator[PackedRows]:
        """The same in less and less memory: sums of fewer tiles at once, then shorter rings; at last one block."""
        way = self
        while way.at_once >= SLICES // self.sharing:
            yield way
            at_once, way = way.at_once, replace(way, at_once=way.at_once // 2)
        yield from (replace(self, at_once=at_once, depth=depth) for depth in range(self.depth - 1, 1, -1))
        yield replace(self, blocks=1)

    def grid(self, rows: int, gpu: Capacity) -> tuple[int, int, int]:
        """Blocks that walk over a matrix's tiles."""
        return min(-(-rows // (2 * self.weight_tiles * BLOCK_ROWS)), self.blocks * gpu.multiprocessors), 1, 1


def packed_rows_kernel(
    name: str,
    dtype: str,
    way: PackedRows,
    layout: DeviceLayout,
    macros: tuple[tuple[str, int | str], ...],
    file: str = "packed_rows.cu",
) -> Kernel:
    """A kernel of packed_rows.cu, or of another file by its device code; `macros` are those of the kernels of few
    rows."""
    sizes = way.sharing, way.weight_tiles, way.depth, way.late, way.bulk, way.at_once, slices_end_every(layout.columns)
    whole = layout.rows % (2 * way.weight_tiles * BLOCK_ROWS) == 0 and layout.columns == padded_columns(layout.columns)
    brief = way.sharing == SLICES and slice_steps(layout.columns) * STEP == BLOCK_COLUMNS
    last = layout.scales, layout.mode, way.resident
    chosen = ", ".join(str(each).lower() for each in (way.one, whole, brief, *sizes, *last))
    own = (
        ("HOST_ONE_ROW_BYTES", PackedRows(True, 8, 2, 3, 4, 1, bulk=True).shared_bytes(576, 3 * 512, 1, True)),
        ("HOST_ROWS_BYTES", PackedRows(False, 4, 1, 2, 4, 1).shared_bytes(528, 3 * 512, 5, True)),
    )
    expression = f"decode::packed::{name}<{CUDA_TYPES[dtype]}, {chosen}>"
    return decode_kernel(file, expression, (*macros, *own))


def packed_refusal(batch: int, layout: DeviceLayout, shared_limit: int) -> str | None:
    """Why no kernel computes a packed layer of so many rows where blocks have so much shared memory, if none does."""
    if batch > MAX_TILED_ROWS:
        return f"packed layers take up to {MAX_TILED_ROWS} rows, not {batch}"
    gpu = Capacity(shared_limit=shared_limit)
    if packed_rows(batch, layout, gpu, normed=False) is not None:
        return None
    try:
        packed_tiling(batch, layout, gpu)
    except KernelError as error:
        return str(error)
    return None


def packed_rows(
    batch: int, layout: DeviceLayout, gpu: Capacity, normed: bool, experts_rows: int = 0
) -> PackedRows | None:
    """How a layer is computed fastest; None where blocks have not the memory, and for too many rows. `experts_rows`: of
    experts that so many rows chose, of which a block multiplies `batch`."""
    ways = packed_rows_ways(batch, layout, gpu, normed, experts_rows)
    return ways[0] if ways else None


def packed_rows_ways(
    batch: int, layout: DeviceLayout, gpu: Capacity, normed: bool, experts_rows: int = 0
) -> list[PackedRows]:
    """All that have room, the fastest first. Of one row, and on few multiprocessors, there is room for all blocks of a
    multiprocessor at once."""
    is_measured = gpu.has_clusters and not gpu.is_small and is_plain(layout) and not experts_rows
    if batch > (_MOST_PLAIN_ROWS if is_measured else MAX_PACKED_ROWS):
        return []
    sharing = {1: 4, 2: 8, 4: 16}[slices_end_every(layout.columns)]
    one, row_tiles = batch == 1, -(-layout.rows // BLOCK_ROWS)
    found = []
    forms = (
        *_filling_forms(batch, layout, gpu),
        *_experts_forms(experts_rows, sharing, layout, gpu),
        *_forms(batch, layout, gpu, experts_rows > 0),
    )

    def needed(way: PackedRows) -> int:
        return way.shared_bytes(layout.block_bytes, layout.columns, batch, normed)

    def room(way: PackedRows) -> int:
        return block_share(gpu.shared_limit, way.blocks)

    for weight_tiles, depth, blocks, resident, *more in forms:
        late, most, bulk = (*more, 0, 0, 0)[:3]
        most = most or (8 // weight_tiles if one else 2)
        tiles = -(-row_tiles // (2 * weight_tiles * blocks * gpu.multiprocessors))
        at_once = max(SLICES // sharing, min(most, 1 << (tiles - 1).bit_length()))
        way = PackedRows(one, sharing, weight_tiles, depth, at_once, blocks, resident, bool(late), bool(bulk))
        if (one or gpu.is_small) and way.grid(layout.rows, gpu)[0] > gpu.multiprocessors:
            way = next(each for each in way.smaller() if each.blocks == 1 or needed(each) <= room(each))
        if needed(way) <= gpu.shared_limit:
            found.append(way)
    return found


def _filling_forms(batch: int, layout: DeviceLayout, gpu: Capacity) -> tuple[tuple[int, ...], ...]:
    """What was found fast for a row on few multiprocessors: blocks that fill their shared memory, of matrices that have
    a tile for each."""
    if not gpu.is_small or batch > 1 or not is_plain(layout):
        return ()
    forms: tuple[tuple[int, ...], ...] = _FILLING if gpu.has_clusters else _FILLING_ALONE
    weight_tiles, _, blocks, *_ = forms[0]
    return forms if layout.rows >= 2 * weight_tiles * BLOCK_ROWS * blocks * gpu.multiprocessors else ()


def _experts_forms(rows: int, sharing: int, layout: DeviceLayout, gpu: Capacity) -> tuple[tuple[int, ...], ...]:
    """What was found fast for experts that `rows` chose: of 4 bits, where a warp's share of K is a block of weights."""
    share = slice_steps(layout.columns) * STEP * SLICES // sharing
    if not rows or not gpu.has_clusters or not is_plain(layout) or share != BLOCK_COLUMNS:
        return ()
    return tuple(forms[sharing == SLICES] for most, forms in _EXPERTS.items() if rows <= most)[:1]


def _k_form(layout: DeviceLayout, gpu: Capacity, of_experts: bool) -> tuple[int, ...] | None:
    """What was found fast for one row of K types where there are many multiprocessors, if anything."""
    share = slice_steps(layout.columns) // slices_end_every(layout.columns)
    if of_experts:
        return _K_EXPERTS if share == 1 else None
    fills = 3 / 4 < layout.rows / (2 * BLOCK_ROWS * gpu.multiprocessors) <= 1
    if fills and share == 2:
        return _EIGHT_TILES
    return next((tuple(each[2:]) for each in _K_TYPES if tuple(each[:2]) == (layout.rows, layout.columns)), None)


def _forms(batch: int, layout: DeviceLayout, gpu: Capacity, of_experts: bool) -> tuple[tuple[int, ...], ...]:
    """What was found fast in whole steps."""
    if not gpu.has_clusters:
        return _ALONE
    one, plain = batch == 1, is_plain(layout) and not of_experts
    tiles = -(-layout.rows // (2 * BLOCK_ROWS * gpu.multiprocessors))
    is_brief = slice_steps(layout.columns) * STEP == BLOCK_COLUMNS
    if plain and not gpu.is_small:
        if one and (measured := _MEASURED.get((layout.rows, layout.columns))) is not None:
            return measured, *_OVERLAPPING
        if batch > MAX_NORMED_ROWS and is_brief and tiles <= max(_APART):
            return _APART[next(most for most in _APART if tiles <= most)], *_OVERLAPPING
    is_known = one and not gpu.is_small and layout.kind == "levels"
    if is_known and (form := _k_form(layout, gpu, of_experts)) is not None:
        return form, *_OVERLAPPING
    share = slice_steps(layout.columns) // slices_end_every(layout.columns)  # blocks of weights, of a warp
    if not of_experts and 4 * layout.rows <= 2 * BLOCK_ROWS * gpu.multiprocessors and 2 < share <= 6:
        return (1, share, 2, 2), *_OVERLAPPING  # few blocks, whose weights all come before their kernel waits
    if not one or layout.columns != padded_columns(layout.columns):
        return _OVERLAPPING
    if tiles > 8:
        return _MORE_TILES, *_OVERLAPPING
    is_small = 4 * layout.rows <= 3 * 2 * BLOCK_ROWS * gpu.multiprocessors
    if plain and is_small and share > 2:
        return _DEEP_TILES, *_OVERLAPPING
    is_fine = layout.scales > 1
    if not is_brief and is_fine and layout.format.bits == 8:
        return _FINE_BYTES, *_OVERLAPPING
    if not is_brief or tiles == 2 or (is_fine and tiles not in _BY_TILES):
        return _OVERLAPPING
    return _BY_TILES.get(tiles, _EIGHT_TILES), *_OVERLAPPING
