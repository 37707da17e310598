"""LFM2 and LFM2.5: gated short convolutions in most layers, attention with norms on query and key in the others."""

from __future__ import annotations

from edgellm.engines.families.decoders import Family, read_decoder
from edgellm.engines.families.fields import ConfigFields, layer_count, read_conv_width
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.engines.model.config import DecoderConfig

_TYPES = {"conv": "convolution", "full_attention": "attention"}


def read_lfm2(fields: ConfigFields) -> DecoderConfig:
    """`block_ff_dim` and `tie_embedding` of older files count more than `intermediate_size` and `tie_word_embeddings`,
    their `full_attn_idxs` less than `layer_types`."""
    kinds = fields.layer_kinds(_TYPES, _types_by_index(fields))
    tied = "tie_embedding" if fields.values.get("tie_embedding") is not None else "tie_word_embeddings"
    fields.values = fields.values | {
        "rms_norm_eps": fields.positive("norm_eps"),
        "intermediate_size": _inner_size(fields) or 1,  # what is wrong with it has been noted
        "tie_word_embeddings": fields.switch(tied),
    }
    return read_decoder(
        fields,
        qk_norm=True,
        layer_kinds=kinds,
        conv_width=read_conv_width(fields, "conv_L_cache"),
        conv_bias=fields.switch("conv_bias"),
        naming="lfm2",
    )


def _types_by_index(fields: ConfigFields) -> list[str]:
    """What `full_attn_idxs` says: which of the layers are attention; all where it is missing."""
    count = layer_count(fields)
    indices = fields.values.get("full_attn_idxs")
    if indices is None:
        indices = range(count)
    elif not isinstance(indices, list) or not all(is_integer(each) and 0 <= each < count for each in indices):
        fields.expect("full_attn_idxs", indices, f"a list of layers from 0 to {count - 1}")
        indices = ()
    return ["full_attention" if index in indices else "conv" for index in range(count)]


def _inner_size(fields: ConfigFields) -> int:
    """That of the MLP: with `block_auto_adjust_ff_dim` two thirds of what is written down, times
    `block_ffn_dim_multiplier`, rounded up to a multiple of `block_multiple_of`; each product is cut to a whole
    number."""
    size = fields.size("block_ff_dim" if fields.values.get("block_ff_dim") is not None else "intermediate_size")
    if not fields.switch("block_auto_adjust_ff_dim"):
        return size
    step, factor = fields.size("block_multiple_of"), fields.positive("block_ffn_dim_multiplier", largest=1000)
    adjusted = int(factor * int(2 * size / 3))
    return -(-adjusted // step) * step if step else 0


LFM2 = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    read_lfm2,
    {
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
)
