"""The one description of a decoder-only transformer that Llama, Qwen2 and Qwen3 share."""

from __future__ import annotations

from edgellm.engines.model.config import DecoderConfig, EngineShape, WeightSpec
from edgellm.engines.decoder_layer import LayerDescription, layer_weights, single_weight
from edgellm.engines.model.operations import Operations, Tensor

EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"


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
        """Declare the inputs of DESIGN's engine edge, compute, and declare `logits` and the caches as outputs."""
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
