"""Makes the golden files of `tests/goldens/vision` with transformers, which is the reference of every vision family.

    python tools/goldens/make_vision.py tests/goldens/vision

Needs torch and transformers 5. Each folder is a multimodal checkpoint as `save_pretrained` writes it, or named as
other releases do, and `expected.safetensors`: for image i the `patches_{i}` [N, elements] float16 and the `grid_{i}`
(frames, height, width), which go in together with the others, and what transformers computes in float32 after it has
read the folder again: `embeddings_{i}` [tokens, H] and `deepstack_{k}_{i}`. Weights and patches are random and only
described (`tests/helpers/golden_files.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from golden_folders import VERSIONS, draw_tensors, rename_drawn, whole, with_shares, write_folders
from safetensors.torch import load_file, save_file

_TEXT = {
    "vocab_size": 80,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
_TOKENS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}


@dataclass(frozen=True)
class Variation:
    """One golden model: its family, `vision_config` and what stands beside it in `config.json`.

    `renamed` are beginnings of tensor names and what they become: the layout of another release. `top_level` moves the
    text fields to the top of `config.json`, as the first files of Qwen2.5-VL had them. Without a `seed` it is the
    model's place among all.
    """

    family: str
    vision: dict[str, Any]
    settings: dict[str, Any]
    grids: tuple[tuple[int, int, int], ...]
    dtype: str = "float16"
    renamed: tuple[tuple[str, str], ...] = ()
    top_level: bool = False
    seed: int | None = None


_QWEN2_5 = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 16,
    "out_hidden_size": 24,
    "fullatt_block_indexes": [1],
}
_QWEN3 = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 24,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
_QWEN3_5 = {
    **{key: value for key, value in _QWEN3.items() if key != "deepstack_visual_indexes"},
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_position_embeddings": 16,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 21,
    "patch_size": 5,
}
_PIXTRAL = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_ODD_GRIDS = ((1, 6, 10), (1, 2, 2), (1, 14, 6), (1, 4, 4))
_SQUARE = ((1, 4, 4), (1, 4, 4), (1, 4, 4))
_FIRST_LLAVA = (("vision_tower.", "vision_tower.vision_model."),)
_NEWEST_LLAVA = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)

VARIATIONS = {
    "qwen2_5_vl": Variation(
        "qwen2_5_vl",
        _QWEN2_5,
        _TOKENS,
        _ODD_GRIDS,
        renamed=(("model.", "model.language_model."), ("visual.", "model.visual.")),
    ),
    "qwen2_5_vl_old_layout": Variation(
        "qwen2_5_vl",
        {**_QWEN2_5, "window_size": 24, "fullatt_block_indexes": [0, 2], "in_chans": 3},
        _TOKENS,
        ((1, 8, 14), (1, 6, 6)),
        dtype="bfloat16",
        top_level=True,
    ),
    "qwen3_vl": Variation("qwen3_vl", _QWEN3, _TOKENS, _ODD_GRIDS),
    "qwen3_vl_one_deepstack": Variation(
        "qwen3_vl", {**_QWEN3, "deepstack_visual_indexes": [1], "num_position_embeddings": 9}, _TOKENS, ((1, 8, 4),)
    ),
    "llava_clip": Variation(
        "llava", {"model_type": "clip_vision_model", **_TOWER}, {"image_token_index": 5}, _SQUARE, renamed=_FIRST_LLAVA
    ),
    "llava_clip_two_layers": Variation(
        "llava",
        {"model_type": "clip_vision_model", **_TOWER, "hidden_act": "gelu"},
        {
            "image_token_index": 5,
            "vision_feature_layer": [-3, -1],
            "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": False,
        },
        _SQUARE[:1],
        renamed=_NEWEST_LLAVA,
    ),
    "llava_siglip": Variation(
        "llava",
        {"model_type": "siglip_vision_model", **_TOWER},
        {"image_token_index": 5, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        _SQUARE,
        renamed=(*_NEWEST_LLAVA, ("model.vision_tower.", "model.vision_tower.vision_model.")),
    ),
    "llava_siglip_without_head": Variation(
        "llava",
        {"model_type": "siglip_vision_model", "vision_use_head": False, **_TOWER},
        {"image_token_index": 5, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        _SQUARE[:2],
    ),
    "mistral3": Variation(
        "mistral3",
        {**_PIXTRAL, "hidden_act": "silu", "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}},
        {"image_token_index": 5, "spatial_merge_size": 2},
        _ODD_GRIDS[:2],
        renamed=_NEWEST_LLAVA,
        dtype="bfloat16",
        seed=30,
    ),
    "mistral3_earlier_layer": Variation(
        "mistral3",
        {**_PIXTRAL, "hidden_act": "silu", "num_hidden_layers": 3},
        {
            "image_token_index": 5,
            "spatial_merge_size": 3,
            "vision_feature_layer": -2,
            "multimodal_projector_bias": True,
            "projector_hidden_act": "silu",
        },
        ((1, 6, 9), (1, 3, 3)),
        seed=31,
    ),
    "qwen3_5": Variation("qwen3_5", _QWEN3_5, _TOKENS, ((1, 6, 10), (1, 2, 2), (1, 8, 2)), dtype="bfloat16"),
}


def make_model(name: str, directory: Path) -> None:
    """Write one checkpoint and what transformers computes from it."""
    variation = VARIATIONS[name]
    seed = list(VARIATIONS).index(name) if variation.seed is None else variation.seed
    torch.manual_seed(seed)
    model_class, config = _config(variation)
    model_class(config).to(getattr(torch, variation.dtype)).save_pretrained(directory)
    draw_tensors(directory / "model.safetensors", seed, 0.3)
    _draw_patches(directory, seed, variation)
    with whole(directory) as complete:
        again = model_class.from_pretrained(complete, dtype=torch.float32, attn_implementation="eager")
        patches = load_file(complete / "expected.safetensors")
    expected = _expected(again, variation, [patches[f"patches_{i}"].float() for i in range(len(variation.grids))])
    save_file(with_shares(expected, "embeddings|deepstack"), directory / "expected.safetensors", metadata=VERSIONS)
    rename_drawn(directory, partial(_renamed, variation.renamed))
    if variation.top_level:
        _move_to_top(directory / "config.json")
    (directory / "generation_config.json").unlink(missing_ok=True)
    largest = max(expected[key].abs().max().item() for key in expected if key.startswith("embeddings"))
    print(f"{name}: largest embedding {largest:.2f}")


def _config(variation: Variation) -> tuple[Any, Any]:
    if variation.family == "llava":
        text = {"model_type": "llama", **_TEXT}
        config = transformers.LlavaConfig(vision_config=variation.vision, text_config=text, **variation.settings)
        return transformers.LlavaForConditionalGeneration, config
    if variation.family == "mistral3":
        text = {"model_type": "ministral3", **_TEXT, "head_dim": 12, "rms_norm_eps": 1e-4}
        config = transformers.Mistral3Config(vision_config=variation.vision, text_config=text, **variation.settings)
        return transformers.Mistral3ForConditionalGeneration, config
    text = {**_TEXT, "rope_parameters": _ROPE}
    if variation.family == "qwen3_vl":
        text |= {"head_dim": 12, "num_hidden_layers": 2}  # a layer for each deepstack feature
        config = transformers.Qwen3VLConfig(vision_config=variation.vision, text_config=text, **variation.settings)
        return transformers.Qwen3VLForConditionalGeneration, config
    if variation.family == "qwen3_5":
        rope = _ROPE | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}
        text = {**_TEXT, "rope_parameters": rope, "head_dim": 12, "layer_types": ["full_attention"]}
        config = transformers.Qwen3_5Config(vision_config=variation.vision, text_config=text, **variation.settings)
        return transformers.Qwen3_5ForConditionalGeneration, config
    config = transformers.Qwen2_5_VLConfig(vision_config=variation.vision, text_config=text, **variation.settings)
    return transformers.Qwen2_5_VLForConditionalGeneration, config


def _draw_patches(directory: Path, seed: int, variation: Variation) -> None:
    vision = variation.vision
    elements = 3 * vision.get("temporal_patch_size", 1) * vision["patch_size"] ** 2
    shapes = {f"patches_{index}": (grid[1] * grid[2], elements) for index, grid in enumerate(variation.grids)}
    patches = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
    save_file(patches, directory / "expected.safetensors")
    draw_tensors(directory / "expected.safetensors", 1000 + seed, 1.0)


def _expected(model: Any, variation: Variation, patches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Grids and outputs; all images go through the model in one call."""
    vision, grids = variation.vision, variation.grids
    expected = {f"grid_{index}": torch.tensor(grid) for index, grid in enumerate(grids)}
    with torch.no_grad():
        if variation.family == "llava":
            outputs = model.model.get_image_features(torch.stack([_unpatched(one, vision) for one in patches]))
            embeddings, deepstack = outputs.pooler_output, []
        elif variation.family == "mistral3":
            pixels, sizes = whole_pictures(patches, grids, variation.settings["spatial_merge_size"])
            outputs = model.model.get_image_features(pixels, sizes)
            embeddings, deepstack = outputs.pooler_output, []
        else:
            outputs = model.model.get_image_features(torch.cat(patches), torch.tensor(grids))
            embeddings, deepstack = outputs.pooler_output, getattr(outputs, "deepstack_features", None) or []
    for index, one in enumerate(embeddings):
        expected[f"embeddings_{index}"] = one.clone().contiguous()
    for place, features in enumerate(deepstack):
        for index, one in enumerate(features):
            expected[f"deepstack_{place}_{index}"] = one.clone().contiguous()
    return expected


def _unpatched(patches: torch.Tensor, vision: dict[str, Any]) -> torch.Tensor:
    """[N, 3 * P * P] in reading order to pixels [3, S, S]; what the patches leave over at the edge is noise."""
    size, patch = vision["image_size"], vision["patch_size"]
    side = size // patch
    pixels = torch.randn(3, size, size)
    squares = patches.reshape(side, side, 3, patch, patch).permute(2, 0, 3, 1, 4)
    pixels[:, : side * patch, : side * patch] = squares.reshape(3, side * patch, side * patch)
    return pixels


def whole_pictures(
    patches: list[torch.Tensor], grids: Iterable[Sequence[int]], merge: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches [N, 3 * P * P] of pictures, in blocks of `merge` x `merge`, as pixels [n, 3, H, W], zeros around those of
    smaller ones, and the sizes [n, 2] of all."""
    pictures = []
    for one, (_, height, width) in zip(patches, grids, strict=True):
        side = round((one.shape[1] // 3) ** 0.5)
        blocks = one.reshape(height // merge, width // merge, merge, merge, 3, side, side).permute(4, 0, 2, 5, 1, 3, 6)
        pictures.append(blocks.reshape(3, height * side, width * side))
    sizes = torch.tensor([picture.shape[1:] for picture in pictures])
    pixels = torch.zeros(len(pictures), 3, *sizes.max(dim=0).values.tolist())
    for whole_picture, picture in zip(pixels, pictures, strict=True):
        whole_picture[:, : picture.shape[1], : picture.shape[2]] = picture
    return pixels, sizes


def _renamed(beginnings: tuple[tuple[str, str], ...], name: str) -> str:
    for old, new in beginnings:
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def _move_to_top(path: Path) -> None:
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps({**text, **config}, indent=2) + "\n")


if __name__ == "__main__":
    write_folders(__doc__, {name: partial(make_model, name) for name in VARIATIONS})
