"""The supported model families, and how a published `config.json` becomes a `DecoderConfig`."""

from __future__ import annotations

from typing import Any

from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families import gemma, hybrid, llama, mixtures, qwen, vision_language
from edgellm.engines.families.decoders import Family, filled
from edgellm.engines.families.fields import TAKE_PUBLISHED, ConfigFields
from edgellm.engines.formats.strict_formats import as_json
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.nearest import nearest

__all__ = ["FAMILIES", "decoder_config"]

_LISTED = (
    *(llama.LLAMA, qwen.QWEN2, qwen.QWEN3, llama.MISTRAL, llama.MINISTRAL3, llama.SEED_OSS, llama.CWM, llama.PHI3),
    *(llama.GRANITE, llama.SMOLLM3, llama.OLMO2, gemma.GEMMA, gemma.GEMMA2, gemma.GEMMA3, llama.STARCODER2),
    *(llama.OLMO3, llama.EXAONE4, mixtures.GRANITE4, llama.MINICPM, llama.ERNIE4_5, llama.HUNYUAN, hybrid.LFM2),
    *(hybrid.QWEN3_5_TEXT, mixtures.QWEN3_MOE, mixtures.OLMOE, mixtures.GRANITE_MOE, mixtures.LFM2_MOE),
    *(mixtures.GPT_OSS, mixtures.NEMOTRON_H, mixtures.QWEN3_5_MOE_TEXT, mixtures.QWEN3_5_MOE, mixtures.QWEN3_VL_MOE),
    *(qwen.QWEN2_5_VL, qwen.QWEN3_VL, vision_language.LLAVA, vision_language.GEMMA3_WITH_IMAGES),
    *(vision_language.MISTRAL3, hybrid.QWEN3_5, gemma.GEMMA4_TEXT, gemma.GEMMA4, gemma.GEMMA4_UNIFIED_TEXT),
    *(gemma.GEMMA4_UNIFIED, vision_language.QWEN3_ASR, vision_language.PALIGEMMA, vision_language.VOXTRAL),
    *(vision_language.QWEN2_AUDIO, vision_language.SMOLVLM, vision_language.IDEFICS3, vision_language.LFM2_VL),
    *(vision_language.INTERNVL, vision_language.MINICPMV4_6),
    vision_language.VOXTRAL_REALTIME,
)
#: Every family that is supported, by its `model_type`.
FAMILIES = {family.name: family for family in _LISTED}
_ARCHITECTURES = {family.architecture: family for family in _LISTED}
_ARCHITECTURES["Ernie4_5_ForCausalLM"] = llama.ERNIE4_5  # as its first files have it


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
                f"{nearest(str(model_type), config_json)}"
            )
        return FAMILIES[model_type]
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"config.json: architectures is {as_json(architectures)}, expected a list of names")
    if len(architectures) != 1 or architectures[0] not in _ARCHITECTURES:
        near = nearest(architectures[0] if model_type is None else str(model_type), config_json)
        raise UnsupportedModelError(f"config.json: the architecture is {', '.join(architectures)}; {supported}{near}")
    family = _ARCHITECTURES[architectures[0]]
    if model_type not in (None, family.name):
        raise CheckpointError(
            f"config.json contradicts itself: architectures is {as_json(architectures)}, model_type "
            f"{as_json(model_type)}. {TAKE_PUBLISHED}"
        )
    return family
