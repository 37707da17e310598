"""`config.json` and `preprocessor_config.json` of models that see parts of pictures: what is read, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgellm.engines.errors import CheckpointError, EdgeLLMError, UnsupportedModelError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.vision_config import read_vision_config
from edgellm.engines.formats.strict_formats import JSONObject, plain_values
from edgellm.engines.model.vision import VisionConfig
from edgellm.multimodal.image_processor import open_image_processor

#: Of the sizes of SmolVLM2-500M, LFM2-VL-1.6B and InternVL3.5-1B; what the classes have by themselves is left out.
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
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 2048},
        "max_image_size": {"longest_edge": 512},
    },
    "lfm2_vl": {"image_processor_type": "Lfm2VlImageProcessorFast"},
    "internvl": {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 448, "width": 448}},
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
    ],
)
def test_processors_that_do_not_suit(name: str, fields: dict[str, Any], found: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name] | fields))
    with pytest.raises(EdgeLLMError, match=found):
        open_image_processor(tmp_path, vision_of(name))


def test_fewer_patches_make_pictures_of_lfm2_vl_smaller_and_leave_tiles_out(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["lfm2_vl"]))
    rule = open_image_processor(tmp_path, vision_of("lfm2_vl"), 1024).rule
    assert rule.cut(1080, 1920) == ((2, 4), ((1024, 2048),), ((384, 672),))
    few = open_image_processor(tmp_path, vision_of("lfm2_vl"), 400).rule
    assert few.cut(1080, 1920) == ((0, 0), (), ((224, 416),))
