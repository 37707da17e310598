"""Writes a GGUF file with the shapes of a published model and random blocks, for measuring speed only.

    python tools/bench/random_gguf.py llama-8b FILE.gguf [--mixture q8_0] [--layers 2]

Types are those of a mixture, as llama.cpp has it: by itself Q4_K_M. Five gigabytes take some seconds: blocks are drawn
once, and cut anew for each tensor.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from made_vocabulary import MadeVocabulary
from random_checkpoint import SHAPES

from edgellm.engines.formats.gguf_file import TYPES

_NUMBERS = {name: (number, elements, size) for number, (name, elements, size) in TYPES.items()}
_ALIGNMENT, _DRAWN = 32, 1 << 25
#: Where a block has its factors, float16.
_FACTORS = {"q4_0": (0,), "q8_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}
#: What the linear layers of a mixture are, but for the finer ones.
MIXTURES = {"q4_0": "q4_0", "q8_0": "q8_0", "q4_k_m": "q4_k"}
_SCALE = 1e-4


def finer_layer(layer: int, layers: int) -> bool:
    """Whether Q4_K_M has v, and what goes down, in Q6_K in a layer: in the first and last eighths, and in every third
    one between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def type_in_mixture(mixture: str, kind: str, layer: int, layers: int) -> str:
    """The type of a module's weight in a layer of so many, of the head too, where `layer` is -1. All heads but Q8_0's
    are of Q6_K, as is an embedding that is one."""
    finer = layer < 0 or (mixture == "q4_k_m" and kind in ("attn_v", "ffn_down") and finer_layer(layer, layers))
    return "q6_k" if finer and mixture != "q8_0" else MIXTURES[mixture]


def write_random_gguf(path: Path, shape: str, layers: int | None = None, mixture: str = "q4_k_m") -> Path:
    """The file of one of `SHAPES` of Llama's or Qwen3's family, with so many layers (None: its own), of `MIXTURES`."""
    config = dict(SHAPES[shape])
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    random, drawn = np.random.default_rng(0), dict[str, np.ndarray]()
    for kind, places in _FACTORS.items():
        size = _NUMBERS[kind][2]
        drawn[kind] = random.integers(0, 256, (_DRAWN // size, size), np.uint8)
        for place in places:
            factors = random.normal(0, _SCALE, (len(drawn[kind]), 1)).astype("<f2")
            drawn[kind][:, place : place + 2] = factors.view(np.uint8)
    tensors, offset = list(_tensors(config, mixture)), 0
    metadata = _metadata(config)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    for name, kind, own in tensors:
        number, elements, size = _NUMBERS[kind]
        header += _text(name) + struct.pack(f"<I{len(own)}QIQ", len(own), *reversed(own), number, offset)
        offset += -(-math.prod(own) // elements * size // _ALIGNMENT) * _ALIGNMENT
    with path.open("wb") as file:
        file.write(header + b"\0" * (-len(header) % _ALIGNMENT))
        for _, kind, own in tensors:
            _, elements, size = _NUMBERS[kind]
            left = nbytes = math.prod(own) // elements * size
            if kind == "float32":
                file.write(np.ones(own, "<f4").tobytes())
                left = 0
            while left:
                first = int(random.integers(0, len(drawn[kind]) // 2))
                piece = memoryview(drawn[kind][first:]).cast("B")[:left]
                left -= file.write(piece)
            file.write(b"\0" * (-nbytes % _ALIGNMENT))
    return path


def _tensors(config: Mapping[str, Any], mixture: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of each."""
    hidden, wide, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    head, table = type_in_mixture(mixture, "output", -1, layers), (config["vocab_size"], hidden)
    yield "token_embd.weight", head if config["tie_word_embeddings"] else MIXTURES[mixture], table
    for layer in range(layers):
        matrices = {"attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
        matrices |= {"attn_output": (hidden, queries), "ffn_gate": (wide, hidden), "ffn_up": (wide, hidden)}
        matrices |= {"ffn_down": (hidden, wide)}
        for name, shape in matrices.items():
            yield f"blk.{layer}.{name}.weight", type_in_mixture(mixture, name, layer, layers), shape
        norms = {"attn_norm": hidden, "ffn_norm": hidden}
        norms |= {"attn_q_norm": size, "attn_k_norm": size} if config["model_type"] == "qwen3" else {}
        yield from ((f"blk.{layer}.{name}.weight", "float32", (width,)) for name, width in norms.items())
    yield "output_norm.weight", "float32", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", head, table


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config["model_type"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
    }
    vocabulary = MadeVocabulary(config["vocab_size"])
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
