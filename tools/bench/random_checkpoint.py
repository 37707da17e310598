"""Writes a checkpoint with the shapes of a published model and random weights, for measuring speed only."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgellm.engines.decoder import decoder_weights
from edgellm.engines.families import decoder_config

LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_checkpoint(directory: Path, config: dict, seed: int = 0) -> None:
    """Write config, a byte-level tokenizer and normally distributed fp16 weights (standard deviation 0.02)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    random = np.random.default_rng(seed)
    # One block of random values, cut anew for each tensor: drawing billions of normals would take minutes.
    block = (random.standard_normal(1 << 24) * 0.02).astype(np.float16)
    tensors = {}
    for spec in decoder_weights(decoder_config(config)):
        for name, shape in spec.parts:
            size = int(np.prod(shape))
            start = int(random.integers(0, block.size))
            values = np.ones(size, np.float16) if len(shape) == 1 else np.resize(np.roll(block, -start), size)
            tensors[name] = values.reshape(shape)
    save_file(tensors, directory / "model.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    write_checkpoint(arguments.directory, LLAMA_3_2_1B | {"num_hidden_layers": arguments.layers})
