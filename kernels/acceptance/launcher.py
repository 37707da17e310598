"""The acceptance kernels on the GPU: compiled by NVRTC, launched through `cuda.bindings`."""

from __future__ import annotations

import ctypes

from edgellm.kernels.acceptance_checks import (
    check_acceptance,
    check_mapping,
    check_step,
    check_typical,
    check_workspace,
)
from edgellm.kernels.acceptance_interface import NodeDraws, SlotDraws
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.checks import check_device_arguments
from edgellm.kernels.cuda_accepted_state import CudaAcceptedState
from edgellm.kernels.cuda_kernels import CudaKernels
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import KernelModule

#: Bytes of one `Row` of cuda/acceptance.cuh, which asserts it.
_ROW_BYTES = 56
_ROW_THREADS = 512
_WALK_THREADS = 256
_WARP = 32
#: Blocks of _ROW_THREADS threads that a multiprocessor runs at once; more than these only wait in line.
_BLOCKS_PER_MULTIPROCESSOR = 4


class CudaAcceptance(CudaAcceptedState):
    """See `edgellm.kernels.acceptance_interface.AcceptanceKernels`; arrays are `DeviceArray`.

    All goes to the stream of `module`. A NaN among logits counts as -inf; a row of which nothing passes its threshold
    draws id 0.
    """

    def __init__(self, kernels: CudaKernels, module: KernelModule) -> None:
        """`kernels` filter what `draft_sample` draws from; their stream must be the module's."""
        super().__init__(module)
        self._kernels = kernels

    def process_tree_logits(
        self,
        logits: DeviceArray,
        token_counts: DeviceArray,
        tree_tokens: DeviceArray,
        tree_ancestors: DeviceArray,
        repetition_penalty: DeviceArray,
        presence_penalty: DeviceArray,
        frequency_penalty: DeviceArray,
        temperature: DeviceArray,
        processed: DeviceArray,
    ) -> None:
        """Penalties and temperature of every node, `logits` to `processed` [B, T, V]; see the interface."""
        settings = (repetition_penalty, presence_penalty, frequency_penalty, temperature)
        arrays = (logits, token_counts, tree_tokens, tree_ancestors, *settings, processed)
        sizes = _check("process_tree_logits", *arrays)
        grid = (self._blocks(sizes["V"], sizes["B"] * sizes["T"]), sizes["T"], sizes["B"])
        self._launch("process_tree_logits", grid, _ROW_THREADS, *arrays, sizes["V"])

    def eagle_accept_workspace_size(self, batch: int, tree_size: int, vocabulary: int) -> int:
        """Bytes of workspace that `eagle_accept` needs."""
        return _ROW_BYTES * batch * tree_size

    def eagle_accept(
        self,
        logits: DeviceArray,
        tree_tokens: DeviceArray,
        tree_parents: DeviceArray,
        tree_depths: DeviceArray,
        active: DeviceArray,
        vocab_mapping: DeviceArray | None,
        accepted_indices: DeviceArray,
        accepted_ids: DeviceArray,
        acceptance_lengths: DeviceArray,
        workspace: DeviceArray,
    ) -> None:
        """Greedy acceptance in one launch; see the interface."""
        tree = (tree_tokens, tree_parents, tree_depths, active)
        accepted = (accepted_indices, accepted_ids, acceptance_lengths)
        sizes = _check("eagle_accept", logits, *tree, *accepted, workspace)
        check_mapping(check_device_arguments, "eagle_accept", vocab_mapping, sizes["V"])
        rows = sizes["B"] * sizes["T"]
        _check_workspace("eagle_accept", sizes, workspace, _ROW_BYTES * rows)
        grid = (self._blocks(sizes["V"], rows), sizes["T"], sizes["B"])
        arguments = (logits, *tree, vocab_mapping, *accepted, workspace, sizes["V"], sizes["W"])
        self._launch_early("eagle_accept", grid, _ROW_THREADS, *arguments)

    def accept_drawn(
        self,
        drawn: DeviceArray,
        tree_tokens: DeviceArray,
        tree_parents: DeviceArray,
        tree_depths: DeviceArray,
        active: DeviceArray,
        vocab_mapping: DeviceArray | None,
        accepted_indices: DeviceArray,
        accepted_ids: DeviceArray,
        acceptance_lengths: DeviceArray,
    ) -> None:
        """Follow the `drawn` [B, T] tokens through the trees; see the interface."""
        tree = (tree_tokens, tree_parents, tree_depths, active)
        accepted = (accepted_indices, accepted_ids, acceptance_lengths)
        sizes = _check("accept_drawn", drawn, *tree, *accepted)
        mapped = check_mapping(check_device_arguments, "accept_drawn", vocab_mapping, None)
        arguments = (drawn, *tree, vocab_mapping, *accepted, sizes["T"], mapped, sizes["W"])
        self._launch("accept_drawn", (sizes["B"], 1, 1), _WALK_THREADS, *arguments)

    def sampling_workspace_size(self, batch: int, tree_size: int, vocabulary: int) -> int:
        """Bytes of workspace that `typical_accept` and `accept_sampled_chain` need."""
        return _ROW_BYTES * batch * tree_size

    def typical_accept(
        self,
        processed: DeviceArray,
        thresholds: DeviceArray,
        temperature: DeviceArray,
        drawn: DeviceArray,
        tree_tokens: DeviceArray,
        tree_parents: DeviceArray,
        tree_depths: DeviceArray,
        active: DeviceArray,
        epsilon: float,
        delta: float,
        accepted_indices: DeviceArray,
        accepted_ids: DeviceArray,
        acceptance_lengths: DeviceArray,
        workspace: DeviceArray,
    ) -> None:
        """The deepest path of typical tokens, then `drawn` at its end; see the interface."""
        distribution = (processed, thresholds, temperature)
        tree = (tree_tokens, tree_parents, tree_depths, active)
        accepted = (accepted_indices, accepted_ids, acceptance_lengths)
        sizes = _check("typical_accept", *distribution, drawn, *tree, *accepted, workspace)
        check_typical(epsilon, delta)
        self._row_totals("typical_accept", sizes, processed, thresholds, active, tree_tokens, workspace)
        bounds = (ctypes.c_double(epsilon), ctypes.c_double(delta))
        arguments = (*distribution, drawn, *tree, *bounds, *accepted, workspace)
        shape = (sizes["T"], sizes["V"], sizes["W"])
        self._launch("typical_accept", (sizes["B"], 1, 1), _WALK_THREADS, *arguments, *shape)

    def draft_sample_workspace_size(self, batch: int, draft_vocabulary: int) -> int:
        """Bytes of workspace that `draft_sample` needs: scaled logits, rows, thresholds."""
        return _scaled_bytes(batch, draft_vocabulary) + (_ROW_BYTES + 4) * batch

    def draft_sample(
        self,
        logits: DeviceArray,
        draft_to_target: DeviceArray,
        temperature: DeviceArray,
        top_k: DeviceArray,
        top_p: DeviceArray,
        min_p: DeviceArray,
        seeds: DeviceArray,
        sequences: DeviceArray,
        positions: DeviceArray,
        step: int,
        chain_tokens: DeviceArray,
        draft_probabilities: DeviceArray,
        workspace: DeviceArray,
    ) -> None:
        """Draw token `step` of sampled chains from the draft's q and keep q; see the interface."""
        filters, draw = (top_k, top_p, min_p), (seeds, sequences, positions)
        drawn = (chain_tokens, draft_probabilities)
        sizes = _check("draft_sample", logits, draft_to_target, temperature, *filters, *draw, *drawn, workspace)
        check_step(sizes, step)
        batch, vocabulary = sizes["B"], sizes["U"]
        _check_workspace("draft_sample", sizes, workspace, self.draft_sample_workspace_size(batch, vocabulary))
        rows_start = workspace.pointer + _scaled_bytes(batch, vocabulary)
        rows = DeviceArray(rows_start, (_ROW_BYTES * batch,), "uint8", workspace)
        scaled = DeviceArray(workspace.pointer, (batch, vocabulary), "float32", workspace)
        thresholds = DeviceArray(rows_start + rows.nbytes, (batch,), "float32", workspace)
        self._zero(rows)
        grid = (self._blocks(vocabulary, batch), batch, 1)
        self._launch("draft_scale", grid, _ROW_THREADS, logits, temperature, scaled, rows, vocabulary)
        self._kernels.filter_threshold(scaled, *filters, thresholds)
        self._launch("draft_total", grid, _ROW_THREADS, scaled, thresholds, rows, vocabulary)
        arguments = (scaled, thresholds, temperature, draft_to_target, *draw, *drawn, rows)
        self._launch("draft_draw", grid, _ROW_THREADS, *arguments, vocabulary, step, sizes["D"])

    def accept_sampled_chain(
        self,
        processed: DeviceArray,
        thresholds: DeviceArray,
        temperature: DeviceArray,
        tree_tokens: DeviceArray,
        draft_probabilities: DeviceArray,
        target_to_draft: DeviceArray,
        seeds: DeviceArray,
        sequences: DeviceArray,
        draw_positions: DeviceArray,
        active: DeviceArray,
        accepted_indices: DeviceArray,
        accepted_ids: DeviceArray,
        acceptance_lengths: DeviceArray,
        workspace: DeviceArray,
    ) -> None:
        """Speculative sampling of chains; see the interface."""
        distribution = (processed, thresholds, temperature)
        draft, draw = (draft_probabilities, target_to_draft), (seeds, sequences, draw_positions)
        accepted = (accepted_indices, accepted_ids, acceptance_lengths)
        arrays = (*distribution, tree_tokens, *draft, *draw, active)
        sizes = _check("accept_sampled_chain", *arrays, *accepted, workspace)
        self._row_totals("accept_sampled_chain", sizes, processed, thresholds, active, tree_tokens, workspace)
        shape = [sizes[axis] for axis in "TVDUW"]
        self._launch("accept_chain_test", (sizes["B"], 1, 1), _WARP, *arrays, *accepted, workspace, *shape)
        grid = (self._blocks(sizes["V"], sizes["B"]), sizes["B"], 1)
        arguments = (*distribution, *draft, *draw, active, accepted_ids, workspace)
        self._launch("accept_chain_draw", grid, _ROW_THREADS, *arguments, *shape)

    def accept_draws(
        self,
        logits: DeviceArray,
        token_counts: DeviceArray,
        tree_tokens: DeviceArray,
        tree_parents: DeviceArray,
        tree_depths: DeviceArray,
        tree_ancestors: DeviceArray,
        draw_positions: DeviceArray,
        active: DeviceArray,
        slot_draws: SlotDraws,
        node_draws: NodeDraws,
        thresholds: DeviceArray,
        drawn: DeviceArray,
        accepted_indices: DeviceArray,
        accepted_ids: DeviceArray,
        acceptance_lengths: DeviceArray,
    ) -> None:
        """Follow what plain decoding draws at each node, from the logits on; see the interface."""
        tree = (tree_tokens, tree_parents, tree_depths)
        accepted = (accepted_indices, accepted_ids, acceptance_lengths)
        arrays = (logits, token_counts, *tree, tree_ancestors, draw_positions, active)
        sizes = _check("accept_draws", *arrays, *slot_draws, thresholds, drawn, *accepted)
        self._filter_nodes(logits, token_counts, tree_tokens, tree_ancestors, slot_draws, node_draws, thresholds)
        nodes = sizes["B"] * sizes["T"]
        rows, bounds = logits.reshape(nodes, sizes["V"]), thresholds.reshape(nodes)
        names = (node_draws.temperature, node_draws.seeds, node_draws.sequences, draw_positions.reshape(nodes))
        self._kernels.sample(rows, bounds, *names, drawn.reshape(nodes))
        self.accept_drawn(drawn, *tree, active, None, *accepted)

    def accept_sampled_draws(
        self,
        logits: DeviceArray,
        token_counts: DeviceArray,
        tree_tokens: DeviceArray,
        tree_ancestors: DeviceArray,
        draft_probabilities: DeviceArray,
        target_to_draft: DeviceArray,
        draw_positions: DeviceArray,
        active: DeviceArray,
        slot_draws: SlotDraws,
        node_draws: NodeDraws,
        thresholds: DeviceArray,
        accepted_indices: DeviceArray,
        accepted_ids: DeviceArray,
        acceptance_lengths: DeviceArray,
        workspace: DeviceArray,
    ) -> None:
        """Acceptance of sampled chains from the logits on; see the interface."""
        draft = (draft_probabilities, target_to_draft)
        accepted = (accepted_indices, accepted_ids, acceptance_lengths)
        arrays = (logits, token_counts, tree_tokens, tree_ancestors, *draft, draw_positions, active)
        _check("accept_sampled_draws", *arrays, *slot_draws, thresholds, *accepted, workspace)
        self._filter_nodes(logits, token_counts, tree_tokens, tree_ancestors, slot_draws, node_draws, thresholds)
        draw = (slot_draws.seeds, slot_draws.sequences, draw_positions)
        distribution = (logits, thresholds, slot_draws.temperature)
        self.accept_sampled_chain(*distribution, tree_tokens, *draft, *draw, active, *accepted, workspace)

    def _filter_nodes(
        self,
        logits: DeviceArray,
        token_counts: DeviceArray,
        tree_tokens: DeviceArray,
        tree_ancestors: DeviceArray,
        slot_draws: SlotDraws,
        node_draws: NodeDraws,
        thresholds: DeviceArray,
    ) -> None:
        """Process all rows of `logits` in place and find their thresholds."""
        self.process_tree_logits(logits, token_counts, tree_tokens, tree_ancestors, *slot_draws[:4], logits)
        rows = logits.reshape(thresholds.size, logits.shape[2])
        filters = (node_draws.top_k, node_draws.top_p, node_draws.min_p)
        self._kernels.filter_threshold(rows, *filters, thresholds.reshape(thresholds.size))

    def _row_totals(
        self,
        kernel: str,
        sizes: dict[str, int],
        processed: DeviceArray,
        thresholds: DeviceArray,
        active: DeviceArray,
        tree_tokens: DeviceArray,
        workspace: DeviceArray,
    ) -> None:
        """Maximum and sums of weights of every node's row, into the workspace."""
        rows = sizes["B"] * sizes["T"]
        _check_workspace(kernel, sizes, workspace, _ROW_BYTES * rows)
        grid = (self._blocks(sizes["V"], rows), sizes["T"], sizes["B"])
        used = (active, tree_tokens, workspace, sizes["V"])
        self._launch("accept_row_best", grid, _ROW_THREADS, processed, *used)
        self._launch("accept_row_total", grid, _ROW_THREADS, processed, thresholds, *used)

    def _blocks(self, vocabulary: int, rows: int) -> int:
        """Blocks for each of `rows` rows: as many as the GPU runs at once, no more than have four tokens a thread."""
        most = max(1, _BLOCKS_PER_MULTIPROCESSOR * self._module.multiprocessors // rows)
        return min(-(-vocabulary // (4 * _ROW_THREADS)), most)

    def _zero(self, array: DeviceArray) -> None:
        driver = self._module.driver
        (status,) = driver.cuMemsetD8Async(array.pointer, 0, array.nbytes, self._module.stream)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"clearing {array.nbytes} bytes of workspace failed: {status}")


def _check(kernel: str, *arrays: DeviceArray) -> dict[str, int]:
    return check_acceptance(check_device_arguments, kernel, *arrays)


def _check_workspace(kernel: str, sizes: dict[str, int], workspace: DeviceArray, needed: int) -> None:
    check_workspace(kernel, sizes, needed)
    if workspace.pointer % 16:
        raise KernelError(f"{kernel}: workspace starts at {workspace.pointer:#x}; expected a multiple of 16 bytes")


def _scaled_bytes(batch: int, vocabulary: int) -> int:
    """Bytes of scaled logits at the start of a workspace of `draft_sample`, filled up to 16."""
    return -(-batch * vocabulary * ITEM_SIZES["float32"] // 16) * 16
