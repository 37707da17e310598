"""The supported model families, and how a published `config.json` becomes a `DecoderConfig`."""

from __future__ import annotations

from typing import Any

from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families.decoders import Family, filled
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.gemma import GEMMA, GEMMA3
from edgellm.engines.families.hybrid import LFM2, QWEN3_5, QWEN3_5_TEXT
from edgellm.engines.families.llama import (
    CWM,
    ERNIE4_5,
    GRANITE,
    GRANITE4,
    HUNYUAN,
    LLAMA,
    MINICPM,
    MINISTRAL3,
    MISTRAL,
    PHI3,
    SEED_OSS,
    SMOLLM3,
    STARCODER2,
)
from edgellm.engines.families.mixtures import (
    GPT_OSS,
    GRANITE_MOE,
    LFM2_MOE,
    OLMOE,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_MOE,
)
from edgellm.engines.families.olmo import EXAONE4, OLMO2, OLMO3
from edgellm.engines.families.qwen import QWEN2, QWEN2_5_VL, QWEN3, QWEN3_VL
from edgellm.engines.families.vision_language import GEMMA3_WITH_IMAGES, LLAVA, MISTRAL3
from edgellm.engines.formats.strict_formats import as_json
from edgellm.engines.model.config import DecoderConfig

__all__ = ["FAMILIES", "decoder_config"]

#: Every family that is supported, by its `model_type`.
FAMILIES = {
    family.name: family
    for family in (
        *(LLAMA, QWEN2, QWEN3, MISTRAL, MINISTRAL3, SEED_OSS, CWM, PHI3, GRANITE, SMOLLM3, OLMO2, GEMMA, GEMMA3),
        *(STARCODER2, OLMO3, EXAONE4, GRANITE4, MINICPM, ERNIE4_5, HUNYUAN, LFM2, QWEN3_5_TEXT),
        *(QWEN3_MOE, OLMOE, GRANITE_MOE, LFM2_MOE, GPT_OSS, QWEN3_5_MOE_TEXT, QWEN3_5_MOE),
        *(QWEN2_5_VL, QWEN3_VL, LLAVA, GEMMA3_WITH_IMAGES, MISTRAL3, QWEN3_5),
    )
}
_ARCHITECTURES = {family.architecture: family for family in FAMILIES.values()}
_ARCHITECTURES["Ernie4_5_ForCausalLM"] = ERNIE4_5  # as its first files have it


def decoder_config(
    config_json: dict[str, Any], generation_config: dict[str, Any] | None = None, dtype: str | None = None
) -> DecoderConfig:
    """The decoder that a checkpoint's `config.json` describes.

    `generation_config` is the content of `generation_config.json`, whose end-of-sequence ids take precedence. `dtype`
    ("float16", "bfloat16" or "float32") is what the tensors have, used where `config.json` does not say. Raises
    UnsupportedModelError for an unknown family or an unsupported feature, CheckpointError for fields that are missing,
    of a wrong type or inconsistent; either lists all problems.
    """
    family = _family(config_json)
    fields = ConfigFields(filled(config_json, family.defaults), generation_config, family.name, dtype)
    config = family.read(fields)
    fields.raise_problems()
    return config


def _family(config_json: dict[str, Any]) -> Family:
    architectures, model_type = config_json.get("architectures"), config_json.get("model_type")
    supported = f"supported are {', '.join(_ARCHITECTURES)}"
    if not architectures:
        if model_type is None:
            raise CheckpointError(f"config.json names neither architectures nor model_type; {supported}")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise UnsupportedModelError(
                f"config.json: model_type is {as_json(model_type)}, supported are {', '.join(FAMILIES)}"
            )
        return FAMILIES[model_type]
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"config.json: architectures is {as_json(architectures)}, expected a list of names")
    if len(architectures) != 1 or architectures[0] not in _ARCHITECTURES:
        raise UnsupportedModelError(f"config.json: the architecture is {', '.join(architectures)}; {supported}")
    family = _ARCHITECTURES[architectures[0]]
    if model_type not in (None, family.name):
        raise CheckpointError(
            f"config.json contradicts itself: architectures is {as_json(architectures)}, model_type "
            f"{as_json(model_type)}. Take config.json as it was published with the weights."
        )
    return family
