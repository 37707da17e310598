"""What follows acceptance, on the GPU: accepted rows and features move together, tokens are taken into the state."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from edgellm.kernels.acceptance_checks import check_acceptance, check_caches, check_emitted
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.checks import check_device_arguments
from edgellm.kernels.cuda_kernels import OTHER_KERNELS
from edgellm.kernels.launch import Kernel, KernelModule, Launch, pointer

#: As CACHES_PER_LAUNCH of cuda/accept_state.cu: addresses travel with the launch, so nothing is made ready before.
_CACHES_PER_LAUNCH = 256
_COPY_THREADS = 128
_FEATURE_THREADS = 256
_WARP = 32


class CudaAcceptedState:
    """This part of `edgellm.kernels.acceptance_interface.AcceptanceKernels`, launched on the stream of `module`."""

    def __init__(self, module: KernelModule) -> None:
        self._module = module

    def move_accepted(
        self,
        caches: Sequence[DeviceArray],
        kvcache_start_index: DeviceArray,
        accepted_indices: DeviceArray,
        acceptance_lengths: DeviceArray,
        hidden_states: DeviceArray,
        pending_features: DeviceArray,
    ) -> None:
        """Move the accepted rows of all caches and features together, one launch for each 256 caches."""
        arrays = (kvcache_start_index, accepted_indices, acceptance_lengths)
        sizes = check_caches(check_device_arguments, caches, *arrays)
        nodes = (hidden_states, accepted_indices, acceptance_lengths, pending_features)
        features = check_acceptance(check_device_arguments, "gather_features", *nodes)
        row_bytes = sizes["C"] * ITEM_SIZES[caches[0].dtype]
        feature_bytes = features["F"] * ITEM_SIZES[hidden_states.dtype]
        for first in range(0, len(caches), _CACHES_PER_LAUNCH):
            some = caches[first : first + _CACHES_PER_LAUNCH]
            width = _element_bytes((row_bytes, feature_bytes), *some, hidden_states, pending_features)
            elements, gathers = row_bytes // width, sizes["W"] if first == 0 else 0
            blocks = -(-len(some) * sizes["H"] * elements // _COPY_THREADS)
            pointers = (ctypes.c_void_p * _CACHES_PER_LAUNCH)(*(cache.pointer for cache in some))
            rows = (gathers, len(some), sizes["H"], sizes["R"], elements)
            gathered = (features["T"], features["P"], feature_bytes // width, sizes["W"])
            moved = (pointers, *arrays, hidden_states, pending_features, *rows, *gathered)
            self._launch_early(f"move_accepted_{width}", (gathers + blocks, sizes["B"], 1), _COPY_THREADS, *moved)

    def advance_accepted(
        self,
        accepted_ids: DeviceArray,
        acceptance_lengths: DeviceArray,
        active: DeviceArray,
        token_ids: DeviceArray,
        kvcache_start_index: DeviceArray,
        positions: DeviceArray,
        token_counts: DeviceArray,
        pending_ids: DeviceArray,
        pending_counts: DeviceArray,
        draft_start: DeviceArray,
        draft_last: DeviceArray,
        emitted: DeviceArray,
    ) -> None:
        """Take the accepted tokens into the state of each active slot; see the interface."""
        state = (token_ids, kvcache_start_index, positions, token_counts)
        draft = (pending_ids, pending_counts, draft_start, draft_last)
        arrays = (accepted_ids, acceptance_lengths, active, *state, *draft, emitted)
        sizes = check_acceptance(check_device_arguments, "advance_accepted", *arrays)
        check_emitted(sizes)
        shape = (sizes["V"], sizes["P"], sizes["W"])
        self._launch_early("advance_accepted", (sizes["B"], 1, 1), _WARP, *arrays, *shape)

    def append_pending(
        self,
        hidden_states: DeviceArray,
        tokens: DeviceArray,
        active: DeviceArray,
        pending_features: DeviceArray,
        pending_ids: DeviceArray,
        pending_counts: DeviceArray,
        kvcache_start_index: DeviceArray,
        draft_start: DeviceArray,
        draft_last: DeviceArray,
    ) -> None:
        """A plain step's feature and token join the draft's pending input of each active slot; see the interface."""
        pending = (pending_features, pending_ids, pending_counts)
        arrays = (hidden_states, tokens, active, *pending, kvcache_start_index, draft_start, draft_last)
        sizes = check_acceptance(check_device_arguments, "append_pending", *arrays)
        row_bytes = sizes["F"] * ITEM_SIZES[hidden_states.dtype]
        width = _element_bytes((row_bytes,), hidden_states, pending_features)
        shape = (sizes["P"], row_bytes // width)
        self._launch(f"append_pending_{width}", (sizes["B"], 1, 1), _FEATURE_THREADS, *arrays, *shape)

    def _launch(self, name: str, grid: tuple[int, int, int], threads: int, *arguments: Any) -> None:
        """Enqueue a kernel; arrays (None: null) and sizes become pointers and unsigned integers."""
        self._made(name, grid, threads, arguments)()

    def _launch_early(self, name: str, grid: tuple[int, int, int], threads: int, *arguments: Any) -> None:
        """Enqueue a kernel that waits for its predecessor itself and so may start while that one still runs."""
        launch = self._made(name, grid, threads, arguments)
        launch.overlap_previous()
        launch()

    def _made(self, name: str, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any]) -> Launch:
        return Launch(
            self._module, Kernel(OTHER_KERNELS, name), grid, threads, 0, [_argument(value) for value in arguments]
        )


def _argument(value: Any) -> Any:
    if value is None or isinstance(value, DeviceArray):
        return pointer(value)
    return ctypes.c_uint(value) if isinstance(value, int) else value


def _element_bytes(row_bytes: Sequence[int], *arrays: DeviceArray) -> int:
    """Bytes that one access can move in rows of `row_bytes` of all the arrays."""
    sizes = (*row_bytes, *(array.pointer for array in arrays))
    return next(width for width in (16, 4, 2) if not any(size % width for size in sizes))
