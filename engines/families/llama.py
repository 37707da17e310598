"""Llama: the decoder that most families vary."""

from __future__ import annotations

from typing import Any

from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.model.config import DecoderConfig


def read_llama(fields: ConfigFields, dtype: str | None, **own: Any) -> DecoderConfig:
    """`attention_bias` gives all four projections of the attention a bias, `mlp_bias` all three of the MLP. The first
    conversions of LLaMA call the positions `max_sequence_length`.

    `own` is what another family with these switches adds, for `read_decoder`.
    """
    if "max_sequence_length" in fields.values:
        fields.values = {"max_position_embeddings": fields.values["max_sequence_length"], **fields.values}
    bias, mlp_bias = fields.switch("attention_bias"), fields.switch("mlp_bias")
    return read_decoder(fields, dtype, attention_bias=bias, attention_output_bias=bias, mlp_bias=mlp_bias, **own)


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    read_llama,
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
