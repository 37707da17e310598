"""Makes the golden files of `tests/goldens/tiled`: models that see parts of pictures, by transformers.

    python tools/goldens/make_tiled.py tests/goldens/tiled

Needs torch, torchvision, num2words and transformers 5. Each folder is a checkpoint with its tokenizer and a
`preprocessor_config.json` (weights are random and only described, `tests/helpers/golden_files.py`); `prompt.json`, a
prompt with a marker for each of its pictures, and their sizes (`tests/helpers/synthetic_images.py` makes them); and
`expected.safetensors`: the `token_ids` [T] that the model's processor writes, what the model makes of the parts of the
pictures (`rows` [M, H], those of all parts), the float32 `logits` [T, V] and the tokens `greedy` [n] that follow,
computed in float32. `cuts.json` has for settings of the processor sizes of pictures, the parts' grids in
patches and a few values of their rows, and the SHA-256 of all rows as float32.

Pictures are resized by Pillow (processors of the "pil" backend), LFM2-VL's by torchvision, as there is no other.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import transformers
from golden_folders import VERSIONS, draw_tensors, whole, with_shares, write_folders
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4_images
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from synthetic_images import synthetic_image

_HALF = [0.5, 0.5, 0.5]
_VOCABULARY, _TOKENS = 32, 12
_LETTERS = [*"adehiklnorstuw:?", "Ġ", "Ċ"]
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
_ROWS_AND_COLUMNS = [(row, column) for row in (1, 2) for column in (1, 2)]


@dataclass(frozen=True)
class Model:
    """One golden model: classes of transformers, configuration, processors, and a prompt with pictures of `sizes`.

    `cuts` are other settings of the image processor, each with sizes of pictures. The `seed` is the place in the table
    where there is none of its own, which Gemma 4's have so that no token of media is among those that follow: its class
    takes these for padding. The tokenizer may know more `letters`.
    """

    config: Callable[..., Any]
    model_class: Any
    text: dict[str, Any]
    vision: dict[str, Any]
    settings: dict[str, Any]
    tokens: list[str]
    image_token: str
    processor: Callable[[Any, Any], Any]
    image_processor: Any
    image_settings: dict[str, Any]
    prompt: str
    sizes: list[tuple[int, int]]
    cuts: list[tuple[dict[str, Any], list[tuple[int, int]]]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    seed: int | None = None
    letters: str = ""


_NORMED = {"image_mean": _HALF, "image_std": _HALF, "do_image_splitting": True}
_SMOLVLM = {**_NORMED, "size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}}
_LFM2_VL = {
    **_NORMED,
    **{"encoder_patch_size": 4, "downsample_factor": 2, "tile_size": 16, "min_tiles": 2, "max_tiles": 6},
    **{"min_image_tokens": 2, "max_image_tokens": 6, "max_pixels_tolerance": 1.25, "use_thumbnail": True},
}
_INTERNVL = {
    **{"size": {"height": 16, "width": 16}, "min_patches": 1, "max_patches": 4},
    **{"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
}
_HEIGHTS = 480, 37, 61, 1, 5, 700, 64, 301, 120, 96, 49
_SIZES = list(zip(_HEIGHTS, (640, 61, 37, 1, 300, 9, 64, 100, 121, 56, 84), strict=True))
_INTERN_VIT = {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4], "attention_bias": True}


_INTERNVL_TOKENS = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
_INTERNVL_NAMES = ("start_image_token", "end_image_token", "context_image_token", "video_token")


def _internvl(text: dict[str, Any], vision: dict[str, Any], **others: Any) -> Model:
    return Model(
        transformers.InternVLConfig,
        transformers.InternVLForConditionalGeneration,
        {**_TEXT, **text},
        {**_INTERN_VIT, **vision},
        {"image_seq_length": 4, "tie_word_embeddings": False},
        _INTERNVL_TOKENS,
        "<IMG_CONTEXT>",
        lambda image_processor, tokenizer: transformers.InternVLProcessor(
            image_processor, tokenizer, transformers.InternVLVideoProcessor(), image_seq_length=4
        ),
        GotOcr2ImageProcessorPil,
        _INTERNVL,
        "what is\n<IMG_CONTEXT>\nand <IMG_CONTEXT> now?\n",
        [(20, 40), (16, 16)],
        names=dict(zip(_INTERNVL_NAMES, _INTERNVL_TOKENS, strict=True)),
        **others,
    )


_GEMMA4_TEXT = {
    **{"model_type": "gemma4_text", "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    **{"head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "final_logit_softcapping": 8.0, "pad_token_id": 0},
    "vocab_size_per_layer_input": _VOCABULARY,
}
_GEMMA4 = {"max_soft_tokens": 6, "patch_size": 4, "pooling_kernel_size": 3}
_GEMMA4_NAMES = ("image_token", "boi_token", "eoi_token", "audio_token", "boa_token", "eoa_token")
_GEMMA4_TOKENS = ["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"]
#: The published numbers of tokens are more than a golden file has room for.
gemma4_images._SUPPORTED_SOFT_TOKENS = (6, *gemma4_images._SUPPORTED_SOFT_TOKENS)


def _gemma4(text: dict[str, Any], vision: dict[str, Any], **others: Any) -> Model:
    tokens = {name: 22 + _GEMMA4_TOKENS.index(text) for name, text in _GEMMA4_IDS.items()}
    return Model(
        transformers.Gemma4Config,
        transformers.Gemma4ForConditionalGeneration,
        {**_TEXT, **_GEMMA4_TEXT, **text},
        {**_TOWER, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 32, **vision},
        {"tie_word_embeddings": False, "audio_config": None, "vision_soft_tokens_per_image": 6, **tokens},
        [*_GEMMA4_TOKENS, "<|video|>"],
        "<|image|>",
        lambda image_processor, tokenizer: transformers.Gemma4Processor(
            transformers.Gemma4AudioFeatureExtractor(), image_processor, tokenizer, transformers.Gemma4VideoProcessor()
        ),
        gemma4_images.Gemma4ImageProcessorPil,
        _GEMMA4,
        "look at\n<|image|>\n\nand <|image|>what is it?\n",
        [(30, 44), (60, 12)],
        names=dict(zip(_GEMMA4_NAMES, _GEMMA4_TOKENS, strict=True)),
        **others,
    )


_MINICPM = {
    **{"scale_resolution": 32, "patch_size": 4, "max_slice_nums": 4, "image_mean": _HALF, "image_std": _HALF},
    **{"slice_mode": True, "downsample_mode": "16x", "use_image_id": True},
}
_MINICPM_SIZES = [size for size in _SIZES if max(size) < 60 * min(size)]  # strips become too long
_MINICPM_TOKENS = ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"]
_MINICPM_NAMES = (
    *("image_start_token", "image_end_token", "slice_start_token", "slice_end_token"),
    *("image_id_start_token", "image_id_end_token", "image_token", "video_token"),
)
_GEMMA4_IDS = {"boi_token_id": "<|image>", "eoi_token_id": "<image|>", "audio_token_id": "<|audio|>"}
_GEMMA3 = {
    **{"size": {"height": 16, "width": 16}, "image_mean": _HALF, "image_std": _HALF, "do_pan_and_scan": True},
    **{"pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 2, "pan_and_scan_min_ratio_to_activate": 1.2},
}
_GEMMA3_TOKENS = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
MODELS = {
    "smolvlm": Model(
        transformers.SmolVLMConfig,
        transformers.SmolVLMForConditionalGeneration,
        {"model_type": "llama", **_TEXT},
        {"model_type": "smolvlm_vision", **_TOWER, "image_size": 18},
        {"scale_factor": 2, "pad_token_id": 0, "tie_word_embeddings": False},
        [
            *("<fake_token_around_image>", "<image>", "<global-img>", "<video>"),
            *(f"<row_{row}_col_{column}>" for row, column in _ROWS_AND_COLUMNS),
        ],
        "<image>",
        lambda image_processor, tokenizer: transformers.SmolVLMProcessor(
            image_processor, tokenizer, transformers.SmolVLMVideoProcessor(), image_seq_len=4
        ),
        SmolVLMImageProcessorPil,
        {**_SMOLVLM, "size": {"longest_edge": 36}, "max_image_size": {"longest_edge": 18}},
        "user: look\n<image>\nand <image>what is it?\n",
        [(30, 44), (60, 12)],
        [
            (_SMOLVLM, _SIZES),
            ({**_SMOLVLM, "do_image_splitting": False}, _SIZES[:3]),
            ({**_SMOLVLM, "size": {"longest_edge": 16}}, _SIZES[:3]),
        ],
    ),
    "lfm2_vl": Model(
        transformers.Lfm2VlConfig,
        transformers.Lfm2VlForConditionalGeneration,
        {
            **_TEXT,
            **{"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        },
        {"model_type": "siglip2_vision_model", **_TOWER, "num_patches": 16, "vision_use_head": False},
        {"downsample_factor": 2, "projector_hidden_size": 24},
        [
            *("<|image_start|>", "<|image_end|>", "<image>", "<|img_thumbnail|>"),
            *(f"<|img_row_{row}_col_{column}|>" for row, column in _ROWS_AND_COLUMNS),
        ],
        "<image>",
        transformers.Lfm2VlProcessor,
        transformers.Lfm2VlImageProcessor,
        _LFM2_VL,
        "look\n<image>\n<image> what is it?\n",
        [(16, 32), (16, 24)],
        [
            (_LFM2_VL, [each for each in _SIZES if max(each) < 10 * min(each)]),  # it fails for strips
            ({**_LFM2_VL, "use_thumbnail": False}, _SIZES[:3]),
            ({**_LFM2_VL, "do_image_splitting": False}, _SIZES[:4]),
        ],
    ),
    "internvl": _internvl(
        {"model_type": "qwen3", "head_dim": 8},
        {},
        cuts=[(_INTERNVL, _SIZES), ({**_INTERNVL, "min_patches": 3, "max_patches": 12}, _SIZES[:6])],
    ),
    "internvl_rms": _internvl(
        {"model_type": "qwen2"},
        {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False, "use_mean_pooling": False},
    ),
    "minicpmv4_6": Model(
        transformers.MiniCPMV4_6Config,
        transformers.MiniCPMV4_6ForConditionalGeneration,
        {
            **_TEXT,
            **{"model_type": "qwen3_5_text", "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
            **{"linear_num_key_heads": 1, "linear_num_value_heads": 2},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
                **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
            },
        },
        {**_TOWER, "num_hidden_layers": 3, "image_size": 28},
        {"insert_layer_id": 1, "tie_word_embeddings": False},
        [*_MINICPM_TOKENS, "<|image_pad|>", "<|video_pad|>"],
        "<|image_pad|>",
        lambda image_processor, tokenizer: transformers.MiniCPMV4_6Processor(
            image_processor, transformers.MiniCPMV4_6VideoProcessor(), tokenizer
        ),
        MiniCPMV4_6ImageProcessorPil,
        _MINICPM,
        "look at\n<|image_pad|>\n\nand <|image_pad|>what is it?\n",
        [(30, 94), (40, 20)],
        [(_MINICPM, _MINICPM_SIZES), ({**_MINICPM, "max_slice_nums": 9}, _MINICPM_SIZES[:6])],
        names=dict(zip(_MINICPM_NAMES, [*_MINICPM_TOKENS, "<|image_pad|>", "<|video_pad|>"], strict=True)),
        letters="01",
    ),
    "gemma3": Model(
        transformers.Gemma3Config,
        transformers.Gemma3ForConditionalGeneration,
        {
            **{**_TEXT, "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 24},
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        {**_TOWER, "model_type": "siglip_vision_model", "image_size": 16, "vision_use_head": False},
        {"mm_tokens_per_image": 4, "boi_token_index": 29, "eoi_token_index": 31, "tie_word_embeddings": False},
        _GEMMA3_TOKENS,
        "<image_soft_token>",
        lambda image_processor, tokenizer: partial(
            transformers.Gemma3Processor(image_processor, tokenizer, image_seq_length=4), **_GEMMA3
        ),
        Gemma3ImageProcessorPil,
        _GEMMA3,
        "look at<start_of_image>\nand <start_of_image> what is it?\n",
        [(40, 16), (16, 18)],
        [
            (_GEMMA3, [*_SIZES, (40, 16), (16, 18)]),
            ({**_GEMMA3, "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_crop_size": 256}, _SIZES),
            ({**_GEMMA3, "pan_and_scan_max_num_crops": 7, "pan_and_scan_min_ratio_to_activate": 1.7}, _SIZES),
        ],
        names=dict(zip(("boi_token", "image_token", "eoi_token"), _GEMMA3_TOKENS, strict=True)),
        letters="Hbcgmpy",
    ),
    # As E2B and E4B, and as the larger ones.
    "gemma4": _gemma4(
        {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
        {"use_clipped_linears": True},
        seed=111,
        cuts=[({**_GEMMA4, "max_soft_tokens": 70}, _SIZES), (_GEMMA4, _SIZES)],
    ),
    "gemma4_wide": _gemma4(
        {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}, {"standardize": True}, seed=107
    ),
}


def make_model(name: str, directory: Path) -> None:
    """Write one checkpoint, its prompt, and what transformers makes of it."""
    golden = MODELS[name]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(golden, directory)
    names = {"image_token_id": tokenizer.convert_tokens_to_ids(golden.image_token)}
    config = golden.config(text_config=golden.text, vision_config=golden.vision, **golden.settings, **names)
    torch.manual_seed(0)
    golden.model_class(config).to(torch.float16).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    draw_tensors(directory / "model.safetensors", list(MODELS).index(name) if golden.seed is None else golden.seed, 0.3)
    image_processor = golden.image_processor(**golden.image_settings)
    kind = golden.image_processor.__name__.removesuffix("Pil")
    _write(directory / "preprocessor_config.json", {"image_processor_type": kind, **golden.image_settings})
    images = [Image.fromarray(synthetic_image(*size)) for size in golden.sizes]
    processor = golden.processor(image_processor, tokenizer)
    inputs = processor(text=[golden.prompt], images=[images], return_tensors="pt", add_special_tokens=False)
    if golden.config is not transformers.Gemma3Config:  # to which they say what is an image
        inputs.pop("token_type_ids", None)
    with whole(directory) as complete, torch.no_grad():
        model = golden.model_class.from_pretrained(complete, dtype=torch.float32, attn_implementation="eager").eval()
        of_text = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
        shown = {key: value for key, value in inputs.items() if key not in of_text}
        rows = model.get_image_features(**shown).pooler_output
        logits = model(**inputs).logits[0]
        greedy = model.generate(**inputs, do_sample=False, max_new_tokens=_TOKENS, eos_token_id=None, pad_token_id=0)[
            0, inputs["input_ids"].shape[1] :
        ]
    parts = torch.cat(list(rows)).float() if isinstance(rows, (list, tuple)) else rows.flatten(0, 1)
    expected = {"token_ids": inputs["input_ids"][0], "rows": parts, "greedy": greedy, "logits": logits}
    save_file(
        {key: value.contiguous().clone() for key, value in with_shares(expected).items()},
        directory / "expected.safetensors",
        metadata=VERSIONS,
    )
    _write(directory / "prompt.json", {"prompt": golden.prompt, "sizes": golden.sizes})
    cuts = [_cut(golden, *each) for each in golden.cuts]
    _write(directory / "cuts.json", {"pillow": PIL.__version__, "cases": cuts})
    ties = (logits.softmax(-1).topk(2).values[-1]).tolist()
    print(f"{name}: {len(expected['token_ids'])} tokens, deviation {logits.std():.2f}, first {ties}")


def _tokenizer(golden: Model, directory: Path) -> Any:
    """Letters, and line feeds that are one token where there are two."""
    vocabulary = {
        text: number for number, text in enumerate(["<unk>", "<s>", "</s>", *_LETTERS, "ĊĊ", *golden.letters])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>", *golden.tokens)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        extra_special_tokens=golden.names,
    )


def _cut(golden: Model, settings: dict[str, Any], sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """The parts of pictures by a processor of these settings."""
    processor, found, whole = golden.image_processor(**settings), [], hashlib.sha256()
    for size in sizes:
        parts = _parts(processor, Image.fromarray(synthetic_image(*size)))
        rows = np.concatenate([rows.reshape(-1) for _, rows in parts])
        whole.update(rows.tobytes())
        values = [round(float(value), 3) for value in rows[:: max(1, len(rows) // 3)]]
        found.append([size, [grid for grid, _ in parts], values])
    return {"settings": settings, "images": found, "sha256": whole.hexdigest()}


def _parts(processor: Any, image: Any) -> list[tuple[list[int], np.ndarray]]:
    """(rows and columns of patches, the patches [N, E] float32 in reading order) of each part of a picture."""
    given = {"crop_to_patches": True} if isinstance(processor, GotOcr2ImageProcessorPil) else {}
    values = processor(images=[image], return_tensors="pt", **given)
    if "target_sizes" in values:
        rows, grids = values["pixel_values"][0].numpy(), values["target_sizes"].tolist()
        patches = rows.reshape(3, 4, -1, 4).transpose(2, 0, 1, 3).reshape(-1, 48).astype(np.float32)
        ends = np.cumsum([height * width for height, width in grids])[:-1]
        return list(zip(grids, np.split(patches, ends), strict=True))
    if "image_position_ids" in values:
        places, rows = values["image_position_ids"][0].numpy(), values["pixel_values"][0].numpy()
        columns, lines = (places.max(axis=0) + 1).tolist()
        return [([lines, columns], 2 * (rows[: lines * columns].astype(np.float32) - np.float32(0.5)))]
    if "spatial_shapes" in values:
        pairs = zip(values["spatial_shapes"].tolist(), values["pixel_values"], strict=True)
        return [(grid, rows[: grid[0] * grid[1]].numpy().astype(np.float32)) for grid, rows in pairs]
    pixels, parts = values["pixel_values"].numpy().astype(np.float32), []
    for one in pixels.reshape(-1, *pixels.shape[-3:]):
        rows, columns = one.shape[1] // 4, one.shape[2] // 4
        patches = one[:, : rows * 4, : columns * 4].reshape(3, rows, 4, columns, 4).transpose(1, 3, 0, 2, 4)
        parts.append(([rows, columns], np.ascontiguousarray(patches).reshape(rows * columns, -1)))
    return parts


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    write_folders(__doc__, {name: partial(make_model, name) for name in MODELS})
