"""Layouts of codes in words of int32: GPTQ's, versions 1 and 2 (AutoGPTQ, GPTQModel), AWQ's gemm (AutoAWQ), and
AutoRound's, which are either.

https://github.com/ModelCloud/GPTQModel, https://github.com/casper-hansen/AutoAWQ, https://github.com/intel/auto-round
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgellm.engines.quantization import layout as layouts
from edgellm.engines.quantization.stored import Arrangement, StoredCodes, StoredWeight, awq_order, unpacked
from edgellm.kernels.quantization.packed_weight import Codes, WeightFormat

#: What AutoRound may name behind a layout: the kernel that was thought of, which changes nothing of the tensors.
_KERNELS = ("exllamav2", "triton", "tritonv2")


@dataclass(frozen=True)
class _Words(layouts.Layout):
    """Codes `qweight` and zero points `qzeros` [groups, N bits / 32] in words of int32, `scales` [groups, N]; `group`
    columns share a scale, or all. `symmetric`: each zero point is the middle of the range."""

    bits: int
    group: int | None
    symmetric: bool
    scale_tensor = "scales"

    def tensors(self, rows: int, columns: int) -> dict[str, layouts.Stored]:
        groups = 1 if self.group is None else columns // self.group
        return {
            "qzeros": layouts.Stored.of((groups, rows * self.bits // 32), *layouts.WORDS),
            "scales": layouts.Stored.of((groups, rows), *layouts.FLOATS),
        }

    def format(self, scale_dtype: str) -> WeightFormat:
        codes: Codes = "int4" if self.bits == 4 else "int8"
        return WeightFormat(codes, self.group, not self.symmetric, scale_dtype)

    def _read(self, tensors: layouts.LinearTensors, arrangement: Arrangement, zeros: np.ndarray) -> StoredWeight:
        """The weight of codes in an arrangement, with `zeros` uint8 [groups, N]."""
        if self.symmetric:
            middle = 1 << self.bits - 1
            tensors.check("qzeros", zeros == middle, zeros, f"zero points of {middle} (the weights are symmetric)")
        return StoredWeight(
            self.format(tensors.dtype("scales")),
            (StoredCodes(tensors.integers("qweight"), arrangement, self.bits, tensors.shape),),
            np.ascontiguousarray(tensors.scales("scales").T),
            None if self.symmetric else np.ascontiguousarray(zeros.T),
        )


@dataclass(frozen=True)
class AwqGemm(_Words):
    """`qweight` int32 [K, N / 8]: 4-bit codes packed along rows of the output, in an order made for its kernels."""

    name: str = "AWQ gemm"

    def tensors(self, rows: int, columns: int) -> dict[str, layouts.Stored]:
        return {"qweight": layouts.Stored.of((columns, rows // 8), *layouts.WORDS)} | super().tensors(rows, columns)

    def problem(self, rows: int, columns: int) -> str | None:
        shared = f"8 does not divide its {rows} rows, which share words" if rows % 8 else None
        return super().problem(rows, columns) or shared

    def read(self, tensors: layouts.LinearTensors) -> StoredWeight:
        rows = tensors.shape[0]
        return self._read(tensors, "awq", unpacked(tensors.integers("qzeros"), 4, 1, rows)[:, awq_order(rows)])


@dataclass(frozen=True)
class Gptq(_Words):
    """`qweight` int32 [K bits / 32, N], `g_idx` int32 [K], the group of each column, which may be missing where they
    are not `ordered`. Zero points are stored less `shift` (1 in version 1, modulo the range; 0 in version 2)."""

    ordered: bool
    shift: int
    index_optional: bool = False
    name: str = "GPTQ"
    input_tensor = "g_idx"

    def tensors(self, rows: int, columns: int) -> dict[str, layouts.Stored]:
        optional = self.index_optional and not self.ordered
        return {
            "qweight": layouts.Stored.of((columns * self.bits // 32, rows), *layouts.WORDS),
            **super().tensors(rows, columns),
            self.input_tensor: layouts.Stored.of((columns,), "int32", "int64", optional=optional),
        }

    def format(self, scale_dtype: str) -> WeightFormat:
        return replace(super().format(scale_dtype), permuted=self.ordered)

    def problem(self, rows: int, columns: int) -> str | None:
        each, problem = 32 // self.bits, super().problem(rows, columns)
        for count, what in ((columns, "columns"), (rows, "rows")):
            if problem is None and count % each:
                problem = f"{each} does not divide its {count} {what}, which share words"
        return problem

    def read(self, tensors: layouts.LinearTensors) -> StoredWeight:
        zeros = unpacked(tensors.integers("qzeros"), self.bits, 1, tensors.shape[0])
        weight = self._read(tensors, "columns", (zeros + np.uint8(self.shift)) & np.uint8((1 << self.bits) - 1))
        index = self.input_tensor
        order = layouts.column_order(tensors, index, self.group) if tensors.has(index) else None
        if order is not None and not self.ordered:
            raise tensors.error(index, "columns in another order than their groups'", "order, as desc_act is false")
        return replace(weight, format=replace(weight.format, permuted=order is not None), order=order)


class Awq(layouts.Quantization):
    """All linear layers of the decoder but those whose names hold one of `modules_to_not_convert`."""

    method = "awq"

    def __init__(self, settings: layouts.Settings, dtype: str) -> None:
        settings.choice("bits" if "bits" in settings.values else "w_bit", (4,))
        kind = str(settings.values.get("version", "gemm")).lower()
        if kind not in ("gemm", "exllama", "ipex"):  # the others' tensors are laid out for kernels of their own
            raise settings.refused("version", "'gemm'", "Take a release in AWQ's gemm layout, or in compressed-tensors")
        symmetric = not settings.switch("zero_point", True)
        key = "group_size" if "group_size" in settings.values else "q_group_size"
        self._layout = AwqGemm(4, settings.group(key, 128), symmetric)
        self._dense = settings.names("modules_to_not_convert")

    def layout(self, names: tuple[str, ...]) -> layouts.Layout | None:
        is_packed = layouts.in_decoder(names[0]) and not any(part in name for part in self._dense for name in names)
        return self._layout if is_packed else None


class GptqModel(layouts.Quantization):
    """All linear layers of the decoder, but for what rules of `dynamic` say: patterns, of which the first that fits
    leaves a module dense ("-:") or changes its settings."""

    method = "gptq"

    def __init__(self, settings: layouts.Settings, dtype: str) -> None:
        kind = settings.values.get("checkpoint_format") or settings.values.get("format") or "gptq"
        if kind not in ("gptq", "gptq_v2"):
            key = "checkpoint_format" if settings.values.get("checkpoint_format") else "format"
            raise settings.refused(key, "'gptq' or 'gptq_v2'", "Take a release in GPTQ's own layout")
        self._shift = 0 if kind == "gptq_v2" else 1
        self._head = settings.switch("lm_head", False)
        self._layout = self._made(settings)
        self._parts = tuple(f".{part}" for part in _flat(settings))
        rules = settings.inner("dynamic")
        self._rules: list[tuple[re.Pattern[str], layouts.Layout | None]] = []
        for text in rules.values:
            pattern = settings.pattern(re.sub(r"^[-+]:", "", text))
            if text.startswith("-:"):
                self._rules.append((pattern, None))
            else:
                own = layouts.Settings({**settings.values, **rules.inner(text).values}, f"{rules.place}: {text}")
                self._rules.append((pattern, self._made(own)))

    def _made(self, settings: layouts.Settings) -> Gptq:
        if settings.values.get("bits") not in (4, 8):
            raise settings.refused("bits", "4 or 8", "Take a release of 4 or 8 bits: GPTQ of others is not read")
        symmetric, ordered = settings.switch("sym", True), settings.switch("desc_act", False)
        return Gptq(settings.values["bits"], settings.group(default=128), symmetric, ordered, self._shift)

    def layout(self, names: tuple[str, ...]) -> layouts.Layout | None:
        is_listed = not self._parts or names[0].endswith(self._parts)
        if not ((layouts.in_decoder(names[0]) and is_listed) or (self._head and names[0] == "lm_head")):
            return None
        found = (layout for pattern, layout in self._rules if any(pattern.match(name) for name in names))
        return next(found, self._layout)


def _flat(settings: layouts.Settings) -> tuple[str, ...]:
    """The parts of a layer that are packed, where `modules_in_block_to_quantize` lists them, nested or not."""
    key = "modules_in_block_to_quantize"
    given = settings.values.get(key)
    lists = given if isinstance(given, list) and all(isinstance(each, list) for each in given) else [given]
    return tuple(name for each in lists for name in layouts.Settings({key: each}, settings.place).names(key))


#: By how AutoRound packs in GPTQ's layout, what zero points are stored less: its own way keeps them as they are.
_SHIFTS = {"gptq": 1, "": 0, "gptqmodel": 0}


def _packing(values: Mapping[str, Any]) -> str:
    """ "gptq", "awq", "gptqmodel", or "" for AutoRound's own, of names such as "auto_round:auto_gptq:exllamav2", which
    may end with a kernel's; releases before 0.5 call the key `backend`."""
    named = values.get("packing_format") or values.get("backend") or "auto"
    if named == "auto":
        return "gptq"
    parts = str(named).replace("auto-round", "auto_round").replace("autoround", "auto_round").split(":")
    kept = [part.removeprefix("auto_") for part in parts if part not in _KERNELS]
    return ":".join(kept[1:] if kept[:1] == ["round"] else kept)


class AutoRound(layouts.Quantization):
    """Linear layers in blocks, in GPTQ's or AWQ's layout, single ones with settings of their own (`extra_config`)."""

    method = "auto-round"

    def __init__(self, settings: layouts.Settings, dtype: str) -> None:
        blocks = settings.values.get("block_name_to_quantize")
        listed = blocks.split(",") if isinstance(blocks, str) else settings.names("block_name_to_quantize")
        self._blocks = tuple(name.strip() for name in listed)
        extra = settings.inner("extra_config")
        self._own = {
            name: self._made(
                layouts.Settings({**settings.values, **extra.inner(name).values}, f"{extra.place}: {name}")
            )
            for name in extra.values
        }
        self._patterns = [
            (settings.pattern(name), layout) for name, layout in self._own.items() if not re.fullmatch(r"[\w.]+", name)
        ]
        self._layout = self._made(settings)

    def _made(self, settings: layouts.Settings) -> layouts.Layout | None:
        bits = settings.values.get("bits")
        if isinstance(bits, int) and bits >= 16:
            return None
        settings.choice("act_bits", (16, 32), 16)
        packing = _packing(settings.values)
        if (settings.values.get("data_type") or "int") not in ("int", "int_sym", "int_asym"):
            raise settings.refused("data_type", "'int'", "Take a release of whole numbers, or in compressed-tensors")
        if packing in _SHIFTS and bits in (4, 8):
            symmetric, shift = settings.switch("sym", True), _SHIFTS[packing]
            return Gptq(bits, settings.group(default=128), symmetric, False, shift, True, "AutoRound, GPTQ's layout")
        if packing == "awq" and bits == 4:
            return AwqGemm(4, settings.group(default=128), settings.switch("sym", True), "AutoRound, AWQ's layout")
        if bits not in (4, 8):
            raise settings.refused("bits", "4 or 8 (in AWQ's layout 4)")
        raise settings.refused(
            "packing_format", "'auto_round:auto_gptq', 'auto_round:auto_awq', 'auto_round:exllamav2' or 'auto_round'"
        )

    def layout(self, names: tuple[str, ...]) -> layouts.Layout | None:
        """A layer's own, else that of its blocks."""
        for name in names:
            if name in self._own:
                return self._own[name]
        for pattern, layout in self._patterns:
            if any(pattern.search(name) for name in names):
                return layout
        if not self._blocks:
            return self._layout if layouts.in_decoder(names[0]) else None
        return self._layout if any(name.startswith(f"{block}.") for block in self._blocks for name in names) else None
