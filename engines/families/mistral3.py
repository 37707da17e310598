"""The language model of Mistral 3 and Ministral 3 as they are published, which is Mistral or Ministral 3.

Their vision encoder is not supported: the model is served without images.
"""

from __future__ import annotations

from edgellm.engines.families.decoders import Family
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.ministral3 import MINISTRAL3
from edgellm.engines.families.mistral import MISTRAL
from edgellm.engines.families.vision_language import inner_family, text_fields
from edgellm.engines.model.config import DecoderConfig

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


def read_mistral3(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """The image token is a token like any other."""
    family = inner_family(fields, MISTRAL, MINISTRAL3)
    return family.read(text_fields(fields, _SMALL if family is MISTRAL else family.defaults), dtype)


MISTRAL3 = Family("mistral3", "Mistral3ForConditionalGeneration", read_mistral3)
