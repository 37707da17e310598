"""The supported model families, and how a published `config.json` becomes a `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgellm.engines.directories.strict_formats import as_json
from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families import vision_language
from edgellm.engines.families.decoders import read_llama, read_qwen2, read_qwen3
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.model.config import DecoderConfig

__all__ = ["ARCHITECTURES", "decoder_config"]

#: The families by the name of their architecture in `config.json`.
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "LlavaForConditionalGeneration": "llava",
}
_READERS: dict[str, Callable[[ConfigFields, str | None], DecoderConfig]] = {
    "llama": read_llama,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "qwen2_5_vl": vision_language.read_qwen2_5_vl,
    "qwen3_vl": vision_language.read_qwen3_vl,
    "llava": vision_language.read_llava,
}


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
    fields = ConfigFields(config_json, generation_config, family)
    config = _READERS[family](fields, dtype)
    fields.raise_problems()
    return config


def _family(config_json: dict[str, Any]) -> str:
    architectures, model_type = config_json.get("architectures"), config_json.get("model_type")
    supported = f"supported are {', '.join(ARCHITECTURES)}"
    if not architectures:
        if model_type is None:
            raise CheckpointError(f"config.json names neither architectures nor model_type; {supported}")
        if not isinstance(model_type, str) or model_type not in _READERS:
            raise UnsupportedModelError(
                f"config.json: model_type is {as_json(model_type)}, supported are {', '.join(_READERS)}"
            )
        return model_type
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"config.json: architectures is {as_json(architectures)}, expected a list of names")
    known = [ARCHITECTURES[name] for name in architectures if name in ARCHITECTURES]
    if len(known) != 1 or len(architectures) != 1:
        raise UnsupportedModelError(f"config.json: the architecture is {', '.join(architectures)}; {supported}")
    if model_type not in (None, known[0]):
        raise CheckpointError(
            f"config.json contradicts itself: architectures is {as_json(architectures)}, model_type "
            f"{as_json(model_type)}. Take config.json as it was published with the weights."
        )
    return known[0]
