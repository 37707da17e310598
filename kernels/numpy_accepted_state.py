"""What follows acceptance, in NumPy: accepted rows and features move together, tokens are taken into the state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.kernels.acceptance_checks import check_acceptance, check_caches, check_emitted
from edgellm.kernels.checks import check_host_arguments


class NumpyAcceptedState:
    """This part of `edgellm.kernels.acceptance_interface.AcceptanceKernels`."""

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
        sizes = check_acceptance(
            check_host_arguments,
            "gather_features",
            hidden_states,
            accepted_indices,
            acceptance_lengths,
            pending_features,
        )
        for slot, length in enumerate(acceptance_lengths):
            for place, node in enumerate(accepted_indices[slot, : max(length, 0)]):
                if 0 <= node < sizes["T"]:
                    pending_features[slot, place] = hidden_states[slot, node]

    def move_accepted(
        self,
        caches: Sequence[np.ndarray],
        kvcache_start_index: np.ndarray,
        accepted_indices: np.ndarray,
        acceptance_lengths: np.ndarray,
        hidden_states: np.ndarray,
        pending_features: np.ndarray,
    ) -> None:
        """`compact_kv` and `gather_features`."""
        self.compact_kv(caches, kvcache_start_index, accepted_indices, acceptance_lengths)
        self.gather_features(hidden_states, accepted_indices, acceptance_lengths, pending_features)

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
        sizes = check_acceptance(
            check_host_arguments, "advance_accepted", accepted_ids, acceptance_lengths, active, *state, *draft, emitted
        )
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
        sizes = check_acceptance(
            check_host_arguments,
            "append_pending",
            hidden_states,
            tokens,
            active,
            *pending,
            kvcache_start_index,
            draft_start,
            draft_last,
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
