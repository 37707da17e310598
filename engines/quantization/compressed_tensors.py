"""compressed-tensors (llm-compressor): packed integers, 8-bit floats, NVFP4 and MXFP4, by groups of targets.

https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgellm.engines.quantization import layout as layouts
from edgellm.engines.quantization.floats import Fp8Layout, Mxfp4Layout, Nvfp4Layout
from edgellm.engines.quantization.stored import StoredCodes, StoredWeight, unpacked
from edgellm.kernels.quantization.packed_weight import Codes, WeightFormat

#: What quantized linear layers are called, as are subclasses of it that models have.
_CLASS = "Linear"
_UNREAD = {
    "int-quantized": "8-bit integers with 8-bit activations (W8A8)",
    "mxfp6-pack-quantized": "MXFP6",
    "mxfp8-quantized": "MXFP8",
    "marlin-24": "sparse weights",
    "sparse-24-bitmask": "sparse weights",
    "sparse-bitmask": "sparse weights",
}
_ADVICE = (
    "Take a release with weights in pack-quantized, float-quantized, nvfp4- or mxfp4-pack-quantized, or the dense one"
)


@dataclass(frozen=True)
class PackQuantized(layouts.Layout):
    """Integers of `bits`, packed along rows, `group` columns of which share a scale (None: all; `whole`: all rows too).

    Zero points are packed along columns; files of 0.9 and before have them as they are. With `ordered` each column has
    its group in `weight_g_idx` (up to 0.16).
    """

    bits: int
    group: int | None
    zeros: bool
    ordered: bool = False
    whole: bool = False
    name: str = "pack-quantized"
    input_tensor = "weight_g_idx"

    def tensors(self, rows: int, columns: int) -> dict[str, layouts.Stored]:
        groups = 1 if self.group is None else -(-columns // self.group)
        shapes: tuple[tuple[int, ...], ...] = ((rows, groups),) if not self.whole else ((1,), ())
        if not self.whole and self.group is None:
            shapes += ((rows,),)
        wanted = {
            "weight_packed": layouts.Stored.of((rows, -(-columns * self.bits // 32)), *layouts.WORDS),
            "weight_scale": layouts.Stored(tuple((shape, layouts.FLOATS) for shape in shapes)),
            "weight_shape": layouts.Stored.of((2,), "int64", "int32"),
        }
        plain = tuple((shape, ("int8",)) for shape in shapes)
        if self.zeros:
            packed = ((-(-rows * self.bits // 32), groups), layouts.WORDS)
            wanted["weight_zero_point"] = layouts.Stored(plain if self.whole else (packed, *plain))
        else:  # early files have zeros there
            wanted["weight_zero_point"] = layouts.Stored(plain, optional=True)
        if self.ordered:
            wanted[self.input_tensor] = layouts.Stored.of((columns,), "int32", "int64")
        return wanted

    def stacks(self, rows: int) -> bool:
        return not (self.whole or self.ordered or rows * self.bits % 32)

    def format(self, scale_dtype: str) -> WeightFormat:
        codes: Codes = "int4" if self.bits == 4 else "int8"
        return WeightFormat(codes, self.group, self.zeros, scale_dtype, permuted=self.ordered)

    def read(self, tensors: layouts.LinearTensors) -> StoredWeight:
        rows, columns = tensors.shape
        shape = tensors.integers("weight_shape")
        if (shape.reshape(-1, 2) != tensors.published).any():
            raise tensors.error("weight_shape", str(shape.tolist()), str([*tensors.published]))
        words = tensors.each_integers("weight_packed")
        codes = tuple(StoredCodes(each, "rows", self.bits, (len(each), columns)) for each in words)
        scales = tensors.scales("weight_scale").reshape(-1, 1 if self.group is None else columns // self.group)
        zeros = self._zeros(tensors, len(scales), scales.shape[1])
        order = None
        if self.ordered and (tensors.integers(self.input_tensor) != -1).any():  # -1 throughout: never set
            order = layouts.column_order(tensors, self.input_tensor, self.group)
        if self.whole:
            scales = np.repeat(scales, rows, 0)
            zeros = None if zeros is None else np.repeat(zeros, rows, 0)
        format = self.format(tensors.dtype("weight_scale"))
        if format.permuted and order is None:
            format = replace(format, permuted=False)
        return StoredWeight(format, codes, scales, zeros, order)

    def _zeros(self, tensors: layouts.LinearTensors, rows: int, groups: int) -> np.ndarray | None:
        """Zero points uint8 [rows, groups], counted as codes are; None where they are the middle."""
        ending, middle = "weight_zero_point", 1 << self.bits - 1
        if not self.zeros:
            if tensors.has(ending):
                values = tensors.integers(ending)
                tensors.check(ending, values == 0, values, "zeros (the weights are symmetric)")
            return None
        values = tensors.integers(ending)
        if tensors.dtype(ending) != "int8":
            return unpacked(values, self.bits, 0, rows)
        tensors.check(ending, (values >= -middle) & (values < middle), values, f"{-middle} to {middle - 1}")
        return (values.astype(np.int16) + middle).astype(np.uint8).reshape(rows, groups)


class _Target:
    """A module's name, a pattern of names, or the class of all linear layers; `rank` says which counts first."""

    def __init__(self, text: str, settings: layouts.Settings) -> None:
        self._text = text
        self._pattern = settings.pattern(text.removeprefix("re:")) if text.startswith("re:") else None
        self.rank = 2 if text == _CLASS else 0 if self._pattern is None else 1

    def fits(self, names: tuple[str, ...]) -> bool:
        """Whether it means the module that is called by one of `names`."""
        if self._pattern is not None:
            return any(self._pattern.match(name) for name in names)
        return self._text in names or self._text == _CLASS


class CompressedTensors(layouts.Quantization):
    """Groups of targets, each with a scheme; what is ignored is dense."""

    method = "compressed-tensors"

    def __init__(self, settings: layouts.Settings, dtype: str) -> None:
        ignored = settings.names("ignore")
        #: Names of modules, of which there may be hundreds, and what else is ignored.
        self._ignored_names = frozenset(ignored)
        others = [name for name in ignored if name == _CLASS or name.startswith("re:")]
        self._ignored = [_Target(name, settings) for name in others]
        sparsity = settings.inner("sparsity_config").values.get("format")
        if sparsity not in (None, "dense"):
            raise settings.inner("sparsity_config").refused("format", "'dense'", _ADVICE)
        if settings.values.get("transform_config"):
            raise settings.refused("transform_config", "nothing: rotated weights are not read", _ADVICE)
        top = settings.values.get("format")
        groups = settings.inner("config_groups")
        #: By each target in turn, the layout that it gives a module.
        self._targets: list[tuple[_Target, layouts.Layout | None]] = []
        inputs = False
        for name in groups.values:
            group = groups.inner(name)
            inputs = inputs or bool(group.values.get("input_activations"))
            layout = None if top == "dense" else _layout(group, top, dtype)
            for target in group.names("targets"):
                if target in ("Conv2d", "Conv1d"):
                    raise group.refused("targets", f"names, patterns, {_CLASS!r} or {layouts.TABLE_CLASS!r}", _ADVICE)
                self._targets.append((_Target(target, group), layout))
        # as the package orders them: a module's own name, patterns, then its class
        self._targets.sort(key=lambda item: item[0].rank)
        self.notes = used_notes(inputs, bool(settings.values.get("kv_cache_scheme")))

    def layout(self, names: tuple[str, ...]) -> layouts.Layout | None:
        """The layout of the first target that fits, unless the module is ignored."""
        if not self._ignored_names.isdisjoint(names) or any(ignored.fits(names) for ignored in self._ignored):
            return None
        return next((layout for target, layout in self._targets if target.fits(names)), None)


def used_notes(inputs: bool, caches: bool) -> tuple[str, ...]:
    """What is there of activations and caches, and not used."""
    notes = ("The quantization of activations is ignored: packed weights are weights only here.",) if inputs else ()
    return notes + (("The scales of KV caches are not used.",) if caches else ())


def _layout(group: layouts.Settings, top: Any, dtype: str) -> layouts.Layout | None:
    """The layout of one group of `config_groups`; CheckpointError names what is not read."""
    if group.values.get("weights") is None:
        return None
    weights, kind = group.inner("weights"), group.values.get("format") or top
    if not isinstance(kind, str | None):
        raise layouts.Settings({"format": kind}, group.place).refused("format", "a layout's name", _ADVICE)
    if kind in _UNREAD:
        place = group if group.values.get("format") else layouts.Settings({"format": kind}, group.place)
        raise place.refused("format", f"a layout of weights alone ({_UNREAD[kind]} is not read)", _ADVICE)
    bits, number = weights.values.get("num_bits"), weights.choice("type", ("int", "float"), "int")
    group_size = weights.group(default=-1)
    usual = "channel" if group_size is None and weights.values.get("group_size") == -1 else "tensor"
    strategy = weights.choice(
        "strategy", ("tensor", "channel", "group", "block", "tensor_group"), "group" if group_size else usual
    )
    if weights.values.get("dynamic") not in (None, False):
        raise weights.refused("dynamic", "false", _ADVICE)
    if number == "int":
        if kind != "pack-quantized" or bits not in (4, 8) or strategy not in ("group", "channel", "tensor"):
            raise weights.refused(
                "num_bits",
                f"4 or 8, by group, channel or tensor, in 'pack-quantized'; found {strategy!r}, {kind!r}",
                _ADVICE,
            )
        if group.values.get("input_activations"):
            raise group.refused("input_activations", "null (integers with packed activations are not read)", _ADVICE)
        if strategy == "group" and group_size is None:
            raise weights.refused("group_size", "a whole number from 1 on for the strategy 'group'")
        order = weights.values.get("actorder")
        if order not in (None, False, True, "group", "weight", "static", "dynamic"):
            raise weights.refused("actorder", "null, 'group', 'weight' or 'static'")
        ordered = order in (True, "group", "dynamic") and strategy == "group"
        symmetric, size = weights.switch("symmetric", True), group_size if strategy == "group" else None
        return PackQuantized(bits, size, not symmetric, ordered, strategy == "tensor")
    weights.choice("symmetric", (True,), True)
    if bits == 4 and strategy in ("tensor_group", "group") and kind == "nvfp4-pack-quantized":
        if group_size != 16:
            raise weights.refused("group_size", "16", _ADVICE)
        # The package multiplies in float32 and rounds to bfloat16, whatever the model's dtype is.
        return Nvfp4Layout("NVFP4", "weight_packed", "weight_global_scale", divides=True, dtype="bfloat16")
    if bits == 4 and strategy == "group" and kind == "mxfp4-pack-quantized":
        if group_size != 32:
            raise weights.refused("group_size", "32", _ADVICE)
        return Mxfp4Layout("weight_packed", "weight_scale")
    if bits == 8 and strategy in ("tensor", "channel", "block") and kind in ("float-quantized", "naive-quantized"):
        block = weights.block("block_structure") if strategy == "block" else (1, 1)
        return Fp8Layout("float-quantized", strategy, block)
    raise weights.refused("num_bits", f"8-bit, NVFP4 or MXFP4 floats; found {strategy!r} in {kind!r}", _ADVICE)
