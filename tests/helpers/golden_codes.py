"""Codes of packed weights, stored as how they differ from codes that are computed again from the model's seed.

The weights that a package packed are those that torch draws after `torch.manual_seed(seed)`, which NumPy draws, too;
their scales are stored. What both give is nearly always the package's code, so that the differences pack well.
`NAME.codes.json` beside `NAME.safetensors` has the seed, the weights' deviation and dtype, by layer its first number in
the stream and its shape, and the SHA-256 of the tensors as the package wrote them: others are not handed out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

#: By name safetensors' dtype, the shape, and the bytes.
Tensors = dict[str, tuple[str, list[int], bytes]]
#: Where AutoAWQ puts each of eight columns.
_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]
#: The positive values of E2M1 and E4M3 by their codes.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E4M3 = np.array([code / 512 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(127)])


def differences(tensors: Tensors, description: Mapping[str, Any]) -> Tensors:
    """Tensors with the differences in the places of the codes."""
    return _changed(tensors, description, -1)


def codes(tensors: Tensors, description: Mapping[str, Any]) -> Tensors:
    """Tensors with the codes in the places of what `differences` put there."""
    found = _changed(tensors, description, 1)
    assert digest(found) == description["sha256"], "the codes that were computed are not the package's"
    return found


def digest(tensors: Tensors) -> str:
    """SHA-256 of all names and bytes."""
    return hashlib.sha256(b"".join(name.encode() + data for name, (_, _, data) in tensors.items())).hexdigest()


def drawn_weight(seed: int, start: int, shape: tuple[int, int]) -> np.ndarray:
    """float64 [N, K] as torch's `normal_` draws them in float32, with a deviation of 1, from the number `start` on of
    the stream of a seed: of each 16 numbers, eight pairs by Box and Muller's transform."""
    numbers = np.random.RandomState(seed).randint(0, 1 << 32, start + shape[0] * shape[1], np.uint32)[start:]
    uniform = (numbers & 0xFFFFFF).reshape(-1, 2, 8) / (1 << 24)
    radius, angle = np.sqrt(-2 * np.log(1 - uniform[:, 0])), 2 * np.pi * uniform[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(shape)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values in a dtype of safetensors, of bfloat16 the bits; to the nearest, ties to even."""
    if dtype != "BF16":
        return values.astype({"F16": "<f2", "F32": "<f4"}[dtype])
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def _changed(tensors: Tensors, description: Mapping[str, Any], sign: int) -> Tensors:
    changed = dict(tensors)
    for layer, (start, rows, columns) in description["layers"].items():
        weight = drawn_weight(description["seed"], start, (rows, columns)) * description["deviation"]
        own = {name.removeprefix(f"{layer}."): each for name, each in tensors.items() if name.startswith(f"{layer}.")}
        ending = next(each for each in ("qweight", "weight_packed", "weight") if each in own)
        dtype, shape, data = own[ending]
        bits = 8 if len(data) >= weight.size else 4
        if dtype == description["dtype"]:  # a dense one
            computed = rounded(weight, dtype).view(np.uint8).astype(np.int64).ravel()
        else:
            integers = _codes(_as(weight, description["dtype"]), own, ending, bits)
            computed = _in_file_order(integers, ending, shape, bits).ravel()
        fields = np.frombuffer(data, np.uint8).astype(np.int64)[:, None] >> np.arange(0, 8, bits)
        values = (fields.ravel() + sign * computed) % (1 << bits)
        joined = (values.reshape(-1, 8 // bits) << np.arange(0, 8, bits)).sum(axis=1)
        changed[f"{layer}.{ending}"] = dtype, shape, joined.astype(np.uint8).tobytes()
    return changed


def _codes(weight: np.ndarray, own: Tensors, ending: str, bits: int) -> np.ndarray:
    """Integers [N, K] that a package makes of a weight by the scales that it stored."""
    numbers = {name: _numbers(*each) for name, each in own.items()}
    if "pre_quant_scale" in own:
        weight = _as(weight / numbers["pre_quant_scale"], own["pre_quant_scale"][0])
    name = next(each for each in ("scales", "weight_scale", "weight_scale_inv") if each in own)
    scales = numbers[name].T if name == "scales" else numbers[name]
    scales = scales.reshape(scales.shape[0] if scales.ndim else 1, -1)
    scales = scales * numbers.get("weight_scale_2", 1) / numbers.get("weight_global_scale", 1)
    # Powers of two are the sizes of blocks and groups, the last of which may end behind the weight.
    high, wide = (
        1 << (-(-size // count) - 1).bit_length() for size, count in zip(weight.shape, scales.shape, strict=True)
    )
    groups = numbers.get("g_idx", numbers.get("weight_g_idx", np.arange(weight.shape[1]) // wide)).astype(int)
    quotients = weight / np.repeat(scales, high, axis=0)[: len(weight), groups]
    if own[ending][0] == "F8_E4M3":
        return _nearest(quotients, _E4M3, 7)
    if own[name][0] == "F8_E4M3":
        return _nearest(quotients, _E2M1, 3)
    if name == "weight_scale":  # compressed-tensors divides in the dtype of both
        quotients = _as(quotients, own[name][0])
    zeros, half = own.get("qzeros", own.get("weight_zero_point")), 1 << bits - 1
    if zeros is None or len(set(zeros[2])) == 1:
        return np.rint(quotients).clip(-half, half - 1).astype(np.int64) + (0 if own[ending][0] == "U8" else half)
    order = np.argsort(groups, kind="stable")
    firsts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    lowest = np.minimum.reduceat(weight[:, order], firsts, axis=1).clip(max=0)
    middles = np.rint(-lowest / scales).clip(0, 2 * half - 1)
    return np.rint(quotients + middles[:, groups]).clip(0, 2 * half - 1).astype(np.int64)


def _in_file_order(codes: np.ndarray, ending: str, shape: list[int], bits: int) -> np.ndarray:
    """Codes [N, K] as the fields of a tensor lie one behind the other."""
    (rows, columns), each = codes.shape, 32 // bits
    if ending == "qweight" and shape[0] < columns:  # GPTQ's
        return codes.T.reshape(-1, each, rows).transpose(0, 2, 1)
    if ending == "qweight":
        return codes.T.reshape(columns, -1, each)[:, :, _AWQ]
    if shape[0] < rows:  # ModelOpt's integers, in pairs of rows
        return codes.reshape(-1, 2, columns).transpose(0, 2, 1)
    return np.pad(codes, ((0, 0), (0, -columns % each))) if ending == "weight_packed" else codes


def _nearest(values: np.ndarray, positive: np.ndarray, sign_bit: int) -> np.ndarray:
    """Codes of float values: the nearest of the `positive` ones, at ties that with an even code, and the sign."""
    middles = (positive[1:] + positive[:-1]) / 2
    below, above = (np.searchsorted(middles, np.abs(values), side) for side in ("left", "right"))
    return np.where(below % 2 == 0, below, above) | np.signbit(values).astype(np.int64) << sign_bit


def _numbers(dtype: str, shape: list[int], data: bytes) -> np.ndarray:
    """float64 values of a tensor."""
    if dtype == "BF16":
        found = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif dtype == "F8_E4M3":
        bits = np.frombuffer(data, np.uint8)
        found = np.append(_E4M3, np.nan)[bits & 127] * np.where(bits > 127, -1, 1)
    else:
        known = {"F16": "<f2", "F32": "<f4", "I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1"}
        found = np.frombuffer(data, known[dtype])
    return found.astype(np.float64).reshape(shape)


def _as(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values as F16 or BF16 has them."""
    return _numbers(dtype, list(values.shape), rounded(values, dtype).tobytes())
