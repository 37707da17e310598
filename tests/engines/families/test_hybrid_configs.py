"""LFM2 and Qwen3.5 as they are published: what is read of them, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_files import golden_folder
from safetensors.numpy import load_file, save_file
from tiny_families import RECURRENT

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import CheckpointError, EngineDirectoryError, UnsupportedModelError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.vision_config import read_vision_config
from edgellm.engines.families.vision_encoders import host_weights, vision_weights
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.decoder import decoder_weights, unread_tensors
from edgellm.engines.model.draft_decoder import draft_weights, mtp_draft
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.rotary import mrope_axes

GOLDENS = golden_folder("decoder")

LFM2_1_2B = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_use_swiglu": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_pos_enc": True,
    "vocab_size": 65536,
}
QWEN3_5_TEXT = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "vocab_size": 248320,
}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "text_config": QWEN3_5_TEXT,
    "tie_word_embeddings": True,
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 12,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 768,
        "in_channels": 3,
        "intermediate_size": 3072,
        "model_type": "qwen3_5",
        "num_heads": 12,
        "num_position_embeddings": 2304,
        "out_hidden_size": 1024,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def parameters(specs: Iterable[WeightSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs)


def count(config: dict[str, Any]) -> int:
    return parameters(decoder_weights(decoder_config(config)))


def test_parameter_counts_are_the_published_ones() -> None:
    assert count(LFM2_1_2B) == 1_170_340_608
    assert count(LFM2_1_2B | {"hidden_size": 1024, "block_ff_dim": 6656, "num_attention_heads": 16}) == 354_483_968
    assert count(LFM2_1_2B | {"hidden_size": 1536, "block_ff_dim": 10240, "num_attention_heads": 24}) == 742_489_344
    assert count(QWEN3_5) == count(QWEN3_5_TEXT) == 752_393_024


def test_the_parts_of_qwen3_5_are_the_whole() -> None:
    """Of Qwen3.5-0.8B with the head for multi-token prediction and the encoder."""
    vision = read_vision_config(QWEN3_5)
    assert vision is not None
    encoder = parameters([*vision_weights(vision), *host_weights(vision)])
    head = parameters(spec for spec in draft_weights(mtp_draft(decoder_config(QWEN3_5))) if spec.parts)
    assert (encoder, head) == (100_592_896, 20_452_864)
    assert count(QWEN3_5) + encoder + head == 873_438_784


def test_lfm2() -> None:
    config = decoder_config(LFM2_1_2B)
    attention = [index for index, kind in enumerate(config.layer_kinds) if kind == "attention"]
    assert attention == LFM2_1_2B["full_attn_idxs"] and set(config.layer_kinds) == {"attention", "convolution"}
    assert (config.intermediate_size, config.head_dim, config.rotary_dim, config.rope_theta) == (8192, 64, 64, 1e6)
    assert (config.conv_width, config.conv_bias, config.qk_norm, config.naming) == (3, False, True, "lfm2")
    assert (config.tie_word_embeddings, config.eos_token_ids, config.rms_norm_eps) == (True, (7,), 1e-5)
    assert not config.attention_gate and config.norm_offset == 0


def test_lfm2_of_later_files() -> None:
    """`layer_types` counts more than the list of attention layers, and what is not adjusted is as written."""
    types = ["conv", "full_attention"] * 8
    later = {key: value for key, value in LFM2_1_2B.items() if key not in ("block_ff_dim", "rope_theta")}
    later |= {"layer_types": types, "intermediate_size": 8200, "block_auto_adjust_ff_dim": False}
    config = decoder_config(later | {"tie_embedding": False, "rope_parameters": {"rope_theta": 5e5}})
    assert config.layer_kinds == ("convolution", "attention") * 8
    assert (config.intermediate_size, config.tie_word_embeddings, config.rope_theta) == (8200, False, 5e5)
    assert decoder_config(later).rope_theta == 1e6
    every = {key: value for key, value in LFM2_1_2B.items() if key != "full_attn_idxs"}
    assert decoder_config(every).layer_kinds == ("attention",) * 16


def test_qwen3_5() -> None:
    config = decoder_config(QWEN3_5)
    assert config.layer_kinds == ("delta", "delta", "delta", "attention") * 6
    assert (config.delta_heads, config.delta_channels, config.conv_width) == ((16, 16, 128, 128), 6144, 4)
    assert (config.head_dim, config.rotary_dim, config.rope_theta) == (256, 64, 1e7)
    assert (config.mrope_section, config.mrope_interleaved) == ((11, 11, 10), True)
    assert np.bincount(mrope_axes(config)[:32]).tolist() == [11, 11, 10]
    assert config.attention_gate and config.qk_norm and config.norm_offset == 1
    assert (config.eos_token_ids, config.dtype, config.naming) == ((248044,), "bfloat16", "qwen3_5")
    assert config.rope_scaling is None and not config.attention_bias
    by_itself = QWEN3_5_TEXT | {"architectures": ["Qwen3_5ForCausalLM"]}
    assert decoder_config(by_itself).layer_kinds == config.layer_kinds


def test_qwen3_5_with_and_without_its_encoder() -> None:
    config, text = decoder_config(QWEN3_5), decoder_config({**QWEN3_5, "vision_config": None})
    assert (config.image_token_id, config.spatial_merge_size, config.deepstack_layers) == (248056, 2, 0)
    assert text.image_token_id is None and text == replace(config, image_token_id=None, spatial_merge_size=1)
    assert read_vision_config({**QWEN3_5, "vision_config": None}) is None
    assert decoder_config(QWEN3_5_TEXT | {"architectures": ["Qwen3_5ForCausalLM"]}).image_token_id is None
    assert decoder_config({key: QWEN3_5[key] for key in QWEN3_5 if key != "image_token_id"}) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": [1]}, r"vision_config is \[1\], expected an object"),
        ({"image_token_id": 248320}, "image_token_id is 248320, expected a token id from 0 to 248319"),
        ({"vision_config": {"spatial_merge_size": 0}}, "spatial_merge_size is 0, expected"),
    ],
)
def test_wrong_image_fields_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config(QWEN3_5 | change)


def test_qwen3_5_without_what_its_class_assumes() -> None:
    left_out = ("layer_types", "linear_conv_kernel_dim", "linear_key_head_dim", "head_dim", "attn_output_gate")
    bare = {key: value for key, value in QWEN3_5_TEXT.items() if key not in left_out}
    assert decoder_config(bare) == decoder_config(QWEN3_5_TEXT)
    every_third = decoder_config(bare | {"full_attention_interval": 3})
    assert every_third.layer_kinds == ("delta", "delta", "attention") * 8
    outside = bare | {"partial_rotary_factor": 0.25, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}
    assert decoder_config(outside) == decoder_config(QWEN3_5_TEXT)
    assert decoder_config({**bare, "linear_num_value_heads": None}).delta_heads == (16, 32, 128, 128)


REFUSED = [
    (LFM2_1_2B, {"layer_types": ["conv"] * 15 + ["full_attenion"]}, "layer_types has full_attenion, supported are"),
    (LFM2_1_2B, {"layer_types": ["conv"] * 15}, "layer_types has 15 layers, but num_hidden_layers is 16"),
    (LFM2_1_2B, {"layer_types": "conv"}, 'layer_types is "conv", expected a list'),
    (LFM2_1_2B, {"layer_types": [["conv"]] * 16}, "layer_types is .*, expected a list"),
    (LFM2_1_2B, {"layer_types": ["linear_attention"] * 16}, "layer_types has linear_attention, supported are conv"),
    (LFM2_1_2B, {"full_attn_idxs": [2, 16]}, r"full_attn_idxs is \[2, 16\], expected a list of layers from 0 to 15"),
    (LFM2_1_2B, {"full_attn_idxs": 2}, "full_attn_idxs is 2, expected a list of layers"),
    (LFM2_1_2B, {"conv_L_cache": 1}, "conv_L_cache is 1, supported are short convolutions of 2 to 8 tokens"),
    (LFM2_1_2B, {"conv_L_cache": 9}, "conv_L_cache is 9, supported are short convolutions of 2 to 8 tokens"),
    (LFM2_1_2B, {"conv_L_cache": 0}, "conv_L_cache is 0, expected a whole number"),
    (LFM2_1_2B, {"conv_bias": "no"}, 'conv_bias is "no", expected true or false'),
    (LFM2_1_2B, {"block_ff_dim": -1}, "block_ff_dim is -1, expected a whole number"),
    (LFM2_1_2B, {"block_multiple_of": 0}, "block_multiple_of is 0, expected a whole number"),
    (LFM2_1_2B, {"block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier is 0, expected a number above 0"),
    (LFM2_1_2B, {"norm_eps": 0}, "norm_eps is 0, expected a number above 0"),
    (LFM2_1_2B, {"num_hidden_layers": "16"}, 'num_hidden_layers is "16", expected a whole number'),
    (LFM2_1_2B, {"hidden_act": "gelu"}, 'hidden_act is "gelu", supported is silu'),
    (QWEN3_5_TEXT, {"layer_types": ["sliding_attention"] * 24}, "layer_types has sliding_attention, supported are lin"),
    (QWEN3_5_TEXT, {"layer_types": ["full_attention"] * 23}, "layer_types has 23 layers, but num_hidden_layers is 24"),
    (QWEN3_5_TEXT, {"linear_conv_kernel_dim": 16}, "linear_conv_kernel_dim is 16, supported are short convolutions of"),
    (QWEN3_5_TEXT, {"linear_num_value_heads": 24}, "linear_num_value_heads 24 is not a multiple of"),
    (QWEN3_5_TEXT, {"linear_key_head_dim": 0}, "linear_key_head_dim is 0, expected a whole number"),
    (QWEN3_5_TEXT, {"attn_output_gate": False}, "attn_output_gate is false, supported is attention with a gate"),
    (QWEN3_5_TEXT, {"partial_rotary_factor": 2, "rope_parameters": {}}, "partial_rotary_factor is 2, expected"),
    (QWEN3_5_TEXT, {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0, expected"),
    (QWEN3_5_TEXT, {"num_experts": 8}, "num_experts is 8 .mixture of experts."),
    (
        QWEN3_5_TEXT,
        {"rope_parameters": {"mrope_section": [24, 20, 20], "partial_rotary_factor": 0.25}},
        r"mrope_section is \[24, 20, 20\], expected a sum of 32",
    ),
    (
        QWEN3_5_TEXT,
        {"rope_parameters": {"mrope_interleaved": False, "partial_rotary_factor": 0.25}},
        "mrope_interleaved is false, supported is true",
    ),
]


@pytest.mark.parametrize(("published", "change", "message"), REFUSED, ids=lambda value: str(value)[-60:])
def test_wrong_files_are_refused(published: dict[str, Any], change: dict[str, Any], message: str) -> None:
    decoder_config(published)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        decoder_config(published | change)


def test_fields_inside_a_whole_checkpoint_are_refused_too() -> None:
    with pytest.raises(UnsupportedModelError, match="layer_types has conv"):
        decoder_config(QWEN3_5 | {"text_config": QWEN3_5_TEXT | {"layer_types": ["conv"] * 24}})


def test_a_draft_head_in_the_checkpoint_is_left_alone(tmp_path: Path) -> None:
    """Beside Qwen3.5's decoder, not beside another family's, and nothing else that is unknown."""
    for name, names in (("qwen3_5_text", ["mtp.fc.weight"]), ("lfm2", []), ("qwen3_5_text", [])):
        target = shutil.copytree(GOLDENS / name, tmp_path / f"{name}{len(names)}")
        more = dict.fromkeys(names or ["mtp.norm.weight" if name == "lfm2" else "mtpfc"], np.zeros(32, np.float16))
        save_file(load_file(target / "model.safetensors") | more, target / "model.safetensors")
        with Checkpoint.open(target) as checkpoint:
            config = decoder_config(checkpoint.config)
            if names:
                checkpoint.check(decoder_weights(config), unread_tensors(config))
                continue
            with pytest.raises(CheckpointError, match="unknown: mtp"):
                checkpoint.check(decoder_weights(config), unread_tensors(config))


@pytest.mark.parametrize("name", RECURRENT)
def test_a_directory_keeps_what_was_read(name: str, tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **RECURRENT[name])
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 16, 96), [])
    assert EngineDirectory.open(tmp_path / "engines").config == read_decoder_config(checkpoint)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lfm2", {"layer_kinds": ["convolution", "attention"]}, "'layer_kinds' is .*expected for each of 3 layers"),
        ("lfm2", {"layer_kinds": ["convolution", "attention", "conv"]}, "'layer_kinds' is .*expected for each of 3"),
        ("lfm2", {"layer_kinds": [1, 2, 3]}, "'layer_kinds' is .*expected a list of at most 4096 texts"),
        ("lfm2", {"conv_width": 9}, "'conv_width' is 9, expected 2 to 8"),
        ("lfm2", {"naming": "gpt2"}, "'naming' is 'gpt2', expected one of llama, lfm2, qwen3_5"),
        ("qwen3_5", {"delta_heads": [2, 3, 16, 24]}, r"'delta_heads' is \[2, 3, 16, 24\], expected the numbers of"),
        ("qwen3_5", {"delta_heads": [2, 4, 16]}, r"'delta_heads' is \[2, 4, 16\], expected the numbers of"),
        ("qwen3_5", {"delta_heads": [0, 4, 16, 24]}, r"'delta_heads' is \[0, 4, 16, 24\], expected the numbers of"),
    ],
)
def test_directories_that_say_what_cannot_be(
    name: str, change: dict[str, Any], message: str, tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **RECURRENT[name])
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 16, 96), [])
    path = tmp_path / "engines" / "edgellm.json"
    values = json.loads(path.read_text())
    values["config"] |= change
    path.write_text(json.dumps(values))
    with pytest.raises(EngineDirectoryError, match=message):
        EngineDirectory.open(tmp_path / "engines")
