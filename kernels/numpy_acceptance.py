"""The acceptance kernels in NumPy: they define what `CudaAcceptance` computes, and run where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.kernels.acceptance_checks import (
    check_acceptance,
    check_caches,
    check_emitted,
    check_mapping,
    check_step,
    check_typical,
)
from edgellm.kernels.acceptance_interface import DRAFT_STREAM, RESIDUAL_STREAM, TARGET_STREAM, TEST_STREAM
from edgellm.kernels.checks import check_host_arguments
from edgellm.kernels.fixed_point_sampling import Distribution, Draws, divided
from edgellm.kernels.numpy_kernels import NumpyKernels
from edgellm.kernels.tree_walk import deepest_path, typical_children, walk, walk_all, write_accepted


class NumpyAcceptance:
    """See `edgellm.kernels.acceptance_interface.AcceptanceKernels`; arrays are NumPy arrays, bfloat16 ones as uint16.

    A NaN among logits counts as -inf; a row of which nothing passes its threshold draws id 0.
    """

    def __init__(self) -> None:
        self._kernels = NumpyKernels()

    def process_tree_logits(
        self,
        logits: np.ndarray,
        token_counts: np.ndarray,
        tree_tokens: np.ndarray,
        tree_ancestors: np.ndarray,
        repetition_penalty: np.ndarray,
        presence_penalty: np.ndarray,
        frequency_penalty: np.ndarray,
        temperature: np.ndarray,
        processed: np.ndarray,
    ) -> None:
        """Penalties and temperature of every node, `logits` to `processed` [B, T, V]; see the interface."""
        settings = (repetition_penalty, presence_penalty, frequency_penalty, temperature)
        sizes = _check("process_tree_logits", logits, token_counts, tree_tokens, tree_ancestors, *settings, processed)
        for slot in range(sizes["B"]):
            row_settings = [setting[slot : slot + 1] for setting in settings]
            penalizes = not (repetition_penalty[slot] == 1 and presence_penalty[slot] == frequency_penalty[slot] == 0)
            counts = token_counts[slot : slot + 1]
            if penalizes:
                counts = counts.copy()
            for node in range(sizes["T"]):
                path = _path_tokens(tree_tokens[slot], tree_ancestors[slot, node], sizes["V"]) if penalizes else ()
                for token in path:
                    counts[0, token] += 1
                rows = logits[slot, node : node + 1], processed[slot, node : node + 1]
                self._kernels.process_logits(rows[0], counts, *row_settings, rows[1])
                for token in path:
                    counts[0, token] -= 1

    def eagle_accept_workspace_size(self, batch: int, tree_size: int, vocabulary: int) -> int:
        """0: NumPy needs no workspace."""
        return 0

    def eagle_accept(
        self,
        logits: np.ndarray,
        tree_tokens: np.ndarray,
        tree_parents: np.ndarray,
        tree_depths: np.ndarray,
        active: np.ndarray,
        vocab_mapping: np.ndarray | None,
        accepted_indices: np.ndarray,
        accepted_ids: np.ndarray,
        acceptance_lengths: np.ndarray,
        workspace: np.ndarray,
    ) -> None:
        """Greedy acceptance; the argmax is taken of visited nodes alone. See the interface."""
        tree = (tree_tokens, tree_parents, tree_depths)
        accepted = (accepted_indices, accepted_ids, acceptance_lengths)
        sizes = _check("eagle_accept", logits, *tree, active, *accepted, workspace)
        check_mapping(check_host_arguments, "eagle_accept", vocab_mapping, sizes["V"])
        token = np.empty(1, np.int32)

        def draw(slot: int, node: int) -> int:
            self._kernels.argmax(logits[slot, node : node + 1], token)
            return int(token[0])

        walk_all(draw, tree, active, vocab_mapping, accepted)

    def accept_drawn(
        self,
        drawn: np.ndarray,
        tree_tokens: np.ndarray,
        tree_parents: np.ndarray,
        tree_depths: np.ndarray,
        active: np.ndarray,
        vocab_mapping: np.ndarray | None,
        accepted_indices: np.ndarray,
        accepted_ids: np.ndarray,
        acceptance_lengths: np.ndarray,
    ) -> None:
        """Follow the `drawn` [B, T] tokens through the trees; see the interface."""
        tree = (tree_tokens, tree_parents, tree_depths)
        accepted = (accepted_indices, accepted_ids, acceptance_lengths)
        _check("accept_drawn", drawn, *tree, active, *accepted)
        check_mapping(check_host_arguments, "accept_drawn", vocab_mapping, None)
        walk_all(lambda slot, node: int(drawn[slot, node]), tree, active, vocab_mapping, accepted)

    def sampling_workspace_size(self, batch: int, tree_size: int, vocabulary: int) -> int:
        """0: NumPy needs no workspace."""
        return 0

    def typical_accept(
        self,
        processed: np.ndarray,
        thresholds: np.ndarray,
        temperature: np.ndarray,
        drawn: np.ndarray,
        tree_tokens: np.ndarray,
        tree_parents: np.ndarray,
        tree_depths: np.ndarray,
        active: np.ndarray,
        epsilon: float,
        delta: float,
        accepted_indices: np.ndarray,
        accepted_ids: np.ndarray,
        acceptance_lengths: np.ndarray,
        workspace: np.ndarray,
    ) -> None:
        """The deepest path of typical tokens, then `drawn` at its end; see the interface."""
        tree = (tree_tokens, tree_parents, tree_depths)
        accepted = (accepted_indices, accepted_ids, acceptance_lengths)
        distribution = (processed, thresholds, temperature)
        sizes = _check("typical_accept", *distribution, drawn, *tree, active, *accepted, workspace)
        check_typical(epsilon, delta)
        for slot in range(sizes["B"]):
            if active[slot] != 1:
                write_accepted(slot, [], [], accepted)
                continue
            slot_tree = [array[slot] for array in tree]
            if temperature[slot] == 0:
                path, tokens = walk(lambda node, slot=slot: int(drawn[slot, node]), *slot_tree, sizes["W"])
            else:
                accepts = typical_children(processed[slot], thresholds[slot], slot_tree[0], epsilon, delta)
                path = deepest_path(accepts, slot_tree[1], slot_tree[2], sizes["W"])
                tokens = [int(slot_tree[0][node]) for node in path[1:]] + [int(drawn[slot, path[-1]])]
            write_accepted(slot, path, tokens, accepted)

    def draft_sample_workspace_size(self, batch: int, draft_vocabulary: int) -> int:
        """0: NumPy needs no workspace."""
        return 0

    def draft_sample(
        self,
        logits: np.ndarray,
        draft_to_target: np.ndarray,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        seeds: np.ndarray,
        sequences: np.ndarray,
        positions: np.ndarray,
        step: int,
        chain_tokens: np.ndarray,
        draft_probabilities: np.ndarray,
        workspace: np.ndarray,
    ) -> None:
        """Draw token `step` of sampled chains from the draft's q and keep q; see the interface."""
        filters, draw = (top_k, top_p, min_p), (seeds, sequences, positions)
        sizes = _check(
            "draft_sample",
            logits,
            draft_to_target,
            temperature,
            *filters,
            *draw,
            chain_tokens,
            draft_probabilities,
            workspace,
        )
        check_step(sizes, step)
        scaled = divided(logits, temperature)
        thresholds = np.empty(sizes["B"], np.float32)
        self._kernels.filter_threshold(scaled, *filters, thresholds)
        probabilities = Distribution(scaled, thresholds, temperature).probabilities()
        draws = Draws(seeds, sequences, positions + np.int32(step), DRAFT_STREAM)
        chain_tokens[:, step] = draft_to_target[draws.by_weight(probabilities)]
        draft_probabilities[:, step] = probabilities

    def accept_sampled_chain(
        self,
        processed: np.ndarray,
        thresholds: np.ndarray,
        temperature: np.ndarray,
        tree_tokens: np.ndarray,
        draft_probabilities: np.ndarray,
        target_to_draft: np.ndarray,
        seeds: np.ndarray,
        sequences: np.ndarray,
        draw_positions: np.ndarray,
        active: np.ndarray,
        accepted_indices: np.ndarray,
        accepted_ids: np.ndarray,
        acceptance_lengths: np.ndarray,
        workspace: np.ndarray,
    ) -> None:
        """Speculative sampling of chains, all slots of one depth at once; see the interface."""
        drawing = (seeds, sequences, draw_positions)
        accepted = (accepted_indices, accepted_ids, acceptance_lengths)
        sizes = _check(
            "accept_sampled_chain",
            processed,
            thresholds,
            temperature,
            tree_tokens,
            draft_probabilities,
            target_to_draft,
            *drawing,
            active,
            *accepted,
            workspace,
        )
        accepted_indices.fill(-1)
        accepted_ids.fill(-1)
        acceptance_lengths.fill(0)
        slots = np.flatnonzero(active == 1)
        longest = min(sizes["T"] - 1, sizes["D"], sizes["W"] - 1)
        known = (target_to_draft >= 0) & (target_to_draft < sizes["U"])
        mapping = np.where(known, target_to_draft, 0)
        for node in range(longest + 1):
            if not slots.size:
                break
            accepted_indices[slots, node] = node
            acceptance_lengths[slots] = node + 1
            rows = Distribution(processed[slots, node], thresholds[slots, node], temperature[slots])
            drafted = tree_tokens[slots, node + 1] if node < longest else np.full(slots.size, -1, np.int32)
            ends = drafted < 0
            if ends.any():
                last = slots[ends]
                draws = Draws(seeds[last], sequences[last], draw_positions[last, node], TARGET_STREAM)
                accepted_ids[last, node] = draws.by_score(*rows.scores(ends))
            if ends.all():
                break
            slots, drafted = slots[~ends], drafted[~ends]
            p = rows.probabilities()[~ends]
            q = np.where(known, draft_probabilities[slots, node][:, mapping], np.float32(0))
            draw = (seeds[slots], sequences[slots], draw_positions[slots, node])
            accepts = _passes_test(p, q, drafted, Draws(*draw, TEST_STREAM).uniform())
            accepted_ids[slots[accepts], node] = drafted[accepts]
            rejected = slots[~accepts]
            if rejected.size:
                draws = Draws(*[values[~accepts] for values in draw], RESIDUAL_STREAM)
                accepted_ids[rejected, node] = draws.by_weight(_residual(p[~accepts], q[~accepts]))
            slots = slots[accepts]

    def compact_kv(
        self,
        caches: Sequence[np.ndarray],
        kvcache_start_index: np.ndarray,
        accepted_indices: np.ndarray,
        acceptance_lengths: np.ndarray,
    ) -> None:
        """Move the accepted rows of all caches to consecutive places; rows in place already are not touched."""
        arrays = (kvcache_start_index, accepted_indices, acceptance_lengths)
        sizes = check_caches(check_host_arguments, caches, *arrays)
        for slot, (start, length) in enumerate(zip(kvcache_start_index, acceptance_lengths, strict=True)):
            places = np.arange(min(length, sizes["W"]))
            sources, targets = start + accepted_indices[slot, : places.size], start + places
            inside = (np.minimum(sources, targets) >= 0) & (np.maximum(sources, targets) < sizes["R"])
            moved = inside & (sources != targets)
            if not moved.any():
                continue
            sources, targets = sources[moved], targets[moved]
            for cache in caches:
                cache[slot, :, targets] = cache[slot, :, sources]

    def gather_features(
        self,
        hidden_states: np.ndarray,
        accepted_indices: np.ndarray,
        acceptance_lengths: np.ndarray,
        pending_features: np.ndarray,
    ) -> None:
        """Rows of `hidden_states` [B, T, F] at the accepted nodes to the first of `pending_features` [B, P, F]."""
        sizes = _check("gather_features", hidden_states, accepted_indices, acceptance_lengths, pending_features)
        for slot, length in enumerate(acceptance_lengths):
            for place, node in enumerate(accepted_indices[slot, : max(length, 0)]):
                if 0 <= node < sizes["T"]:
                    pending_features[slot, place] = hidden_states[slot, node]

    def advance_accepted(
        self,
        accepted_ids: np.ndarray,
        acceptance_lengths: np.ndarray,
        active: np.ndarray,
        token_ids: np.ndarray,
        kvcache_start_index: np.ndarray,
        positions: np.ndarray,
        token_counts: np.ndarray,
        pending_ids: np.ndarray,
        pending_counts: np.ndarray,
        draft_start: np.ndarray,
        draft_last: np.ndarray,
        emitted: np.ndarray,
    ) -> None:
        """Take the accepted tokens into the state of each active slot; see the interface."""
        state = (token_ids, kvcache_start_index, positions, token_counts)
        draft = (pending_ids, pending_counts, draft_start, draft_last)
        sizes = _check("advance_accepted", accepted_ids, acceptance_lengths, active, *state, *draft, emitted)
        check_emitted(sizes)
        for slot in range(sizes["B"]):
            length = min(int(acceptance_lengths[slot]), sizes["W"])
            emitted[slot] = -1
            emitted[slot, 0] = 0
            if active[slot] != 1 or length < 1:
                continue
            tokens = accepted_ids[slot, :length]
            emitted[slot, 0] = length
            emitted[slot, 1 : length + 1] = tokens
            pending_ids[slot] = -1
            pending_ids[slot, :length] = tokens
            pending_counts[slot] = length
            draft_start[slot] = kvcache_start_index[slot]
            draft_last[slot, 0] = length - 1
            token_ids[slot, 0] = tokens[-1]
            kvcache_start_index[slot] += length
            positions[slot] += length
            np.add.at(token_counts[slot], tokens[(tokens >= 0) & (tokens < sizes["V"])], 1)

    def append_pending(
        self,
        hidden_states: np.ndarray,
        tokens: np.ndarray,
        active: np.ndarray,
        pending_features: np.ndarray,
        pending_ids: np.ndarray,
        pending_counts: np.ndarray,
        kvcache_start_index: np.ndarray,
        draft_start: np.ndarray,
        draft_last: np.ndarray,
    ) -> None:
        """A plain step's feature and token join the draft's pending input of each active slot; see the interface."""
        pending = (pending_features, pending_ids, pending_counts)
        sizes = _check(
            "append_pending", hidden_states, tokens, active, *pending, kvcache_start_index, draft_start, draft_last
        )
        for slot in range(sizes["B"]):
            count = pending_counts[slot]
            if active[slot] != 1 or not 0 <= count < sizes["P"]:
                continue
            pending_features[slot, count] = hidden_states[slot, 0]
            pending_ids[slot, count] = tokens[slot]
            pending_counts[slot] = count + 1
            draft_start[slot] = kvcache_start_index[slot] - (count + 1)
            draft_last[slot, 0] = count


def _check(kernel: str, *arrays: np.ndarray) -> dict[str, int]:
    return check_acceptance(check_host_arguments, kernel, *arrays)


def _path_tokens(tokens: np.ndarray, ancestors: np.ndarray, vocabulary: int) -> list[int]:
    """Tokens of the nodes on a path, without the root's, as far as they are ids; `ancestors` [T] is the node's row."""
    path = tokens[1:][ancestors[1:]]
    return path[(path >= 0) & (path < vocabulary)].tolist()


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
