"""Which program and which weights belong to the engines of a model: base, draft or vision encoder."""

from __future__ import annotations

from dataclasses import replace

from edgellm.engines.families.vision_encoders import vision_program, vision_weights
from edgellm.engines.model.config import DecoderConfig, DraftConfig, WeightSpec
from edgellm.engines.model.decoder import decoder_program, decoder_weights
from edgellm.engines.model.draft_decoder import draft_program, draft_weights
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.segments import segments_of
from edgellm.engines.model.vision import VisionConfig

#: What an engine of `EngineShape.model` "base", "draft" or "vision" is a program of.
ModelConfig = DecoderConfig | DraftConfig | VisionConfig

_MODELS: dict[type, str] = {DecoderConfig: "base", DraftConfig: "draft", VisionConfig: "vision"}


def model_program(config: ModelConfig, shape: EngineShape) -> Program:
    """The program of one engine; ValueError where `config` is not of the model that `shape` names."""
    if shape.segment is not None:
        return segments_of(model_program(config, replace(shape, segment=None)))[shape.segment].program
    if _MODELS.get(type(config)) != shape.model:
        raise ValueError(f"{shape.name} is no engine of a {type(config).__name__}")
    if isinstance(config, DraftConfig):
        return draft_program(config, shape)
    return decoder_program(config, shape) if isinstance(config, DecoderConfig) else vision_program(config, shape)


def model_weights(config: ModelConfig) -> list[WeightSpec]:
    """The weights that a model's checkpoint fills."""
    if isinstance(config, DraftConfig):
        return draft_weights(config)
    return decoder_weights(config) if isinstance(config, DecoderConfig) else vision_weights(config)
