"""Reads the `config.json` of the supported families of decoders: the fields they share, then what is each one's own."""

from __future__ import annotations

from edgellm.engines.directories.strict_formats import as_json
from edgellm.engines.families.fields import ConfigFields, read_mrope, read_rope
from edgellm.engines.model.config import LARGEST_DEPTH, DecoderConfig


def read_decoder(
    fields: ConfigFields,
    dtype: str | None,
    *,
    default_kv_heads: bool = False,
    default_head_dim: int | None = None,
    attention_bias: bool = False,
    attention_output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    default_mrope_section: tuple[int, ...] = (),
    mrope_interleaved: bool = False,
) -> DecoderConfig:
    """Read and check every field; the family says what its defaults are and which weights it has.

    With `default_kv_heads` an absent `num_key_value_heads` means as many as query heads. An absent `head_dim` is
    `default_head_dim`, or hidden_size / num_attention_heads where that is None. `dtype` is used where the file names
    none. A family with M-RoPE has a `default_mrope_section`; others may not have M-RoPE. Problems are noted in
    `fields`; the result is of use where there are none.
    """
    fields.refuse_unsupported()
    vocab_size, hidden = fields.size("vocab_size"), fields.size("hidden_size")
    layers = fields.size("num_hidden_layers", largest=LARGEST_DEPTH)
    heads = fields.size("num_attention_heads")
    absent_is_heads = default_kv_heads or ("num_key_value_heads" in fields.values and heads > 0)
    kv_heads = fields.size("num_key_value_heads", heads if absent_is_heads else None)
    if heads and kv_heads and heads % kv_heads:
        fields.wrong.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = _head_dim(fields, hidden, heads, default_head_dim)
    max_positions = fields.size("max_position_embeddings")
    sections: tuple[int, ...] = ()
    interleaved = False
    if default_mrope_section:
        sections, interleaved = read_mrope(fields, head_dim, default_mrope_section, mrope_interleaved)
    rope_theta, rope_scaling = read_rope(fields, head_dim, max_positions)
    beginnings = fields.token_ids("bos_token_id", 0)
    return DecoderConfig(
        family=fields.family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.positive("rms_norm_eps"),
        rope_theta=rope_theta,
        rotary_dim=head_dim,
        dtype=fields.dtype(dtype),
        tie_word_embeddings=fields.switch("tie_word_embeddings"),
        rope_scaling=rope_scaling,
        attention_bias=attention_bias,
        attention_output_bias=attention_output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        bos_token_id=beginnings[0] if beginnings else None,
        mrope_section=sections,
        mrope_interleaved=interleaved,
    )


def refuse_sliding_window(fields: ConfigFields) -> None:
    """Note a window unless it is switched off, for families where it has an effect by itself."""
    window = fields.values.get("sliding_window")
    if window is not None and fields.values.get("use_sliding_window") is not False:
        fields.unsupported.append(f"sliding_window is {as_json(window)} (sliding-window attention), expected null")


def _head_dim(fields: ConfigFields, hidden: int, heads: int, default: int | None) -> int:
    if fields.values.get("head_dim") is None and default is None:
        if hidden and heads and hidden % heads:
            fields.wrong.append(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim"
            )
            return 0
        head_dim = hidden // heads if heads else 0
    else:
        head_dim = fields.size("head_dim", default)
    if head_dim % 2:
        fields.wrong.append(f"the head size is {head_dim}, but only an even one can be rotated (head_dim)")
    return head_dim


def read_llama(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """`attention_bias` gives all four projections of the attention a bias, `mlp_bias` all three of the MLP."""
    refuse_sliding_window(fields)
    bias = fields.switch("attention_bias")
    return read_decoder(
        fields,
        dtype,
        default_kv_heads=True,
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=fields.switch("mlp_bias"),
    )


def read_qwen2(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """`sliding_window` has no effect here unless `use_sliding_window` is true, which is refused."""
    return read_decoder(fields, dtype, attention_bias=True)


#: The head size where `head_dim` is absent; unlike in the other families it does not follow from hidden_size.
QWEN3_HEAD_DIM = 128


def read_qwen3(fields: ConfigFields, dtype: str | None) -> DecoderConfig:
    """`attention_bias` gives all four projections of the attention a bias."""
    bias = fields.switch("attention_bias")
    return read_decoder(
        fields,
        dtype,
        default_head_dim=QWEN3_HEAD_DIM,
        attention_bias=bias,
        attention_output_bias=bias,
        qk_norm=True,
    )
