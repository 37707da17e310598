"""The recurrent kernels in NumPy, float32: they define what `CudaRecurrent` computes, and are the NumPy backend's.

The functions compute with whole arrays; the methods of `NumpyRecurrent` are what the contract declares, from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from edgellm.kernels.bfloat16 import float32_of, store_rounded
from edgellm.kernels.contracts import Contracts
from edgellm.kernels.numpy_launch import NumpyLaunch, checked_launch
from edgellm.kernels.portable_math import exp, sigmoid, silu, softplus
from edgellm.kernels.recurrent import contract

_check = Contracts(contract.RecurrentArrays, np.ndarray)
#: Elements that are summed side by side: those of 16 lanes of the device, four each; of a whole row, of 256 threads.
_LANES, _EACH, _THREADS = 16, 4, 256


class NumpyRecurrent:
    """See `edgellm.kernels.recurrent.contract.RecurrentKernels`; bfloat16 arrays hold its bits as uint16."""

    @checked_launch(_check)
    def short_convolution(self, value, convolution, bias, columns, output, parents, kept, state_tokens):
        result, inputs = convolved(value, convolution, bias, columns, parents)
        store_rounded(result, output)
        if kept is not None:
            kept[...] = inputs
        if state_tokens is not None:
            take_columns(columns, inputs, _chain(inputs.shape[1], state_tokens))

    @checked_launch(_check)
    def gated_delta(self, rows, projected, gates, matrix, output, parents, kept, state_tokens):
        _take(rows, delta_gates(projected, gates), matrix, output, parents, kept, state_tokens)

    @checked_launch(_check)
    def selective_scan(self, rows, projected, gates, matrix, output, parents, kept, state_tokens):
        _take(rows, scan_gates(projected, gates), matrix, output, parents, kept, state_tokens, gates.skip)

    @checked_launch(_check)
    def gated_norm(self, value, gate, norm, output):
        store_rounded(gated_head_norm(value, gate, norm), output)

    @checked_launch(_check)
    def gated_part(self, value, gate, first, place, norm, squares, output):
        own = _gated(value, gate, first)
        if norm is None:
            squares[...] = 0
            squares[..., place] = ordered_sum(own, own, _THREADS)
            return
        mean = squares[..., place] / np.float32(norm.whole)
        normed = own * (np.float32(1) / np.sqrt(mean + np.float32(norm.epsilon)))[..., None]
        store_rounded(normed * float32_of(norm.weight), output)

    @checked_launch(_check)
    def gated_group_norm(self, value, gate, norm, output):
        parts = _gated(value, gate, norm.first).reshape(*value.shape[:-1], norm.groups, -1)
        mean = ordered_sum(parts, parts, _THREADS) / np.float32(parts.shape[-1])
        normed = parts * (np.float32(1) / np.sqrt(mean + np.float32(norm.epsilon)))[..., None]
        store_rounded(normed.reshape(value.shape) * float32_of(norm.weight), output)

    @checked_launch(_check)
    def separate_gates(self, value, heads, qkv):
        queries, rest = heads.heads * heads.size, 2 * heads.heads * heads.size
        qkv[..., :queries] = _gated_queries(value, heads)[..., 0, :].reshape(*value.shape[:-1], queries)
        qkv[..., queries:] = value[..., rest:]

    @checked_launch(_check)
    def sigmoid_gate(self, value, heads, context):
        gates = float32_of(_gated_queries(value, heads)[..., 1, :]).reshape(context.shape)
        store_rounded(float32_of(context) * sigmoid(gates), context)

    def commit_columns(self, layers: Sequence[contract.LayerColumns], accepted: contract.AcceptedPath) -> NumpyLaunch:
        for layer in layers:
            _check("commit_columns", layer, accepted)

        def compute() -> None:
            for columns, inputs in layers:
                take_columns(columns, inputs, _paths(accepted, inputs.shape[1]))

        return NumpyLaunch(compute)

    def commit_matrices(self, layers: Sequence[contract.LayerMatrices], accepted: contract.AcceptedPath) -> NumpyLaunch:
        return _commit("commit_matrices", layers, accepted, scans=False)

    def commit_scans(self, layers: Sequence[contract.LayerMatrices], accepted: contract.AcceptedPath) -> NumpyLaunch:
        return _commit("commit_scans", layers, accepted, scans=True)


def _commit(
    kernel: str, layers: Sequence[contract.LayerMatrices], accepted: contract.AcceptedPath, scans: bool
) -> NumpyLaunch:
    for layer in layers:
        _check(kernel, layer, accepted)

    def compute() -> None:
        for matrix, rows, gates in layers:
            skip = np.zeros(matrix.shape[1], np.float32) if scans else None  # nothing is put out
            for slot, tokens in enumerate(_paths(accepted, rows.shape[1])):
                delta_walk(rows[slot], gates[slot], matrix[slot], tokens, False, skip)

    return NumpyLaunch(compute)


def _take(rows, gates, matrix, output, parents, kept, state_tokens, skip=None):
    """A step of a delta rule or, with `skip`, of a scan, from the kernel's arguments and the gates that it makes."""
    if kept is not None:
        kept[...] = gates
        output[...] = delta_nodes(rows, gates, matrix, parents, skip)
        return
    output[...] = 0
    for slot, tokens in enumerate(_chain(rows.shape[1], state_tokens)):
        results = delta_walk(rows[slot], gates[slot], matrix[slot], tokens, skip=skip)
        output[slot, tokens] = results.reshape(len(tokens), output.shape[-1])


def convolved(
    value: np.ndarray,
    convolution: contract.Convolution,
    bias: np.ndarray | None,
    columns: np.ndarray,
    parents: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """What `short_convolution` puts out, and what it convolves, both [B, T, C] float32."""
    weight, silu_after, gated, first = convolution
    (batch, tokens, _), (channels, width) = value.shape, weight.shape
    begins = range(first, first + (3 if gated else 1) * channels, channels)
    parts = [float32_of(value[..., begin : begin + channels]) for begin in begins]
    inputs = parts[0] * parts[2] if gated else parts[0]
    # Of the state and the inputs behind it, which stands where: token t at `width` - 1 + t.
    known = np.concatenate((columns.swapaxes(1, 2), inputs), axis=1)
    places = np.broadcast_to(np.arange(tokens) + width - 1, (batch, tokens))
    before = None if parents is None else _places_before(parents, width - 1)
    slots = np.arange(batch)[:, None]
    terms = []
    for tap in reversed(range(width)):
        terms.append(weight[:, tap] * known[slots, places])
        if tap:
            places = places - 1 if before is None else before[slots, places]
    result = terms.pop()
    while terms:
        result = result + terms.pop()
    if bias is not None:
        result = result + bias
    if silu_after:
        result = silu(result)
    return (parts[1] * result if gated else result), inputs


def take_columns(columns: np.ndarray, inputs: np.ndarray, paths: Sequence[np.ndarray]) -> None:
    """Each slot's tokens of `paths`, in their order, become the last of its `columns` [B, C, K]."""
    kept = columns.shape[2]
    for slot, tokens in enumerate(paths):
        if len(tokens):
            both = np.concatenate((columns[slot], inputs[slot, tokens[-kept:]].T), axis=1)
            columns[slot] = both[:, -kept:]


def delta_gates(projected: np.ndarray, gates: contract.DeltaGates) -> np.ndarray:
    """The logarithm of the decay of each value head, then of each the weight of the new value: [B, T, 2 G] float32."""
    heads, first = len(gates.a_log), gates.first
    found = float32_of(projected[..., first : first + 2 * heads])
    decay = -exp(gates.a_log) * softplus(found[..., heads:] + gates.dt_bias)
    return np.concatenate((decay, sigmoid(found[..., :heads])), axis=-1)


def scan_gates(projected: np.ndarray, gates: contract.ScanGates) -> np.ndarray:
    """The logarithm of the decay of each head, then of each the step size: [B, T, 2 G] float32."""
    size = softplus(float32_of(projected[..., gates.first : gates.first + len(gates.a_log)]) + gates.dt_bias)
    return np.concatenate((-exp(gates.a_log) * size, size), axis=-1)


def delta_nodes(
    rows: np.ndarray, gates: np.ndarray, matrix: np.ndarray, parents: np.ndarray | None, skip: np.ndarray | None = None
) -> np.ndarray:
    """The outputs [B, T, G E] of a chain or, with `parents`, of a tree's nodes; `matrix` stays. `skip` as in
    `delta_walk`."""
    batch, tokens, _ = rows.shape
    outputs = np.zeros((batch, tokens, *matrix.shape[1:3]), np.float32)
    if parents is None:
        outputs = delta_walk(rows, gates, matrix.copy(), range(tokens), skip=skip)
    else:
        for slot, before in enumerate(_earlier(parents)):
            step = _token_steps(rows[slot], gates[slot], matrix.shape, skip)
            _walk_tree(step, matrix[slot], before.tolist(), outputs[slot])
    return outputs.reshape(batch, tokens, -1)


def delta_walk(
    rows: np.ndarray,
    gates: np.ndarray,
    matrix: np.ndarray,
    tokens: Sequence[int] | np.ndarray,
    outputs: bool = True,
    skip: np.ndarray | None = None,
) -> np.ndarray:
    """Change `matrix` [.., G, E, D] by `tokens` of `rows` [.., T, R] and `gates` [.., T, 2 G], in their order: by the
    delta rule or, with the `skip` [G] of its heads, by the selective scan.

    Gives what they put out, [.., tokens, G, E]; nothing with `outputs` False.
    """
    results = np.zeros((*matrix.shape[:-3], len(tokens) if outputs else 0, *matrix.shape[-3:-1]), np.float32)
    step = _token_steps(rows, gates, matrix.shape, skip)
    for number, token in enumerate(tokens):
        matrix[...], output = step(matrix, token, outputs)
        if outputs:
            results[..., number, :, :] = output
    return results


def _gated(value: np.ndarray, gate: np.ndarray, first: int) -> np.ndarray:
    """A value times SiLU of its gates, which stand from column `first` on."""
    return value * silu(float32_of(gate[..., first : first + value.shape[-1]]))


def gated_head_norm(value: np.ndarray, gate: np.ndarray, norm: contract.GatedHeadNorm) -> np.ndarray:
    """See `gated_norm`: float32 of the shape of `value`."""
    size = len(norm.weight)
    heads = value.reshape(*value.shape[:-1], -1, size)
    mean = ordered_sum(heads, heads) / np.float32(size)
    normed = heads * (np.float32(1) / np.sqrt(mean + np.float32(norm.epsilon)))[..., None] * float32_of(norm.weight)
    return _gated(normed.reshape(value.shape), gate, norm.first)


def ordered_sum(x: np.ndarray, y: np.ndarray, lanes: int = _LANES) -> np.ndarray:
    """The sum of x y over the last axis, which is padded with zeros to a multiple of 64: the order of all sums.

    First those of every 64th element, in their order; then of four neighbours, (0 + 1) + (2 + 3); then of halves: of
    the 16 `lanes` that are left n and n + 8, then of 8 n and n + 4, and so on. Of other lanes it is four times those.
    """
    size, shape, width = x.shape[-1], np.broadcast_shapes(x.shape, y.shape), lanes * _EACH
    padded = -(-size // width) * width
    if padded == size:
        products = x * y
    else:
        products = np.zeros((*shape[:-1], padded), np.float32)
        np.multiply(x, y, out=products[..., :size])
    sums = products[..., :width]
    for begin in range(width, padded, width):
        sums = sums + products[..., begin : begin + width]
    sums = sums[..., 0::2] + sums[..., 1::2]
    sums = sums[..., 0::2] + sums[..., 1::2]
    half = lanes
    while half > 1:
        half //= 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


_Step = Callable[[np.ndarray, int, bool], tuple[np.ndarray, np.ndarray | None]]


def _token_steps(rows: np.ndarray, gates: np.ndarray, shape: tuple[int, ...], skip: np.ndarray | None) -> _Step:
    """What computes a token's matrix [.., G, E, D] and output [.., G, E] from the matrix before it; `skip` as in
    `delta_walk`."""
    heads, values, keys = shape[-3:]
    groups = contract.key_heads({"R": rows.shape[-1], "G": heads, "E": values, "D": keys})
    # Whatever does not depend on the state is computed of all tokens at once.
    first, of_values = (0, 2 * groups * keys) if skip is None else (heads * values, 0)
    query, key = (
        rows[..., begin : begin + groups * keys].reshape(*rows.shape[:-1], groups, keys)
        for begin in (first, first + groups * keys)
    )
    if skip is None:
        query = query * (_reciprocal_root(query) * (np.float32(1) / np.sqrt(np.float32(keys))))[..., None]
        key = key * _reciprocal_root(key)[..., None]
    else:
        query, key = key, query  # B stands before C
    both = ordered_sum(key, query)
    query, key = (np.repeat(each, heads // groups, axis=-2)[..., None, :] for each in (query, key))
    both = np.repeat(both, heads // groups, axis=-1)
    value = rows[..., of_values : of_values + heads * values].reshape(*rows.shape[:-1], heads, values)
    decay, beta = exp(gates[..., :heads]), gates[..., heads:]

    def step(matrix: np.ndarray, token: int, outputs: bool) -> tuple[np.ndarray, np.ndarray | None]:
        own_key, own_decay = key[..., token, :, :, :], decay[..., token, :, None]
        delta = own_value = value[..., token, :, :]
        if skip is None:
            delta = delta - own_decay * ordered_sum(matrix, own_key)
        delta = delta * beta[..., token, :, None]
        after = matrix * own_decay[..., None]
        output = None
        if outputs:
            output = own_decay * ordered_sum(matrix, query[..., token, :, :, :]) + delta * both[..., token, :, None]
            if skip is not None:
                output = output + skip[:, None] * own_value
        after += delta[..., None] * own_key
        return after, output

    return step


def _reciprocal_root(x: np.ndarray) -> np.ndarray:
    return np.float32(1) / np.sqrt(ordered_sum(x, x) + np.float32(contract.NORM_EPSILON))


def _walk_tree(step: _Step, matrix: np.ndarray, parents: Sequence[int], outputs: np.ndarray) -> None:
    """One slot's nodes; the matrix behind a node is kept as long as it has children to come."""
    states, waiting = {-1: matrix}, Counter(parents)
    waiting[-1] = 1  # the root alone, not padding
    for node, parent in enumerate(parents):
        if node and parent not in states:
            continue  # padding
        after, outputs[node] = step(states[parent], node, True)  # type: ignore[call-overload]
        waiting[parent] -= 1
        if waiting[parent] == 0:
            del states[parent]
        if waiting[node]:
            states[node] = after


def _earlier(parents: np.ndarray) -> np.ndarray:
    """Parents, -1 where they are no earlier node."""
    return np.where((parents >= 0) & (parents < np.arange(parents.shape[1])), parents, -1)


def _places_before(parents: np.ndarray, kept: int) -> np.ndarray:
    """The place before each place of the state and the inputs behind it: of a node its parent's."""
    batch = len(parents)
    state = np.broadcast_to(np.arange(kept) - 1, (batch, kept))
    return np.concatenate((state, _earlier(parents) + kept), axis=1).clip(0)


def _chain(tokens: int, counts: np.ndarray | None) -> list[np.ndarray]:
    """The tokens of each slot that count, of a chunk."""
    assert counts is not None
    return [np.arange(count) for count in counts.clip(0, tokens).tolist()]


def _paths(accepted: contract.AcceptedPath, tokens: int) -> list[np.ndarray]:
    """The nodes of each slot's path, within a step of so many tokens."""
    indices, most = accepted.indices.clip(0, tokens - 1), accepted.indices.shape[1]
    return [path[: min(max(count, 0), most)] for path, count in zip(indices, accepted.counts.tolist(), strict=True)]


def _gated_queries(value: np.ndarray, heads: contract.GatedHeads) -> np.ndarray:
    """Query heads and their gates: [.., heads, 2, size]."""
    queries = value[..., : 2 * heads.heads * heads.size]
    return queries.reshape(*value.shape[:-1], heads.heads, 2, heads.size)
