"""The programs of encoders that see parts of pictures: SmolVLM's, LFM2-VL's, InternVL's and MiniCPM-V's.

SmolVLM's, LFM2-VL's and MiniCPM-V's are SigLIP, the latter two of any number of patches; InternVL's has a class token
and scales what attention and MLP add. All put the patches of a token side by side before they are projected.
"""

from __future__ import annotations

from edgellm.engines.families.vision_parts import (
    PROJECTOR,
    QKV,
    TOWER,
    TowerWeights,
    layer_steps,
    projection_steps,
    self_attention_steps,
    tower_steps,
)
from edgellm.engines.model import encoder_steps
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.steps import Add, Input, LinearResidual, Norm, Normed, NormLinear, Reshape, Step
from edgellm.engines.model.vision import VisionConfig, embedding_rows

#: Of the layer norm in a projector, which has that of its class.
_PROJECTOR_EPSILON = 1e-5


def smolvlm_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """Idefics3's, too: one linear layer behind the tower's norm."""
    tower = TowerWeights(TOWER, config.tensor_prefix, config.norm_eps)
    connector = TowerWeights("connector.", config.projector_prefix)
    merged = config.merge_patches * config.hidden_size
    linear = connector.linear("modality_projection.proj", config.out_hidden_size, merged, False)
    return [
        *tower_steps(config, tower),
        Normed("normed", f"hidden_{config.num_layers}", tower.layer_norm("post_layernorm", config.hidden_size)),
        *_blocks(config, shape, "normed"),
        NormLinear("image_embeddings", (Input("merged"),), linear),
    ]


def lfm2_vl_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """The patches come in blocks of a token, the padding behind them; positions are made for each grid."""
    tower, hidden = TowerWeights(TOWER, config.tensor_prefix, config.norm_eps), config.hidden_size
    embedding = tower.linear("embeddings.patch_embedding", hidden, config.patch_elements)
    return [
        NormLinear("hidden_0", (Input("patches"),), embedding),
        Add("hidden_0", "hidden_0", "position_embeddings"),
        *layer_steps(config, tower, shape.tokens, "attention_mask"),
        Normed("normed", f"hidden_{config.num_layers}", tower.layer_norm("post_layernorm", hidden)),
        *_merged(config, shape, "normed"),
        *_projector(config, config.projector_size or 0, config.projector_norm),
    ]


def minicpmv4_6_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """The patches come in blocks of a token, in these square by square, the padding behind them: behind one of the
    layers each square of four becomes one row, their mean and what an MLP makes of all four."""
    tower, hidden = TowerWeights(TOWER, config.tensor_prefix, config.norm_eps), config.hidden_size
    assert config.merging_layer is not None  # which the family has
    rows, patch = shape.tokens, (config.in_channels, config.patch_size, config.patch_size)
    merging, wide, squares = config.merging_layer + 1, 4 * config.hidden_size, (1, rows // 4, 4 * config.hidden_size)
    value, name = f"hidden_{merging}", "vit_merger."
    first = tower.linear(f"{name}linear_1", 4 * config.intermediate_size, wide)
    second = tower.linear(f"{name}linear_2", hidden, 4 * config.intermediate_size)
    merger = TowerWeights("merger.", config.projector_prefix, 1e-6)
    linears = merger.linear("mlp.0.linear_1", wide, wide), merger.linear("mlp.0.linear_2", config.out_hidden_size, wide)
    embedding = tower.convolution("embeddings.patch_embedding", hidden, patch, True)
    return [
        NormLinear("hidden_0", (Input("patches"),), embedding),
        Add("hidden_0", "hidden_0", "position_embeddings"),
        *layer_steps(config, tower, rows, "attention_mask", range(merging)),
        *self_attention_steps(config, tower, name, value, value, (rows // 4, 4)),
        encoder_steps.AveragePool("means", value, hidden, 2, 2, rows // 2),
        Reshape("squares", value, squares),
        NormLinear("activation", (Input("squares", (tower.layer_norm(f"{name}pre_norm", wide),)),), first, "gelu_tanh"),
        LinearResidual(value, "activation", second, "means"),
        *layer_steps(config, tower, rows // 4, "merged_mask", range(merging, config.num_layers)),
        Normed("normed", f"hidden_{config.num_layers}", tower.layer_norm("post_layernorm", hidden)),
        *_merged(config, shape, "normed", 4),
        Normed("merged", "merged", merger.layer_norm("mlp.0.pre_norm", wide)),
        *projection_steps("image_embeddings", ["merged"], linears, "gelu"),
    ]


def internvl_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """InternViT: a class token, and what attention and MLP add is scaled column by column."""
    tower = TowerWeights(TOWER, config.tensor_prefix, config.norm_eps)
    hidden, rows = config.hidden_size, config.tower_rows
    patch = (config.in_channels, config.patch_size, config.patch_size)
    embedding = tower.convolution("embeddings.patch_embeddings.projection", hidden, patch, bias=True)
    steps: list[Step] = [
        NormLinear("hidden", (Input("patches"),), embedding),
        encoder_steps.Prepend("hidden", "hidden", tower.weight("embeddings.cls_token", hidden, part=(1, 1, hidden))),
        Add("hidden", "hidden", tower.weight("embeddings.position_embeddings", rows, hidden, part=(1, rows, hidden))),
    ]

    def norm(name: str) -> Norm:
        return tower.rms_norm(name, hidden) if config.rms_norms else tower.layer_norm(name, hidden)

    for index in range(config.num_layers):
        layer = f"encoder.layer.{index}."
        qkv = tower.linear(f"{layer}attention.qkv_proj", dict.fromkeys(QKV, hidden), hidden, config.attention_bias)
        steps.append(NormLinear("qkv", (Input("hidden", (norm(f"{layer}layernorm_before"),)),), qkv))
        query, key = (tower.rms_norm(f"{layer}attention.{part}_norm", hidden) for part in "qk")
        norms = (query, key) if config.qk_norm else None
        output, behind = tower.linear(f"{layer}attention.projection_layer", hidden, hidden), f"{layer}layernorm_after"
        first, second = tower.mlp(f"{layer}mlp.fc{{}}", config)
        steps += [
            encoder_steps.EncoderAttention(
                "context", "qkv", config.num_heads, config.head_dim, (1, rows), qk_norms=norms
            ),
            NormLinear("added", (Input("context"),), output),
            encoder_steps.ScaledResidual("hidden", "added", tower.weight(f"{layer}lambda_1", hidden), "hidden"),
            NormLinear("activation", (Input("hidden", (norm(behind),)),), first, config.activation),
            NormLinear("added", (Input("activation"),), second),
            encoder_steps.ScaledResidual("hidden", "added", tower.weight(f"{layer}lambda_2", hidden), "hidden"),
        ]
    if config.final_norm:
        steps.append(Normed("hidden", "hidden", tower.layer_norm("layernorm", hidden)))
    return [
        *steps,
        encoder_steps.DropFirst("features", "hidden", rows - 1),
        *_blocks(config, shape, "features"),
        *_projector(config, config.out_hidden_size, True),
    ]


def _blocks(config: VisionConfig, shape: EngineShape, value: str) -> list[Step]:
    """The patches of a square, in reading order, block by block, those of each side by side."""
    return [encoder_steps.Gather("blocks", value, "block_rows"), *_merged(config, shape, "blocks")]


def _merged(config: VisionConfig, shape: EngineShape, value: str, count: int = 0) -> list[Step]:
    """So many rows side by side, those of a token's patches where nothing is said."""
    merged = (1, embedding_rows(config, shape), (count or config.merge_patches) * config.hidden_size)
    return [Reshape("merged", value, merged)]


def _projector(config: VisionConfig, inner: int, has_norm: bool) -> list[Step]:
    """Two linear layers, whose input may be normed."""
    names, merged = TowerWeights(PROJECTOR, config.projector_prefix, _PROJECTOR_EPSILON), config.merge_patches
    merged *= config.hidden_size
    first = names.linear("linear_1", inner, merged, config.projector_bias)
    second = names.linear("linear_2", config.out_hidden_size, inner, config.projector_bias)
    steps: list[Step] = [Normed("merged", "merged", names.layer_norm("layer_norm", merged))] if has_norm else []
    return [*steps, *projection_steps("image_embeddings", ["merged"], (first, second), config.projector_activation)]
