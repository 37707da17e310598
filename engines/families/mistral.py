"""Mistral: Llama without biases, attention over a window in the first releases."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.fields import ConfigFields, every_layer
from edgellm.engines.families.llama import LLAMA
from edgellm.engines.model.config import DecoderConfig


def read_mistral(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """A `sliding_window`, where there is one, is that of every layer."""
    return read_decoder(fields, dtype, windowed=every_layer)


MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    read_mistral,
    {
        **LLAMA.defaults,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
