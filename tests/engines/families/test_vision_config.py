"""`config.json` of multimodal checkpoints, and the tensors of their vision part."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_files import golden_folder
from golden_vision import GOLDENS, golden_config
from safetensors.numpy import load_file, save_file

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families.vision_config import VisionConfig, read_vision, read_vision_config
from edgellm.engines.formats.strict_formats import JSONObject, plain_values

#: As published with Qwen2.5-VL-3B-Instruct, LLaVA-1.5-7B and Qwen3-VL-2B-Instruct, without what no one reads.
QWEN2_5: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "torch_dtype": "bfloat16",
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "temporal_patch_size": 2,
    },
}
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 32000,
    "torch_dtype": "float16",
    "projector_hidden_act": "gelu",
    "text_config": {"model_type": "llama", "vocab_size": 32064},
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "text_config": {"hidden_size": 2048, "dtype": "bfloat16"},
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
#: As transformers writes Qwen3.5's; published files say "qwen3_5" and an empty list of deepstack layers, too.
QWEN3_5: dict[str, Any] = {
    **QWEN3,
    "model_type": "qwen3_5",
    "vision_config": {
        **{key: value for key, value in QWEN3["vision_config"].items() if key != "deepstack_visual_indexes"},
        "model_type": "qwen3_5_vision",
    },
}


def changed(config: dict[str, Any], vision: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    return {**config, **top, "vision_config": {**config["vision_config"], **(vision or {})}}


def test_published_qwen2_5_vl() -> None:
    config = read_vision_config(QWEN2_5)
    assert config is not None
    assert (config.hidden_size, config.num_heads, config.head_dim, config.in_channels) == (1280, 16, 80, 3)
    assert (config.window_patches, config.window_merged_side, config.merge_patches) == (64, 4, 4)
    assert (config.full_attention_layers, config.out_hidden_size, config.dtype) == ((7, 15, 23, 31), 2048, "bfloat16")
    assert config.patch_elements == 3 * 2 * 14 * 14
    assert config.token_count((1, 34, 46)) == 17 * 23


def test_published_llava() -> None:
    config = read_vision_config(LLAVA)
    assert config is not None
    assert (config.class_token, config.feature_layers, config.drops_first_row) == (True, (23,), True)
    assert (config.activation, config.projector_activation, config.norm_eps) == ("quick_gelu", "gelu", 1e-5)
    assert (config.image_side, config.tower_rows, config.token_count((1, 24, 24))) == (24, 577, 576)
    assert (config.out_hidden_size, config.image_token_id) == (4096, 32000)


def test_published_qwen3_vl() -> None:
    config = read_vision_config(QWEN3)
    assert config is not None
    assert (config.deepstack_layers, config.position_side, config.activation) == ((5, 11, 17), 48, "gelu_tanh")
    assert (config.window_patches, config.dtype) == (1, "bfloat16")


def test_qwen3_5_has_qwen3_vls_encoder_without_deepstack() -> None:
    config = read_vision_config(QWEN3_5)
    assert config is not None and config.family == "qwen3_5" and config.deepstack_layers == ()
    assert read_vision_config(changed(QWEN3, {"deepstack_visual_indexes": []})) == replace(config, family="qwen3_vl")
    for said in ({"model_type": "qwen3_5"}, {"model_type": None}, {"deepstack_visual_indexes": []}):
        assert read_vision_config(changed(QWEN3_5, said)) == config


def test_a_text_only_model_has_none() -> None:
    assert read_vision_config({"model_type": "qwen3", "hidden_size": 64}) is None


@pytest.mark.parametrize("published", [QWEN2_5, LLAVA, QWEN3, QWEN3_5], ids=["qwen2_5", "llava", "qwen3", "qwen3_5"])
def test_json_and_back(published: dict[str, Any]) -> None:
    config = read_vision_config(published)
    values = json.dumps(plain_values(config)).encode()
    assert JSONObject.parse(values, "test", CheckpointError).dataclass(VisionConfig) == config


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (changed(QWEN2_5, {"window_size": 100}), "window_size is 100"),
        (changed(QWEN2_5, {"fullatt_block_indexes": [7, 40]}), r"fullatt_block_indexes is \[7, 40\]"),
        (changed(QWEN2_5, {"num_heads": 7}), "not a multiple of num_heads 7"),
        (changed(QWEN2_5, {"out_hidden_size": 1024}), "language model's hidden_size is 2048"),
        (changed(QWEN2_5, image_token_id=None), "image_token_id is null"),
        (changed(QWEN2_5, {"depth": "32"}), 'depth is "32"'),
        (changed(QWEN3, {"num_position_embeddings": 2300}), "the square of a whole number"),
        (changed(QWEN3, {"deepstack_visual_indexes": [5, 5]}), r"deepstack_visual_indexes is \[5, 5\]"),
        (changed(QWEN3, {"num_heads": 512}), "a multiple of 4"),
        (changed(QWEN3, {"rope_parameters": {"rope_theta": -1}}), "rope_theta is -1"),
        (changed(QWEN3_5, {"num_position_embeddings": 2300}), "the square of a whole number"),
        (changed(QWEN3_5, {"out_hidden_size": 1024}), "language model's hidden_size is 2048"),
        (changed(QWEN3_5, {"depth": 0}), "depth is 0"),
        (changed(QWEN3_5, {"patch_size": [16, 16]}), r"patch_size is \[16, 16\]"),
        (changed(QWEN3_5, vision_start_token_id=None), "vision_start_token_id is null"),
        (changed(LLAVA, vision_feature_layer=30), "vision_feature_layer is 30"),
        (changed(LLAVA, vision_feature_layer=[]), r"vision_feature_layer is \[\]"),
        (changed(LLAVA, vision_feature_select_strategy="some"), 'select_strategy is "some"'),
        (changed(LLAVA, multimodal_projector_bias="no"), "multimodal_projector_bias"),
        (changed(LLAVA, {"image_size": 7}), "smaller than patch_size 14"),
        (changed(LLAVA, {"image_size": 14_000_000}), "at most 256 patches a side"),
    ],
)
def test_wrong_fields(config: dict[str, Any], found: str) -> None:
    with pytest.raises(CheckpointError, match=found):
        read_vision_config(config)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (changed(LLAVA, {"model_type": "pixtral"}), 'model_type is "pixtral"'),
        (changed(LLAVA, {"hidden_act": "relu"}), 'hidden_act is "relu"'),
        (changed(QWEN2_5, {"hidden_act": "gelu"}), "supported is silu"),
        (changed(QWEN3, {"in_channels": 4}), "images of 3 channels"),
        (changed(QWEN3_5, {"model_type": "siglip_vision_model"}), '"siglip_vision_model", supported are qwen3_5 and'),
        (changed(QWEN3_5, {"deepstack_visual_indexes": [5]}), r"indexes is \[5\], supported are no layers"),
    ],
)
def test_unsupported_features(config: dict[str, Any], found: str) -> None:
    with pytest.raises(UnsupportedModelError, match=found):
        read_vision_config(config)


def test_all_problems_at_once() -> None:
    with pytest.raises(CheckpointError, match="3 problems") as error:
        read_vision_config(changed(QWEN2_5, {"window_size": 100, "num_heads": 11}, image_token_id="x"))
    assert all(key in str(error.value) for key in ("window_size", "num_heads", "image_token_id"))


@pytest.mark.parametrize(
    ("name", "tower", "projector"),
    [
        ("qwen2_5_vl", "model.visual.", "model.visual."),
        ("qwen2_5_vl_old_layout", "visual.", "visual."),
        ("llava_clip", "vision_tower.vision_model.", "multi_modal_projector."),
        ("llava_clip_two_layers", "model.vision_tower.", "model.multi_modal_projector."),
        ("llava_siglip", "model.vision_tower.vision_model.", "model.multi_modal_projector."),
    ],
)
def test_names_of_older_and_newer_layouts(name: str, tower: str, projector: str) -> None:
    config = golden_config(name)
    assert (config.tensor_prefix, config.projector_prefix) == (tower, projector)


@pytest.mark.parametrize("half", ["blocks.1.", "merger.", "pos_embed.", "patch_embed."])
def test_half_an_encoder_is_refused(half: str, tmp_path: Path) -> None:
    shutil.copytree(golden_folder("image_prompts") / "qwen3_5", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    lost = [name for name in tensors if name.startswith(f"model.visual.{half}")]
    save_file({name: values for name, values in tensors.items() if name not in lost}, file)
    with Checkpoint.open(tmp_path / "model") as checkpoint, pytest.raises(CheckpointError) as error:
        read_vision(checkpoint)
    assert lost and all(f"missing: {name} " in str(error.value) for name in lost)
    assert "or build it without images: --max-image-patches 0" in str(error.value)


def test_every_wrong_tensor_is_listed(tmp_path: Path) -> None:
    shutil.copytree(GOLDENS / "qwen3_vl", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.visual.blocks.1.attn.qkv.bias"]
    tensors["model.visual.pos_embed.weight"] = np.zeros((9, 32), np.float32)
    tensors["model.visual.extra"] = np.zeros(3, np.float32)
    save_file(tensors, file)
    with Checkpoint.open(tmp_path / "model") as checkpoint, pytest.raises(CheckpointError) as error:
        read_vision(checkpoint)
    message = str(error.value)
    assert "3 differences" in message
    assert "missing: model.visual.blocks.1.attn.qkv.bias [96]" in message
    assert "wrong shape: model.visual.pos_embed.weight is [9, 32], expected [25, 32]" in message
    assert "unknown: model.visual.extra [3]" in message


def test_tensors_that_nothing_is_computed_from_may_be_there_or_not(tmp_path: Path) -> None:
    shutil.copytree(GOLDENS / "llava_siglip", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    unread = [name for name in tensors if ".head." in name or ".post_layernorm." in name]
    assert unread
    kept = {name: values for name, values in tensors.items() if name not in unread}
    kept["model.vision_tower.vision_model.embeddings.position_ids"] = np.arange(16)[None]
    save_file(kept, file)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        assert read_vision(checkpoint) == golden_config("llava_siglip")
