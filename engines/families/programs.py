"""Which program and which weights belong to the engines of a model: base, draft or encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edgellm.engines.families.audio_encoders import audio_program, audio_weights
from edgellm.engines.families.vision_encoders import vision_program, vision_weights
from edgellm.engines.model.audio import AudioConfig, ConformerConfig, RealtimeConfig
from edgellm.engines.model.config import DecoderConfig, DraftConfig, WeightSpec
from edgellm.engines.model.decoder import decoder_program, decoder_weights
from edgellm.engines.model.draft_decoder import draft_program, draft_weights
from edgellm.engines.model.expert_steps import for_kernels
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.segments import segment_of
from edgellm.engines.model.sharding import Share, sharded
from edgellm.engines.model.vision import VisionConfig

#: What an engine of `EngineShape.model` "base", "draft", "vision" or "audio" is a program of.
ModelConfig = DecoderConfig | DraftConfig | VisionConfig | AudioConfig

#: By the type of their configuration: the model's name, its program and its weights.
_MODELS: dict[type, tuple[str, Callable[[Any, EngineShape], Program], Callable[[Any], list[WeightSpec]]]] = {
    DecoderConfig: ("base", decoder_program, decoder_weights),
    DraftConfig: ("draft", draft_program, draft_weights),
    VisionConfig: ("vision", vision_program, vision_weights),
    **dict.fromkeys((AudioConfig, ConformerConfig, RealtimeConfig), ("audio", audio_program, audio_weights)),
}


def model_program(config: ModelConfig, shape: EngineShape, share: Share | None = None) -> Program:
    """The program of one engine, of the base the part that belongs to a rank's `share`; ValueError where `config` is
    not of the model that `shape` names, EngineError as `sharded` raises it."""
    if shape.segment:
        first, end = shape.segment
        return segment_of(for_kernels(model_program(config, replace(shape, segment=()))), (first, end)).program
    name, program, _ = _MODELS[type(config)]
    if name != shape.model:
        raise ValueError(f"{shape.name} is no engine of a {type(config).__name__}")
    whole = program(config, shape)
    return whole if share is None or name != "base" else sharded(whole, *share).program


def model_weights(config: ModelConfig) -> list[WeightSpec]:
    return _MODELS[type(config)][2](config)
