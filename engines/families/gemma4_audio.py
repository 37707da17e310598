"""Gemma 4's encoder of speech: its configuration and its program.

Two convolutions over time and bands make a row of four frames; conformer layers (Gulati et al. 2020) let each row see
rows before it, by attention with relative positions (Dai et al. 2019) and by a convolution of each column. No row sees
what comes later: what is heard more leaves those before as they are.
"""

from __future__ import annotations

import numpy as np

from edgellm.engines.families.decoders import class_defaults, filled
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.vision_fields import text_hidden_size
from edgellm.engines.families.vision_parts import BoundedLayer, TowerWeights, bounded_qkv
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.engines.model.audio import ConformerConfig, convolved
from edgellm.engines.model.config import LARGEST_DEPTH
from edgellm.engines.model.encoder_steps import (
    Activate,
    CenteredNorm,
    GatedConvolution,
    LocalAttention,
    StandardNorm,
    Unfold,
)
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Add, Input, Normed, NormLinear, Reshape, Step

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
    channels, values = fields.values["subsampling_conv_channels"], fields.values
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
    supported = {"attention_context_left": chunk + 1, "attention_context_right": 0, "rms_norm_eps": _EPSILON}
    for key, value in {**supported, "gradient_clipping": 1e10, "hidden_act": "silu"}.items():
        if values[key] != value:
            fields.refuse(key, values[key], f"supported is {value}")
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
    convolution are, too; and waves of distances (Vaswani et al. 2017)."""
    half = config.hidden_size // 2
    waves = np.exp(-np.log(_LONGEST_WAVE) / max(1, half - 1) * np.arange(half))
    angles = np.arange(config.past)[:, None] * waves
    heard = np.arange(_FRAMES // 2 * shape.tokens) < convolved(frames, 1)
    return {
        "heard": np.repeat(heard, convolved(config.mel_bins, 1)).astype(np.float32)[None, :, None],
        "distances": np.concatenate((np.sin(angles), np.cos(angles)), axis=1).astype(np.float32)[None],
    }


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
        steps += _Layer(config, tower, layer).steps(index * hidden)
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


class _Layer(BoundedLayer):
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
            *bounded_qkv(self._tower, folder, self._norm("norm_pre_attn"), hidden, config.clipped),
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
