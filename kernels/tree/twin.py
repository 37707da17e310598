"""The draft tree's kernels in NumPy: they define what `CudaTree` computes, and run where there is no GPU.

Trees are small, so what follows their links is plain Python: a NumPy call costs as much as a dozen of its steps.
"""

from __future__ import annotations

import numpy as np

from edgellm.kernels.contracts import Contracts, rows_of
from edgellm.kernels.sampling.contract import ModelTables, StepInputs
from edgellm.kernels.sampling.twin import look_up
from edgellm.kernels.tree import contract
from edgellm.kernels.tree.contract import Block, Candidates, Expansion, Level, TreeKernels, TreeNodes
from edgellm.kernels.tree.log_softmax import LogSoftmax

_MINUS_INFINITY = np.float32(-np.inf)
_check = Contracts(TreeKernels, np.ndarray)
#: Each row is seen as this many parts, one below the other; few columns then hold all of its largest values.
_PARTS = 8


class NumpyTree:
    """See `edgellm.kernels.tree.contract.TreeKernels`; bfloat16 arrays hold its bits as uint16. No expansion waits."""

    def __init__(self) -> None:
        self._log_softmax = LogSoftmax()

    def expand_workspace_size(self, batch: int, draft_vocab_size: int, top_k: int, block_rows: int = 0) -> int:
        """0: NumPy needs none."""
        return 0

    def expand_frontier(self, level: Level, logits: np.ndarray, candidates: Candidates, expansion: Expansion) -> None:
        sizes = _check("expand_frontier", level, logits, candidates, expansion)
        tokens, scores = self._continuations(level, logits.reshape(-1, sizes["U"]), expansion)
        _write_children(level, tokens, scores, candidates)

    def expand_block(self, level: Level, logits: np.ndarray, candidates: Candidates, expansion: Expansion) -> None:
        sizes = _check("expand_block", level, logits, candidates, expansion)
        batch, places, top_k = sizes["B"], level.number, sizes["K"]
        values = np.ascontiguousarray(logits[:, 1 : places + 1]).reshape(batch * places, sizes["U"])
        found = [part.reshape(batch, places, -1) for part in self._continuations(level, values, expansion)]
        for number in range(1, places + 1):
            own, nodes = level._replace(number=number), 1 if number == 1 else top_k
            tokens, scores = (np.repeat(part[:, number - 1], nodes, axis=0) for part in found)
            _write_children(own, tokens, scores, candidates)
            for row in range(batch if level.dynamic and number < places else 0):
                _select_frontier(candidates.scores[row], own, candidates.frontiers[row, number - 1])

    def _continuations(self, level: Level, values: np.ndarray, expansion: Expansion) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities [n, width] of the likeliest continuations by the logits `values` [n, U]; -inf of
        one that does not exist, else 0 in a static tree."""
        if np.isnan(values.max()):
            values = np.where(np.isnan(values), _MINUS_INFINITY, values)
        ids, found = largest(values, level.width)
        scores = np.zeros_like(found)
        if level.dynamic:
            maxima, log_sums = self._log_softmax.normalizers(values)
            maxima = maxima[:, None]
            with np.errstate(invalid="ignore", over="ignore"):
                scores = found - maxima
                scores[found == maxima] = 0  # also where both are infinite
                scores -= log_sums[:, None]
        scores[found == _MINUS_INFINITY] = _MINUS_INFINITY
        return expansion.draft_to_target[ids], scores

    def prepare_block(self, block: Block, token_ids: np.ndarray, tables: ModelTables, inputs: StepInputs) -> None:
        sizes = _check("prepare_block", block, token_ids, tables, inputs)
        tokens = np.full((sizes["B"], sizes["T"]), block.mask_token, np.int32)
        tokens[:, :1] = token_ids
        rows = inputs.kvcache_start_index[:, None] + np.arange(sizes["T"], dtype=np.int32)
        last = rows[:, -1:] if block.sees_all else rows
        np.less_equal(np.arange(sizes["L"], dtype=np.int32), last[:, None, :, None], out=inputs.attention_mask)
        look_up(tables, tokens, rows + tables.position_offsets[:, None], inputs)

    def prepare_proposal(self, level, committed, tables, candidates, hidden, inputs, expansion):
        sizes = _check("prepare_proposal", level, committed, tables, candidates, hidden, inputs, expansion)
        number = level.number
        tokens = np.full(candidates.frontiers.shape[::2], -1, np.int32)
        for row, entries in enumerate(candidates.frontiers):
            if level.dynamic:
                _select_frontier(candidates.scores[row], level, entries[number - 1])
            parents = [_frontier_parents(frontier, i) for i, frontier in enumerate(entries[:number].tolist(), 1)]
            slots = parents[-1]
            busy = [slot for slot, parent in enumerate(slots) if parent >= 0]
            tokens[row, busy] = candidates.tokens[row, entries[number - 1, busy]]
            np.take(hidden.put_out[row], slots, axis=0, out=hidden.fed[row], mode="clip")  # idle: the first
            _write_mask(inputs.attention_mask[row, 0], int(committed[row]), _ancestor_rows(parents))
        np.add(committed, (number - 1) * sizes["K"], out=inputs.kvcache_start_index)
        places = committed.astype(np.int64) + tables.position_offsets + (number - 1)
        look_up(tables, tokens, places[:, None], inputs)

    def prepare_verification(self, level, state, tables, candidates, tree, inputs, expansion):
        sizes = _check("prepare_verification", level, state, tables, candidates, tree, inputs, expansion)
        count, start = contract.candidate_count(level.number, sizes["K"]), state.kvcache_start_index
        for row in range(sizes["B"]):
            own = rows_of(candidates, row)
            if level.dynamic:
                _select_nodes(own.scores[:count], own.selected)
            root, first = int(state.token_ids[row, 0]), int(start[row])
            ways = _build_tree(root, own, count, rows_of(tree, row))
            _write_mask(inputs.attention_mask[row, 0], first, ways)
        np.add(tree.depths, state.positions[:, None], out=tree.draw_positions)
        places = start.astype(np.int64) + tables.position_offsets
        look_up(tables, tree.tokens, places[:, None] + tree.depths, inputs)


def _write_children(level: Level, tokens: np.ndarray, scores: np.ndarray, candidates: Candidates) -> None:
    """Write the candidates of a level: `tokens` [B n, width] with log-probabilities behind each node of the frontier
    before it."""
    batch, _, top_k = candidates.frontiers.shape
    start, end = contract.level_start(level.number, top_k), contract.level_start(level.number + 1, top_k)
    if level.number == 1:
        parents = np.full(tokens.shape, -1, np.int32)
    else:
        frontier, above = candidates.frontiers[:, level.number - 2], contract.level_start(level.number - 1, top_k)
        own = np.full(frontier.shape, _MINUS_INFINITY)
        rows, slots = np.nonzero((frontier >= above) & (frontier < start))
        own[rows, slots] = candidates.scores[rows, frontier[rows, slots]]
        with np.errstate(over="ignore"):
            scores = scores + own.reshape(-1, 1)
        parents = np.repeat(frontier, level.width).reshape(tokens.shape)
    missing = ~(scores > _MINUS_INFINITY)
    if missing.any():
        tokens = np.where(missing, -1, tokens)
        scores[missing], parents[missing] = _MINUS_INFINITY, -1
    beyond = ((0, 0), (0, top_k - level.width))
    for target, source, nothing in (
        (candidates.tokens, tokens, -1),
        (candidates.scores, scores, _MINUS_INFINITY),
        (candidates.parents, parents, -1),
    ):
        whole = source if level.width == top_k else np.pad(source, beyond, constant_values=nothing)
        target[:, start:end] = whole.reshape(batch, -1)


def largest(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places and values [n, count] of the `count` largest of each row of `values` [n, V] float32, largest first.

    The lower place comes first among equals. Where V < count the rest is place 0 and value -inf. No NaN among them.
    """
    size, rows = values.shape[1], np.arange(values.shape[0])[:, None]
    if count == 1:
        places = values.argmax(axis=1)[:, None]
        return places, values[rows, places]
    if count > size:
        padding = (0, 0), (0, count - size)
        places, found = largest(values, size)
        return np.pad(places, padding), np.pad(found, padding, constant_values=-np.inf)
    few = _few_places(values, count) if size >= _PARTS * max(_PARTS, count) else None
    candidates = values if few is None else values[rows, few]
    order = np.argsort(-candidates, axis=1, kind="stable")[:, :count]
    return (order if few is None else few[rows, order]), candidates[rows, order]


def _few_places(values: np.ndarray, count: int) -> np.ndarray | None:
    """Ascending places [n, m] among which each row's `count` largest are; None where ties make them too many.

    The `count` columns with the largest maxima hold the `count` largest values.
    """
    rows, size = values.shape
    width = size // _PARTS
    split = _PARTS * width
    rest = size - split
    maxima = values[:, :split].reshape(rows, _PARTS, width).max(axis=1)
    if rest:
        np.maximum(maxima[:, :rest], values[:, split:], out=maxima[:, :rest])
    bounds = np.partition(maxima, width - count, axis=1)[:, width - count]
    columns = np.nonzero(maxima >= bounds[:, None])[1]
    if columns.size != rows * count:
        return None
    starts = np.arange(0, split, width)
    places = (columns.reshape(rows, 1, count) + starts[:, None]).reshape(rows, _PARTS * count)
    if rest:
        places = np.concatenate((places, np.broadcast_to(np.arange(split, size), (rows, rest))), axis=1)
    return places


def _best_candidates(scores: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` best of `scores` [n] float32, best first, equal ones by place; none of -inf or NaN."""
    places = np.argsort(-scores, kind="stable")[:count]  # NaN last
    if scores[places[-1]] > -np.inf:
        return places
    return places[scores[places] > -np.inf]


def _select_frontier(scores: np.ndarray, level: Level, frontier: np.ndarray) -> None:
    """Write the best candidates of `level` by `scores` [C] float32, best first, to `frontier` [K]; -1 behind."""
    top_k = frontier.size
    start = contract.level_start(level.number, top_k)
    places = _best_candidates(scores[start : contract.level_start(level.number + 1, top_k)], level.width)
    frontier[: places.size] = places + start
    frontier[places.size :] = -1


def _select_nodes(scores: np.ndarray, selected: np.ndarray) -> None:
    """Write the best of `scores` [n] float32 in ascending order of place to `selected` [S], -1 behind."""
    places = np.sort(_best_candidates(scores, selected.size))
    selected[: places.size] = places
    selected[places.size :] = -1


def _frontier_parents(frontier: list[int], level: int) -> list[int]:
    """Slot of each node's parent in the frontier of level - 1; -1 for idle slots, 0 for the root's children."""
    top_k = len(frontier)
    start, end = contract.level_start(level, top_k), contract.level_start(level + 1, top_k)
    width = top_k if level > 1 else end  # level 1: all have the same parent
    return [(candidate - start) // width if start <= candidate < end else -1 for candidate in frontier]


def _ancestor_rows(parents: list[list[int]]) -> list[list[int]]:
    """KV rows, counted from the first one that drafting writes, of each slot of the last level and of its ancestors.

    `parents` are the `_frontier_parents` of all levels up to that one.
    """
    top_k = len(parents[0])
    rows = [[slot] for slot in range(top_k)]
    for level, slots in enumerate(parents[1:], 1):
        own = level * top_k
        rows = [[*(rows[parent] if parent >= 0 else ()), own + slot] for slot, parent in enumerate(slots)]
    return rows


def _write_mask(mask: np.ndarray, committed: int, rows: list[list[int]]) -> None:
    """`mask` [T, L] bool: keys before `committed`, and each token's `rows` counted from there."""
    keys = mask.shape[1]
    mask[...] = False
    mask[:, : max(committed, 0)] = True
    flat = [
        token * keys + committed + row
        for token, visible in enumerate(rows)
        for row in visible
        if 0 <= committed + row < keys
    ]
    mask.reshape(-1)[flat] = True


def _build_tree(root: int, candidates: Candidates, count: int, tree: TreeNodes) -> list[list[int]]:
    """Lay out the root and the selected ones of the first `count` candidates of one sequence, as its `tree`.

    Returns the places on the way from the root to each token. See `TreeKernels.prepare_verification`.
    """
    size = tree.tokens.size
    places = {-1: 0}  # of the candidates in the tree
    ways = [[place] for place in range(size)]
    beyond = np.flatnonzero((candidates.selected < 0) | (candidates.selected >= count))
    chosen = candidates.selected[: beyond[0]] if beyond.size else candidates.selected
    tree.tokens[0] = root
    tree.tokens[1:] = -1
    tree.parents[...] = -1
    tokens, parents = candidates.tokens[chosen].tolist(), candidates.parents[chosen].tolist()
    for place, (candidate, token, parent) in enumerate(zip(chosen.tolist(), tokens, parents, strict=True), 1):
        above = places.get(parent)
        if token >= 0 and above is not None:
            places[candidate] = place
            ways[place] = [*ways[above], place]
            tree.tokens[place], tree.parents[place] = token, above
    tree.depths[...] = [len(way) - 1 for way in ways]
    tree.ancestors[...] = False
    tree.ancestors.reshape(-1)[[row * size + place for row, way in enumerate(ways) for place in way]] = True
    return ways
