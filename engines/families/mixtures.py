"""Families whose layers have a mixture of experts where others have an MLP: Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from edgellm.engines.families.decoders import Family, biases, read_decoder
from edgellm.engines.families.fields import ConfigFields, every_layer, layer_count
from edgellm.engines.families.qwen import QWEN3
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.engines.model.config import LARGEST_EXPERTS, DecoderConfig, Mixture


def read_mixture(fields: ConfigFields, size: str, usual: int, **own: Any) -> Mixture:
    """How many experts there are (`usual` where the file does not say), how many of them a token goes through, and how
    large they are, which is in the field `size`; problems are noted in `fields`. `own` is what else the family says of
    its `Mixture`."""
    key = "num_experts"
    if fields.values.get(key) is None:  # transformers 5 writes the other name, of some families
        key = "num_local_experts"
    count = fields.size(key, usual, LARGEST_EXPERTS)
    chosen = fields.size("num_experts_per_tok", largest=LARGEST_EXPERTS)
    if chosen > count > 0:
        fields.wrong.append(f"num_experts_per_tok is {chosen}, but there are {count} experts")
    return Mixture(count, chosen, fields.size(size), **own)


def _read_qwen3_moe(fields: ConfigFields) -> DecoderConfig:
    """Qwen3's attention. Layers of `mlp_only_layers` have an MLP, and those whose number, counted from 1, is no
    multiple of `decoder_sparse_step`. A window is that of every layer."""
    given, step = fields.values.get("mlp_only_layers"), fields.size("decoder_sparse_step")
    listed, layers = [] if given is None else given, range(layer_count(fields))
    if not isinstance(listed, list) or not all(is_integer(each) for each in listed):
        fields.expect("mlp_only_layers", given, "a list of layers")
        listed = []
    dense = tuple(layer for layer in layers if layer in listed or (step and (layer + 1) % step))
    own: dict[str, Any] = {"dense_layers": dense, "normalized": fields.switch("norm_topk_prob")}
    mixture = read_mixture(fields, "moe_intermediate_size", 128, **own)
    return read_decoder(fields, windowed=every_layer, **biases(fields), qk_norm=True, mixture=mixture)


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _read_qwen3_moe,
    {
        **QWEN3.defaults,
        "head_dim": None,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
)
