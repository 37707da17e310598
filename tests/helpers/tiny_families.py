"""Tiny models of the families, and how closely a GPU must follow NumPy on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellm.runtime import SpecDecodeRuntime

FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False},
    "llama_biases": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128},
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "seed_oss": {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True},
    "cwm": {"architectures": ["CwmForCausalLM"], "model_type": "cwm", "sliding_window": 128},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
    },
    "granite_untied": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
        "tie_word_embeddings": False,
    },
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
    "gemma": {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "head_dim": 256,
        "hidden_act": "gelu",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "starcoder2": {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 4096,
    },
    "phi3_longrope": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 2.0, 4.0, 6.0, 7.0, 8.0]},
    },
    "granite4": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "layer_types": ["attention"] * 3,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 128,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
    },
    "ernie4_5": {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "head_dim": 16},
    "hunyuan": {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "model_type": "hunyuan_v1_dense",
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "minicpm": {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 12,
    },
}
#: Those with mixtures of experts.
MIXTURES = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3},
    "granitemoe": {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "residual_multiplier": 0.3,
    },
    "lfm2_moe": {
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention", "conv"],
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    },
}
#: Those whose windows are shorter than the texts of tests. Heads are Gemma's own: tied, with scaled embeddings, each
#: token would be followed by itself.
WINDOWED = {
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "tie_word_embeddings": False,
        "hidden_act": None,
        "sliding_window": 37,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "max_position_embeddings": 1024,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "tie_word_embeddings": False,
        "head_dim": 256,
        "hidden_act": None,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window": 37,
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 1024,
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_act": None,
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_key_value_heads": 1,
        "global_head_dim": 32,
        "sliding_window": 37,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 320,
        "final_logit_softcapping": 5.0,
        "max_position_embeddings": 1024,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 70,
        "max_position_embeddings": 1024,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "sliding_window": 5,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "max_position_embeddings": 1024,
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 37,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128},
        "max_position_embeddings": 1024,
    },
    "exaone4": {
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        "sliding_window": 37,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 1024,
    },
}
#: Layers of Qwen3.5, with more value heads than key heads.
DELTA_LAYERS = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
MIXTURES["gpt_oss"] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 20,
}
MIXTURES["gemma4_moe"] = WINDOWED["gemma4"] | {
    **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
    **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32},
}
MIXTURES["qwen3_5_moe"] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    **DELTA_LAYERS,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 64,
}
#: Of families with recurrent layers.
RECURRENT: dict[str, dict[str, Any]] = {
    "granite4_hybrid": FAMILIES["granite4"]
    | {
        "layer_types": ["mamba", "attention", "mamba"],
        "position_embedding_type": "nope",
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "full_attn_idxs": [1],
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_biases": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 5,
        "conv_bias": True,
        "block_multiple_of": 32,
        "tie_word_embeddings": False,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **DELTA_LAYERS,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    },
}


def keeping_near(runtime: SpecDecodeRuntime) -> SpecDecodeRuntime:
    """Recurrent states, where the model has any, are kept at places that short prompts have."""
    states = runtime._states
    if states is not None:
        states.every, states.tail, states.least = 24, 4, 6
    return runtime


#: Largest difference of logits relative to the largest logit. Random weights amplify rounding more than trained ones.
TOLERANCES = {"float16": 0.03, "bfloat16": 0.2}
PROMPT = [(7 * index + 3) % 250 for index in range(40)]
MIXTURES["granite4_moe"] = RECURRENT["granite4_hybrid"] | {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "shared_intermediate_size": 64,
}
#: As Granite 4's hybrids are published: a norm of all heads, which ranks share.
ONE_GROUP = {"granite4_one_group": MIXTURES["granite4_moe"] | {"mamba_n_groups": 1}}
MIXTURES["nemotron_h_moe"] = RECURRENT["nemotron_h"] | {
    "hybrid_override_pattern": "ME*E",
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}
