"""How attention of decode, verify and draft steps shares its work on the GPU: the geometries of its blocks, which of
them is the fastest, what memory they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import ceil
from typing import NamedTuple

from edgellm.kernels.decode.contract import MAX_TOKENS
from edgellm.kernels.fitted import fitted
from edgellm.kernels.launch import KernelModule

#: Keys of a tile, and rows of an instruction.
KEY_TILE, ROWS = 64, 16
#: Warps that can share a tile, each with the sums of a quarter of the columns; larger heads than these need them.
SHARED_TILE_WARPS, MOST_OF_ONE_WARP = 4, 128
#: Columns of a part of a head: of larger ones each block has the values of one.
_PART = 256
#: The most warps of a block: as many as have the registers that they need.
MOST_WARPS = 8
#: The most blocks of a cluster that every GPU with clusters takes.
_MOST_IN_CLUSTER = 8
#: More rows than these leave no states in global memory: their warps have enough to do without sharing the keys. Of
#: large heads, where models have few key-value heads, they do if the states are no more float32 values than these.
_MOST_ROWS_IN_MEMORY, _MOST_PARTIALS = 16, 1 << 23
#: Bytes of a block's own variables: of the new tokens that each of its tokens sees, and how many keys it has.
TABLES_BYTES = MAX_TOKENS * (MAX_TOKENS + 4) + 4
#: Keys that a sequence is expected to have, where its capacity has more.
_USUAL_KEYS = 576
#: Blocks that share spans, and slots.
_POWERS = (1, 2, 4, 8, 16, 32, 64)
#: Multiprocessors that reach each other's memory.
_IN_REACH = 16
#: What `fitted.json` says of each.
_FITTED = "attention of few rows"
_BLOCK, _WARP, _HEADS, _NEW = fitted(_FITTED, "block", "warp", "heads", "new")
_MERGE, _MERGE_CLUSTER, _MERGE_MEMORY = fitted(_FITTED, "merge", "merge_cluster", "merge_memory")
_TILE, _TILE_64, _TILE_WORK, _WAIT, _WAIT_AHEAD = fitted(_FITTED, "tile", "tile_64", "tile_work", "wait", "wait_ahead")
_TELL, _IN_TURN, _NO_ROOM, _IDLE, _IDLE_WARP = fitted(_FITTED, "tell", "in_turn", "no_room", "idle", "idle_warp")
_ONE_ROW = fitted(_FITTED, "one_row")[0]


class AttentionShape(NamedTuple):
    """What attention works on: new tokens of `batch` sequences, heads of `size` elements, rows of the caches.

    `int8`: the rows are, and each has a scale. With a `window` (0: none) tokens see so many of them, and they are a
    ring.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    size: int
    kv_rows: int
    int8: bool = False
    window: int = 0

    @property
    def parts(self) -> int:
        """Parts of a head's columns, each of which has blocks of its own."""
        return -(-self.size // _PART)

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.heads // self.kv_heads

    @property
    def tile_tokens(self) -> int:
        """Tokens whose query heads are the 16 rows of an instruction, or fewer."""
        return ROWS // self.group

    @property
    def span_bits(self) -> int:
        """A token's keys are divided into 2 to this power spans, at most: by the model alone, as bits depend on it."""
        return max(16, min(64, 256 // self.kv_heads)).bit_length() - 1

    @property
    def window_bits(self) -> int:
        """Spans of a window have 2 to this power tiles: by the model alone, so that there are no more than otherwise,
        wherever in a span a window begins and however many new tokens stand behind it."""
        tiles = -(-(self.window + MAX_TOKENS) // KEY_TILE) + 1
        return next(bits for bits in range(32) if (tiles - 1 >> bits) + 2 <= 1 << self.span_bits)

    @property
    def most_keys(self) -> int:
        """The most keys that a sequence can have, those before its window in the same span included."""
        span = KEY_TILE << self.window_bits
        return self.window + span + self.tokens if self.window else self.kv_rows

    @property
    def has_unfinished(self) -> bool:
        """Whether spans may have several tiles."""
        return self.window_bits > 0 if self.window else self.kv_rows > KEY_TILE << self.span_bits

    @property
    def spans(self) -> int:
        """The most that there can be of a sequence."""
        if self.window:
            return -(-self.most_keys // (KEY_TILE << self.window_bits))
        return min(-(-self.kv_rows // KEY_TILE), 1 << self.span_bits)

    @property
    def state(self) -> int:
        """float32 values that a span leaves of a row."""
        return self.size + 4

    @property
    def leaves_partials(self) -> bool:
        """Whether blocks may share the spans through global memory."""
        rows = self.batch * self.tokens
        is_little = self.size > MOST_OF_ONE_WARP and rows * self.heads * self.spans * self.state <= _MOST_PARTIALS
        return rows <= _MOST_ROWS_IN_MEMORY or is_little


@dataclass(frozen=True)
class AttentionGeometry:
    """How attention.cu's blocks share the work, on which no bit of a result depends.

    A block has `row_tiles` of 16 rows (tokens times query heads of a key-value head), and `slots` spans of keys at
    once; each pair of them is a warp's, or that of `tile_warps` (4) that share it. `stages` (1 to 3) tiles of keys of
    each slot have room in memory. `splits` blocks share the spans, as a cluster or through global memory. Slots and
    splits are powers of two. `in_turn`: new keys, a tile's keys and its values have the same memory, one after the
    other, in blocks of one slot, row tile and stage whose tile four warps share. Else all of a tile come at once, also
    both parts of the keys of a head in two parts.
    """

    splits: int
    slots: int
    row_tiles: int
    stages: int
    in_cluster: bool = False
    tile_warps: int = 1
    in_turn: bool = False

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.slots * self.row_tiles * self.tile_warps

    @property
    def shares(self) -> bool:
        """Whether several warps have spans of a row."""
        return self.splits * self.slots > 1

    def shared_bytes(self, shape: AttentionShape) -> int:
        """Shared memory of a block, beside its own variables."""
        ring, queries, steps = self.slots * self.stages * KEY_TILE, self.row_tiles * ROWS, -(-shape.size // 16)
        row, query = 16 * (steps // shape.parts * (1 if shape.int8 else 2) | 1), 16 * (2 * steps | 1)
        new_rows = -(-shape.tokens // 16) * 16
        scales = 2 * (ring + new_rows) if shape.int8 else 0
        new_scores = queries * (new_rows + 4)
        unfinished = self.warps * ROWS * shape.state if shape.has_unfinished else 0
        if self.tile_warps > 1:  # unfinished sums are in registers, scores are told
            unfinished = self.slots * self.row_tiles * ROWS * KEY_TILE
        floats = scales + new_scores + unfinished + self._own_states(shape) * shape.state
        rows = (1 if self.in_turn else 1 + shape.parts) * (ring + shape.tokens)
        return rows * row + queries * query + 4 * floats

    def _own_states(self, shape: AttentionShape) -> int:
        """States of rows that a block merges, by how many blocks share the spans that there are."""
        if not self.shares or (self.splits > 1 and not self.in_cluster):
            return 0
        rows = min(shape.tokens, self.row_tiles * shape.tile_tokens) * shape.group

        def states(active: int) -> int:
            spans = shape.spans if active == self.splits else min(shape.spans, active * self.slots + 1)
            return -(-rows // (1 << active.bit_length() - 1)) * spans

        return max(map(states, range(1, self.splits + 1)))

    def fits(self, shape: AttentionShape, shared_limit: int) -> bool:
        """Whether a block gets the warps and the memory that it needs, and has rows in turn only where it can."""
        alone = (self.slots, self.row_tiles, self.stages, self.tile_warps) == (1, 1, 1, SHARED_TILE_WARPS)
        if self.in_turn and not (alone and _takes_turns(shape)):
            return False
        if shape.parts > 1 and not self.in_turn and (shape.int8 or self.tile_warps == 1):
            return False
        if self.in_cluster and self.splits * shape.parts > _MOST_IN_CLUSTER:
            return False
        return self.warps <= MOST_WARPS and self.shared_bytes(shape) + TABLES_BYTES <= shared_limit


def attention_geometry(shape: AttentionShape, gpu: KernelModule) -> AttentionGeometry:
    """The fastest that fits: as measured, or else by estimate; the smallest if none does."""
    capacity = gpu.multiprocessors, gpu.shared_limit, gpu.has_clusters
    return _measured(shape, *capacity) or _fastest(shape, *capacity)


def _measured(shape: AttentionShape, multiprocessors: int, limit: int, has_clusters: bool) -> AttentionGeometry | None:
    """What was measured for one row over rows of 8 bits, on a GPU with clusters that has all its blocks at once."""
    if not (has_clusters and shape.int8 and shape.batch * shape.tokens == 1 and shape.size in _ONE_ROW):
        return None
    geometry = AttentionGeometry(*_ONE_ROW[shape.size])
    fits = geometry.fits(shape, limit) and geometry.splits * shape.kv_heads <= multiprocessors
    return geometry if fits and not shape.has_unfinished else None


@cache
def _fastest(shape: AttentionShape, multiprocessors: int, limit: int, has_clusters: bool) -> AttentionGeometry:
    usual = min(shape.most_keys, _USUAL_KEYS)

    def microseconds(geometry: AttentionGeometry) -> float:
        often = _microseconds(geometry, shape, usual, multiprocessors, limit)
        return often + _microseconds(geometry, shape, shape.most_keys, multiprocessors, limit) / 8

    return min(attention_geometries(shape, limit, has_clusters) or [_smallest(shape)], key=microseconds)


def attention_geometries(shape: AttentionShape, limit: int, has_clusters: bool) -> list[AttentionGeometry]:
    """Those to choose from, which fit blocks of so much shared memory."""
    return [each for each in _every_geometry(shape, has_clusters) if each.fits(shape, limit)]


def _every_geometry(shape: AttentionShape, has_clusters: bool) -> Iterator[AttentionGeometry]:
    """Every geometry. Of large heads more blocks than a cluster has share keys through global memory, too: a tile takes
    long, and such models have few key-value heads, whose clusters would leave most of a large GPU without work."""
    in_memory = shape.spans if shape.leaves_partials else 1
    most = _MOST_IN_CLUSTER if has_clusters else min(32, in_memory)
    large = shape.size > MOST_OF_ONE_WARP
    for splits, slots, row_tiles, stages in product(_POWERS, _POWERS[:4], (1, 2, 3, 4, 6, 8), (1, 2, 3)):
        if row_tiles > -(-shape.tokens // shape.tile_tokens):
            continue
        in_cluster = has_clusters and splits > 1
        if splits <= most:
            yield AttentionGeometry(splits, slots, row_tiles, stages, in_cluster)
            if large:
                yield AttentionGeometry(splits, slots, row_tiles, stages, in_cluster, SHARED_TILE_WARPS)
        if large and 1 < splits <= in_memory and (in_cluster or splits > most):
            yield AttentionGeometry(splits, slots, row_tiles, stages, False, SHARED_TILE_WARPS)
    if _takes_turns(shape):
        for splits in (each for each in _POWERS if each <= in_memory):
            yield AttentionGeometry(splits, 1, 1, 1, False, SHARED_TILE_WARPS, True)


def _smallest(shape: AttentionShape) -> AttentionGeometry:
    """The geometry whose blocks need the least memory."""
    each = [AttentionGeometry(1, 1, 1, 1)] if shape.parts == 1 else []
    if shape.size > MOST_OF_ONE_WARP:
        each.append(AttentionGeometry(1, 1, 1, 1, False, SHARED_TILE_WARPS, _takes_turns(shape)))
    return min(each, key=lambda geometry: geometry.shared_bytes(shape))


def _takes_turns(shape: AttentionShape) -> bool:
    """Whether new keys, keys and values may have the same memory: of large heads; of int8, where they have parts."""
    return shape.size > MOST_OF_ONE_WARP and (not shape.int8 or shape.parts > 1)


def _microseconds(
    geometry: AttentionGeometry, shape: AttentionShape, keys: int, multiprocessors: int, limit: int
) -> float:
    """An estimate for a sequence of so many keys."""
    tiles, sixty_fours = -(-keys // KEY_TILE), -(-shape.size // 64)
    tile_bits = shape.window_bits if shape.window else (tiles - 1 >> shape.span_bits).bit_length()
    spans = -(-tiles >> tile_bits)
    rounds = -(-spans // (geometry.splits * geometry.slots)) << tile_bits
    active = min(geometry.splits, -(-spans // geometry.slots))
    own_tokens = min(shape.tokens, geometry.row_tiles * shape.tile_tokens)
    blocks = active * shape.parts * shape.kv_heads * shape.batch * -(-shape.tokens // own_tokens)

    memory = geometry.shared_bytes(shape) + TABLES_BYTES + 1024
    resident = max(1, min(MOST_WARPS // geometry.warps, (limit + 1024) // memory))
    together = min(-(-blocks // multiprocessors), resident)
    idle = _IDLE * blocks * (geometry.splits / active - 1) if geometry.in_cluster else 0
    no_room = _NO_ROOM * (multiprocessors // _IN_REACH) * (geometry.splits - 1) if geometry.in_cluster else 0
    waves = ceil((blocks + idle) / (multiprocessors * resident - no_room))

    items, of_warp = own_tokens * shape.group + shape.tokens, 8 / sixty_fours
    if geometry.tile_warps > 1:
        items, of_warp = items + shape.tokens, 3
    heads = ceil(items / (of_warp * geometry.warps))
    begin = _BLOCK + _WARP * geometry.warps + _HEADS * heads + _NEW * shape.tokens * sixty_fours
    tiles_at_once = together * geometry.warps // geometry.tile_warps
    alone = _TILE + _TILE_64 * sixty_fours / geometry.tile_warps + (_TELL if geometry.tile_warps > 1 else 0)
    tile = max(alone, _TILE_WORK * sixty_fours * tiles_at_once) + (_IN_TURN if geometry.in_turn else 0)
    wait = _WAIT if geometry.stages == 1 else _WAIT_AHEAD
    merge = 0.0
    if geometry.shares:
        mergers = geometry.warps * (active if geometry.in_cluster else 1)
        merge = _MERGE * sixty_fours * spans * -(-own_tokens * shape.group // mergers)
    if geometry.splits > 1:
        merge += _MERGE_CLUSTER * geometry.splits if geometry.in_cluster else _MERGE_MEMORY
    if geometry.in_cluster:
        merge += _IDLE_WARP * geometry.warps * idle / multiprocessors
    return waves * (begin + rounds * tile + (rounds - 1) * wait + merge)


def attention_shared_bytes(shape: AttentionShape) -> int:
    """Shared memory of the smallest blocks."""
    return _smallest(shape).shared_bytes(shape) + TABLES_BYTES


def attention_counters(shape: AttentionShape) -> int:
    """Number of uint32 by which blocks of an attention layer know who comes last."""
    return shape.batch * shape.tokens * shape.kv_heads * shape.parts


def attention_partials(shape: AttentionShape) -> int:
    """Number of float32 values that the blocks of an attention layer leave for the merge."""
    rows = shape.batch * shape.tokens if shape.leaves_partials else 1
    return rows * shape.heads * shape.spans * shape.state
