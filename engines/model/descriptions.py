"""Which description and which weights belong to the engines of a model: base, draft or vision encoder."""

from __future__ import annotations

from typing import Protocol

from edgellm.engines.model.config import DecoderConfig, DraftConfig, EngineShape, WeightSpec
from edgellm.engines.model.decoder import DecoderDescription, decoder_weights
from edgellm.engines.model.draft_decoder import DraftDescription, draft_weights
from edgellm.engines.model.operations import Operations, Tensor
from edgellm.engines.model.vision import VisionConfig

#: What an engine of `EngineShape.model` "base", "draft" or "vision" is described by.
ModelConfig = DecoderConfig | DraftConfig | VisionConfig

_MODELS: dict[type, str] = {DecoderConfig: "base", DraftConfig: "draft", VisionConfig: "vision"}


class Description(Protocol):
    """A model and an engine shape, to be described to an interpreter of operations."""

    def describe(self) -> None:
        """Declare inputs, compute, declare outputs."""


def model_description(operations: Operations[Tensor], config: ModelConfig, shape: EngineShape) -> Description:
    """The description of one engine; ValueError where `config` is not of the model that `shape` names."""
    if _MODELS.get(type(config)) != shape.model:
        raise ValueError(f"{shape.name} cannot be described by a {type(config).__name__}")
    if isinstance(config, DraftConfig):
        return DraftDescription(operations, config, shape)
    if isinstance(config, DecoderConfig):
        return DecoderDescription(operations, config, shape)
    from edgellm.engines.families.vision_encoders import vision_description  # text needs none

    return vision_description(operations, config, shape)


def model_weights(config: ModelConfig) -> list[WeightSpec]:
    """The weights that a model's checkpoint fills."""
    if isinstance(config, DraftConfig):
        return draft_weights(config)
    if isinstance(config, DecoderConfig):
        return decoder_weights(config)
    from edgellm.engines.families.vision_encoders import vision_weights  # text needs none

    return vision_weights(config)
