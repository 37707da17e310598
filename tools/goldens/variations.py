"""The tiny models that golden files are made of: one for each switch that changes what is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Every sequence has this many tokens. Scalings that depend on the length are computed for it.
SEQUENCE_LENGTH = 24
#: Behind so many of the first sequence's tokens others are generated.
PROMPT_LENGTH = 9
#: Tokens that every model knows.
VOCABULARY = 80

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_VISION = {
    "mistral3": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 8,
        "patch_size": 4,
    },
    "qwen3_5": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 1,
        "out_hidden_size": 24,
        "num_position_embeddings": 4,
    },
}
#: Image tokens: one that the texts of such models do not have.
_IMAGE_TOKENS = {"qwen3_5": {"image_token_id": 71}}


@dataclass(frozen=True)
class Variation:
    """One golden model. `layout` "old" writes `config.json` as transformers 4 did, "minicpm" as MiniCPM's own class
    does, of a Granite that computes the same; `shards` splits the weights.

    A multimodal `family` has a language model of the family `inside`, which alone is run. Sequences have `length`
    tokens. `seed` draws the weights (None: the place in `VARIATIONS`); so many tokens are generated, too, by taking the
    likeliest: `generated`.
    """

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=lambda: dict(_DEFAULT_ROPE))
    dtype: str = "float16"
    layout: str = "new"
    shards: bool = False
    inside: str = ""
    seed: int | None = None
    generated: int = 0
    length: int = SEQUENCE_LENGTH

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the family's configuration class."""
        config = {**_COMMON, **self.settings, "rope_parameters": dict(self.rope)}
        if not self.inside:
            return config
        whole = {"vision_config": _VISION[self.family], "tie_word_embeddings": config["tie_word_embeddings"]}
        return {"text_config": {"model_type": self.inside, **config}, **whole, **_IMAGE_TOKENS.get(self.family, {})}

    @property
    def deviation(self) -> float:
        """The standard deviation of weights."""
        return float({**_COMMON, **self.settings}["initializer_range"])


#: Enough for what differs in the rotary table alone.
_ONE_LAYER = {"num_hidden_layers": 1}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.5, 2.5, 4.0, 7.0],
}

_GRANITE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 1.5}
_FAR_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
#: Heads of the published size.
_GEMMA = {
    "hidden_size": 16,
    "head_dim": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}

#: Of windows: sequences that are several times as long.
_LONG: dict[str, Any] = {"length": 40, "generated": 64}
_WINDOWED = {"max_position_embeddings": 128, "intermediate_size": 24, "tie_word_embeddings": True}
_GEMMA3 = {**_WINDOWED, "sliding_window_pattern": 2, "sliding_window": 5}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}
_SMALL = {"hidden_size": 24, "intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 128}
_LFM2 = {**_SMALL, "norm_eps": 1e-5, "num_attention_heads": 3}
_LFM2_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
#: Random weights make values of the delta rule that are nearly zero, and their norm makes much of how they were
#: rounded: so weights are smaller here, epsilon may be larger, and seeds are those of models with little of it.
_QWEN3_5 = {**_SMALL, "num_attention_heads": 2, "head_dim": 24, "initializer_range": 0.13}
_QWEN3_5_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 1],
    "mrope_interleaved": True,
}

_MIXTURE = {**_SMALL, "intermediate_size": 16, "num_attention_heads": 2, "num_experts_per_tok": 2}
_QWEN3_MOE = {
    **_MIXTURE,
    "num_experts": 6,
    "intermediate_size": 24,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
}

_OLMO3_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_GRANITE4 = {
    **_GRANITE,
    "logits_scaling": 0.75,
    "num_attention_heads": 3,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 40,
    "layer_types": ["full_attention"] * 2,
    "mamba_n_heads": 6,
}
#: The class takes the smallest step size for a limit, of whole prompts alone; published limits are none.
_NEMOTRON = {
    **_SMALL,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "num_attention_heads": 3,
    "head_dim": 8,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 4,
    "time_step_min": 1e-30,
}
_GEMMA4 = {
    **_SMALL,
    **{"num_attention_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": 5},
    **{"vocab_size_per_layer_input": VOCABULARY, "tie_word_embeddings": True, "max_position_embeddings": 128},
}
_BOTH = ["sliding_attention", "full_attention"]
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0},
}
_PHI_LONGROPE = {
    **_LONGROPE,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 2.5, 4.0],
    "partial_rotary_factor": 0.75,
}

VARIATIONS = {
    "llama_untied": Variation("llama", dtype="float32"),
    "llama_tied_sharded": Variation("llama", {"tie_word_embeddings": True}, shards=True),
    "llama_multi_head_old_layout": Variation("llama", {"num_key_value_heads": 4}, layout="old"),
    "llama_biases_head_dim_10": Variation(
        "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "num_key_value_heads": 1}
    ),
    "llama_llama3": Variation(
        "llama",
        _ONE_LAYER,
        rope={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        layout="old",
    ),
    "llama_linear": Variation("llama", _ONE_LAYER, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}),
    "llama_dynamic": Variation(
        "llama",
        {**_ONE_LAYER, "max_position_embeddings": 16},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        layout="old",
    ),
    "qwen2_yarn": Variation(
        "qwen2",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
        layout="old",
    ),
    "llama_longrope_short": Variation(
        "llama", {**_ONE_LAYER, "max_position_embeddings": 128}, {**_LONGROPE, "original_max_position_embeddings": 32}
    ),
    "llama_longrope_long": Variation(
        "llama", {**_ONE_LAYER, "max_position_embeddings": 128}, {**_LONGROPE, "original_max_position_embeddings": 16}
    ),
    "qwen2": Variation("qwen2", {"tie_word_embeddings": True}),
    "qwen2_float16": Variation("qwen2", layout="old"),
    "qwen3": Variation("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_biases_bfloat16": Variation("qwen3", {"head_dim": 12, "attention_bias": True}, dtype="bfloat16"),
    "mistral": Variation("mistral", {"sliding_window": None, "head_dim": 12}, layout="old"),
    "mistral_window": Variation("mistral", {**_ONE_LAYER, "sliding_window": SEQUENCE_LENGTH}),
    "ministral3": Variation("ministral3", {"head_dim": 16, "max_position_embeddings": 128}, _FAR_YARN),
    "seed_oss": Variation("seed_oss", {"head_dim": 10, "attention_out_bias": False}),
    "seed_oss_biases": Variation(
        "seed_oss", {**_ONE_LAYER, "head_dim": 8, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True}
    ),
    "cwm": Variation(
        "cwm",
        {"head_dim": 8, "sliding_window": SEQUENCE_LENGTH, "eos_token_id": [2, 3]},
        {
            "rope_type": "llama3",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "phi3": Variation("phi3", {"sliding_window": SEQUENCE_LENGTH}),
    "phi3_partial_tied": Variation(
        "phi3",
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {**_DEFAULT_ROPE, "partial_rotary_factor": 0.75},
        layout="old",
    ),
    "granite_tied": Variation("granite", {**_GRANITE, "tie_word_embeddings": True}, layout="old"),
    "granite_biases": Variation(
        "granite", {**_GRANITE, "logits_scaling": 0.75, "attention_bias": True, "mlp_bias": True}
    ),
    "smollm3_interval": Variation("smollm3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}, layout="old"),
    "smollm3_list_tied": Variation(
        "smollm3", {"no_rope_layers": [0, 1], "attention_bias": True, "tie_word_embeddings": True}
    ),
    "gemma": Variation("gemma", _GEMMA),
    "gemma_multi_head_biases": Variation(
        "gemma", {**_GEMMA, **_ONE_LAYER, "num_key_value_heads": 2, "attention_bias": True}, layout="old"
    ),
    "mistral3_ministral3": Variation("mistral3", {**_ONE_LAYER, "head_dim": 8}, _FAR_YARN, inside="ministral3"),
    "lfm2": Variation(
        "lfm2",
        {
            **_LFM2,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "intermediate_size": 40,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.3,
            "tie_word_embeddings": True,
        },
        _LFM2_ROPE,
        seed=1900,
        generated=64,
    ),
    "lfm2_biases_wide": Variation(
        "lfm2",
        {
            **_LFM2,
            "hidden_size": 36,
            "num_hidden_layers": 3,
            "full_attn_idxs": [1],
            "conv_bias": True,
            "conv_L_cache": 7,
            "block_auto_adjust_ff_dim": False,
        },
        _LFM2_ROPE,
        dtype="bfloat16",
        layout="old",
        seed=1901,
        generated=64,
    ),
    "qwen3_5_text": Variation(
        "qwen3_5_text",
        {
            **_QWEN3_5,
            "rms_norm_eps": 1e-3,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
        _QWEN3_5_ROPE,
        seed=1910,
        generated=64,
    ),
    "qwen3_5_text_narrow": Variation(
        "qwen3_5_text",
        {
            **_QWEN3_5,
            "rms_norm_eps": 1e-6,
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
        },
        _QWEN3_5_ROPE,
        dtype="float32",
        seed=1906,
        generated=64,
    ),
    "qwen3_5_tied": Variation(
        "qwen3_5",
        {
            **_QWEN3_5,
            "rms_norm_eps": 1e-6,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "tie_word_embeddings": True,
        },
        _QWEN3_5_ROPE,
        dtype="bfloat16",
        inside="qwen3_5_text",
        seed=1904,
        generated=64,
    ),
    "mistral_window_5": Variation("mistral", {**_WINDOWED, "sliding_window": 5}, seed=1930, **_LONG),
    "qwen2_window_7": Variation(
        "qwen2",
        {**_WINDOWED, "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
        seed=1931,
        **_LONG,
    ),
    "cwm_window_5": Variation("cwm", {**_WINDOWED, "head_dim": 8, "sliding_window": 5}, seed=1932, **_LONG),
    "phi3_window_7": Variation("phi3", {**_WINDOWED, **_ONE_LAYER, "sliding_window": 7}, seed=1933, **_LONG),
    "gemma3": Variation(
        "gemma3_text",
        {**_GEMMA3, "num_hidden_layers": 3, "head_dim": 16, "num_key_value_heads": 2, "query_pre_attn_scalar": 24},
        {"full_attention": _LINEAR_ROPE, "sliding_attention": _DEFAULT_ROPE},
        dtype="bfloat16",
        seed=1936,
        **_LONG,
    ),
    "gemma3_old_layout": Variation(
        "gemma3_text",
        {**_GEMMA3, **_GEMMA, "hidden_size": 8, "sliding_window": 7, "query_pre_attn_scalar": 256},
        {"full_attention": _LINEAR_ROPE, "sliding_attention": {**_DEFAULT_ROPE, "rope_theta": 500.0}},
        dtype="bfloat16",
        layout="old",
        seed=1935,
        **_LONG,
    ),
    "olmo2": Variation("olmo2", {"max_position_embeddings": 128}, dtype="bfloat16", seed=1940, generated=64),
    "olmo2_multi_head_biases": Variation(
        "olmo2",
        {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
        dtype="bfloat16",
        layout="old",
        seed=1941,
    ),
    "starcoder2": Variation(
        "starcoder2",
        {
            **_SMALL,
            "intermediate_size": 40,
            "num_attention_heads": 3,
            "sliding_window": 5,
            "norm_epsilon": 1e-3,
            "tie_word_embeddings": True,
        },
        dtype="bfloat16",
        seed=1950,
        generated=64,
        length=19,
    ),
    "qwen3_moe": Variation("qwen3_moe", _QWEN3_MOE, seed=2600, generated=64, length=19),
    "olmoe": Variation(
        "olmoe", {**_MIXTURE, "num_experts": 6, "num_key_value_heads": 2}, seed=2610, generated=64, length=19
    ),
    "granitemoe": Variation(
        "granitemoe",
        {**_MIXTURE, **_GRANITE, "num_local_experts": 5, "tie_word_embeddings": True},
        dtype="bfloat16",
        seed=2620,
        generated=64,
        length=19,
    ),
    "lfm2_moe": Variation(
        "lfm2_moe",
        {
            **_MIXTURE,
            "num_experts": 6,
            "norm_eps": 1e-5,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
            "routed_scaling_factor": 1.5,
        },
        _LFM2_ROPE,
        seed=2630,
        generated=64,
        length=19,
    ),
    "gpt_oss": Variation(
        "gpt_oss",
        {**_MIXTURE, "head_dim": 8, "num_attention_heads": 4, "num_local_experts": 5, "sliding_window": 6}
        | {"swiglu_limit": 1.5, "num_key_value_heads": 2},
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
        dtype="bfloat16",
        seed=2650,
        generated=64,
        length=19,
    ),
    "qwen3_5_moe_text": Variation(
        "qwen3_5_moe_text",
        {
            **_QWEN3_5,
            "full_attention_interval": 2,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 24,
        },
        _QWEN3_5_ROPE,
        seed=2640,
        generated=64,
        length=19,
    ),
    "olmo3": Variation(
        "olmo3",
        {**_SMALL, "num_attention_heads": 3, "num_hidden_layers": 4, "sliding_window": 5},
        {"full_attention": _OLMO3_YARN, "sliding_attention": {**_DEFAULT_ROPE, "rope_theta": 500000.0}},
        dtype="bfloat16",
        seed=3701,
        generated=64,
        length=19,
    ),
    "exaone4": Variation(
        "exaone4",
        {**_SMALL, "num_attention_heads": 3, "num_hidden_layers": 4, "sliding_window": 5, "tie_word_embeddings": True},
        dtype="bfloat16",
        seed=3710,
        generated=64,
        length=19,
    ),
    "granite4": Variation(
        "granitemoehybrid",
        {**_SMALL, **_GRANITE4, "position_embedding_type": "rope", "tie_word_embeddings": True},
        dtype="bfloat16",
        seed=3720,
        generated=64,
        length=19,
    ),
    "granite4_hybrid": Variation(
        "granitemoehybrid",
        {
            **_SMALL,
            **_GRANITE4,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 4,
            "tie_word_embeddings": True,
        },
        dtype="bfloat16",
        seed=3725,
        generated=64,
        length=19,
    ),
    "phi3_longrope_short": Variation(
        "phi3",
        {**_SMALL, "max_position_embeddings": 1024, "num_attention_heads": 3, "original_max_position_embeddings": 512},
        _PHI_LONGROPE,
        dtype="bfloat16",
        seed=3730,
        generated=64,
        length=19,
    ),
    "phi3_longrope_long": Variation(
        "phi3",
        {**_SMALL, "num_attention_heads": 3, "original_max_position_embeddings": 8},
        _PHI_LONGROPE,
        layout="old",
        seed=3731,
        generated=64,
        length=19,
    ),
    "ernie4_5": Variation(
        "ernie4_5",
        {**_SMALL, "num_attention_heads": 3, "head_dim": 8, "use_bias": True},
        dtype="bfloat16",
        seed=3760,
        generated=64,
        length=19,
    ),
    "hunyuan": Variation(
        "hunyuan_v1_dense",
        {**_SMALL, "num_attention_heads": 3, "head_dim": 8, "tie_word_embeddings": True},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
        dtype="bfloat16",
        seed=3770,
        generated=64,
        length=19,
    ),
    "ministral3_far": Variation(
        "ministral3",
        {**_SMALL, "num_attention_heads": 3, "head_dim": 8, "tie_word_embeddings": True},
        {**_FAR_YARN, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.5},
        dtype="bfloat16",
        seed=3750,
        generated=64,
        length=19,
    ),
    "minicpm": Variation(
        "granite",
        {
            **_SMALL,
            "max_position_embeddings": 1024,
            "num_attention_heads": 3,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 1.4 / 2**0.5,
            "attention_multiplier": 8**-0.5,
            "logits_scaling": 1.5,
            "tie_word_embeddings": True,
        },
        {**_LONGROPE, "original_max_position_embeddings": 512},
        dtype="bfloat16",
        layout="minicpm",
        seed=3740,
        generated=64,
        length=19,
    ),
    "gemma2": Variation(
        "gemma2",
        {
            **_WINDOWED,
            **{"num_hidden_layers": 3, "head_dim": 16, "num_key_value_heads": 2, "sliding_window": 5},
            **{"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        },
        dtype="bfloat16",
        seed=1951,
        **_LONG,
    ),
    "granite4_moe": Variation(
        "granitemoehybrid",
        {
            **_SMALL,
            **_GRANITE4,
            "intermediate_size": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 4,
            "tie_word_embeddings": True,
        },
        dtype="bfloat16",
        seed=3740,
        generated=64,
        length=19,
    ),
    "nemotron_h": Variation("nemotron_h", _NEMOTRON, dtype="bfloat16", seed=3750, generated=64, length=19),
    "nemotron_h_moe": Variation(
        "nemotron_h",
        {
            **_NEMOTRON,
            "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
            "n_routed_experts": 6,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 40,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
        },
        dtype="bfloat16",
        seed=3760,
        generated=64,
        length=19,
    ),
    # Two layers with rows of their own for each kind but the last, whose rows the last three share.
    "gemma4": Variation(
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 8.0,
        },
        rope=_GEMMA4_ROPE,
        seed=60,
        **_LONG,
    ),
    # As the larger ones: nothing of each layer's own, no rows are shared, and values are keys where all is attended to.
    "gemma4_plain": Variation(
        "gemma4_text",
        {
            **_GEMMA4,
            "num_attention_heads": 4,
            "hidden_size_per_layer_input": 0,
            "layer_types": _BOTH,
            **{"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        },
        rope=_GEMMA4_ROPE,
        dtype="bfloat16",
        seed=61,
        **_LONG,
    ),
    "gemma4_unified": Variation(
        "gemma4_unified_text",
        {
            **_GEMMA4,
            "layer_types": _BOTH,
            **{"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        },
        rope=_GEMMA4_ROPE,
        dtype="bfloat16",
        seed=3790,
        **_LONG,
    ),
    # As 26B-A4B: experts beside the MLP.
    "gemma4_moe": Variation(
        "gemma4_text",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "layer_types": _BOTH,
            **{"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 16},
        },
        rope=_GEMMA4_ROPE,
        dtype="bfloat16",
        seed=3792,
        **_LONG,
    ),
    "nemotron_h_latent": Variation(
        "nemotron_h",
        {
            **_NEMOTRON,
            "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
            "n_routed_experts": 6,
            "moe_intermediate_size": 16,
            "moe_latent_size": 16,
            "moe_shared_expert_intermediate_size": 24,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
        },
        dtype="bfloat16",
        seed=3770,
        generated=64,
        length=19,
    ),
}
