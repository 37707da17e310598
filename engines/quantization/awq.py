"""AWQ's gemm layout (AutoAWQ): 4-bit codes packed along rows of the output, in an order made for its kernels.

https://github.com/casper-hansen/AutoAWQ
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm.engines.quantization.layout import (
    FLOATS,
    WORDS,
    Layout,
    LinearTensors,
    Quantization,
    Settings,
    Stored,
    in_decoder,
)
from edgellm.engines.quantization.stored import StoredCodes, StoredWeight, awq_order, unpacked
from edgellm.kernels.quantization.packed_weight import WeightFormat

_MIDDLE = 8


@dataclass(frozen=True)
class AwqGemm(Layout):
    """`qweight` int32 [K, N / 8], `qzeros` [groups, N / 8], `scales` [groups, N]; groups of `group` columns, or one.

    Without `zeros` each zero point must be the middle of the range, 8.
    """

    group: int | None
    zeros: bool = True
    name: str = "AWQ gemm"
    scale_tensor = "scales"

    def tensors(self, rows: int, columns: int) -> dict[str, Stored]:
        groups = 1 if self.group is None else columns // self.group
        return {
            "qweight": Stored.of((columns, rows // 8), *WORDS),
            "qzeros": Stored.of((groups, rows // 8), *WORDS),
            "scales": Stored.of((groups, rows), *FLOATS),
        }

    def format(self, scale_dtype: str) -> WeightFormat:
        return WeightFormat("int4", self.group, self.zeros, scale_dtype)

    def problem(self, rows: int, columns: int) -> str | None:
        shared = f"8 does not divide its {rows} rows, which share words" if rows % 8 else None
        return super().problem(rows, columns) or shared

    def read(self, tensors: LinearTensors) -> StoredWeight:
        rows = tensors.shape[0]
        zeros = unpacked(tensors.integers("qzeros"), 4, 1, rows)[:, awq_order(rows)]
        if not self.zeros:
            tensors.check("qzeros", zeros == _MIDDLE, zeros, f"{_MIDDLE} (the weights are symmetric)")
        return StoredWeight(
            self.format(tensors.dtype("scales")),
            (StoredCodes(tensors.integers("qweight"), "awq", 4, tensors.shape),),
            np.ascontiguousarray(tensors.scales("scales").T),
            np.ascontiguousarray(zeros.T) if self.zeros else None,
        )


class Awq(Quantization):
    """All linear layers of the decoder but those whose names hold one of `modules_to_not_convert`."""

    method = "awq"

    def __init__(self, settings: Settings, dtype: str) -> None:
        settings.choice("bits" if "bits" in settings.values else "w_bit", (4,))
        kind = str(settings.values.get("version", "gemm")).lower()
        if kind not in ("gemm", "exllama", "ipex"):  # the others' tensors are laid out for kernels of their own
            raise settings.refused("version", "'gemm'", "Take a release in AWQ's gemm layout, or in compressed-tensors")
        zeros = settings.switch("zero_point", True)
        key = "group_size" if "group_size" in settings.values else "q_group_size"
        self._layout = AwqGemm(settings.group(key, 128), zeros)
        self._dense = settings.names("modules_to_not_convert")

    def layout(self, names: tuple[str, ...]) -> Layout | None:
        is_packed = in_decoder(names[0]) and not any(part in name for part in self._dense for name in names)
        return self._layout if is_packed else None
