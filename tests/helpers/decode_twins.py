"""The kernels of linear layers and attention in NumPy, float32: the twins of the launchers, which define them.

Each method returns a `NumpyLaunch`, which computes when it is called, so that what drives the kernels drives the twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from device_weights import from_device_layout
from launched_twins import launched

from edgellm.kernels.decode.contract import (
    TOKEN_SHARE,
    AttentionScratch,
    AttentionStep,
    AttentionWeights,
    Kept,
    LinearAdapters,
    LinearWeights,
    NormedInput,
    activation_number,
)
from edgellm.kernels.decode.heads_twin import capped, pairs_apart, rms_norm, square_sums
from edgellm.kernels.numpy_launch import NumpyLaunch
from edgellm.kernels.quantization.device_layout import InputPermutation, PackedMatrix
from edgellm.kernels.quantization.packed_weight import PackedWeight
from edgellm.kernels.quantization.rows import write_ring_rows, write_rows

#: Of queries and of keys.
_Both = tuple[np.ndarray, np.ndarray]


class NumpyTiledKernels:
    """The twins of `CudaTiledKernels`: x is [R, K] or [R, padded_columns(K)]."""

    def linear(self, x: np.ndarray, linear: LinearWeights, output: np.ndarray, scale: float = 1.0) -> NumpyLaunch:
        """`output` [R, N] = scale (x weight^T + bias)."""
        return NumpyLaunch(lambda: _write_rows(output, linear, scaled(product(x, linear), scale)))

    def gate_up(self, x: np.ndarray, linear: LinearWeights, activation: str, output: np.ndarray) -> NumpyLaunch:
        """`output` [R, F] = activation(gate) up, `linear` [2F, K] gates, then ups."""
        activation_number(activation)
        return NumpyLaunch(lambda: write(output, gated(product(x, linear), activation)))

    @launched
    def linear_residual(
        self,
        x: np.ndarray,
        linear: LinearWeights,
        residual: np.ndarray | None,
        output: np.ndarray,
        scale: float = 1.0,
        kept: Kept | None = None,
        selected: np.ndarray | None = None,
    ) -> None:
        """`output` [R, N] = residual [R, N] (None: 0) + scale (x weight^T + bias); the residual is kept.

        With `selected` [B, 1] int32, x and residual have T rows a sequence, of which it names the one that goes into
        the B rows of the output.
        """
        inputs = rows_of(x)
        before = np.zeros((len(inputs), linear.weight.shape[0]), np.float32) if residual is None else rows_of(residual)
        if selected is not None:
            chosen = np.arange(selected.size) * (len(inputs) // selected.size) + selected.reshape(-1)
            inputs, before = inputs[chosen], before[chosen]
        keep(kept, before, before)
        _write_rows(output, linear, before + scaled(product(inputs, linear), scale))

    def low_products(self, x: np.ndarray, linear: LinearWeights, selected: np.ndarray | None = None) -> NumpyLaunch:
        """The products in front of a packed layer with LoRA adapters: x a^T * scales, of all rows or those `selected`,
        as the kernels of the layer take it from `LinearAdapters.low`. The layer's twin computes it itself."""
        return NumpyLaunch(lambda: None)


class NumpyDecodeKernels:
    """The twins of `CudaDecodeKernels`."""

    def takes(self, linear: LinearWeights, rows: int, normed: bool) -> bool:
        """Any layer."""
        return True

    @launched
    def norm_linear(
        self,
        inputs: Sequence[NormedInput],
        linear: LinearWeights,
        output: np.ndarray,
        scale: float = 1.0,
        kept: Kept | None = None,
        next_early: bool = True,
    ) -> None:
        """`output` [R, N] = scale (x weight^T + bias), x [R, K] the normed inputs side by side; the last is kept."""
        inputs = [with_added(each) for each in inputs]
        parts = [normalized(each) for each in inputs]
        _write_rows(output, linear, scaled(product(np.concatenate(parts, axis=1), linear), scale))
        keep(kept, selected_columns(inputs[-1]), parts[-1])

    def norm_gate_up(
        self, normed: NormedInput, linear: LinearWeights, activation: str, output: np.ndarray
    ) -> NumpyLaunch:
        """`output` [R, F] = activation(gate) up of the normed input, `linear` [2F, K] gates, then ups."""
        activation_number(activation)
        return NumpyLaunch(lambda: write(output, gated(product(normalized(with_added(normed)), linear), activation)))

    linear_residual = NumpyTiledKernels.linear_residual

    def attention(
        self,
        qkv: np.ndarray,
        weights: AttentionWeights,
        step: AttentionStep,
        scratch: AttentionScratch | None,
        context: np.ndarray,
    ) -> NumpyLaunch:
        """Attention of T new tokens a sequence: [q/k norm,] rotation, their KV rows, softmax over what each sees.

        A token sees the rows before start_index[b], itself, and the new tokens whose rows the mask lets it see, or the
        latest of these in its window. Scales
        of rows of int8 multiply scores, and weights before they meet values.
        `qkv` [B T, (n_q + 2 n_kv) D]; rows start_index[b] .. + T - 1 of the caches are written; `context` [B T, n_q D].
        """
        return NumpyLaunch(lambda: _attention(qkv, weights, step, context))

    def cap_rows(self, x: np.ndarray, cap: float) -> NumpyLaunch:
        """`x` float32 = cap tanh(x / cap), in place."""
        return NumpyLaunch(lambda: np.copyto(x, capped(x, cap)))

    def scale_rows(self, x: np.ndarray, factor: float, output: np.ndarray) -> NumpyLaunch:
        """`output` [R, K] float32 = factor x [R, K] compute."""
        return NumpyLaunch(lambda: write(output, x.reshape(output.shape) * np.float32(factor)))

    def gate_rows(self, gates_and_ups: np.ndarray, activation: str, output: np.ndarray) -> NumpyLaunch:
        """`output` [R, F] compute = activation(gate) up of [R, 2F] float32, gates, then ups."""
        activation_number(activation)
        return NumpyLaunch(lambda: write(output, gated(rows_of(gates_and_ups), activation)))

    @launched
    def norm_residual(
        self,
        normed: NormedInput,
        residual: np.ndarray,
        output: np.ndarray,
        selected: np.ndarray | None = None,
        factor: np.ndarray | None = None,
    ) -> None:
        """`output` [R, N] float32 = residual [R, N] + the normed input, not rounded; all times a `factor` [1] float32.

        With `selected` [B, 1] int32 the residual has T rows a sequence, of which it names the one that the B rows get.
        """
        before = rows_of(residual)
        if selected is not None:
            before = before[np.arange(selected.size) * (len(before) // selected.size) + selected.reshape(-1)]
        write(output, _added(before, normed, factor))

    @launched
    def norm_parts(
        self, parts: Sequence[NormedInput], next_early: bool = True, squares: np.ndarray | None = None, wholes: Any = ()
    ) -> None:
        """Each part, columns of one array [R, C] float32, is normed where it is, not rounded; other columns stay.

        No two parts have a column in common. Where ranks share them, `squares` [R, `SQUARE_SUMS`] are the sums of the
        squares of all, of which each has `wholes` columns."""
        for place, part in enumerate(parts):
            x = selected_columns(part)
            if squares is None or part.weight is None:
                x[...] = normalized(part)
                continue
            mean = rows_of(squares)[:, place, None] / np.float32(wholes[place])
            x[...] = rms_norm(x, part.weight, part.epsilon, part.offset, mean)

    @launched
    def square_sums(
        self, parts: Sequence[NormedInput], counted: Sequence[bool], squares: np.ndarray, next_early: bool = True
    ) -> None:
        """`squares` [R, `SQUARE_SUMS`] float32 = the sums of the squares of each of the parts, columns of one array
        [R, C] float32 as they are; 0 of those that are not `counted`, and behind the last."""
        write(squares, square_sums([selected_columns(part) for part in parts], counted))

    def insert_columns(self, columns: np.ndarray, rows: np.ndarray) -> NumpyLaunch:
        """The first columns of `rows` [R, C] become `columns` [R, width], both float32."""
        return NumpyLaunch(lambda: np.copyto(rows_of(rows)[:, : columns.shape[-1]], rows_of(columns)))

    @launched
    def token_inputs(
        self, values: np.ndarray, own: np.ndarray, weight: np.ndarray, epsilon: float, offset: float, scale: float
    ) -> None:
        """Parts of `values` [R, C] float32, each as wide as the norm's `weight` [P], become where they are
        (norm(part) + scale times the same columns of `own` [R, C] compute) / sqrt(2)."""
        parts, before = (x.reshape(-1, weight.size) for x in (values, own))
        through = rms_norm(parts, weight, epsilon, offset) + before * np.float32(scale)
        write(values, (through * np.float32(TOKEN_SHARE)).reshape(values.shape))

    @launched
    def token_gate(self, gate: np.ndarray, activation: str, through: NormedInput, output: np.ndarray) -> None:
        """`output` [R, P] compute = activation(gate [R, P] float32) times P columns of others, [R, C] float32."""
        write(output, gated(np.concatenate((rows_of(gate), selected_columns(through)), axis=1), activation))

    @launched
    def token_gate_linear(
        self, normed: NormedInput, linear: LinearWeights, activation: str, through: NormedInput, output: np.ndarray
    ) -> None:
        """`token_gate` of what a linear layer [P, K] gives of the rounded input."""
        self.token_gate(product(normalized(with_added(normed)), linear), activation, through, output)()

    @launched
    def norm(
        self,
        normed: NormedInput,
        output: np.ndarray,
        column: int = 0,
        kept: Kept | None = None,
        next_early: bool = True,
        arranged: InputPermutation | None = None,
    ) -> None:
        """Columns `column` on of `output` [R, C] compute get the normed input, all behind them zeros.

        `arranged`: whole rows, once they are normed and rounded; without a norm, the output may be the input itself.

        Of parts side by side the first is launched first, so that zeros stand behind the last alone. The device sums
        squares in the slices of the C columns, as where one kernel norms parts that stand side by side.
        """
        before, own = selected_columns(normed).copy(), rows_of(output)
        values = before if normed.weight is None else normalized(normed)
        own[:, column:] = 0
        own[:, column : column + values.shape[1]] = values if arranged is None else _arranged(values, arranged)
        keep(kept, before, values)


def _attention(qkv: np.ndarray, weights: AttentionWeights, step: AttentionStep, context: np.ndarray) -> None:
    mask, (batch, kv_heads, _, size) = step.attention_mask, step.k_cache.shape
    tokens = len(qkv) // batch
    query_heads = qkv.shape[1] // size - 2 * kv_heads
    heads = qkv.reshape(batch * tokens, -1, size)
    query, key, value = np.split(heads, (query_heads, query_heads + kv_heads), axis=1)
    turns = None
    if weights.rotary:
        cos_sin = step.rope_rotary_cos_sin.reshape(batch * tokens, -1)
        first, rotary = weights.rotary_part or (0, cos_sin.shape[1])
        own = first + weights.query_columns
        turns = cos_sin[:, own : own + rotary], cos_sin[:, first : first + rotary]
    norms = None if weights.q_norm is None or weights.k_norm is None else (weights.q_norm, weights.k_norm)
    kinds = weights.epsilon, weights.offset, weights.neighbours, weights.norms_behind
    query, key = heads_made_ready((query, key), norms, turns, *kinds)
    value = rms_norm(value, np.float32(1), weights.epsilon, 0.0) if weights.values_normed else value
    query = query.reshape(batch, tokens, kv_heads, -1, size) * np.float32(weights.scale)
    key, value = (x.reshape(batch, tokens, kv_heads, size).swapaxes(1, 2) for x in (key, value))
    for b, start in enumerate(step.kvcache_start_index.tolist()):
        new = slice(start, start + tokens)
        for values, cache, scales in ((key, step.k_cache, step.k_scale), (value, step.v_cache, step.v_scale)):
            if step.window is None:
                write_rows((b, slice(None), new), values[b], cache, scales)
            else:
                write_ring_rows(b, start, values[b], cache, scales)
        for t in range(tokens):
            seen, before = np.arange(tokens) == t, np.ones(start, bool)
            if mask is not None:
                visible = mask[b, 0, t, new]  # padding may stand at rows behind the keys that the mask speaks of
                seen[: len(visible)] |= visible
                before = mask[b, 0, t, :start] if step.masks_all else before
            rows = np.concatenate((np.flatnonzero(before), start + np.flatnonzero(seen)))
            if step.window is not None:
                rows = rows[-step.window :] % step.k_cache.shape[2]
            keys, values = (cache[b][:, rows] for cache in (step.k_cache, step.v_cache))
            k_scale, v_scale = (None if each is None else each[b][:, rows] for each in (step.k_scale, step.v_scale))
            sinks = None if weights.sinks is None else weights.sinks.reshape(kv_heads, -1, 1)
            attended = attend(query[b, t], keys, values, k_scale, v_scale, None, sinks, weights.cap)
            context[b * tokens + t] = attended.reshape(-1)


def heads_made_ready(
    heads: _Both,
    norms: _Both | None,
    turns: _Both | None,
    epsilon: float,
    offset: float,
    neighbours: bool,
    norms_behind: bool,
) -> list[np.ndarray]:
    """Query and key heads [R, n, D], normed by weights [D] and rotated by `turns` [R, rotary], each by its own."""
    made = list(heads)
    for is_behind in (False, True):
        if norms is not None and norms_behind == is_behind:
            made = [rms_norm(x, weight, epsilon, offset) for x, weight in zip(made, norms, strict=True)]
        if turns is not None and not is_behind:
            apart = [pairs_apart(x, turns[0].shape[-1]) if neighbours else x for x in made]
            made = [rotary_embedding(x, own) for x, own in zip(apart, turns, strict=True)]
    return made


def rotary_embedding(x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """Rotate the first R elements of each head of [R, n, D] by [R, rotary], cosine half then sine half.

    Element j is paired with element j + R/2.
    """
    rotary = cos_sin.shape[-1]
    half = rotary // 2
    cosine, sine = cos_sin[:, None, :half], cos_sin[:, None, half:]
    low, high, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
    return np.concatenate((low * cosine - high * sine, high * cosine + low * sine, rest), axis=-1)


def attend(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    key_scales: np.ndarray | None = None,
    value_scales: np.ndarray | None = None,
    hidden: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    cap: float = 0.0,
) -> np.ndarray:
    """softmax(query keys^T) values of query [..., R, D], scaled, and rows [..., n, D], of int8 with scales [..., n, 1].

    With a `cap` scores become cap tanh(score / cap). Keys are not seen where `hidden` [R, n] is True. `sinks` [..., R
    or 1, 1] are scores without a value.
    """
    scores = query @ keys.astype(np.float32, copy=False).swapaxes(-1, -2)
    if key_scales is not None:
        scores = scores * key_scales.swapaxes(-1, -2)
    if cap:
        scores = capped(scores, cap)
    if hidden is not None:
        scores[..., hidden] = -np.inf
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    shares = weights / (total if sinks is None else total + np.exp(sinks - largest))
    if value_scales is not None:
        shares = shares * value_scales.swapaxes(-1, -2)
    return shares @ values.astype(np.float32, copy=False)


def normalized(normed: NormedInput) -> np.ndarray:
    """What counts of an input, normed where it has a weight: [R, width]."""
    x = selected_columns(normed)
    return x if normed.weight is None else rms_norm(x, normed.weight, normed.epsilon, normed.offset)


def _added(before: np.ndarray, normed: NormedInput, factor: np.ndarray | None) -> np.ndarray:
    return (before + normalized(normed)) * (np.float32(1) if factor is None else factor)


def with_added(normed: NormedInput) -> NormedInput:
    """The input where what it is added to, if anything, has its output."""
    if (added := normed.added) is None:
        return normed
    own = NormedInput(normed.values, added.weight, added.epsilon, added.offset)
    write(added.output, _added(rows_of(added.residual), own, added.factor))
    return normed._replace(values=added.output, added=None)


def _as_they_were(arranged: np.ndarray, inputs: InputPermutation) -> np.ndarray:
    """Inputs before they were arranged."""
    values = arranged if inputs.scales is None else arranged / inputs.scales
    if inputs.order is None:
        return values
    found = np.empty_like(values)
    found[:, inputs.order] = values
    return found


def _arranged(values: np.ndarray, arranged: InputPermutation) -> np.ndarray:
    values = values if arranged.order is None else values[:, arranged.order]
    return values.copy() if arranged.scales is None else values * arranged.scales


def selected_columns(normed: NormedInput) -> np.ndarray:
    """What counts of an input, as it is: [R, width]."""
    return rows_of(normed.values)[:, normed.first : normed.first + normed.columns]


def product(x: np.ndarray, linear: LinearWeights) -> np.ndarray:
    """The first K columns of x times the transpose of [N, K], plus what adapters add, plus [N]."""
    weight, rows = linear.weight, rows_of(x)[:, : linear.weight.shape[1]]
    inputs = rows if linear.arranged is None else _as_they_were(rows, linear.arranged)
    if isinstance(weight, PackedMatrix):
        weight = from_device_layout(weight.layout, weight.data)
    if isinstance(weight, PackedWeight):
        rows = rows if weight.input_scales is None else rows * weight.input_scales
        weight = weight.values()
    sums = rows @ weight.T
    if linear.adapters is not None:
        first = 0 if linear.place is None else linear.place[0]
        sums += adapted(inputs, linear.adapters)[:, first : first + sums.shape[1]]
    return sums if linear.bias is None else sums + linear.bias


def adapted(x: np.ndarray, adapters: LinearAdapters) -> np.ndarray:
    """What LoRA adapters add to a linear layer of x [R, K]: (x a^T * scales) b, [R, N]."""
    sequences, places = adapters.scales.shape
    low = (x @ adapters.a.T).reshape(sequences, -1, places, len(adapters.a) // places)
    scaled_low = low * adapters.scales[:, None, :, None]
    return scaled_low.reshape(len(x), -1) @ adapters.b


def scaled(x: np.ndarray, scale: float) -> np.ndarray:
    """`x` itself where the scale is 1."""
    return x if scale == 1 else x * np.float32(scale)


def gated(gate_up: np.ndarray, activation: str) -> np.ndarray:
    """activation(first half) * second half over the last axis: [R, 2F] to [R, F].

    silu(x) = x / (1 + exp(-x)); gelu_tanh(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), of Hendrycks and
    Gimpel 2016.
    """
    gate, up = np.split(gate_up, 2, axis=-1)
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
    return np.float32(0.5) * gate * (1 + np.tanh(inner)) * up


def rows_of(x: np.ndarray) -> np.ndarray:
    """The array as a matrix."""
    return x.reshape(-1, x.shape[-1])


def write(output: np.ndarray, values: np.ndarray) -> None:
    """`values` [R, N] into an output of as many elements."""
    output.reshape(values.shape)[...] = values


def _write_rows(output: np.ndarray, linear: LinearWeights, values: np.ndarray) -> None:
    """The same of a layer which may be some rows of another one, of whose outputs its own are columns."""
    if linear.place is None:
        write(output, values)
    else:
        first, width = linear.place
        output.reshape(-1, width)[:, first : first + values.shape[1]] = values


def keep(kept: Kept | None, before: np.ndarray, after: np.ndarray) -> None:
    """What `kept` asks for, of `before` and `after` [R, width]."""
    if kept is not None:
        width = before.shape[1]
        rows_of(kept.target)[:, kept.place * width : (kept.place + 1) * width] = before if kept.raw else after
