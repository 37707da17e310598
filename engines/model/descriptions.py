"""Which description and which weights belong to the engines of a model: base, draft or vision encoder.

Vision encoders are described by `edgellm.multimodal`, which this package must not import: it registers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import EngineError
from edgellm.engines.model.config import DecoderConfig, EngineShape, WeightSpec
from edgellm.engines.model.decoder import DecoderDescription, decoder_weights
from edgellm.engines.model.draft_config import DraftConfig
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


@dataclass(frozen=True)
class VisionDescriber:
    """Who describes vision encoders.

    `module` is the one that registers it when it is imported. `read` gives the encoder of a checkpoint, its tensors
    checked, None for a text-only model; `describe` the description of an engine, `weights` what the engines take.
    """

    module: str
    read: Callable[[Checkpoint], VisionConfig | None]
    describe: Callable[[Operations[Any], VisionConfig, EngineShape], Description]
    weights: Callable[[VisionConfig], list[WeightSpec]]


_VISION: list[VisionDescriber] = []


def register_vision(describer: VisionDescriber) -> None:
    """Make a describer known, in place of an earlier one."""
    _VISION[:] = [describer]


def vision_describer() -> VisionDescriber:
    """The one that is registered; EngineError where there is none."""
    if not _VISION:
        raise EngineError("nobody describes vision encoders here: import edgellm.engines.families.vision_config first")
    return _VISION[0]


def describing_modules() -> list[str]:
    """The modules that another process must import to describe the same models."""
    return [describer.module for describer in _VISION]


def import_describing_modules(names: Sequence[str]) -> None:
    """Import what `describing_modules` gave in another process."""
    for name in names:
        import_module(name)


def model_description(operations: Operations[Tensor], config: ModelConfig, shape: EngineShape) -> Description:
    """The description of one engine; ValueError where `config` is not of the model that `shape` names."""
    if _MODELS.get(type(config)) != shape.model:
        raise ValueError(f"{shape.name} cannot be described by a {type(config).__name__}")
    if isinstance(config, DraftConfig):
        return DraftDescription(operations, config, shape)
    if isinstance(config, DecoderConfig):
        return DecoderDescription(operations, config, shape)
    return vision_describer().describe(operations, config, shape)


def model_weights(config: ModelConfig) -> list[WeightSpec]:
    """The weights that a model's checkpoint fills."""
    if isinstance(config, DraftConfig):
        return draft_weights(config)
    return decoder_weights(config) if isinstance(config, DecoderConfig) else vision_describer().weights(config)
