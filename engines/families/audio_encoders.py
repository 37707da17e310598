"""The encoders of speech: their tensors checked, and the configurations and programs of Qwen3-ASR's, Voxtral's and
Qwen2-Audio's.

Convolutions make of each second of sound a few rows, which a plain transformer lets attend within windows of several
seconds; a projector leads to the language model. No window sees another: each is a run of its own, and what it gave
stays as it was when more is heard. Qwen3-ASR's three convolutions go over time and bands, and each second begins anew
at the same positions; the others' two go over time, a window is always 30 seconds, with silence behind a sound's end
(Whisper's encoder: Radford et al. 2023). Four rows of Voxtral's, side by side, become one token (Liu et al. 2025); the
mean of two of Qwen2-Audio's, which do not see the silence (Chu et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families.decoders import class_defaults, filled
from edgellm.engines.families.fields import ConfigFields, counted, first_prefix
from edgellm.engines.families.gemma4_encoders import conformer_inputs, conformer_program, read_gemma4_audio, waves
from edgellm.engines.families.realtime_audio import read_realtime, realtime_inputs, realtime_program
from edgellm.engines.families.vision_parts import QKV, TowerWeights, attention_steps, mlp_steps, projection_steps
from edgellm.engines.model.audio import AudioConfig, ConformerConfig, RealtimeConfig, convolved
from edgellm.engines.model.config import LARGEST_DEPTH, DecoderConfig, WeightSpec
from edgellm.engines.model.encoder_steps import KEPT_ROWS, EncoderAttention, Gather, Unfold
from edgellm.engines.model.limits import LARGEST_AUDIO_ROWS, EngineLimits, EngineShape, audio_shape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Add, Input, Normed, NormLinear, Reshape, Step
from edgellm.kernels.arrays import ITEM_SIZES

#: What the file calls the sizes that all have; Voxtral's does so otherwise.
_SIZES = ("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "d_model")
_VOXTRAL_SIZES = ("num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_size")
#: The families with Whisper's, and the width of their language models where the file does not say.
_WHISPER = {"voxtral": 3072, "qwen2_audio": 4096}
#: Inputs that name the even and the odd rows of Qwen2-Audio's.
_PAIRS = ("even_rows", "odd_rows")
#: Layer norms have PyTorch's own.
_EPSILON = 1e-5
#: Far above any published encoder's: bands and half the frames of a chunk.
_LARGEST_CHUNK = 4096
#: What begins the tensors of the encoder of images beside Gemma 4's.
_IMAGES = tuple(f"{outer}{name}." for outer in ("model.", "") for name in ("vision_tower", "embed_vision"))
_EARS = tuple(f"{outer}{name}." for outer in ("model.", "") for name in ("audio_tower", "embed_audio"))
#: Rows are kept in so many bytes: those of a quarter of an hour and more.
AUDIO_CACHE_BYTES = 64 << 20


def read_audio(checkpoint: Checkpoint) -> AudioConfig:
    """The encoder of speech of a checkpoint, its tensors checked.

    Raises UnsupportedModelError for a feature that is not implemented, CheckpointError for fields and tensors that are
    missing, wrong or unknown; either lists all of them.
    """
    config = audio_config(checkpoint.config, checkpoint.tensors)
    unread = _IMAGES if config.family == "gemma4" else ()
    problems = checkpoint.problems(audio_weights(config), encoders=True, unread=unread)
    if problems:
        found = f"the weights of the encoder of speech do not fit config.json: {counted(problems)}"
        raise CheckpointError(f"{checkpoint.path}: {found}\nTake config.json and weights of one and the same model")
    return config


def audio_config(config_json: dict[str, Any], names: Iterable[str] = ()) -> AudioConfig:
    """The encoder that a `config.json` describes, for tensors of these `names`. Raises as `read_audio` does."""
    family = str(config_json.get("model_type"))
    read = {"gemma4": read_gemma4_audio, "voxtral_realtime": read_realtime}.get(family, _read_transformer)
    parts = "audio_tower", "embed_audio" if family == "gemma4" else "multi_modal_projector"
    tower, projector = (first_prefix((f"model.{part}.", f"{part}."), names) for part in parts)
    fields = ConfigFields(filled(config_json, class_defaults(family)), None, family)
    config = read(fields, (tower, projector))
    fields.raise_problems()
    return config


def without_lost_ears(config: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """The same, which hears nothing where a release of Gemma 4 was made without the tensors that hear."""
    is_deaf = checkpoint.config.get("model_type") == "gemma4" and not any(
        name.startswith(_EARS) for name in checkpoint.tensors
    )
    return replace(config, audio_token_id=None) if is_deaf else config


def _read_transformer(top: ConfigFields, prefixes: tuple[str, str]) -> AudioConfig:
    family = top.family
    sizes = _VOXTRAL_SIZES if family == "voxtral" else _SIZES
    usual = class_defaults(f"{family if family in _WHISPER else 'qwen3_asr'}_encoder")
    fields = ConfigFields(filled(top.section("audio_config"), usual, is_part=True), None, "audio_config")
    if fields.values.get("scale_embedding"):
        fields.refuse("scale_embedding", True, "supported is false")
    fields.word("activation_function", {"gelu": "gelu", None: "gelu"})
    layers, heads, inner, width = sizes
    read: dict[str, Any] = {
        "family": family,
        "num_layers": fields.size(layers, largest=LARGEST_DEPTH),
        "num_heads": fields.size(heads),
        "intermediate_size": fields.size(inner),
        "hidden_size": fields.size(width),
    }
    own = _whisper(fields, top, read) if family in _WHISPER else _qwen3_asr(fields)
    hidden, count = read["hidden_size"], read["num_heads"]
    if count and (hidden % count or hidden % 2 or hidden < 4):
        fields.expect(width, hidden, f"a multiple of 2 and of {heads}, {count}, from 4 on")
    config = AudioConfig(
        mel_bins=fields.size("num_mel_bins", largest=_LARGEST_CHUNK),
        tensor_prefix=prefixes[0],
        projector_prefix=prefixes[1],
        **read,
        **own,
    )
    fields.raise_problems()
    return config


def _qwen3_asr(fields: ConfigFields) -> dict[str, Any]:
    half = fields.size("n_window", largest=_LARGEST_CHUNK)
    window = fields.size("n_window_infer", largest=LARGEST_AUDIO_ROWS)
    if half and window % (2 * half):
        fields.expect("n_window_infer", window, f"a multiple of twice n_window, {2 * half}")
    return {
        "channels": fields.size("downsample_hidden_size"),
        "halvings": 3,
        "chunk_frames": 2 * half,
        "window_chunks": window // max(1, 2 * half),
        "merged": 1,
        "out_hidden_size": fields.size("output_dim"),
    }


def _whisper(fields: ConfigFields, top: ConfigFields, read: Mapping[str, Any]) -> dict[str, Any]:
    hidden, inner, merged = read["hidden_size"], read["intermediate_size"], 2
    positions = fields.size("max_source_positions", largest=LARGEST_AUDIO_ROWS)
    if read["family"] == "voxtral":
        merged = inner // max(1, hidden)  # rows side by side are as wide as the inner layer
        if hidden and (inner % hidden or positions % max(1, merged)):
            expected = f"a multiple of hidden_size, {hidden}, that max_source_positions, {positions}, is one of"
            fields.expect("intermediate_size", inner, expected)
    elif positions % 2:
        fields.expect("max_source_positions", positions, "an even number: the mean of two rows becomes one token")
    whole = ConfigFields(top.section("text_config"), None, "text_config")
    out = whole.size("hidden_size", _WHISPER[read["family"]])
    whole.raise_problems()
    activation = top.values.get("projector_hidden_act", "gelu")
    if activation != "gelu":
        fields.refuse("projector_hidden_act", activation, "supported is gelu")
    return {
        "channels": hidden,
        "halvings": 1,
        "chunk_frames": 2 * positions,
        "window_chunks": 1,
        "merged": merged,
        "out_hidden_size": out,
    }


def audio_weights(config: AudioConfig) -> list[WeightSpec]:
    return list(audio_program(config, audio_shape(config.window_rows)).weights.values())


def audio_inputs(config: AudioConfig, shape: EngineShape, frames: int, first: int = 0) -> dict[str, np.ndarray]:
    """What the program of a shape takes beside features, the first `frames` of which were heard, and what is kept: of
    Qwen3-ASR the positions of chunks' rows; of all but Voxtral's, which rows are those of sound; of Qwen2-Audio's,
    which ones make two; of Voxtral Realtime's, which of the sound's rows is its `first`."""
    if isinstance(config, ConformerConfig):
        return conformer_inputs(config, shape, frames)
    if isinstance(config, RealtimeConfig):
        return realtime_inputs(config, shape, first)
    heard = {"attention_mask": (np.arange(shape.tokens) < config.encoded_rows(frames))[None, None, None]}
    if config.family == "voxtral":
        return {}
    if config.family == "qwen2_audio":
        rows = np.arange(shape.tokens, dtype=np.int32)
        return heard | {name: rows[None, first::2].copy() for first, name in enumerate(_PAIRS)}
    own = convolved(config.chunk_frames, config.halvings)
    return {"position_embeddings": _positions(own, shape.tokens // own, config.hidden_size // 2)} | heard


@lru_cache(maxsize=4)
def _positions(rows: int, chunks: int, half: int) -> np.ndarray:
    """[1, chunks * rows, 2 half] float32: `waves` of the places of each chunk's rows."""
    return np.tile(waves(rows, half), (chunks, 1))[None]


def audio_memory(config: AudioConfig, dtype: str, computes_at_once: bool, limits: EngineLimits) -> dict[str, int]:
    """Memory in bytes, by name: weights, inputs and output of the longest run, what is kept of parts of sounds, rows
    that are kept; of encoders that keep keys and values these, for each sequence, and rows of all contexts. A backend
    that `computes_at_once` has no scratch for what is between steps, of which what convolutions read is widest."""
    program = audio_program(config, audio_shape(config.run_rows))
    edge = [(shape, ITEM_SIZES.get(kind, ITEM_SIZES[dtype])) for shape, kind in program.edge.values()]
    everything = sum(math.prod(shape) * item for shape, item in edge)
    kept = math.prod(program.inputs[KEPT_ROWS][0]) * ITEM_SIZES[dtype] if config.kept_rows else 0
    rows = limits.max_batch * limits.kv_capacity * config.out_hidden_size * ITEM_SIZES[dtype] if kept else 0
    weights = sum(math.prod(spec.shape) for spec in program.weights.values()) * ITEM_SIZES[dtype]
    parts = config.kept_parts * config.part_frames * config.mel_bins * ITEM_SIZES["float32"]
    unfolded = [step.places * step.channels * math.prod(step.kernel) for step in program.steps if type(step) is Unfold]
    widest = max(unfolded) * ITEM_SIZES["float32"] if computes_at_once else 0
    return {
        "audio weights": weights,
        "audio buffers": everything - weights - kept + widest + parts,
        "audio embeddings": max(AUDIO_CACHE_BYTES, rows),
        **({"audio keys and values": limits.max_batch * kept} if kept else {}),
    }


def audio_program(config: AudioConfig, shape: EngineShape) -> Program:
    """The program of whole chunks: "features" to "audio_embeddings" [1, rows, language model's H]."""
    if isinstance(config, ConformerConfig):
        return conformer_program(config, shape)
    if isinstance(config, RealtimeConfig):
        return realtime_program(config, shape)
    tower = TowerWeights("audio_tower.", config.tensor_prefix, _EPSILON)
    projector = TowerWeights("projector.", config.projector_prefix)
    hidden, merged, out = config.hidden_size, config.merged, config.out_hidden_size
    is_whisper, is_voxtral = config.family in _WHISPER, config.family == "voxtral"
    inputs, steps = (_whisper_rows if is_whisper else _qwen3_asr_rows)(config, shape, tower)
    for index in range(config.num_layers):
        layer = f"layers.{index}."
        qkv = tower.linear(f"{layer}self_attn.qkv_proj", dict.fromkeys(QKV, hidden), hidden)
        if is_whisper and qkv.bias is not None:
            # Its keys have no bias, and any would do: one that all keys have changes no weight of a softmax.
            query, _, value = qkv.bias.parts
            qkv = replace(qkv, bias=replace(qkv.bias, parts=(query, query, value)))
        output = tower.linear(f"{layer}self_attn.out_proj", hidden, hidden)
        first, second = (tower.layer_norm(f"{layer}{name}_layer_norm", hidden) for name in ("self_attn", "final"))
        heads, mask = (config.num_heads, hidden // config.num_heads), None if is_voxtral else "attention_mask"
        attention = EncoderAttention("context", "qkv", *heads, (1, shape.tokens), mask)
        steps += attention_steps("hidden", first, qkv, attention, output)
        steps += mlp_steps("hidden", second, *tower.mlp(f"{layer}fc{{}}", config), "gelu")
    norm, rows = tower.layer_norm("layer_norm" if is_whisper else "ln_post", hidden), shape.tokens // merged
    outputs: Edge = {"audio_embeddings": ((1, rows, out), "compute")}
    if config.family == "qwen2_audio":
        # The norm of a mean is that of the sum, with the square of two in its epsilon.
        steps += [Gather(name, "hidden", name) for name in _PAIRS]
        steps += [Add("sums", *_PAIRS), Normed("sums", "sums", replace(norm, epsilon=4 * _EPSILON))]
        linear = NormLinear("audio_embeddings", (Input("sums"),), projector.linear("linear", out, hidden))
        return Program(shape, inputs, (*steps, linear), outputs)
    wide = merged * hidden
    linears = (
        projector.linear("linear_1", out if is_voxtral else hidden, wide, bias=not is_voxtral),
        projector.linear("linear_2", out, out if is_voxtral else hidden, bias=not is_voxtral),
    )
    steps += [Normed("hidden", "hidden", norm), Reshape("rows", "hidden", (1, rows, wide))]
    steps += projection_steps("audio_embeddings", ["rows"], linears, "gelu")
    return Program(shape, inputs, tuple(steps), outputs)


def _qwen3_asr_rows(config: AudioConfig, shape: EngineShape, tower: TowerWeights) -> tuple[Edge, list[Step]]:
    """The inputs, and the steps that make "hidden" of them: places of each chunk in time and bands."""
    hidden, channels, rows = config.hidden_size, config.channels, shape.tokens
    chunks, steps = rows // convolved(config.chunk_frames, config.halvings), list[Step]()
    value, bands, columns, depth = "features", config.mel_bins, config.chunk_frames, 1
    for number in (1, 2, 3):
        convolution = tower.convolution(f"conv2d{number}", channels, (depth, 3, 3), bias=True)
        steps += [
            Unfold("places", value, (chunks, bands, columns), depth, (3, 3), 2, (1, 1)),
            NormLinear("convolved", (Input("places"),), convolution, "gelu"),
        ]
        value, bands, columns, depth = "convolved", convolved(bands, 1), convolved(columns, 1), channels
    steps += [
        Unfold("places", value, (chunks, bands, columns), channels, (bands, 1)),
        NormLinear("hidden", (Input("places"),), tower.linear("conv_out", hidden, channels * bands, bias=False)),
        Add("hidden", "hidden", "position_embeddings"),
    ]
    inputs: Edge = {
        "features": ((1, chunks * config.mel_bins * config.chunk_frames, 1), "float32"),
        "position_embeddings": ((1, rows, hidden), "float32"),
        "attention_mask": ((1, 1, 1, rows), "bool"),
    }
    return inputs, steps


def _whisper_rows(config: AudioConfig, shape: EngineShape, tower: TowerWeights) -> tuple[Edge, list[Step]]:
    """The same of places in time alone."""
    hidden, bands, frames = config.hidden_size, config.mel_bins, 2 * shape.tokens
    first, second = (tower.convolution(f"conv{n}", hidden, (depth, 3), True) for n, depth in ((1, bands), (2, hidden)))
    steps: list[Step] = [
        Unfold("places", "features", (1, 1, frames), bands, (1, 3), 1, (0, 1)),
        NormLinear("convolved", (Input("places"),), first, "gelu"),
        Unfold("places", "convolved", (1, 1, frames), hidden, (1, 3), 2, (0, 1)),
        NormLinear("convolved", (Input("places"),), second, "gelu"),
        Add("hidden", "convolved", tower.weight("embed_positions.weight", shape.tokens, hidden)),
    ]
    inputs: Edge = {"features": ((1, frames, bands), "float32")}
    if config.family == "qwen2_audio":
        inputs["attention_mask"] = ((1, 1, 1, shape.tokens), "bool")
        inputs |= dict.fromkeys(_PAIRS, ((1, shape.tokens // 2), "int32"))
    return inputs, steps
