"""Frontiers, trees and masks of drafting for one sequence; `NumpyTree` puts them together.

Trees are small, so what follows their links is plain Python: a NumPy call costs as much as a dozen of its steps.
Numbering of candidates, frontiers and padding: `edgellm.kernels.tree.contract`.
"""

from __future__ import annotations

import numpy as np

from edgellm.kernels.tree.contract import Candidates, Level, TreeNodes, level_start


def best_candidates(scores: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` best of `scores` [n] float32, best first, equal ones by place; none of -inf or NaN."""
    places = np.argsort(-scores, kind="stable")[:count]  # NaN last
    if scores[places[-1]] > -np.inf:
        return places
    return places[scores[places] > -np.inf]


def select_frontier(scores: np.ndarray, level: Level, frontier: np.ndarray) -> None:
    """Write the best candidates of `level` by `scores` [C] float32, best first, to `frontier` [K]; -1 behind."""
    top_k = frontier.size
    start = level_start(level.number, top_k)
    places = best_candidates(scores[start : level_start(level.number + 1, top_k)], level.width)
    frontier[: places.size] = places + start
    frontier[places.size :] = -1


def select_nodes(scores: np.ndarray, selected: np.ndarray) -> None:
    """Write the best of `scores` [n] float32 in ascending order of place to `selected` [S]; -1 behind."""
    places = best_candidates(scores, selected.size)
    places.sort()
    selected[: places.size] = places
    selected[places.size :] = -1


def frontier_parents(frontier: list[int], level: int) -> list[int]:
    """Slot of each node's parent in the frontier of level - 1; -1 for idle slots, 0 for the root's children."""
    top_k = len(frontier)
    start, end = level_start(level, top_k), level_start(level + 1, top_k)
    width = top_k if level > 1 else end  # level 1: all have the same parent
    return [(candidate - start) // width if start <= candidate < end else -1 for candidate in frontier]


def ancestor_rows(parents: list[list[int]]) -> list[list[int]]:
    """KV rows, counted from the first one that drafting writes, of each slot of the last level and of its ancestors.

    `parents` are the `frontier_parents` of all levels up to that one.
    """
    top_k = len(parents[0])
    rows = [[slot] for slot in range(top_k)]
    for level, slots in enumerate(parents[1:], 1):
        own = level * top_k
        rows = [[*(rows[parent] if parent >= 0 else ()), own + slot] for slot, parent in enumerate(slots)]
    return rows


def write_mask(mask: np.ndarray, committed: int, rows: list[list[int]]) -> None:
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


def build_tree(root: int, candidates: Candidates, count: int, tree: TreeNodes) -> list[list[int]]:
    """Lay out the root and the selected ones of the first `count` candidates of one sequence, as its `tree`.

    Returns the places on the way from the root to each token. See `TreeKernels.prepare_verification`.
    """
    size = tree.tokens.size
    places = {-1: 0}  # of the candidates in the tree
    ways = [[place] for place in range(size)]
    chosen = candidates.selected[: _candidates_at_start(candidates.selected, count)]
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


def _candidates_at_start(selected: np.ndarray, candidates: int) -> int:
    """How many of the first of `selected` are candidates."""
    beyond = (selected < 0) | (selected >= candidates)
    return int(beyond.argmax()) if beyond.any() else selected.size
