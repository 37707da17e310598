"""The draft tree's kernels in NumPy: they define what `CudaDraftTree` computes, and run where there is no GPU."""

from __future__ import annotations

import numpy as np

from edgellm.kernels.checks import check_host_arguments
from edgellm.kernels.draft_tree_checks import check_expansion, check_proposal, check_verification
from edgellm.kernels.draft_tree_interface import Expansion, level_start
from edgellm.kernels.log_softmax import LogSoftmax
from edgellm.kernels.numpy_kernels import NumpyKernels, store_rounded
from edgellm.kernels.numpy_tree_layout import (
    ancestor_rows,
    build_tree,
    frontier_parents,
    select_frontier,
    select_nodes,
    write_mask,
)
from edgellm.kernels.top_values import largest

_MINUS_INFINITY = np.float32(-np.inf)


class NumpyDraftTree:
    """See `edgellm.kernels.draft_tree_interface.DraftTreeKernels`; bfloat16 arrays hold its bits as uint16."""

    def __init__(self) -> None:
        self._log_softmax = LogSoftmax()
        self._kernels = NumpyKernels()

    def expand_workspace_size(self, batch: int, draft_vocab_size: int, top_k: int) -> int:
        """0: NumPy needs none."""
        return 0

    def expand_frontier(
        self,
        level: int,
        score: bool,
        logits: np.ndarray,
        draft_to_target: np.ndarray,
        frontiers: np.ndarray,
        candidate_tokens: np.ndarray,
        candidate_scores: np.ndarray,
        candidate_parents: np.ndarray,
        workspace: np.ndarray,
    ) -> None:
        """The K likeliest continuations of the root (level 1) or of each frontier node; see the interface."""
        sizes = check_host_arguments(
            "expand_frontier",
            logits,
            draft_to_target,
            frontiers,
            candidate_tokens,
            candidate_scores,
            candidate_parents,
            workspace,
        )
        check_expansion(level, sizes)
        batch, rows, top_k = sizes["B"], sizes["n"], sizes["K"]
        values = logits.reshape(batch * rows, sizes["V"])
        if np.isnan(values.max()):
            values = np.where(np.isnan(values), _MINUS_INFINITY, values)
        ids, found = largest(values, top_k)
        parents, parent_scores = _parents(level, frontiers, candidate_scores)
        scores = self._log_probabilities(values, found) if score else np.zeros_like(found)
        with np.errstate(over="ignore"):
            scores += parent_scores.reshape(-1, 1)
        exists = scores > _MINUS_INFINITY
        exists &= found > _MINUS_INFINITY
        tokens = draft_to_target[ids]
        parents = np.repeat(parents, top_k).reshape(tokens.shape)
        if not exists.all():
            missing = ~exists
            tokens[missing], scores[missing], parents[missing] = -1, _MINUS_INFINITY, -1
        start = level_start(level, top_k)
        entries = slice(start, start + rows * top_k)
        for target, source in ((candidate_tokens, tokens), (candidate_scores, scores), (candidate_parents, parents)):
            target[:, entries] = source.reshape(batch, -1)

    def _log_probabilities(self, values: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Those of the logits `found` [n, K] of the rows `values` [n, Vd]."""
        maxima, log_sums = self._log_softmax.normalizers(values)
        maxima = maxima[:, None]
        with np.errstate(invalid="ignore", over="ignore"):
            scores = found - maxima
            scores[found == maxima] = 0  # also where both are infinite
            scores -= log_sums[:, None]
        return scores

    def prepare_proposal(
        self,
        level: int,
        select: bool,
        committed: np.ndarray,
        position_offsets: np.ndarray,
        rotary_table: np.ndarray,
        embedding: np.ndarray,
        hidden_in: np.ndarray,
        candidate_tokens: np.ndarray,
        candidate_scores: np.ndarray,
        candidate_parents: np.ndarray,
        frontiers: np.ndarray,
        inputs_embeds: np.ndarray,
        hidden_out: np.ndarray,
        kvcache_start_index: np.ndarray,
        rope_rotary_cos_sin: np.ndarray,
        attention_mask: np.ndarray,
        expansion: Expansion | None,
    ) -> None:
        """What the draft model reads in propose step `level`; see the interface. No expansion waits here."""
        sizes = check_host_arguments(
            "prepare_proposal",
            committed,
            position_offsets,
            rotary_table,
            embedding,
            hidden_in,
            candidate_tokens,
            candidate_scores,
            candidate_parents,
            frontiers,
            inputs_embeds,
            hidden_out,
            kvcache_start_index,
            rope_rotary_cos_sin,
            attention_mask,
        )
        check_proposal(level, sizes, expansion)
        tokens = np.full(frontiers.shape[::2], -1, np.int32)
        for row, entries in enumerate(frontiers):
            if select:
                select_frontier(candidate_scores[row], level, entries[level - 1])
            parents = [frontier_parents(frontier, i) for i, frontier in enumerate(entries[:level].tolist(), 1)]
            slots = parents[-1]
            busy = [slot for slot, parent in enumerate(slots) if parent >= 0]
            tokens[row, busy] = candidate_tokens[row, entries[level - 1, busy]]
            np.take(hidden_in[row], slots, axis=0, out=hidden_out[row], mode="clip")  # idle: the first
            write_mask(attention_mask[row, 0], int(committed[row]), ancestor_rows(parents))
        self._kernels.embedding_lookup(embedding, tokens, inputs_embeds)
        np.add(committed, (level - 1) * sizes["K"], out=kvcache_start_index)
        places = committed.astype(np.int64) + position_offsets + (level - 1)
        _write_rotary(rotary_table, places[:, None], rope_rotary_cos_sin)

    def prepare_verification(
        self,
        select: bool,
        candidates: int,
        token_ids: np.ndarray,
        positions: np.ndarray,
        committed: np.ndarray,
        position_offsets: np.ndarray,
        rotary_table: np.ndarray,
        embedding: np.ndarray,
        candidate_tokens: np.ndarray,
        candidate_scores: np.ndarray,
        candidate_parents: np.ndarray,
        frontiers: np.ndarray,
        selected: np.ndarray,
        tree_tokens: np.ndarray,
        tree_parents: np.ndarray,
        tree_depths: np.ndarray,
        tree_ancestors: np.ndarray,
        draw_positions: np.ndarray,
        inputs_embeds: np.ndarray,
        rope_rotary_cos_sin: np.ndarray,
        attention_mask: np.ndarray,
        expansion: Expansion | None,
    ) -> None:
        """The tree to verify and what the base model reads of it; see the interface."""
        sizes = check_host_arguments(
            "prepare_verification",
            token_ids,
            positions,
            committed,
            position_offsets,
            rotary_table,
            embedding,
            candidate_tokens,
            candidate_scores,
            candidate_parents,
            frontiers,
            selected,
            tree_tokens,
            tree_parents,
            tree_depths,
            tree_ancestors,
            draw_positions,
            inputs_embeds,
            rope_rotary_cos_sin,
            attention_mask,
        )
        check_verification(candidates, sizes, expansion)
        for row in range(sizes["B"]):
            if select:
                select_nodes(candidate_scores[row, :candidates], selected[row])
            ways = build_tree(
                token_ids[row, 0],
                selected[row],
                candidate_tokens[row, :candidates],
                candidate_parents[row, :candidates],
                tree_tokens[row],
                tree_parents[row],
                tree_depths[row],
                tree_ancestors[row],
            )
            write_mask(attention_mask[row, 0], int(committed[row]), ways)
        np.add(tree_depths, positions[:, None], out=draw_positions)
        self._kernels.embedding_lookup(embedding, tree_tokens, inputs_embeds)
        places = committed.astype(np.int64) + position_offsets
        _write_rotary(rotary_table, places[:, None] + tree_depths, rope_rotary_cos_sin)


def _parents(level: int, frontiers: np.ndarray, candidate_scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Candidate indices and scores [B, n] of the nodes that `level` extends; the root is -1 and has score 0."""
    batch, _, top_k = frontiers.shape
    if level == 1:
        return np.full((batch, 1), -1, np.int32), np.zeros((batch, 1), np.float32)
    parents = frontiers[:, level - 2]
    start, end = level_start(level - 1, top_k), level_start(level, top_k)
    scores = np.full(parents.shape, _MINUS_INFINITY)
    rows, slots = np.nonzero((parents >= start) & (parents < end))
    scores[rows, slots] = candidate_scores[rows, parents[rows, slots]]
    return parents, scores


def _write_rotary(table: np.ndarray, places: np.ndarray, target: np.ndarray) -> None:
    """Rows `places` [B, T or 1] of `table` [P, R], clamped to it, to `target` [B, T, R]."""
    store_rounded(table.take(places, axis=0, mode="clip"), target)
