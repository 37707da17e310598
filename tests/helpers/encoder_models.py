"""Encoders of every family with random weights, what NumPy's operations compute of them, and their engines on the
kernels' twins."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from decode_twins import NumpyTiledKernels
from encoder_twin import NumpyEncoder, NumpyEncoderLinear
from numpy_kernel_device import NumpyKernelDevice, NumpySegment

from edgellm.engines.backends.encoder_engine import EncoderEngine, EncoderStepKernels
from edgellm.engines.backends.numpy_backend import NumpyBackend, NumpyEngine
from edgellm.engines.backends.padded_weights import Padding
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.families.audio_encoders import audio_inputs
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.audio import AudioConfig, ConformerConfig, RealtimeConfig
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.encoder_steps import KEPT_ROWS
from edgellm.engines.model.limits import EngineShape, audio_shape, vision_shape
from edgellm.engines.model.segments import planned_runs, segment_shape
from edgellm.engines.model.vision import VisionConfig, vision_inputs
from edgellm.multimodal.vision_layout import Grid, vision_layout

_COMMON: dict[str, Any] = {
    "dtype": "float16",
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_layers": 3,
    "num_heads": 2,
    "in_channels": 3,
    "out_hidden_size": 24,
    "norm_eps": 1e-6,
    "image_token_id": 5,
    "tensor_prefix": "tower.",
    "projector_prefix": "projector.",
}
_QWEN = VisionConfig(
    "qwen2_5_vl", patch_size=4, temporal_patch_size=2, spatial_merge_size=2, activation="silu", **_COMMON
)
_SIGLIP = VisionConfig(
    "llava",
    patch_size=5,
    temporal_patch_size=1,
    spatial_merge_size=1,
    activation="gelu_tanh",
    image_size=20,
    feature_layers=(3,),
    **_COMMON,
)
_GEMMA4 = replace(
    _QWEN,
    family="gemma4",
    temporal_patch_size=1,
    spatial_merge_size=3,
    activation="gelu_tanh",
    num_position_embeddings=20,
    feature_layers=(3,),
)

#: Widths that are no multiple of 8 in all of them.
MODELS = {
    "qwen2_5_vl": replace(_QWEN, window_size=16, full_attention_layers=(1,)),
    "qwen2_5_vl_heads_of_80": replace(
        _QWEN, hidden_size=160, window_size=64, full_attention_layers=(0, 2), intermediate_size=60
    ),
    "qwen3_vl": replace(
        _QWEN, family="qwen3_vl", activation="gelu_tanh", num_position_embeddings=25, deepstack_layers=(0, 2)
    ),
    "qwen3_5_heads_of_72": replace(
        _QWEN, family="qwen3_5", activation="gelu_tanh", hidden_size=144, num_position_embeddings=16
    ),
    "paligemma": replace(_SIGLIP, family="paligemma", out_hidden_size=40),
    "mistral3": replace(_QWEN, family="mistral3", temporal_patch_size=1, spatial_merge_size=2, feature_layers=(2,)),
    "gemma4": replace(_GEMMA4, clipped=True),
    "gemma4_heads_of_72": replace(_GEMMA4, hidden_size=144, standardized=True, rope_theta=100.0),
    "llava_siglip": _SIGLIP,
    "llava_clip": replace(
        _SIGLIP, class_token=True, drops_first_row=True, activation="quick_gelu", feature_layers=(2,), hidden_size=128
    ),
    "llava_clip_two_layers": replace(
        _SIGLIP, class_token=True, activation="gelu", feature_layers=(1, 3), projector_bias=False
    ),
    "gemma3": replace(
        _SIGLIP, family="gemma3", image_size=40, spatial_merge_size=2, feature_layers=(3,), out_hidden_size=40
    ),
    "smolvlm": replace(_SIGLIP, family="smolvlm", image_size=42, spatial_merge_size=2),
    "lfm2_vl": replace(
        _SIGLIP,
        family="lfm2_vl",
        image_size=None,
        spatial_merge_size=2,
        num_position_embeddings=25,
        projector_size=56,
        projector_norm=True,
    ),
    "minicpmv4_6": replace(
        _SIGLIP,
        family="minicpmv4_6",
        image_size=None,
        spatial_merge_size=4,
        num_position_embeddings=25,
        merging_layer=1,
    ),
    "internvl": replace(
        _SIGLIP, family="internvl", image_size=40, spatial_merge_size=2, class_token=True, activation="gelu"
    ),
    "internvl_rms_norms": replace(
        _SIGLIP,
        family="internvl",
        image_size=30,
        spatial_merge_size=3,
        class_token=True,
        attention_bias=False,
        rms_norms=True,
        final_norm=True,
    ),
}

#: Those of which kernels refuse some steps: norms of queries and keys; gates; heads; outputs; what reads or writes the
#: hidden size, whose rows are no multiple of 8 columns.
REFUSED = {
    "norms": replace(MODELS["internvl"], qk_norm=True),
    "gates": replace(MODELS["mistral3"], activation="gelu"),
    "heads": replace(MODELS["qwen2_5_vl"], hidden_size=40),
    "clipped_heads": replace(MODELS["gemma4"], hidden_size=24),
    "outputs": replace(MODELS["qwen3_vl"], out_hidden_size=20),
    **{
        f"{name}_widths": replace(MODELS[name], hidden_size=36, num_heads=1)
        for name in ("qwen3_vl", "llava_clip_two_layers", "internvl", "gemma3", "minicpmv4_6", "lfm2_vl")
    },
}

#: Encoders of speech, of odd widths, too.
SPEECH_MODELS = {
    "qwen3_asr": AudioConfig(
        family="qwen3_asr",
        mel_bins=18,
        hidden_size=32,
        intermediate_size=44,
        num_layers=3,
        num_heads=2,
        channels=12,
        halvings=3,
        chunk_frames=22,
        window_chunks=25,
        merged=1,
        out_hidden_size=24,
        tensor_prefix="tower.",
        projector_prefix="projector.",
    )
}

SPEECH_MODELS["voxtral"] = replace(
    SPEECH_MODELS["qwen3_asr"],
    family="voxtral",
    intermediate_size=128,
    channels=32,
    halvings=1,
    chunk_frames=120,
    window_chunks=1,
    merged=4,
)
_CONFORMER = ConformerConfig(
    **{each.name: getattr(SPEECH_MODELS["qwen3_asr"], each.name) for each in fields(AudioConfig)}
    | {"family": "gemma4", "mel_bins": 20, "channels": 20, "halvings": 2, "chunk_frames": 20, "window_chunks": 1},
    **{"second_channels": 12, "kernel": 5, "past": 5, "cap": 2.0, "share": 0.5, "clipped": True, "encoded_size": 40},
    **{"begin": 6, "end": 7},
)
SPEECH_MODELS |= {"gemma4": _CONFORMER, "gemma4_without_bounds": replace(_CONFORMER, clipped=False, num_layers=2)}

SPEECH_MODELS["qwen2_audio"] = replace(SPEECH_MODELS["voxtral"], family="qwen2_audio", intermediate_size=44, merged=2)
_OF_ALL = {each.name: getattr(SPEECH_MODELS["voxtral"], each.name) for each in fields(AudioConfig)}
SPEECH_MODELS["voxtral_realtime"] = RealtimeConfig(
    **_OF_ALL | {"family": "voxtral_realtime", "chunk_frames": 8, "window_chunks": 2, "intermediate_size": 44},
    **{"head_size": 24, "past": 37, "epsilon": 1e-5, "rope_theta": 100.0, "delay": 2, "silence": (3, 1)},
)


def grids_of(config: VisionConfig) -> list[Grid]:
    """Grids of images for an encoder: its own square, or odd ones."""
    if config.image_side:
        return [(1, config.image_side, config.image_side)]
    if config.spatial_merge_size > 2:
        return [(1, rows * config.spatial_merge_size, 2 * config.spatial_merge_size) for rows in (1, 3, 5)]
    return [(1, 6, 10), (1, 2, 2), (1, 14, 6)]


def shape_of(config: VisionConfig, grid: Grid, larger: bool = False) -> EngineShape:
    """The engine for an image, or a larger one, for a whole window or 64 patches more where sizes are free."""
    rows = vision_layout(config, grid, _positions(config)).rows
    more = max(64 - 64 % config.merge_patches, config.window_patches)
    return vision_shape(rows + more * (larger and not config.image_side))


def random_encoder(config: VisionConfig, grid: Grid, shape: EngineShape) -> dict[str, np.ndarray]:
    """Weights and an image's inputs, by their names at the engine's edge, in float32; patches of no image are zeros."""
    arrays = random_weights(config, shape)
    random = np.random.default_rng(4)
    arrays |= vision_layout(config, grid, _positions(config)).padded(config, shape)
    size, _ = vision_inputs(config, shape)["patches"]
    patches = np.zeros(size, np.float32)
    patches[0, : grid[1] * grid[2]] = random.standard_normal((grid[1] * grid[2], size[2]), np.float32)
    return arrays | {"patches": patches}


def lengths_of(config: AudioConfig) -> list[int]:
    """Frames of windows for an encoder: whole ones, and others where it takes them."""
    if isinstance(config, ConformerConfig):
        return [4 * config.run_rows, 147, 7]
    if isinstance(config, RealtimeConfig):
        return [config.run_windows * config.window_frames, 96, 8]
    return [config.window_frames] + [config.window_frames * 2 // 5, 7] * (config.family != "voxtral")


def random_speech(config: AudioConfig, frames: int, whole: bool) -> tuple[EngineShape, dict[str, np.ndarray]]:
    """The shape that takes so many frames, or a `whole` window, and its weights and inputs."""
    lead = config.window_rows if config.kept_rows else 0
    shape = audio_shape(config.run_rows if whole else lead + config.chunk_rows(frames))
    size = config.mel_bins, frames if config.family not in ("voxtral", "qwen2_audio") else config.window_frames
    features = np.random.default_rng(4).standard_normal(size, np.float32)
    arrays = random_weights(config, shape) | audio_inputs(config, shape, frames)
    if config.kept_rows:  # nothing of it is read in a first run
        arrays[KEPT_ROWS] = np.full(model_program(config, shape).inputs[KEPT_ROWS][0], np.nan, np.float32)
    return shape, arrays | {"features": placed(config, shape, features)}


def placed(config: AudioConfig, shape: EngineShape, features: np.ndarray) -> np.ndarray:
    """Features [bins, F] as the program of a shape takes them."""
    size, _ = model_program(config, shape).inputs["features"]
    chunks = np.zeros((math.prod(size) // config.mel_bins, config.mel_bins), np.float32)
    chunks[: features.shape[1]] = features.T
    return chunks.reshape(-1, config.group_frames, config.mel_bins).swapaxes(1, 2).reshape(size)


def random_weights(config: ModelConfig, shape: EngineShape) -> dict[str, np.ndarray]:
    """Those of an encoder, by their names."""
    random, arrays = np.random.default_rng(3), dict[str, np.ndarray]()
    for name, spec in model_program(config, shape).weights.items():
        scale = spec.shape[-1] ** -0.5 if len(spec.shape) > 1 else 0.2
        arrays[name] = random.standard_normal(spec.shape, np.float32) * np.float32(scale)
        if ("norm" in name or "ln_" in name) and name.endswith("weight"):
            arrays[name] += 1
        if name.endswith("bounds"):
            arrays[name] = np.sort(arrays[name] * 3 - np.float32([1, -1]))
    return arrays


def expected_outputs(config: ModelConfig, shape: EngineShape, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What NumPy's operations give, by name."""
    program, bound = model_program(config, shape), dict(arrays)
    engine, outputs = NumpyEngine(program), program.outputs
    engine.bind(bound | {name: np.zeros(size, np.float32) for name, (size, _) in outputs.items()})
    engine.enqueue()
    return {name: engine._bindings[name] for name in outputs}


def twin_engine(
    config: ModelConfig, shape: EngineShape, rounds: bool = True, planned: Collection[str] = ()
) -> EncoderEngine:
    """The engine on the kernels' twins, in float32; nothing unwritten is read: it is NaN. `rounds`: linear layers apply
    activations. `planned`: the titles of steps that segments run."""
    linear, program = NumpyEncoderLinear() if rounds else NumpyTiledKernels(), model_program(config, shape)
    shapes = [segment_shape(program, run) for run in planned_runs(program, planned).values()]
    plans = {each: NumpySegment(model_program(config, each)) for each in shapes}
    kernels: Any = EncoderStepKernels(NumpyEncoder(), linear, planned, plans)
    engine = EncoderEngine(kernels, config, shape, "float32")
    engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))
    return engine


class EncoderBackend(NumpyBackend):
    """NumPy, but for an encoder, which runs on the twins, at fixed shapes as on a GPU."""

    fixed_shapes = True

    def __init__(self, config: VisionConfig | AudioConfig, decoder: Any) -> None:
        super().__init__(decoder, **{"audio" if isinstance(config, AudioConfig) else "vision": config})  # type: ignore
        self._encoder, self._engines = config, list[EncoderEngine]()

    def load_engine(self, shape: EngineShape) -> Any:
        self._engines.append(twin_engine(self._encoder, shape))
        return self._engines[-1]

    def load_weights(
        self, checkpoint: Checkpoint, specs: Sequence[WeightSpec], progress: Callable[[int, int], None] | None = None
    ) -> Any:
        return padded_arrays(self._engines[0], super().load_weights(checkpoint, specs, progress))


def padded_weight(padding: Padding, values: np.ndarray) -> np.ndarray:
    """A whole weight as it stands in memory."""
    found = np.zeros(padding.shape, values.dtype)
    for begin, piece in padding.pieces(0, values.reshape(-1)):
        found.reshape(-1)[begin : begin + piece.size] = piece
    return found


def padded_arrays(engine: EncoderEngine, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays as the engine takes them."""
    own = engine.paddings
    return {name: padded_weight(own[name], array) if name in own else array for name, array in arrays.items()}


def _positions(config: VisionConfig) -> np.ndarray | None:
    if config.num_position_embeddings is None:
        return None
    size = (*((2,) if config.family == "gemma4" else ()), config.num_position_embeddings, config.hidden_size)
    return np.random.default_rng(5).standard_normal(size, np.float32)
