"""LLaVA's language model, which is one of another family as it is."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.llama import LLAMA
from edgellm.engines.families.mistral import MISTRAL
from edgellm.engines.families.qwen import QWEN2, QWEN3
from edgellm.engines.families.vision_language import inner_family, text_fields, with_image_tokens
from edgellm.engines.model.config import DecoderConfig

_IMAGE_TOKEN = 32000


def read_llava(fields: ConfigFields) -> DecoderConfig:
    """An image's tokens stand at consecutive positions."""
    family = inner_family(fields, LLAMA, QWEN2, QWEN3, MISTRAL)
    key = "image_token_index" if fields.values.get("image_token_index") is not None else "image_token_id"
    config = family.read(text_fields(fields, family.defaults))
    return with_image_tokens(config, fields, key, _IMAGE_TOKEN)


LLAVA = Family("llava", "LlavaForConditionalGeneration", read_llava)
