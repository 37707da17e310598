"""The draft tree's kernels in NumPy: they define what `CudaTree` computes, and run where there is no GPU."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from edgellm.kernels.contracts import Contracts
from edgellm.kernels.sampling.contract import ModelTables, SequenceState, StepInputs
from edgellm.kernels.sampling.twin import look_up
from edgellm.kernels.tree.contract import (
    Candidates,
    Expansion,
    HiddenRows,
    Level,
    TreeKernels,
    TreeNodes,
    candidate_count,
    level_start,
)
from edgellm.kernels.tree.layout import (
    ancestor_rows,
    build_tree,
    frontier_parents,
    select_frontier,
    select_nodes,
    write_mask,
)
from edgellm.kernels.tree.log_softmax import LogSoftmax
from edgellm.kernels.tree.top_values import largest

_MINUS_INFINITY = np.float32(-np.inf)
_check = Contracts(TreeKernels, np.ndarray)
_Bundle = TypeVar("_Bundle", Candidates, TreeNodes)


class NumpyTree:
    """See `edgellm.kernels.tree.contract.TreeKernels`; bfloat16 arrays hold its bits as uint16. No expansion waits."""

    def __init__(self) -> None:
        self._log_softmax = LogSoftmax()

    def expand_workspace_size(self, batch: int, draft_vocab_size: int, top_k: int) -> int:
        """0: NumPy needs none."""
        return 0

    def expand_frontier(self, level: Level, logits: np.ndarray, candidates: Candidates, expansion: Expansion) -> None:
        """The likeliest continuations of the root or of each frontier node; see the contract."""
        sizes = _check("expand_frontier", level, logits, candidates, expansion)
        batch, rows, top_k = sizes["B"], sizes["n"], sizes["K"]
        values = logits.reshape(batch * rows, sizes["U"])
        if np.isnan(values.max()):
            values = np.where(np.isnan(values), _MINUS_INFINITY, values)
        ids, found = largest(values, level.width)
        parents, parent_scores = _parents(level.number, candidates)
        scores = self._log_probabilities(values, found) if level.dynamic else np.zeros_like(found)
        with np.errstate(over="ignore"):
            scores += parent_scores.reshape(-1, 1)
        exists = scores > _MINUS_INFINITY
        exists &= found > _MINUS_INFINITY
        tokens = expansion.draft_to_target[ids]
        parents = np.repeat(parents, level.width).reshape(tokens.shape)
        if not exists.all():
            missing = ~exists
            tokens[missing], scores[missing], parents[missing] = -1, _MINUS_INFINITY, -1
        start = level_start(level.number, top_k)
        own = slice(start, start + rows * top_k)
        beyond = ((0, 0), (0, top_k - level.width))
        for target, source, nothing in (
            (candidates.tokens, tokens, -1),
            (candidates.scores, scores, _MINUS_INFINITY),
            (candidates.parents, parents, -1),
        ):
            whole = source if level.width == top_k else np.pad(source, beyond, constant_values=nothing)
            target[:, own] = whole.reshape(batch, -1)

    def _log_probabilities(self, values: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Those of the logits `found` [n, k] of the rows `values` [n, U]."""
        maxima, log_sums = self._log_softmax.normalizers(values)
        maxima = maxima[:, None]
        with np.errstate(invalid="ignore", over="ignore"):
            scores = found - maxima
            scores[found == maxima] = 0  # also where both are infinite
            scores -= log_sums[:, None]
        return scores

    def prepare_proposal(
        self,
        level: Level,
        committed: np.ndarray,
        tables: ModelTables,
        candidates: Candidates,
        hidden: HiddenRows,
        inputs: StepInputs,
        expansion: Expansion | None,
    ) -> None:
        """What the draft model reads in the propose step of a level; see the contract."""
        sizes = _check("prepare_proposal", level, committed, tables, candidates, hidden, inputs, expansion)
        number = level.number
        tokens = np.full(candidates.frontiers.shape[::2], -1, np.int32)
        for row, entries in enumerate(candidates.frontiers):
            if level.dynamic:
                select_frontier(candidates.scores[row], level, entries[number - 1])
            parents = [frontier_parents(frontier, i) for i, frontier in enumerate(entries[:number].tolist(), 1)]
            slots = parents[-1]
            busy = [slot for slot, parent in enumerate(slots) if parent >= 0]
            tokens[row, busy] = candidates.tokens[row, entries[number - 1, busy]]
            np.take(hidden.put_out[row], slots, axis=0, out=hidden.fed[row], mode="clip")  # idle: the first
            write_mask(inputs.attention_mask[row, 0], int(committed[row]), ancestor_rows(parents))
        np.add(committed, (number - 1) * sizes["K"], out=inputs.kvcache_start_index)
        places = committed.astype(np.int64) + tables.position_offsets + (number - 1)
        look_up(tables, tokens, places[:, None], inputs)

    def prepare_verification(
        self,
        level: Level,
        state: SequenceState,
        tables: ModelTables,
        candidates: Candidates,
        tree: TreeNodes,
        inputs: StepInputs,
        expansion: Expansion | None,
    ) -> None:
        """The tree to verify and what the base model reads of it; see the contract."""
        sizes = _check("prepare_verification", level, state, tables, candidates, tree, inputs, expansion)
        count, start = candidate_count(level.number, sizes["K"]), state.kvcache_start_index
        for row in range(sizes["B"]):
            if level.dynamic:
                select_nodes(candidates.scores[row, :count], candidates.selected[row])
            root, first = int(state.token_ids[row, 0]), int(start[row])
            ways = build_tree(root, _row(candidates, row), count, _row(tree, row))
            write_mask(inputs.attention_mask[row, 0], first, ways)
        np.add(tree.depths, state.positions[:, None], out=tree.draw_positions)
        places = start.astype(np.int64) + tables.position_offsets
        look_up(tables, tree.tokens, places[:, None] + tree.depths, inputs)


def _row(bundle: _Bundle, row: int) -> _Bundle:
    """The arrays of one sequence."""
    return type(bundle)(*[array[row] for array in bundle])


def _parents(level: int, candidates: Candidates) -> tuple[np.ndarray, np.ndarray]:
    """Candidate indices and scores [B, n] of the nodes that `level` extends; the root is -1 and has score 0."""
    batch, _, top_k = candidates.frontiers.shape
    if level == 1:
        return np.full((batch, 1), -1, np.int32), np.zeros((batch, 1), np.float32)
    parents = candidates.frontiers[:, level - 2]
    start, end = level_start(level - 1, top_k), level_start(level, top_k)
    scores = np.full(parents.shape, _MINUS_INFINITY)
    rows, slots = np.nonzero((parents >= start) & (parents < end))
    scores[rows, slots] = candidates.scores[rows, parents[rows, slots]]
    return parents, scores
