"""The acceptance kernels in NumPy: they define what `CudaAcceptance` computes, and run where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from edgellm.kernels.acceptance_checks import (
    check_acceptance,
    check_mapping,
    check_step,
    check_typical,
)
from edgellm.kernels.acceptance_interface import DRAFT_STREAM, NodeDraws, SlotDraws
from edgellm.kernels.checks import check_host_arguments
from edgellm.kernels.fixed_point_sampling import Distribution, Draws, divided
from edgellm.kernels.numpy_accepted_state import NumpyAcceptedState
from edgellm.kernels.numpy_kernels import NumpyKernels
from edgellm.kernels.sampled_chain import accept_chains
from edgellm.kernels.tree_walk import deepest_path, typical_children, walk, walk_all, write_accepted


class NumpyAcceptance(NumpyAcceptedState):
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
            self._process_nodes(
                slot, range(sizes["T"]), logits, token_counts, tree_tokens, tree_ancestors, settings, processed
            )

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
            nodes, parents, depths = (array[slot] for array in tree)
            if temperature[slot] == 0:
                path, tokens = walk(drawn[slot].item, nodes, parents, depths, sizes["W"])
            else:
                accepts = typical_children(processed[slot], thresholds[slot], nodes, epsilon, delta)
                path = deepest_path(accepts, parents, depths, sizes["W"])
                tokens = [int(nodes[node]) for node in path[1:]] + [int(drawn[slot, path[-1]])]
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
        _check(
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

        def distribution(slots: np.ndarray, node: int) -> Distribution:
            return Distribution(processed[slots, node], thresholds[slots, node], temperature[slots])

        accept_chains(distribution, tree_tokens, draft_probabilities, target_to_draft, drawing, active, accepted)

    def accept_draws(
        self,
        logits: np.ndarray,
        token_counts: np.ndarray,
        tree_tokens: np.ndarray,
        tree_parents: np.ndarray,
        tree_depths: np.ndarray,
        tree_ancestors: np.ndarray,
        draw_positions: np.ndarray,
        active: np.ndarray,
        slot_draws: SlotDraws,
        node_draws: NodeDraws,
        thresholds: np.ndarray,
        drawn: np.ndarray,
        accepted_indices: np.ndarray,
        accepted_ids: np.ndarray,
        acceptance_lengths: np.ndarray,
    ) -> None:
        """Process, filter and draw the nodes that the walk visits, and no others; see the interface."""
        tree = (tree_tokens, tree_parents, tree_depths)
        accepted = (accepted_indices, accepted_ids, acceptance_lengths)
        arrays = (logits, token_counts, *tree, tree_ancestors, draw_positions, active)
        _check("accept_draws", *arrays, *slot_draws, thresholds, drawn, *accepted)

        def draw(slot: int, node: int) -> int:
            row = slice(slot, slot + 1)
            self._filter_node(slot, node, logits, token_counts, tree_tokens, tree_ancestors, slot_draws, thresholds)
            names = (slot_draws.temperature[row], slot_draws.seeds[row], slot_draws.sequences[row])
            place = (slot, slice(node, node + 1))
            self._kernels.sample(logits[place], thresholds[place], *names, draw_positions[place], drawn[place])
            return int(drawn[slot, node])

        walk_all(draw, tree, active, None, accepted)

    def accept_sampled_draws(
        self,
        logits: np.ndarray,
        token_counts: np.ndarray,
        tree_tokens: np.ndarray,
        tree_ancestors: np.ndarray,
        draft_probabilities: np.ndarray,
        target_to_draft: np.ndarray,
        draw_positions: np.ndarray,
        active: np.ndarray,
        slot_draws: SlotDraws,
        node_draws: NodeDraws,
        thresholds: np.ndarray,
        accepted_indices: np.ndarray,
        accepted_ids: np.ndarray,
        acceptance_lengths: np.ndarray,
        workspace: np.ndarray,
    ) -> None:
        """Process and filter the nodes that the chain reaches, and no others; see the interface."""
        accepted = (accepted_indices, accepted_ids, acceptance_lengths)
        draft = (draft_probabilities, target_to_draft)
        arrays = (logits, token_counts, tree_tokens, tree_ancestors, *draft, draw_positions, active)
        _check("accept_sampled_draws", *arrays, *slot_draws, thresholds, *accepted, workspace)

        def distribution(slots: np.ndarray, node: int) -> Distribution:
            for slot in slots.tolist():
                self._filter_node(slot, node, logits, token_counts, tree_tokens, tree_ancestors, slot_draws, thresholds)
            return Distribution(logits[slots, node], thresholds[slots, node], slot_draws.temperature[slots])

        drawing = (slot_draws.seeds, slot_draws.sequences, draw_positions)
        accept_chains(distribution, tree_tokens, *draft, drawing, active, accepted)

    def _process_nodes(
        self,
        slot: int,
        nodes: Iterable[int],
        logits: np.ndarray,
        token_counts: np.ndarray,
        tree_tokens: np.ndarray,
        tree_ancestors: np.ndarray,
        settings: Sequence[np.ndarray],
        processed: np.ndarray,
    ) -> None:
        """`process_tree_logits` of some nodes of one slot; `settings` are its three penalties and the temperature."""
        repetition, presence, frequency, temperature = (setting[slot : slot + 1] for setting in settings)
        penalizes = repetition[0] != 1 or presence[0] != 0 or frequency[0] != 0
        counts = token_counts[slot : slot + 1]
        if penalizes:
            counts = counts.copy()
        for node in nodes:
            path: Sequence[int] = ()
            if penalizes:
                path = _path_tokens(tree_tokens[slot], tree_ancestors[slot, node], counts.shape[1])
            for token in path:
                counts[0, token] += 1
            place = (slot, slice(node, node + 1))
            self._kernels.process_logits(
                logits[place], counts, repetition, presence, frequency, temperature, processed[place]
            )
            for token in path:
                counts[0, token] -= 1

    def _filter_node(
        self,
        slot: int,
        node: int,
        logits: np.ndarray,
        token_counts: np.ndarray,
        tree_tokens: np.ndarray,
        tree_ancestors: np.ndarray,
        slot_draws: SlotDraws,
        thresholds: np.ndarray,
    ) -> None:
        """Process one node's row of `logits` in place and find its threshold."""
        settings = slot_draws[:4]
        self._process_nodes(slot, [node], logits, token_counts, tree_tokens, tree_ancestors, settings, logits)
        top_k, top_p, min_p = (values[slot : slot + 1] for values in slot_draws[4:7])
        place = (slot, slice(node, node + 1))
        self._kernels.filter_threshold(logits[place], top_k, top_p, min_p, thresholds[place])


def _check(kernel: str, *arrays: np.ndarray) -> dict[str, int]:
    return check_acceptance(check_host_arguments, kernel, *arrays)


def _path_tokens(tokens: np.ndarray, ancestors: np.ndarray, vocabulary: int) -> list[int]:
    """Tokens of the nodes on a path, without the root's, as far as they are ids; `ancestors` [T] is the node's row."""
    path = tokens[1:][ancestors[1:]]
    return path[(path >= 0) & (path < vocabulary)].tolist()
