"""Qwen3-VL's vision encoder: interpolated and rotary positions, and features of inner layers (deepstack)."""

from __future__ import annotations

from edgellm.engines.model.config import EngineShape, WeightSpec
from edgellm.engines.model.operations import Operations, Tensor
from edgellm.engines.model.vision import VisionConfig
from edgellm.engines.families.vision_layers import VisionDescription, WeightNames
from edgellm.multimodal.vision_edge import declare_inputs, deepstack_name


def position_table(config: VisionConfig) -> WeightSpec:
    """The table [positions, H] that is interpolated on the host, and so is no engine's input."""
    assert config.num_position_embeddings is not None
    names = WeightNames("visual.", config.tensor_prefix)
    return names.single("pos_embed.weight", config.num_position_embeddings, config.hidden_size)


def weights(config: VisionConfig) -> list[WeightSpec]:
    """Every weight of the engines in order of use."""
    names, hidden, inner = WeightNames("visual.", config.tensor_prefix), config.hidden_size, config.intermediate_size
    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    specs = [
        names.convolution("patch_embed.proj", hidden, *patch),
        names.single("patch_embed.proj.bias", hidden),
    ]
    for index in range(config.num_layers):
        layer = f"blocks.{index}."
        specs += names.norm(f"{layer}norm1", hidden)
        specs += names.linear(f"{layer}attn.qkv", 3 * hidden, hidden)
        specs += names.linear(f"{layer}attn.proj", hidden, hidden)
        specs += names.norm(f"{layer}norm2", hidden)
        specs += names.linear(f"{layer}mlp.linear_fc1", inner, hidden)
        specs += names.linear(f"{layer}mlp.linear_fc2", hidden, inner)
    merged = config.merge_patches * hidden
    mergers = [(f"deepstack_merger_list.{index}", merged) for index in range(len(config.deepstack_layers))]
    for merger, normed in (*mergers, ("merger", hidden)):
        specs += names.norm(f"{merger}.norm", normed)
        specs += names.linear(f"{merger}.linear_fc1", merged, merged)
        specs += names.linear(f"{merger}.linear_fc2", config.out_hidden_size, merged)
    return specs


class Qwen3VLDescription(VisionDescription[Tensor]):
    """The patches come in merge blocks, the padding behind them."""

    def __init__(self, operations: Operations[Tensor], config: VisionConfig, shape: EngineShape) -> None:
        super().__init__(operations, config, shape, weights(config))

    def describe(self) -> None:
        """Declare the inputs of `vision_edge`, compute, and declare embeddings and deepstack features as outputs."""
        ops, config = self.operations, self.config
        inputs = declare_inputs(ops, config, self.shape)
        mask, rotary = inputs["attention_mask"], ops.to_compute(inputs["rotary_cos_sin"])
        hidden = self.linear(inputs["patches"], "visual.patch_embed.proj")
        hidden = ops.add(hidden, ops.to_compute(inputs["position_embeddings"]))
        for index in range(config.num_layers):
            layer, sizes = f"visual.blocks.{index}.", (1, self.shape.tokens)
            x = self.layer_norm(hidden, f"{layer}norm1")
            x = self.attention(x, f"{layer}attn.qkv", f"{layer}attn.proj", sizes, mask, rotary)
            hidden = ops.add(hidden, x)
            x = self.linear(self.layer_norm(hidden, f"{layer}norm2"), f"{layer}mlp.linear_fc1")
            x = self.linear(ops.activation(x, config.activation), f"{layer}mlp.linear_fc2")
            hidden = ops.add(hidden, x)
            if index in config.deepstack_layers:
                place = config.deepstack_layers.index(index)
                merger = f"visual.deepstack_merger_list.{place}"
                features = self._merge(self.layer_norm(self.merged(hidden), f"{merger}.norm"), merger)
                ops.output(deepstack_name(place), features)
        x = self.merged(self.layer_norm(hidden, "visual.merger.norm"))
        ops.output("image_embeddings", self._merge(x, "visual.merger"))

    def _merge(self, x: Tensor, merger: str) -> Tensor:
        x = self.operations.activation(self.linear(x, f"{merger}.linear_fc1"), "gelu")
        return self.linear(x, f"{merger}.linear_fc2")
