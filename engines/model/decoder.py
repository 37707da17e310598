"""The one description of a decoder-only transformer that Llama, Qwen2 and Qwen3 share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from edgellm.engines.lora.config import SCALES, adapted_projections
from edgellm.engines.model.config import DecoderConfig, EngineShape, WeightSpec
from edgellm.engines.model.operations import Operations, Tensor

EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"


def single_weight(name: str, *shape: int, source: str | None = None) -> WeightSpec:
    """A buffer that one tensor fills: the tensor `source` of the checkpoint, by default that of the same name."""
    return WeightSpec(name, shape, ((source or name, shape),))


def layer_weights(config: DecoderConfig, prefix: str, source: str, input_size: int) -> list[WeightSpec]:
    """The weights of attention and MLP in order of use; q, k, v and gate, up are fused into one buffer each.

    `prefix` begins their names, `source` those in the checkpoint; the attention takes `input_size` elements a token.
    """
    hidden, query, kv, inner = config.hidden_size, config.query_size, config.kv_size, config.intermediate_size

    def single(name: str, *shape: int) -> WeightSpec:
        return single_weight(f"{prefix}{name}", *shape, source=f"{source}{name}")

    def fused(part: str, name: str, kind: str, sizes: dict[str, int], *columns: int) -> WeightSpec:
        parts = tuple((f"{source}{part}{each}.{kind}", (rows, *columns)) for each, rows in sizes.items())
        return WeightSpec(f"{prefix}{part}{name}.{kind}", (sum(sizes.values()), *columns), parts)

    qkv = {"q_proj": query, "k_proj": kv, "v_proj": kv}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    specs = [fused("self_attn.", "qkv_proj", "weight", qkv, input_size)]
    if config.attention_bias:
        specs.append(fused("self_attn.", "qkv_proj", "bias", qkv))
    if config.qk_norm:
        specs.append(single("self_attn.q_norm.weight", config.head_dim))
        specs.append(single("self_attn.k_norm.weight", config.head_dim))
    specs.append(single("self_attn.o_proj.weight", hidden, query))
    if config.attention_output_bias:
        specs.append(single("self_attn.o_proj.bias", hidden))
    specs.append(single("post_attention_layernorm.weight", hidden))
    specs.append(fused("mlp.", "gate_up_proj", "weight", gate_up, hidden))
    if config.mlp_bias:
        specs.append(fused("mlp.", "gate_up_proj", "bias", gate_up))
    specs.append(single("mlp.down_proj.weight", hidden, inner))
    if config.mlp_bias:
        specs.append(single("mlp.down_proj.bias", hidden))
    return specs


class LayerDescription(Generic[Tensor]):
    """Describes layers to an interpreter of operations, for one engine shape; `config` is the layers' own."""

    def __init__(
        self, operations: Operations[Tensor], config: DecoderConfig, shape: EngineShape, specs: Sequence[WeightSpec]
    ) -> None:
        self.operations = operations
        self.decoder = config
        self.shape = shape
        self.weight_shapes = {spec.name: spec.shape for spec in specs}
        self._adapted = {each.name: each for each in adapted_projections(specs)} if shape.lora_slots else {}

    def weight(self, name: str) -> Tensor:
        """The weight, which must be there."""
        return self.operations.weight(name, self.weight_shapes[name])

    def bias(self, name: str) -> Tensor | None:
        """The weight, if the model has it."""
        return self.weight(name) if name in self.weight_shapes else None

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm by the weight `name`."""
        return self.operations.rms_norm(x, self.weight(name), self.decoder.rms_norm_eps)

    def projection(self, x: Tensor, name: str) -> Tensor:
        """The linear layer `name` of x [B, T, K], with bias and LoRA adapters where there are any."""
        ops, shape = self.operations, self.shape
        y = ops.linear(x, self.weight(f"{name}.weight"), self.bias(f"{name}.bias"))
        adapted = self._adapted.get(name)
        if adapted is None:
            return y
        a, b = (ops.weight(*edge) for edge in adapted.edge(shape.lora_slots, shape.lora_rank))
        return ops.adapt(y, x, a, b, self._scales)

    def adapter_inputs(self) -> None:
        """`lora_scales`, in an engine with LoRA adapters: to be declared before a projection is."""
        if self.shape.lora_slots:
            self._scales = self.operations.input(SCALES, (self.shape.batch, self.shape.lora_slots), "compute")

    def position_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """`rope_rotary_cos_sin`, `attention_mask` and `kvcache_start_index`."""
        ops, shape = self.operations, self.shape
        cos_sin = ops.input("rope_rotary_cos_sin", (shape.batch, shape.tokens, self.decoder.rotary_dim), "compute")
        mask = ops.input("attention_mask", (shape.batch, 1, shape.tokens, shape.key_range), "bool")
        return cos_sin, mask, ops.input("kvcache_start_index", (shape.batch,), "int32")

    def selected_rows(self, hidden: Tensor) -> Tensor:
        """Of [B, T, H] the rows that get logits, [B, selected, H]: those that `last_token_ids` names, or all."""
        if self.shape.selected == self.shape.tokens:
            return hidden
        rows = self.operations.input("last_token_ids", (self.shape.batch, self.shape.selected), "int32")
        return self.operations.gather_rows(hidden, rows)

    def attention(self, index: int, prefix: str, x: Tensor, positions: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Attention of the layer whose weights begin with `prefix`, over the caches `index`, which it extends."""
        cos_sin, mask, start_index = positions
        ops, config, prefix = self.operations, self.decoder, f"{prefix}self_attn."
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = ops.split_heads(self.projection(x, f"{prefix}qkv_proj"), heads + 2 * kv_heads)
        if config.qk_norm:
            query, key, value = ops.split(qkv, (heads, kv_heads, kv_heads), axis=1)
            query, key = self.norm(query, f"{prefix}q_norm.weight"), self.norm(key, f"{prefix}k_norm.weight")
            query, key = ops.rotary_embedding(query, cos_sin), ops.rotary_embedding(key, cos_sin)
        else:  # one rotation serves queries and keys
            rotated, value = ops.split(qkv, (heads + kv_heads, kv_heads), axis=1)
            query, key = ops.split(ops.rotary_embedding(rotated, cos_sin), (heads, kv_heads), axis=1)
        cache_shape = (self.shape.batch, kv_heads, self.shape.kv_rows, config.head_dim)
        keys, values = (
            ops.kv_cache_update(ops.input(f"{kind}_cache_{index}", cache_shape, "compute"), update, start_index)
            for kind, update in (("k", key), ("v", value))
        )
        ops.output(f"present_k_cache_{index}", keys)
        ops.output(f"present_v_cache_{index}", values)
        context = ops.attention(query, keys, values, mask, config.head_dim**-0.5)
        return self.projection(ops.merge_heads(context), f"{prefix}o_proj")

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        """The gated MLP of the layer whose weights begin with `prefix`."""
        gate_up = self.projection(x, f"{prefix}mlp.gate_up_proj")
        return self.projection(self.operations.silu_mul(gate_up), f"{prefix}mlp.down_proj")


def head_weight_name(config: DecoderConfig) -> str:
    """The weight that turns hidden states into logits: the embedding table itself where the two are tied."""
    return EMBEDDING if config.tie_word_embeddings else "lm_head.weight"


def decoder_weights(config: DecoderConfig) -> list[WeightSpec]:
    """Every weight of the decoder, in order of use; q, k, v and gate, up are fused into one buffer each."""
    hidden = config.hidden_size
    specs = [single_weight(EMBEDDING, config.vocab_size, hidden)]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        specs.append(single_weight(f"{layer}input_layernorm.weight", hidden))
        specs += layer_weights(config, layer, layer, hidden)
    specs.append(single_weight(_FINAL_NORM, hidden))
    if not config.tie_word_embeddings:
        specs.append(single_weight("lm_head.weight", config.vocab_size, hidden))
    return specs


class DecoderDescription(LayerDescription[Tensor]):
    """Describes a decoder to an interpreter of operations, for one engine shape."""

    #: Whether the residual stream is in float32.
    wide_residual = True

    def __init__(self, operations: Operations[Tensor], config: DecoderConfig, shape: EngineShape) -> None:
        super().__init__(operations, config, shape, decoder_weights(config))
        self.config = config

    def describe(self) -> None:
        """Declare the inputs of an engine, compute, and declare `logits` and the caches as outputs."""
        ops, config, shape = self.operations, self.config, self.shape
        hidden = self._wide(ops.input("inputs_embeds", (shape.batch, shape.tokens, config.hidden_size), "compute"))
        positions = self.position_inputs()
        self.adapter_inputs()
        features = {}
        for index in range(config.num_layers):
            if index in config.feature_layers:
                features[index] = ops.to_compute(hidden) if self.wide_residual else hidden
            hidden = self._layer(index, hidden, positions)
            if shape.phase == "prefill" and index < config.deepstack_layers:
                size = (shape.batch, shape.tokens, config.hidden_size)
                hidden = ops.add(hidden, self._wide(ops.input(f"deepstack_features_{index}", size, "compute")))
        if config.num_layers in config.feature_layers:  # every row of the last hidden state is needed
            hidden = features[config.num_layers] = self.norm(hidden, _FINAL_NORM)
            normed = self.selected_rows(hidden)
        else:
            normed = self.norm(self.selected_rows(hidden), _FINAL_NORM)
        if features:
            parts = [features[index] for index in config.feature_layers]
            ops.output("hidden_states", ops.concatenate(parts, axis=2) if len(parts) > 1 else parts[0])
        ops.output("logits", ops.to_float32(ops.linear(normed, self.weight(head_weight_name(config)))))

    def _layer(self, index: int, hidden: Tensor, positions: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ops, layer = self.operations, f"model.layers.{index}."
        normed = self.norm(hidden, f"{layer}input_layernorm.weight")
        hidden = ops.add(hidden, self._wide(self.attention(index, layer, normed, positions)))
        normed = self.norm(hidden, f"{layer}post_attention_layernorm.weight")
        return ops.add(hidden, self._wide(self.mlp(layer, normed)))

    def _wide(self, x: Tensor) -> Tensor:
        """In the residual stream's dtype."""
        return self.operations.to_float32(x) if self.wide_residual else x
