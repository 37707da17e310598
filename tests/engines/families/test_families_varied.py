"""What the families have that Llama, Qwen2 and Qwen3 have not: read, defaulted as their classes do, refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from published_families import (
    CWM_32B,
    ERNIE_4_5_0_3B,
    EXAONE_4_1_2B,
    EXAONE_4_32B,
    GEMMA_2_2B,
    GEMMA_2B,
    GEMMA_3_1B,
    GEMMA_4_E2B,
    GEMMA_4_E4B,
    GRANITE_3_3_2B,
    GRANITE_4_1B,
    HUNYUAN_7B,
    LLAMA_2_7B,
    MINICPM_4_0_5B,
    MINISTRAL3_ROTARY,
    MINISTRAL_3_8B,
    MISTRAL_7B,
    NEMOTRON_3_4B,
    OLMO_2_1B,
    OLMO_2_7B,
    OLMO_3_7B,
    PHI_3_MINI_4K,
    PHI_4,
    PHI_4_MINI,
    SEED_OSS_36B,
    SMOLLM3_3B,
    STARCODER2_3B,
)

from edgellm.engines.building.checks import check_limits, choose_limits
from edgellm.engines.errors import BuildError, CheckpointError, UnsupportedModelError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.config import Mixture
from edgellm.engines.model.decoder import decoder_weights, token_table, unread_tensors
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.rotary import rotary_table
from edgellm.engines.model.states import decoder_states, state_edge


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_mistral() -> None:
    config = decoder_config(MISTRAL_7B)
    assert (config.sliding_window, config.head_dim, config.attention_bias, config.mlp_bias) == (4096, 128, False, False)
    assert decoder_config(without(MISTRAL_7B, "sliding_window")) == config
    assert decoder_config(MISTRAL_7B | {"sliding_window": None}).sliding_window is None
    assert decoder_config(MISTRAL_7B | {"head_dim": 64}).query_size == 32 * 64


def test_ministral_3() -> None:
    config = decoder_config(MINISTRAL_3_8B)
    assert (config.sliding_window, config.rope_theta, config.rope_scaling["rope_type"]) == (None, 1e6, "yarn")
    named = {key: config.rope_scaling[key] for key in MINISTRAL3_ROTARY.keys() - {"type", "rope_theta"}}
    assert named == without(MINISTRAL3_ROTARY, "type", "rope_theta")
    assert decoder_config(without(MINISTRAL_3_8B, "rope_parameters", "head_dim")) == config
    for kind in ("default", "linear", "llama3"):
        other = MINISTRAL3_ROTARY | {"rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        with pytest.raises(UnsupportedModelError, match=f"llama_4_scaling_beta is supported .* found {kind}"):
            decoder_config(MINISTRAL_3_8B | {"rope_parameters": other})
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta is 'much', expected a number"):
        decoder_config(MINISTRAL_3_8B | {"rope_parameters": MINISTRAL3_ROTARY | {"llama_4_scaling_beta": "much"}})


def test_seed_oss_biases() -> None:
    config = decoder_config(without(SEED_OSS_36B, "attention_bias", "head_dim"))
    assert config == decoder_config(SEED_OSS_36B)
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias, config.head_dim) == (
        *(True, False, False),
        128,
    )
    config = decoder_config(SEED_OSS_36B | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True})
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (False, True, True)
    with pytest.raises(UnsupportedModelError, match="attention_out_bias is true"):
        decoder_config(MISTRAL_7B | {"attention_out_bias": True})


def test_cwm() -> None:
    config = decoder_config(CWM_32B)
    assert (config.sliding_window, config.rope_scaling["factor"], config.attention_bias) == (8192, 16.0, False)
    bare = without(CWM_32B, "layer_types", "sliding_window", "rope_scaling", "rope_theta", "head_dim")
    assert decoder_config(bare) == config
    with pytest.raises(CheckpointError, match="layer_types has sliding_attention, but there is no sliding_window"):
        decoder_config(CWM_32B | {"sliding_window": None})


def test_phi() -> None:
    config = decoder_config(PHI_3_MINI_4K)
    assert (config.fused_projections, config.sliding_window, config.head_dim, config.rotary_dim) == (True, 2047, 96, 96)
    assert decoder_config(PHI_3_MINI_4K | {"num_key_value_heads": None}) == config
    names = [name for spec in decoder_weights(config) for name, _ in spec.parts if "layers.0." in name]
    assert [name.rsplit(".", 2)[1] for name in names] == [
        *("input_layernorm", "qkv_proj", "o_proj", "post_attention_layernorm", "gate_up_proj", "down_proj")
    ]
    assert (decoder_config(PHI_4).sliding_window, decoder_config(PHI_4).rope_theta) == (None, 250000.0)
    tied = decoder_config(PHI_4 | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True})
    assert (tied.rotary_dim, tied.head_dim, tied.tie_word_embeddings) == (96, 128, True)
    inside = {"rope_type": "default", "rope_theta": 250000, "partial_rotary_factor": 0.75}
    newer = without(PHI_4, "rope_theta", "rope_scaling") | {"rope_parameters": inside, "tie_word_embeddings": True}
    assert decoder_config(newer) == tied


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            'rope_type is "linear", supported are default and longrope',
        ),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"lm_head_bias": True}, "lm_head_bias is true"),
    ],
)
def test_other_kinds_of_phi_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        decoder_config(PHI_4 | change)


def test_longrope_of_phi() -> None:
    """Its first files call it otherwise; the length that it was trained for stands beside the scaling."""
    config = decoder_config(PHI_4_MINI)
    assert config.rope_scaling["original_max_position_embeddings"] == 4096
    assert (config.rotary_dim, config.sliding_window) == (96, 262144)
    for kind in ({"type": "su"}, {"type": "yarn"}, {"rope_type": "longrope"}):
        factors = without(PHI_4_MINI["rope_scaling"], "type")
        assert decoder_config(PHI_4_MINI | {"rope_scaling": factors | kind}) == config
    with pytest.raises(CheckpointError, match="long_factor has 47 values, expected a list of 48 numbers"):
        decoder_config(PHI_4_MINI | {"rope_scaling": PHI_4_MINI["rope_scaling"] | {"long_factor": [2.0] * 47}})
    # Two tables, by what a directory is built for: angles of the short and of the long factors.
    short, long = (rotary_table(config, 4, context) for context in (4096, 4097))
    scale = math.sqrt(1 + math.log(32) / math.log(4096))
    np.testing.assert_allclose(short[1, 0] / scale, math.cos(1.0), rtol=1e-6)
    np.testing.assert_allclose(long[1, 0] / scale, math.cos(1.0 / 32), rtol=1e-6)


def test_olmo_3() -> None:
    """A scaling is that of the layers that attend to all, in files of both layouts."""
    config = decoder_config(OLMO_3_7B)
    assert (config.window, config.local_rope_theta, config.rope_scaling["factor"]) == (4096, 500000.0, 8.0)
    assert (config.pre_norms, config.post_norms, config.joint_qk_norm) == (False, True, True)
    assert decoder_config(without(OLMO_3_7B, "layer_types", "sliding_window", "rope_theta")) == config
    scaled = OLMO_3_7B["rope_scaling"] | {"rope_theta": 500000.0}
    kinds = {"full_attention": scaled, "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}
    newer = without(OLMO_3_7B, "rope_scaling", "rope_theta") | {"rope_parameters": kinds}
    assert decoder_config(newer) == config
    kinds["sliding_attention"]["rope_theta"] = 10000.0
    assert decoder_config(newer).local_rope_theta == 10000.0
    assert decoder_config(OLMO_3_7B | {"rope_scaling": None}).local_rope_theta is None


def test_exaone_4() -> None:
    """Layers without a window have no rotary embedding, unless none has a window."""
    config = decoder_config(EXAONE_4_1_2B)
    assert (config.window, config.nope_layers, config.joint_qk_norm) == (None, (), False)
    config = decoder_config(EXAONE_4_32B)
    assert (config.window, config.nope_layers) == (4096, tuple(range(3, 64, 4)))
    assert decoder_config(without(EXAONE_4_32B, "layer_types", "sliding_window_pattern")) == config
    full = EXAONE_4_32B | {"layer_types": ["full_attention"] * 64}
    assert decoder_config(full).nope_layers == tuple(range(64))
    with pytest.raises(CheckpointError, match='sliding_window_pattern is "LLLG", expected'):
        decoder_config(without(EXAONE_4_32B, "layer_types"))


_MAMBA = {"layer_types": None, "mamba_n_heads": 64}


def test_granite_4() -> None:
    hybrid = decoder_config(GRANITE_4_1B | _MAMBA | {"layer_types": ["mamba"] * 39 + ["attention"]})
    assert (hybrid.delta_heads, hybrid.delta_channels, hybrid.conv_width) == ((1, 64, 256, 64), 4608, 4)
    assert set(decoder_config(GRANITE_4_1B | _MAMBA).layer_kinds) == {"mamba"} and hybrid.conv_bias
    with pytest.raises(CheckpointError, match="mamba_n_heads 60 of 68 are not mamba_expand times hidden_size, 4096"):
        decoder_config(GRANITE_4_1B | _MAMBA | {"mamba_n_heads": 60})
    config = decoder_config(GRANITE_4_1B)
    assert (config.intermediate_size, config.nope_layers, config.attention_scale) == (4096, (), 0.0078125)
    names = [name for spec in decoder_weights(config) for name, _ in spec.parts if "layers.0." in name]
    assert names[-2:] == [f"model.layers.0.shared_mlp.{each}_linear.weight" for each in ("input", "output")]
    for other in (None, "nope"):
        assert decoder_config(GRANITE_4_1B | {"position_embedding_type": other}).nope_layers == tuple(range(40))
    with_experts = decoder_config(GRANITE_4_1B | {"num_local_experts": None, "num_experts_per_tok": None})
    assert with_experts.mixture == Mixture(8, 2, 4096, shared_size=4096, shared_gate=False)
    renamed = GRANITE_4_1B | {"layer_types": ["full_attention"] * 40}
    assert decoder_config(renamed) == config
    for change, message in (
        ({"layer_types": ["attention"] * 39 + ["lstm"]}, "layer_types has lstm, supported are attention and"),
        ({**_MAMBA, "mamba_proj_bias": True}, "mamba_proj_bias is true, supported are proj"),
        ({**_MAMBA, "time_step_limit": [0.0, 0.1]}, "time_step_limit is .*, supported are step sizes without"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            decoder_config(GRANITE_4_1B | change)


def test_nemotron_h() -> None:
    config = decoder_config(NEMOTRON_3_4B)
    assert (config.delta_heads, config.delta_channels, config.hidden_act) == ((8, 96, 128, 80), 9728, "relu_squared")
    assert [config.layer_kinds.count(kind) for kind in ("mamba", "attention", "mlp")] == [21, 4, 17]
    assert config.last_mixer == 40 and config.nope_layers == tuple(range(42))
    listed = without(NEMOTRON_3_4B, "hybrid_override_pattern")
    words = {"mamba": "linear_attention", "attention": "full_attention", "mlp": "mlp"}
    assert decoder_config(listed | {"layers_block_type": [words[kind] for kind in config.layer_kinds]}) == config
    assert decoder_config(NEMOTRON_3_4B | {"time_step_limit": [0.0, 1e308]}) == config
    older = without(NEMOTRON_3_4B, "n_groups", "conv_kernel") | {"mamba_n_groups": 8, "mamba_d_conv": 4}
    assert decoder_config(older) == config
    mixture = decoder_config(NEMOTRON_3_4B | {"hybrid_override_pattern": "ME*-", "n_routed_experts": 16}).mixture
    assert mixture is not None and (mixture.dense_layers, mixture.experts, mixture.gated) == ((0, 2, 3), 16, False)
    mixed = {"hybrid_override_pattern": "ME*E"}
    for change, message in (
        ({"hybrid_override_pattern": "-"}, "supported are models with layers that mix tokens"),
        ({"mlp_hidden_act": "silu"}, "hidden_act is .silu., supported is relu2"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is .gelu., supported is silu"),
        ({"mamba_dt_limit": [0.0, 0.1]}, "time_step_limit is .*, supported are step sizes without limits"),
        ({"use_bias": True}, "use_bias is true, supported are projections without biases"),
        ({"time_step_limit": [0.001, 1e308]}, "time_step_limit is .*, supported are step sizes without limits"),
        ({**mixed, "n_group": 8}, "n_group is 8, which is not supported"),
        ({**mixed, "n_shared_experts": 2}, "n_shared_experts is 2, supported are one expert"),
        ({**mixed, "mlp_bias": True}, "mlp_bias is true, supported are experts without biases"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            decoder_config(NEMOTRON_3_4B | change)
    for change, message in (
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern is .MX., expected a text of M . - E, or"),
        ({"n_groups": 7}, "mamba_num_heads 96 is no multiple of n_groups 7"),
        ({**mixed, "moe_latent_size": 0}, "moe_latent_size is 0, expected a whole number"),
    ):
        with pytest.raises(CheckpointError, match=message):
            decoder_config(NEMOTRON_3_4B | change)


def test_ernie() -> None:
    config = decoder_config(ERNIE_4_5_0_3B)
    assert (config.rotates_neighbours, config.qk_norm, config.attention_bias, config.query_size) == (
        *(True, False, False),
        2048,
    )
    assert (
        decoder_config(without(ERNIE_4_5_0_3B, "head_dim", "rope_theta", "tie_word_embeddings", "use_bias")) == config
    )
    assert decoder_config(ERNIE_4_5_0_3B | {"architectures": ["Ernie4_5_ForCausalLM"]}) == config
    biased = decoder_config(ERNIE_4_5_0_3B | {"use_bias": True})
    assert biased.attention_bias and biased.attention_output_bias and biased.mlp_bias


def test_hunyuan() -> None:
    """Its base is stretched once, by `alpha`; without that the scaling is what others call dynamic."""
    config = decoder_config(HUNYUAN_7B)
    assert (config.norms_behind_rotation, config.rope_scaling) == (True, None)
    assert config.rope_theta == pytest.approx(10000 * 1000 ** (128 / 126))
    names = [name for spec in decoder_weights(config) for name, _ in spec.parts if "layers.0." in name]
    assert {"query_layernorm", "key_layernorm"} <= {name.rsplit(".", 2)[1] for name in names}
    plain = decoder_config(HUNYUAN_7B | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert (plain.rope_theta, plain.rope_scaling["factor"]) == (10000.0, 2.0)
    for alpha in ("much", 0, True):
        scaling = HUNYUAN_7B["rope_scaling"] | {"alpha": alpha}
        with pytest.raises(CheckpointError, match=r"alpha is .*, expected a number from 1 to"):
            decoder_config(HUNYUAN_7B | {"rope_scaling": scaling})
    with pytest.raises(UnsupportedModelError, match="use_cla is true, layers that share keys and values"):
        decoder_config(HUNYUAN_7B | {"use_cla": True})


def test_minicpm() -> None:
    config = decoder_config(MINICPM_4_0_5B)
    assert (config.embedding_scale, config.logits_scale, config.attention_scale) == (12.0, 0.25, None)
    assert config.residual_scale == pytest.approx(1.4 / 24**0.5, rel=1e-12)
    plain = decoder_config(without(MINICPM_4_0_5B, "scale_emb", "scale_depth", "dim_model_base"))
    assert (plain.embedding_scale, plain.logits_scale) == (1.0, 1 / 1024)
    with pytest.raises(
        UnsupportedModelError, match=r"sparse_config is .* chosen blocks is not computed: take MiniCPM 4"
    ):
        decoder_config(MINICPM_4_0_5B | {"sparse_config": {"kernel_size": 32, "dense_len": 8192}})


@pytest.mark.parametrize("share", [0, 1.5, "half", 0.3])
def test_a_share_of_a_head_that_cannot_be_rotated(share: Any) -> None:
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor|elements of a head are rotated"):
        decoder_config(PHI_4 | {"partial_rotary_factor": share, "head_dim": 30})


def test_granite_scales() -> None:
    config = decoder_config(GRANITE_3_3_2B)
    assert (config.embedding_scale, config.residual_scale) == (12.0, 0.22)
    assert (config.attention_scale, config.logits_scale, config.tie_word_embeddings) == (0.015625, 0.125, True)
    scales = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    plain = decoder_config(without(GRANITE_3_3_2B, *scales))
    assert (plain.embedding_scale, plain.residual_scale, plain.attention_scale, plain.logits_scale) == (1, 1, 1, 1)
    assert not decoder_config(without(GRANITE_3_3_2B, "tie_word_embeddings")).tie_word_embeddings
    for key in scales:
        for value in (0, -1.0, "1", True, float("nan"), 1e9):
            with pytest.raises(CheckpointError, match=f"{key} is .*, expected a number above 0 and up to 1e.06"):
                decoder_config(GRANITE_3_3_2B | {key: value})
        with pytest.raises(UnsupportedModelError, match=f"{key} is 0.5, which is not supported"):
            decoder_config(MISTRAL_7B | {key: 0.5})


def test_smollm3_layers_without_rotary_embedding() -> None:
    config = decoder_config(SMOLLM3_3B)
    assert config.nope_layers == tuple(range(3, 36, 4)) and config.tie_word_embeddings
    assert decoder_config(without(SMOLLM3_3B, "no_rope_layers", "no_rope_layer_interval")) == config
    assert decoder_config(without(SMOLLM3_3B, "rope_theta")).rope_theta == 2e6
    by_interval = without(SMOLLM3_3B, "no_rope_layers") | {"no_rope_layer_interval": 5}
    assert decoder_config(by_interval).nope_layers == tuple(range(4, 36, 5))
    longer = decoder_config(SMOLLM3_3B | {"no_rope_layers": [0, 1] * 20})  # as the list of a deeper model
    assert longer.nope_layers == tuple(range(0, 36, 2))
    for wrong in ([1] * 35, [], [1, 2] * 18, "1110", [None] * 36, 4):
        with pytest.raises(CheckpointError, match=r"no_rope_layers is .*, expected 0 or 1 for each of 36 layers"):
            decoder_config(SMOLLM3_3B | {"no_rope_layers": wrong})
    for wrong in (0, -4, "4"):
        with pytest.raises(CheckpointError, match="no_rope_layer_interval is"):
            decoder_config(by_interval | {"no_rope_layer_interval": wrong})
    with pytest.raises(UnsupportedModelError, match="no_rope_layers is"):
        decoder_config(MISTRAL_7B | {"no_rope_layers": [1, 0] * 16})


def test_gemma() -> None:
    config = decoder_config(GEMMA_2B)
    assert (config.hidden_act, config.norm_offset, config.embedding_scale) == ("gelu_tanh", 1.0, 2048**0.5)
    assert (config.head_dim, config.tie_word_embeddings, config.attention_scale) == (256, True, None)
    assert decoder_config(without(GEMMA_2B, "hidden_act", "head_dim")) == config
    tanh = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    assert decoder_config(GEMMA_2B | tanh) == config
    for change in ({"hidden_act": "silu"}, {"hidden_act": ["gelu"]}, {"hidden_activation": "gelu"}):
        with pytest.raises(UnsupportedModelError, match=r"hidden_act(ivation)? is .*, supported is gelu_pytorch_tanh"):
            decoder_config(GEMMA_2B | change)
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention is true"):
        decoder_config(GEMMA_2B | {"use_bidirectional_attention": True})


def test_olmo_2() -> None:
    config = decoder_config(OLMO_2_1B)
    assert (config.pre_norms, config.post_norms, config.qk_norm, config.joint_qk_norm) == (False, True, True, True)
    assert (config.head_dim, config.num_kv_heads, config.attention_bias, config.rope_theta) == (128, 16, False, 5e5)
    assert decoder_config(OLMO_2_1B | {"num_key_value_heads": None}) == config
    assert decoder_config(OLMO_2_1B | {"attention_bias": True}).attention_output_bias
    shapes = {spec.name: spec.shape for spec in decoder_weights(decoder_config(OLMO_2_7B | {"num_key_value_heads": 8}))}
    layer = {name.rsplit(".", 2)[1]: shape for name, shape in shapes.items() if ".layers.5." in name and "norm" in name}
    assert layer == {
        "q_norm": (4096,),
        "k_norm": (1024,),
        "post_attention_layernorm": (4096,),
        "post_feedforward_layernorm": (4096,),
    }
    with pytest.raises(UnsupportedModelError, match="clip_qkv is 8"):
        decoder_config(OLMO_2_1B | {"clip_qkv": 8.0})


def test_starcoder2() -> None:
    config = decoder_config(STARCODER2_3B)
    assert (config.layer_norms, config.gated_mlp, config.hidden_act) == (True, False, "gelu_tanh")
    assert (config.sliding_window, set(config.layer_kinds), config.head_dim) == (4096, {"window"}, 128)
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (True, True, True)
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-5, True)
    defaults = without(STARCODER2_3B, "hidden_act", "norm_epsilon", "use_bias")
    assert decoder_config(defaults) == config
    assert decoder_config(without(STARCODER2_3B, "sliding_window")).layer_kinds == ()
    plain = decoder_config(STARCODER2_3B | {"use_bias": False})
    shapes = {part[0]: part[1] for spec in decoder_weights(plain) for part in spec.parts if ".layers.5." in part[0]}
    assert {name.removeprefix("model.layers.5."): shape for name, shape in shapes.items()} == {
        **{f"self_attn.{name}_proj.weight": (3072, 3072) for name in "qo"},
        **{f"self_attn.{name}_proj.weight": (256, 3072) for name in "kv"},
        **{"mlp.c_fc.weight": (12288, 3072), "mlp.c_proj.weight": (3072, 12288)},
        **{f"{name}_layernorm.{kind}": (3072,) for name in ("input", "post_attention") for kind in ("weight", "bias")},
    }
    with pytest.raises(UnsupportedModelError, match='hidden_act is "silu", supported is gelu_pytorch_tanh'):
        decoder_config(STARCODER2_3B | {"hidden_act": "silu"})
    for wrong in (0, 2, "1e-5"):
        with pytest.raises(CheckpointError, match=r"norm_epsilon is .*, expected a number above 0"):
            decoder_config(STARCODER2_3B | {"norm_epsilon": wrong})


def test_gemma_4() -> None:
    config, larger = decoder_config(GEMMA_4_E2B), decoder_config(GEMMA_4_E4B)
    assert (config.window, config.rotary_dim, config.local_rotary_dim, config.local_rope_theta) == (
        512,
        512,
        256,
        10000,
    )
    assert config.rope_scaling == {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    assert (config.attention_scale, config.norm_offset, config.logits_cap) == (1.0, 0.0, 30.0)
    assert [config.rows_layer(index) for index in (0, 4, 14, 15, 18, 19, 34)] == [0, 4, 14, 13, 13, 14, 14]
    assert [larger.rows_layer(index) for index in (23, 24, 28, 29, 41)] == [23, 22, 22, 23, 23]
    assert [config.kv_heads(index) for index in (0, 4)] == [(1, 256), (1, 512)]
    assert [config.inner_size(index) for index in (14, 15)] == [6144, 12288]
    assert larger.inner_size(41) == 10240
    specs, (table,) = {spec.name: spec.shape for spec in decoder_weights(config)}, token_table(config)
    assert (table.shape, math.prod(table.shape)) == ((262144, 35 * 256), 2_348_810_240) and table.name not in specs
    shared = "model.layers.15.self_attn."
    assert specs[f"{shared}q_proj.weight"] == (2048, 1536) and f"{shared}qkv_proj.weight" not in specs
    assert specs["model.layers.14.self_attn.qkv_proj.weight"] == (10 * 512, 1536)
    states = decoder_states(config)
    assert [state.index for state in states] == [*range(15)]
    assert sum(math.prod(shape) for shape, _ in state_edge(states, 1, 1).values()) == 2 * (12 * 256 + 3 * 512)
    assert f"{shared}k_proj.weight".startswith(unread_tensors(config)), "published files have them"

    plain = without(GEMMA_4_E2B, "layer_types", "rope_parameters")
    by_itself = decoder_config(plain | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0})
    assert by_itself.layer_kinds[5::6] == ("attention",) * 5 and by_itself.layer_kinds[-1] == "attention"
    assert (by_itself.rope_scaling, by_itself.token_row_size) == (config.rope_scaling, 0)
    one_size = without(GEMMA_4_E2B, "global_head_dim") | {"per_layer_config": {"4": {"head_dim": 512}}}
    assert decoder_config(one_size) == config
    keys = decoder_config(GEMMA_4_E4B | {"attention_k_eq_v": True, "num_global_key_value_heads": 4})
    assert [keys.kv_heads(index) for index in (0, 5)] == [(2, 256), (4, 512)]
    parts = {spec.name: [name for name, _ in spec.parts] for spec in decoder_weights(keys)}
    for index, last in ((4, "v"), (5, "k")):
        layer = f"model.layers.{index}.self_attn."
        assert parts[f"{layer}qkv_proj.weight"] == [f"{layer}{each}_proj.weight" for each in ("q", "k", last)]
    text = without(GEMMA_4_E2B, "architectures", "tie_word_embeddings", "torch_dtype")
    whole = {"text_config": text, "vision_config": {}, "audio_config": {}, "torch_dtype": "bfloat16"}
    whole |= {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": True}
    read = decoder_config(whole)
    assert read.audio_token_id == 258881
    assert replace(read, family="gemma4_text", bos_token_id=None, audio_token_id=None) == config


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"enable_moe_block": True, "router_bias": True}, "router_bias is true, which is not known of this family"),
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention is "all", supported is vision'),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input is 100, supported is vocab_size, 262144"),
        ({"per_layer_config": {"4": {"head_dim": 512}, "9": {"head_dim": 256}}}, "supported are head_dim and num_key"),
        ({"hidden_activation": "silu"}, 'hidden_activation is "silu", supported is gelu_pytorch_tanh'),
    ],
)
def test_what_gemma_4_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        decoder_config(GEMMA_4_E2B | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers is 35, expected a whole number from 0 to 34"),
        ({"num_kv_shared_layers": 33}, "num_kv_shared_layers is 33: layer_types has a kind in these layers alone"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1, expected a whole number from 0"),
    ],
)
def test_what_is_wrong_with_files_of_gemma_4(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config(GEMMA_4_E2B | changed)


NEW_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def test_gemma_3() -> None:
    config = decoder_config(GEMMA_3_1B)
    assert (config.window, config.rope_theta, config.local_rope_theta) == (512, 1e6, 1e4)
    assert (config.attention_scale, config.post_norms, config.qk_norm, config.norm_offset) == (1 / 16, True, True, 1.0)
    assert [index for index, kind in enumerate(config.layer_kinds) if kind == "attention"] == [5, 11, 17, 23]
    usual = ("rope_theta", "rope_local_base_freq", "sliding_window_pattern", "query_pre_attn_scalar", "head_dim")
    assert decoder_config(without(GEMMA_3_1B, *usual)) == config
    scaled = decoder_config(GEMMA_3_1B | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}})
    assert (scaled.rope_scaling, scaled.local_rope_theta) == ({"rope_type": "linear", "factor": 8.0}, 1e4)
    types = ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(26)]
    new = without(GEMMA_3_1B, "rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern")
    assert decoder_config(new | {"rope_parameters": NEW_ROPE, "layer_types": types}) == scaled
    full = decoder_config(GEMMA_3_1B | {"layer_types": ["full_attention"] * 26})
    assert (full.window, full.layer_kinds, full.local_rope_theta) == (None, (), None)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sliding_window": 0}, CheckpointError, "sliding_window is 0, expected a whole number from 1"),
        ({"sliding_window": None}, CheckpointError, "there is no sliding_window"),
        ({"sliding_window_pattern": 0}, CheckpointError, "sliding_window_pattern is 0, expected a whole number from 1"),
        (
            {"layer_types": ["full_attention"] * 25},
            CheckpointError,
            "layer_types has 25 layers, but num_hidden_layers is 26",
        ),
        ({"layer_types": ["chunked_attention"] * 26}, UnsupportedModelError, "layer_types has chunked_attention, supp"),
        ({"layer_types": "full_attention"}, CheckpointError, 'layer_types is "full_attention"'),
        ({"rope_local_base_freq": "high"}, CheckpointError, 'rope_local_base_freq is "high", expected a number above'),
        ({"rope_local_base_freq": 1}, CheckpointError, "rope_local_base_freq is 1, expected a number above 1"),
        (
            {"rope_parameters": NEW_ROPE | {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            UnsupportedModelError,
            "rope_parameters: sliding_attention is .*, supported is the rope_type default",
        ),
        ({"query_pre_attn_scalar": -1}, CheckpointError, "query_pre_attn_scalar is -1, expected a number above 0"),
        ({"hidden_activation": "silu"}, UnsupportedModelError, 'hidden_activation is "silu"'),
        ({"attn_logit_softcapping": 50.0}, UnsupportedModelError, "attn_logit_softcapping is 50.0"),
        ({"final_logit_softcapping": 30.0}, UnsupportedModelError, "final_logit_softcapping is 30.0"),
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "use_bidirectional_attention is true"),
    ],
    ids=str,
)
def test_other_kinds_of_gemma_3_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decoder_config(without(GEMMA_3_1B, "rope_scaling") | change)


def test_families_with_a_window_in_every_layer_refuse_others() -> None:
    types = ["sliding_attention"] * 31 + ["full_attention"]
    with pytest.raises(UnsupportedModelError, match=r"layer_types is .*, supported is sliding_attention in every"):
        decoder_config(MISTRAL_7B | {"layer_types": types})
    assert decoder_config(CWM_32B).layer_kinds == ("attention", "window", "window", "window") * 16


def test_a_context_in_which_a_window_would_matter_is_refused_by_name() -> None:
    config = decoder_config(LLAMA_2_7B | {"sliding_window": 2048})
    check_limits(config, EngineLimits(1, 512, 2048))
    for beyond in (False, True):
        with pytest.raises(BuildError, match=r"--kv-capacity is 2049, .*sliding_window.* --kv-capacity 2048 or less"):
            check_limits(config, EngineLimits(1, 512, 2049), beyond_trained_context=beyond)


def test_queries_of_ministral_3_are_scaled_from_the_trained_length_on() -> None:
    """Columns of their own behind those of keys: the same up to there, then times 1 + 0.1 log(1 + p // 16384)."""
    config = decoder_config(MINISTRAL_3_8B)
    check_limits(config, EngineLimits(1, 512, 32769))
    keys, queries = np.split(rotary_table(config, 32769), 2, axis=1)
    np.testing.assert_array_equal(keys[:16384], queries[:16384])
    for position, times in ((16384, 2), (32767, 2), (32768, 3)):
        np.testing.assert_allclose(queries[position], keys[position] * (1 + 0.1 * math.log(times)), rtol=1e-6)


def test_the_usual_context_is_one_in_which_it_does_not_matter() -> None:
    assert choose_limits(decoder_config(LLAMA_2_7B | {"sliding_window": 2047})).kv_capacity == 2047
    assert choose_limits(decoder_config(MINISTRAL_3_8B)).kv_capacity == 4096


def test_rows_of_windows_are_chosen_by_the_context() -> None:
    """The window, the largest step and the slack, in whole tiles; none where no window is shorter than the context."""
    phi, mistral = decoder_config(PHI_3_MINI_4K), decoder_config(MISTRAL_7B)
    assert [choose_limits(config).window_rows for config in (phi, mistral)] == [4352, 0]
    assert choose_limits(mistral, kv_capacity=4096).window_rows == 0
    limits = choose_limits(mistral, kv_capacity=32768, prefill_chunk=512)
    assert (limits.window_step, limits.window_rows) == (512, 4096 + 512 + 256)
    with pytest.raises(BuildError, match="window_rows: it is 4607, expected at least 4608: a window of 4096"):
        check_limits(mistral, replace(limits, window_rows=4607))
    with pytest.raises(BuildError, match="window_rows: it is 64, expected 0: no window is shorter than the context"):
        check_limits(decoder_config(LLAMA_2_7B), EngineLimits(1, 512, 4096, window_rows=64))


def test_gemma_2_scales_and_caps_as_its_file_says() -> None:
    """What a file leaves out is as published; a cap of null is none."""
    given = {key: value for key, value in GEMMA_2_2B.items() if "softcapping" not in key}
    config = decoder_config(given | {"query_pre_attn_scalar": 144})
    assert (config.attention_scale, config.scores_cap, config.logits_cap) == (144**-0.5, 50.0, 30.0)
    plain = decoder_config(given | {"attn_logit_softcapping": None, "final_logit_softcapping": 12})
    assert (plain.attention_scale, plain.scores_cap, plain.logits_cap) == (256**-0.5, 0.0, 12.0)
    assert plain.layer_kinds == ("window", "attention") * 13
    with pytest.raises(CheckpointError, match="final_logit_softcapping is 0, expected a number above 0"):
        decoder_config(given | {"final_logit_softcapping": 0})
