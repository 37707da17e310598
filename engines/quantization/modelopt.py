"""NVIDIA ModelOpt: FP8, NVFP4, and INT4 AWQ with scaled activations, alone or by layers.

https://github.com/NVIDIA/Model-Optimizer
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace
from typing import Any

from edgellm.engines.quantization.compressed_tensors import used_notes
from edgellm.engines.quantization.floats import Fp8Layout, Nvfp4Layout
from edgellm.engines.quantization.layout import FLOATS, Layout, LinearTensors, Quantization, Settings, Stored
from edgellm.engines.quantization.stored import StoredCodes, StoredWeight
from edgellm.kernels.quantization.packed_weight import WeightFormat

_ADVICE = "Take a release in FP8, NVFP4 or W4A16_AWQ, or the unquantized checkpoint"


@dataclass(frozen=True)
class Int4Awq(Layout):
    """`weight` uint8 [N / 2, K], of each byte the low half is row 2r and the high one row 2r + 1, as two's complements;
    `weight_scale` [N, groups]; `pre_quant_scale` [K], by which activations are multiplied, where it was not folded."""

    group: int
    name: str = "ModelOpt INT4 AWQ"
    input_tensor = "pre_quant_scale"

    def tensors(self, rows: int, columns: int) -> dict[str, Stored]:
        return {
            "weight": Stored.of((rows // 2, columns), "uint8"),
            "weight_scale": Stored.of((rows, columns // self.group), *FLOATS),
            self.input_tensor: Stored.of((columns,), *FLOATS, optional=True),
        }

    def format(self, scale_dtype: str) -> WeightFormat:
        return WeightFormat("int4", self.group, False, scale_dtype, scaled=True)

    def problem(self, rows: int, columns: int) -> str | None:
        return super().problem(rows, columns) or (f"its {rows} rows are no pairs" if rows % 2 else None)

    def read(self, tensors: LinearTensors) -> StoredWeight:
        codes = StoredCodes(tensors.integers("weight"), "pairs", 4, tensors.shape)
        inputs = tensors.input_scales(self.input_tensor)
        format = replace(self.format(tensors.dtype("weight_scale")), scaled=inputs is not None)
        return StoredWeight(format, (codes,), tensors.scales("weight_scale"), input_scales=inputs)


class ModelOpt(Quantization):
    """What `hf_quant_config.json` says, or the same in `config.json` as newer releases write it."""

    method = "modelopt"

    def __init__(self, settings: Settings, dtype: str) -> None:
        inner = settings.inner("quantization") if "quantization" in settings.values else settings
        self._dtype = dtype
        algorithm = inner.values.get("quant_algo")
        self._dense = inner.names("exclude_modules") + inner.names("ignore")
        self._by_layer: dict[str, Layout | None] | None = None
        self._layout: Layout | None = None
        if algorithm == "MIXED_PRECISION":
            layers = inner.inner("quantized_layers")
            self._by_layer = {name: self._made(layers.inner(name)) for name in layers.values}
            algorithms: set[Any] = {layers.inner(name).values.get("quant_algo") for name in layers.values}
        else:
            self._layout, algorithms = self._made(inner), {algorithm}
        caches = inner.values.get("kv_cache_quant_algo") or inner.values.get("kv_cache_scheme")
        self.notes = used_notes(not algorithms <= {"W4A16_AWQ", "W4A16_NVFP4"}, bool(caches))

    def _made(self, settings: Settings) -> Layout:
        algorithm = settings.values.get("quant_algo")
        if algorithm in ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"):
            settings.choice("group_size", (16,), 16)
            scaled = algorithm == "NVFP4_AWQ"
            return Nvfp4Layout("ModelOpt NVFP4", "weight", "weight_scale_2", False, self._dtype, scaled)
        if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
            # The package rounds scales to the model's dtype before it multiplies.
            strategy = "tensor" if algorithm == "FP8" else "channel"
            return Fp8Layout("ModelOpt FP8", strategy, dtype=self._dtype, rounds_scale=True)
        if algorithm == "W4A16_AWQ":
            group = settings.group(default=128)
            if group is None or settings.values.get("has_zero_point"):
                raise settings.refused("group_size", "groups without zero points", _ADVICE)
            return Int4Awq(group)
        raise settings.refused("quant_algo", "FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4 or W4A16_AWQ", _ADVICE)

    def layout(self, names: tuple[str, ...]) -> Layout | None:
        """The layout by its own name in mixed precision, else the one that all have but those excluded."""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._dense for name in names):
            return None
        if self._by_layer is None:
            return self._layout
        return next((self._by_layer[name] for name in names if name in self._by_layer), None)
