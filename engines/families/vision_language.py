"""Models with images or speech whose language model is one of another family: LLaVA, Gemma 3 with images, Mistral 3,
SmolVLM, LFM2-VL, InternVL, MiniCPM-V, Qwen3-ASR, Voxtral, Qwen2-Audio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from edgellm.engines.families.decoders import Family, inner_family, text_fields, with_image_tokens
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.gemma import GEMMA, GEMMA2, GEMMA3
from edgellm.engines.families.hybrid import LFM2, QWEN3_5_DEFAULTS, QWEN3_5_TEXT
from edgellm.engines.families.llama import LLAMA, MINISTRAL3, MISTRAL
from edgellm.engines.families.mixtures import GPT_OSS, QWEN3_MOE
from edgellm.engines.families.pixtral import MISTRAL3_IMAGE_TOKEN
from edgellm.engines.families.qwen import QWEN2, QWEN3
from edgellm.engines.families.tiled_vision import INTERNVL_IMAGE_TOKEN, LFM2_VL_IMAGE_TOKEN, SMOLVLM_IMAGE_TOKEN
from edgellm.engines.families.vision_config import (
    GEMMA3_IMAGE_TOKEN,
    GEMMA3_TOKENS,
    PALIGEMMA_IMAGE_TOKEN,
    read_vision_config,
)
from edgellm.engines.model.config import DecoderConfig

_LLAVA_IMAGE_TOKEN = 32000
#: Qwen3 inside has the sizes of the larger Qwen3-ASR where the file does not say.
_ASR = {
    **QWEN3.defaults,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65536,
}
#: Llama inside has those of Voxtral Mini.
_VOXTRAL = {
    **LLAMA.defaults,
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000000.0,
}
#: Mistral inside has the sizes of Mistral Small 3.1, with no window, where the file does not say.
_SMALL = {
    **MISTRAL.defaults,
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000000.0,
    "sliding_window": None,
}


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads")
_GEMMA_CLASS = {"num_attention_heads": 8, "max_position_embeddings": 8192, "bos_token_id": 2, "eos_token_id": 1}
#: Gemma inside PaliGemma has what its class has where the file does not say.
_PALIGEMMA_TEXT = {
    name: {**_GEMMA_CLASS, "rms_norm_eps": 1e-6, **dict(zip(_SIZES, sizes, strict=True))}
    for name, sizes in {"gemma": (257152, 2048, 16384, 18, 1), "gemma2": (256000, 2304, 9216, 26, 4)}.items()
}


def _read_qwen3_asr(fields: ConfigFields) -> DecoderConfig:
    if "thinker_config" in fields.values:
        fields.refuse("thinker_config", {}, "supported is the layout of transformers: Qwen/Qwen3-ASR-1.7B-hf")
    return _read_with_speech(fields, QWEN3, _ASR, "audio_token_id", 151676)


def _read_with_speech(
    fields: ConfigFields, family: Family, defaults: Mapping[str, Any], key: str, token: int
) -> DecoderConfig:
    """A language model of the `family`; tokens of speech stand at consecutive positions."""
    config = inner_family(fields, family).read(text_fields(fields, defaults))
    return replace(config, audio_token_id=fields.token_id(key, token, largest=max(0, config.vocab_size - 1)))


def _read_mistral3(fields: ConfigFields) -> DecoderConfig:
    """An image's tokens stand at consecutive positions, with a token behind each of its rows."""
    family = inner_family(fields, MISTRAL, MINISTRAL3)
    config = family.read(text_fields(fields, _SMALL if family is MISTRAL else family.defaults))
    return with_image_tokens(config, fields, fields.image_key, MISTRAL3_IMAGE_TOKEN)


def _read_llava(fields: ConfigFields) -> DecoderConfig:
    """An image's tokens stand at consecutive positions."""
    family = inner_family(fields, LLAMA, QWEN2, QWEN3, MISTRAL)
    config = family.read(text_fields(fields, family.defaults))
    return with_image_tokens(config, fields, fields.image_key, _LLAVA_IMAGE_TOKEN)


def _read_gemma3_with_images(fields: ConfigFields) -> DecoderConfig:
    """Each image has `mm_tokens_per_image` tokens, each of which sees all of them."""
    config = inner_family(fields, GEMMA3).read(text_fields(fields, GEMMA3.defaults))
    config = with_image_tokens(config, fields, "image_token_index", GEMMA3_IMAGE_TOKEN)
    return replace(config, image_tokens=fields.size("mm_tokens_per_image", GEMMA3_TOKENS))


def _read_paligemma(fields: ConfigFields) -> DecoderConfig:
    """All of a prompt sees itself; its images have one token for each patch."""
    family = inner_family(fields, GEMMA, GEMMA2)
    text = text_fields(fields, {**family.defaults, **_PALIGEMMA_TEXT[family.name]})
    if text.values.pop("use_bidirectional_attention", True) is False:
        fields.refuse("text_config: use_bidirectional_attention", False, "supported is true")
    vision = read_vision_config(fields.values, fields.tensors_dtype)
    tokens = 0 if vision is None else vision.tower_rows
    config = with_image_tokens(family.read(text), fields, fields.image_key, PALIGEMMA_IMAGE_TOKEN)
    return replace(config, image_tokens=tokens, prefix_attention=True)


def _read_tiled(fields: ConfigFields, token: int, families: tuple[Family, ...]) -> DecoderConfig:
    """A language model of one of the families; an image's tokens stand at consecutive positions."""
    family = inner_family(fields, *families)
    return with_image_tokens(family.read(text_fields(fields, family.defaults)), fields, "image_token_id", token)


def _read_minicpmv4_6(fields: ConfigFields) -> DecoderConfig:
    """Qwen3.5's language model; an image's tokens stand at consecutive positions."""
    config = inner_family(fields, QWEN3_5_TEXT).read(text_fields(fields, QWEN3_5_DEFAULTS))
    config = replace(config, mrope_section=(), mrope_interleaved=False)
    return with_image_tokens(config, fields, "image_token_id", None)


_read_voxtral = partial(_read_with_speech, family=LLAMA, defaults=_VOXTRAL, key="audio_token_id", token=24)
_read_qwen2_audio = partial(
    _read_with_speech, family=QWEN2, defaults=QWEN2.defaults, key="audio_token_index", token=151646
)
_read_smolvlm = partial(_read_tiled, token=SMOLVLM_IMAGE_TOKEN, families=(LLAMA,))
_read_lfm2_vl = partial(_read_tiled, token=LFM2_VL_IMAGE_TOKEN, families=(LFM2,))
_read_internvl = partial(_read_tiled, token=INTERNVL_IMAGE_TOKEN, families=(QWEN2, QWEN3, LLAMA, QWEN3_MOE, GPT_OSS))
LLAVA = Family("llava", "LlavaForConditionalGeneration", _read_llava)
PALIGEMMA = Family("paligemma", "PaliGemmaForConditionalGeneration", _read_paligemma)
GEMMA3_WITH_IMAGES = Family("gemma3", "Gemma3ForConditionalGeneration", _read_gemma3_with_images)
SMOLVLM = Family("smolvlm", "SmolVLMForConditionalGeneration", _read_smolvlm)
IDEFICS3 = Family("idefics3", "Idefics3ForConditionalGeneration", _read_smolvlm)
LFM2_VL = Family("lfm2_vl", "Lfm2VlForConditionalGeneration", _read_lfm2_vl)
MINICPMV4_6 = Family("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration", _read_minicpmv4_6)
INTERNVL = Family("internvl", "InternVLForConditionalGeneration", _read_internvl)
MISTRAL3 = Family("mistral3", "Mistral3ForConditionalGeneration", _read_mistral3)
QWEN3_ASR = Family("qwen3_asr", "Qwen3ASRForConditionalGeneration", _read_qwen3_asr, {"tie_word_embeddings": True})
VOXTRAL = Family("voxtral", "VoxtralForConditionalGeneration", _read_voxtral)
QWEN2_AUDIO = Family("qwen2_audio", "Qwen2AudioForConditionalGeneration", _read_qwen2_audio)
