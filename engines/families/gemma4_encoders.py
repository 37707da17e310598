"""Gemma 4's encoders: their configurations and programs.

That of images takes any shape in a budget of tokens: heads are normed and turned by rows and columns, linear layers
have bounds of inputs and outputs, and tokens are means of squares of patches.

Of speech, two convolutions over time and bands make a row of four frames; conformer layers (Gulati et al. 2020) let
each row see rows before it, by attention with relative positions (Dai et al. 2019) and by a convolution of each column.
No row sees what comes later: what is heard more leaves those before as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgellm.engines.families.decoders import class_defaults, filled
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.vision_fields import Read, dimensions, part_of, rotated, text_hidden_size
from edgellm.engines.families.vision_parts import QKV, TOWER, TowerWeights
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.engines.model.audio import ConformerConfig, convolved
from edgellm.engines.model.config import LARGEST_DEPTH, LARGEST_MERGE, WeightSpec
from edgellm.engines.model.encoder_steps import (
    Activate,
    AveragePool,
    CenteredNorm,
    Clip,
    ClippedGate,
    EncoderAttention,
    GatedConvolution,
    LocalAttention,
    NormedHeads,
    NormedResidual,
    StandardNorm,
    Unfold,
)
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Add, Input, Norm, Normed, NormLinear, Reshape, Step
from edgellm.engines.model.vision import VisionConfig


def read_gemma4_vision(top: ConfigFields) -> Read:
    """Each head of queries has keys and values of its own, and heads fill the width."""
    fields = part_of(top, "gemma4_vision")
    values = dimensions(top, fields, depth="num_hidden_layers", heads="num_attention_heads", channels="num_channels")
    heads = values["num_heads"]
    for key, expected in {"head_dim": values["hidden_size"] // max(1, heads), "num_key_value_heads": heads}.items():
        if fields.size(key) != expected:
            fields.refuse(key, fields.values[key], f"supported is {expected}")
    if fields.switch("attention_bias"):
        fields.refuse("attention_bias", True, "supported is false")
    kind = fields.section("rope_parameters").get("rope_type", "axial")
    if kind not in ("axial", "default"):
        fields.refuse("rope_parameters.rope_type", kind, "supported is axial")
    return fields, rotated(fields, values) | {
        "temporal_patch_size": 1,
        "spatial_merge_size": fields.size("pooling_kernel_size", largest=LARGEST_MERGE),
        "out_hidden_size": text_hidden_size(top),
        "activation": fields.word("hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}),
        "norm_eps": fields.positive("rms_norm_eps"),
        "image_token_id": top.token_id(top.image_key),
        "vision_start_token_id": top.token_id("boi_token_id"),
        "vision_end_token_id": top.token_id("eoi_token_id"),
        "num_position_embeddings": fields.size("position_embedding_size"),
        "feature_layers": (values["num_layers"],),
        "clipped": fields.switch("use_clipped_linears"),
        "standardized": fields.switch("standardize"),
    }


def gemma4_vision_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """The patches come in blocks of a token, the padding behind them. The rows are divided by what the language model
    multiplies by."""
    tower, hidden = TowerWeights(TOWER, config.tensor_prefix, config.norm_eps), config.hidden_size
    projector = TowerWeights("embed_vision.", config.projector_prefix)
    embedding = tower.linear("patch_embedder.input_proj", hidden, config.patch_elements, False)
    steps: list[Step] = [
        NormLinear("hidden", (Input("patches"),), embedding),
        Add("hidden", "hidden", "position_embeddings"),
    ]
    for index in range(config.num_layers):
        steps += _VisionLayer(config, tower, f"encoder.layers.{index}.").steps(shape.tokens)
    merge, out = config.spatial_merge_size, config.out_hidden_size
    standard = (tower.weight("std_bias", hidden), tower.weight("std_scale", hidden)) if config.standardized else None
    linear = projector.linear("embedding_projection", out, hidden, False)
    return [
        *steps,
        AveragePool("pooled", "hidden", hidden, merge, merge, shape.tokens // merge),
        StandardNorm("pooled", "pooled", hidden**0.5, config.norm_eps, standard),
        NormLinear("image_embeddings", (Input("pooled"),), linear, scale=out**-0.5),
    ]


def _bounds(tower: TowerWeights, name: str, side: str) -> WeightSpec:
    """The least and the most of the "input" or "output" of Gemma 4's linear layer of that name."""
    ends = [tower.weight(f"{name}.{side}_{end}", 1, part=()) for end in ("min", "max")]
    return WeightSpec(f"{ends[0].name.removesuffix('_min')}_bounds", (2,), tuple(each.parts[0] for each in ends))


def _bounded_linears(tower: TowerWeights, folder: str, norm: Norm, rows: Mapping[str, int], columns: int) -> list[Step]:
    """What "hidden", normed, gives by several clipped layers of a folder, each with its own bounds, under their names;
    outputs are not clipped yet."""
    steps: list[Step] = [Normed("normed", "hidden", norm)]
    for name, count in rows.items():
        linear = tower.linear(f"{folder}{name}.linear", count, columns, False)
        steps.append(Clip("bounded", (("normed", _bounds(tower, f"{folder}{name}", "input")),)))
        steps.append(NormLinear(name, (Input("bounded"),), linear))
    return steps


def _bounded_qkv(tower: TowerWeights, folder: str, norm: Norm, hidden: int, clipped: bool) -> list[Step]:
    """Queries, keys and values of "hidden", normed, side by side as "qkv"."""
    if not clipped:
        joined = tower.linear(f"{folder}qkv_proj", {f"{name}.linear": hidden for name in QKV}, hidden, False)
        return [NormLinear("qkv", (Input("hidden", (norm,)),), joined)]
    steps = _bounded_linears(tower, folder, norm, dict.fromkeys(QKV, hidden), hidden)
    return [*steps, Clip("qkv", tuple((name, _bounds(tower, f"{folder}{name}", "output")) for name in QKV))]


class _BoundedLayer:
    """What the layers of Gemma 4's encoders share: norms before and behind parts that add to the stream "hidden"."""

    def __init__(self, config: Any, tower: TowerWeights, prefix: str) -> None:
        """`prefix` begins the names of the layer's weights."""
        self._config, self._tower, self._prefix = config, tower, prefix

    def _norm(self, name: str) -> Norm:
        return self._tower.rms_norm(f"{self._prefix}{name}", self._config.hidden_size)

    def _linear(self, name: str, output: str, value: str, rows: int, columns: int) -> list[Step]:
        """A linear layer, whose input and output have bounds where such layers are clipped."""
        name = f"{self._prefix}{name}"
        linear = self._tower.linear(f"{name}.linear", rows, columns, False)
        if not self._config.clipped:
            return [NormLinear(output, (Input(value),), linear)]
        return [
            Clip("bounded", ((value, _bounds(self._tower, name, "input")),)),
            NormLinear(output, (Input("bounded"),), linear),
            Clip(output, ((output, _bounds(self._tower, name, "output")),)),
        ]

    def _added(self, value: str, name: str, columns: int, norm: str, share: float = 1.0) -> list[Step]:
        linear = self._linear(name, "added", value, self._config.hidden_size, columns)
        return [*linear, NormedResidual("hidden", "added", self._norm(norm), "hidden", share)]


class _VisionLayer(_BoundedLayer):
    """The steps of one layer."""

    def steps(self, rows: int) -> list[Step]:
        """Both parts, each normed before and behind."""
        config, heads, hidden = self._config, self._config.num_heads, self._config.hidden_size
        folder = f"{self._prefix}self_attn."
        query, key = (self._tower.rms_norm(f"{folder}{each}_norm", config.head_dim) for each in "qk")
        seen = (1, rows), "attention_mask", "rotary_cos_sin"
        return [
            *_bounded_qkv(self._tower, folder, self._norm("input_layernorm"), hidden, config.clipped),
            NormedHeads("qkv", "qkv", heads, (query, key)),
            EncoderAttention("context", "qkv", heads, config.head_dim, *seen),
            *self._added("context", "self_attn.o_proj", hidden, "post_attention_layernorm"),
            *self._activated("activation", self._norm("pre_feedforward_layernorm")),
            *self._added("activation", "mlp.down_proj", config.intermediate_size, "post_feedforward_layernorm"),
        ]

    def _activated(self, output: str, norm: Norm) -> list[Step]:
        """What the gate lets through."""
        hidden, inner, activation = self._config.hidden_size, self._config.intermediate_size, self._config.activation
        if not self._config.clipped:
            parts = {f"{name}.linear": inner for name in ("gate_proj", "up_proj")}
            joined = self._tower.linear(f"{self._prefix}mlp.gate_up_proj", parts, hidden, False)
            return [NormLinear(output, (Input("hidden", (norm,)),), joined, activation, gated=True)]
        names, folder = ("gate_proj", "up_proj"), f"{self._prefix}mlp."
        gate, up = (_bounds(self._tower, f"{folder}{name}", "output") for name in names)
        steps = _bounded_linears(self._tower, folder, norm, dict.fromkeys(names, inner), hidden)
        return [*steps, ClippedGate(output, *names, (gate, up), activation)]


_EPSILON, _LONGEST_WAVE = 1e-6, 10000.0
#: Frames of a row.
_FRAMES = 4
_LARGEST_CAP, _LARGEST_CHUNK = 1e6, 4096


def read_gemma4_audio(top: ConfigFields, prefixes: tuple[str, str]) -> ConformerConfig:
    """The encoder of a model of the fields `top`, in which is noted what is wrong; the `prefixes` begin the names of
    its tensors and of those that lead from it to the language model."""
    raw = top.values["audio_config"]
    fields = ConfigFields(filled(raw, class_defaults("gemma4_encoder"), is_part=True), None, "audio_config")
    fields.wrong, fields.unsupported = top.wrong, top.unsupported
    channels = fields.values["subsampling_conv_channels"]
    if not (
        isinstance(channels, (list, tuple))
        and len(channels) == 2
        and all(is_integer(each) and 0 < each <= _LARGEST_CHUNK for each in channels)
        and channels[0] % _FRAMES == 0
    ):
        fields.expect("subsampling_conv_channels", channels, "two whole numbers, the first a multiple of 4")
        channels = [_FRAMES, 1]
    chunk, hidden = fields.size("attention_chunk_size", largest=_LARGEST_CHUNK), fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    if hidden % max(1, heads) or hidden % 2 or hidden < 4:
        fields.expect("hidden_size", hidden, f"a multiple of 2 and of num_attention_heads, {heads}, from 4 on")
    # Clipping at 10^10 changes no number of float32 that means anything; rows see as many as a chunk has.
    fields.only(attention_context_left=chunk + 1, attention_context_right=0, rms_norm_eps=_EPSILON)
    fields.only(gradient_clipping=1e10, hidden_act="silu")
    end = "eoa_token_id" if top.values.get("eoa_token_id") is not None else "eoa_token_index"
    return ConformerConfig(
        family="gemma4",
        mel_bins=channels[0],
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=fields.size("num_hidden_layers", largest=LARGEST_DEPTH),
        num_heads=heads,
        channels=channels[0],
        halvings=2,
        chunk_frames=_FRAMES * chunk,
        window_chunks=1,
        merged=1,
        out_hidden_size=text_hidden_size(top),
        tensor_prefix=prefixes[0],
        projector_prefix=prefixes[1],
        second_channels=channels[1],
        kernel=fields.size("conv_kernel_size", largest=_LARGEST_CHUNK),
        past=chunk,
        cap=fields.positive("attention_logit_cap", largest=_LARGEST_CAP),
        share=fields.positive("residual_weight"),
        clipped=fields.switch("use_clipped_linears"),
        encoded_size=fields.size("output_proj_dims"),
        begin=top.token_id("boa_token_id"),
        end=top.token_id(end),
    )


def conformer_inputs(config: ConformerConfig, shape: EngineShape, frames: int) -> dict[str, np.ndarray]:
    """What the program takes beside features, of which so many frames are those of sound: which rows of the first
    convolution are, too; and `waves` of distances."""
    heard = np.arange(_FRAMES // 2 * shape.tokens) < convolved(frames, 1)
    return {
        "heard": np.repeat(heard, convolved(config.mel_bins, 1)).astype(np.float32)[None, :, None],
        "distances": waves(config.past, config.hidden_size // 2)[None],
    }


def waves(count: int, half: int) -> np.ndarray:
    """[count, 2 half] float32: of places from 0 on the sines, then the cosines, of waves up to so long as
    `_LONGEST_WAVE` (Vaswani et al. 2017)."""
    angles = np.arange(count)[:, None] * np.exp(-np.log(_LONGEST_WAVE) / max(1, half - 1) * np.arange(half))
    return np.concatenate((np.sin(angles), np.cos(angles)), axis=1).astype(np.float32)


def conformer_program(config: ConformerConfig, shape: EngineShape) -> Program:
    """The program of rows in their order: "features" to "audio_embeddings", divided by what the language model
    multiplies by."""
    tower = TowerWeights("audio_tower.", config.tensor_prefix, _EPSILON)
    projector = TowerWeights("embed_audio.", config.projector_prefix)
    hidden, rows, out, bins = config.hidden_size, shape.tokens, config.out_hidden_size, config.mel_bins
    layers = [f"layers.{index}." for index in range(config.num_layers)]
    relative = {f"{layer}self_attn.relative_k_proj": hidden for layer in layers}
    frames, first, second = _FRAMES * rows, config.channels, config.second_channels
    steps: list[Step] = []
    for number, (value, depth, channels) in enumerate((("features", 1, first), ("convolved", first, second))):
        name, grid = f"subsample_conv_projection.layer{number}", (1, frames >> number, convolved(bins, number))
        convolution = tower.convolution(f"{name}.conv", channels, (depth, 3, 3), bias=False)
        weight, mask = tower.weight(f"{name}.norm.weight", channels), None if number else "heard"
        steps += [
            Unfold("places", value, grid, depth, (3, 3), 2, (1, 1)),
            NormLinear("convolved", (Input("places"),), convolution),
            CenteredNorm("convolved", "convolved", weight, _EPSILON, mask),
        ]
    width = convolved(bins, 2) * second
    linear = tower.linear("subsample_conv_projection.input_proj_linear", hidden, width, False)
    steps += [
        Reshape("rows", "convolved", (1, rows, width)),
        NormLinear("hidden", (Input("rows"),), linear),
        NormLinear("relative", (Input("distances"),), tower.linear("relative_k_proj", relative, hidden, False)),
    ]
    for index, layer in enumerate(layers):
        steps += _AudioLayer(config, tower, layer).steps(index * hidden)
    last = projector.linear("embedding_projection", out, config.encoded_size, False)
    steps += [
        NormLinear("encoded", (Input("hidden"),), tower.linear("output_proj", config.encoded_size, hidden)),
        StandardNorm("encoded", "encoded", 1.0, _EPSILON),
        NormLinear("audio_embeddings", (Input("encoded"),), last, scale=out**-0.5),
    ]
    inputs: Edge = {
        "features": ((1, frames * bins, 1), "float32"),
        "heard": ((1, frames // 2 * convolved(bins, 1), 1), "float32"),
        "distances": ((1, config.past, hidden), "float32"),
    }
    return Program(shape, inputs, tuple(steps), {"audio_embeddings": ((1, rows, out), "compute")})


class _AudioLayer(_BoundedLayer):
    """The steps of one layer."""

    def steps(self, first: int) -> list[Step]:
        """Attention and a convolution between two feed-forward layers, and a norm. Of rows of positions the layer has
        columns from the `first` on."""
        return [
            *self._feed_forward("feed_forward1"),
            *self._attention(first),
            *self._convolution(),
            *self._feed_forward("feed_forward2"),
            Normed("hidden", "hidden", self._norm("norm_out")),
        ]

    def _feed_forward(self, name: str) -> list[Step]:
        hidden, share = self._config.hidden_size, self._config.share
        return [
            Normed("normed", "hidden", self._norm(f"{name}.pre_layer_norm")),
            *self._linear(f"{name}.ffw_layer_1", "inner", "normed", 4 * hidden, hidden),
            Activate("inner", "inner", "silu"),
            *self._added("inner", f"{name}.ffw_layer_2", 4 * hidden, f"{name}.post_layer_norm", share),
        ]

    def _attention(self, first: int) -> list[Step]:
        config, folder = self._config, f"{self._prefix}self_attn."
        hidden, heads = config.hidden_size, config.num_heads
        scale = self._tower.weight(f"{folder}per_dim_scale", hidden // heads)
        return [
            *_bounded_qkv(self._tower, folder, self._norm("norm_pre_attn"), hidden, config.clipped),
            LocalAttention("context", "qkv", "relative", first, heads, config.past, config.cap, scale),
            *self._added("context", "self_attn.post", hidden, "norm_post_attn"),
        ]

    def _convolution(self) -> list[Step]:
        hidden, kernel, name = self._config.hidden_size, self._config.kernel, f"{self._prefix}lconv1d."
        weight = self._tower.weight(f"{name}depthwise_conv1d.weight", hidden, kernel, part=(hidden, 1, kernel))
        return [
            Normed("normed", "hidden", self._norm("lconv1d.pre_layer_norm")),
            *self._linear("lconv1d.linear_start", "inner", "normed", 2 * hidden, hidden),
            GatedConvolution("inner", "inner", weight, self._norm("lconv1d.conv_norm")),
            *self._linear("lconv1d.linear_end", "added", "inner", hidden, hidden),
            Add("hidden", "hidden", "added"),
        ]
