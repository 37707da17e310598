"""Qwen3-VL's language model: Qwen3's layers, at interleaved positions in time, height and width."""

from __future__ import annotations

from dataclasses import replace

from edgellm.engines.families.decoders import Family
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.qwen2_5_vl import QWEN_IMAGE_TOKEN, QWEN_MERGE_SIZE
from edgellm.engines.families.qwen3 import QWEN3, read_qwen3
from edgellm.engines.families.vision_language import text_fields, vision_fields, with_image_tokens
from edgellm.engines.formats.strict_formats import as_json
from edgellm.engines.model.config import DecoderConfig

_TEXT = {**QWEN3.defaults, "max_position_embeddings": 128000, "rope_theta": 500000.0}
_DEEPSTACK_LAYERS = 3


def read_qwen3_vl(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """Features of the images are added to the first layers' outputs."""
    config = read_qwen3(text_fields(fields, _TEXT), dtype, mrope=((24, 20, 20), True))
    taps = vision_fields(fields).get("deepstack_visual_indexes")
    if taps is not None and not isinstance(taps, list):
        fields.wrong.append(f"vision_config: deepstack_visual_indexes is {as_json(taps)}, expected a list of layers")
        taps = None
    count = _DEEPSTACK_LAYERS if taps is None else len(taps)
    if count > config.num_layers > 0:
        fields.wrong.append(f"features of {count} layers are added to {config.num_layers} layers, expected no more")
    config = with_image_tokens(config, fields, "image_token_id", QWEN_IMAGE_TOKEN, QWEN_MERGE_SIZE)
    return replace(config, deepstack_layers=count)


QWEN3_VL = Family("qwen3_vl", "Qwen3VLForConditionalGeneration", read_qwen3_vl)
