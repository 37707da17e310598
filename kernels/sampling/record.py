"""How a request draws its tokens: one record a slot, which host, kernels and twins share.

The fields of `SamplingRecord` are all that there is to say about a further sampler's settings: the layout on the
device, the struct of the CUDA sources and what is uploaded follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from edgellm.kernels.contracts import record_dtype


@dataclass(frozen=True)
class SamplingRecord:
    """One slot's sampling, with what changes nothing by default; see `SamplingKernels` for the meaning of each.

    `seed` and `sequence` name the draws' random numbers. `biased` is 1 where the slot's row of biases counts: it
    belongs to who holds that row.
    """

    temperature: Annotated[float, "float32"] = 0.0
    top_k: Annotated[int, "int32"] = 0
    top_p: Annotated[float, "float32"] = 1.0
    min_p: Annotated[float, "float32"] = 0.0
    repetition_penalty: Annotated[float, "float32"] = 1.0
    presence_penalty: Annotated[float, "float32"] = 0.0
    frequency_penalty: Annotated[float, "float32"] = 0.0
    seed: Annotated[int, "uint64"] = 0
    sequence: Annotated[int, "int32"] = 0
    biased: Annotated[int, "int32"] = field(default=0, kw_only=True)

    @cached_property
    def penalizes(self) -> bool:
        """True if the tokens so far change the logits."""
        return bool(penalizes(records(self.words()[None])[0]))

    @cached_property
    def plain(self) -> bool:
        """True for the argmax of the logits as they are after masks and biases."""
        return self.temperature == 0.0 and not self.penalizes

    def words(self) -> np.ndarray:
        """The record as kernels take it, [K] uint32."""
        dtype = record_dtype(SamplingRecord)
        record = np.zeros(1, dtype)
        for name in dtype.names or ():
            record[name] = getattr(self, name)
        return record.view(np.uint32)


def records(rows: np.ndarray) -> np.ndarray:
    """Words [S, K] uint32 as the S records that they are, a structured array with the names of `SamplingRecord`."""
    return rows.view(record_dtype(SamplingRecord))[:, 0]


def penalizes(record: Any) -> Any:
    """Whether tokens that were seen get other logits by a record; of several records, whether each does."""
    penalties = record["repetition_penalty"] != 1, record["presence_penalty"] != 0, record["frequency_penalty"] != 0
    return penalties[0] | penalties[1] | penalties[2]
