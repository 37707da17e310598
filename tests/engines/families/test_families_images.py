"""The language models of Qwen2.5-VL, Qwen3-VL and LLaVA as their `config.json` and tensors were published."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_families import MINISTRAL3_ROTARY
from safetensors.numpy import load_file, save_file
from tiny_multimodal import FAMILIES as TINY

from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.drafts import read_draft
from edgellm.engines.families.vision_config import read_vision_config
from edgellm.engines.families.vision_encoders import vision_weights
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import EMBEDDING, decoder_weights

QWEN2_5_VL_3B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "image_token_id": 151655,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "out_hidden_size": 2048, "spatial_merge_size": 2, "patch_size": 14},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}
QWEN3_VL_4B = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "spatial_merge_size": 2},
}
LLAVA_1_5_7B = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {"hidden_size": 1024, "model_type": "clip_vision_model"},
}
PUBLISHED = {"qwen2_5_vl": QWEN2_5_VL_3B, "qwen3_vl": QWEN3_VL_4B, "llava": LLAVA_1_5_7B}


def changed(family: str, part: str, **changes: Any) -> dict[str, Any]:
    """A published configuration with other fields in `text_config`, `vision_config` or at the top level."""
    config = PUBLISHED[family]
    return config | ({part: config[part] | changes} if part in config else changes)


def image_fields(config: DecoderConfig) -> tuple:
    return (
        config.image_token_id,
        config.spatial_merge_size,
        config.mrope_section,
        config.mrope_interleaved,
        config.deepstack_layers,
    )


@pytest.mark.parametrize(
    ("family", "parameters"), [("qwen2_5_vl", 3_085_938_688), ("qwen3_vl", 4_022_468_096), ("llava", 6_738_939_904)]
)
def test_parameter_counts_are_those_of_the_language_models_alone(family: str, parameters: int) -> None:
    """Qwen2.5-3B, Qwen3-4B, and Llama-2-7B with 64 rows more in each table."""
    config = decoder_config(PUBLISHED[family])
    assert config.family == family
    assert sum(math.prod(spec.shape) for spec in decoder_weights(config)) == parameters


def test_what_images_need_is_read() -> None:
    assert image_fields(decoder_config(QWEN2_5_VL_3B)) == (151655, 2, (16, 24, 24), False, 0)
    assert image_fields(decoder_config(QWEN3_VL_4B)) == (151655, 2, (24, 20, 20), True, 3)
    assert image_fields(decoder_config(LLAVA_1_5_7B)) == (32000, 1, (), False, 0)
    assert decoder_config(LLAVA_1_5_7B).eos_token_ids == (2,)
    assert decoder_config(QWEN2_5_VL_3B, {"eos_token_id": [151645, 151643]}).eos_token_ids == (151645, 151643)


def test_newer_and_older_files_say_the_same() -> None:
    text = {key: value for key, value in QWEN2_5_VL_3B.items() if key not in ("architectures", "vision_config")}
    text["rope_parameters"] = text.pop("rope_scaling") | {"rope_theta": text.pop("rope_theta"), "type": "default"}
    kept = ("architectures", "model_type", "image_token_id", "vision_config", "tie_word_embeddings")
    nested = {key: QWEN2_5_VL_3B[key] for key in kept} | {"text_config": text | {"model_type": "qwen2_5_vl_text"}}
    assert decoder_config(nested) == decoder_config(QWEN2_5_VL_3B)


def test_the_language_model_inside_llava_may_be_of_any_family() -> None:
    inside = {"model_type": "qwen3", "hidden_size": 1024, "num_key_value_heads": 8, "intermediate_size": 3072}
    config = decoder_config(LLAVA_1_5_7B | {"text_config": inside, "image_token_index": 151669})
    assert (config.qk_norm, config.head_dim, config.vocab_size) == (True, 128, 151936)
    inside = {"model_type": "mistral", "vocab_size": 32064, "sliding_window": None, "max_position_embeddings": 32768}
    config = decoder_config(LLAVA_1_5_7B | {"text_config": inside})
    assert (config.sliding_window, config.num_kv_heads, config.intermediate_size) == (None, 8, 14336)
    del inside["sliding_window"]  # the class, and so the file, has a window unless it says null
    assert decoder_config(LLAVA_1_5_7B | {"text_config": inside}).sliding_window == 4096
    with pytest.raises(UnsupportedModelError, match=r'text_config: model_type is "gemma", supported are llama'):
        decoder_config(LLAVA_1_5_7B | {"text_config": {"model_type": "gemma"}})


def test_paligemma_as_it_was_published() -> None:
    """The first 3B of 224 pixels, whose file leaves out what its classes have."""
    text = {
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_image_tokens": 256,
        "num_key_value_heads": 1,
        "torch_dtype": "float32",
        "vocab_size": 257216,
    }
    encoder = {"hidden_size": 1152, "intermediate_size": 4304, "model_type": "siglip_vision_model", "patch_size": 14}
    encoder |= {"num_attention_heads": 16, "num_hidden_layers": 27, "projection_dim": 2048, "vision_use_head": False}
    published = {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "image_token_index": 257152,
        "text_config": text,
        "vision_config": encoder,
    }
    config, vision = decoder_config(published), read_vision_config(published)
    assert (config.image_tokens, config.prefix_attention, config.media["image"]) == (
        256,
        True,
        ("image", 257152, 0, False),
    )
    assert (config.head_dim, config.embedding_scale, config.max_position_embeddings) == (256, 2048**0.5, 8192)
    specs = [*decoder_weights(config), *vision_weights(vision)]
    assert sum(math.prod(spec.shape) for spec in specs) == 2_923_466_480
    causal = {"text_config": text | {"use_bidirectional_attention": False}}
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention is false, supported is true"):
        decoder_config(published | causal)


def test_mistral_3_as_it_was_published() -> None:
    """Sizes of Ministral 3 3B; of its encoder those that are no class's defaults."""
    text = {
        "model_type": "ministral3",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "rope_parameters": MINISTRAL3_ROTARY,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10}
    encoder = {"model_type": "pixtral", "patch_size": 14, "hidden_act": "silu", "rope_theta": 5000.0}
    published = whole | {"text_config": text, "vision_config": encoder, "vision_feature_layer": -1}
    config = decoder_config(published)
    assert (config.family, config.image_token_id, config.tie_word_embeddings) == ("mistral3", 10, True)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert sum(math.prod(spec.shape) for spec in decoder_weights(config)) == 3_429_006_336
    assert config.rope_scaling["llama_4_scaling_beta"] == 0.1
    vision = read_vision_config(published)
    assert (vision.spatial_merge_size, vision.out_hidden_size, vision.feature_layers) == (2, 3072, (24,))
    assert (vision.rope_theta, vision.norm_eps, vision.activation) == (5000.0, 1e-5, "silu")
    assert sum(math.prod(spec.shape) for spec in vision_weights(vision)) == 420_083_712
    inside = decoder_config(published | {"text_config": {"model_type": "mistral", "dtype": "bfloat16"}})
    assert (inside.hidden_size, inside.rope_theta, inside.sliding_window, inside.rope_scaling) == (
        5120,
        1e9,
        None,
        None,
    )
    with pytest.raises(UnsupportedModelError, match=r'"llama", supported are mistral, ministral3'):
        decoder_config(published | {"text_config": {"model_type": "llama"}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("qwen2_5_vl", "rope_scaling", mrope_section=[16, 24]), "mrope_section is .16, 24., expected three"),
        (changed("qwen2_5_vl", "rope_scaling", mrope_section=[16, 24, 25]), "expected a sum of 64"),
        (changed("qwen2_5_vl", "image", image_token_id=151936), "image_token_id is 151936, expected a token id from 0"),
        (changed("qwen2_5_vl", "vision_config", spatial_merge_size=0), "spatial_merge_size is 0, expected"),
        (changed("qwen3_vl", "vision_config", deepstack_visual_indexes=5), "deepstack_visual_indexes is 5, expected"),
        (changed("qwen3_vl", "text_config", num_hidden_layers=2), "features of 3 layers are added to 2 layers"),
        (changed("llava", "text", text_config=[1]), "text_config is .1., expected an object"),
    ],
)
def test_damaged_files_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config(config)


def test_the_other_arrangement_of_sections_is_refused() -> None:
    scaling = QWEN3_VL_4B["text_config"]["rope_scaling"] | {"mrope_interleaved": False}
    with pytest.raises(UnsupportedModelError, match="mrope_interleaved is false, supported is true"):
        decoder_config(changed("qwen3_vl", "text_config", rope_scaling=scaling))


def renamed(path: Path, wrap: Callable[[str], str]) -> None:
    """Give every tensor of a checkpoint another name."""
    file = path / "model.safetensors"
    save_file({wrap(name): values for name, values in load_file(file).items()}, file)


def wrapped_in_model(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith(("model.layers", "model.embed")) else (
        "model.language_model.norm.weight" if name == "model.norm.weight" else name
    )  # fmt: skip


def wrapped_around_model(name: str) -> str:
    is_text = name.startswith(("model.layers", "model.embed", "model.norm", "lm_head"))
    return f"language_model.{name}" if is_text else name


@pytest.mark.parametrize("wrap", [lambda name: name, wrapped_in_model, wrapped_around_model])
@pytest.mark.parametrize("family", TINY)
def test_every_layout_of_names_is_read(
    family: str, wrap: Callable[[str], str], tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    path = make_checkpoint(tmp_path / "x", 0, **TINY[family])
    expected = load_file(path / "model.safetensors")[EMBEDDING]
    renamed(path, wrap)
    with Checkpoint.open(path) as checkpoint:
        config = decoder_config(checkpoint.config)
        checkpoint.check(decoder_weights(config))
        np.testing.assert_array_equal(checkpoint.raw(EMBEDDING), expected)
        assert any("vision" in name or "visual" in name for name in checkpoint.tensors)


def test_unknown_tensors_are_named_still(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(tmp_path / "x", 0, **TINY["qwen2_5_vl"])
    renamed(path, lambda name: "audio.weight" if name == "model.norm.weight" else name)
    with Checkpoint.open(path) as checkpoint:
        problems = checkpoint.problems(decoder_weights(decoder_config(checkpoint.config)))
    assert problems == ["missing: model.norm.weight [64]", "unknown: audio.weight [64]"]


def test_two_tensors_for_one_name_are_refused(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(tmp_path / "x", 0, **TINY["qwen2_5_vl"])
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"language_model.model.norm.weight": tensors["model.norm.weight"]}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="are one and the same of the language model"):
        Checkpoint.open(path)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_draft_says_what_positions_it_has(
    family: str, tmp_path: Path, make_checkpoint: Callable[..., Path], make_draft: Callable[..., Path]
) -> None:
    scaling = TINY[family]["rope_scaling"]
    path = make_checkpoint(tmp_path / "base", 0, **TINY[family])
    heads = {
        "own": make_draft(tmp_path / "own", 0, rope_scaling=scaling),
        "plain": make_draft(tmp_path / "plain", 0, eagle_image_embeddings=False),
        "wrong": make_draft(tmp_path / "wrong", 0, rope_scaling=scaling, eagle_image_embeddings="no"),
    }
    with Checkpoint.open(path) as base:
        config = decoder_config(base.config)
        drafts = {}
        for name in ("own", "plain"):
            with Checkpoint.open(heads[name]) as head:
                drafts[name] = read_draft(head, base, config)
        assert drafts["own"].decoder.mrope_section == config.mrope_section
        assert drafts["own"].decoder.mrope_interleaved == config.mrope_interleaved
        assert drafts["own"].image_embeddings
        assert (drafts["plain"].decoder.mrope_section, drafts["plain"].image_embeddings) == ((), False)
        with Checkpoint.open(heads["wrong"]) as head, pytest.raises(CheckpointError, match="expected true or false"):
            read_draft(head, base, config)


def test_adapters_of_the_whole_model_are_read(
    tmp_path: Path, make_checkpoint: Callable[..., Path], make_adapter: Callable[..., Path]
) -> None:
    """PEFT names the modules as the multimodal model has them."""
    config = read_decoder_config(make_checkpoint(tmp_path / "x", 0, **TINY["qwen3_vl"]))
    path = make_adapter(tmp_path / "adapter", config)
    expected = LoraAdapter.read(path, config)
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace(".model.layers", ".model.language_model.layers"): tensors[name] for name in tensors}, file)
    found = LoraAdapter.read(path, config)
    assert found.pairs.keys() == expected.pairs.keys()
    for module, pair in expected.pairs.items():
        np.testing.assert_array_equal(found.pairs[module].a, pair.a)
