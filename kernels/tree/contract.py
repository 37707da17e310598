"""The contract of the draft tree's kernels: `NumpyDraftTree` defines what they compute, `CudaDraftTree` is the GPU's.

The draft model proposes a tree of tokens level by level, the base model verifies the best of it (EAGLE-2, Li et al.
2024). K is the tree's width (draft top-k), D its depth (draft steps), V the size of the verified tree with its root.

**Candidates** are numbered: 0..K-1 at level 1 (children of the root), K + (d-2) K K + slot K + rank at level d >= 2,
where `slot` is the place of the parent in the frontier of level d - 1 and `rank` its place among the parent's K
likeliest continuations. So an index names level and parent, and a child's index is above its parent's.

**Frontiers** [B, F, K] int32, F >= max(1, D - 1): row d - 1 holds the candidates of level d that the draft model
extends, best first; -1 is an idle slot, and so is an index that is no candidate of that level. Propose step d feeds
them to the draft model, which writes their KV rows committed + (d-1) K to committed + d K - 1.

**Scores** are the sum of the log-probabilities on the path from the root. A candidate with score -inf does not exist:
its token is -1, its parent -1.

Arrays are C-contiguous: B sequences, C >= `candidate_count` candidates, H hidden size, L key range, P positions of the
rotary table, R rotary size, T tokens. "compute" is the dtype of the model's activations (float32, float16, bfloat16).
A NaN counts as -inf. Wrong shapes or dtypes, and sizes beyond the limits below, raise `KernelError`. Every kernel
writes into arrays of the caller; none allocates and none synchronizes, so that a CUDA graph can hold them. Both
implementations give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from edgellm.kernels.arrays import Array, OwnArray

#: The largest K, D, T and draft vocabulary that the kernels take.
MAXIMUM_TOP_K = 64
MAXIMUM_STEPS = 32
MAXIMUM_TREE_TOKENS = 1024
MAXIMUM_DRAFT_VOCABULARY = 1 << 18


def level_start(level: int, top_k: int) -> int:
    """Index of the first candidate of `level` (from 1 on) in a tree of width `top_k`."""
    return 0 if level == 1 else top_k + (level - 2) * top_k * top_k


def candidate_count(steps: int, top_k: int) -> int:
    """How many candidates the levels 1 to `steps` have together."""
    return level_start(steps + 1, top_k)


class Expansion(NamedTuple):
    """An `expand_frontier` that the next `prepare_proposal` or `prepare_verification` finishes: its arguments."""

    level: int
    score: bool
    draft_to_target: OwnArray
    workspace: OwnArray


class DraftTreeKernels(Protocol):
    """One implementation of the draft tree's kernels.

    What `expand_frontier` writes is there once the `prepare_proposal` of the same level, or the `prepare_verification`
    after the last level, has been given its `Expansion`: what remains to be done takes no launch of its own.
    """

    def expand_workspace_size(self, batch: int, draft_vocab_size: int, top_k: int) -> int:
        """Bytes of workspace that `expand_frontier` needs for `batch` sequences, at every level; may be 0."""

    def expand_frontier(
        self,
        level: int,
        score: bool,
        logits: Array,
        draft_to_target: Array,
        frontiers: Array,
        candidate_tokens: Array,
        candidate_scores: Array,
        candidate_parents: Array,
        workspace: Array,
    ) -> None:
        """Write the candidates of `level`: the K likeliest continuations of the root or of each frontier node.

        `logits` [B, n, Vd] float32 are those of the draft model after the root (level 1: n = 1) or after the n = K
        nodes of `frontiers` [B, F, K] at level - 1. For each row the K largest logits, the lower draft id first among
        equals, become entries of `candidate_tokens` [B, C] int32 (through `draft_to_target` [Vd] int32),
        `candidate_scores` [B, C] float32 (the parent's score, 0 for the root, plus the log-probability) and
        `candidate_parents` [B, C] int32 (the parent's index, -1 for the root). Entries that do not exist (an idle
        parent, fewer than K logits above -inf) get token -1, score -inf, parent -1. `workspace` [N] uint8 has at
        least `expand_workspace_size` bytes and holds what the `Expansion` finishes. Without `score` log-probabilities
        count as 0: a static tree needs none.

        The log-probability is (logit - m) - log(s), m the row's maximum, in float32; s is the sum over chunks of
        4,096 ids of the chunk's sum of exp(logit - its maximum), times exp(its maximum - m), all in unsigned 64-bit
        fixed point with 32 bits after the point, rounded down (`edgellm.kernels.log_softmax`). So the order of
        summation does not matter. Where m is +inf, probability 1 is shared by the infinite logits.
        """

    def prepare_proposal(
        self,
        level: int,
        select: bool,
        committed: Array,
        position_offsets: Array,
        rotary_table: Array,
        embedding: Array,
        hidden_in: Array,
        candidate_tokens: Array,
        candidate_scores: Array,
        candidate_parents: Array,
        frontiers: Array,
        inputs_embeds: Array,
        hidden_out: Array,
        kvcache_start_index: Array,
        rope_rotary_cos_sin: Array,
        attention_mask: Array,
        expansion: Expansion | None,
    ) -> None:
        """Everything that the draft model reads in propose step `level`: one token for each frontier slot.

        Finishes the `expansion` of this level; None: the level's candidates are there, each parent's best first.

        With `select`, first writes row level - 1 of `frontiers` [B, F, K] int32: the level's K candidates with the
        highest `candidate_scores` [B, C] float32, best first, the lower index first among equals, -1 where there are
        no more above -inf. Without it the row is read: the caller put a static tree there.

        Slot t of sequence b then gets: `inputs_embeds` [B, K, H] compute, the row of `embedding` [V, H] compute that
        its entry of `candidate_tokens` [B, C] int32 names (zeros for an idle slot or an id outside 0..V-1);
        `hidden_out` [B, K, G] compute, the row of `hidden_in` [B, n, G] compute of its parent's slot (level 1: n = 1,
        later n = K; an idle slot takes row 0); `rope_rotary_cos_sin` [B, K, R] compute, row committed[b] + level - 1 +
        position_offsets[b] of `rotary_table` [P, R] float32, clamped to 0..P-1; `attention_mask` [B, 1, K, L] bool,
        True at keys j < committed[b], at committed[b] + (d-1) K + slot for each ancestor (its level d, its frontier
        slot) and at its own row. `kvcache_start_index` [B] int32 becomes committed + (level-1) K, the first row
        written. `committed` [B] int32 counts the committed KV rows, `position_offsets` is [B] int32.
        """

    def prepare_verification(
        self,
        select: bool,
        candidates: int,
        token_ids: Array,
        positions: Array,
        committed: Array,
        position_offsets: Array,
        rotary_table: Array,
        embedding: Array,
        candidate_tokens: Array,
        candidate_scores: Array,
        candidate_parents: Array,
        frontiers: Array,
        selected: Array,
        tree_tokens: Array,
        tree_parents: Array,
        tree_depths: Array,
        tree_ancestors: Array,
        draw_positions: Array,
        inputs_embeds: Array,
        rope_rotary_cos_sin: Array,
        attention_mask: Array,
        expansion: Expansion | None,
    ) -> None:
        """Choose the tree to verify, lay it out as T tokens, and write everything that the base model reads.

        Finishes the `expansion` of the last level, whose parents are in `frontiers` [B, F, K] int32; None: all
        candidates are there.

        With `select`, first writes `selected` [B, V-1] int32: the V - 1 best of the first `candidates` candidates by
        `candidate_scores` [B, C] float32, the lower index first among equals, in ascending order of index; -1 behind
        them where fewer lie above -inf. Scores never rise along a path and a parent's index is lower, so a selected
        node's parent is selected too. Without `select` the caller's static choice is read: ascending, -1 behind.

        Token 0 is the root, `token_ids` [B, 1] int32; token i + 1 is candidate selected[b, i]. `tree_tokens` [B, T]
        int32; `tree_parents` [B, T] int32, the parent's place in the tree, -1 for the root; `tree_depths` [B, T]
        int32, 0 for the root; `tree_ancestors` [B, T, T] bool, True where the column's token is the row's or an
        ancestor of it; `draw_positions` [B, T] int32 = positions[b] + depth, the random position of the draw at that
        node; `inputs_embeds` [B, T, H], `rope_rotary_cos_sin` [B, T, R] (row committed + depth + position_offsets) and
        `attention_mask` [B, 1, T, L] (keys j < committed and committed + ancestors) as in `prepare_proposal`.

        Padding, T > V or a place without a candidate, one whose token is -1, or whose parent is not in the tree, is
        token -1, parent -1, depth 0, its own only ancestor. `positions`, `committed` and `position_offsets` are [B]
        int32, `candidate_tokens` and `candidate_parents` [B, C] int32.
        """
