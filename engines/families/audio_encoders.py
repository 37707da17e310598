"""The encoder of Qwen3-ASR: its configuration, its program, and its tensors checked.

Three convolutions make of each second of sound a few rows, which begin anew at the same positions; a plain transformer
attends within windows of several seconds, and a projector leads to the language model. No window sees another: each is
a run of its own, and what it gave stays as it was when more is heard.
"""

from __future__ import annotations

import math

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families.decoders import filled
from edgellm.engines.families.fields import ConfigFields, counted, first_prefix
from edgellm.engines.families.vision_parts import QKV, TowerWeights, attention_steps, mlp_steps, projection_steps
from edgellm.engines.model.audio import AudioConfig, convolved
from edgellm.engines.model.config import LARGEST_DEPTH, WeightSpec
from edgellm.engines.model.encoder_steps import EncoderAttention, Unfold
from edgellm.engines.model.limits import LARGEST_AUDIO_ROWS, EngineShape, audio_shape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Add, Input, Normed, NormLinear, Step
from edgellm.kernels.arrays import ITEM_SIZES

_DEFAULTS = {
    **{"encoder_layers": 24, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "d_model": 1024},
    **{"num_mel_bins": 128, "n_window": 50, "n_window_infer": 800, "output_dim": 3584, "downsample_hidden_size": 480},
}
#: Layer norms have PyTorch's own; positions are sines and cosines of waves up to so long (Vaswani et al. 2017).
_EPSILON, _LONGEST_WAVE = 1e-5, 10000.0
#: Far above any published encoder's: bands and half the frames of a chunk.
_LARGEST_CHUNK = 4096
#: Rows are kept in so many bytes at most: those of a quarter of an hour and more.
AUDIO_CACHE_BYTES = 64 << 20


def read_audio(checkpoint: Checkpoint) -> AudioConfig:
    """The encoder of speech of a checkpoint of Qwen3-ASR, its tensors checked.

    Raises UnsupportedModelError for a feature that is not implemented, CheckpointError for fields and tensors that are
    missing, wrong or unknown; either lists all of them.
    """
    raw = checkpoint.config.get("audio_config")
    fields = ConfigFields(filled(raw if isinstance(raw, dict) else {}, _DEFAULTS, is_part=True), None, "audio_config")
    half = fields.size("n_window", largest=_LARGEST_CHUNK)
    window = fields.size("n_window_infer", largest=LARGEST_AUDIO_ROWS)
    heads, hidden = fields.size("encoder_attention_heads"), fields.size("d_model")
    if heads and (hidden % heads or hidden % 2 or hidden < 4):
        fields.expect("d_model", hidden, f"a multiple of 2 and of encoder_attention_heads, {heads}, from 4 on")
    if half and window % (2 * half):
        fields.expect("n_window_infer", window, f"a multiple of twice n_window, {2 * half}")
    if fields.values.get("scale_embedding"):
        fields.refuse("scale_embedding", True, "supported is false")
    fields.word("activation_function", {"gelu": "gelu", None: "gelu"})
    config = AudioConfig(
        mel_bins=fields.size("num_mel_bins", largest=_LARGEST_CHUNK),
        hidden_size=hidden,
        intermediate_size=fields.size("encoder_ffn_dim"),
        num_layers=fields.size("encoder_layers", largest=LARGEST_DEPTH),
        num_heads=heads,
        channels=fields.size("downsample_hidden_size"),
        chunk_frames=2 * half,
        window_chunks=window // max(1, 2 * half),
        out_hidden_size=fields.size("output_dim"),
        tensor_prefix=first_prefix(("model.audio_tower.", "audio_tower."), checkpoint.tensors),
        projector_prefix=first_prefix(("model.multi_modal_projector.", "multi_modal_projector."), checkpoint.tensors),
    )
    fields.raise_problems()
    problems = checkpoint.problems(audio_weights(config), encoders=True)
    if problems:
        found = f"the weights of the encoder of speech do not fit config.json: {counted(problems)}"
        raise CheckpointError(f"{checkpoint.path}: {found}\nTake config.json and weights of one and the same model")
    return config


def audio_weights(config: AudioConfig) -> list[WeightSpec]:
    """The weights that the encoder takes."""
    return list(audio_program(config, audio_shape(config.window_rows)).weights.values())


def audio_inputs(config: AudioConfig, shape: EngineShape, features: np.ndarray) -> dict[str, np.ndarray]:
    """What the program of a shape takes of a window's `features` [bins, F]: chunks one behind the other, zeros behind
    the last, the positions of their rows, and which of these rows are those of sound."""
    bins, frames = features.shape
    chunks, half = shape.tokens // convolved(config.chunk_frames), config.hidden_size // 2
    padded = np.pad(features, ((0, 0), (0, chunks * config.chunk_frames - frames)))
    waves = np.exp(-np.log(_LONGEST_WAVE) / (half - 1) * np.arange(half))
    angles = np.arange(convolved(config.chunk_frames))[:, None] * waves
    positions = np.concatenate((np.sin(angles), np.cos(angles)), axis=1).astype(np.float32)
    return {
        "features": padded.reshape(bins, chunks, -1).swapaxes(0, 1).reshape(1, -1, 1),
        "position_embeddings": np.tile(positions, (chunks, 1))[None],
        "attention_mask": (np.arange(shape.tokens) < config.rows(frames))[None, None, None],
    }


def audio_memory(config: AudioConfig, dtype: str, computes_at_once: bool) -> dict[str, int]:
    """Memory in bytes, by name: weights, inputs and output of a window, rows that are kept. A backend that `computes_at_once` has no
    scratch for what is between steps, of which what the first convolution gives and the second one reads is widest."""
    program = audio_program(config, audio_shape(config.window_rows))
    edge = [(shape, ITEM_SIZES.get(kind, ITEM_SIZES[dtype])) for shape, kind in program.edge.values()]
    everything = sum(math.prod(shape) * item for shape, item in edge)
    weights = sum(math.prod(spec.shape) for spec in program.weights.values()) * ITEM_SIZES[dtype]
    widest = config.window_frames * config.mel_bins * config.channels * 4 if computes_at_once else 0
    return {
        "audio weights": weights,
        "audio buffers": everything - weights + widest,
        "audio embeddings": AUDIO_CACHE_BYTES,
    }


def audio_program(config: AudioConfig, shape: EngineShape) -> Program:
    """The program of a window of whole chunks: "features" to "audio_embeddings" [1, rows, language model's H]."""
    tower = TowerWeights("audio_tower.", config.tensor_prefix, _EPSILON)
    projector = TowerWeights("projector.", config.projector_prefix)
    hidden, channels, rows = config.hidden_size, config.channels, shape.tokens
    chunks = rows // convolved(config.chunk_frames)
    steps: list[Step] = []
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
    for index in range(config.num_layers):
        layer = f"layers.{index}."
        qkv = tower.linear(f"{layer}self_attn.qkv_proj", dict.fromkeys(QKV, hidden), hidden)
        output = tower.linear(f"{layer}self_attn.out_proj", hidden, hidden)
        first, second = (tower.layer_norm(f"{layer}{name}_layer_norm", hidden) for name in ("self_attn", "final"))
        heads = config.num_heads, hidden // config.num_heads
        attention = EncoderAttention("context", "qkv", *heads, (1, rows), "attention_mask")
        steps += attention_steps("hidden", first, qkv, attention, output)
        steps += mlp_steps("hidden", second, *tower.mlp(f"{layer}fc{{}}", config), "gelu")
    linears = projector.linear("linear_1", hidden, hidden), projector.linear("linear_2", config.out_hidden_size, hidden)
    steps.append(Normed("hidden", "hidden", tower.layer_norm("ln_post", hidden)))
    steps += projection_steps("audio_embeddings", ["hidden"], linears, "gelu")
    inputs: Edge = {
        "features": ((1, chunks * config.mel_bins * config.chunk_frames, 1), "float32"),
        "position_embeddings": ((1, rows, hidden), "float32"),
        "attention_mask": ((1, 1, 1, rows), "bool"),
    }
    outputs: Edge = {"audio_embeddings": ((1, rows, config.out_hidden_size), "compute")}
    return Program(shape, inputs, tuple(steps), outputs)
