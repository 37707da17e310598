"""The acceptance kernels in NumPy: they define what `CudaAcceptance` computes, and run where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from edgellm.kernels.acceptance import contract
from edgellm.kernels.acceptance.contract import AcceptanceKernels, Accepted, NodeLogits, Pending
from edgellm.kernels.acceptance.distribution import Distribution, Draws, divided, is_typical
from edgellm.kernels.acceptance.walks import accept_chains, deepest_path, walk, walk_all, write_accepted
from edgellm.kernels.arrays import Array
from edgellm.kernels.contracts import Contracts
from edgellm.kernels.errors import KernelError
from edgellm.kernels.sampling.contract import SequenceState
from edgellm.kernels.sampling.record import penalizes, records
from edgellm.kernels.sampling.twin import NumpySampling, likeliest
from edgellm.kernels.tree.contract import TreeNodes

_check = Contracts(AcceptanceKernels, np.ndarray)


class NumpyAcceptance:
    """See `edgellm.kernels.acceptance.contract.AcceptanceKernels`; bfloat16 arrays hold its bits as uint16."""

    def __init__(self) -> None:
        self._sampling = NumpySampling()

    def process_tree_logits(self, logits, token_counts, tree, rows, processed):
        sizes = _check("process_tree_logits", logits, token_counts, tree, rows, processed)
        if processed is not logits:
            np.copyto(processed, logits)
        for slot in range(sizes["B"]):
            self._process(slot, range(sizes["T"]), processed, token_counts, tree, rows[slot : slot + 1])

    def accept_workspace_size(self, batch: int, tree_size: int) -> int:
        """0: NumPy needs no workspace."""
        return 0

    def eagle_accept(self, logits, tree, active, accepted, workspace):
        """Greedy acceptance; the argmax is taken of visited nodes alone. See the contract."""
        _check("eagle_accept", logits, tree, active, accepted, workspace)
        walk_all(lambda slot, node: likeliest(logits[slot, node]), tree, active, accepted)

    def accept_drawn(self, drawn: np.ndarray, tree: TreeNodes, active: np.ndarray, accepted: Accepted) -> None:
        _check("accept_drawn", drawn, tree, active, accepted)
        walk_all(lambda slot, node: int(drawn[slot, node]), tree, active, accepted)

    def draw_nodes(self, nodes: NodeLogits, tree: TreeNodes, state: SequenceState, rows: np.ndarray) -> None:
        sizes = _check("draw_nodes", nodes, tree, state, rows)
        for slot in range(sizes["B"]):
            own = rows[slot : slot + 1]
            for node in range(sizes["T"]):
                self._filter(slot, node, nodes, tree, state, own)
                self._draw(slot, node, nodes, tree, own)

    def typical_accept(self, nodes, tree, active, rows, bounds, accepted, workspace):
        sizes = _check("typical_accept", nodes, tree, active, rows, bounds, accepted, workspace)
        for slot in range(sizes["B"]):
            tokens, parents, depths = tree.tokens[slot], tree.parents[slot], tree.depths[slot]
            if active[slot] != 1:
                write_accepted(slot, [], [], accepted)
            elif records(rows)[slot]["temperature"] == 0:
                walk(lambda slot, node: int(nodes.drawn[slot, node]), slot, tree, accepted)
            else:

                def accepts(node: int, children: np.ndarray, slot: int = slot) -> np.ndarray:
                    row = nodes.logits[slot, node], nodes.thresholds[slot, node]
                    return is_typical(*row, tree.tokens[slot, children], *bounds)

                path = deepest_path(accepts, parents, depths, sizes["W"])
                emitted = [int(tokens[node]) for node in path[1:]] + [int(nodes.drawn[slot, path[-1]])]
                write_accepted(slot, path, emitted, accepted)

    def draft_workspace_size(self, batch: int, draft_vocabulary: int) -> int:
        """0: NumPy needs no workspace."""
        return 0

    def draft_sample(self, step, logits, rows, positions, chain, workspace):
        sizes = _check("draft_sample", step, logits, rows, positions, chain, workspace)
        temperature = records(rows)["temperature"]
        scaled, thresholds = divided(logits, temperature), np.empty(sizes["B"], np.float32)
        self._sampling.filter_threshold(scaled, rows, thresholds)
        probabilities = Distribution(scaled, thresholds, temperature).probabilities()
        draws = Draws(records(rows), positions + np.int32(step), contract.DRAFT_STREAM)
        chain.tokens[:, step] = chain.draft_to_target[draws.by_weight(probabilities)]
        chain.probabilities[:, step] = probabilities

    def accept_sampled_chain(self, nodes, tree, active, rows, chain, accepted, workspace):
        """Speculative sampling of chains, all slots of one depth at once; see the contract."""
        _check("accept_sampled_chain", nodes, tree, active, rows, chain, accepted, workspace)
        temperature = records(rows)["temperature"]

        def distribution(slots: np.ndarray, node: int) -> Distribution:
            return Distribution(nodes.logits[slots, node], nodes.thresholds[slots, node], temperature[slots])

        accept_chains(distribution, tree, active, records(rows), chain, accepted)

    def accept_draws(self, nodes, tree, state, rows, accepted):
        """Process, filter and draw the nodes that the walk visits, and no others; see the contract."""
        _check("accept_draws", nodes, tree, state, rows, accepted)

        def draw(slot: int, node: int) -> int:
            own = rows[slot : slot + 1]
            self._filter(slot, node, nodes, tree, state, own)
            return self._draw(slot, node, nodes, tree, own)

        walk_all(draw, tree, state.active, accepted)

    def accept_sampled_draws(self, nodes, tree, state, rows, chain, accepted, workspace):
        """Process and filter the nodes that the chain reaches, and no others; see the contract."""
        _check("accept_sampled_draws", nodes, tree, state, rows, chain, accepted, workspace)
        temperature = records(rows)["temperature"]

        def distribution(slots: np.ndarray, node: int) -> Distribution:
            for slot in slots.tolist():
                self._filter(slot, node, nodes, tree, state, rows[slot : slot + 1])
            return Distribution(nodes.logits[slots, node], nodes.thresholds[slots, node], temperature[slots])

        accept_chains(distribution, tree, state.active, records(rows), chain, accepted)

    def move_accepted(self, caches, kvcache_start_index, accepted, hidden_states, pending, wraps=False):
        """Move accepted rows and features together; rows in place already are not touched. See the contract."""
        check_alike(caches)
        sizes = _check("move_accepted", caches[0], kvcache_start_index, accepted, hidden_states, pending, wraps)
        for slot, (start, length) in enumerate(zip(kvcache_start_index, accepted.lengths, strict=True)):
            places = np.arange(min(length, sizes["W"]))
            indices = accepted.indices[slot, : places.size]
            known = (indices >= 0) & (indices < sizes["T"])
            pending.features[slot, places[known]] = hidden_states[slot, indices[known]]
            sources, targets = start + indices, start + places
            if wraps:
                sources, targets = np.where(indices < 0, -1, sources % sizes["R"]), targets % sizes["R"]
            inside = (np.minimum(sources, targets) >= 0) & (np.maximum(sources, targets) < sizes["R"])
            moved = inside & (sources != targets)
            if not moved.any():
                continue
            sources, targets = sources[moved], targets[moved]
            for cache in caches:
                cache[slot, :, targets] = cache[slot, :, sources]

    def advance_accepted(self, accepted: Accepted, state: SequenceState, pending: Pending, emitted: np.ndarray) -> None:
        sizes = _check("advance_accepted", accepted, state, pending, emitted)
        for slot in range(sizes["B"]):
            length = min(int(accepted.lengths[slot]), sizes["W"])
            emitted[slot] = -1
            emitted[slot, 0] = 0
            if state.active[slot] != 1 or length < 1:
                continue
            tokens = accepted.ids[slot, :length]
            emitted[slot, 0] = length
            emitted[slot, 1 : length + 1] = tokens
            pending.token_ids[slot] = -1
            pending.token_ids[slot, :length] = tokens
            pending.counts[slot] = length
            pending.start[slot] = state.kvcache_start_index[slot]
            pending.last[slot, 0] = length - 1
            state.token_ids[slot, 0] = tokens[-1]
            state.kvcache_start_index[slot] += length
            state.positions[slot] += length
            np.add.at(state.token_counts[slot], tokens[(tokens >= 0) & (tokens < sizes["V"])], 1)

    def append_pending(self, hidden_states, tokens, state, pending):
        sizes = _check("append_pending", hidden_states, tokens, state, pending)
        for slot in range(sizes["B"]):
            count = pending.counts[slot]
            if state.active[slot] != 1 or not 0 <= count < sizes["Q"]:
                continue
            pending.features[slot, count] = hidden_states[slot, 0]
            pending.token_ids[slot, count] = tokens[slot]
            pending.counts[slot] = count + 1
            pending.start[slot] = state.kvcache_start_index[slot] - (count + 1)
            pending.last[slot, 0] = count

    def _process(
        self,
        slot: int,
        nodes: Iterable[int],
        logits: np.ndarray,
        token_counts: np.ndarray,
        tree: TreeNodes,
        own: np.ndarray,
    ) -> None:
        """`process_tree_logits` of some nodes of one slot, whose settings are its `own`, in place."""
        path_counts = bool(penalizes(records(own)[0]))
        counts = token_counts[slot : slot + 1]
        if path_counts:
            counts = counts.copy()
        for node in nodes:
            path: Sequence[int] = ()
            if path_counts:
                path = _path_tokens(tree.tokens[slot], tree.ancestors[slot, node], counts.shape[1])
            for token in path:
                counts[0, token] += 1
            row = logits[slot, node : node + 1]
            self._sampling.process_logits(row, counts, own, row)
            for token in path:
                counts[0, token] -= 1

    def _filter(
        self, slot: int, node: int, nodes: NodeLogits, tree: TreeNodes, state: SequenceState, own: np.ndarray
    ) -> None:
        """Process one node's row of logits in place and find its threshold."""
        self._process(slot, [node], nodes.logits, state.token_counts, tree, own)
        place = (slot, slice(node, node + 1))
        self._sampling.filter_threshold(nodes.logits[place], own, nodes.thresholds[place])

    def _draw(self, slot: int, node: int, nodes: NodeLogits, tree: TreeNodes, own: np.ndarray) -> int:
        """The token that plain decoding draws at a node whose row was filtered."""
        place = (slot, slice(node, node + 1))
        logits, thresholds, drawn = (array[place] for array in nodes)
        self._sampling.sample(logits, thresholds, own, tree.draw_positions[place], drawn)
        return int(drawn[0])


def check_alike(caches: Sequence[Array]) -> None:
    """KernelError unless there are caches, all of one shape but for the size of a row."""
    if not caches:
        raise KernelError("move_accepted: no caches; expected keys and values of every layer")
    shape = caches[0].shape[:3]
    for number, cache in enumerate(caches):
        if not hasattr(cache, "shape"):
            raise KernelError(f"move_accepted: caches[{number}] is a {type(cache).__name__}; expected an array")
        if len(cache.shape) != 4 or cache.shape[:3] != shape:
            raise KernelError(
                f"move_accepted: caches[{number}] is {cache.dtype} {list(cache.shape)}; expected it to be like "
                f"caches[0], {caches[0].dtype} {list(caches[0].shape)}"
            )


def _path_tokens(tokens: np.ndarray, ancestors: np.ndarray, vocabulary: int) -> list[int]:
    """Tokens of the nodes on a path, without the root's, as far as they are ids; `ancestors` [T] is the node's row."""
    path = tokens[1:][ancestors[1:]]
    return path[(path >= 0) & (path < vocabulary)].tolist()
