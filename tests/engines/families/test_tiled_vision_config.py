"""`config.json` and `preprocessor_config.json` of models that see parts of pictures: what is read, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kernel_refusals import kernel_refusal

from edgellm.engines.backends.executors import shared_limit_of
from edgellm.engines.errors import CheckpointError, EdgeLLMError, UnsupportedModelError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.vision_config import read_vision_config
from edgellm.engines.formats.strict_formats import JSONObject, plain_values
from edgellm.engines.model.limits import vision_shape
from edgellm.engines.model.vision import VisionConfig
from edgellm.multimodal.image_processor import open_image_processor

#: Of the sizes of SmolVLM2-500M, LFM2-VL-1.6B, InternVL3.5-1B, Gemma 4 E2B, and a SigLIP with a table of 70 x 70
#: positions; what the classes have by themselves is left out.
CONFIGS: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "model_type": "smolvlm",
        "dtype": "bfloat16",
        "scale_factor": 4,
        "text_config": {"hidden_size": 960},
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": 768,
            "image_size": 512,
            "num_attention_heads": 12,
            "patch_size": 16,
        },
    },
    "lfm2_vl": {
        "model_type": "lfm2_vl",
        "dtype": "bfloat16",
        "text_config": {"hidden_size": 2048},
        "vision_config": {"model_type": "siglip2_vision_model", "hidden_size": 1152, "num_attention_heads": 16},
    },
    "internvl": {
        "model_type": "internvl",
        "dtype": "bfloat16",
        "text_config": {"hidden_size": 1024},
        "vision_config": {
            "model_type": "internvl_vision",
            "attention_bias": True,
            "image_size": [448, 448],
            "patch_size": [14, 14],
        },
    },
    "gemma4": {
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "text_config": {"hidden_size": 1536},
        "vision_config": {"model_type": "gemma4_vision", "use_clipped_linears": True},
    },
    "minicpmv4_6": {
        "model_type": "minicpmv4_6",
        "dtype": "bfloat16",
        "image_token_id": 5,
        "text_config": {"hidden_size": 1024},
        "vision_config": {"image_size": 980, "patch_size": 14, "hidden_size": 1152, "num_attention_heads": 16},
    },
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 2048},
        "max_image_size": {"longest_edge": 512},
    },
    "lfm2_vl": {"image_processor_type": "Lfm2VlImageProcessorFast"},
    "internvl": {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 448, "width": 448}},
    "gemma4": {"image_processor_type": "Gemma4ImageProcessor"},
    "minicpmv4_6": {"image_processor_type": "MiniCPMV4_6ImageProcessor"},
}


def vision_of(name: str, top: dict[str, Any] | None = None, vision: dict[str, Any] | None = None) -> VisionConfig:
    config = CONFIGS[name] | (top or {})
    found = read_vision_config(config | {"vision_config": config["vision_config"] | (vision or {})})
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "tokens", "patches"), [("smolvlm", 64, 1024), ("internvl", 256, 1024)])
def test_tiles_have_as_many_tokens_as_published(name: str, tokens: int, patches: int) -> None:
    config = vision_of(name)
    side = config.image_side
    assert (config.token_count((1, side, side)), side**2) == (tokens, patches)


def test_what_lfm2_vls_files_leave_out() -> None:
    config = vision_of("lfm2_vl")
    assert (config.image_side, config.position_side, config.merge_patches, config.projector_size) == (0, 16, 4, 2560)
    assert config.projector_norm and config.projector_bias
    assert not vision_of("lfm2_vl", {"projector_use_layernorm": False}).projector_norm


@pytest.mark.parametrize("inside", ["qwen2", "qwen3", "llama", "qwen3_moe", "gpt_oss"])
def test_what_may_be_inside_of_internvl(inside: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6}
    count = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}.get(inside)
    text = {"model_type": inside, "vocab_size": 151936, **sizes, **heads}
    text |= {} if count is None else {count: 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = decoder_config(CONFIGS["internvl"] | {"text_config": text})
    assert (config.image_token_id, config.image_tokens) == (151667, 0)
    assert bool(config.mixture) == (count is not None)


@pytest.mark.parametrize("name", CONFIGS)
def test_json_and_back(name: str) -> None:
    config = vision_of(name)
    assert (
        JSONObject(json.loads(json.dumps(plain_values(config))), "here", CheckpointError).dataclass(VisionConfig)
        == config
    )


@pytest.mark.parametrize(
    ("name", "top", "vision", "found"),
    [
        ("smolvlm", {"scale_factor": 5}, {}, "image_size is 512, expected a side of a multiple of 5 patches"),
        ("smolvlm", {}, {"image_size": 400}, "of 25 patches a side two share a position as rounded"),
        ("smolvlm", {}, {"model_type": "clip_vision_model"}, "supported are idefics3_vision, smolvlm_vision"),
        ("lfm2_vl", {}, {"num_patches": 250}, "num_patches is 250, expected the square of a whole number"),
        ("lfm2_vl", {"projector_bias": 1}, {}, "projector_bias is 1, expected true or false"),
        ("internvl", {"downsample_ratio": 0.3}, {}, "downsample_ratio is 0.3, expected 1 divided by a whole number"),
        ("internvl", {"vision_feature_layer": -2}, {}, "vision_feature_layer is -2, supported is -1"),
        ("internvl", {"vision_feature_select_strategy": "full"}, {}, 'is "full", supported is default'),
        ("internvl", {}, {"use_absolute_position_embeddings": False}, "supported is true"),
        ("internvl", {}, {"image_size": [448, 224]}, r"image_size is \[448, 224\], expected a whole number"),
        ("internvl", {}, {"norm_type": "batch_norm"}, 'norm_type is "batch_norm", supported is layer_norm or rms_norm'),
        ("gemma4", {}, {"head_dim": 72}, "head_dim is 72, supported is 64"),
        ("gemma4", {}, {"num_key_value_heads": 4}, "num_key_value_heads is 4, supported is 12"),
        ("gemma4", {}, {"hidden_activation": "silu"}, 'hidden_activation is "silu", supported'),
        ("gemma4", {}, {"rope_parameters": {"rope_type": "yarn"}}, 'is "yarn", supported is axial'),
        ("gemma4", {}, {"model_type": "siglip_vision_model"}, "supported is gemma4_vision"),
        ("minicpmv4_6", {"downsample_mode": "4x"}, {}, 'downsample_mode is "4x", supported is 16x'),
        ("minicpmv4_6", {"merger_times": 2}, {}, "merger_times is 2, supported is 1"),
        ("minicpmv4_6", {"insert_layer_id": 12}, {}, "insert_layer_id is 12, expected a layer, 0 to 11"),
        ("minicpmv4_6", {"image_token_id": None}, {}, "image_token_id is null, expected"),
        ("minicpmv4_6", {}, {"window_kernel_size": [4, 4]}, r"window_kernel_size is \[4, 4\], supported is"),
    ],
)
def test_wrong_and_unsupported_fields(name: str, top: dict[str, Any], vision: dict[str, Any], found: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=found):
        vision_of(name, top, vision)


@pytest.mark.parametrize(
    ("name", "fields", "found"),
    [
        ("smolvlm", {"image_processor_type": "SiglipImageProcessor"}, "expected that of smolvlm"),
        ("smolvlm", {"max_image_size": {"longest_edge": 384}}, "expected tiles of 512 pixels"),
        ("smolvlm", {"size": {"height": 512, "width": 512}}, "size is .*, expected longest_edge"),
        ("smolvlm", {"do_image_splitting": 1}, "do_image_splitting is 1, expected true or false"),
        ("lfm2_vl", {"downsample_factor": 4}, "downsample_factor is 4, expected 2"),
        ("lfm2_vl", {"tile_size": 500}, "tile_size is 500, expected a multiple of a token's side, 32 pixels"),
        ("lfm2_vl", {"min_tiles": 1}, "min_tiles is 1, expected 2 to max_tiles, 10"),
        ("lfm2_vl", {"max_pixels_tolerance": 0}, "expected a number above 0"),
        ("internvl", {"size": {"height": 384, "width": 384}}, "expected tiles of 448 x 448 pixels"),
        ("internvl", {"image_processor_type": "Lfm2VlImageProcessor"}, "expected that of internvl"),
        ("gemma4", {"do_normalize": True}, "do_normalize is true, supported is false"),
        ("gemma4", {"pooling_kernel_size": 2}, "pooling_kernel_size is 2, expected 3, as config.json has it"),
        ("minicpmv4_6", {"patch_size": 16}, "patch_size is 16, expected 14, as config.json has it"),
        ("minicpmv4_6", {"downsample_mode": "4x"}, 'downsample_mode is "4x", supported is 16x'),
        ("minicpmv4_6", {"use_image_id": False}, "use_image_id is false, supported is true"),
    ],
)
def test_processors_that_do_not_suit(name: str, fields: dict[str, Any], found: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name] | fields))
    with pytest.raises(EdgeLLMError, match=found):
        open_image_processor(tmp_path, vision_of(name))


def test_fewer_patches_make_pictures_of_lfm2_vl_smaller_and_leave_tiles_out(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["lfm2_vl"]))
    rule = open_image_processor(tmp_path, vision_of("lfm2_vl"), 1024).rule
    assert rule.cut(1080, 1920)[:3] == ((2, 4), ((1024, 2048),), ((384, 672),))
    few = open_image_processor(tmp_path, vision_of("lfm2_vl"), 400).rule
    assert few.cut(1080, 1920)[:3] == ((0, 0), (), ((224, 416),))


def test_pictures_of_gemma_4_have_a_budget_of_tokens(tmp_path: Path) -> None:
    """280 as published, or as many as the engines have patches for."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["gemma4"]))
    config = vision_of("gemma4")
    assert (config.merge_patches, config.head_dim, config.num_layers, config.clipped) == (9, 64, 16, True)
    assert (config.vision_start_token_id, config.image_token_id, config.vision_end_token_id) == (255999, 258880, 258882)
    shown = [open_image_processor(tmp_path, config, most).rule.cut(1080, 1920).whole for most in (None, 4096, 900)]
    assert shown == [((576, 1056),), ((576, 1056),), ((336, 624),)]
    strip = open_image_processor(tmp_path, config, None).rule
    assert [strip.cut(*size).whole for size in ((2, 3000), (3000, 2))] == [((48, 280 * 48),), ((280 * 48, 48),)]


def test_minicpm_v_shows_the_whole_before_its_slices(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["minicpmv4_6"]))
    config = vision_of("minicpmv4_6")
    assert (config.position_side, config.merge_patches, config.merging_layer) == (70, 16, 6)
    rule = open_image_processor(tmp_path, config, 4096).rule
    assert rule.cut(1080, 1920) == ((2, 4), ((896, 1792),), ((336, 616),), True)
    assert rule.cut(300, 400) == ((0, 0), (), ((392, 504),), False)


@pytest.mark.parametrize("capability", ["sm_87", "sm_90", "sm_110", "sm_120"])
@pytest.mark.parametrize(
    ("name", "vision"),
    [
        ("gemma4", {}),
        (
            "gemma4",
            {
                **{"hidden_size": 1152, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72},
                **{"intermediate_size": 4304, "use_clipped_linears": False, "standardize": True},
            },
        ),
        ("minicpmv4_6", {"intermediate_size": 4304, "num_hidden_layers": 27}),
    ],
)
def test_kernels_take_encoders_of_published_sizes(name: str, vision: dict[str, Any], capability: str) -> None:
    config = vision_of(name, vision=vision)
    shape = vision_shape(config.rows_for_patches(4096))
    limit = shared_limit_of(capability)
    assert limit is not None and kernel_refusal(config, shape, "bfloat16", limit) is None


def test_images_of_larger_gemma_4_see_themselves() -> None:
    """In its layers with a window; the smaller ones' look back."""
    text = {"hidden_size": 64, "num_attention_heads": 4, "sliding_window": 8, "hidden_size_per_layer_input": 0}
    whole = CONFIGS["gemma4"] | {"text_config": text | {"pad_token_id": 3}}
    small = decoder_config(whole)
    assert (small.image_tokens, small.images_vary, small.padding_id, small.image_token_id) == (0, False, 3, 258880)
    large = decoder_config(whole | {"text_config": text | {"use_bidirectional_attention": "vision"}})
    assert (large.image_tokens, large.images_vary) == (280, True)
    assert large.media["image"] == ("image", 258880, 280, True)
