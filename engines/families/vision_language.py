"""The language model inside a multimodal checkpoint: its fields, and what they say of images.

They stand in `text_config`, in Qwen2.5-VL's first releases at the top level. A file leaves out what equals the defaults
of the class that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgellm.engines.families.decoders import Family, filled
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.engines.model.config import DecoderConfig

#: Fields of the whole checkpoint, which count more than those of its part.
_OF_THE_WHOLE = ("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id")


def text_fields(fields: ConfigFields, defaults: Mapping[str, Any]) -> ConfigFields:
    """The language model's fields; what is wrong with them is noted in `fields`."""
    top = {key: value for key, value in fields.values.items() if value is not None}
    nested = top.get("text_config", {})
    if not isinstance(nested, dict):
        fields.expect("text_config", nested, "an object")
        nested = {}
    given = nested | {key: top[key] for key in _OF_THE_WHOLE if key in top} if nested else top
    text = ConfigFields(
        filled(given, defaults, is_part=True), fields.generation_values, fields.family, fields.tensors_dtype
    )
    text.wrong, text.unsupported = fields.wrong, fields.unsupported
    return text


def inner_family(fields: ConfigFields, *families: Family) -> Family:
    """Which of the families the language model is of; the first where the file does not say, or names another."""
    nested, known = fields.values.get("text_config"), {family.name: family for family in families}
    kind = nested.get("model_type", families[0].name) if isinstance(nested, dict) else families[0].name
    if isinstance(kind, str) and kind in known:
        return known[kind]
    fields.refuse("text_config: model_type", kind, f"supported are {', '.join(known)}")
    return families[0]


def vision_fields(fields: ConfigFields) -> dict[str, Any]:
    """The vision encoder's fields, as they are."""
    values = fields.values.get("vision_config")
    return values if isinstance(values, dict) else {}


def with_image_tokens(
    config: DecoderConfig, fields: ConfigFields, key: str, default: int, merge_size: int | None = None
) -> DecoderConfig:
    """With the id of image tokens, and how many patches become one (`merge_size` where the file does not say)."""
    token = fields.token_id(key, default, largest=max(0, config.vocab_size - 1))
    if merge_size is not None:
        found = vision_fields(fields).get("spatial_merge_size")
        if found is not None and (not is_integer(found) or found < 1):
            fields.expect("vision_config: spatial_merge_size", found, "a whole number above 0")
        elif found is not None:
            merge_size = found
    return replace(config, image_token_id=token, spatial_merge_size=merge_size or 1)
