"""What `config.json` of a model in GGUF files would say: what all architectures share, of their metadata.

llama.cpp's converter writes down less than was published: what follows from the architecture stands with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgellm.engines.errors import UnsupportedModelError
from edgellm.engines.formats.gguf_file import GgufFile
from edgellm.engines.gguf.architectures import TABLE, architecture
from edgellm.engines.gguf.metadata import Metadata
from edgellm.engines.quantization.gguf_blocks import PACKED_TYPES, Gguf

_Config = dict[str, Any]


def model_config(files: Sequence[GgufFile]) -> _Config:
    """What `config.json` of the model would say; raises UnsupportedModelError for an architecture that the house does
    not have, and CheckpointError for metadata that is missing or wrong."""
    metadata = Metadata(files)
    own, is_packed = architecture(metadata), any(each.dtype in PACKED_TYPES for each in metadata.tensors.values())
    config: _Config = {
        "vocab_size": metadata.tensors["token_embd.weight"].shape[0] if metadata.has("token_embd.weight") else None,
        "hidden_size": metadata.whole("embedding_length"),
        "intermediate_size": None if own.uneven else metadata.same_in_all("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count") - metadata.count("nextn_predict_layers", 0),
        "num_attention_heads": metadata.same_in_all("attention.head_count"),
        "num_key_value_heads": metadata.key_value_heads(),
        "head_dim": metadata.whole("attention.key_length"),
        "max_position_embeddings": metadata.whole("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not metadata.has("output.weight"),
        "bos_token_id": metadata.whole("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(metadata) or None,
        "dtype": metadata.dtype(),
        "num_experts": metadata.whole("expert_count") or None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
        "rope_parameters": _rope(metadata, files),
        "quantization_config": {"quant_method": Gguf.method} if is_packed else None,
    }
    if metadata.flag("attention.causal") is False:
        raise UnsupportedModelError(f"{metadata.path}: its tokens see later ones, supported is text that is generated")
    values = metadata.whole("attention.value_length")
    if values not in (None, config["head_dim"]):
        raise metadata.error("attention.value_length", values, f"'attention.key_length', {config['head_dim']}")
    found = own.config(metadata, config)
    return {key: value for key, value in found.items() if value is not None or key == "sliding_window"}


#: What ends a turn or a text, where files name but one of several such tokens.
_ENDS: list[str] = TABLE["ends"]
#: Kinds of tokens; Gemma 4's calls of tools end with one that is shown.
_CONTROL, _USER_DEFINED = 3, 4


def end_tokens(metadata: Metadata) -> list[int]:
    """The tokens that end an answer: those that the file names, first, and tokens that always do."""
    named = (metadata.whole(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens = metadata.entries("tokenizer.ggml.tokens", str, "texts")
    kinds = metadata.entries("tokenizer.ggml.token_type", int, "whole numbers")
    usual = (
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if token in _ENDS and (kind == _CONTROL or (kind, token) == (_USER_DEFINED, "<|tool_response>"))
        if (metadata.architecture, token) != ("gpt-oss", "<|end|>")  # whose answers are several messages
    )
    return list(dict.fromkeys(each for each in (*named, *usual) if each is not None))


def _rope(metadata: Metadata, files: Sequence[GgufFile]) -> _Config:
    """The base and the scaling of the rotary embedding, and the part of a head that is rotated."""
    base = {"rope_theta": metadata.number("rope.freq_base") or 10000.0}
    rotated, whole = metadata.whole("rope.dimension_count"), metadata.whole("attention.key_length")
    if whole is None:
        whole = (metadata.whole("embedding_length") or 0) // max(1, metadata.same_in_all("attention.head_count") or 0)
    if rotated and whole:
        base["partial_rotary_factor"] = rotated / whole
    long, short = (metadata.values(f"rope_factors_{name}.weight", files) for name in ("long", "short"))
    if long is not None and short is not None:
        given: _Config = {
            "rope_type": "longrope",
            "original_max_position_embeddings": metadata.whole("rope.scaling.original_context_length"),
            "attention_factor": metadata.number("rope.scaling.attn_factor"),
            "long_factor": long.reshape(-1).tolist(),
            "short_factor": short.reshape(-1).tolist(),
        }
        return base | {key: value for key, value in given.items() if value is not None}
    if (factors := metadata.values("rope_freqs.weight", files)) is not None:
        return base | _by_factors(metadata, factors.reshape(-1), base["rope_theta"])
    factor = metadata.number("rope.scaling.factor") or metadata.number("rope.scale_linear")  # of the first files
    kind = metadata.text("rope.scaling.type") or ("linear" if factor else None)
    if kind in (None, "none"):
        return base
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": metadata.whole("rope.scaling.original_context_length"),
            "attention_factor": metadata.number("rope.scaling.yarn_attn_factor"),
            "beta_fast": metadata.number("rope.scaling.yarn_beta_fast"),
            "beta_slow": metadata.number("rope.scaling.yarn_beta_slow"),
        }
    return base | {key: value for key, value in scaling.items() if value is not None}


#: From here on a factor is written down for a pair that is not rotated.
_STILL = 1e20
#: Where the blend ends in all of Llama's, in rotations within the 8,192 tokens that llama.cpp takes for trained.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _by_factors(metadata: Metadata, factors: np.ndarray, theta: float) -> _Config:
    """The scaling whose frequencies are divided by `factors` [rotary_dim / 2]: Llama 3's, where it is that, or that of
    Gemma 4, whose last pairs stand still."""
    rotated, factor, trained = int((factors == 1).sum()), float(factors.max(initial=1)), 8192
    if 0 < rotated < len(factors) and (factors[:rotated] == 1).all() and (factors[rotated:] >= _STILL).all():
        return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}
    with np.errstate(all="ignore"):  # what is wrong with them is found where they are used
        turns = trained * np.float64(theta) ** -(np.arange(len(factors)) / max(1, len(factors))) / (2 * np.pi)
        kept = np.clip((turns - 1.0) / 3.0, 0, 1)
        is_llama3 = np.allclose(1 / (kept + (1 - kept) / factor), factors, rtol=1e-5)
    if is_llama3:
        return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": trained} | _LLAMA3
    same = [float(each) for each in factors]
    given = {"short_factor": same, "long_factor": same, "attention_factor": 1.0}
    return {"rope_type": "longrope", "original_max_position_embeddings": metadata.whole("context_length")} | given
