"""The draft tree's kernels on the GPU: compiled by NVRTC, launched through `cuda.bindings`."""

from __future__ import annotations

import ctypes
from typing import Any

from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.checks import check_device_arguments
from edgellm.kernels.cuda_kernels import OTHER_KERNELS
from edgellm.kernels.draft_tree_checks import (
    check_draft_vocabulary,
    check_expansion,
    check_proposal,
    check_top_k,
    check_verification,
    check_workspace,
)
from edgellm.kernels.draft_tree_interface import Expansion
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch, pointer
from edgellm.kernels.log_softmax import CHUNK

_KEY_BYTES = 8
_THREADS, _EXPAND_THREADS = 512, 1024  # as the kernels' sources say
#: Threads that share one maximum in `draft_expand`, for few and for many of the best keys.
_LANES_OF_FEW, _LANES_OF_MANY, _FEW = 32, 4, 16
#: Shared memory for the lists that warps merge.
_LIST_BYTES = 32 << 10
#: Up to so many candidates, `draft_verification` keeps their keys, tokens and parents in shared memory.
_KEPT_CANDIDATES, _KEPT_BYTES = 2048, 12


class CudaDraftTree:
    """See `edgellm.kernels.draft_tree_interface.DraftTreeKernels`; arrays are `DeviceArray`, on the stream of `module`.

    Each kernel may start while the one before it in the stream still runs, and waits for it before it reads anything.
    """

    def __init__(self, module: KernelModule) -> None:
        self._module = module

    def expand_workspace_size(self, batch: int, draft_vocab_size: int, top_k: int) -> int:
        """Bytes of workspace for `expand_frontier` with `batch` sequences, at every level."""
        check_top_k("expand_workspace_size", top_k)
        check_draft_vocabulary("expand_workspace_size", draft_vocab_size)
        return _workspace_bytes(batch, draft_vocab_size, top_k)

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
        check_expansion(level, sizes)
        _check_workspace("expand_frontier", workspace, sizes["B"], sizes["V"], sizes["K"])
        rows, top_k = sizes["B"] * sizes["n"], sizes["K"]
        lanes = _LANES_OF_FEW if top_k <= _FEW else _LANES_OF_MANY
        arguments = (
            pointer(logits),
            *_partial_results(workspace, rows, _chunks(sizes["V"]), top_k),
            *_unsigned(score, sizes["V"], top_k, lanes),
        )
        shared_bytes = _KEY_BYTES * lanes * (CHUNK // _EXPAND_THREADS) * top_k
        self._launch("draft_expand", (_chunks(sizes["V"]), rows, 1), shared_bytes, arguments, _EXPAND_THREADS)

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
        candidate_parents: DeviceArray,
        frontiers: DeviceArray,
        inputs_embeds: DeviceArray,
        hidden_out: DeviceArray,
        kvcache_start_index: DeviceArray,
        rope_rotary_cos_sin: DeviceArray,
        attention_mask: DeviceArray,
        expansion: Expansion | None,
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
            candidate_parents,
            frontiers,
            inputs_embeds,
            hidden_out,
            kvcache_start_index,
            rope_rotary_cos_sin,
            attention_mask,
        )
        sizes = check_device_arguments("prepare_proposal", *arrays)
        check_proposal(level, sizes, expansion)
        item_size, top_k = ITEM_SIZES[embedding.dtype], sizes["K"]
        rows = 1 if level == 1 else top_k
        expanded, list_bytes = _expansion_arguments("prepare_proposal", expansion, sizes["B"], top_k)
        arguments = (
            *map(pointer, arrays),
            *expanded,
            *_unsigned(select, level, *(sizes[axis] for axis in "FCnPRLV")),
            *map(ctypes.c_size_t, (sizes["H"] * item_size, sizes["G"] * item_size)),
        )
        shared_bytes = (_KEY_BYTES + 4) * rows * top_k + list_bytes + 4 * (rows + (level - 1) * top_k)
        name = f"draft_proposal_{embedding.dtype}"
        self._launch(name, (top_k, sizes["B"], 1), shared_bytes, arguments)

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
        frontiers: DeviceArray,
        selected: DeviceArray,
        tree_tokens: DeviceArray,
        tree_parents: DeviceArray,
        tree_depths: DeviceArray,
        tree_ancestors: DeviceArray,
        draw_positions: DeviceArray,
        inputs_embeds: DeviceArray,
        rope_rotary_cos_sin: DeviceArray,
        attention_mask: DeviceArray,
        expansion: Expansion | None,
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
        sizes = check_device_arguments("prepare_verification", *arrays)
        check_verification(candidates, sizes, expansion)
        top_k, keeps = sizes["K"], candidates <= _KEPT_CANDIDATES
        level = 1 if expansion is None else expansion.level
        expanded, list_bytes = _expansion_arguments("prepare_verification", expansion, sizes["B"], top_k)
        rows = 0 if expansion is None else 1 if level == 1 else top_k
        arguments = (
            *map(pointer, arrays),
            *expanded,
            *_unsigned(level, sizes["F"], top_k, select, candidates),
            *_unsigned(*(sizes[axis] for axis in "CSPRLV")),
            ctypes.c_size_t(sizes["H"] * ITEM_SIZES[embedding.dtype]),
        )
        name = f"draft_verification_{'' if keeps else 'large_'}{embedding.dtype}"
        shared_bytes = (_KEY_BYTES + 4) * rows * top_k + list_bytes + 4 * rows
        shared_bytes += _KEPT_BYTES * candidates if keeps else 0
        self._launch(name, (sizes["T"], sizes["B"], 1), shared_bytes, arguments)

    def _launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        shared_bytes: int,
        arguments: tuple[Any, ...],
        threads: int = _THREADS,
    ) -> None:
        launch = Launch(self._module, Kernel(OTHER_KERNELS, name), grid, threads, shared_bytes, arguments)
        launch.overlap_previous()
        launch()


def _chunks(draft_vocab_size: int) -> int:
    return -(-draft_vocab_size // CHUNK)


def _workspace_bytes(batch: int, draft_vocab_size: int, top_k: int) -> int:
    """Of the best keys, the sum and the maximum of each chunk of each row."""
    return batch * top_k * _chunks(draft_vocab_size) * (_KEY_BYTES * top_k + 8 + 4)


def _check_workspace(kernel: str, workspace: DeviceArray, batch: int, draft_vocab_size: int, top_k: int) -> None:
    check_workspace(kernel, workspace.size, _workspace_bytes(batch, draft_vocab_size, top_k))
    if workspace.pointer % 8:
        raise KernelError(f"{kernel}: workspace starts at {workspace.pointer:#x}; expected a multiple of 8 bytes")


def _partial_results(workspace: DeviceArray, rows: int, chunks: int, top_k: int) -> tuple[ctypes.c_void_p, ...]:
    """Best keys, sums and maxima of the chunks of all rows."""
    sums = workspace.pointer + _KEY_BYTES * rows * chunks * top_k
    return tuple(map(ctypes.c_void_p, (workspace.pointer, sums, sums + 8 * rows * chunks)))


def _expansion_arguments(
    kernel: str, expansion: Expansion | None, batch: int, top_k: int
) -> tuple[tuple[Any, ...], int]:
    """What a kernel needs to finish an expansion, and its bytes of shared memory for lists to merge."""
    if expansion is None:
        return (*(ctypes.c_void_p(0) for _ in range(4)), *_unsigned(0, 0, 0)), 0
    sizes = check_device_arguments("expansion", expansion.draft_to_target, expansion.workspace)
    check_draft_vocabulary(kernel, sizes["V"])
    _check_workspace(kernel, expansion.workspace, batch, sizes["V"], top_k)
    chunks, rows = _chunks(sizes["V"]), 1 if expansion.level == 1 else top_k
    list_bytes = _KEY_BYTES * chunks * top_k
    mergers = min(rows, _THREADS // 32, max(1, _LIST_BYTES // list_bytes))
    arguments = (
        *_partial_results(expansion.workspace, batch * rows, chunks, top_k),
        pointer(expansion.draft_to_target),
        *_unsigned(chunks, expansion.score, mergers),
    )
    return arguments, mergers * list_bytes


def _unsigned(*values: int) -> tuple[ctypes.c_uint, ...]:
    return tuple(map(ctypes.c_uint, values))
