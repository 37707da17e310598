"""Reads checkpoints that `edgellm quantize` wrote by an unpacking of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from golden_sequences import Sequences
from safetensors.numpy import load_file, save_file


def stored(directory: Path) -> dict[str, np.ndarray]:
    """All tensors by their names, as the index has them."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(directory / name) for name in set(index.values())}
    assert sorted(index) == sorted(name for tensors in files.values() for name in tensors)
    return {name: files[file][name] for name, file in index.items()}


def unpacked(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Integers from 0 up [R, columns] of int32 [R, words], the lowest bits first."""
    words = words.astype(np.int64) & 0xFFFFFFFF
    parts = [words >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)]
    return np.stack(parts, -1).reshape(len(words), -1)[:, :columns]


def dequantized(tensors: dict[str, np.ndarray], module: str, bits: int) -> np.ndarray:
    rows, columns = tensors[f"{module}.weight_shape"].tolist()
    scales = tensors[f"{module}.weight_scale"].astype(np.float32)
    zeros = tensors.get(f"{module}.weight_zero_point")
    middle = np.full(scales.shape, 1 << bits - 1) if zeros is None else unpacked(zeros.T, bits, rows).T
    width = columns // scales.shape[1]
    codes = unpacked(tensors[f"{module}.weight_packed"], bits, columns) - np.repeat(middle, width, 1)
    return (codes * np.repeat(scales, width, 1)).astype(np.float16)


def dense_again(source: Path, quantized: Path, target: Path, bits: int) -> Path:
    """The checkpoint with dequantized weights in place of packed ones."""
    tensors = stored(quantized)
    modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    dense = {name: each for name, each in tensors.items() if name.rpartition(".")[0] not in modules or "bias" in name}
    dense |= {f"{module}.weight": dequantized(tensors, module, bits) for module in modules}
    target.mkdir()
    save_file(dense, target / "model.safetensors")
    shutil.copy(source / "config.json", target)
    return target


def logits(directory: Path, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Those of NumPy [B, T, V] for token ids of texts of one length; all tensors of the checkpoint are looked at."""
    tokens = np.array([list(text) for text in texts])
    nothing = np.zeros((*tokens.shape, 1), np.float32)
    versions = {"torch": "", "transformers": ""}
    save_file({"token_ids": tokens, "logits": nothing}, directory / "expected.safetensors", metadata=versions)
    return Sequences(directory).logits(tokens, [0])
