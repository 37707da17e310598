"""The contract of the acceptance kernels: `NumpyAcceptance` defines what they compute, `CudaAcceptance` computes it.

They turn the logits of a verified draft tree into accepted tokens, and bring caches, features and counters up to date.

Arrays are C-contiguous; B sequences (slots), T nodes of the tree (root and padding included), V target vocabulary,
U draft vocabulary, D drafted tokens of a chain, W most tokens that one round can emit (depth of the tree + 1),
P rows of pending draft input, F width of a feature, N bytes of workspace. int32 unless said. The tree of a slot:

- `tree_tokens` [B, T]: token of each node; node 0 is the root, the last emitted token; -1 is padding.
- `tree_parents` [B, T]: index of each node's parent, always a smaller one; -1 of the root and of padding.
- `tree_depths` [B, T]: 0 of the root and of padding, else the parent's + 1.
- `tree_ancestors` [B, T, T] bool: row t is True at t and at the nodes between the root and t, both included.
- `active` [B]: 1 for a slot that takes part; every other slot is idle.

What acceptance writes of a slot, n being the number of tokens that it emits:

- `accepted_indices` [B, W]: the nodes on the accepted path, 0 (the root) first, ascending; -1 from n on.
- `accepted_ids` [B, W]: the accepted drafts, then the token drawn after the last of them (the bonus); -1 from n on.
- `acceptance_lengths` [B]: n >= 1; 0 in an idle slot, where the others are -1.

Wrong shapes or dtypes, sizes beyond the limits below and more than `checks.MAXIMUM_ROWS` nodes (B * T) raise
`KernelError` that names the argument, what was found and what is expected. Every kernel writes into arrays of the
caller; none allocates and none synchronizes, so that a CUDA graph can hold them. A workspace must be zero before its
first use, and is fit for the next call afterwards; calls in one stream may share it, whatever their B, T and V, but
`draft_sample` needs one of its own (which need not be zero).

Exactness: both implementations give the same bits everywhere. Probabilities are unsigned 64-bit fixed-point weights
(exp(x - max) times 2^32, rounded down) of the tokens that pass their row's threshold, divided in float32 by their
sum; float arithmetic is confined to operations that IEEE 754 fixes and to `portable_math`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edgellm.kernels.arrays import Array, OwnArray

#: Largest T, root included.
MAXIMUM_TREE_SIZE = 1024
#: Largest W: a tree 32 deep and the bonus token.
MAXIMUM_ACCEPTED = 33
#: Largest vocabulary of sampled acceptance: fixed-point sums stay below 2^64.
MAXIMUM_SAMPLED_VOCABULARY = 1 << 21

#: Fourth counter word of Philox, which keeps the random words of one position apart by what they serve.
#: `Kernels.sample` draws a target token with 0.
TARGET_STREAM, DRAFT_STREAM, TEST_STREAM, RESIDUAL_STREAM = 0, 1, 2, 3


class SlotDraws(NamedTuple):
    """How each slot draws its tokens, [B] each: the parameters of `Kernels`, by their names and dtypes there."""

    repetition_penalty: OwnArray
    presence_penalty: OwnArray
    frequency_penalty: OwnArray
    temperature: OwnArray
    top_k: OwnArray
    top_p: OwnArray
    min_p: OwnArray
    seeds: OwnArray
    sequences: OwnArray


class NodeDraws(NamedTuple):
    """The same for each node, [B * T] each: a slot's values repeated T times."""

    temperature: OwnArray
    top_k: OwnArray
    top_p: OwnArray
    min_p: OwnArray
    seeds: OwnArray
    sequences: OwnArray


class AcceptanceKernels(Protocol):
    """One implementation of all acceptance kernels."""

    def process_tree_logits(
        self,
        logits: Array,
        token_counts: Array,
        tree_tokens: Array,
        tree_ancestors: Array,
        repetition_penalty: Array,
        presence_penalty: Array,
        frequency_penalty: Array,
        temperature: Array,
        processed: Array,
    ) -> None:
        """`Kernels.process_logits` of every node: `logits` [B, T, V] float32 to `processed` (may be the same array).

        `token_counts` [B, V] are those before the round, the root counted; a node's counts are these, raised by one
        for each node on the path from the root (excluded) to it (included) that carries the token. So a node's row has
        the bits that plain decoding gives after the same tokens. Penalties and temperature are [B] float32.
        """

    def eagle_accept_workspace_size(self, batch: int, tree_size: int, vocabulary: int) -> int:
        """Bytes of workspace that `eagle_accept` needs."""

    def eagle_accept(
        self,
        logits: Array,
        tree_tokens: Array,
        tree_parents: Array,
        tree_depths: Array,
        active: Array,
        vocab_mapping: Array | None,
        accepted_indices: Array,
        accepted_ids: Array,
        acceptance_lengths: Array,
        workspace: Array,
    ) -> None:
        """Greedy acceptance: `accept_drawn` with the argmax (lowest id of equals) of each row of `logits` [B, T, V].

        `logits` float32; `workspace` [N] uint8 of at least `eagle_accept_workspace_size` bytes.
        """

    def accept_drawn(
        self,
        drawn: Array,
        tree_tokens: Array,
        tree_parents: Array,
        tree_depths: Array,
        active: Array,
        vocab_mapping: Array | None,
        accepted_indices: Array,
        accepted_ids: Array,
        acceptance_lengths: Array,
    ) -> None:
        """Follow `drawn` [B, T], the token that plain decoding draws at each node, from the root of each tree.

        At a node go to the child, of depth one more, whose token equals the drawn one (the lowest index of several);
        where there is none, or W tokens are reached, the drawn token is the bonus and the walk ends. `vocab_mapping`
        [V] gives the full id of each row of a reduced vocabulary in which `drawn` counts; None: ids are full.
        """

    def sampling_workspace_size(self, batch: int, tree_size: int, vocabulary: int) -> int:
        """Bytes of workspace that `typical_accept` and `accept_sampled_chain` need."""

    def typical_accept(
        self,
        processed: Array,
        thresholds: Array,
        temperature: Array,
        drawn: Array,
        tree_tokens: Array,
        tree_parents: Array,
        tree_depths: Array,
        active: Array,
        epsilon: float,
        delta: float,
        accepted_indices: Array,
        accepted_ids: Array,
        acceptance_lengths: Array,
        workspace: Array,
    ) -> None:
        """Typical acceptance (Hewitt et al. 2022; Cai et al. 2024): lossy, the emitted distribution is not the base's.

        A child of token x is accepted if p(x) > min(epsilon, delta * exp(-H(p))), where p is the softmax of its
        parent's row of `processed` [B, T, V] float32 restricted to values >= `thresholds` [B, T] float32, and H its
        entropy in nats. The path to the deepest node that is accepted with all its ancestors is taken, the lowest index
        of equally deep ones, at most W - 1 long; the bonus is `drawn` [B, T] at its end. Slots whose `temperature` [B]
        float32 is 0 follow `accept_drawn` instead: their p has one token.
        """

    def draft_sample_workspace_size(self, batch: int, draft_vocabulary: int) -> int:
        """Bytes of workspace that `draft_sample` needs."""

    def draft_sample(
        self,
        logits: Array,
        draft_to_target: Array,
        temperature: Array,
        top_k: Array,
        top_p: Array,
        min_p: Array,
        seeds: Array,
        sequences: Array,
        positions: Array,
        step: int,
        chain_tokens: Array,
        draft_probabilities: Array,
        workspace: Array,
    ) -> None:
        """Draw token `step` (0..D-1) of a sampled chain from the draft's distribution q, and keep q.

        q is the softmax of `logits` [B, U] float32 over `temperature`, after top-k, top-p and min-p (all [B], as
        `Kernels.filter_threshold` takes them), the very distribution drawn from: `draft_probabilities` [B, D, U]
        float32 gets it at row `step`, and `chain_tokens` [B, D] the token's target id, `draft_to_target` [U] of the
        drawn one. Gumbel-max on log q with the words of (`seeds` [B] uint64, `sequences` [B], `positions` [B] + step)
        of `DRAFT_STREAM`. `positions` are those of the token drawn next, as for target draws. At temperature 0 the
        token is the argmax and q is 1 there. `workspace` [N] uint8.
        """

    def accept_sampled_chain(
        self,
        processed: Array,
        thresholds: Array,
        temperature: Array,
        tree_tokens: Array,
        draft_probabilities: Array,
        target_to_draft: Array,
        seeds: Array,
        sequences: Array,
        draw_positions: Array,
        active: Array,
        accepted_indices: Array,
        accepted_ids: Array,
        acceptance_lengths: Array,
        workspace: Array,
    ) -> None:
        """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023) of a chain: what is emitted has p's law.

        `tree_tokens` [B, T] is the chain: node t carries the token that `draft_sample` drew at step t - 1 from
        q = `draft_probabilities` [B, D, U] float32 row t - 1; the chain ends before the first -1, after node D, or
        where W tokens are reached. p is the softmax of the previous node's row of `processed` [B, T, V] float32
        restricted to values >= `thresholds` [B, T] float32. `target_to_draft` [V] is the inverse of `draft_to_target`
        (which must name no target twice), -1 where the draft has no such token: q is 0 there.

        A drafted x is accepted if u * q(x) <= p(x), p(x) > 0, u from word 0 of `TEST_STREAM`. At the first rejection
        the last token is drawn from max(p - q, 0) by Gumbel-max with `RESIDUAL_STREAM` (from p, if rounding leaves
        nothing of it); after the last node from p, as `Kernels.sample` does. Words are those of (`seeds` [B] uint64,
        `sequences` [B], `draw_positions` [B, T] of the previous node). Slots of `temperature` [B] 0 accept the argmax
        of p alone and emit it.
        """

    def accept_draws(
        self,
        logits: Array,
        token_counts: Array,
        tree_tokens: Array,
        tree_parents: Array,
        tree_depths: Array,
        tree_ancestors: Array,
        draw_positions: Array,
        active: Array,
        slot_draws: SlotDraws,
        node_draws: NodeDraws,
        thresholds: Array,
        drawn: Array,
        accepted_indices: Array,
        accepted_ids: Array,
        acceptance_lengths: Array,
    ) -> None:
        """Acceptance of deterministic children from the logits on: follow what plain decoding draws at each node.

        `process_tree_logits` in place, `Kernels.filter_threshold`, `Kernels.sample` at `draw_positions` [B, T], then
        `accept_drawn`. `logits` [B, T, V], `thresholds` [B, T] and `drawn` [B, T] are left with what these computed, in
        NumPy only of the nodes that were visited.
        """

    def accept_sampled_draws(
        self,
        logits: Array,
        token_counts: Array,
        tree_tokens: Array,
        tree_ancestors: Array,
        draft_probabilities: Array,
        target_to_draft: Array,
        draw_positions: Array,
        active: Array,
        slot_draws: SlotDraws,
        node_draws: NodeDraws,
        thresholds: Array,
        accepted_indices: Array,
        accepted_ids: Array,
        acceptance_lengths: Array,
        workspace: Array,
    ) -> None:
        """Acceptance of sampled chains from the logits on.

        `process_tree_logits` in place, `Kernels.filter_threshold`, then `accept_sampled_chain`. `logits` [B, T, V] and
        `thresholds` [B, T] are left with what these computed, in NumPy only of the nodes that were visited.
        """

    def move_accepted(
        self,
        caches: Sequence[Array],
        kvcache_start_index: Array,
        accepted_indices: Array,
        acceptance_lengths: Array,
        hidden_states: Array,
        pending_features: Array,
    ) -> None:
        """Move the accepted rows of every cache, and their features, to consecutive places, before lengths advance.

        In each of `caches` (same shape [S, Hkv, rows, D], S >= B, and dtype; keys and values of all layers) row
        kvcache_start_index[b] + accepted_indices[b, i] of slot b goes to row kvcache_start_index[b] + i, i = 0..n-1.
        Indices must ascend, as acceptance writes them; rows outside the cache are left out. `pending_features`
        [B, P, F] row i becomes `hidden_states` [B, T, F] row accepted_indices[b, i]; both compute, P >= W; other rows
        keep what they hold.
        """

    def advance_accepted(
        self,
        accepted_ids: Array,
        acceptance_lengths: Array,
        active: Array,
        token_ids: Array,
        kvcache_start_index: Array,
        positions: Array,
        token_counts: Array,
        pending_ids: Array,
        pending_counts: Array,
        draft_start: Array,
        draft_last: Array,
        emitted: Array,
    ) -> None:
        """Take the n accepted tokens of each active slot into its state.

        Sets token_ids [B, 1] to the last one, adds n to kvcache_start_index [B] and positions [B], adds 1 to
        token_counts [B, V] for each token, and leaves the tokens as the draft's next input: pending_ids [B, P] =
        accepted_ids, then -1; pending_counts [B] = n; draft_start [B] = the new kvcache_start_index - n;
        draft_last [B, 1] = n - 1. emitted [B, W+1] = (n, accepted_ids). Idle slots keep their state and emit
        (0, -1, ...).
        """

    def append_pending(
        self,
        hidden_states: Array,
        tokens: Array,
        active: Array,
        pending_features: Array,
        pending_ids: Array,
        pending_counts: Array,
        kvcache_start_index: Array,
        draft_start: Array,
        draft_last: Array,
    ) -> None:
        """After a plain step of active slots: its feature and its token join what the draft has not yet seen.

        With n = pending_counts[b]: pending_features [B, P, F] row n = hidden_states [B, 1, F], pending_ids [B, P] at n
        = tokens [B], pending_counts [B] = n + 1, draft_last [B, 1] = n, draft_start [B] = kvcache_start_index[b] - n
        - 1, where kvcache_start_index [B] is that after the step. A full slot (n >= P) is left as it is: give the
        draft its input before that.
        """
