"""Qwen2.5-VL's vision encoder: attention in windows but for a few layers, RMS norm, gated MLP, rotary positions."""

from __future__ import annotations

from edgellm.engines.model.config import EngineShape, WeightSpec
from edgellm.engines.model.operations import Operations, Tensor
from edgellm.engines.model.vision import VisionConfig
from edgellm.engines.families.vision_layers import VisionDescription, WeightNames
from edgellm.multimodal.vision_edge import declare_inputs


def weights(config: VisionConfig) -> list[WeightSpec]:
    """Every weight in order of use; gate and up are fused into one buffer."""
    names, hidden, inner = WeightNames("visual.", config.tensor_prefix), config.hidden_size, config.intermediate_size
    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    specs = [names.convolution("patch_embed.proj", hidden, *patch)]
    for index in range(config.num_layers):
        layer = f"blocks.{index}."
        specs.append(names.single(f"{layer}norm1.weight", hidden))
        specs += names.linear(f"{layer}attn.qkv", 3 * hidden, hidden)
        specs += names.linear(f"{layer}attn.proj", hidden, hidden)
        specs.append(names.single(f"{layer}norm2.weight", hidden))
        gate_up = (f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj")
        specs += names.fused(f"{layer}mlp.gate_up_proj", gate_up, inner, hidden)
        specs += names.linear(f"{layer}mlp.down_proj", hidden, inner)
    merged = config.merge_patches * hidden
    specs.append(names.single("merger.ln_q.weight", hidden))
    specs += names.linear("merger.mlp.0", merged, merged)
    return specs + names.linear("merger.mlp.2", config.out_hidden_size, merged)


class Qwen2_5VLDescription(VisionDescription[Tensor]):
    """Rows are in the order of their windows, each window padded to the same size."""

    def __init__(self, operations: Operations[Tensor], config: VisionConfig, shape: EngineShape) -> None:
        super().__init__(operations, config, shape, weights(config))

    def describe(self) -> None:
        """Declare the inputs of `vision_edge`, compute, and declare `image_embeddings` as the output."""
        ops, config, rows = self.operations, self.config, self.shape.tokens
        inputs = declare_inputs(ops, config, self.shape)
        whole, windows = (1, rows), (rows // config.window_patches, config.window_patches)
        rotary = ops.to_compute(inputs["rotary_cos_sin"])
        rotaries = {sizes: ops.reshape(rotary, (*sizes, config.head_dim)) for sizes in (whole, windows)}
        patches = ops.gather_rows(inputs["patches"], inputs["input_rows"])
        hidden = self.linear(patches, "visual.patch_embed.proj")
        for index in range(config.num_layers):
            is_full = index in config.full_attention_layers
            sizes, mask = (whole, inputs["attention_mask"]) if is_full else (windows, inputs["window_mask"])
            layer = f"visual.blocks.{index}."
            x = ops.reshape(self.rms_norm(hidden, f"{layer}norm1"), (*sizes, config.hidden_size))
            x = self.attention(x, f"{layer}attn.qkv", f"{layer}attn.proj", sizes, mask, rotaries[sizes])
            hidden = ops.add(hidden, ops.reshape(x, (*whole, config.hidden_size)))
            x = self.linear(self.rms_norm(hidden, f"{layer}norm2"), f"{layer}mlp.gate_up_proj")
            hidden = ops.add(hidden, self.linear(ops.silu_mul(x), f"{layer}mlp.down_proj"))
        x = self.merged(self.rms_norm(hidden, "visual.merger.ln_q"))
        x = self.linear(ops.activation(self.linear(x, "visual.merger.mlp.0"), "gelu"), "visual.merger.mlp.2")
        ops.output("image_embeddings", ops.gather_rows(x, inputs["output_rows"]))
