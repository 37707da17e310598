"""Mistral: Llama without biases, attention over a window in the first releases."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.llama import LLAMA

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    read_decoder,
    {
        **LLAMA.defaults,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
