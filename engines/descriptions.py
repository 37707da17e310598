"""Which description and which weights belong to the engines of a model, base or draft."""

from __future__ import annotations

from edgellm.engines.decoder import DecoderDescription, decoder_weights
from edgellm.engines.decoder_config import DecoderConfig, EngineShape, WeightSpec
from edgellm.engines.draft_config import DraftConfig
from edgellm.engines.draft_decoder import DraftDescription, draft_weights
from edgellm.engines.operations import Operations, Tensor

#: What an engine of `EngineShape.model` "base" or "draft" is described by.
ModelConfig = DecoderConfig | DraftConfig


def model_description(
    operations: Operations[Tensor], config: ModelConfig, shape: EngineShape
) -> DecoderDescription[Tensor] | DraftDescription[Tensor]:
    """The description of one engine; ValueError where `config` is not of the model that `shape` names."""
    if isinstance(config, DraftConfig) != (shape.model == "draft"):
        raise ValueError(f"{shape.name} cannot be described by a {type(config).__name__}")
    if isinstance(config, DraftConfig):
        return DraftDescription(operations, config, shape)
    return DecoderDescription(operations, config, shape)


def model_weights(config: ModelConfig) -> list[WeightSpec]:
    """The weights that a model's checkpoint fills."""
    return draft_weights(config) if isinstance(config, DraftConfig) else decoder_weights(config)
