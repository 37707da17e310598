"""CWM: Llama 3 with attention over a window in three of four layers."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.model.config import DecoderConfig


def read_cwm(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """Every fourth layer, from the first on, attends to all, unless `layer_types` says otherwise. Attention has no
    biases, `mlp_bias` gives all three projections of the MLP one."""
    return read_decoder(fields, dtype, windowed=lambda layer: layer % 4 > 0, mlp_bias=fields.switch("mlp_bias"))


CWM = Family(
    "cwm",
    "CwmForCausalLM",
    read_cwm,
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 8192,
        "rope_theta": 1000000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
)
