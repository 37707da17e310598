"""Makes the golden files of `tests/goldens/image_prompts`: multimodal models and prompts with images, by transformers.

    python tools/goldens/make_image_prompts.py tests/goldens/image_prompts

Needs torch and transformers 5. Each folder is a multimodal checkpoint and `expected.safetensors`: `token_ids` [T] int64
with images among them, their `pixel_values` as the vision part takes them (weights and pixels are random and only
described, `tests/helpers/golden_files.py`), what it gives for image i (`image{i}.rows` [M, H] and
`image{i}.deepstack{k}` [M, H]), `grids` [images, 3] in patches, `positions` [3, T] (with M-RoPE), the float32 `logits`
[T, V] that transformers computes in float32, and after the prompt the tokens `continued` [n] with their
`continued_logits` [n, V]; of Gemma 3, whose images see themselves, also the tokens `greedy` [n] that follow.
For PaliGemma see `compute_prefixes`.
`positions.npz` holds, for random prompts one behind the other, what `get_rope_index` gives, as int16.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from golden_folders import VERSIONS, draw_tensors, rename_drawn, whole, with_shares, write_folders
from make_vision import whole_pictures
from safetensors.torch import load_file, save_file
from transformers.models.pixtral.processing_pixtral import PixtralProcessor

IMAGE, VISION_START, VISION_END, VIDEO = 90, 91, 92, 93
_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.3,
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
    "initializer_range": 0.3,
}
_SIX_BY_SIX = {"image_size": 12, "patch_size": 2, "intermediate_size": 16, "num_hidden_layers": 1}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


@dataclass(frozen=True)
class Model:
    """One golden model: classes of transformers, configuration, images as grids in patches.

    `old` writes `config.json` as the first releases did, `wrapped` the tensors' names as transformers 4.52 to 4.57 did
    (later ones write the first names again). Without a `seed` it is the model's place among all.
    """

    config_class: Any
    model_class: Any
    config: dict[str, Any]
    grids: list[tuple[int, int, int]] = field(default_factory=lambda: [(1, 6, 4), (1, 2, 10)])
    old: bool = False
    wrapped: bool = False
    dtype: str = "float16"
    seed: int | None = None


def _qwen2_5(tied: bool = False) -> dict[str, Any]:
    text = {**_TEXT, "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2]}}
    vision = {**_QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied, **_QWEN_TOKENS}


def _qwen3() -> dict[str, Any]:
    rope = {**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {**_TEXT, "head_dim": 16, "rope_parameters": rope}
    vision = {**_QWEN_VISION, "depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": True, **_QWEN_TOKENS}


def _with_experts(config: dict[str, Any], **text: Any) -> dict[str, Any]:
    """A small mixture of experts instead of each MLP."""
    mixture = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **text}
    return config | {"text_config": {**config["text_config"], **mixture}}


def _qwen3_5() -> dict[str, Any]:
    """Of the rotary embedding in a part of each head; the delta rule's norm asks for values that are not too small."""
    rope = {**_MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    text = {
        **_TEXT,
        "head_dim": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "rms_norm_eps": 1e-3,
        "initializer_range": 0.12,
        "rope_parameters": rope,
    }
    vision = {**_QWEN_VISION, "num_position_embeddings": 16}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": True, **_QWEN_TOKENS}


def _llava(text: dict[str, Any], tower: str) -> dict[str, Any]:
    strategy = "default" if tower == "clip_vision_model" else "full"
    return {
        "text_config": {**_TEXT, **text},
        "vision_config": {"model_type": tower, **_TOWER},
        "image_token_index": IMAGE,
        "vision_feature_select_strategy": strategy,
        "vision_feature_layer": -2 if strategy == "default" else -1,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings")),
    }


def _mistral3() -> dict[str, Any]:
    """Queries are scaled from the middle of the prompt on."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    }
    vision = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "text_config": {**_TEXT, "model_type": "ministral3", "head_dim": 8, "rope_parameters": rope},
        "vision_config": {**vision, "patch_size": 4, "hidden_act": "silu", "initializer_range": 0.3},
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
        "tie_word_embeddings": True,
    }


def _paligemma(kind: str, **text: Any) -> dict[str, Any]:
    """A linear layer behind SigLIP; all of a prompt sees itself."""
    gemma = {**_TEXT, "model_type": kind, "num_hidden_layers": 2, "head_dim": 16, "num_key_value_heads": 1, **text}
    tower = {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False, "num_hidden_layers": 1}
    return {
        "text_config": gemma,
        "vision_config": tower,
        "image_token_index": IMAGE,
        "projection_dim": _TEXT["hidden_size"],
        "hidden_size": _TEXT["hidden_size"],
    }


def _gemma3(window: int, *kinds: str) -> dict[str, Any]:
    """Layers with a window and without."""
    text = {
        **_TEXT,
        "model_type": "gemma3_text",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": window,
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    }
    return {
        "text_config": text,
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False, **_SIX_BY_SIX},
        "initializer_range": 0.3,
        "image_token_index": IMAGE,
        "boi_token_index": VISION_START,
        "eoi_token_index": VISION_END,
        "mm_tokens_per_image": 9,
        "tie_word_embeddings": False,
    }


_WITHOUT_MROPE = (transformers.LlavaConfig, transformers.Gemma3Config, transformers.Mistral3Config)
_SQUARE = [(1, 3, 3), (1, 3, 3)]
_QWEN2_5 = (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration)
#: With weights of this seed a causal mask shows far behind the images, too.
_SEEN: dict[str, Any] = {"dtype": "bfloat16", "seed": 11}
_POOLED = [(1, 6, 6), (1, 6, 6)]
_GEMMA3 = (transformers.Gemma3Config, transformers.Gemma3ForConditionalGeneration)
_PALIGEMMA = (transformers.PaliGemmaConfig, transformers.PaliGemmaForConditionalGeneration)
_LLAVA = (transformers.LlavaConfig, transformers.LlavaForConditionalGeneration)
MODELS = {
    "qwen2_5_vl": Model(*_QWEN2_5, _qwen2_5(), wrapped=True),
    "qwen2_5_vl_old": Model(*_QWEN2_5, _qwen2_5(tied=True), [(1, 2, 2), (1, 4, 8), (1, 4, 2)], old=True),
    "qwen3_vl": Model(transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration, _qwen3()),
    "llava_llama_old": Model(*_LLAVA, _llava({"model_type": "llama"}, "clip_vision_model"), _SQUARE, old=True),
    "llava_qwen3": Model(
        *_LLAVA,
        _llava({"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}, "siglip_vision_model"),
        _SQUARE[:1],
        wrapped=True,
    ),
    "llava_mistral": Model(
        *_LLAVA, _llava({"model_type": "mistral", "sliding_window": None}, "clip_vision_model"), _SQUARE[:1]
    ),
    "qwen3_5": Model(
        transformers.Qwen3_5Config,
        transformers.Qwen3_5ForConditionalGeneration,
        _qwen3_5(),
        [(1, 6, 4), (1, 2, 2), (1, 2, 6)],
    ),
    "qwen3_vl_moe": Model(
        transformers.Qwen3VLMoeConfig,
        transformers.Qwen3VLMoeForConditionalGeneration,
        _with_experts(_qwen3(), mlp_only_layers=[1], moe_intermediate_size=24),
        [(1, 4, 4)],
        seed=21,
    ),
    "qwen3_5_moe": Model(
        transformers.Qwen3_5MoeConfig,
        transformers.Qwen3_5MoeForConditionalGeneration,
        _with_experts(_qwen3_5(), shared_expert_intermediate_size=24),
        [(1, 4, 4)],
        seed=22,
    ),
    "mistral3": Model(
        transformers.Mistral3Config,
        transformers.Mistral3ForConditionalGeneration,
        _mistral3(),
        [(1, 4, 4), (1, 2, 6)],
        wrapped=True,
        seed=23,
    ),
    "paligemma": Model(*_PALIGEMMA, _paligemma("gemma"), _SQUARE, wrapped=True, dtype="bfloat16", seed=24),
    "paligemma2": Model(
        *_PALIGEMMA,
        _paligemma(
            "gemma2",
            sliding_window=48,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=20.0,
            final_logit_softcapping=5.0,
        ),
        _SQUARE[:1],
        dtype="bfloat16",
        seed=25,
    ),
    "gemma3_window_24": Model(*_GEMMA3, _gemma3(24, "full", "sliding"), _POOLED, wrapped=True, **_SEEN),
    "gemma3_window_6": Model(*_GEMMA3, _gemma3(6, "sliding", "full"), _POOLED, **_SEEN),
}


def make_model(name: str, directory: Path) -> None:
    """Write one checkpoint and what transformers computes from it."""
    golden = MODELS[name]
    seed = list(MODELS).index(name) if golden.seed is None else golden.seed
    torch.manual_seed(seed)
    model = golden.model_class(golden.config_class(**golden.config))
    model.to(getattr(torch, golden.dtype)).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    draw_tensors(directory / "model.safetensors", seed, 0.3)
    save_file({"pixel_values": torch.zeros(pixel_shape(golden))}, directory / "expected.safetensors")
    draw_tensors(directory / "expected.safetensors", 1000 + seed, 1.0)
    with whole(directory) as complete:
        again = golden.model_class.from_pretrained(complete, dtype=torch.float32, attn_implementation="eager").eval()
        pixel_values = load_file(complete / "expected.safetensors")["pixel_values"]
    with torch.no_grad():
        is_prefix = golden.config_class is transformers.PaliGemmaConfig
        expected = (compute_prefixes if is_prefix else compute)(again, golden, pixel_values)
    if golden.old:
        rewrite_as_old_layout(directory / "config.json")
    if golden.wrapped:
        rename_drawn(directory, wrapped_name)
    save_file(with_shares(expected), directory / "expected.safetensors", metadata=VERSIONS)
    print(f"{name}: {len(expected['token_ids'])} tokens, standard deviation {expected['logits'].std():.2f}")


def pixel_shape(golden: Model) -> tuple[int, ...]:
    """Of all images as the vision part takes them."""
    vision = golden.config["vision_config"]
    if golden.config_class in (transformers.LlavaConfig, transformers.Gemma3Config, transformers.PaliGemmaConfig):
        return len(golden.grids), 3, vision["image_size"], vision["image_size"]
    patch = 3 * vision.get("temporal_patch_size", 1) * vision["patch_size"] ** 2
    return sum(height * width for _, height, width in golden.grids), patch


def compute(model: torch.nn.Module, golden: Model, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `expected.safetensors` holds."""
    is_llava, is_gemma, is_mistral = (golden.config_class is each for each in _WITHOUT_MROPE)
    vision = golden.config["vision_config"]
    grids = torch.tensor(golden.grids)
    inputs: dict[str, Any] = {"pixel_values": pixel_values}
    if is_llava or is_gemma:
        features = model.get_image_features(**inputs, **_strategy(golden), return_dict=True)
        counts = [len(rows) for rows in features.pooler_output]
    elif is_mistral:
        merge = golden.config["spatial_merge_size"]
        patches = pixel_values.split([height * width for _, height, width in golden.grids])
        inputs["pixel_values"], inputs["image_sizes"] = whole_pictures(list(patches), golden.grids, merge)
        features, counts = model.get_image_features(**inputs, return_dict=True), []
    else:
        inputs["image_grid_thw"] = grids
        features = model.get_image_features(**inputs, return_dict=True)
        counts = [int(grid.prod()) // vision["spatial_merge_size"] ** 2 for grid in grids]
    shown = shown_images(counts, bare=is_llava)
    if is_mistral:
        shown = [rows_of_tokens(golden, inputs["image_sizes"], index) for index in range(len(grids))]
    token_ids, kinds = prompt_of(shown, lengths=[2, 4, 3] if is_gemma or is_mistral else None)
    kinds_name = "token_type_ids" if is_gemma else "mm_token_type_ids"
    if not (is_llava or is_mistral):
        inputs[kinds_name] = kinds[None]
    continued = torch.randint(3, 90, (5,))
    expected = {"token_ids": token_ids, "grids": grids, "continued": continued}
    for index, rows in enumerate(features.pooler_output):
        expected[f"image{index}.rows"] = rows
    for layer, rows in enumerate(getattr(features, "deepstack_features", None) or ()):
        for index, part in enumerate(rows if isinstance(rows, (tuple, list)) else rows.split(counts)):
            expected[f"image{index}.deepstack{layer}"] = part
    if not (is_llava or is_gemma or is_mistral):
        positions, delta = model.model.get_rope_index(token_ids[None], kinds[None], grids)
        expected |= {"positions": positions[:, 0], "delta": delta[0]}
    first = model(input_ids=token_ids[None], **inputs, use_cache=True)
    expected["logits"] = first.logits[0]
    whole = torch.cat((token_ids, continued))
    if not (is_llava or is_mistral):
        inputs[kinds_name] = torch.cat((kinds, torch.zeros(len(continued), dtype=kinds.dtype)))[None]
    expected["continued_logits"] = model(input_ids=whole[None], **inputs).logits[0, len(token_ids) :]
    if is_gemma:
        attended = {"attention_mask": torch.ones_like(token_ids)[None]}
        prompt = {"input_ids": token_ids[None], "pixel_values": pixel_values, kinds_name: kinds[None], **attended}
        expected["greedy"] = model.generate(
            **prompt, do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0
        )[0, len(token_ids) :]
    return {name: value.detach().contiguous().clone() for name, value in expected.items()}


def compute_prefixes(model: torch.nn.Module, golden: Model, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `expected.safetensors` holds of PaliGemma, whose prompts see themselves: `logits` are the last ones of the
    prompts that end after one, two, .. tokens behind the images."""
    rows = model.get_image_features(pixel_values).pooler_output
    shown, text = [IMAGE] * (len(rows) * rows.shape[1]), torch.randint(3, 90, (4,)).tolist()
    token_ids, continued = torch.tensor([*shown, _TEXT["bos_token_id"], *text]), torch.randint(3, 90, (5,))
    logits = []
    for stop in range(len(shown) + 1, len(token_ids) + 1):
        ids = token_ids[None, :stop]
        outputs = model(input_ids=ids, pixel_values=pixel_values, token_type_ids=torch.zeros_like(ids))
        logits.append(outputs.logits[0, -1])
    whole, kinds = torch.cat((token_ids, continued)), torch.zeros(len(token_ids) + len(continued), dtype=torch.long)
    kinds[len(token_ids) :] = 1
    outputs = model(input_ids=whole[None], pixel_values=pixel_values, token_type_ids=kinds[None])
    expected = {
        "token_ids": token_ids,
        "grids": torch.tensor(golden.grids),
        "continued": continued,
        "logits": torch.stack(logits),
        "continued_logits": outputs.logits[0, len(token_ids) :],
    }
    expected |= {f"image{index}.rows": each for index, each in enumerate(rows)}
    return {name: value.detach().contiguous().clone() for name, value in expected.items()}


def _strategy(golden: Model) -> dict[str, Any]:
    if golden.config_class is transformers.Gemma3Config:
        return {}
    return {key: golden.config[key] for key in ("vision_feature_layer", "vision_feature_select_strategy")}


def shown_images(counts: list[int], bare: bool) -> list[list[int]]:
    """The tokens of images of `counts` tokens, with those around them."""
    return [[IMAGE] * count if bare else [VISION_START, *[IMAGE] * count, VISION_END] for count in counts]


def rows_of_tokens(golden: Model, sizes: torch.Tensor, index: int) -> list[int]:
    """The tokens of an image as Pixtral's processor writes them."""
    tokens = {"image_token": "i", "image_break_token": "b", "image_end_token": "e"}
    merge = golden.config["spatial_merge_size"]
    settings = {"patch_size": golden.config["vision_config"]["patch_size"], "spatial_merge_size": merge}
    written = PixtralProcessor.replace_image_token(SimpleNamespace(**settings, **tokens), {"image_sizes": sizes}, index)
    return [{"i": IMAGE, "b": VISION_START, "e": VISION_END}[each] for each in written]


def prompt_of(shown: list[list[int]], lengths: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids with text before, between and after the tokens of images, and which are an image's (1)."""
    lengths = lengths or [3 + 2 * index for index in range(len(shown) + 1)]
    ids: list[int] = []
    for index, length in enumerate(lengths):
        ids += torch.randint(3, 90, (length,)).tolist()
        ids += shown[index] if index < len(shown) else []
    token_ids = torch.tensor(ids)
    return token_ids, (token_ids == IMAGE).int()


def rewrite_as_old_layout(path: Path) -> None:
    """`config.json` as the first releases had it: Qwen2.5-VL's flat, LLaVA's text part without what is the default."""
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text.pop("dtype", None)
    if config["model_type"] == "llava":
        defaults = transformers.LlamaConfig().to_dict() | {"rope_theta": 10000.0}
        kept = {key: value for key, value in text.items() if key == "model_type" or defaults.get(key) != value}
        config["text_config"] = kept
    else:
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        text.pop("layer_types", None)
        config = text | config
    path.write_text(json.dumps(config, indent=2) + "\n")


def wrapped_name(name: str) -> str:
    """Everything but the head below `model.`, the language model below `model.language_model.`."""
    text = name.removeprefix("language_model.")
    if text.startswith("lm_head."):
        return text
    if text.startswith("model."):
        return f"model.language_model.{text.removeprefix('model.')}"
    return f"model.{name}"


def make_positions(directory: Path) -> None:
    """Positions of random prompts: grids of any shape in merged blocks, several images, text between or hardly any."""
    torch.manual_seed(5)
    draw = random.Random(5)
    found = {"versions": np.array(json.dumps(VERSIONS))}
    for name, cases in (("qwen2_5_vl", 24), ("qwen3_vl", 24), ("qwen3_5", 6)):
        golden, parts = MODELS[name], defaultdict[str, list[torch.Tensor]](list)
        for _ in range(cases):
            merge = draw.choice((1, 2, 3))
            config = json.loads(json.dumps(golden.config))
            config["vision_config"]["spatial_merge_size"] = merge
            model = golden.model_class(golden.config_class(**config)).model
            grids = [(1, merge * draw.randint(1, 9), merge * draw.randint(1, 9)) for _ in range(draw.randint(0, 4))]
            counts = [height * width // merge**2 for _, height, width in grids]
            lengths = [draw.choice((0, 1, 7)) for _ in grids] + [draw.choice((1, 2, 30))]
            token_ids, kinds = prompt_of(shown_images(counts, bare=False), lengths)
            grid_tensor = torch.tensor(grids).reshape(-1, 3)
            positions, delta = model.get_rope_index(token_ids[None], kinds[None], grid_tensor)
            parts["token_ids"].append(token_ids)
            parts["grids"].append(grid_tensor)
            parts["merge_size"].append(torch.tensor([merge]))
            parts["positions"].append(positions[:, 0])
            parts["delta"].append(delta[0])
            parts["tokens"].append(torch.tensor([len(token_ids)]))
            parts["images"].append(torch.tensor([len(grids)]))
        for key, each in parts.items():
            found[f"{name}.{key}"] = torch.cat(each, dim=-1 if key == "positions" else 0).to(torch.int16).numpy()
    np.savez_compressed(directory / "positions.npz", **found)


if __name__ == "__main__":
    write_folders(__doc__, {name: partial(make_model, name) for name in MODELS}, make_positions)
