"""The networks and weights of the vision encoders: LLaVA's, Qwen2.5-VL's and Qwen3-VL's.

LLaVA's is a plain transformer over the patches of a square image (CLIP or SigLIP) and a projector. Qwen2.5-VL's attends
within windows in most layers; Qwen3-VL's adds interpolated positions, and gives out features of several layers.
"""

from __future__ import annotations

from edgellm.engines.families.vision_layers import VisionDescription, WeightNames
from edgellm.engines.model.config import EngineShape, WeightSpec
from edgellm.engines.model.operations import Operations, Tensor
from edgellm.engines.model.vision import VisionConfig, declare_inputs, deepstack_name

_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."


def used_layers(config: VisionConfig) -> int:
    """How many layers are computed: those behind the last hidden state that is taken are not."""
    return max(config.feature_layers)


def unused_tensors(config: VisionConfig) -> tuple[str, ...]:
    """Beginnings of the names of tensors that a tower has and that nothing which reaches the language model needs."""
    behind = (f"encoder.layers.{index}." for index in range(used_layers(config), config.num_layers))
    return tuple(
        f"{config.tensor_prefix}{name}" for name in (*behind, "post_layernorm.", "head.", "embeddings.position_ids")
    )


def llava_weights(config: VisionConfig) -> list[WeightSpec]:
    """Every weight in order of use; q, k and v are fused into one buffer."""
    tower, projector = WeightNames(_TOWER, config.tensor_prefix), WeightNames(_PROJECTOR, config.projector_prefix)
    hidden, inner, out = config.hidden_size, config.intermediate_size, config.out_hidden_size
    patch = (config.in_channels, config.patch_size, config.patch_size)
    specs = [tower.convolution("embeddings.patch_embedding", hidden, *patch)]
    if config.class_token:
        specs.append(tower.single("embeddings.class_embedding", hidden))
    else:
        specs.append(tower.single("embeddings.patch_embedding.bias", hidden))
    specs.append(tower.single("embeddings.position_embedding.weight", config.tower_rows, hidden))
    if config.class_token:
        specs += tower.norm("pre_layrnorm", hidden)  # spelt so in every published checkpoint
    for index in range(used_layers(config)):
        layer = f"encoder.layers.{index}."
        qkv = tuple(f"{layer}self_attn.{each}_proj" for each in "qkv")
        specs += tower.norm(f"{layer}layer_norm1", hidden)
        specs += tower.fused(f"{layer}self_attn.qkv_proj", qkv, hidden, hidden)
        specs += tower.linear(f"{layer}self_attn.out_proj", hidden, hidden)
        specs += tower.norm(f"{layer}layer_norm2", hidden)
        specs += tower.linear(f"{layer}mlp.fc1", inner, hidden)
        specs += tower.linear(f"{layer}mlp.fc2", hidden, inner)
    features = len(config.feature_layers) * hidden
    specs += projector.linear("linear_1", out, features, config.projector_bias)
    return specs + projector.linear("linear_2", out, out, config.projector_bias)


class LlavaDescription(VisionDescription[Tensor]):
    """Every image has the same number of patches, in reading order: nothing is padded."""

    def __init__(self, operations: Operations[Tensor], config: VisionConfig, shape: EngineShape) -> None:
        super().__init__(operations, config, shape, llava_weights(config))

    def describe(self) -> None:
        """Declare the input `patches`, compute, and declare `image_embeddings` as the output."""
        ops, config = self.operations, self.config
        patches = declare_inputs(ops, config, self.shape)["patches"]
        hidden = self._embed(patches)
        states = {0: hidden}
        for index in range(used_layers(config)):
            hidden = states[index + 1] = self._layer(f"{_TOWER}encoder.layers.{index}.", hidden)
        features = [states[index] for index in config.feature_layers]
        if config.drops_first_row:
            sizes = (1, config.tower_rows - 1)
            features = [ops.split(one, sizes, axis=1)[1] for one in features]
        x = ops.concatenate(features, axis=2) if len(features) > 1 else features[0]
        x = ops.activation(self.linear(x, f"{_PROJECTOR}linear_1"), config.projector_activation)
        ops.output("image_embeddings", self.linear(x, f"{_PROJECTOR}linear_2"))

    def _embed(self, patches: Tensor) -> Tensor:
        ops, config = self.operations, self.config
        hidden = self.linear(patches, f"{_TOWER}embeddings.patch_embedding")
        if config.class_token:
            token = ops.reshape(self.weight(f"{_TOWER}embeddings.class_embedding"), (1, 1, config.hidden_size))
            hidden = ops.concatenate((token, hidden), axis=1)
        positions = self.weight(f"{_TOWER}embeddings.position_embedding.weight")
        hidden = ops.add(hidden, ops.reshape(positions, (1, config.tower_rows, config.hidden_size)))
        return self.layer_norm(hidden, f"{_TOWER}pre_layrnorm") if config.class_token else hidden

    def _layer(self, layer: str, hidden: Tensor) -> Tensor:
        ops, config = self.operations, self.config
        sizes = (1, config.tower_rows)
        x = self.layer_norm(hidden, f"{layer}layer_norm1")
        x = self.attention(x, f"{layer}self_attn.qkv_proj", f"{layer}self_attn.out_proj", sizes, None, None)
        hidden = ops.add(hidden, x)
        x = self.linear(self.layer_norm(hidden, f"{layer}layer_norm2"), f"{layer}mlp.fc1")
        return ops.add(hidden, self.linear(ops.activation(x, config.activation), f"{layer}mlp.fc2"))


def qwen2_5_vl_weights(config: VisionConfig) -> list[WeightSpec]:
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
        super().__init__(operations, config, shape, qwen2_5_vl_weights(config))

    def describe(self) -> None:
        """Declare the inputs (`declare_inputs`), compute, and declare `image_embeddings` as the output."""
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


def position_table(config: VisionConfig) -> WeightSpec:
    """The table [positions, H] that is interpolated on the host, and so is no engine's input."""
    assert config.num_position_embeddings is not None
    names = WeightNames("visual.", config.tensor_prefix)
    return names.single("pos_embed.weight", config.num_position_embeddings, config.hidden_size)


def qwen3_vl_weights(config: VisionConfig) -> list[WeightSpec]:
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
        super().__init__(operations, config, shape, qwen3_vl_weights(config))

    def describe(self) -> None:
        """Declare the inputs (`declare_inputs`), compute, and declare embeddings and deepstack features as outputs."""
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


_DESCRIPTIONS = {
    "qwen2_5_vl": (Qwen2_5VLDescription, qwen2_5_vl_weights),
    "qwen3_vl": (Qwen3VLDescription, qwen3_vl_weights),
    "llava": (LlavaDescription, llava_weights),
}


def vision_description(
    operations: Operations[Tensor], config: VisionConfig, shape: EngineShape
) -> VisionDescription[Tensor]:
    """The description of one vision engine."""
    return _DESCRIPTIONS[config.family][0](operations, config, shape)


def vision_weights(config: VisionConfig) -> list[WeightSpec]:
    """The weights that the engines take."""
    return _DESCRIPTIONS[config.family][1](config)


def host_weights(config: VisionConfig) -> list[WeightSpec]:
    """Weights that are read on the host instead: Qwen3-VL's table of positions."""
    return [position_table(config)] if config.family == "qwen3_vl" else []
