"""Acceptance of chains sampled from the draft, in NumPy, all slots of one depth at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm.kernels.acceptance_interface import RESIDUAL_STREAM, TARGET_STREAM, TEST_STREAM
from edgellm.kernels.fixed_point_sampling import Distribution, Draws


def accept_chains(
    distribution: Callable[[np.ndarray, int], Distribution],
    tree_tokens: np.ndarray,
    draft_probabilities: np.ndarray,
    target_to_draft: np.ndarray,
    drawing: tuple[np.ndarray, np.ndarray, np.ndarray],
    active: np.ndarray,
    accepted: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """`AcceptanceKernels.accept_sampled_chain`, with p of (slots, node) from `distribution`.

    `drawing` holds seeds [B], sequences [B] and draw_positions [B, T]; `accepted` indices, ids and lengths.
    """
    seeds, sequences, draw_positions = drawing
    indices, ids, lengths = accepted
    for array, value in zip(accepted, (-1, -1, 0), strict=True):
        array.fill(value)
    slots = np.flatnonzero(active == 1)
    _, steps, draft_vocabulary = draft_probabilities.shape
    longest = min(tree_tokens.shape[1] - 1, steps, ids.shape[1] - 1)
    known = (target_to_draft >= 0) & (target_to_draft < draft_vocabulary)
    mapping = np.where(known, target_to_draft, 0)
    for node in range(longest + 1):
        indices[slots, node] = node
        lengths[slots] = node + 1
        rows = distribution(slots, node)
        drafted = tree_tokens[slots, node + 1] if node < longest else np.full(slots.size, -1, np.int32)
        ends = drafted < 0
        if ends.any():
            last = slots[ends]
            draws = Draws(seeds[last], sequences[last], draw_positions[last, node], TARGET_STREAM)
            ids[last, node] = draws.by_score(*rows.scores(ends))
        if ends.all():
            return
        slots, drafted = slots[~ends], drafted[~ends]
        p = rows.probabilities()[~ends]
        q = np.where(known, draft_probabilities[slots, node][:, mapping], np.float32(0))
        draw = (seeds[slots], sequences[slots], draw_positions[slots, node])
        accepts = _passes_test(p, q, drafted, Draws(*draw, TEST_STREAM).uniform())
        ids[slots[accepts], node] = drafted[accepts]
        rejected = slots[~accepts]
        if rejected.size:
            seed, sequence, position = (values[~accepts] for values in draw)
            draws = Draws(seed, sequence, position, RESIDUAL_STREAM)
            ids[rejected, node] = draws.by_weight(_residual(p[~accepts], q[~accepts]))
        slots = slots[accepts]
        if not slots.size:
            return


def _passes_test(p: np.ndarray, q: np.ndarray, drafted: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Which drafts [n] are accepted: u q(x) <= p(x) and p(x) > 0; `p` and `q` [n, V] float32."""
    rows, inside = np.arange(drafted.size), drafted < p.shape[1]
    columns = np.where(inside, drafted, 0)
    p_of_draft, q_of_draft = p[rows, columns], q[rows, columns]
    return inside & (p_of_draft > 0) & (uniform * q_of_draft <= p_of_draft)


def _residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """max(p - q, 0) [n, V] float32; p where that is nothing."""
    residual = np.maximum(p - q, np.float32(0))
    return np.where(residual.any(axis=1, keepdims=True), residual, p)
