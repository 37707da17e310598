"""Short convolutions and the gated delta rule in float32 with NumPy, token by token, along chains and trees.

A token's sums have one order, whatever stands beside it: so its bits are the same in a decode step, in a tree, in every
chunk of a prompt, and when a commit computes it again. Axis letters: B sequences, T tokens, C channels, W the width of
a convolution, Hk and Hv key and value heads of Dk and Dv elements, N tokens of a commit.
"""

from __future__ import annotations

import numpy as np

_ONE = np.float32(1)


def short_convolution(
    inputs: np.ndarray,
    columns: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    parents: np.ndarray | None = None,
) -> np.ndarray:
    """y_t = sum over j < W of weight[:, W - 1 - j] u_{t-j}, plus `bias` [C], summed from the oldest on: [B, T, C].

    u is `inputs` [B, T, C], before them `columns` [B, C, W - 1], the latest last. t - 1 is the row before t or, with
    `parents` [B, T], the row that they name, -1 the last column.
    """
    width = weight.shape[1]
    before = np.concatenate((columns.transpose(0, 2, 1), inputs), axis=1)
    count, first = inputs.shape[1], width - 1  # row t stands behind the columns, which are rows 0 .. first - 1
    if parents is None:
        taps = [before[:, first - j : first - j + count] for j in range(width)]
    else:
        of_columns = np.broadcast_to(np.arange(-1, first - 1), (len(inputs), first))
        parent = np.concatenate((of_columns, parents + first), axis=1)
        rows = np.broadcast_to(np.arange(first, first + count), inputs.shape[:2])
        taps = []
        for _ in range(width):
            taps.append(np.take_along_axis(before, rows[..., None], axis=1))
            rows = np.take_along_axis(parent, rows, axis=1)
    result = taps[-1] * weight[:, 0]
    for j in range(width - 2, -1, -1):
        result += taps[j] * weight[:, width - 1 - j]
    if bias is not None:
        result += bias
    return result


def commit_columns(columns: np.ndarray, inputs: np.ndarray, indices: np.ndarray, counts: np.ndarray) -> None:
    """Let `columns` [B, C, W - 1] be those behind the first `counts` [B] of the rows `indices` [B, N] of `inputs`
    [B, T, C], in place."""
    kept = columns.shape[2]
    for column, rows, index, count in zip(columns, inputs, indices, counts.tolist(), strict=True):
        if count > 0:
            column[...] = np.concatenate((column, rows[index[:count]].T), axis=1)[:, -kept:]


def delta_gates(b: np.ndarray, a: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray) -> np.ndarray:
    """g = -exp(a_log) softplus(a + dt_bias), then beta = sigmoid(b), of [B, T, Hv] each: [B, T, 2 Hv]."""
    shifted = a + dt_bias
    softplus = np.log1p(np.exp(-np.abs(shifted))) + np.maximum(shifted, np.float32(0))
    return np.concatenate((-np.exp(a_log) * softplus, sigmoid(b)), axis=-1)


def gated_delta(
    rows: np.ndarray,
    gates: np.ndarray,
    matrices: np.ndarray,
    heads: tuple[int, int],
    epsilon: float,
    parents: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
) -> np.ndarray:
    """What each token reads, [B, T, Hv Dv].

    `rows` [B, T, 2 Hk Dk + Hv Dv] are queries, keys and values, `gates` [B, T, 2 Hv] those of `delta_gates`, `matrices`
    [B, Hv, Dv, Dk] the turned matrices of the tokens before. A token follows the one before it or, with `parents`
    [B, T], the one that they name, -1 the matrices. With `tokens` [B] the matrices become, in place, those behind so
    many tokens; the rows behind are not computed.
    """
    batch, count = rows.shape[:2]
    result = np.zeros((batch, count, heads[1], matrices.shape[2]), np.float32)
    queries, keys, values, decays, betas = _of_tokens(rows, gates, matrices, heads, epsilon)
    for b in range(batch):
        path = list(range(-1, count - 1)) if parents is None else parents[b].tolist()
        last_use = {parent: t for t, parent in enumerate(path)}  # a matrix is let go of when no token follows any more
        states = {-1: matrices[b]}
        for t in range(count if tokens is None else int(tokens[b])):
            state = _step(states[path[t]], keys[b, t], values[b, t], decays[b, t], betas[b, t])
            result[b, t] = _product(state, queries[b, t])
            if t in last_use:
                states[t] = state
            if last_use[path[t]] == t:
                del states[path[t]]
        if tokens is not None and tokens[b] > 0:
            matrices[b] = state
    return result.reshape(batch, count, -1)


def commit_matrices(
    matrices: np.ndarray,
    rows: np.ndarray,
    gates: np.ndarray,
    heads: tuple[int, int],
    epsilon: float,
    indices: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Let `matrices` be those behind the first `counts` [B] of the tokens `indices` [B, N], in place; see
    `gated_delta`."""
    _, keys, values, decays, betas = _of_tokens(rows, gates, matrices, heads, epsilon)
    for b, count in enumerate(counts.tolist()):
        for t in indices[b, : max(0, count)].tolist():
            matrices[b] = _step(matrices[b], keys[b, t], values[b, t], decays[b, t], betas[b, t])


def leading_rows(inputs: np.ndarray) -> np.ndarray:
    """The indices [B, T] of a chain's tokens."""
    return np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape[:2])


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp of a very negative number: infinity, and the result is 0
        return _ONE / (_ONE + np.exp(-x))


def _of_tokens(
    rows: np.ndarray, gates: np.ndarray, matrices: np.ndarray, heads: tuple[int, int], epsilon: float
) -> tuple[np.ndarray, ...]:
    """Queries and keys [B, T, Hv, Dk], normed and the queries divided by sqrt(Dk), values [B, T, Hv, Dv], decays and
    betas [B, T, Hv]."""
    key_heads, value_heads = heads
    value_size, key_size = matrices.shape[2:]
    leading, width = rows.shape[:2], key_heads * key_size
    pairs = np.ascontiguousarray(rows[..., : 2 * width]).reshape(*leading, 2 * key_heads, key_size)
    pairs = pairs * (_ONE / np.sqrt((pairs * pairs).sum(axis=-1, keepdims=True) + np.float32(epsilon)))
    pairs = np.repeat(pairs, value_heads // key_heads, axis=2)
    queries, keys = pairs[:, :, :value_heads] * np.float32(key_size**-0.5), pairs[:, :, value_heads:]
    values = rows[..., 2 * width :].reshape(*leading, value_heads, value_size)
    decays = np.exp(np.ascontiguousarray(gates[..., :value_heads]))
    return queries, keys, values, decays, gates[..., value_heads:]


def _step(state: np.ndarray, key: np.ndarray, value: np.ndarray, decay: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """The matrices [Hv, Dv, Dk] behind one token, from those before it."""
    state = state * decay[:, None, None]
    change = beta[:, None] * (value - _product(state, key))
    state += change[:, :, None] * key[:, None, :]
    return state


def _product(state: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Each head's matrix [Dv, Dk] times its vector [Dk]: [Hv, Dv]. Each sum by itself, whose order is NumPy's for a row
    of Dk elements, where a product of matrices is BLAS's."""
    return (state * vector[:, None, :]).sum(axis=-1)
