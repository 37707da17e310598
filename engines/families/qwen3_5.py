"""Qwen3.5: the gated delta rule in three of four layers, gated attention with a partial rotary embedding in the others.

Its checkpoints have Qwen3-VL's vision encoder, whose features go in at the image tokens alone, and a draft head, whose
tensors the decoder leaves alone.
"""

from __future__ import annotations

from edgellm.engines.families.decoders import Family, biases, read_decoder, rotary_share
from edgellm.engines.families.fields import ConfigFields, layer_count, read_conv_width
from edgellm.engines.families.qwen import QWEN_MERGE_SIZE
from edgellm.engines.families.vision_language import text_fields, with_image_tokens
from edgellm.engines.model.config import DecoderConfig

_TYPES = {"linear_attention": "delta", "full_attention": "attention"}
#: What the class of the whole model takes for the image token.
_IMAGE_TOKEN = 248056
#: What the class of the text model takes for what a file leaves out.
_TEXT = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def read_qwen3_5_text(fields: ConfigFields) -> DecoderConfig:
    """Norms by 1 + weight, with those on query and key."""
    gate = fields.values.get("attn_output_gate")
    if gate not in (None, True):
        fields.refuse("attn_output_gate", gate, "supported is attention with a gate")
    return read_decoder(
        fields,
        mrope=((11, 11, 10), True),
        rotary_share=rotary_share(fields, 0.25),
        **biases(fields),
        qk_norm=True,
        norm_offset=1.0,
        attention_gate=True,
        layer_kinds=fields.layer_kinds(_TYPES, _types_by_interval(fields)),
        conv_width=read_conv_width(fields, "linear_conv_kernel_dim"),
        delta_heads=_delta_heads(fields),
        naming="qwen3_5",
    )


def read_qwen3_5(fields: ConfigFields) -> DecoderConfig:
    """The language model inside a whole checkpoint; without a `vision_config` its image token is one like any other."""
    config, vision = read_qwen3_5_text(text_fields(fields, _TEXT)), fields.values.get("vision_config")
    if vision is None:
        return config
    if not isinstance(vision, dict):
        fields.expect("vision_config", vision, "an object")
    return with_image_tokens(config, fields, "image_token_id", _IMAGE_TOKEN, QWEN_MERGE_SIZE)


def _types_by_interval(fields: ConfigFields) -> list[str]:
    """Every `full_attention_interval`-th layer is attention."""
    interval = fields.size("full_attention_interval")
    last = ["linear_attention"] * (interval - 1) + ["full_attention"] if interval else [""]
    return [last[index % len(last)] for index in range(layer_count(fields))]


def _delta_heads(fields: ConfigFields) -> tuple[int, int, int, int]:
    """The numbers of key and value heads, and the sizes of both."""
    keys, values = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    if keys and values % keys:
        fields.wrong.append(
            f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}: value heads share keys"
        )
    return keys, values, fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")


QWEN3_5_TEXT = Family("qwen3_5_text", "Qwen3_5ForCausalLM", read_qwen3_5_text, _TEXT)
QWEN3_5 = Family("qwen3_5", "Qwen3_5ForConditionalGeneration", read_qwen3_5)
