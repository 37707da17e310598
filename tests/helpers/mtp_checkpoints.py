"""Checkpoints with a head for multi-token prediction: golden ones, and tiny ones made on the spot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from golden_files import golden_folder
from safetensors.numpy import load_file, save_file
from tiny_families import MIXTURES, RECURRENT

DECODERS, GOLDENS = golden_folder("decoder"), golden_folder("mtp")
#: The golden heads, by the names of their bases.
HEADS = ("qwen3_5_text", "qwen3_5_tied", "qwen3_5_moe_text", "nemotron_h_moe")
#: Fields of a tiny Qwen3.5 whose head drafts.
TINY = RECURRENT["qwen3_5"] | {
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "tie_word_embeddings": False,
}
#: The same of a tiny Nemotron-H.
TINY_NEMOTRON = MIXTURES["nemotron_h_moe"] | {
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "tie_word_embeddings": False,
}
#: How much the layers of an agreeing base add to the embedding of its current token: less of it, more agreement.
_LAYER_WEIGHT = 0.01


def golden_checkpoint(name: str, directory: Path) -> Path:
    """A golden base with its golden head, in two files as its makers publish it."""
    shutil.copytree(DECODERS / name, directory)
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    shutil.copy(GOLDENS / name / "mtp.safetensors", directory / "model-00002-of-00002.safetensors")
    config = json.loads((directory / "config.json").read_text())
    depth = "num_nextn_predict_layers" if name.startswith("nemotron") else "mtp_num_hidden_layers"
    config.get("text_config", config)[depth] = 1
    (directory / "config.json").write_text(json.dumps(config))
    write_index(directory)
    return directory


def write_index(directory: Path) -> None:
    """The index of all weight files that a directory has."""
    places = {name: file.name for file in directory.glob("model-*.safetensors") for name in _names(file)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@dataclass(frozen=True)
class _Names:
    """What a base calls its final norm, its embedding and the layers that its head has ones like, and the head its own
    norms and what joins both inputs; norms of such a value leave rows as they are."""

    norm: str
    embedding: str
    layers: dict[str, str]
    own_norms: tuple[str, ...]
    join: str
    neutral: float


_QWEN = _Names(
    "model.norm.weight",
    "model.embed_tokens.weight",
    {"model.layers.1.": "mtp.layers.0."},
    ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"),
    "mtp.fc.weight",
    0.0,
)
_NEMOTRON = _Names(
    "model.norm_f.weight",
    "model.embed_tokens.weight",
    {"model.layers.2.": "mtp.layers.0.", "model.layers.3.": "mtp.layers.1."},
    ("mtp.layers.0.enorm.weight", "mtp.layers.0.hnorm.weight", "mtp.layers.1.final_layernorm.weight"),
    "mtp.layers.0.eh_proj.weight",
    1.0,
)


def add_head(checkpoint: Path, agreeing: bool = True, seed: int = 1) -> Path:
    """Put a head into a tiny checkpoint of `TINY`, whose only attention layer is the second, or of `TINY_NEMOTRON`.

    With `agreeing` base and head are made to agree: the layers of both add little to the embedding of the current
    token, which the layer that joins both inputs passes on, so that either predicts from it alone.
    """
    tensors, random = load_file(checkpoint / "model.safetensors"), np.random.default_rng(seed)
    names = _QWEN if _QWEN.norm in tensors else _NEMOTRON
    if agreeing:
        for name, values in tensors.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                tensors[name] = values * np.asarray(_LAYER_WEIGHT, values.dtype)
            elif name == names.norm:
                tensors[name] = np.full_like(values, names.neutral)
            elif name == names.embedding:  # rows of one size, as the head's norm makes them
                rows = values.astype(np.float32)
                tensors[name] = (rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True))).astype(values.dtype)
    hidden = tensors[names.norm].shape[0]
    small = 0.02 if agreeing else 1.0
    head = {name: np.full(hidden, names.neutral) for name in names.own_norms}
    head[names.join] = random.standard_normal((hidden, 2 * hidden)) * 0.2 * small
    if agreeing:
        head[names.join][:, :hidden] += np.eye(hidden)
    for name, values in tensors.items():
        for layer, own in names.layers.items():
            if name.startswith(layer):
                drawn = random.standard_normal(values.shape) * 0.2
                drawn *= small if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                head[name.replace(layer, own)] = drawn
    dtype = tensors[names.norm].dtype
    save_file(tensors | {name: values.astype(dtype) for name, values in head.items()}, checkpoint / "model.safetensors")
    return checkpoint


def edit_tensors(checkpoint: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    return checkpoint


def _names(file: Path) -> list[str]:
    length = int.from_bytes(file.read_bytes()[:8], "little")
    return [name for name in json.loads(file.read_bytes()[8 : 8 + length]) if name != "__metadata__"]
