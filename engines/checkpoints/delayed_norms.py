"""Voxtral Realtime's tensors as its programs take them: the norms before MLPs of a delay, and biases of keys.

What such a norm gives is multiplied by 1 + linear2(gelu(linear1(t))), where t are cosines and sines of the delay, the
same for all tokens: the norm's weight takes it in. Keys have no bias, which is one of zeros beside those of queries and
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from edgellm.engines.formats.safetensors_file import TensorInfo
from edgellm.engines.formats.strict_formats import is_integer

_NORM, _PARTS = "post_attention_layernorm.weight", ("ada_rms_norm.linear1.weight", "ada_rms_norm.linear2.weight")
_QUERY_BIAS, _KEY_BIAS = ".self_attn.q_proj.bias", ".self_attn.k_proj.bias"
#: The longest wave of a delay's cosines and sines (Vaswani et al. 2017), and the published delay, in tokens.
_LONGEST_WAVE, _DELAY = 10000.0, 6
_gelu = np.vectorize(lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))), otypes=[np.float64])

#: Gives the values of a tensor, float32.
Read = Callable[[str], np.ndarray]


def with_delayed_norms(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], read: Read
) -> tuple[dict[str, TensorInfo], dict[str, Callable[[], np.ndarray]]]:
    """The tensors by their own names, with norms that know the delay in place of those without, and zeros for biases of
    keys; and what computes these. `read` gives the published values. Those whose shapes do not fit stay."""
    found, computed = dict(tensors), dict[str, Callable[[], np.ndarray]]()
    delay = config.get("default_num_delay_tokens")
    delay = _DELAY if delay is None else delay

    def add(name: str, info: TensorInfo, compute: Callable[[], np.ndarray]) -> None:
        found[name] = replace(info, name=name, dtype="float32", nbytes=4 * math.prod(info.shape))
        computed[name] = compute

    for name, info in tensors.items():
        if name.endswith(_QUERY_BIAS):
            add(name.replace(_QUERY_BIAS, _KEY_BIAS), info, partial(np.zeros, info.shape, np.float32))
        layer = name.removesuffix(_NORM)
        parts = [tensors.get(f"{layer}{part}") for part in _PARTS]
        if layer == name or None in parts or not is_integer(delay):
            continue
        shapes = [part.shape for part in parts if part is not None]
        if len(info.shape) == len(shapes[0]) - 1 == 1 and shapes[0][1:] == info.shape and shapes[1] == shapes[0][::-1]:
            for part in _PARTS:
                del found[f"{layer}{part}"]
            add(name, info, partial(_delayed, read, name, delay))
    return found, computed


def _delayed(read: Read, name: str, delay: int) -> np.ndarray:
    """The weight [H] of the norm of that name, for a delay in tokens."""
    weight, (first, second) = read(name), (read(name.replace(_NORM, part)) for part in _PARTS)
    half = len(weight) // 2
    angles = delay * np.exp(-np.log(_LONGEST_WAVE) / half * np.arange(half))
    inner = _gelu(first.astype(np.float64) @ np.concatenate((np.cos(angles), np.sin(angles))))
    return np.asarray(weight * (1 + second @ inner), np.float32)
