"""The programs of the vision encoders: LLaVA's, Gemma 3's, Qwen2.5-VL's, Qwen3-VL's and Qwen3.5's.

LLaVA's is a plain transformer over the patches of a square image (CLIP or SigLIP) and a projector; Gemma 3's is SigLIP,
whose outputs are averaged before they are projected. Qwen2.5-VL's attends within windows in most layers; Qwen3-VL's
adds interpolated positions, and gives out features of several layers, which Qwen3.5's, otherwise the same, does not.
"""

from __future__ import annotations

from edgellm.engines.families import gemma4_encoders, pixtral, tiled_vision
from edgellm.engines.families.vision_parts import (
    PROJECTOR,
    TOWER,
    TowerWeights,
    attention_steps,
    mlp_steps,
    projection_steps,
    tower_steps,
    used_layers,
)
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.encoder_steps import AveragePool, DropFirst, EncoderAttention, Gather, Product
from edgellm.engines.model.limits import EngineShape, vision_shape
from edgellm.engines.model.named_weights import NamedWeights
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Add, Input, Norm, Normed, NormLinear, Reshape, Step
from edgellm.engines.model.vision import VisionConfig, deepstack_name, embedding_rows, vision_inputs, vision_outputs

#: Gemma 3's projection, published as [columns of the tower, hidden size of the language model].
_PROJECTION = "mm_input_projection_weight"


def unused_tensors(config: VisionConfig) -> tuple[str, ...]:
    """Beginnings of the names of tensors that a tower has and that nothing which reaches the language model needs."""
    layers = "transformer.layers." if config.family == "mistral3" else "encoder.layers."
    behind = [f"{layers}{index}." for index in range(used_layers(config), config.num_layers)]
    behind += ["post_layernorm."] if config.family == "llava" else []
    names = [f"{config.tensor_prefix}{name}" for name in (*behind, "head.", "embeddings.position_ids")]
    if config.family == "gemma4":  # its encoder of audio
        names += [f"{outer}{name}." for outer in ("model.", "") for name in ("audio_tower", "embed_audio")]
    return tuple(names)


def _llava_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    projector = TowerWeights(PROJECTOR, config.projector_prefix)
    hidden, out, rows = config.hidden_size, config.out_hidden_size, config.tower_rows
    steps = tower_steps(config, TowerWeights(TOWER, config.tensor_prefix, config.norm_eps))
    features = [f"hidden_{index}" for index in config.feature_layers]
    if config.drops_first_row:
        steps += [DropFirst(f"{value}_patches", value, rows - 1) for value in features]
        features = [f"{value}_patches" for value in features]
    first = projector.linear("linear_1", out, len(features) * hidden, config.projector_bias)
    second = projector.linear("linear_2", out, out, config.projector_bias)
    return [*steps, *projection_steps("image_embeddings", features, (first, second), config.projector_activation)]


def _gemma3_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """The tower's normed outputs become tokens by squares of patches, whose mean is normed and projected.

    The language model multiplies all that it takes by the square root of its width, but is made for images as they are
    projected: they are divided by it before they are rounded.
    """
    tower = TowerWeights(TOWER, config.tensor_prefix, config.norm_eps)
    projector = TowerWeights(PROJECTOR, config.projector_prefix, config.norm_eps)
    hidden, out, merge = config.hidden_size, config.out_hidden_size, config.spatial_merge_size
    return [
        *tower_steps(config, tower),
        Normed("normed", f"hidden_{config.num_layers}", tower.layer_norm("post_layernorm", hidden)),
        AveragePool("pooled", "normed", hidden, config.image_side, merge),
        Normed("pooled", "pooled", projector.rms_norm("mm_soft_emb_norm", hidden, offset=1.0)),
        Product("image_embeddings", "pooled", projector.weight(_PROJECTION, hidden, out), out**-0.5),
    ]


def _paligemma_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """A linear layer behind the tower's norm. As Gemma 3's, its rows are divided by what the language model multiplies
    by."""
    tower = TowerWeights(TOWER, config.tensor_prefix, config.norm_eps)
    projector = TowerWeights(PROJECTOR, config.projector_prefix)
    last = Input(f"hidden_{config.num_layers}", (tower.layer_norm("post_layernorm", config.hidden_size),))
    linear = projector.linear("linear", config.out_hidden_size, config.hidden_size)
    scale = config.out_hidden_size**-0.5
    return [*tower_steps(config, tower), NormLinear("image_embeddings", (last,), linear, scale=scale)]


def _qwen2_5_vl_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """Rows are in the order of their windows, each window padded to the same size."""
    weights = TowerWeights("visual.", config.tensor_prefix, config.norm_eps)
    hidden, inner, rows = config.hidden_size, config.intermediate_size, shape.tokens
    windows = (rows // config.window_patches, config.window_patches)
    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    steps: list[Step] = [
        Gather("ordered", "patches", "input_rows"),
        NormLinear("hidden", (Input("ordered"),), weights.convolution("patch_embed.proj", hidden, patch, bias=False)),
    ]
    for index in range(config.num_layers):
        layer, is_full = f"blocks.{index}.", index in config.full_attention_layers
        sizes, mask = ((1, rows), "attention_mask") if is_full else (windows, "window_mask")
        first, second = (weights.rms_norm(f"{layer}norm{number}", hidden) for number in (1, 2))
        gate_up = weights.linear(f"{layer}mlp.gate_up_proj", {"gate_proj": inner, "up_proj": inner}, hidden)
        steps += _attention(config, weights, f"{layer}attn", first, sizes, mask)
        down = weights.linear(f"{layer}mlp.down_proj", hidden, inner)
        steps += mlp_steps("hidden", second, gate_up, down, "silu", gated=True)
    merged = config.merge_patches * hidden
    linears = (
        weights.linear("merger.mlp.0", merged, merged),
        weights.linear("merger.mlp.2", config.out_hidden_size, merged),
    )
    return [
        *steps,
        Normed("hidden", "hidden", weights.rms_norm("merger.ln_q", hidden)),
        Reshape("merged", "hidden", (1, rows // config.merge_patches, merged)),
        *projection_steps("tokens", ["merged"], linears, "gelu"),
        Gather("image_embeddings", "tokens", "output_rows"),
    ]


def _qwen3_vl_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """The patches come in merge blocks, the padding behind them. Qwen3.5's has no deepstack layers."""
    weights = TowerWeights("visual.", config.tensor_prefix, config.norm_eps)
    hidden, rows = config.hidden_size, shape.tokens
    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    embedding = weights.convolution("patch_embed.proj", hidden, patch, bias=True)
    merged = config.merge_patches * hidden

    def projection(output: str, name: str) -> list[Step]:
        first = weights.linear(f"{name}.linear_fc1", merged, merged)
        second = weights.linear(f"{name}.linear_fc2", config.out_hidden_size, merged)
        return projection_steps(output, ["merged"], (first, second), "gelu")

    merging = (1, rows // config.merge_patches, merged)
    steps: list[Step] = [
        NormLinear("hidden", (Input("patches"),), embedding),
        Add("hidden", "hidden", "position_embeddings"),
    ]
    for index in range(config.num_layers):
        layer = f"blocks.{index}."
        first, second = (weights.layer_norm(f"{layer}norm{number}", hidden) for number in (1, 2))
        steps += [
            *_attention(config, weights, f"{layer}attn", first, (1, rows), "attention_mask"),
            *mlp_steps("hidden", second, *weights.mlp(f"{layer}mlp.linear_fc{{}}", config), config.activation),
        ]
        if index in config.deepstack_layers:
            place = config.deepstack_layers.index(index)
            name = f"deepstack_merger_list.{place}"
            steps += [
                Reshape("merged", "hidden", merging),
                Normed("merged", "merged", weights.layer_norm(f"{name}.norm", merged)),
                *projection(deepstack_name(place), name),
            ]
    return [
        *steps,
        Normed("hidden", "hidden", weights.layer_norm("merger.norm", hidden)),
        Reshape("merged", "hidden", merging),
        *projection("image_embeddings", "merger"),
    ]


def _attention(
    config: VisionConfig, weights: NamedWeights, name: str, norm: Norm, windows: tuple[int, int], mask: str
) -> list[Step]:
    hidden = config.hidden_size
    qkv, output = weights.linear(f"{name}.qkv", 3 * hidden, hidden), weights.linear(f"{name}.proj", hidden, hidden)
    heads = config.num_heads, config.head_dim
    attention = EncoderAttention("context", "qkv", *heads, windows, mask, "rotary_cos_sin")
    return attention_steps("hidden", norm, qkv, attention, output)


_STEPS = {
    "qwen2_5_vl": _qwen2_5_vl_steps,
    "qwen3_vl": _qwen3_vl_steps,
    "qwen3_5": _qwen3_vl_steps,
    "llava": _llava_steps,
    "gemma3": _gemma3_steps,
    "paligemma": _paligemma_steps,
    "mistral3": pixtral.pixtral_steps,
    "gemma4": gemma4_encoders.gemma4_vision_steps,
    "smolvlm": tiled_vision.smolvlm_steps,
    "lfm2_vl": tiled_vision.lfm2_vl_steps,
    "internvl": tiled_vision.internvl_steps,
    "minicpmv4_6": tiled_vision.minicpmv4_6_steps,
}


def vision_program(config: VisionConfig, shape: EngineShape) -> Program:
    """The program of one vision engine; its values have one sequence, of R = `shape.tokens` rows of patches."""
    size = (1, embedding_rows(config, shape), config.out_hidden_size)
    outputs: Edge = dict.fromkeys(vision_outputs(config), (size, "compute"))
    return Program(shape, vision_inputs(config, shape), tuple(_STEPS[config.family](config, shape)), outputs)


def vision_weights(config: VisionConfig) -> list[WeightSpec]:
    shape = vision_shape(config.rows_for_patches(config.merge_patches))
    return list(vision_program(config, shape).weights.values())


def host_weights(config: VisionConfig) -> list[WeightSpec]:
    """Weights that are read on the host instead: a table of positions [positions, H], interpolated there."""
    if config.num_position_embeddings is None:
        return []
    names, table = NamedWeights("visual.", config.tensor_prefix), (config.num_position_embeddings, config.hidden_size)
    if config.family == "gemma4":
        return [names.weight("patch_embedder.position_embedding_table", 2, *table)]
    name = "embeddings.position_embedding.weight" if config.feature_layers else "pos_embed.weight"
    return [names.weight(name, *table)]
