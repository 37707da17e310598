"""The language model inside a multimodal checkpoint: Qwen2.5-VL's and Qwen3-VL's own, and LLaVA's, which is any other.

Its fields stand in `text_config`, in Qwen2.5-VL's first releases at the top level. A file leaves out what equals the
defaults of the class that wrote it, so these are known here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edgellm.engines.directories.strict_formats import as_json, is_integer
from edgellm.engines.families.decoders import QWEN3_HEAD_DIM, read_decoder, read_llama, read_qwen2, read_qwen3
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.model.config import DecoderConfig

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_QWEN2 = _LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_QWEN2_5_VL = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}
_QWEN3_VL = _QWEN2 | {"max_position_embeddings": 128000, "rope_theta": 500000.0}
#: What LLaVA's language model may be: its reader, and what its files leave out.
_INSIDE: dict[str, tuple[Callable[[ConfigFields, str | None], DecoderConfig], dict[str, Any]]] = {
    "llama": (read_llama, _LLAMA | {"bos_token_id": 1, "eos_token_id": 2}),
    "qwen2": (read_qwen2, _QWEN2),
    "qwen3": (read_qwen3, _QWEN2),
}
#: Fields of the whole checkpoint, which count more than those of its part.
_OF_THE_WHOLE = ("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")
_DEEPSTACK_LAYERS = 3
_QWEN_MERGE_SIZE = 2
_QWEN_IMAGE_TOKEN, _LLAVA_IMAGE_TOKEN = 151655, 32000


def read_qwen2_5_vl(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """Qwen2's layers, at positions in time, height and width."""
    text = _text_fields(fields, _QWEN2_5_VL)
    config = read_decoder(text, dtype, attention_bias=True, default_mrope_section=(16, 24, 24))
    return _with_image_tokens(config, fields, "image_token_id", _QWEN_IMAGE_TOKEN, merge_size=_QWEN_MERGE_SIZE)


def read_qwen3_vl(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """Qwen3's layers, at interleaved positions, with features of the images added to the first layers' outputs."""
    text = _text_fields(fields, _QWEN3_VL)
    bias = text.switch("attention_bias")
    config = read_decoder(
        text,
        dtype,
        default_head_dim=QWEN3_HEAD_DIM,
        attention_bias=bias,
        attention_output_bias=bias,
        qk_norm=True,
        default_mrope_section=(24, 20, 20),
        mrope_interleaved=True,
    )
    taps = _vision_fields(fields).get("deepstack_visual_indexes")
    if taps is not None and not isinstance(taps, list):
        fields.wrong.append(f"vision_config: deepstack_visual_indexes is {as_json(taps)}, expected a list of layers")
        taps = None
    count = _DEEPSTACK_LAYERS if taps is None else len(taps)
    if count > config.num_layers > 0:
        fields.wrong.append(f"features of {count} layers are added to {config.num_layers} layers, expected no more")
    config = _with_image_tokens(config, fields, "image_token_id", _QWEN_IMAGE_TOKEN, merge_size=_QWEN_MERGE_SIZE)
    return replace(config, deepstack_layers=count)


def read_llava(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """A language model of another family as it is; an image's tokens stand at consecutive positions."""
    nested = fields.values.get("text_config")
    kind = nested.get("model_type", "llama") if isinstance(nested, dict) else "llama"
    if kind not in _INSIDE:
        fields.unsupported.append(f"text_config: model_type is {as_json(kind)}, supported are {', '.join(_INSIDE)}")
        kind = "llama"
    read, defaults = _INSIDE[kind]
    key = "image_token_index" if fields.values.get("image_token_index") is not None else "image_token_id"
    return _with_image_tokens(read(_text_fields(fields, defaults), dtype), fields, key, _LLAVA_IMAGE_TOKEN)


def _text_fields(fields: ConfigFields, defaults: dict[str, Any]) -> ConfigFields:
    """The language model's fields; what is wrong with them is noted in `fields`."""
    top = {key: value for key, value in fields.values.items() if value is not None}
    nested = top.get("text_config", {})
    if not isinstance(nested, dict):
        fields.wrong.append(f"text_config is {as_json(nested)}, expected an object")
        nested = {}
    given = {key: value for key, value in nested.items() if value is not None}
    whole = {key: top[key] for key in _OF_THE_WHOLE if key in top}
    text = ConfigFields(defaults | (given | whole if given else top), fields.generation_values, fields.family)
    text.wrong, text.unsupported = fields.wrong, fields.unsupported
    return text


def _vision_fields(fields: ConfigFields) -> dict[str, Any]:
    values = fields.values.get("vision_config")
    return values if isinstance(values, dict) else {}


def _with_image_tokens(
    config: DecoderConfig, fields: ConfigFields, key: str, default: int, merge_size: int | None = None
) -> DecoderConfig:
    """With the id of image tokens, and how many patches become one (`merge_size` where the file does not say)."""
    token = fields.values.get(key)
    token = default if token is None else token
    if not is_integer(token) or not 0 <= token < max(1, config.vocab_size):
        fields.wrong.append(f"{key} is {as_json(token)}, expected a token id from 0 to {config.vocab_size - 1}")
    if merge_size is not None:
        found = _vision_fields(fields).get("spatial_merge_size")
        if found is not None and (not is_integer(found) or found < 1):
            fields.wrong.append(
                f"vision_config: spatial_merge_size is {as_json(found)}, expected a whole number above 0"
            )
        elif found is not None:
            merge_size = found
    return replace(config, image_token_id=token, spatial_merge_size=merge_size or 1)
