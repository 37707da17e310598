"""Runs a program by operations: NumPy computes them at once, TensorRT makes a network of them.

Every kind of step is told once here, in terms of `Operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

from edgellm.engines.model.adapted_projections import SCALES
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.encoder_graph import average_pool, encoder_attention
from edgellm.engines.model.encoder_steps import (
    AveragePool,
    DropFirst,
    EncoderAttention,
    Gather,
    Prepend,
    Product,
    ScaledResidual,
    Unfold,
)
from edgellm.engines.model.operations import Operations, Scoring, Tensor
from edgellm.engines.model.program import Program
from edgellm.engines.model.recurrent_steps import GatedDelta, GatedNorm, SelectiveScan, ShortConvolution
from edgellm.engines.model.row_steps import InsertColumns, TokenGate, UnitNorm
from edgellm.engines.model.states import PRESENT
from edgellm.engines.model.steps import (
    LAST_SEEN,
    Add,
    Attention,
    Experts,
    Input,
    Keep,
    Linear,
    LinearResidual,
    Norm,
    Normed,
    NormLinear,
    NormParts,
    Reshape,
    Scale,
    SideBySide,
    Stateful,
)
from edgellm.kernels.decode.contract import TOKEN_SHARE

#: Raise this when the network of a program changes though the program does not: plans are then rebuilt.
NETWORK_VERSION = 3


class ProgramGraph(Generic[Tensor]):
    """A program's steps as calls on `operations`; `run` makes them."""

    def __init__(self, operations: Operations[Tensor], program: Program) -> None:
        self._operations, self._program = operations, program
        # Functions, not methods of this object: it would refer to itself, and its values live on when it is done with.
        cls = type(self)
        kinds: dict[type, Callable[[Any, Any], None]] = {
            Scale: cls._scale,
            Add: cls._add,
            Normed: cls._normed,
            NormParts: cls._norm_parts,
            NormLinear: cls._norm_linear,
            LinearResidual: cls._linear_residual,
            Experts: cls._experts,
            Attention: cls._attention,
            ShortConvolution: cls._short_convolution,
            GatedDelta: cls._update_matrices,
            SelectiveScan: cls._update_matrices,
            GatedNorm: cls._gated_norm,
            EncoderAttention: cls._encoder_attention,
            Gather: cls._gather,
            Prepend: cls._prepend,
            DropFirst: cls._drop_first,
            Reshape: cls._reshape,
            AveragePool: cls._average_pool,
            ScaledResidual: cls._scaled_residual,
            Product: cls._product,
            Unfold: cls._unfold,
            SideBySide: cls._side_by_side,
            UnitNorm: cls._unit_norm,
            InsertColumns: cls._insert_columns,
            TokenGate: cls._token_gate,
        }
        self._steps = [(kinds[type(step)], step) for step in program.steps]
        self._to_residual = operations.to_float32 if program.wide_residual else operations.to_compute
        residuals = {step.residual for step in program.steps if isinstance(step, LinearResidual)}
        self._state_names = {id(step): step.state(program.shape).names for step in program.stateful}
        self._streams = sorted(residuals & program.inputs.keys())  # norm and residual then share one cast
        # Of a run, by name: inputs and what steps wrote; weights and adapters; what steps keep, by its places.
        self._values: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._kept: dict[str, dict[int, Tensor]] = {}

    def run(self) -> None:
        """Take the inputs, compute, and give out the outputs."""
        operations, program = self._operations, self._program
        values = {name: operations.input(name, shape, dtype) for name, (shape, dtype) in program.values.items()}
        values |= {name: self._to_residual(values[name]) for name in self._streams}
        self._values, self._kept = values, {}
        self._weights = {name: operations.weight(name, shape) for name, shape in program.matrices.items()}
        for run, step in self._steps:
            run(self, step)
        for name, parts in self._kept.items():
            ordered = [parts[place] for place in sorted(parts)]
            values[name] = operations.concatenate(ordered, axis=2) if len(ordered) > 1 else ordered[0]
        for name, (_, dtype) in program.outputs.items():
            operations.output(name, operations.to_float32(values[name]) if dtype == "float32" else values[name])

    def _norm(self, x: Tensor, norm: Norm | None) -> Tensor:
        """x itself where there is no norm."""
        if norm is None:
            return x
        weight = self._weights[norm.weight.name]
        if norm.bias is None:
            return self._operations.rms_norm(x, weight, norm.epsilon, norm.offset)
        return self._operations.layer_norm(x, weight, self._weights[norm.bias.name], norm.epsilon)

    def _linear(self, x: Tensor, linear: Linear) -> Tensor:
        """A linear layer, with LoRA adapters where the engine has them."""
        weights, shape = self._weights, self._program.shape
        bias = None if linear.bias is None else weights[linear.bias.name]
        y = self._operations.linear(x, weights[linear.weight.name], bias)
        adapted = self._program.adapted.get(linear.name)
        if adapted is None:
            return y
        a, b = (weights[name] for name, _ in adapted.edge(shape.lora_slots, shape.lora_rank))
        return self._operations.adapt(y, x, a, b, self._values[SCALES])

    def _input(self, given: Input) -> Tensor:
        x = self._values[given.value]
        if len(given.norms) < 2:
            return self._norm(x, given.norms[0]) if given.norms else x
        return self._normed_parts(x, given.norms)

    def _normed_parts(self, x: Tensor, norms: tuple[Norm, ...], rest: int = 0) -> Tensor:
        """x [B, T, ..] with a part for each norm, and `rest` columns behind them as they are."""
        sizes = [norm.weight.shape[0] for norm in norms]
        parts = self._operations.split(x, [*sizes, rest] if rest else sizes, axis=2)
        normed = [self._norm(part, norm) for part, norm in zip(parts, norms, strict=False)]
        return self._operations.concatenate(normed + parts[len(norms) :], axis=2)

    def _keep(self, keep: Keep, x: Tensor) -> None:
        self._kept.setdefault(keep.target, {})[keep.place] = x
        self._values[keep.target] = x

    def _norm_linear(self, step: NormLinear) -> None:
        operations = self._operations
        inputs = [self._input(given) for given in step.inputs]
        if step.keep is not None:
            raw = step.keep.raw
            self._keep(step.keep, operations.to_compute(self._values[step.inputs[-1].value]) if raw else inputs[-1])
        x = operations.concatenate(inputs, axis=2) if len(inputs) > 1 else inputs[0]
        if step.selects:
            x = operations.gather_rows(x, self._values["last_token_ids"])
        y = self._linear(operations.to_compute(x), step.linear)
        if step.activation is not None:
            y = operations.gated(y, step.activation) if step.gated else operations.activation(y, step.activation)
        if step.scale != 1.0:
            y = operations.scale(operations.to_float32(y), step.scale)
        if step.cap:
            y = operations.activation(operations.scale(operations.to_float32(y), 1 / step.cap), "tanh")
            y = operations.scale(y, step.cap)
        self._values[step.output] = y

    def _linear_residual(self, step: LinearResidual) -> None:
        operations, values = self._operations, self._values
        x, residual = values[step.value], self._to_residual(values[step.residual])
        if step.keep is not None:
            self._keep(step.keep, operations.to_compute(residual))
        if step.selects:
            x, residual = (operations.gather_rows(each, values["last_token_ids"]) for each in (x, residual))
        y = self._to_residual(self._linear(x, step.linear))
        if step.scale != 1.0:
            y = operations.scale(y, step.scale)
        if step.norm is not None:
            y = self._to_residual(self._norm(y, step.norm))
        y = operations.add(residual, y)
        values[step.output] = y if step.factor is None else operations.multiply(y, self._weights[step.factor.name])

    def _experts(self, step: Experts) -> None:
        operations, weights = self._operations, self._weights
        if step.keep is not None:
            self._keep(step.keep, operations.to_compute(self._values[step.residual]))
        x = operations.to_compute(self._input(step.given))
        scores = operations.to_float32(self._linear(x, step.router))
        correction = None if step.correction is None else weights[step.correction.name]
        layers = step.gate_up, step.down
        biases = [None if each.bias is None else weights[each.bias.name] for each in layers]
        gate_up, down = ((weights[each.weight.name], bias) for each, bias in zip(layers, biases, strict=True))
        y = self._to_residual(operations.experts(step, x, scores, correction, gate_up, down))
        if step.shared:
            first, second, *gates = step.shared
            sums, is_gated = self._linear(x, first), step.mixture.gated
            inner = operations.gated(sums, "silu") if is_gated else operations.activation(sums, "relu_squared")
            of_all = operations.to_float32(self._linear(inner, second))
            for gate in gates:
                share = operations.activation(operations.to_float32(self._linear(x, gate)), "sigmoid")
                of_all = operations.multiply(of_all, share)
            y = operations.add(y, self._to_residual(of_all))
        if step.scale != 1.0:
            y = operations.scale(y, step.scale)
        self._values[step.output] = operations.add(self._to_residual(self._values[step.residual]), y)

    def _attention(self, step: Attention) -> None:
        operations, given = self._operations, self._values
        heads, kv_heads, size = step.heads
        if not heads:
            self._write_rows(step)
            return
        projected, gate = given[step.value], None
        if step.gated:
            pairs, rest = operations.split(projected, (2 * heads * size, 2 * kv_heads * size), axis=2)
            query, gate = operations.split(operations.split_heads(pairs, heads), (size, size), axis=3)
            rest = operations.split_heads(rest, 2 * kv_heads)
            qkv = operations.concatenate((query, rest), axis=1)
        else:
            qkv = operations.split_heads(projected, heads + 2 * kv_heads)
        if step.q_norm is not None or step.query_columns:
            query, key, value = operations.split(qkv, (heads, kv_heads, kv_heads), axis=1)
            if not step.norms_behind:
                query, key = self._norm(query, step.q_norm), self._norm(key, step.k_norm)
            if step.rotary:
                query = operations.rotary_embedding(query, self._rotary_rows(step, step.query_columns))
                key = operations.rotary_embedding(key, self._rotary_rows(step))
            if step.norms_behind:
                query, key = self._norm(query, step.q_norm), self._norm(key, step.k_norm)
        else:  # one rotation serves queries and keys
            rotated, value = operations.split(qkv, (heads + kv_heads, kv_heads), axis=1)
            if step.rotary:
                rotated = operations.pairs_apart(rotated, step.rotary) if step.neighbours else rotated
                rotated = operations.rotary_embedding(rotated, self._rotary_rows(step))
            query, key = operations.split(rotated, (heads, kv_heads), axis=1)
        mask, start = given["attention_mask"], given["kvcache_start_index"]
        keys, values, *scales = self._update_rows(step, key, value)
        scoring = Scoring(step.scale, step.cap, None if step.sinks is None else self._weights[step.sinks.name])
        if step.looks_ahead:
            seen = given[LAST_SEEN]
            context = operations.attention_ahead(query, keys, values, start, seen, step.window, scoring, *scales)
        elif step.window is None:
            context = operations.attention(query, keys, values, mask, scoring, *scales)
        else:
            context = operations.window_attention(query, keys, values, mask, start, step.window, scoring, *scales)
        if gate is not None:
            context = operations.multiply(context, operations.activation(gate, "sigmoid"))
        given[step.output] = operations.merge_heads(context)

    def _write_rows(self, step: Attention) -> None:
        """Keys and values of a step without query heads."""
        operations, kv_heads = self._operations, step.heads[1]
        both = operations.split_heads(self._values[step.value], 2 * kv_heads)
        key, value = operations.split(both, (kv_heads, kv_heads), axis=1)
        key = self._norm(key, step.k_norm)
        self._update_rows(
            step, operations.rotary_embedding(key, self._rotary_rows(step)) if step.rotary else key, value
        )

    def _update_rows(self, step: Attention, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The layer's rows, and their scales if they have such, with new keys and values."""
        operations, given, names = self._operations, self._values, self._state_names[id(step)]
        start, wraps = given["kvcache_start_index"], step.window is not None
        keys, values, *scales = (given[name] for name in names)
        key_scales, value_scales = scales or (None, None)
        keys = operations.kv_cache_update(keys, key, start, key_scales, wraps)
        values = operations.kv_cache_update(values, value, start, value_scales, wraps)
        for name, tensor in zip(names, (keys, values, *scales), strict=True):
            operations.output(PRESENT + name, tensor)
        return keys, values, *scales

    def _rotary_rows(self, step: Attention, further: int = 0) -> Tensor:
        """The columns of the rotary rows that the layer takes, or those so many `further` on; cut once for all layers
        that take the same."""
        name, given = "rope_rotary_cos_sin", self._values
        width = self._program.inputs[name][0][-1]
        if width == step.rotary:
            return given[name]
        first = step.rotary_first + further
        part = f"{name}.{first}"
        if part not in given:
            sizes = [size for size in (first, step.rotary, width - first - step.rotary) if size]
            given[part] = self._operations.split(given[name], sizes, axis=2)[1 if first else 0]
        return given[part]

    def _short_convolution(self, step: ShortConvolution) -> None:
        given, (columns,) = self._values, self._state_names[id(step)]
        weight, bias = self._weights[step.weight.name], None if step.bias is None else self._weights[step.bias.name]
        (kept,) = step.state(self._program.shape).kept_names
        given[step.output], given[kept] = self._operations.short_convolution(
            step, given[step.value], given[columns], weight, bias, given.get("node_parents"), given.get("state_tokens")
        )
        self._say_committed(step)

    def _update_matrices(self, step: GatedDelta) -> None:
        given, weights, (matrices,) = self._values, self._weights, self._state_names[id(step)]
        _, kept = step.state(self._program.shape).kept_names  # the rows are kept under their own name
        given[step.output], given[kept] = self._operations.update_matrices(
            step,
            given[step.value],
            given[step.gates],
            given[matrices],
            weights[step.a_log.name],
            weights[step.dt_bias.name],
            weights[step.skip.name] if isinstance(step, SelectiveScan) else None,
            given.get("node_parents"),
            given.get("state_tokens"),
        )
        self._say_committed(step)

    def _gated_norm(self, step: GatedNorm) -> None:
        operations, value = self._operations, self._values[step.value]
        width = self._program.kinds[step.value][0][-1]
        ends = [size for size in (step.first, width) if size]
        gate = operations.split(self._values[step.gate], ends, axis=2)[len(ends) - 1]
        gate = operations.activation(operations.to_float32(gate), "silu")
        if step.gates_first:
            parts = operations.split_heads(operations.multiply(value, gate), step.heads)
            weight = operations.reshape(self._weights[step.norm.weight.name], (step.heads, 1, width // step.heads))
            normed = operations.merge_heads(operations.rms_norm(parts, weight, step.norm.epsilon, 0.0))
            self._values[step.output] = operations.to_compute(normed)
            return
        normed = operations.merge_heads(self._norm(operations.split_heads(value, step.heads), step.norm))
        self._values[step.output] = operations.to_compute(operations.multiply(operations.to_float32(normed), gate))

    def _say_committed(self, step: Stateful) -> None:
        """Give out the states of a step that took its tokens into them."""
        if "state_tokens" in self._program.inputs:
            for name in self._state_names[id(step)]:
                self._operations.output(PRESENT + name, self._values[name])

    def _encoder_attention(self, step: EncoderAttention) -> None:
        given = self._values
        value, rotary, mask = given[step.value], given.get(step.rotary or ""), given.get(step.mask or "")
        if step.qk_norms is not None:
            value = self._normed_parts(value, step.qk_norms, step.heads * step.head_size)
        given[step.output] = encoder_attention(self._operations, step, value, rotary, mask)

    def _scale(self, step: Scale) -> None:
        residual = self._to_residual(self._values[step.value])
        self._values[step.output] = self._operations.scale(residual, step.factor)

    def _add(self, step: Add) -> None:
        operations, other = self._operations, step.other
        if isinstance(other, WeightSpec):
            added = operations.reshape(self._weights[other.name], (1, *other.shape))
        else:
            added = self._to_residual(self._values[other])
        self._values[step.output] = operations.add(self._values[step.value], added)

    def _normed(self, step: Normed) -> None:
        self._values[step.output] = self._norm(self._values[step.value], step.norm)

    def _norm_parts(self, step: NormParts) -> None:
        width = self._program.kinds[step.value][0][-1]
        rest = width - sum(norm.weight.shape[0] for norm in step.norms)
        self._values[step.output] = self._normed_parts(self._values[step.value], step.norms, rest)

    def _unit_norm(self, step: UnitNorm) -> None:
        operations, width = self._operations, self._program.kinds[step.value][0][-1]
        before, x = operations.split(self._values[step.value], (step.first, width - step.first), axis=2)
        parts = operations.split_heads(x, (width - step.first) // step.size)
        normed = operations.merge_heads(operations.rms_norm(parts, None, step.epsilon))
        self._values[step.output] = operations.concatenate((before, normed), axis=2)

    def _insert_columns(self, step: InsertColumns) -> None:
        width, all_columns = (self._program.kinds[name][0][-1] for name in (step.value, step.into))
        behind = self._operations.split(self._values[step.into], (width, all_columns - width), axis=2)[1]
        self._values[step.output] = self._operations.concatenate((self._values[step.value], behind), axis=2)

    def _token_gate(self, step: TokenGate) -> None:
        operations, (gate, *taken) = self._operations, (self._values[each] for each in step.reads)
        width, whole = (self._program.kinds[each][0][-1] for each in step.reads[:2])
        sizes = (step.first, width, whole - step.first - width)
        projected, rows = (operations.split(operations.to_float32(each), sizes, axis=2)[1] for each in taken)
        rows = operations.scale(rows, step.scale)
        through = operations.scale(operations.add(self._norm(projected, step.norm), rows), TOKEN_SHARE)
        gate = operations.activation(operations.to_float32(gate), step.activation)
        self._values[step.output] = operations.to_compute(operations.multiply(gate, through))

    def _gather(self, step: Gather) -> None:
        self._values[step.output] = self._operations.gather_rows(self._values[step.value], self._values[step.rows])

    def _prepend(self, step: Prepend) -> None:
        row = self._operations.reshape(self._weights[step.row.name], (1, 1, *step.row.shape))
        self._values[step.output] = self._operations.concatenate((row, self._values[step.value]), axis=1)

    def _drop_first(self, step: DropFirst) -> None:
        self._values[step.output] = self._operations.split(self._values[step.value], (1, step.rows), axis=1)[1]

    def _reshape(self, step: Reshape) -> None:
        self._values[step.output] = self._operations.reshape(self._values[step.value], step.shape)

    def _scaled_residual(self, step: ScaledResidual) -> None:
        operations, (width,) = self._operations, step.weight.shape
        weight = operations.reshape(operations.to_float32(self._weights[step.weight.name]), (1, 1, width))
        added = operations.multiply(operations.to_float32(self._values[step.value]), weight)
        residual = self._to_residual(self._values[step.residual])
        self._values[step.output] = operations.add(residual, self._to_residual(added))

    def _average_pool(self, step: AveragePool) -> None:
        self._values[step.output] = average_pool(self._operations, step, self._values[step.value])

    def _product(self, step: Product) -> None:
        operations = self._operations
        product = operations.product(self._values[step.value], self._weights[step.weight.name])
        self._values[step.output] = operations.to_compute(operations.scale(product, step.scale))

    def _unfold(self, step: Unfold) -> None:
        self._values[step.output] = self._operations.unfold(step, self._values[step.value])

    def _side_by_side(self, step: SideBySide) -> None:
        self._values[step.output] = self._operations.concatenate([self._values[each] for each in step.values], axis=2)
