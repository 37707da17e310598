"""Mixtures of experts for tests of their kernels: random routers' scores, and layers dense and packed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from device_bits import from_bits, to_bits
from gpu_device import device_copy
from packed_weights import GGUF_FORMATS, packed_copy, random_of, random_packed

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.contract import LinearWeights
from edgellm.kernels.experts.contract import Activation, ExpertWeights, Routing
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

#: Routers of each kind: of published sizes, of numbers that fill no warp, of one expert of two.
ROUTINGS = {
    "qwen3": Routing(128, 8),
    "olmoe": Routing(64, 8, normalized=False),
    "lfm2": Routing(32, 4, sigmoid=True, epsilon=1e-6, scale=1.5),
    "gpt_oss": Routing(32, 4),
    "qwen3_5": Routing(256, 8),
    "odd": Routing(37, 5, scale=2.5),
    "most": Routing(512, 32),
    "one_of_two": Routing(2, 1),
}


def absent_experts(kind: str, dtype: str, experts: int) -> list[ExpertWeights]:
    """Gates and ups, and downs, of so many of Qwen3-30B-A3B's experts, "dense" or of a format, at an address that
    nothing reads."""
    sizes = ((experts * 1536, 2048), (experts * 2048, 768))
    if kind == "dense":
        biases = (DeviceArray(1 << 20, (experts, size[0] // experts), dtype) for size in sizes)
        dense = (DeviceArray(1 << 20, size, dtype) for size in sizes)
        return [ExpertWeights(LinearWeights(*pair), experts) for pair in zip(dense, biases, strict=True)]
    format = GGUF_FORMATS.get(kind) or WeightFormat("int4", 128, False, dtype)
    layouts = [DeviceLayout(format, *size, dtype=dtype) for size in sizes]
    packed = [PackedMatrix(layout, DeviceArray(1 << 20, layout.shape, "uint8")) for layout in layouts]
    return [ExpertWeights(LinearWeights(each), experts) for each in packed]


def random_scores(routing: Routing, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What a router gives [rows, E], some of it equal, and a correction [E], both float32."""
    random = np.random.default_rng(seed)
    scores = random.standard_normal((rows, routing.experts), np.float32) * 2
    scores[::3, 1::4] = scores[::3, :1]  # ties
    return scores, (random.standard_normal(routing.experts) / 4).astype(np.float32)


def random_ids(experts: int, chosen: int, rows: int, seed: int = 0) -> np.ndarray:
    """int32 [rows, chosen], rising in each row; the last two rows chose alike."""
    random = np.random.default_rng(seed)
    ids = np.stack([np.sort(random.permutation(experts)[:chosen]) for _ in range(rows)]).astype(np.int32)
    ids[-1] = ids[max(0, rows - 2)]
    return ids


#: What experts make of their first layer's sums.
ACTIVATIONS = (Activation(), Activation("alternating", 0.5), Activation("squared"), Activation(gate="gelu_tanh"))


@lru_cache(maxsize=2)
def random_layer(
    experts: int, rows: int, columns: int, dtype: str, kind: str, seed: int = 0
) -> np.ndarray | PackedWeight:
    """The weight [experts rows, columns] of all, as a dtype holds it in float32, or packed: of int4 in groups of 128 or
    32, int8 in groups, or a type of GGUF's."""
    every = experts * rows
    if kind == "dense":
        values = np.random.default_rng(seed).standard_normal((every, columns), np.float32) * columns**-0.5
        return from_bits(to_bits(values.astype(np.float32), dtype), dtype)
    if kind in GGUF_FORMATS:
        return random_of(GGUF_FORMATS[kind], every, columns, seed=seed)
    codes, group, zeros = {
        "int4": ("int4", 128, False),
        "int4 with zeros": ("int4", 32, True),
        "int8": ("int8", 128, False),
    }[kind]
    return random_packed(every, columns, group, zeros, dtype, seed=seed, codes=codes)  # type: ignore[arg-type]


def on_gpu(
    gpu: Any, weight: np.ndarray | PackedWeight, bias: np.ndarray | None, experts: int, dtype: str
) -> ExpertWeights:
    """A layer in the memory of a GPU; the bias [E, N] is rounded to the dtype."""
    own = None if bias is None else device_copy(gpu, to_bits(bias, dtype))
    if isinstance(weight, PackedWeight):
        return ExpertWeights(LinearWeights(packed_copy(gpu, weight, dtype), own), experts)
    return ExpertWeights(LinearWeights(device_copy(gpu, to_bits(weight, dtype)), own), experts)


def dense_values(weight: np.ndarray | PackedWeight, dtype: str) -> np.ndarray:
    """What the weight's products are made of, rounded to the dtype, in float32."""
    values = weight.values() if isinstance(weight, PackedWeight) else weight
    return from_bits(to_bits(values, dtype), dtype)
