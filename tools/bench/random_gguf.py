"""Writes a GGUF file with the shapes of a published model and random blocks, for measuring speed only.

    python tools/bench/random_gguf.py llama-8b FILE.gguf [--mixture q8_0] [--layers 2]

Types are those of a mixture, as llama.cpp has it: by itself Q4_K_M; MXFP4_MOE has experts in MXFP4, all else in Q8_0.
Models are of Llama's, Qwen3's, Qwen3-MoE's, Qwen3.5-MoE's, gpt-oss's and LFM2-MoE's families. Five gigabytes take some
seconds: blocks are drawn once, and cut anew for each tensor.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from made_vocabulary import MadeVocabulary
from random_checkpoint import SHAPES, with_layers

from edgellm.engines.families import decoder_config
from edgellm.engines.formats.gguf_file import TYPES
from edgellm.engines.model.config import DecoderConfig

_NUMBERS = {name: (number, elements, size) for number, (name, elements, size) in TYPES.items()}
_ALIGNMENT, _DRAWN = 32, 1 << 25
#: Where a block has its factors, float16.
_FACTORS = {"q4_0": (0,), "q8_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}
#: What the linear layers of a mixture are, but for the finer ones and experts in MXFP4.
MIXTURES = {"q4_0": "q4_0", "q8_0": "q8_0", "q4_k_m": "q4_k", "mxfp4_moe": "q8_0"}
#: Of factors; of what stays float32 and is no norm; of MXFP4's powers, as their exponents are stored.
_SCALE, _DEVIATION, _EXPONENT = 1e-4, 0.02, 120
#: Matrices that stay float32.
_FLOATS = "ffn_gate_inp", "shortconv.conv", "ssm_conv1d"
#: The families that are written, and llama.cpp's names of them.
_ARCHITECTURES = {
    **{"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"},
    **{"gpt_oss": "gpt-oss", "lfm2_moe": "lfm2moe", "qwen3_5_moe_text": "qwen35moe"},
}


def finer_layer(layer: int, layers: int) -> bool:
    """Whether Q4_K_M has v, and what goes down, in Q6_K in a layer: in the first and last eighths, and in every third
    one between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def type_in_mixture(mixture: str, kind: str, layer: int, layers: int) -> str:
    """The type of a module's weight in a layer of so many, of the head too, where `layer` is -1. All heads are of Q6_K
    but those of mixtures of Q8_0, as is an embedding that is one; stacks of experts end with `_exps`."""
    if mixture == "mxfp4_moe" and kind.endswith("_exps"):
        return "mxfp4"
    down = kind.removesuffix("_exps").removesuffix("_shexp") in ("attn_v", "ffn_down")
    finer = layer < 0 or (mixture == "q4_k_m" and down and finer_layer(layer, layers))
    return "q6_k" if finer and MIXTURES[mixture] != "q8_0" else MIXTURES[mixture]


def write_random_gguf(path: Path, shape: str, layers: int | None = None, mixture: str = "q4_k_m") -> Path:
    """The file of one of `SHAPES` of a family above, with so many layers (None: its own), of `MIXTURES`."""
    config, random = decoder_config(with_layers(SHAPES[shape], layers)), np.random.default_rng(0)
    if config.family not in _ARCHITECTURES:
        raise SystemExit(f"{shape} is of the family {config.family}; written are {', '.join(_ARCHITECTURES)}")
    tensors, offset = list(_tensors(config, mixture)), 0
    drawn = {kind: _blocks(kind, random) for kind in dict.fromkeys(kind for _, kind, _ in tensors) if kind != "float32"}
    metadata = _metadata(config)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    for name, kind, own in tensors:
        number, elements, size = _NUMBERS[kind]
        header += _text(name) + struct.pack(f"<I{len(own)}QIQ", len(own), *reversed(own), number, offset)
        offset += -(-math.prod(own) // elements * size // _ALIGNMENT) * _ALIGNMENT
    with path.open("wb") as file:
        file.write(header + b"\0" * (-len(header) % _ALIGNMENT))
        for name, kind, own in tensors:
            _, elements, size = _NUMBERS[kind]
            left = nbytes = math.prod(own) // elements * size
            if kind == "float32":
                one = 1 if "norm" in name else -1 if name.endswith("ssm_a") else 0
                values = np.full(own, one) if one else random.normal(0, _DEVIATION, own)
                file.write(values.astype("<f4").tobytes())
                left = 0
            while left:
                first = int(random.integers(0, len(drawn[kind]) // 2))
                piece = memoryview(drawn[kind][first:]).cast("B")[:left]
                left -= file.write(piece)
            file.write(b"\0" * (-nbytes % _ALIGNMENT))
    return path


def _blocks(kind: str, random: np.random.Generator) -> np.ndarray:
    """Random blocks of a type, whose factors are small, or powers of two: uint8 [N, bytes of a block]."""
    size = _NUMBERS[kind][2]
    blocks = random.integers(0, 256, (_DRAWN // size, size), np.uint8)
    if kind == "mxfp4":
        blocks[:, 0] = _EXPONENT
    for place in _FACTORS.get(kind, ()):
        blocks[:, place : place + 2] = random.normal(0, _SCALE, (len(blocks), 1)).astype("<f2").view(np.uint8)
    return blocks


def _tensors(config: DecoderConfig, mixture: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of each."""
    layers, table = config.num_layers, (config.vocab_size, config.hidden_size)
    head = type_in_mixture(mixture, "output", -1, layers)
    yield "token_embd.weight", head if config.tie_word_embeddings else MIXTURES[mixture], table
    for layer in range(layers):
        for name, shape in _layer(config, layer).items():
            module, _, ending = name.rpartition(".")
            is_linear = ending == "weight" and len(shape) > 1 and module not in _FLOATS
            kind = type_in_mixture(mixture, module, layer, layers) if is_linear else "float32"
            yield f"blk.{layer}.{name}", kind, shape
    last = "token_embd_norm" if config.family == "lfm2_moe" else "output_norm"
    yield f"{last}.weight", "float32", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield "output.weight", head, table


def _layer(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors."""
    hidden, mixture, is_post = config.hidden_size, config.mixture, config.family in ("gpt_oss", "qwen3_5_moe_text")
    found: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,)}
    found["post_attention_norm.weight" if is_post else "ffn_norm.weight"] = (hidden,)
    if config.layer_kind(layer) == "delta":
        key_heads, heads, key_size, size = config.delta_heads
        joined = 2 * key_heads * key_size + heads * size
        linears = {"attn_qkv": (joined, hidden), "attn_gate": (heads * size, hidden), "ssm_out": (hidden, heads * size)}
        linears |= {"ssm_alpha": (heads, hidden), "ssm_beta": (heads, hidden)}
        found |= {"ssm_conv1d.weight": (joined, config.conv_width), "ssm_norm.weight": (size,)}
        found |= {"ssm_dt.bias": (heads,), "ssm_a": (heads,)}
    elif config.layer_kind(layer) == "convolution":
        linears = {"shortconv.in_proj": (3 * hidden, hidden), "shortconv.out_proj": (hidden, hidden)}
        found["shortconv.conv.weight"] = hidden, config.conv_width
    else:
        queries, keys = config.query_size, config.kv_size
        linears = {
            "attn_q": ((1 + config.attention_gate) * queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
        }
        linears["attn_output"] = hidden, queries
        if config.qk_norm:
            found |= dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (config.head_dim,))
        if config.attention_sinks:
            found["attn_sinks.weight"] = (config.num_heads,)
        if config.attention_bias:
            found |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    if mixture is None or layer in mixture.dense_layers:
        wide, stack, ending = config.intermediate_size, (), ""
    else:
        wide, stack, ending = mixture.size, (mixture.experts,), "_exps"
        found["ffn_gate_inp.weight"] = mixture.experts, hidden
        if mixture.correction:
            found["exp_probs_b.bias"] = stack
    gates = {f"ffn_{name}{ending}": (*stack, wide, hidden) for name in ("gate", "up")}
    gates[f"ffn_down{ending}"] = *stack, hidden, wide
    if stack and mixture is not None and mixture.shared_size:
        found["ffn_gate_inp_shexp.weight"] = (hidden,)
        linears |= {f"ffn_{name}_shexp": (mixture.shared_size, hidden) for name in ("gate", "up")}
        linears["ffn_down_shexp"] = hidden, mixture.shared_size
    if stack and mixture is not None and mixture.biases:
        found |= {f"{name}.bias": shape[:2] for name, shape in gates.items()} | {"ffn_gate_inp.bias": stack}
    return found | {f"{name}.weight": shape for name, shape in (linears | gates).items()}


def _metadata(config: DecoderConfig) -> dict[str, Any]:
    mixture, yarn = config.mixture, config.rope_scaling or {}
    kind, layers = _ARCHITECTURES[config.family], range(config.num_layers)
    keys = [0 if config.layer_kind(layer) == "convolution" else config.num_kv_heads for layer in layers]
    own: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads if all(keys) else keys,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_theta),
    }
    if mixture is not None:
        own |= {"expert_count": mixture.experts, "expert_used_count": mixture.chosen}
        own["expert_feed_forward_length"] = mixture.size
    if config.family == "gpt_oss":
        own |= {"attention.sliding_window": config.sliding_window, "rope.scaling.type": "yarn"}
        own["rope.scaling.factor"] = float(yarn["factor"])
        own["rope.scaling.original_context_length"] = yarn["original_max_position_embeddings"]
    if config.family == "lfm2_moe":
        assert mixture is not None
        own |= {"shortconv.l_cache": config.conv_width, "leading_dense_block_count": len(mixture.dense_layers)}
        own["expert_gating_func"] = 2  # sigmoid
    if config.family == "qwen3_5_moe_text":
        assert mixture is not None
        key_heads, heads, key_size, size = config.delta_heads
        own |= {"ssm.conv_kernel": config.conv_width, "ssm.inner_size": heads * size, "ssm.state_size": key_size}
        own |= {"ssm.time_step_rank": heads, "ssm.group_count": key_heads, "full_attention_interval": 4}
        own |= {"rope.dimension_count": config.rotary_dim, "rope.dimension_sections": [*config.mrope_section, 0]}
        own["expert_shared_feed_forward_length"] = mixture.shared_size
    vocabulary = MadeVocabulary(config.vocab_size)
    described = json.loads(vocabulary.tokenizer.definition)
    ids = described["model"]["vocab"] | {token["content"]: token["id"] for token in described["added_tokens"]}
    added = {token["content"] for token in described["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    tokenizer = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens,
        "token_type": [3 if token in added else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in described["model"]["merges"]],
        "eos_token_id": vocabulary.eos_token_id,
    }
    of_model = {f"{kind}.{key}": value for key, value in own.items()}
    of_tokenizer = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    return {"general.architecture": kind, **of_model, **of_tokenizer}


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A text, a number, or a list of texts or whole numbers, which llama.cpp takes with signs there, with its type."""
    if isinstance(value, list):
        form = [struct.pack("<Ii", 5, each) if isinstance(each, int) else _value(each) for each in value]
        return struct.pack("<I", 9) + form[0][:4] + struct.pack("<Q", len(form)) + b"".join(each[4:] for each in form)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def main() -> None:
    """The whole of the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--mixture", choices=MIXTURES, default="q4_k_m")
    arguments = parser.parse_args()
    write_random_gguf(arguments.path, arguments.shape, arguments.layers, arguments.mixture)


if __name__ == "__main__":
    main()
