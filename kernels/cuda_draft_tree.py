"""The draft tree's kernels on the GPU: compiled by NVRTC, launched through `cuda.bindings`."""

from __future__ import annotations

import ctypes
from typing import Any

from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.checks import check_device_arguments
from edgellm.kernels.draft_tree_checks import (
    check_draft_vocabulary,
    check_expansion,
    check_proposal,
    check_top_k,
    check_verification,
)
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import KernelModule, Launch, pointer
from edgellm.kernels.log_softmax import CHUNK

#: Frontier nodes of a batch; each has a counter at the start of the workspace, whatever the other sizes are.
MAXIMUM_ROWS = 1024

_COUNTER_BYTES = 4 * MAXIMUM_ROWS
_KEY_BYTES = 8
_THREADS = 512  # THREADS of cuda/draft_tree.cuh
_MAXIMUM_KEYS = 4096  # MAXIMUM_KEYS of cuda/draft_tree.cuh
_TREE_THREADS = 512  # TREE_THREADS of cuda/draft_verification.cu
#: Up to so many candidates, a block of `draft_verification` keeps their keys in 32 KiB of shared memory.
_KEPT_KEYS = 8192


class CudaDraftTree:
    """See `edgellm.kernels.draft_tree_interface.DraftTreeKernels`; arrays are `DeviceArray`, launches go to one stream.

    Each kernel may start while the one before it in the stream still runs, and waits for it before it reads anything.
    """

    def __init__(self, stream: Any, compute_capability: str | None = None) -> None:
        """Load the kernels into the current CUDA context.

        `stream` is a pycuda stream; `compute_capability` ("sm_90") is the current device's if None. Raises
        MissingDependencyError or KernelError.
        """
        if compute_capability is None:
            import pycuda.driver as cuda

            major, minor = cuda.Context.get_device().compute_capability()
            compute_capability = f"sm_{major}{minor}"
        self._module = KernelModule(compute_capability, stream.handle)

    def expand_workspace_size(self, batch: int, draft_vocab_size: int, top_k: int) -> int:
        """Bytes of workspace for `expand_frontier` with `batch` sequences, at every level."""
        check_top_k("expand_workspace_size", top_k)
        check_draft_vocabulary(draft_vocab_size)
        chunks = batch * top_k * _chunks(draft_vocab_size)
        return _COUNTER_BYTES + chunks * (8 + _KEY_BYTES * top_k + 4)

    def expand_frontier(
        self,
        level: int,
        score: bool,
        logits: DeviceArray,
        draft_to_target: DeviceArray,
        frontiers: DeviceArray,
        candidate_tokens: DeviceArray,
        candidate_scores: DeviceArray,
        candidate_parents: DeviceArray,
        workspace: DeviceArray,
    ) -> None:
        """The K likeliest continuations of the root (level 1) or of each frontier node; see the interface."""
        candidates = (candidate_tokens, candidate_scores, candidate_parents)
        sizes = check_device_arguments("expand_frontier", logits, draft_to_target, frontiers, *candidates, workspace)
        check_top_k("expand_frontier", sizes["K"])
        check_draft_vocabulary(sizes["V"])
        check_expansion(level, sizes, self.expand_workspace_size(sizes["B"], sizes["V"], sizes["K"]))
        rows, chunks, top_k = sizes["B"] * sizes["n"], _chunks(sizes["V"]), sizes["K"]
        if rows > MAXIMUM_ROWS:
            raise KernelError(f"expand_frontier: {rows} frontier nodes in the batch; expected at most {MAXIMUM_ROWS}")
        if workspace.pointer % 8:
            raise KernelError("expand_frontier: workspace starts at an address that is no multiple of 8; align it")
        sums = workspace.pointer + _COUNTER_BYTES
        best = sums + 8 * rows * chunks
        maxima = best + _KEY_BYTES * rows * chunks * top_k
        arguments = (
            *map(pointer, (logits, draft_to_target, frontiers, *candidates, workspace)),
            *map(ctypes.c_void_p, (sums, best, maxima)),
            *_unsigned(score, sizes["V"], sizes["n"], level, sizes["F"], top_k, sizes["C"]),
        )
        shared_bytes = _gathered_bytes(top_k) + _KEY_BYTES * _MAXIMUM_KEYS
        self._launch("draft_expand", (chunks, rows, 1), _THREADS, shared_bytes, arguments)

    def prepare_proposal(
        self,
        level: int,
        select: bool,
        committed: DeviceArray,
        position_offsets: DeviceArray,
        rotary_table: DeviceArray,
        embedding: DeviceArray,
        hidden_in: DeviceArray,
        candidate_tokens: DeviceArray,
        candidate_scores: DeviceArray,
        frontiers: DeviceArray,
        inputs_embeds: DeviceArray,
        hidden_out: DeviceArray,
        kvcache_start_index: DeviceArray,
        rope_rotary_cos_sin: DeviceArray,
        attention_mask: DeviceArray,
    ) -> None:
        """What the draft model reads in propose step `level`; see the interface."""
        arrays = (
            committed,
            position_offsets,
            rotary_table,
            embedding,
            hidden_in,
            candidate_tokens,
            candidate_scores,
            frontiers,
            inputs_embeds,
            hidden_out,
            kvcache_start_index,
            rope_rotary_cos_sin,
            attention_mask,
        )
        sizes = check_device_arguments("prepare_proposal", *arrays)
        check_proposal(level, sizes)
        item_size, top_k = ITEM_SIZES[embedding.dtype], sizes["K"]
        arguments = (
            *map(pointer, arrays),
            *_unsigned(select, level, *(sizes[axis] for axis in "FCnPRLV")),
            *map(ctypes.c_size_t, (sizes["H"] * item_size, sizes["G"] * item_size)),
        )
        shared_bytes = _gathered_bytes(top_k) + _KEY_BYTES * top_k**2 + 4 * (level - 1) * top_k
        name = f"draft_proposal_{embedding.dtype}"
        self._launch(name, (top_k, sizes["B"], 1), _THREADS, shared_bytes, arguments)

    def prepare_verification(
        self,
        select: bool,
        candidates: int,
        token_ids: DeviceArray,
        positions: DeviceArray,
        committed: DeviceArray,
        position_offsets: DeviceArray,
        rotary_table: DeviceArray,
        embedding: DeviceArray,
        candidate_tokens: DeviceArray,
        candidate_scores: DeviceArray,
        candidate_parents: DeviceArray,
        selected: DeviceArray,
        tree_tokens: DeviceArray,
        tree_parents: DeviceArray,
        tree_depths: DeviceArray,
        tree_ancestors: DeviceArray,
        draw_positions: DeviceArray,
        inputs_embeds: DeviceArray,
        rope_rotary_cos_sin: DeviceArray,
        attention_mask: DeviceArray,
    ) -> None:
        """The tree to verify and what the base model reads of it; see the interface."""
        arrays = (
            token_ids,
            positions,
            committed,
            position_offsets,
            rotary_table,
            embedding,
            candidate_tokens,
            candidate_scores,
            candidate_parents,
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
        sizes = check_device_arguments("prepare_verification", *arrays)
        check_verification(candidates, sizes)
        keeps_keys = candidates <= _KEPT_KEYS
        arguments = (
            *map(pointer, arrays),
            *_unsigned(select, keeps_keys, candidates, *(sizes[axis] for axis in "CSPRLV")),
            ctypes.c_size_t(sizes["H"] * ITEM_SIZES[embedding.dtype]),
        )
        name = f"draft_verification_{embedding.dtype}"
        shared_bytes = 4 * candidates if keeps_keys else 0
        self._launch(name, (sizes["T"], sizes["B"], 1), _TREE_THREADS, shared_bytes, arguments)

    def _launch(
        self, name: str, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: tuple[Any, ...]
    ) -> None:
        launch = Launch(self._module, name, grid, threads, shared_bytes, arguments)
        launch.overlap_previous()
        launch()


def _chunks(draft_vocab_size: int) -> int:
    return -(-draft_vocab_size // CHUNK)


def _gathered_bytes(top_k: int) -> int:
    """Shared memory of `best_keys`: gathered_keys of cuda/draft_tree.cuh."""
    return _KEY_BYTES * (128 if top_k <= 16 else 32) * top_k


def _unsigned(*values: int) -> tuple[ctypes.c_uint, ...]:
    return tuple(map(ctypes.c_uint, values))
