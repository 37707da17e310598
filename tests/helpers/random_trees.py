"""Random trees of drafted tokens."""

from __future__ import annotations

import numpy as np

from edgellm.kernels.tree.contract import TreeNodes


def random_trees(
    rng: np.random.Generator, slots: int, size: int, vocabulary: int, least_share: float = 0.0, reach: int = 4
) -> TreeNodes:
    """Random trees with padding, drawn at positions from 0 on; siblings may carry the same token.

    More than `least_share` of the `size` nodes exist; a parent stands at most `reach` places before its child.
    """
    tokens = rng.integers(0, vocabulary, (slots, size)).astype(np.int32)
    parents = np.full((slots, size), -1, np.int32)
    depths = np.zeros((slots, size), np.int32)
    ancestors = np.zeros((slots, size, size), bool)
    ancestors[:, np.arange(size), np.arange(size)] = True
    for slot in range(slots):
        used = rng.integers(int(size * least_share), size) + 1
        tokens[slot, used:] = -1
        for node in range(1, used):
            parent = rng.integers(max(0, node - reach), node)
            parents[slot, node] = parent
            depths[slot, node] = depths[slot, parent] + 1
            ancestors[slot, node] |= ancestors[slot, parent]
    ancestors[:, 1:, 0] = False
    return TreeNodes(tokens, parents, depths, ancestors, depths.copy())
