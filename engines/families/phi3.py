"""Phi-3 and Phi-4: fused projections, and a rotary embedding of a part of each head."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.fields import ConfigFields, every_layer
from edgellm.engines.formats.strict_formats import as_json
from edgellm.engines.model.config import DecoderConfig

_SHARE = "partial_rotary_factor"


def read_phi3(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """`partial_rotary_factor` stands among the parameters of the rotary embedding or, in older files, by itself."""
    share = fields.take_rotary(_SHARE)
    if share is not None:
        fields.values = fields.values | {_SHARE: share}
    for key in ("attention_bias", "mlp_bias"):
        if fields.switch(key):
            fields.unsupported.append(f"{key} is true, which is not supported")
    share = fields.positive(_SHARE, 1.0)
    config = read_decoder(fields, dtype, rotary_share=share, windowed=every_layer, fused_projections=True)
    if config.rope_scaling is not None:  # the class also reads "su" and "yarn" as longrope
        kind = config.rope_scaling["rope_type"]
        fields.unsupported.append(f"rope_type is {as_json(kind)}, supported is the rotary embedding without scaling")
    return config


PHI3 = Family("phi3", "Phi3ForCausalLM", read_phi3, {"num_key_value_heads": None})
