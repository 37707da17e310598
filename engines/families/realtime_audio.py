"""Voxtral Realtime's encoder of speech: its configuration, its program, and what its checkpoint's tensors become.

Two convolutions over time make a row of two frames (Whisper's: Radford et al. 2023). Neither they nor the layers see
what comes later: as a decoder's, layers have rotary positions, and attend to as many rows before as a window has, whose
keys and values are kept from run to run. Four rows side by side are projected to one, which is added to the embedding
of the token that stands for their 80 ms.
"""

from __future__ import annotations

import numpy as np

from edgellm.engines.families.decoders import class_defaults, filled
from edgellm.engines.families.fields import ConfigFields, read_rope
from edgellm.engines.families.vision_fields import text_hidden_size
from edgellm.engines.families.vision_parts import QKV, TowerWeights, attention_steps, mlp_steps, projection_steps
from edgellm.engines.model.audio import RealtimeConfig
from edgellm.engines.model.config import LARGEST_DEPTH
from edgellm.engines.model.encoder_steps import FIRST_ROW, KEPT_ROWS, EncoderAttention, Gather, Unfold
from edgellm.engines.model.limits import LARGEST_AUDIO_ROWS, EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Input, Normed, NormLinear, Reshape, Step

#: Frames of a row, rows of a token, and tokens of what is final together.
_FRAMES, _ROWS, _TOKENS = 2, 4, 4
#: Tokens of silence before a sound, and behind it beside those that it is heard later by (mistral-common's requests).
_BEFORE, _BEHIND = 32, 11
_LARGEST_SIZE, _LARGEST_DELAY = 4096, 64
_POSITIONS = "rotary_cos_sin"


def read_realtime(top: ConfigFields, prefixes: tuple[str, str]) -> RealtimeConfig:
    """The encoder of a `config.json`; problems of its values go to `top`."""
    given = filled(top.section("audio_config"), class_defaults("voxtral_realtime_encoder"), is_part=True)
    fields = ConfigFields(given, None, "audio_config")
    fields.wrong, fields.unsupported = top.wrong, top.unsupported
    size = fields.size("head_dim", largest=_LARGEST_SIZE)
    theta, scaling = read_rope(fields, size, fields.size("max_position_embeddings"))
    if scaling is not None:
        fields.refuse("rope_parameters", scaling, "supported is the rope_type default")
    for key, word in (("hidden_act", "silu"), ("activation_function", "gelu")):
        fields.word(key, {word: word, None: word})
    top.only(projector_hidden_act="gelu", audio_length_per_tok=_FRAMES * _ROWS, downsample_factor=_ROWS)
    hidden = fields.size("hidden_size")
    if hidden % 2 or size % 8:
        fields.expect("hidden_size, head_dim", [hidden, size], "an even number, and a multiple of 8")
    return RealtimeConfig(
        family="voxtral_realtime",
        mel_bins=fields.size("num_mel_bins", largest=_LARGEST_SIZE),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers", largest=LARGEST_DEPTH),
        num_heads=fields.size("num_attention_heads"),
        channels=hidden,
        halvings=1,
        chunk_frames=_FRAMES * _ROWS,
        window_chunks=_TOKENS,
        merged=_ROWS,
        out_hidden_size=text_hidden_size(top),
        tensor_prefix=prefixes[0],
        projector_prefix=prefixes[1],
        head_size=size,
        past=fields.size("sliding_window", largest=LARGEST_AUDIO_ROWS),
        epsilon=fields.positive("rms_norm_eps"),
        rope_theta=theta,
        delay=top.size("default_num_delay_tokens", 6, _LARGEST_DELAY),
        silence=(_BEFORE, _BEHIND),
    )


def realtime_inputs(config: RealtimeConfig, shape: EngineShape, first: int) -> dict[str, np.ndarray]:
    """What the program takes beside features and what is kept: the number of its `first` row, the rows of positions,
    and which rows of the convolutions are taken: not those of the window before, where there is one."""
    rows, size = np.arange(shape.tokens - config.window_rows, dtype=np.int32), config.head_size
    angles = (first + rows[:, None]) * config.rope_theta ** (-np.arange(0, size, 2) / size)
    return {
        FIRST_ROW: np.array([first], np.int32),
        _POSITIONS: np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)[None],
        "rows": rows[None] + np.int32(config.window_rows if first else 0),
    }


def realtime_program(config: RealtimeConfig, shape: EngineShape) -> Program:
    """The program of rows in their order, of which those of a window stand before them: "features" to
    "audio_embeddings" [1, tokens, language model's H]."""
    tower = TowerWeights("audio_tower.", config.tensor_prefix, config.epsilon)
    projector = TowerWeights("projector.", config.projector_prefix)
    hidden, bands, out = config.hidden_size, config.mel_bins, config.out_hidden_size
    rows, frames = shape.tokens - config.window_rows, _FRAMES * shape.tokens
    inner, width = config.intermediate_size, config.num_heads * config.head_size
    first, second = (
        tower.convolution(f"embedder.conv{number}", hidden, (depth, 3), True)
        for number, depth in ((1, bands), (2, hidden))
    )
    # The first convolution reads two frames before its own: two zeros before, and two more places behind, than needed.
    steps: list[Step] = [
        Unfold("places", "features", (1, 1, frames), bands, (1, 3), 1, (0, 2)),
        NormLinear("convolved", (Input("places"),), first, "gelu"),
        Unfold("places", "convolved", (1, 1, frames + 2), hidden, (1, 3), 2, (0, 1)),
        NormLinear("convolved", (Input("places"),), second, "gelu"),
        Gather("hidden", "convolved", "rows"),
    ]
    for index in range(config.num_layers):
        layer = f"layers.{index}."
        norms = [tower.rms_norm(f"{layer}{name}_layer_norm", hidden) for name in ("self_attn", "final")]
        qkv = tower.linear(f"{layer}self_attn.qkv_proj", dict.fromkeys(QKV, width), hidden)
        output = tower.linear(f"{layer}self_attn.o_proj", hidden, width)
        gates = tower.linear(f"{layer}mlp.gate_up_proj", {"gate_proj": inner, "up_proj": inner}, hidden, False)
        down = tower.linear(f"{layer}mlp.down_proj", hidden, inner)
        heads = config.num_heads, config.head_size, (1, rows)
        attention = EncoderAttention("context", "qkv", *heads, rotary=_POSITIONS, past=config.past, layer=index)
        steps += attention_steps("hidden", norms[0], qkv, attention, output)
        steps += mlp_steps("hidden", norms[1], gates, down, "silu", gated=True)
    wide = config.merged * hidden
    linears = projector.linear("linear_1", out, wide, bias=False), projector.linear("linear_2", out, out, bias=False)
    steps += [
        Normed("hidden", "hidden", tower.rms_norm("norm", hidden)),
        Reshape("merged", "hidden", (1, rows // config.merged, wide)),
        *projection_steps("audio_embeddings", ["merged"], linears, "gelu"),
    ]
    kept = config.num_layers, 2, config.num_heads, config.kept_rows, config.head_size
    inputs: Edge = {
        "features": ((1, frames, bands), "float32"),
        KEPT_ROWS: ((1, *kept), "compute"),
        FIRST_ROW: ((1,), "int32"),
        _POSITIONS: ((1, rows, config.head_size), "float32"),
        "rows": ((1, rows), "int32"),
    }
    return Program(shape, inputs, tuple(steps), {"audio_embeddings": ((1, rows // config.merged, out), "compute")})
