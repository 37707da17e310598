"""Models with images or speech whose language model is one of another family: LLaVA, Gemma 3 with images, Mistral 3,
SmolVLM, LFM2-VL, InternVL, MiniCPM-V, Qwen3-ASR, Voxtral, Voxtral Realtime, Qwen2-Audio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from edgellm.engines.families.decoders import (
    Family,
    class_defaults,
    family_of,
    inner_family,
    read_inner,
    text_fields,
    with_image_tokens,
)
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.gemma import GEMMA, GEMMA2, GEMMA3
from edgellm.engines.families.hybrid import LFM2, QWEN3_5_TEXT
from edgellm.engines.families.llama import LLAMA, MINISTRAL3, MISTRAL
from edgellm.engines.families.mixtures import GPT_OSS, QWEN3_MOE
from edgellm.engines.families.qwen import QWEN2, QWEN3
from edgellm.engines.families.vision_config import read_vision_config
from edgellm.engines.model.config import DecoderConfig


@family_of("qwen3_asr", "Qwen3ASRForConditionalGeneration")
def QWEN3_ASR(fields: ConfigFields) -> DecoderConfig:
    if "thinker_config" in fields.values:
        fields.refuse("thinker_config", {}, "supported is the layout of transformers: Qwen/Qwen3-ASR-1.7B-hf")
    return _read_with_speech(fields, replace(QWEN3, like="qwen3_asr_text"))


def _read_with_speech(fields: ConfigFields, family: Family, key: str = "audio_token_id") -> DecoderConfig:
    """A language model of the `family`; tokens of speech stand at consecutive positions."""
    config = read_inner(fields, family)
    return replace(config, audio_token_id=fields.token_id(key, largest=max(0, config.vocab_size - 1)))


def _with_images(*families: Family) -> Callable[[ConfigFields], DecoderConfig]:
    """What reads a language model of one of the families, with an image's tokens at consecutive positions (of Mistral 3
    with a token behind each of its rows)."""
    return lambda fields: with_image_tokens(read_inner(fields, *families), fields)


@family_of("gemma3", "Gemma3ForConditionalGeneration")
def GEMMA3_WITH_IMAGES(fields: ConfigFields) -> DecoderConfig:
    """Each image has `mm_tokens_per_image` tokens, each of which sees all of them."""
    config = with_image_tokens(read_inner(fields, GEMMA3), fields)
    return replace(config, image_tokens=fields.size("mm_tokens_per_image"))


@family_of("paligemma", "PaliGemmaForConditionalGeneration")
def PALIGEMMA(fields: ConfigFields) -> DecoderConfig:
    """All of a prompt sees itself; its images have one token for each patch."""
    family = inner_family(fields, GEMMA, GEMMA2)
    text = text_fields(fields, class_defaults(f"paligemma_text_{family.name}"))
    if text.values.pop("use_bidirectional_attention", True) is False:
        fields.refuse("text_config: use_bidirectional_attention", False, "supported is true")
    vision = read_vision_config(fields.values, fields.tensors_dtype)
    tokens = 0 if vision is None else vision.tower_rows
    config = with_image_tokens(family.read(text), fields)
    return replace(config, image_tokens=tokens, prefix_attention=True)


@family_of("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration")
def MINICPMV4_6(fields: ConfigFields) -> DecoderConfig:
    """Qwen3.5's language model; an image's tokens stand at consecutive positions."""
    config = replace(read_inner(fields, QWEN3_5_TEXT), mrope_section=(), mrope_interleaved=False)
    return with_image_tokens(config, fields)


def _read_voxtral_realtime(fields: ConfigFields) -> DecoderConfig:
    """Sound is added to the embeddings of all tokens, also of those that are written."""
    text = text_fields(fields, class_defaults("voxtral_realtime_text"))
    text.ignore("model_type")
    config = MISTRAL.read(text)
    token = fields.token_id("audio_token_id", largest=max(0, config.vocab_size - 1))
    return replace(config, audio_token_id=token, adds_sound=True)


_read_mistral3 = _with_images(replace(MISTRAL, like="mistral3_text"), MINISTRAL3)
_read_voxtral = partial(_read_with_speech, family=replace(LLAMA, like="voxtral_text"))
_read_qwen2_audio = partial(_read_with_speech, family=QWEN2, key="audio_token_index")
LLAVA = Family("llava", "LlavaForConditionalGeneration", _with_images(LLAMA, QWEN2, QWEN3, MISTRAL))
SMOLVLM = Family("smolvlm", "SmolVLMForConditionalGeneration", _with_images(LLAMA))
IDEFICS3 = Family("idefics3", "Idefics3ForConditionalGeneration", _with_images(LLAMA))
LFM2_VL = Family("lfm2_vl", "Lfm2VlForConditionalGeneration", _with_images(LFM2))
INTERNVL = Family("internvl", "InternVLForConditionalGeneration", _with_images(QWEN2, QWEN3, LLAMA, QWEN3_MOE, GPT_OSS))
MISTRAL3 = Family("mistral3", "Mistral3ForConditionalGeneration", _read_mistral3)
VOXTRAL = Family("voxtral", "VoxtralForConditionalGeneration", _read_voxtral)
VOXTRAL_REALTIME = Family("voxtral_realtime", "VoxtralRealtimeForConditionalGeneration", _read_voxtral_realtime)
QWEN2_AUDIO = Family("qwen2_audio", "Qwen2AudioForConditionalGeneration", _read_qwen2_audio)
