"""Tensors of checkpoints: conversions between float32, float16 and bfloat16, and whose tensor a name belongs to.

NumPy has no bfloat16: its bits are uint16 here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.kernels.bfloat16 import bfloat16_bits

#: The formats that models are computed in, and the NumPy type that holds one.
STORAGE: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


#: Columns of a turned matrix that are copied at a time: cache lines of so many rows of what lies there stay at hand.
_TURNED_COLUMNS = 32


def contiguous(values: np.ndarray) -> np.ndarray:
    """The same in C order: of a matrix that lies turned in its file in about a quarter of the time that NumPy takes."""
    if values.ndim != 2 or values.strides[0] >= values.strides[1]:
        return np.ascontiguousarray(values)
    found = np.empty(values.shape, values.dtype)
    for first in range(0, values.shape[1], _TURNED_COLUMNS):
        columns = slice(first, first + _TURNED_COLUMNS)
        found[:, columns] = values[:, columns]
    return found


def float32_into(values: np.ndarray, dtype: str, target: np.ndarray) -> None:
    """Write `values` of `dtype` (a key of `STORAGE`) to `target` float32 of the same shape; always exact."""
    if dtype == "bfloat16":  # the upper half of a float32
        bits = target.view(np.uint32)
        np.copyto(bits, values)
        bits <<= 16
    else:
        np.copyto(target, values)


def as_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` of `dtype` (a key of `STORAGE`) as float32, always exact: themselves where they are that."""
    return convert(values, dtype, "float32")[0]


def convert(values: np.ndarray, source: str, target: str) -> tuple[np.ndarray, int]:
    """`values` of format `source` in format `target` (keys of `STORAGE`), rounded once to nearest, ties to even. Also
    returns how many finite values became infinite because the target cannot hold them."""
    if source == target:
        return values, 0
    exact = np.empty(values.shape, np.float32)
    float32_into(values, source, exact)
    if target == "float32":
        return exact, 0
    if target == "bfloat16":
        result = bfloat16_bits(exact)
        infinite = (result & 0x7FFF) == 0x7F80
    else:
        with np.errstate(over="ignore"):
            result = exact.astype(np.float16)
        infinite = np.isinf(result)
    overflowed = int(np.count_nonzero(infinite & np.isfinite(exact))) if infinite.any() else 0
    return result, overflowed


def value_and_place(values: np.ndarray, dtype: str, index: int) -> str:
    """One of `values` of format `dtype` and where it stands, as in "nan at [3, 17]"; `index` counts in C order."""
    (value,) = as_float32(values.reshape(-1)[index : index + 1], dtype)
    return f"{value} at [{', '.join(str(int(each)) for each in np.unravel_index(index, values.shape))}]"


_TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
#: What begins a tensor of the encoders, of images or of audio, or of what leads from them to the language model.
ENCODER_PREFIXES = tuple(f"{outer}{inner}" for inner in _TABLE["encoders"] for outer in ("", "model."))
#: What begins a tensor of the language model, and what its family calls it; the first that fits counts.
_WRAPPINGS: list[tuple[str, str]] = [*_TABLE["language models"].items()]


def is_multimodal(config: dict[str, Any]) -> bool:
    """Whether a `config.json` describes a model with an encoder of images or speech."""
    return any(isinstance(config.get(name), dict) for name in ("vision_config", "audio_config"))


def encoder_prefix(name: str) -> str | None:
    """What begins the name of a tensor, or of a module, of an encoder; None for one of the language model."""
    return next((prefix for prefix in ENCODER_PREFIXES if name.startswith(prefix)), None)


def language_model_name(name: str) -> str:
    """The name that a tensor, or a module, has in the language model's own checkpoints; others stay as they are."""
    for wrapped, own in _WRAPPINGS:
        if name.startswith(wrapped):
            return own + name[len(wrapped) :]
    return name


def published_names(name: str) -> tuple[str, ...]:
    """What a module of a multimodal model may be called in files of any release: first `name`, which is the language
    model's own, or that of a module of an encoder."""
    prefix = encoder_prefix(name)
    if prefix is not None:
        inner = name.removeprefix("model.")
        return (name, *(each for each in (inner, f"model.{inner}") if each != name))
    return (name, *(wrapped + name[len(own) :] for wrapped, own in _WRAPPINGS if name.startswith(own)))
