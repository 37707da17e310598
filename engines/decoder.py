"""The one description of a decoder-only transformer that Llama, Qwen2 and Qwen3 share."""

from __future__ import annotations

from edgellm.engines.decoder_config import DecoderConfig, EngineShape, WeightSpec
from edgellm.engines.operations import Operations, Tensor

EMBEDDING = "model.embed_tokens.weight"


def head_weight_name(config: DecoderConfig) -> str:
    """The weight that turns hidden states into logits: the embedding table itself where the two are tied."""
    return EMBEDDING if config.tie_word_embeddings else "lm_head.weight"


def decoder_weights(config: DecoderConfig) -> list[WeightSpec]:
    """Every weight of the decoder, in order of use; q, k, v and gate, up are fused into one buffer each."""
    hidden, query, kv, inner = config.hidden_size, config.query_size, config.kv_size, config.intermediate_size

    def single(name: str, *shape: int) -> WeightSpec:
        return WeightSpec(name, shape, ((name, shape),))

    def fused(prefix: str, name: str, kind: str, sizes: dict[str, int], *columns: int) -> WeightSpec:
        parts = tuple((f"{prefix}{part}.{kind}", (rows, *columns)) for part, rows in sizes.items())
        return WeightSpec(f"{prefix}{name}.{kind}", (sum(sizes.values()), *columns), parts)

    qkv = {"q_proj": query, "k_proj": kv, "v_proj": kv}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    specs = [single(EMBEDDING, config.vocab_size, hidden)]
    for index in range(config.num_layers):
        layer, attention, mlp = (f"model.layers.{index}{part}" for part in (".", ".self_attn.", ".mlp."))
        specs.append(single(f"{layer}input_layernorm.weight", hidden))
        specs.append(fused(attention, "qkv_proj", "weight", qkv, hidden))
        if config.attention_bias:
            specs.append(fused(attention, "qkv_proj", "bias", qkv))
        if config.qk_norm:
            specs.append(single(f"{attention}q_norm.weight", config.head_dim))
            specs.append(single(f"{attention}k_norm.weight", config.head_dim))
        specs.append(single(f"{attention}o_proj.weight", hidden, query))
        if config.attention_output_bias:
            specs.append(single(f"{attention}o_proj.bias", hidden))
        specs.append(single(f"{layer}post_attention_layernorm.weight", hidden))
        specs.append(fused(mlp, "gate_up_proj", "weight", gate_up, hidden))
        if config.mlp_bias:
            specs.append(fused(mlp, "gate_up_proj", "bias", gate_up))
        specs.append(single(f"{mlp}down_proj.weight", hidden, inner))
        if config.mlp_bias:
            specs.append(single(f"{mlp}down_proj.bias", hidden))
    specs.append(single("model.norm.weight", hidden))
    if not config.tie_word_embeddings:
        specs.append(single("lm_head.weight", config.vocab_size, hidden))
    return specs


class DecoderDescription:
    """Describes a decoder to an interpreter of operations, for one engine shape."""

    def __init__(self, operations: Operations[Tensor], config: DecoderConfig, shape: EngineShape) -> None:
        self.operations = operations
        self.config = config
        self.shape = shape
        self.weight_shapes = {spec.name: spec.shape for spec in decoder_weights(config)}

    def describe(self) -> None:
        """Declare the inputs of DESIGN's engine edge, compute, and declare `logits` and the caches as outputs."""
        ops, config, shape = self.operations, self.config, self.shape
        batch, tokens = shape.batch, shape.tokens
        hidden = ops.input("inputs_embeds", (batch, tokens, config.hidden_size), "compute")
        cos_sin = ops.input("rope_rotary_cos_sin", (batch, tokens, config.rotary_dim), "compute")
        mask = ops.input("attention_mask", (batch, 1, tokens, shape.key_range), "bool")
        start_index = ops.input("kvcache_start_index", (batch,), "int32")
        features = []
        for index in range(config.num_layers):
            if index in config.feature_layers:
                features.append(hidden)
            hidden = self._layer(index, hidden, cos_sin, mask, start_index)
        if features:
            ops.output("hidden_states", ops.concatenate(features, axis=2) if len(features) > 1 else features[0])
        if shape.selected < tokens:
            hidden = ops.gather_rows(hidden, ops.input("last_token_ids", (batch, shape.selected), "int32"))
        normed = ops.rms_norm(hidden, self._weight("model.norm.weight"), config.rms_norm_eps)
        ops.output("logits", ops.to_float32(ops.linear(normed, self._weight(head_weight_name(config)))))

    def _weight(self, name: str) -> Tensor:
        return self.operations.weight(name, self.weight_shapes[name])

    def _bias(self, name: str) -> Tensor | None:
        return self._weight(name) if name in self.weight_shapes else None

    def _layer(self, index: int, hidden: Tensor, cos_sin: Tensor, mask: Tensor, start_index: Tensor) -> Tensor:
        ops, epsilon, layer = self.operations, self.config.rms_norm_eps, f"model.layers.{index}."
        normed = ops.rms_norm(hidden, self._weight(f"{layer}input_layernorm.weight"), epsilon)
        hidden = ops.add(hidden, self._attention(index, normed, cos_sin, mask, start_index))
        normed = ops.rms_norm(hidden, self._weight(f"{layer}post_attention_layernorm.weight"), epsilon)
        return ops.add(hidden, self._mlp(f"{layer}mlp.", normed))

    def _attention(self, index: int, x: Tensor, cos_sin: Tensor, mask: Tensor, start_index: Tensor) -> Tensor:
        ops, config, prefix = self.operations, self.config, f"model.layers.{index}.self_attn."
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = ops.linear(x, self._weight(f"{prefix}qkv_proj.weight"), self._bias(f"{prefix}qkv_proj.bias"))
        qkv = ops.split_heads(qkv, heads + 2 * kv_heads)
        if config.qk_norm:
            query, key, value = ops.split(qkv, (heads, kv_heads, kv_heads), axis=1)
            query = ops.rms_norm(query, self._weight(f"{prefix}q_norm.weight"), config.rms_norm_eps)
            key = ops.rms_norm(key, self._weight(f"{prefix}k_norm.weight"), config.rms_norm_eps)
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
        return ops.linear(
            ops.merge_heads(context), self._weight(f"{prefix}o_proj.weight"), self._bias(f"{prefix}o_proj.bias")
        )

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        ops = self.operations
        gate_up = ops.linear(x, self._weight(f"{prefix}gate_up_proj.weight"), self._bias(f"{prefix}gate_up_proj.bias"))
        return ops.linear(
            ops.silu_mul(gate_up), self._weight(f"{prefix}down_proj.weight"), self._bias(f"{prefix}down_proj.bias")
        )
