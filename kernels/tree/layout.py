"""Frontiers, trees and masks of drafting for one sequence; `NumpyDraftTree` puts them together.

Trees are small, so what follows their links is plain Python: a NumPy call costs as much as a dozen of its steps.
Numbering of candidates, frontiers and padding: `edgellm.kernels.draft_tree_interface`.
"""

from __future__ import annotations

import numpy as np

from edgellm.kernels.draft_tree_interface import level_start


def best_candidates(scores: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` best of `scores` [n] float32, best first, equal ones by place; none of -inf or NaN."""
    places = np.argsort(-scores, kind="stable")[:count]  # NaN last
    if scores[places[-1]] > -np.inf:
        return places
    return places[scores[places] > -np.inf]


def select_frontier(scores: np.ndarray, level: int, frontier: np.ndarray) -> None:
    """Write the K best candidates of `level` by `scores` [C] float32, best first, to `frontier` [K]; -1 behind."""
    top_k = frontier.size
    start = level_start(level, top_k)
    places = best_candidates(scores[start : level_start(level + 1, top_k)], top_k)
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


def build_tree(
    root: int,
    selected: np.ndarray,
    candidate_tokens: np.ndarray,
    candidate_parents: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    ancestors: np.ndarray,
) -> list[list[int]]:
    """Lay out the root and the `selected` [S] candidates as `tokens`, `parents`, `depths` [T], `ancestors` [T, T].

    `selected` is ascending, -1 behind; `candidate_tokens` and `candidate_parents` are [n] int32, and only indices
    below n are candidates. Returns the places on the way from the root to each token. See
    `DraftTreeKernels.prepare_verification`.
    """
    size = tokens.size
    places = {-1: 0}  # of the candidates in the tree
    ways = [[place] for place in range(size)]
    chosen = selected[: _candidates_at_start(selected, candidate_tokens.size)]
    tokens[0] = root
    tokens[1:] = -1
    parents[...] = -1
    found = zip(chosen.tolist(), candidate_tokens[chosen].tolist(), candidate_parents[chosen].tolist(), strict=True)
    for place, (candidate, token, parent) in enumerate(found, 1):
        above = places.get(parent)
        if token >= 0 and above is not None:
            places[candidate] = place
            ways[place] = [*ways[above], place]
            tokens[place], parents[place] = token, above
    depths[...] = [len(way) - 1 for way in ways]
    ancestors[...] = False
    ancestors.reshape(-1)[[row * size + place for row, way in enumerate(ways) for place in way]] = True
    return ways


def _candidates_at_start(selected: np.ndarray, candidates: int) -> int:
    """How many of the first of `selected` are candidates."""
    beyond = (selected < 0) | (selected >= candidates)
    return int(beyond.argmax()) if beyond.any() else selected.size
