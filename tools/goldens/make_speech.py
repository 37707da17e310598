"""Makes the golden files of `tests/goldens/speech`: a Qwen3-ASR, a Voxtral, a Qwen2-Audio, a Voxtral Realtime and a
Gemma 4 that sees, too, of a few thousand random weights, by transformers.

    python tools/goldens/make_speech.py tests/goldens/speech

Needs torch, transformers (5.23 or later) and soxr. The weights are only described (`tests/helpers/golden_files.py`),
windows are of two seconds, Voxtral's of 0.8. `expected.safetensors` has for each sound i of
`synthetic_sound.SECONDS` every 499th of its `features{i}` [128, F] and every 13th of the `rows{i}` [M, H] that encoder
and projector make of it; the `token_ids` [T] of the prompt of all with `synthetic_sound.QUESTION`, and of its float32
logits those [T, 3] at `synthetic_sound.places`; Qwen3-ASR's every 499th sample of the first sound, too, `resampled`
from 44,100 to 16,000 Hz by soxr. Qwen2-Audio hears the last two sounds, for its processor cuts longer ones. Gemma 4's
rows are divided by what its language model multiplies by; it has both of a prompt of a picture and a sound of
`HALF_ROW` seconds, too: `both_token_ids`, `both_logits`. Voxtral Realtime hears the first sound alone; its `token_ids`
are the prompt and what it wrote, as many as its rows, by argmax, and logits are those behind each of them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import soxr
import torch
from golden_folders import VERSIONS, draw_tensors, whole, write_folders
from PIL import Image
from safetensors.torch import save_file
from synthetic_images import synthetic_image
from synthetic_sound import HALF_ROW, QUESTION, RATE, SECONDS, SPARSE, places, sound
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4Processor,
    Gemma4VideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen3ASRConfig,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRForConditionalGeneration,
    Qwen3ASRProcessor,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    VoxtralProcessor,
    VoxtralRealtimeConfig,
    VoxtralRealtimeFeatureExtractor,
    VoxtralRealtimeForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4_images

HIDDEN, VOCABULARY, _SEED = 32, 272, 3838
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]
_AUDIO = {"audio_token": _SPECIAL[5], "audio_bos_token": _SPECIAL[3], "audio_eos_token": _SPECIAL[4]}
_TEXT = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_ENCODER = {
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "d_model": 16,
    "output_dim": HIDDEN,
    "n_window_infer": 200,
    "downsample_hidden_size": 4,
}
#: A system message, the sounds of a message before its text, and answers as they are.
_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% else %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif %}{% if not (loop.last and continue_final_message) %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_VOXTRAL_SPECIAL = ["<s>", "</s>", "[INST]", "[/INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[TRANSCRIBE]"]
_VOXTRAL_TEXT = {**_TEXT, "model_type": "llama", "eos_token_id": 257, "bos_token_id": 256, "pad_token_id": 257}
#: Windows of 80 frames, four rows of the encoder a token: 10 tokens each.
_VOXTRAL_ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_source_positions": 40,
}
_VOXTRAL_TEMPLATE = """<s>{%- for message in messages -%}
{%- if message.role == 'user' %}[INST]{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'audio' %}[BEGIN_AUDIO][AUDIO]{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}[/INST]{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"""

_REALTIME_SPECIAL = ["<s>", "</s>", "[STREAMING_PAD]", "[STREAMING_WORD]"]
_REALTIME_TEXT = {
    **{**_VOXTRAL_TEXT, "model_type": "voxtral_realtime_text", "sliding_window": 40, "pad_token_id": 258},
    "tie_word_embeddings": True,
}
#: Heads together are wider than rows, each of which sees eleven before it.
_REALTIME_ENCODER = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16},
    "sliding_window": 12,
}

_QWEN2_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"]
_QWEN2_ENCODER = {
    **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16},
    "max_source_positions": 100,
}
#: Sounds have numbers, and a line each.
_QWEN2_SOUND = "{% set count.value = count.value + 1 %}Audio {{ count.value }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
_QWEN2_TEMPLATE = "{%- set count = namespace(value=0) -%}" + _TEMPLATE.replace(
    "<|audio_start|><|audio_pad|><|audio_end|>", _QWEN2_SOUND
)

_GEMMA4_NAMES = ("image_token", "boi_token", "eoi_token", "audio_token", "boa_token", "eoa_token")
_GEMMA4_SPECIAL = ["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"]
_GEMMA4_ID = {each: 259 + index for index, each in enumerate(_GEMMA4_SPECIAL)}
_GEMMA4_TEXT = {
    **{**_TEXT, "model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"]},
    **{"global_head_dim": 16, "sliding_window": 24, "final_logit_softcapping": 8.0, "hidden_size_per_layer_input": 8},
    **{"vocab_size_per_layer_input": VOCABULARY, "eos_token_id": 257, "bos_token_id": 256, "pad_token_id": 258},
}
#: Layers of 2 heads, rows that see a third of themselves and four behind.
_GEMMA4_ENCODER = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [16, 4]},
    **{"output_proj_dims": 24, "attention_logit_cap": 2.0},
}
_GEMMA4_TOWER = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 32},
}
_GEMMA4_IMAGES = {"max_soft_tokens": 6, "patch_size": 4, "pooling_kernel_size": 3}
#: The published numbers of tokens are more than a golden file has room for.
gemma4_images._SUPPORTED_SOFT_TOKENS = (6, *gemma4_images._SUPPORTED_SOFT_TOKENS)
_GEMMA4_TEMPLATE = """<bos>{%- for message in messages -%}<turn>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'audio' %}<|audio|>{% elif part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<turn>model
{% endif %}"""


def make_tokenizer(special: list[str], words: list[AddedToken], **named: object) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and those of the family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(words)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def asked(sounds: int) -> list[dict[str, Any]]:
    """A message of so many sounds, and the question."""
    return [{"role": "user", "content": [{"type": "audio"}] * sounds + [{"type": "text", "text": QUESTION}]}]


def opened_model(directory: Path, kind: Any) -> Any:
    """The model of a kind whose weights stand in a directory, where these are drawn from now on."""
    draw_tensors(directory / "model.safetensors", _SEED, 0.3)
    with whole(directory) as complete:
        return kind.from_pretrained(complete, dtype=torch.float32, attn_implementation="eager").eval()


def heard(index: int, features: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is stored of a sound's features [bands, F] and rows [M, H]."""
    stored = {f"features{index}": features.flatten()[::SPARSE], f"rows{index}": rows.flatten()[::13]}
    return {name: values.clone() for name, values in stored.items()}


def answered(name: str, token_ids: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is stored of a prompt [T] and its logits [T, V]."""
    chosen = logits.gather(1, torch.from_numpy(places(*logits.shape)))
    return {f"{name}token_ids": token_ids, f"{name}logits": chosen}


def make_processor() -> Qwen3ASRProcessor:
    """The processor of Qwen3-ASR."""
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "extra_special_tokens": _AUDIO}
    fast = make_tokenizer(_SPECIAL, [AddedToken("<asr_text>", special=False, normalized=False)], **named)
    return Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(), fast, chat_template=_TEMPLATE)


@torch.no_grad()
def make(directory: Path) -> None:
    """Write the checkpoint and what transformers computes with it."""
    processor, ids = make_processor(), {"audio_token_id": 261, "eos_token_id": [256, 258], "pad_token_id": 256}
    Qwen3ASRForConditionalGeneration(Qwen3ASRConfig(audio_config=_ENCODER, text_config=_TEXT, **ids)).save_pretrained(
        directory
    )
    processor.save_pretrained(directory)
    model = opened_model(directory, Qwen3ASRForConditionalGeneration)
    expected, given = dict[str, torch.Tensor](), []
    for index, seconds in enumerate(SECONDS):
        found = processor.feature_extractor(
            sound(seconds), sampling_rate=RATE, padding=True, return_attention_mask=True
        )
        features, mask = found["input_features"], found["attention_mask"]
        given.append(model.model.get_audio_features(features, mask).pooler_output)
        expected |= heard(index, features[0, :, : int(mask.sum())], given[-1])
    text = processor.tokenizer.apply_chat_template(
        asked(len(SECONDS)), chat_template=_TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    pieces = text.split("<|audio_pad|>")
    filled = "".join(piece + "<|audio_pad|>" * len(rows) for piece, rows in zip(pieces, [*given, []], strict=True))
    token_ids = torch.tensor(processor.tokenizer.encode(filled))
    expected |= answered("", token_ids, _logits(model, token_ids, given))
    _check(processor, model, given[0])
    quick = soxr.resample(sound(SECONDS[0], 44100), 44100, RATE, "VHQ")
    expected["resampled"] = torch.from_numpy(np.ascontiguousarray(quick[::SPARSE]))
    save_file(expected, directory / "expected.safetensors", metadata=VERSIONS | {"soxr": soxr.__version__})


@torch.no_grad()
def make_voxtral(directory: Path) -> None:
    """The same of Voxtral, whose processor needs the tokenizer of mistral-common: its extractor is asked here."""
    tokenizer = make_tokenizer(_VOXTRAL_SPECIAL, [], bos_token="<s>", eos_token="</s>")
    extractor = WhisperFeatureExtractor(feature_size=128)
    config = VoxtralConfig(
        audio_config=_VOXTRAL_ENCODER,
        text_config=_VOXTRAL_TEXT,
        audio_token_id=tokenizer.convert_tokens_to_ids("[AUDIO]"),
        eos_token_id=257,
    )
    VoxtralForConditionalGeneration(config).save_pretrained(directory)
    tokenizer.chat_template = _VOXTRAL_TEMPLATE
    tokenizer.save_pretrained(directory)
    extractor.save_pretrained(directory)
    model = opened_model(directory, VoxtralForConditionalGeneration)
    frames = 2 * _VOXTRAL_ENCODER["max_source_positions"]
    asked = {"sampling_rate": RATE, "padding": True, "truncation": False, "return_tensors": "pt"}
    expected, text, given = dict[str, torch.Tensor](), "<s>[INST]", []
    for index, seconds in enumerate(SECONDS):
        features = VoxtralProcessor._retrieve_input_features(
            SimpleNamespace(feature_extractor=extractor),
            [sound(seconds)],
            frames,
            pad_to_multiple_of=frames * 160,
            **asked,
        )
        given.append(model.model.get_audio_features(features).pooler_output)
        expected |= heard(index, features.transpose(0, 1), given[-1])
        text += "[BEGIN_AUDIO]" + "[AUDIO]" * len(given[-1])
    token_ids = torch.tensor(tokenizer.encode(f"{text}{QUESTION}[/INST]", add_special_tokens=False))
    expected |= answered("", token_ids, _logits(model, token_ids, given))
    save_file(expected, directory / "expected.safetensors", metadata=VERSIONS)


@torch.no_grad()
def make_voxtral_realtime(directory: Path) -> None:
    """The same of Voxtral Realtime, padded as mistral-common does: 32 tokens of silence before a sound, and behind it,
    filled up to whole tokens, its delay, the first token's and ten more."""
    tokenizer = make_tokenizer(_REALTIME_SPECIAL, [], bos_token="<s>", eos_token="</s>")
    extractor, pad = VoxtralRealtimeFeatureExtractor(), tokenizer.convert_tokens_to_ids("[STREAMING_PAD]")
    config = VoxtralRealtimeConfig(
        audio_config=_REALTIME_ENCODER, text_config=_REALTIME_TEXT, eos_token_id=257, audio_token_id=pad
    )
    VoxtralRealtimeForConditionalGeneration(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    extractor.save_pretrained(directory)
    model, delay = opened_model(directory, VoxtralRealtimeForConditionalGeneration), config.default_num_delay_tokens
    samples, token = sound(SECONDS[0]), 160 * config.audio_length_per_tok
    padded = np.pad(samples, (32 * token, -len(samples) % token + (delay + 11) * token))
    features = extractor(padded, sampling_rate=RATE, return_tensors="pt")["input_features"]
    rows = model.model.get_audio_features(features).pooler_output[0]
    expected, token_ids = heard(0, features[0], rows), [256, *[pad] * (32 + delay)]
    while len(token_ids) < len(rows):
        heard_yet = features[..., : len(token_ids) * config.audio_length_per_tok]
        token_ids.append(
            int(model(torch.tensor([token_ids]), heard_yet, num_delay_tokens=delay).logits[0, -1].argmax())
        )
    written = torch.tensor(token_ids)
    expected |= answered("", written, model(written[None], features, num_delay_tokens=delay).logits[0])
    save_file(expected, directory / "expected.safetensors", metadata=VERSIONS)


@torch.no_grad()
def make_qwen2_audio(directory: Path) -> None:
    """The same of Qwen2-Audio, by its processor and the whole model."""
    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=2)
    tokenizer = make_tokenizer(_QWEN2_SPECIAL, [], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    processor = Qwen2AudioProcessor(extractor, tokenizer, chat_template=_QWEN2_TEMPLATE)
    config = Qwen2AudioConfig(
        audio_config=_QWEN2_ENCODER,
        text_config={**_TEXT, "model_type": "qwen2"},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        eos_token_id=258,
    )
    Qwen2AudioForConditionalGeneration(config).save_pretrained(directory)
    processor.save_pretrained(directory)
    model, found = opened_model(directory, Qwen2AudioForConditionalGeneration), list[torch.Tensor]()
    sounds = [sound(each) for each in SECONDS[1:]]
    text = processor.apply_chat_template(asked(len(sounds)), add_generation_prompt=True, tokenize=False)
    given = processor(text=[text], audio=sounds, sampling_rate=RATE, return_tensors="pt")
    model.model.multi_modal_projector.register_forward_hook(lambda module, inputs, output: found.append(output))
    expected = answered("", given["input_ids"][0], model(**given).logits[0])
    for index, frames in enumerate(given["feature_attention_mask"].sum(1).tolist()):
        rows = found[0][index, : (frames + 1) // 2 // 2]
        expected |= heard(index, given["input_features"][index], rows)
    save_file(expected, directory / "expected.safetensors", metadata=VERSIONS)


@torch.no_grad()
def make_gemma4(directory: Path) -> None:
    """The same of Gemma 4, by its processor and the whole model."""
    special = ["<bos>", "<eos>", "<pad>", *_GEMMA4_SPECIAL, "<|video|>"]
    names = {"extra_special_tokens": dict(zip(_GEMMA4_NAMES, _GEMMA4_SPECIAL, strict=True))}
    tokenizer = make_tokenizer(special, [], bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", **names)
    images = gemma4_images.Gemma4ImageProcessorPil(**_GEMMA4_IMAGES)
    extractor = Gemma4AudioFeatureExtractor(feature_size=_GEMMA4_ENCODER["subsampling_conv_channels"][0])
    processor = Gemma4Processor(extractor, images, tokenizer, Gemma4VideoProcessor(), chat_template=_GEMMA4_TEMPLATE)
    ids = {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
    ids |= {"audio_token_id": "<|audio|>", "boa_token_id": "<|audio>", "eoa_token_index": "<audio|>"}
    config = Gemma4Config(
        text_config=_GEMMA4_TEXT,
        audio_config=_GEMMA4_ENCODER,
        vision_config=_GEMMA4_TOWER,
        vision_soft_tokens_per_image=6,
        **{name: _GEMMA4_ID[text] for name, text in ids.items()},
    )
    Gemma4ForConditionalGeneration(config).save_pretrained(directory)
    processor.save_pretrained(directory)
    model = opened_model(directory, Gemma4ForConditionalGeneration)
    expected, sounds = dict[str, torch.Tensor](), [sound(seconds) for seconds in SECONDS]
    text = f"<bos><turn>user\n{'<|audio|>' * len(SECONDS)}{QUESTION}\n<turn>model\n"
    given = processor(text=[text], audio=sounds, return_tensors="pt", add_special_tokens=False)
    features, mask = given["input_features"], given["input_features_mask"]
    found = model.model.get_audio_features(features, mask, return_dict=True)
    for index in range(len(SECONDS)):
        rows = found.pooler_output[index][found.attention_mask[index]] * HIDDEN**-0.5
        expected |= heard(index, features[index][mask[index]].T, rows)
    picture = Image.fromarray(synthetic_image(30, 44))
    text = f"<bos><turn>user\n<|image|><|audio|>{QUESTION}\n<turn>model\n"
    both = processor(
        text=[text], images=[[picture]], audio=[sound(HALF_ROW)], return_tensors="pt", add_special_tokens=False
    )
    for name, inputs in {"": given, "both_": both}.items():
        expected |= answered(name, inputs["input_ids"][0], model(**inputs).logits[0])
    save_file(expected, directory / "expected.safetensors", metadata=VERSIONS)


def _logits(
    model: Qwen3ASRForConditionalGeneration | VoxtralForConditionalGeneration,
    token_ids: torch.Tensor,
    rows: list[torch.Tensor],
) -> torch.Tensor:
    """[T, V] of a prompt with the rows in the places of their tokens."""
    embeddings = model.get_input_embeddings()(token_ids[None])
    embeddings[0, token_ids == model.config.audio_token_id] = torch.cat(rows)
    return model(inputs_embeds=embeddings).logits[0]


def _check(processor: Qwen3ASRProcessor, model: Qwen3ASRForConditionalGeneration, rows: torch.Tensor) -> None:
    """That the processor and the whole model, which take one sound a prompt, agree with how it is put together here."""
    text = f"<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|>{QUESTION}<|im_end|>\n"
    inputs = processor(text=text, audio=sound(SECONDS[0]), sampling_rate=RATE)
    difference = (model(**inputs).logits[0] - _logits(model, inputs["input_ids"][0], [rows])).abs().max()
    assert difference < 1e-5, difference


if __name__ == "__main__":
    makers = {"qwen3_asr": make, "voxtral": make_voxtral, "qwen2_audio": make_qwen2_audio, "gemma4": make_gemma4}
    makers |= {"voxtral_realtime": make_voxtral_realtime}
    write_folders(__doc__, makers)
