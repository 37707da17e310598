"""Qwen2.5-VL's language model: Qwen2's layers, at positions in time, height and width."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.vision_language import text_fields, with_image_tokens
from edgellm.engines.model.config import DecoderConfig

#: What Qwen's vision encoders have where the file does not say.
QWEN_IMAGE_TOKEN, QWEN_MERGE_SIZE = 151655, 2
_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}


def read_qwen2_5_vl(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """Biases on query, key and value, as in Qwen2."""
    config = read_decoder(text_fields(fields, _TEXT), dtype, mrope=((16, 24, 24), False), attention_bias=True)
    return with_image_tokens(config, fields, "image_token_id", QWEN_IMAGE_TOKEN, QWEN_MERGE_SIZE)


QWEN2_5_VL = Family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", read_qwen2_5_vl)
