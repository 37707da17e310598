"""Ways through a verified draft tree in NumPy: along drawn tokens, along typical ones, and along sampled chains.

`tokens`, `parents` and `depths` are a slot's rows [T] of the tree as `edgellm.kernels.tree.contract.TreeNodes` has it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm.kernels.acceptance.contract import RESIDUAL_STREAM, TARGET_STREAM, TEST_STREAM, Accepted, Chain
from edgellm.kernels.acceptance.distribution import Distribution, Draws
from edgellm.kernels.tree.contract import TreeNodes


def walk_all(draw: Callable[[int, int], int], tree: TreeNodes, active: np.ndarray, accepted: Accepted) -> None:
    """`walk` of every active slot along what `draw` (slot, node) says."""
    for slot in range(active.size):
        if active[slot] == 1:
            walk(draw, slot, tree, accepted)
        else:
            write_accepted(slot, [], [], accepted)


def walk(draw: Callable[[int, int], int], slot: int, tree: TreeNodes, accepted: Accepted) -> None:
    """Accept the nodes of a slot that are followed from its root, and the tokens drawn at them."""
    tokens, parents, depths = tree.tokens[slot], tree.parents[slot], tree.depths[slot]
    path, drawn = [0], [draw(slot, 0)]
    while len(path) < accepted.ids.shape[1]:
        children = _children(path[-1], parents, depths)
        matching = children[tokens[children] == drawn[-1]]
        if not matching.size:
            break
        path.append(int(matching[0]))
        drawn.append(draw(slot, path[-1]))
    write_accepted(slot, path, drawn, accepted)


def write_accepted(slot: int, path: list[int], tokens: list[int], accepted: Accepted) -> None:
    """Write a slot's accepted nodes and tokens; none where it is idle."""
    accepted.indices[slot] = -1
    accepted.indices[slot, : len(path)] = path
    accepted.ids[slot] = -1
    accepted.ids[slot, : len(tokens)] = tokens
    accepted.lengths[slot] = len(path)


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


def accept_chains(
    distribution: Callable[[np.ndarray, int], Distribution],
    tree: TreeNodes,
    active: np.ndarray,
    records: np.ndarray,
    chain: Chain,
    accepted: Accepted,
) -> None:
    """`AcceptanceKernels.accept_sampled_chain`, with p of (slots, node) from `distribution` and the slots'
    `records`; all slots of a depth at once."""
    for array, value in zip(accepted, (-1, -1, 0), strict=True):
        array.fill(value)
    slots = np.flatnonzero(active == 1)
    _, steps, draft_vocabulary = chain.probabilities.shape
    longest = min(tree.tokens.shape[1] - 1, steps, accepted.ids.shape[1] - 1)
    known = (chain.target_to_draft >= 0) & (chain.target_to_draft < draft_vocabulary)
    mapping = np.where(known, chain.target_to_draft, 0)

    def draws(slots: np.ndarray, node: int, stream: int) -> Draws:
        return Draws(records[slots], tree.draw_positions[slots, node], stream)

    for node in range(longest + 1):
        accepted.indices[slots, node] = node
        accepted.lengths[slots] = node + 1
        found = distribution(slots, node)
        drafted = tree.tokens[slots, node + 1] if node < longest else np.full(slots.size, -1, np.int32)
        ends = drafted < 0
        if ends.any():
            accepted.ids[slots[ends], node] = draws(slots[ends], node, TARGET_STREAM).by_score(*found.scores(ends))
        if ends.all():
            return
        slots, drafted = slots[~ends], drafted[~ends]
        p = found.probabilities()[~ends]
        q = np.where(known, chain.probabilities[slots, node][:, mapping], np.float32(0))
        accepts = _passes_test(p, q, drafted, draws(slots, node, TEST_STREAM).uniform())
        accepted.ids[slots[accepts], node] = drafted[accepts]
        rejected = slots[~accepts]
        if rejected.size:
            left = np.maximum(p[~accepts] - q[~accepts], np.float32(0))
            residual = np.where(left.any(axis=1, keepdims=True), left, p[~accepts])
            accepted.ids[rejected, node] = draws(rejected, node, RESIDUAL_STREAM).by_weight(residual)
        slots = slots[accepts]
        if not slots.size:
            return


def _passes_test(p: np.ndarray, q: np.ndarray, drafted: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Which drafts [n] are accepted: u q(x) <= p(x) and p(x) > 0; `p` and `q` [n, V] float32."""
    rows, inside = np.arange(drafted.size), drafted < p.shape[1]
    columns = np.where(inside, drafted, 0)
    p_of_draft, q_of_draft = p[rows, columns], q[rows, columns]
    return inside & (p_of_draft > 0) & (uniform * q_of_draft <= p_of_draft)
