"""Mistral: Llama without biases, attention over a window in the first releases. Ministral 3: Mistral with YaRN, and
queries that are scaled at positions beyond the trained context. Mistral 3: one of the two beside a vision encoder."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.fields import ConfigFields, every_layer
from edgellm.engines.families.llama import LLAMA
from edgellm.engines.families.vision_language import inner_family, text_fields
from edgellm.engines.model.config import DecoderConfig


def _read_mistral(fields: ConfigFields) -> DecoderConfig:
    """A `sliding_window`, where there is one, is that of every layer."""
    return read_decoder(fields, windowed=every_layer)


MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    _read_mistral,
    {
        **LLAMA.defaults,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    _read_mistral,
    {
        **LLAMA.defaults,
        "vocab_size": 131072,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
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
#: Mistral inside has the sizes of Mistral Small 3.1, with no window, where the file does not say.
_SMALL = {
    **MISTRAL.defaults,
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000000.0,
    "sliding_window": None,
}


def _read_mistral3(fields: ConfigFields) -> DecoderConfig:
    """The vision encoder is not supported: the model is served without images, the image token one like any other."""
    family = inner_family(fields, MISTRAL, MINISTRAL3)
    return family.read(text_fields(fields, _SMALL if family is MISTRAL else family.defaults))


MISTRAL3 = Family("mistral3", "Mistral3ForConditionalGeneration", _read_mistral3)
