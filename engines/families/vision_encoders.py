"""The programs of the vision encoders: LLaVA's, Gemma 3's, Mistral 3's, Qwen2.5-VL's, Qwen3-VL's and Qwen3.5's.

LLaVA's is a plain transformer over the patches of a square image (CLIP or SigLIP) and a projector; Gemma 3's is SigLIP,
whose outputs are averaged before they are projected. Qwen2.5-VL's attends within windows in most layers; Qwen3-VL's
adds interpolated positions, and gives out features of several layers, which Qwen3.5's, otherwise the same, does not.
Mistral 3's is Pixtral: made as language models are, with positions by the rotary embedding alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.encoder_steps import AveragePool, DropFirst, EncoderAttention, Gather, Prepend, Product
from edgellm.engines.model.limits import EngineShape, vision_shape
from edgellm.engines.model.named_weights import NamedWeights
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Add, Input, Linear, LinearResidual, Norm, Normed, NormLinear, Reshape, Step
from edgellm.engines.model.vision import VisionConfig, deepstack_name, embedding_rows, vision_inputs, vision_outputs

_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
#: Gemma 3's projection, published as [columns of the tower, hidden size of the language model].
_PROJECTION = "mm_input_projection_weight"
#: The norms of Pixtral's tower have it fixed in their code.
_PIXTRAL_EPSILON = 1e-5


class TowerWeights(NamedWeights):
    """Makes the weights and norms of one part of a checkpoint."""

    def __init__(self, prefix: str, source: str, epsilon: float = 0.0) -> None:
        super().__init__(prefix, source)
        self._epsilon = epsilon

    def rms_norm(self, name: str, size: int, offset: float = 0.0) -> Norm:
        """A norm by a weight [H] and an offset."""
        return Norm(self.weight(f"{name}.weight", size), self._epsilon, offset=offset)

    def layer_norm(self, name: str, size: int) -> Norm:
        """A norm by a weight and a bias [H]."""
        return Norm(self.weight(f"{name}.weight", size), self._epsilon, self.weight(f"{name}.bias", size))

    def convolution(self, name: str, rows: int, kernel: tuple[int, ...], bias: bool) -> Linear:
        """A convolution whose stride is its kernel: one linear layer over flattened patches, [N, product of kernel]."""
        weight = self.weight(f"{name}.weight", rows, math.prod(kernel), part=(rows, *kernel))
        return Linear(f"{self._prefix}{name}", weight, self.weight(f"{name}.bias", rows) if bias else None)


def used_layers(config: VisionConfig) -> int:
    """How many layers are computed: those behind the last hidden state that is taken are not."""
    return max(config.feature_layers)


def unused_tensors(config: VisionConfig) -> tuple[str, ...]:
    """Beginnings of the names of tensors that a tower has and that nothing which reaches the language model needs."""
    layers = "transformer.layers." if config.family == "mistral3" else "encoder.layers."
    behind = [f"{layers}{index}." for index in range(used_layers(config), config.num_layers)]
    behind += ["post_layernorm."] if config.family == "llava" else []
    return tuple(f"{config.tensor_prefix}{name}" for name in (*behind, "head.", "embeddings.position_ids"))


def _tower_steps(config: VisionConfig, tower: TowerWeights) -> list[Step]:
    """CLIP or SigLIP, from "patches" to "hidden_0" and the outputs of layers, "hidden_1" and on.

    Every image has the same number of patches, in reading order: nothing is padded.
    """
    hidden, rows = config.hidden_size, config.tower_rows
    patch = (config.in_channels, config.patch_size, config.patch_size)
    embedding = tower.convolution("embeddings.patch_embedding", hidden, patch, bias=not config.class_token)
    steps: list[Step] = [NormLinear("hidden_0", (Input("patches"),), embedding)]
    if config.class_token:
        steps.append(Prepend("hidden_0", "hidden_0", tower.weight("embeddings.class_embedding", hidden)))
    steps.append(Add("hidden_0", "hidden_0", tower.weight("embeddings.position_embedding.weight", rows, hidden)))
    if config.class_token:
        norm = tower.layer_norm("pre_layrnorm", hidden)  # spelt so in every published checkpoint
        steps.append(Normed("hidden_0", "hidden_0", norm))
    for index in range(used_layers(config)):
        layer, value, result = f"encoder.layers.{index}.", f"hidden_{index}", f"hidden_{index + 1}"
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden)
        qkv = tower.linear(f"{layer}self_attn.qkv_proj", parts, hidden)
        first, second = (tower.layer_norm(f"{layer}layer_norm{number}", hidden) for number in (1, 2))
        steps += [
            NormLinear("qkv", (Input(value, (first,)),), qkv),
            EncoderAttention("context", "qkv", config.num_heads, config.head_dim, (1, rows)),
            LinearResidual(result, "context", tower.linear(f"{layer}self_attn.out_proj", hidden, hidden), value),
            *_mlp(config, result, second, tower, (f"{layer}mlp.fc1", f"{layer}mlp.fc2")),
        ]
    return steps


def _llava_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    projector = TowerWeights(_PROJECTOR, config.projector_prefix)
    hidden, out, rows = config.hidden_size, config.out_hidden_size, config.tower_rows
    steps = _tower_steps(config, TowerWeights(_TOWER, config.tensor_prefix, config.norm_eps))
    features = [f"hidden_{index}" for index in config.feature_layers]
    if config.drops_first_row:
        steps += [DropFirst(f"{value}_patches", value, rows - 1) for value in features]
        features = [f"{value}_patches" for value in features]
    first = projector.linear("linear_1", out, len(features) * hidden, config.projector_bias)
    second = projector.linear("linear_2", out, out, config.projector_bias)
    return [*steps, *_projection("image_embeddings", features, (first, second), config.projector_activation)]


def _gemma3_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """The tower's normed outputs become tokens by squares of patches, whose mean is normed and projected.

    The language model multiplies all that it takes by the square root of its width, but is made for images as they are
    projected: they are divided by it before they are rounded.
    """
    tower = TowerWeights(_TOWER, config.tensor_prefix, config.norm_eps)
    projector = TowerWeights(_PROJECTOR, config.projector_prefix, config.norm_eps)
    hidden, out, merge = config.hidden_size, config.out_hidden_size, config.spatial_merge_size
    return [
        *_tower_steps(config, tower),
        Normed("normed", f"hidden_{config.num_layers}", tower.layer_norm("post_layernorm", hidden)),
        AveragePool("pooled", "normed", hidden, config.image_side, merge),
        Normed("pooled", "pooled", projector.rms_norm("mm_soft_emb_norm", hidden, offset=1.0)),
        Product("image_embeddings", "pooled", projector.weight(_PROJECTION, hidden, out), out**-0.5),
    ]


def _mistral3_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """Pixtral. The patches come in merge blocks, the padding behind them: what is merged is a convolution over them."""
    tower = TowerWeights(_TOWER, config.tensor_prefix, _PIXTRAL_EPSILON)
    projector = TowerWeights(_PROJECTOR, config.projector_prefix, config.norm_eps)
    hidden, inner, out, rows = config.hidden_size, config.intermediate_size, config.out_hidden_size, shape.tokens
    patch = (config.in_channels, config.patch_size, config.patch_size)
    steps: list[Step] = [
        NormLinear("hidden", (Input("patches"),), tower.convolution("patch_conv", hidden, patch, bias=False)),
        Normed("hidden", "hidden", tower.rms_norm("ln_pre", hidden)),
    ]
    for index in range(used_layers(config)):
        layer = f"transformer.layers.{index}."
        heads, gated = dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden), {"gate_proj": inner, "up_proj": inner}
        first, second = (tower.rms_norm(f"{layer}{part}_norm", hidden) for part in ("attention", "ffn"))
        qkv = tower.linear(f"{layer}attention.qkv_proj", heads, hidden, bias=False)
        output = tower.linear(f"{layer}attention.o_proj", hidden, hidden, bias=False)
        gate_up = tower.linear(f"{layer}feed_forward.gate_up_proj", gated, hidden, bias=False)
        down = tower.linear(f"{layer}feed_forward.down_proj", hidden, inner, bias=False)
        steps += [
            *_attention(config, qkv, output, first, (1, rows), "attention_mask"),
            NormLinear("activation", (Input("hidden", (second,)),), gate_up, config.activation, gated=True),
            LinearResidual("hidden", "activation", down, "hidden"),
        ]
    merged = config.merge_patches * hidden
    merging = projector.linear("patch_merger.merging_layer", hidden, merged, bias=False)
    merging = replace(merging, weight=replace(merging.weight, kernel=config.merge_patches))
    linears = (
        projector.linear("linear_1", out, hidden, config.projector_bias),
        projector.linear("linear_2", out, out, config.projector_bias),
    )
    return [
        *steps,
        Normed("hidden", "hidden", projector.rms_norm("norm", hidden)),
        Reshape("blocks", "hidden", (1, rows // config.merge_patches, merged)),
        NormLinear("merged", (Input("blocks"),), merging),
        *_projection("image_embeddings", ["merged"], linears, config.projector_activation),
    ]


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
        steps += [
            *_attention(config, *_qwen_heads(weights, layer, hidden), first, sizes, mask),
            NormLinear("activation", (Input("hidden", (second,)),), gate_up, "silu", gated=True),
            LinearResidual("hidden", "activation", weights.linear(f"{layer}mlp.down_proj", hidden, inner), "hidden"),
        ]
    merged = config.merge_patches * hidden
    linears = (
        weights.linear("merger.mlp.0", merged, merged),
        weights.linear("merger.mlp.2", config.out_hidden_size, merged),
    )
    return [
        *steps,
        Normed("hidden", "hidden", weights.rms_norm("merger.ln_q", hidden)),
        Reshape("merged", "hidden", (1, rows // config.merge_patches, merged)),
        *_projection("tokens", ["merged"], linears, "gelu"),
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
        return _projection(output, ["merged"], (first, second), "gelu")

    merging = (1, rows // config.merge_patches, merged)
    steps: list[Step] = [
        NormLinear("hidden", (Input("patches"),), embedding),
        Add("hidden", "hidden", "position_embeddings"),
    ]
    for index in range(config.num_layers):
        layer = f"blocks.{index}."
        first, second = (weights.layer_norm(f"{layer}norm{number}", hidden) for number in (1, 2))
        steps += [
            *_attention(config, *_qwen_heads(weights, layer, hidden), first, (1, rows), "attention_mask"),
            *_mlp(config, "hidden", second, weights, (f"{layer}mlp.linear_fc1", f"{layer}mlp.linear_fc2")),
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


def _qwen_heads(weights: NamedWeights, layer: str, hidden: int) -> tuple[Linear, Linear]:
    """What makes the heads of a layer of Qwen's encoders, and what takes them."""
    return weights.linear(f"{layer}attn.qkv", 3 * hidden, hidden), weights.linear(f"{layer}attn.proj", hidden, hidden)


def _attention(
    config: VisionConfig, qkv: Linear, output: Linear, norm: Norm, windows: tuple[int, int], mask: str
) -> list[Step]:
    """Attention with rotated heads on the residual stream "hidden"."""
    return [
        NormLinear("qkv", (Input("hidden", (norm,)),), qkv),
        EncoderAttention("context", "qkv", config.num_heads, config.head_dim, windows, mask, "rotary_cos_sin"),
        LinearResidual("hidden", "context", output, "hidden"),
    ]


def _mlp(config: VisionConfig, value: str, norm: Norm, weights: NamedWeights, names: tuple[str, str]) -> list[Step]:
    """An MLP without a gate, whose linear layers are called so, on the residual stream `value`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    first, second = weights.linear(names[0], inner, hidden), weights.linear(names[1], hidden, inner)
    return [
        NormLinear("activation", (Input(value, (norm,)),), first, config.activation),
        LinearResidual(value, "activation", second, value),
    ]


def _projection(output: str, values: Sequence[str], linears: tuple[Linear, Linear], activation: str) -> list[Step]:
    """The projection from the `values`, side by side, to the width of the language model."""
    inputs = tuple(Input(value) for value in values)
    return [
        NormLinear("projected", inputs, linears[0], activation),
        NormLinear(output, (Input("projected"),), linears[1]),
    ]


_STEPS = {
    "qwen2_5_vl": _qwen2_5_vl_steps,
    "qwen3_vl": _qwen3_vl_steps,
    "qwen3_5": _qwen3_vl_steps,
    "llava": _llava_steps,
    "gemma3": _gemma3_steps,
    "mistral3": _mistral3_steps,
}


def vision_program(config: VisionConfig, shape: EngineShape) -> Program:
    """The program of one vision engine; its values have one sequence, of R = `shape.tokens` rows of patches."""
    size = (1, embedding_rows(config, shape), config.out_hidden_size)
    outputs: Edge = dict.fromkeys(vision_outputs(config), (size, "compute"))
    return Program(shape, vision_inputs(config, shape), tuple(_STEPS[config.family](config, shape)), outputs)


def vision_weights(config: VisionConfig) -> list[WeightSpec]:
    """The weights that the engines take."""
    shape = vision_shape(config.rows_for_patches(config.merge_patches))
    return list(vision_program(config, shape).weights.values())


def host_weights(config: VisionConfig) -> list[WeightSpec]:
    """Weights that are read on the host instead: a table of positions [positions, H], interpolated there."""
    if config.num_position_embeddings is None:
        return []
    names = NamedWeights("visual.", config.tensor_prefix)
    return [names.weight("pos_embed.weight", config.num_position_embeddings, config.hidden_size)]
