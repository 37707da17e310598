"""Tiny models of the families that take images: changes of `config.json` for `write_tiny_checkpoint`, and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tiny_families import DELTA_LAYERS
from tiny_families import FAMILIES as CAUSAL

from edgellm.engines.backends.base import Backend
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.media import MediaEmbeddings, PromptMedia, place_media
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.kernels.arrays import Array

#: Ids of the tiny tokenizer's tokens.
VISION_START, IMAGE_TOKEN, VISION_END = 258, 259, 260
#: A prompt without images.
TEXT = [(7 * index + 3) % 250 for index in range(23)]
MARKERS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}" + "".join(MARKERS) + "{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_QWEN = {
    "image_token_id": IMAGE_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "eos_token_id": 257,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "vision_use_head": False,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": _QWEN
    | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": _QWEN_VISION | {"hidden_act": "silu", "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": _QWEN
    | {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        "vision_config": _QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5": _QWEN
    | {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "head_dim": 32,
        **DELTA_LAYERS,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
        "vision_config": _QWEN_VISION | {"model_type": "qwen3_5", "num_position_embeddings": 16},
    },
    "llava": {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": IMAGE_TOKEN,
        "eos_token_id": 257,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "text_config": {"model_type": "qwen3"},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 12,
            "patch_size": 4,
        },
    },
}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 64,
        "max_pixels": 1024,
    },
    "llava": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 12, "width": 12}},
}
#: Those whose images see themselves, which need bfloat16.
WHOLE_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": VISION_START,
        "eoi_token_index": VISION_END,
        "mm_tokens_per_image": 16,
        "eos_token_id": 257,
        "tie_word_embeddings": False,
        "text_config": {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_act": None,
            "head_dim": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "sliding_window": 11,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "max_position_embeddings": 1024,
        },
        "vision_config": _SIGLIP | {"image_size": 32},
    }
}
PREPROCESSORS["gemma3"] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 32, "width": 32},
    "image_seq_length": 16,
}
#: Those whose tokens of an image have others among them: behind each row, and behind the last.
IN_ROWS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": IMAGE_TOKEN,
        "eos_token_id": 257,
        "tie_word_embeddings": True,
        "text_config": CAUSAL["ministral3"],
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "hidden_act": "silu",
        },
    }
}
#: Those whose prompts see themselves.
WHOLE_PROMPTS: dict[str, dict[str, Any]] = {
    "paligemma": {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "image_token_index": IMAGE_TOKEN,
        "eos_token_id": 257,
        "bos_token_id": 256,
        "text_config": {
            "architectures": ["GemmaForCausalLM"],
            "model_type": "gemma",
            "hidden_act": None,
            "head_dim": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        "vision_config": _SIGLIP | {"image_size": 12},
    }
}
PREPROCESSORS["paligemma"] = PREPROCESSORS["llava"] | {"image_seq_length": 9}
PREPROCESSORS["mistral3"] = {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 32}}
MARKERS_OF = {"mistral3": ("[IMG_BREAK]", "[IMG]", "[IMG_END]")}
#: Gemma 3's template writes the token before an image alone.
TEMPLATES = {
    "gemma3": TEMPLATE.replace("".join(MARKERS), MARKERS[0]),
    "mistral3": TEMPLATE.replace("".join(MARKERS), "[IMG]"),
    "paligemma": TEMPLATE.replace("".join(MARKERS), MARKERS[1]),
}
PREPROCESSORS["qwen3_vl"] = PREPROCESSORS["qwen3_5"] = PREPROCESSORS["qwen2_5_vl"]


def tiny_image(backend: Backend, config: DecoderConfig, grid: tuple[int, int], seed: int) -> MediaEmbeddings:
    """An image of (height, width) patches with random features, in the backend's memory."""
    random = np.random.default_rng(seed)
    height, width = grid
    tokens = height * width // config.spatial_merge_size**2

    def features() -> Array:
        array = backend.empty((tokens, config.hidden_size), "compute")
        values = random.standard_normal((tokens, config.hidden_size)).astype(np.float32)
        backend.upload(array, stored(values, backend.compute_dtype))
        return array

    deepstack = tuple(features() for _ in range(config.deepstack_layers))
    return MediaEmbeddings(features(), deepstack, f"image {seed}", (1, height, width))


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as `upload` takes them for a dtype."""
    if dtype == "bfloat16":
        from edgellm.kernels.bfloat16 import bfloat16_bits

        return bfloat16_bits(values)
    return values.astype(dtype)


def prompt_with_images(
    config: DecoderConfig, images: Sequence[MediaEmbeddings], seed: int = 0, text: int = 5
) -> tuple[list[int], PromptMedia]:
    """Token ids with `text` tokens before, between and after the images, and where these are."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 256, text).tolist()
    for image in images:
        ids += [VISION_START, *[IMAGE_TOKEN] * image.rows.shape[0], VISION_END]
        ids += random.integers(0, 256, text).tolist()
    return ids, place_media(ids, {config.media["image"]: images}, config)


def logits_beside_a_text(
    runner: BaseEngineRunner, prompt: tuple[list[int], PromptMedia], answer: Sequence[int]
) -> np.ndarray:
    """Logits [len(answer), V] along an answer to a prompt with images, in slot 1, beside `TEXT` in slot 0."""
    ids, images = prompt
    runner.start(0, TEXT, 0, SamplingValues()).wait()
    runner.start(1, ids, 0, SamplingValues(), images).wait()
    found = []
    for token in answer:
        found.append(runner.logits(1))
        runner.force_token(1, token)
        runner.decode(2).wait()
    for slot in (0, 1):
        runner.stop(slot)
    return np.stack(found)
