"""SmolLM3: Llama with layers that have no rotary embedding."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family
from edgellm.engines.families.fields import ConfigFields, layer_count
from edgellm.engines.families.llama import read_llama
from edgellm.engines.formats.strict_formats import as_json
from edgellm.engines.model.config import DecoderConfig


def read_smollm3(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """Llama's biases; `no_rope_layers` holds 0 for each layer without rotary embedding, else 1."""
    fields.ignore("no_rope_layers", "pretraining_tp")
    return read_llama(fields, dtype, nope_layers=_nope_layers(fields))


def _nope_layers(fields: ConfigFields) -> tuple[int, ...]:
    """By the list of all layers, which may be longer than there are; else every so many layers, the last of these."""
    count = layer_count(fields)
    rotated = fields.values.get("no_rope_layers")
    if rotated is None:
        interval = fields.size("no_rope_layer_interval")
        return tuple(range(interval - 1, count, interval)) if interval else ()
    if not isinstance(rotated, list) or len(rotated) < count or any(value not in (0, 1) for value in rotated):
        fields.wrong.append(f"no_rope_layers is {as_json(rotated)}, expected 0 or 1 for each of {count} layers")
        return ()
    return tuple(index for index in range(count) if not rotated[index])


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    read_smollm3,
    {
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
)
