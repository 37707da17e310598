"""The acceptance kernels on the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from edgellm.kernels.acceptance import contract
from edgellm.kernels.acceptance.contract import AcceptanceKernels, Accepted, NodeLogits
from edgellm.kernels.acceptance.twin import check_alike
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.contracts import cuda_header
from edgellm.kernels.launch import Kernel, KernelModule
from edgellm.kernels.launcher import Launcher, check_workspace
from edgellm.kernels.sampling.contract import SamplingRows, SequenceState
from edgellm.kernels.sampling.launcher import SAMPLING_HEADER, SAMPLING_MACROS, CudaSampling
from edgellm.kernels.tree.contract import TreeNodes

#: Bytes of one `Row` of acceptance.cuh, which asserts it.
_ROW_BYTES = 56
_ROW_THREADS, _WALK_THREADS, _COPY_THREADS, _FEATURE_THREADS, _WARP = 512, 256, 128, 256, 32
#: Of each array whose slots move: as many as keep the largest GPUs busy.
_MOST_BLOCKS = 1024
#: Addresses of caches travel with a launch, so nothing is made ready before.
_CACHES_PER_LAUNCH = 256
#: The widest type that moves a number of bytes at once.
_ELEMENTS = {16: "uint4", 4: "unsigned", 2: "unsigned short"}


def _source(name: str, *expressions: str) -> ModuleSource:
    macros = {
        "ROW_BYTES": _ROW_BYTES,
        "MAXIMUM_TREE_SIZE": contract.MAXIMUM_TREE_SIZE,
        "MAXIMUM_ACCEPTED": contract.MAXIMUM_ACCEPTED,
        "CACHES_PER_LAUNCH": _CACHES_PER_LAUNCH,
        "TARGET_STREAM": contract.TARGET_STREAM,
        "DRAFT_STREAM": contract.DRAFT_STREAM,
        "TEST_STREAM": contract.TEST_STREAM,
        "RESIDUAL_STREAM": contract.RESIDUAL_STREAM,
    }
    headers = (("acceptance/arguments.cuh", cuda_header(AcceptanceKernels)), SAMPLING_HEADER)
    return ModuleSource(name, (f"acceptance/{name}.cu",), expressions, (*macros.items(), *SAMPLING_MACROS), headers)


#: The walk through a tree; what advances after it; the draw at each node; typical acceptance; sampled chains.
WALK = _source("walk", "eagle_accept", "accept_drawn")
ADVANCE = _source(
    "advance",
    "advance_accepted",
    *(
        f"{name}<{element}>"
        for name in ("move_accepted", "move_slots", "append_pending")
        for element in _ELEMENTS.values()
    ),
)
TREE_LOGITS = _source("tree_logits", "process_tree_logits")
TYPICAL = _source("typical", "row_best<TypicalAcceptArguments>", "row_total<TypicalAcceptArguments>", "typical_accept")
CHAINS = _source(
    "chains",
    "row_best<AcceptSampledChainArguments>",
    "row_total<AcceptSampledChainArguments>",
    *("draft_scale", "draft_total", "draft_draw", "chain_test", "chain_draw"),
)


class CudaAcceptance(Launcher):
    """See `edgellm.kernels.acceptance.contract.AcceptanceKernels`; arrays are `DeviceArray`."""

    def __init__(self, module: KernelModule, sampling: CudaSampling) -> None:
        """`sampling` filters and draws; its stream must be the module's."""
        super().__init__(module, AcceptanceKernels)
        self._sampling = sampling

    def process_tree_logits(self, logits, token_counts, tree, rows, processed):
        sizes, packed = self._packed("process_tree_logits", logits, token_counts, tree, rows, processed)
        self._launch(Kernel(TREE_LOGITS, "process_tree_logits"), self._node_grid(sizes), _ROW_THREADS, (packed,))

    def accept_workspace_size(self, batch: int, tree_size: int) -> int:
        return _ROW_BYTES * batch * tree_size

    def eagle_accept(self, logits, tree, active, accepted, workspace):
        """Greedy acceptance in one launch; see the contract."""
        sizes, packed = self._packed("eagle_accept", logits, tree, active, accepted, workspace)
        rows, kernel = _rows_of(workspace, "eagle_accept", sizes), Kernel(WALK, "eagle_accept")
        self._launch(kernel, self._node_grid(sizes), _ROW_THREADS, (packed,), zeroed=rows)

    def accept_drawn(self, drawn: DeviceArray, tree: TreeNodes, active: DeviceArray, accepted: Accepted) -> None:
        sizes, packed = self._packed("accept_drawn", drawn, tree, active, accepted)
        self._launch(Kernel(WALK, "accept_drawn"), (sizes["B"],), _WALK_THREADS, (packed,))

    def draw_nodes(self, nodes: NodeLogits, tree: TreeNodes, state: SequenceState, rows: SamplingRows) -> None:
        self._check("draw_nodes", nodes, tree, state, rows)
        logits, thresholds = self._filter_nodes(nodes, tree, state, rows)
        flat = thresholds.size
        self._sampling.sample(logits, thresholds, rows, tree.draw_positions.reshape(flat), nodes.drawn.reshape(flat))

    def typical_accept(self, nodes, tree, active, rows, bounds, accepted, workspace):
        """Typical acceptance in three launches; see the contract."""
        sizes, packed = self._packed("typical_accept", nodes, tree, active, rows, bounds, accepted, workspace)
        used = self._total_rows(TYPICAL, "typical_accept", workspace, sizes, packed)
        self._launch(Kernel(TYPICAL, "typical_accept"), (sizes["B"],), _WALK_THREADS, (packed,), zeroed=used)

    def draft_workspace_size(self, batch: int, draft_vocabulary: int) -> int:
        """Bytes of workspace that `draft_sample` needs: of scaled logits, row sums and thresholds."""
        return _scaled_bytes(batch, draft_vocabulary) + (_ROW_BYTES + 4) * batch

    def draft_sample(self, step, logits, rows, positions, chain, workspace):
        sizes, struct = self._packed("draft_sample", step, logits, rows, positions, chain, workspace)
        batch, vocabulary = sizes["B"], sizes["U"]
        needed = self.draft_workspace_size(batch, vocabulary)
        check_workspace("draft_sample", workspace, needed, 16, "draft_workspace_size")
        scaled_bytes = _scaled_bytes(batch, vocabulary)
        scaled = DeviceArray(workspace.pointer, (batch, vocabulary), "float32", workspace)
        sums = workspace[scaled_bytes : scaled_bytes + _ROW_BYTES * batch]
        thresholds = DeviceArray(sums.pointer + sums.nbytes, (batch,), "float32", workspace)
        self._fill(sums, 0)
        grid = (self._blocks(vocabulary, batch, _ROW_THREADS), batch)
        packed = (struct, scaled, sums, thresholds)
        self._launch(Kernel(CHAINS, "draft_scale"), grid, _ROW_THREADS, packed)
        self._sampling.filter_threshold(scaled, rows, thresholds)
        for name in ("draft_total", "draft_draw"):
            self._launch(Kernel(CHAINS, name), grid, _ROW_THREADS, packed)

    def accept_sampled_chain(self, nodes, tree, active, rows, chain, accepted, workspace):
        """Speculative sampling of chains in four launches; see the contract."""
        sizes, packed = self._packed("accept_sampled_chain", nodes, tree, active, rows, chain, accepted, workspace)
        used = self._total_rows(CHAINS, "accept_sampled_chain", workspace, sizes, packed)
        self._launch(Kernel(CHAINS, "chain_test"), (sizes["B"],), _WARP, (packed,), zeroed=used)
        grid = (self._blocks(sizes["V"], sizes["B"], _ROW_THREADS), sizes["B"])
        self._launch(Kernel(CHAINS, "chain_draw"), grid, _ROW_THREADS, (packed,), zeroed=used)

    def accept_draws(self, nodes, tree, state, rows, accepted):
        self._check("accept_draws", nodes, tree, state, rows, accepted)
        self.draw_nodes(nodes, tree, state, rows)
        self.accept_drawn(nodes.drawn, tree, state.active, accepted)

    def accept_sampled_draws(self, nodes, tree, state, rows, chain, accepted, workspace):
        self._check("accept_sampled_draws", nodes, tree, state, rows, chain, accepted, workspace)
        self._filter_nodes(nodes, tree, state, rows)
        self.accept_sampled_chain(nodes, tree, state.active, rows, chain, accepted, workspace)

    def move_accepted(self, caches, kvcache_start_index, accepted, hidden_states, pending, wraps=False, alone=False):
        """Move the accepted rows of all caches and features together, one launch for each 256 caches whose rows have
        the same size. `alone`: no features, which are not looked at."""
        check_alike(caches)
        arguments = (caches[0], kvcache_start_index, accepted, hidden_states, pending, wraps)
        sizes, packed = self._packed("move_accepted", *arguments)
        by_size: dict[int, list[DeviceArray]] = {}
        for cache in caches:
            by_size.setdefault(cache.shape[3] * ITEM_SIZES[cache.dtype], []).append(cache)
        launches = [
            (size, alike[first : first + _CACHES_PER_LAUNCH])
            for size, alike in by_size.items()
            for first in range(0, len(alike), _CACHES_PER_LAUNCH)
        ]
        for number, (size, some) in enumerate(launches):
            rows, gathers = (size, sizes["F"] * ITEM_SIZES[hidden_states.dtype]), 0 if alone or number else sizes["W"]
            width = _element_bytes(rows, *some, hidden_states, pending.features)
            elements = size // width
            grid = (gathers + -(-len(some) * sizes["H"] * elements // _COPY_THREADS), sizes["B"])
            pointers = (ctypes.c_void_p * _CACHES_PER_LAUNCH)(*(cache.pointer for cache in some))
            shape = (gathers, len(some), elements, rows[1] // width)
            kernel = Kernel(ADVANCE, f"move_accepted<{_ELEMENTS[width]}>")
            self._launch(kernel, grid, _COPY_THREADS, (packed, pointers, *shape))

    def move_slots(
        self, arrays: Sequence[DeviceArray], source: int, target: int, rows: int | None = None, swaps: bool = False
    ) -> None:
        """See `Backend.move_slots`: one launch for each 256 arrays that are alike."""
        alike: dict[tuple[int, int, int], list[DeviceArray]] = {}
        for array in arrays:
            held = array.nbytes // array.shape[0]
            groups = 1 if rows is None else array.shape[1]
            used = held if rows is None else min(rows, array.shape[2]) * (held // groups // array.shape[2])
            alike.setdefault((groups, held // groups, used), []).append(array)
        for (groups, pitch, used), found in alike.items():
            for first in range(0, len(found), _CACHES_PER_LAUNCH):
                some = found[first : first + _CACHES_PER_LAUNCH]
                width = _element_bytes((pitch, used), *some)
                blocks = min(_MOST_BLOCKS, -(-groups * used // (width * _COPY_THREADS)))
                pointers = (ctypes.c_void_p * _CACHES_PER_LAUNCH)(*(array.pointer for array in some))
                sizes = (source, target, groups, pitch // width, used // width, int(swaps))
                kernel = Kernel(ADVANCE, f"move_slots<{_ELEMENTS[width]}>")
                self._launch(kernel, (max(1, blocks), len(some)), _COPY_THREADS, (pointers, *sizes))

    def advance_accepted(self, accepted, state, pending, emitted):
        sizes, packed = self._packed("advance_accepted", accepted, state, pending, emitted)
        self._launch(Kernel(ADVANCE, "advance_accepted"), (sizes["B"],), _WARP, (packed,))

    def append_pending(self, hidden_states, tokens, state, pending):
        sizes, packed = self._packed("append_pending", hidden_states, tokens, state, pending)
        row_bytes = sizes["F"] * ITEM_SIZES[hidden_states.dtype]
        width = _element_bytes((row_bytes,), hidden_states, pending.features)
        kernel = Kernel(ADVANCE, f"append_pending<{_ELEMENTS[width]}>")
        self._launch(kernel, (sizes["B"],), _FEATURE_THREADS, (packed, row_bytes // width))

    def _filter_nodes(
        self, nodes: NodeLogits, tree: TreeNodes, state: SequenceState, rows: SamplingRows
    ) -> tuple[DeviceArray, DeviceArray]:
        """Process all rows of the logits in place and find their thresholds; both as rows of all trees."""
        self.process_tree_logits(nodes.logits, state.token_counts, tree, rows, nodes.logits)
        thresholds = nodes.thresholds.reshape(nodes.thresholds.size)
        logits = nodes.logits.reshape(thresholds.size, nodes.logits.shape[2])
        self._sampling.filter_threshold(logits, rows, thresholds)
        return logits, thresholds

    def _total_rows(
        self, source: ModuleSource, name: str, workspace: DeviceArray, sizes: dict[str, Any], packed: Any
    ) -> DeviceArray:
        """Launch what finds the largest value of each node's row, then the sum of its weights, for the kernel `name`;
        what of the workspace has them."""
        used, arguments = _rows_of(workspace, name, sizes), "".join(part.capitalize() for part in name.split("_"))
        for kernel in ("row_best", "row_total"):
            expression = f"{kernel}<{arguments}Arguments>"
            self._launch(Kernel(source, expression), self._node_grid(sizes), _ROW_THREADS, (packed,), zeroed=used)
        return used

    def _node_grid(self, sizes: dict[str, int]) -> tuple[int, int, int]:
        """Blocks of a row, nodes, slots."""
        return self._blocks(sizes["V"], sizes["B"] * sizes["T"], _ROW_THREADS), sizes["T"], sizes["B"]


def _rows_of(workspace: DeviceArray, kernel: str, sizes: dict[str, int]) -> DeviceArray:
    """The part of a workspace that a kernel of these sizes uses."""
    needed = _ROW_BYTES * sizes["B"] * sizes["T"]
    check_workspace(kernel, workspace, needed, 16, "accept_workspace_size")
    return workspace[:needed]


def _scaled_bytes(batch: int, vocabulary: int) -> int:
    """Bytes of scaled logits at the start of a workspace of `draft_sample`, filled up to 16."""
    return -(-batch * vocabulary * ITEM_SIZES["float32"] // 16) * 16


def _element_bytes(row_bytes: Sequence[int], *arrays: DeviceArray) -> int:
    """Bytes that one access can move in rows of `row_bytes` of all the arrays."""
    sizes = (*row_bytes, *(array.pointer for array in arrays))
    return next(width for width in _ELEMENTS if not any(size % width for size in sizes))
