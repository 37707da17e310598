"""Granite 3: Llama with a scale each for embeddings, attention, residual stream and logits."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.llama import read_llama
from edgellm.engines.model.config import DecoderConfig

_LARGEST_SCALE = 1e6


def read_granite(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """Llama's biases; scales that are left out are 1, that of the attention too. Logits are divided by theirs."""

    def scale(key: str) -> float:
        return fields.positive(key, 1.0, _LARGEST_SCALE)

    return read_llama(
        fields,
        dtype,
        embedding_scale=scale("embedding_multiplier"),
        residual_scale=scale("residual_multiplier"),
        attention_scale=scale("attention_multiplier"),
        logits_scale=1 / scale("logits_scaling"),
    )


GRANITE = Family("granite", "GraniteForCausalLM", read_granite, {"num_key_value_heads": None})
