"""Ways through a verified draft tree in NumPy: along drawn tokens, and along typical ones.

`tokens`, `parents` and `depths` are a slot's rows [T] of the tree as `edgellm.kernels.acceptance_interface` has it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm.kernels.fixed_point_sampling import is_typical


def walk_all(
    draw: Callable[[int, int], int],
    tree: tuple[np.ndarray, np.ndarray, np.ndarray],
    active: np.ndarray,
    vocab_mapping: np.ndarray | None,
    accepted: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """`walk` of every active slot; `draw` (slot, node) is in the vocabulary that `vocab_mapping` maps."""
    for slot in range(active.size):
        if active[slot] != 1:
            write_accepted(slot, [], [], accepted)
            continue

        def drawn(node: int, slot: int = slot) -> int:
            token = draw(slot, node)
            if vocab_mapping is None:
                return token
            return int(vocab_mapping[token]) if 0 <= token < vocab_mapping.size else -1

        tokens, parents, depths = (array[slot] for array in tree)
        write_accepted(slot, *walk(drawn, tokens, parents, depths, accepted[0].shape[1]), accepted)


def walk(
    draw: Callable[[int], int], tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray, most: int
) -> tuple[list[int], list[int]]:
    """The nodes followed from the root and the tokens drawn at them, at most `most`."""
    path, drawn = [0], [draw(0)]
    while len(path) < most:
        node = path[-1]
        children = _children(node, parents, depths)
        matching = children[tokens[children] == drawn[-1]]
        if not matching.size:
            break
        child = int(matching[0])
        path.append(child)
        drawn.append(draw(child))
    return path, drawn


def write_accepted(
    slot: int, path: list[int], tokens: list[int], accepted: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    indices, ids, lengths = accepted
    indices[slot] = -1
    indices[slot, : len(path)] = path
    ids[slot] = -1
    ids[slot, : len(tokens)] = tokens
    lengths[slot] = len(path)


def typical_children(
    processed: np.ndarray, thresholds: np.ndarray, tokens: np.ndarray, epsilon: float, delta: float
) -> Callable[[int, np.ndarray], np.ndarray]:
    """A function (node, its children) that says which of the children are typical."""

    def accepts(node: int, children: np.ndarray) -> np.ndarray:
        return is_typical(processed[node], thresholds[node], tokens[children], epsilon, delta)

    return accepts


def deepest_path(
    accepts: Callable[[int, np.ndarray], np.ndarray], parents: np.ndarray, depths: np.ndarray, most: int
) -> list[int]:
    """The path to the deepest node accepted with all its ancestors, the lowest index of equally deep ones."""
    path_to = {0: [0]}
    level, best = [0], 0
    while level and len(path_to[best]) < most:
        reached = []
        for node in level:
            children = _children(node, parents, depths)
            if not children.size:
                continue
            for child in children[accepts(node, children)].tolist():
                path_to[child] = path_to[node] + [child]
                reached.append(child)
        level = sorted(reached)
        if level:
            best = level[0]
    return path_to[best]


def _children(node: int, parents: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """The node's children, ascending."""
    return np.flatnonzero((parents[node + 1 :] == node) & (depths[node + 1 :] == depths[node] + 1)) + (node + 1)
