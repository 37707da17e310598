"""Published configurations to `DecoderConfig`: both layouts, defaults, and everything that is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from golden_files import golden_folder
from published_families import LLAMA_3_2_1B, QWEN2_5_0_5B, QWEN3_0_6B, REQUIRED

from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families import decoder_config

GOLDENS = golden_folder("decoder")

LLAMA_3_2 = LLAMA_3_2_1B | {
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
QWEN2_5 = QWEN2_5_0_5B | {"eos_token_id": 151645, "sliding_window": 32768, "use_sliding_window": False}
QWEN3 = QWEN3_0_6B | {"attention_bias": False, "eos_token_id": 151645, "rope_scaling": None}
PUBLISHED = {"llama": LLAMA_3_2, "qwen2": QWEN2_5, "qwen3": QWEN3}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_llama() -> None:
    config = decoder_config(LLAMA_3_2)
    assert (config.family, config.vocab_size, config.hidden_size, config.intermediate_size) == (
        "llama",
        128256,
        2048,
        8192,
    )
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (16, 32, 8, 64)
    assert (config.rope_theta, config.rotary_dim, config.rope_scaling["factor"]) == (500000.0, 64, 32.0)
    assert (config.dtype, config.tie_word_embeddings, config.qk_norm) == ("bfloat16", True, False)
    assert (config.eos_token_ids, config.bos_token_id) == ((128001, 128008, 128009), 128000)
    assert not (config.attention_bias or config.attention_output_bias or config.mlp_bias)


def test_llama_2_has_no_newer_fields() -> None:
    old = without(
        LLAMA_3_2, "num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias"
    )
    config = decoder_config(
        without(old, "tie_word_embeddings") | {"pretraining_tp": 2, "eos_token_id": 2}
    )  # as Llama 2 13B's: of training alone
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.rope_scaling) == (32, 64, 10000.0, None)
    assert (config.tie_word_embeddings, config.eos_token_ids) == (False, (2,))


def test_qwen3() -> None:
    config = decoder_config(without(QWEN3, "head_dim"))
    assert (config.head_dim, config.query_size, config.qk_norm, config.attention_bias) == (128, 2048, True, False)
    config = decoder_config(QWEN3 | {"attention_bias": True, "head_dim": 64})
    assert (config.head_dim, config.attention_bias, config.attention_output_bias) == (64, True, True)


@pytest.mark.parametrize("family", PUBLISHED)
def test_new_layout_reads_as_the_old_one(family: str) -> None:
    old = PUBLISHED[family]
    new = without(old, "rope_theta", "rope_scaling", "torch_dtype")
    new["dtype"] = old["torch_dtype"]
    scaling = old.get("rope_scaling") or {"rope_type": "default"}
    new["rope_parameters"] = {"rope_theta": old["rope_theta"], **scaling}
    assert decoder_config(new) == decoder_config(old)
    new["rope_parameters"] = {"full_attention": new["rope_parameters"]}
    with pytest.raises(UnsupportedModelError, match=r"rope_parameters differs between layers \(full_attention\)"):
        decoder_config(new)


def test_original_context_of_a_scaling() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert decoder_config(QWEN2_5 | {"rope_scaling": {"type": "yarn", "factor": 4.0}}) == decoder_config(
        QWEN2_5 | {"rope_scaling": scaling}
    )
    config = decoder_config(QWEN2_5 | {"rope_scaling": scaling})
    assert config.rope_scaling == {**scaling, "original_max_position_embeddings": 32768}
    outside = QWEN2_5 | {"rope_scaling": scaling | {"original_max_position_embeddings": 5}}
    config = decoder_config(outside | {"original_max_position_embeddings": 4096})
    assert config.rope_scaling["original_max_position_embeddings"] == 4096


def test_generation_config_names_the_end_of_sequence_tokens() -> None:
    assert decoder_config(QWEN2_5, {"eos_token_id": [151645, 151643]}).eos_token_ids == (151645, 151643)
    assert decoder_config(QWEN2_5, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert decoder_config(QWEN2_5, {"temperature": 0.7}).eos_token_ids == (151645,)
    assert decoder_config(without(QWEN2_5, "eos_token_id")).eos_token_ids == ()
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is \"end\""):
        decoder_config(QWEN2_5, {"eos_token_id": "end"})


def test_dtype_comes_from_the_tensors_where_the_configuration_has_none() -> None:
    bare = without(QWEN2_5, "torch_dtype")
    assert decoder_config(bare, dtype="float16").dtype == "float16"
    assert decoder_config(QWEN2_5, dtype="float16").dtype == "bfloat16"
    assert decoder_config(bare | {"dtype": "float32"}).dtype == "float32"
    assert decoder_config(bare | {"dtype": "torch.float16"}, dtype="bfloat16").dtype == "float16"
    assert decoder_config(bare | {"dtype": "auto"}, dtype="float16").dtype == "float16"
    with pytest.raises(CheckpointError, match=r"dtype .* is missing"):
        decoder_config(bare)
    with pytest.raises(UnsupportedModelError, match='dtype is "int8", supported are float16, bfloat16, float32'):
        decoder_config(bare | {"dtype": "int8"}, dtype="float16")


def test_model_type_alone_names_the_family() -> None:
    assert decoder_config(without(QWEN3, "architectures")) == decoder_config(QWEN3)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]},
    ],
)
def test_unknown_family_lists_the_supported_ones(change: dict) -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM, Qwen2ForCausalLM, .*GemmaForCausalLM"):
        decoder_config(LLAMA_3_2 | change)


@pytest.mark.parametrize(
    ("change", "nearest"),
    [
        ({"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "num_local_experts": 16}, "Phi-4-mini"),
        ({"architectures": ["Gemma3nForConditionalGeneration"], "model_type": None}, "Gemma 4 E2B or E4B"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe"}, "ERNIE 4.5 0.3B"),
        ({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 8}, "Qwen3.5-MoE"),
        ({"architectures": None, "model_type": "mixtral", "num_local_experts": 8}, "Qwen3-30B-A3B or gpt-oss-20b"),
        (
            {"architectures": ["JambaForCausalLM"], "model_type": "jamba", "num_experts": 16, "mamba_d_state": 16},
            "Granite 4 H or",
        ),
        (
            {"architectures": ["KimiForCausalLM"], "model_type": "kimi", "text_config": {"n_routed_experts": 8}},
            "Qwen3-30B",
        ),
        ({"architectures": ["GlmForCausalLM"], "model_type": "glm"}, "Qwen3 or Llama 3"),
    ],
)
def test_unknown_family_is_refused_with_what_is_nearest(change: dict, nearest: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"(; |, )supported are .*\. Nearest to it is {nearest}"):
        decoder_config(LLAMA_3_2 | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, CheckpointError, "contradicts itself"),
        ({"architectures": [], "model_type": "gpt2"}, UnsupportedModelError, "supported are llama, qwen2, qwen3"),
        ({"architectures": [{"a": 1}]}, CheckpointError, "expected a list of names"),
        ({"architectures": None, "model_type": None}, CheckpointError, "neither architectures nor model_type"),
    ],
)
def test_names_that_say_nothing(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decoder_config(LLAMA_3_2 | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", supported is silu'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types has chunked_attention, supported are full_attention and sliding_attention",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}, 'rope_scaling: rope_type is "mrope"'),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "rope_parameters: partial_rotary_factor is 0.25",
        ),
    ],
)
def test_other_computations_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        decoder_config(QWEN3 | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        ({"head_dim": None, "num_attention_heads": 24}, "hidden_size 2048 is not a multiple of num_attention_heads 24"),
        ({"head_dim": 63}, "63 elements of a head are rotated, expected an even number"),
        ({"vocab_size": "many"}, 'vocab_size is "many", expected a whole number'),
        ({"vocab_size": True}, "vocab_size is true"),
        ({"hidden_size": 2048.0}, "hidden_size is 2048.0"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected a whole number from 1 to 1024"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05, expected a number above 0"),
        ({"rope_theta": 0}, "rope_theta is 0, expected a number above 1"),
        ({"rope_theta": "500000"}, 'rope_theta is "500000"'),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\], expected an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings is "yes", expected true or false'),
        ({"eos_token_id": [-1]}, r"eos_token_id is \[-1\]"),
    ],
)
def test_wrong_fields_are_named(change: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config(LLAMA_3_2 | change)


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        decoder_config(without(LLAMA_3_2, *REQUIRED) | {"hidden_act": "relu"})
    for name in REQUIRED:
        assert f"{name} is missing, expected" in str(caught.value)
    assert 'hidden_act is "relu"' in str(caught.value)
    with pytest.raises(CheckpointError, match="num_key_value_heads is missing"):
        decoder_config(without(QWEN2_5, "num_key_value_heads"))


def test_goldens_were_written_in_both_layouts() -> None:
    keys = [set(json.loads(path.read_text())) for path in GOLDENS.glob("*/config.json")]
    assert any("rope_theta" in found and "torch_dtype" in found for found in keys)
    assert any("rope_parameters" in found and "dtype" in found for found in keys)
