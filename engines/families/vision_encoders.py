"""LLaVA's vision part: a plain transformer over the patches of a square image (CLIP or SigLIP) and a projector."""

from __future__ import annotations

from edgellm.engines.model.config import EngineShape, WeightSpec
from edgellm.engines.model.operations import Operations, Tensor
from edgellm.engines.model.vision import VisionConfig
from edgellm.engines.families.vision_layers import VisionDescription, WeightNames
from edgellm.multimodal.vision_edge import declare_inputs

_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."


def used_layers(config: VisionConfig) -> int:
    """How many layers are computed: those behind the last hidden state that is taken are not."""
    return max(config.feature_layers)


def unused_tensors(config: VisionConfig) -> tuple[str, ...]:
    """Beginnings of the names of tensors that a tower has and that the language model sees nothing of."""
    behind = (f"encoder.layers.{index}." for index in range(used_layers(config), config.num_layers))
    return tuple(
        f"{config.tensor_prefix}{name}" for name in (*behind, "post_layernorm.", "head.", "embeddings.position_ids")
    )


def weights(config: VisionConfig) -> list[WeightSpec]:
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
        super().__init__(operations, config, shape, weights(config))

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
