"""What of layers is not linear, in NumPy, in the dtype that it is given: activations; attention under a mask, within
windows whose rows are a ring, and to tokens that come later; through which experts of a mixture tokens go, and the sum
of what these give.

Of many tokens attention computes one head at a time: its scores stay in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgellm.engines.errors import EngineError
from edgellm.engines.model.config import Mixture
from edgellm.engines.model.operations import Scoring
from edgellm.kernels.decode.heads_twin import capped
from edgellm.kernels.experts.choice import chosen_experts, sigmoid

_ONE = np.float32(1)
#: The matrices of all experts (`ExpertMatrices`), and their biases [E, N].
_Layer = tuple[Any, np.ndarray | None]


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x))."""
    result = np.negative(x)
    with np.errstate(over="ignore"):  # exp of a very negative number: infinity, and silu is 0
        np.exp(result, out=result)
    result += _ONE
    np.divide(x, result, out=result)
    return result


def _gelu(x: np.ndarray) -> np.ndarray:
    """x (1 + erf(x / sqrt(2))) / 2."""
    result = _erf(x * np.float32(math.sqrt(0.5)))
    result += _ONE
    result *= x
    result *= np.float32(0.5)
    return result


def _erf(x: np.ndarray) -> np.ndarray:
    """The error function to 5e-7: formula 7.1.26 of Abramowitz and Stegun, whose own error is 1.5e-7."""
    size = np.abs(x)
    t = _ONE / (_ONE + np.float32(0.3275911) * size)
    result = np.zeros_like(x)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        result += np.float32(coefficient)
        result *= t
    result *= np.exp(-size * size)
    np.subtract(_ONE, result, out=result)
    return np.copysign(result, x, out=result)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    result = x * x
    result *= np.float32(0.044715)
    result += _ONE
    result *= x
    result *= np.float32(math.sqrt(2 / math.pi))
    np.tanh(result, out=result)
    result += _ONE
    result *= x
    result *= np.float32(0.5)
    return result


def _quick_gelu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(1.702 x)."""
    slope = np.float32(1.702)
    return silu(x * slope) / slope


def _relu_squared(x: np.ndarray) -> np.ndarray:
    """max(x, 0)^2 (So et al. 2021, "Primer")."""
    result = np.maximum(x, 0)
    result *= result
    return result


#: The functions of `Operations.activation` by their names.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": _relu_squared,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
}


class VisibleKeys:
    """The part of a mask [B, 1, T, L] bool that matters.

    `count`: keys beyond it are hidden from every query, so they are not read. `first_hidden`: keys before it are seen
    by every query. `bias` [B, 1, 1, T, count - first_hidden] float32 is 0 or minus infinity between the two (None
    where there is nothing between); its axes are sequence, key-value head, head of the group, query, key.
    """

    def __init__(self, mask: np.ndarray) -> None:
        columns = np.asarray(mask.any(axis=(0, 1, 2)))
        self.count = columns.size - int(columns[::-1].argmax()) if columns.any() else 0
        shown = np.asarray(mask[..., : self.count].all(axis=(0, 1, 2)))
        self.first_hidden = self.count if shown.all() else int(shown.argmin())
        if self.count == 0:
            raise EngineError("the attention mask hides every key; each query must see at least one")
        self.bias: np.ndarray | None = None
        if self.first_hidden < self.count:
            between = mask[..., self.first_hidden : self.count]
            self.bias = np.where(between[:, None], np.float32(0), np.float32(-np.inf))


def attention(
    query: np.ndarray, caches: Sequence[np.ndarray], visible: VisibleKeys, scoring: Scoring[np.ndarray]
) -> np.ndarray:
    """See `Operations.attention`; `caches` are keys, values and, if they are int8, their scales."""
    tokens, kv_heads = query.shape[2], caches[0].shape[1]
    grouped, of_rows = _grouped(query, kv_heads, scoring)
    rows = [each[:, :, : visible.count] for each in caches]
    if tokens == 1:
        context = _attend(grouped, rows, visible.bias, visible.first_hidden, tokens, of_rows, scoring.cap)
        return context.reshape(query.shape)
    context = np.empty_like(grouped)
    for b in range(len(query)):
        bias = None if visible.bias is None else visible.bias[b, 0]
        for h in range(kv_heads):
            head, sinks = [each[b, h] for each in rows], None if of_rows is None else of_rows[h]
            context[b, h] = _attend(grouped[b, h], head, bias, visible.first_hidden, tokens, sinks, scoring.cap)
    return context.reshape(query.shape)


def window_attention(query, caches, mask, start_index, window, scoring):
    """See `Operations.window_attention`; `caches` as for `attention`."""

    def seen(b: int, start: int) -> tuple[np.ndarray, np.ndarray | None]:
        first, hidden = _hidden_in_window(mask[b, 0], start, window)
        return np.arange(first, start + query.shape[2]), hidden

    return _ring_attention(query, caches, start_index, scoring, seen)


def attention_ahead(query, caches, start_index, last_seen, window, scoring):
    """See `Operations.attention_ahead`; `caches` as for `attention`."""

    def seen(b: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(0 if window is None else max(0, start + 1 - window), last_seen[b].max() + 1)
        hidden = positions > last_seen[b][:, None]
        if window is not None:
            hidden |= positions <= np.arange(start, start + query.shape[2])[:, None] - window
        return positions, hidden

    return _ring_attention(query, caches, start_index, scoring, seen)


def _hidden_in_window(mask: np.ndarray, start: int, window: int) -> tuple[int, np.ndarray | None]:
    """The first position that one of T tokens sees in its window, and which positions from there to `start` + T - 1
    each does not see, [T, n] bool (None: each sees all); the new tokens' rows of the mask [T, L] begin at `start`."""
    tokens = len(mask)
    if tokens == 1:  # it sees itself
        return max(0, start + 1 - window), None
    new = np.zeros((tokens, tokens), np.bool_)
    shown = mask[:, start : start + tokens]  # padding may stand behind the rows that the mask speaks of
    new[:, : shown.shape[1]] = shown
    np.fill_diagonal(new, True)
    first = max(0, start + 1 - window)
    seen = np.concatenate((np.ones((tokens, start - first), np.bool_), new), axis=1)
    later = seen.sum(axis=1, keepdims=True) - seen.cumsum(axis=1)  # how many of a token's positions stand behind each
    hidden = ~seen | (later >= window)
    return first, hidden


def _grouped(query: np.ndarray, kv_heads: int, scoring: Scoring[np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
    """Scaled queries [B, nq, T, D], those that share a key-value head as rows of one matrix: [B, nkv, group * T, D];
    and the sinks of these rows, [nkv, group * T, 1], where there are such."""
    grouped = (query * np.float32(scoring.scale)).reshape(len(query), kv_heads, -1, query.shape[3])
    if scoring.sinks is None:
        return grouped, None
    return grouped, np.repeat(scoring.sinks.reshape(kv_heads, -1), query.shape[2], axis=1)[..., None]


def _ring_attention(
    query: np.ndarray,
    caches: Sequence[np.ndarray],
    start_index: np.ndarray,
    scoring: Scoring[np.ndarray],
    seen: Callable[[int, int], tuple[np.ndarray, np.ndarray | None]],
) -> np.ndarray:
    """Attention of queries [B, nq, T, D] over caches [B, nkv, rows, D] that are rings. `seen` gives for a sequence and
    its start the positions [n] of keys, and which of them each token does not see, [T, n] bool (None: it sees all)."""
    tokens, (kv_heads, held) = query.shape[2], caches[0].shape[1:3]
    grouped, of_rows = _grouped(query, kv_heads, scoring)
    context = np.empty_like(grouped)
    heads = range(kv_heads) if tokens > 1 else [slice(None)]
    for b, start in enumerate(start_index.tolist()):
        positions, hidden = seen(b, start)
        places = positions % held
        bias = None if hidden is None else np.where(hidden, np.float32(-np.inf), np.float32(0))[None]
        for h in heads:
            rows = [each[b, h].take(places, axis=-2) for each in caches]
            own_sinks = None if of_rows is None else of_rows[h]
            context[b, h] = _attend(grouped[b, h], rows, bias, 0, tokens, own_sinks, scoring.cap)
    return context.reshape(query.shape)


def _attend(
    query: np.ndarray,
    rows: Sequence[np.ndarray],
    bias: np.ndarray | None,
    first_hidden: int,
    tokens: int,
    sinks: np.ndarray | None,
    cap: float,
) -> np.ndarray:
    """softmax(query keys^T + bias) values: query [..., group * T, D] (scaled), `rows` keys and values [..., n, D], and
    where these are int8 their scales [..., n, 1].

    `bias` [..., 1, T, n - first_hidden] is added at the keys from `first_hidden` on, alike for every head of a group.
    `sinks` [..., group * T, 1] are scores without a value. With a `cap` products become cap tanh(product / cap).
    """
    keys, values, *scales = rows
    if scales:
        keys, values = keys.astype(query.dtype), values.astype(query.dtype)
    scores = np.matmul(query, keys.swapaxes(-1, -2))
    if scales:
        scores *= scales[0].swapaxes(-1, -2)
    if cap:
        scores = capped(scores, cap)
    if bias is not None:
        masked = scores.reshape(*scores.shape[:-2], -1, tokens, scores.shape[-1])
        masked[..., first_hidden:] += bias
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    scores -= largest
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks - largest)
    if scales:
        scores *= scales[1].swapaxes(-1, -2)
    context = np.matmul(scores, values)
    context /= total
    return context


def mixed(
    mixture: Mixture,
    x: np.ndarray,
    router: tuple[np.ndarray, np.ndarray | None, np.ndarray | None],
    gate_up: _Layer,
    down: _Layer,
    linear: Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray],
    own: tuple[int, int] | None = None,
) -> np.ndarray:
    """What `Operations.experts` says, by `linear`: expert by expert in the order of their ids, all rows of `x` that
    chose one together. Where `own` experts alone are there, what these give."""
    first, last = own or (0, mixture.experts)

    def through(rows: np.ndarray, layer: _Layer, expert: int) -> np.ndarray:
        matrices, biases = layer
        return linear(rows, matrices.of(expert - first), None if biases is None else biases[expert - first])

    rows, (given, correction, scales) = x.reshape(-1, x.shape[-1]), router
    ids, shares = chosen_experts(given.reshape(len(rows), -1), mixture.routing, correction, scales)
    total = np.zeros_like(rows)
    for expert in np.unique(ids[(ids >= first) & (ids < last)]).tolist():
        row, place = np.nonzero(ids == expert)
        inner = _activated(through(rows[row], gate_up, expert), mixture)
        total[row] += shares[row, place, None] * through(inner, down, expert)
    return total.reshape(x.shape)


def _activated(gate_up: np.ndarray, mixture: Mixture) -> np.ndarray:
    """activation(gate) up of rows [.., 2 I], gate first: [.., I]. With a limit both alternate: see `Mixture.limit`.
    Experts without gates give relu(up)^2 of rows [.., I]."""
    if not mixture.gated:
        return ACTIVATIONS["relu_squared"](gate_up)
    limit = mixture.limit
    if not limit:
        gate, up = np.split(gate_up, 2, axis=-1)
        return ACTIVATIONS[mixture.activation.gate](gate) * up
    gate = np.minimum(gate_up[..., ::2], limit)
    up = np.clip(gate_up[..., 1::2], -limit, limit)
    return (up + 1) * (gate * ACTIVATIONS["sigmoid"](gate * gate.dtype.type(1.702)))
