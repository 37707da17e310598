"""NVFP4: 4-bit floats in groups of 16 with 8-bit scales and one 32-bit scale of the whole, as weights alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm.engines.quantization.layout import FLOATS, FP8, Layout, LinearTensors, Stored
from edgellm.engines.quantization.stored import StoredCodes, StoredWeight
from edgellm.kernels.quantization.packed_weight import WeightFormat

GROUP = 16


@dataclass(frozen=True)
class Nvfp4Layout(Layout):
    """`codes` uint8 [N, K / 2], of each byte the low half first; `weight_scale` [N, K / 16]; `whole` float32, by which
    scales are multiplied, or with `divides` divided. A weight is rounded in `dtype`.

    With `scaled` there may be `pre_quant_scale` [K], by which activations are multiplied; else it was folded before.
    """

    name: str
    codes: str
    whole: str
    divides: bool
    dtype: str
    scaled: bool = False
    group = GROUP

    def tensors(self, rows: int, columns: int) -> dict[str, Stored]:
        wanted = {
            self.codes: Stored.of((rows, columns // 2), "uint8"),
            "weight_scale": Stored.of((rows, columns // GROUP), *FP8),
            self.whole: Stored((((1,), ("float32",)), ((), ("float32",)))),
        }
        if self.scaled:
            wanted["pre_quant_scale"] = Stored.of((columns,), *FLOATS, optional=True)
        return wanted

    def format(self, scale_dtype: str) -> WeightFormat:
        return WeightFormat("fp4", GROUP, False, self.dtype, scaled=self.scaled)

    def read(self, tensors: LinearTensors) -> StoredWeight:
        """The weight. A group of small weights may have the scale 0, which 8 bits round it to."""
        scales = tensors.scales("weight_scale", may_vanish=True)
        whole = tensors.scales(self.whole).reshape(())
        scales = scales / whole if self.divides else scales * whole
        codes = StoredCodes(tensors.integers(self.codes), "rows", 4, tensors.shape)
        inputs = tensors.input_scales() if self.scaled else None
        format = WeightFormat("fp4", GROUP, False, self.dtype, scaled=inputs is not None)
        return StoredWeight(format, (codes,), np.asarray(scales, np.float32), input_scales=inputs)
