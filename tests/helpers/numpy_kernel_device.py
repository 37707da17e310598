"""Engines of hand-written kernels on the kernels' NumPy twins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from decode_twins import NumpyDecodeKernels, NumpyTiledKernels
from encoder_twin import NumpyEncoder
from experts_twin import NumpyExperts
from prefill_twin import NumpyPrefill

from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.families.programs import ModelConfig
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.sharding import Share
from edgellm.kernels.quantization.row_runs import PackedLayout
from edgellm.kernels.recurrent.twin import NumpyRecurrent

#: More than any GPU has: what is compared here are results.
_SHARED_LIMIT = 1 << 20


class NumpyKernelDevice:
    """What an engine asks of a device to be attached to it."""

    def zeros(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """Zeroed memory."""
        return np.zeros(shape, dtype)

    def part(self, memory: np.ndarray, offset: int, shape: Sequence[int], dtype: str) -> np.ndarray:
        """An array in `memory` uint8, from byte `offset` on."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return memory[offset : offset + count].view(dtype).reshape(shape)

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        """`target` becomes `source`."""
        np.copyto(target, source)


class _Float32Engine(KernelEngine):
    """The twins compute in float32 what the GPU has in its compute dtype."""

    def _own(self, kind: str) -> str:
        return "float32" if kind == "compute" else kind


def by_fours(config: ModelConfig) -> ModelConfig:
    """The same model with a part of each head rotated that is a multiple of 4."""
    if isinstance(config, DraftConfig):
        return replace(config, decoder=by_fours(config.decoder))
    return replace(config, rotary_dim=config.rotary_dim & -4) if isinstance(config, DecoderConfig) else config


def numpy_kernel_engine(
    config: ModelConfig,
    shape: EngineShape,
    way: type | None = None,
    packed: Mapping[str, PackedLayout] | None = None,
    share: Share | None = None,
    rank: Any = None,
) -> KernelEngine:
    """An engine on the twins, by the implementation `way` of steps that it runs, else by the fastest; `packed` weights
    by name. The twins rotate any part of a head, the kernels by fours: what runs is what runs such a part. With a
    `share` it is that of a rank, whose kernels are the `rank`."""
    few, many = NumpyDecodeKernels(), NumpyTiledKernels()
    more: Any = {"any_rows": many, "prefill": NumpyPrefill(), "encoder": NumpyEncoder()}
    more |= {"experts": NumpyExperts(), "rank": rank}
    kernels: Any = StepKernels(few, many, recurrent=NumpyRecurrent(), **more)
    only = (way,) if way else ()
    given: Any = {"packed": packed, "only": only, "share": share}
    choice, reason = kernel_choice(by_fours(config), shape, "float16", _SHARED_LIMIT, **given)
    assert choice is not None, reason
    return _Float32Engine(kernels, choice, config, shape, "float16", packed, share=share)
