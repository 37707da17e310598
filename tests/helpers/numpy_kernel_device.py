"""Engines of hand-written kernels on the kernels' NumPy twins."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from decode_twins import NumpyDecodeKernels, NumpyTiledKernels
from encoder_twin import NumpyEncoder
from experts_twin import NumpyExperts
from prefill_twin import NumpyPrefill

from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.table import kernel_choice, passes, step_program
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
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


class NumpySegment:
    """A segment's engine, of NumPy; its inputs and outputs are apart, as TensorRT's must be, but for KV rows."""

    scratch_bytes = 512

    def __init__(self, program: Program) -> None:
        self._program, self._bound = program, {}
        self.enqueued = 0

    def attach(self, device: Any, scratch: np.ndarray) -> None:
        assert scratch.nbytes >= self.scratch_bytes

    def bind(self, bindings: Mapping[str, np.ndarray]) -> None:
        edge = self._program.edge
        assert bindings.keys() == edge.keys() and all(bindings[name].shape == edge[name][0] for name in edge)
        self._bound.update(bindings)

    def enqueue(self) -> None:
        program, self.enqueued = self._program, self.enqueued + 1
        outputs = [self._bound[name] for name in program.outputs]
        inputs = [array for name, array in self._bound.items() if name not in program.outputs]
        assert not any(np.shares_memory(one, other) for one in outputs for other in inputs)
        ProgramGraph(NumpyOperations(self._bound, self._bound), program).run()


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
    planned: Collection[str] = (),
) -> KernelEngine:
    """An engine on the twins, by the implementation `way` of steps that it runs, else by the fastest; `packed` weights
    by name. The twins rotate any part of a head, the kernels by fours: what runs is what runs such a part. With a
    `share` it is that of a rank, whose kernels are the `rank`. `planned`: the titles of steps that segments run."""
    few, many = NumpyDecodeKernels(), NumpyTiledKernels()
    more: Any = {"any_rows": many, "prefill": NumpyPrefill(), "encoder": NumpyEncoder()}
    more |= {"experts": NumpyExperts(), "rank": rank}
    kernels: Any = StepKernels(few, many, recurrent=NumpyRecurrent(), **more)
    only = (way,) if way else ()
    given: Any = {"packed": packed, "only": only, "share": share, "planned": planned}
    choice, reason = kernel_choice(by_fours(config), shape, "float16", _SHARED_LIMIT, **given)
    assert choice is not None, reason
    parts = [step_program(config, part, packed, share) for _, part in passes(shape)]
    shapes = [plan.plan_shape(part) for plan in choice.plans for part in parts]
    kernels = kernels._replace(plans={each: NumpySegment(model_program(config, each)) for each in shapes})
    return _Float32Engine(kernels, choice, config, shape, "float16", packed, share=share)
