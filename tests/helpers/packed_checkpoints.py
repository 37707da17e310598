"""Packs a tiny checkpoint, and makes its dense twin: the same weights as float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

MODEL = "model.safetensors"
_IGNORED = ["re:.*lm_head", "re:.*(visual|vision_tower|multi_modal_projector).*"]
_TABLE = "embed_tokens_per_layer"
#: Attention and tokens' own embeddings by 8 bits a row, symmetric; the rest by 4 bits in groups of 32 with zero points.
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": _IGNORED,
    "config_groups": {
        "rows": {
            "targets": [f"re:.*{_TABLE}", "re:.*self_attn.*"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        },
        "groups": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        },
    },
}
_DENSE = ("embed_tokens.", "lm_head", "visual.", "vision_tower.", "multi_modal_projector.")


def write_packed(
    source: Path, packed: Path, twin: Path, by_rows: str | None = "self_attn", *dense_too: str
) -> tuple[Path, Path]:
    """Two copies of a checkpoint: its linear layers packed as `QUANTIZATION` says, and dequantized; `by_rows` None: all
    by 4 bits in groups. Layers with one of `dense_too` in their name stay dense."""
    for target in (packed, twin):
        shutil.copytree(source, target)
    tensors = load_file(source / MODEL)
    stored, dense = {}, {}
    for name, values in tensors.items():
        is_linear = values.ndim == 2 and not any(part in name for part in (*_DENSE, *dense_too))
        if not is_linear:
            stored[name] = dense[name] = values
            continue
        is_by_rows = _TABLE in name or (by_rows is not None and by_rows in name)
        made, dense[name] = _packed(values.astype(np.float32), is_by_rows)
        stored |= {f"{name}_{ending}": tensor for ending, tensor in made.items()}
    save_file(stored, packed / MODEL)
    save_file(dense, twin / MODEL)
    config = json.loads((source / "config.json").read_text())
    groups = QUANTIZATION["config_groups"]
    if not by_rows:
        groups = groups | {"rows": groups["rows"] | {"targets": [f"re:.*{_TABLE}"]}}
    ignored = _IGNORED + [f"re:.*{part}" for part in dense_too]
    said = QUANTIZATION | {"config_groups": groups, "ignore": ignored}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return packed, twin


def pack_embedding(packed: Path, twin: Path, target: str) -> None:
    """Pack the embedding of a packed checkpoint, too, by 8 bits a row, and dequantize its twin's; `target` is what
    names it."""
    name = "model.embed_tokens.weight"
    tensors, dense = load_file(packed / MODEL), load_file(twin / MODEL)
    made, dense[name] = _packed(tensors.pop(name).astype(np.float32), True)
    save_file(tensors | {f"{name}_{ending}": tensor for ending, tensor in made.items()}, packed / MODEL)
    save_file(dense, twin / MODEL)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["config_groups"]["rows"]["targets"].append(target)
    (packed / "config.json").write_text(json.dumps(config))


def _packed(weight: np.ndarray, by_rows: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a layer by the endings of their names, and its weight in float32, dequantized in float16."""
    rows, columns = weight.shape
    bits, size = (8, columns) if by_rows else (4, 32)
    grouped = weight.reshape(rows, -1, size)
    most = (1 << bits) - 1
    if by_rows:
        scales = (np.abs(grouped).max(2) / (most // 2)).astype(np.float16)
        zeros = np.full(scales.shape, 1 << bits - 1)
    else:
        low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
        scales = ((high - low) / most).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, most).astype(int)
    codes = np.clip(np.rint(grouped / scales[..., None].astype(np.float32)) + zeros[..., None], 0, most).astype(int)
    values = ((codes - zeros[..., None]).astype(np.float16) * scales[..., None]).reshape(rows, columns)
    made = {
        "packed": _words(codes.reshape(rows, columns), bits),
        "scale": scales,
        "shape": np.array([rows, columns], np.int64),
    }
    if not by_rows:
        made["zero_point"] = np.ascontiguousarray(_words(zeros.T, bits).T)
    return made, values.astype(np.float32)


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [R, ceil(C bits / 32)], the first code in the lowest bits."""
    each = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each))).astype(np.uint32)
    shifted = padded.reshape(len(codes), -1, each) << (bits * np.arange(each, dtype=np.uint32))
    return np.bitwise_or.reduce(shifted, 2).view(np.int32)
