"""Qwen2 and Qwen2.5: biases on query, key and value."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.model.config import DecoderConfig


def read_qwen2(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """`sliding_window` has no effect unless `use_sliding_window` is true."""
    return read_decoder(fields, dtype, attention_bias=True)


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    read_qwen2,
    {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
    },
)
