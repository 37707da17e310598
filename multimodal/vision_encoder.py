"""The descriptions of all vision families by their names."""

from __future__ import annotations

from edgellm.engines.model.config import EngineShape, WeightSpec
from edgellm.engines.model.operations import Operations, Tensor
from edgellm.engines.model.vision import VisionConfig
from edgellm.multimodal.families import qwen2_5_vl, qwen3_vl
from edgellm.engines.families import vision_encoders as llava
from edgellm.engines.families.vision_layers import VisionDescription

_DESCRIPTIONS = {
    "qwen2_5_vl": (qwen2_5_vl.Qwen2_5VLDescription, qwen2_5_vl.weights),
    "qwen3_vl": (qwen3_vl.Qwen3VLDescription, qwen3_vl.weights),
    "llava": (llava.LlavaDescription, llava.weights),
}


def vision_description(
    operations: Operations[Tensor], config: VisionConfig, shape: EngineShape
) -> VisionDescription[Tensor]:
    """The description of one vision engine."""
    return _DESCRIPTIONS[config.family][0](operations, config, shape)


def vision_weights(config: VisionConfig) -> list[WeightSpec]:
    """The weights that the engines take."""
    return _DESCRIPTIONS[config.family][1](config)


def host_weights(config: VisionConfig) -> list[WeightSpec]:
    """Weights that are read on the host instead: Qwen3-VL's table of positions."""
    return [qwen3_vl.position_table(config)] if config.family == "qwen3_vl" else []
