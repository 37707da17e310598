"""Ministral 3: Mistral with YaRN, and queries that are scaled at positions beyond the trained context."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family
from edgellm.engines.families.mistral import read_mistral

MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    read_mistral,
    {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)
