"""A GPU that is not there, on which models are opened and answer: nothing is computed, each step gives token 1."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgellm.engines.backends import cuda_ranks, rank_memory
from edgellm.engines.backends.device_layouts import model_layouts
from edgellm.engines.backends.rank_memory import RankStreams
from edgellm.engines.building.needed_kernels import AbsentBackend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.made import CAPTURED, Made
from edgellm.kernels.sampling.launcher import CudaSampling

_DONE: Any = SimpleNamespace(wait=lambda: None)
_VIEWED = {"bool": np.bool_}


class ServingOnNothing(AbsentBackend):
    """The GPU's backend without a GPU: `module.sources` are the modules that were asked for, `made` counts captures."""

    def __init__(self, directory: EngineDirectory, target: str = "sm_90") -> None:
        gpu = absent_gpu(target, 132, 227 << 10)
        super().__init__(directory.models, directory.limits, directory.dtype, {}, gpu)
        self._directory, self.made, self.capturing = directory, Made(), False
        self.module.driver.cuMemsetD8Async = lambda *arguments: (0,)  # type: ignore[attr-defined]
        self.kernels = CudaSampling(self._module, self.compute_dtype, self.empty((1 << 30,), "uint8"))
        self._scratch, self._plans = self.empty((0,), "uint8"), None

    def free_memory(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def close(self) -> None:
        self._engines.clear()

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        assert target.shape == source.shape

    def host_visible(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        return self.empty(shape, dtype)

    def seen(self, array: DeviceArray) -> np.ndarray:
        return _ones(array)

    def read(self, array: DeviceArray) -> Any:
        assert not self.capturing, "a readback cannot be captured"
        return SimpleNamespace(wait=lambda: _ones(array))

    def download(self, array: DeviceArray) -> np.ndarray:
        return -_ones(array)  # no weight is infinite

    def timestamp(self) -> Any:
        return SimpleNamespace(seconds=time.perf_counter)

    def signal(self) -> Any:
        return SimpleNamespace(give=lambda: None, wait=lambda: None)

    def host_memory(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def upload(self, array: DeviceArray, values: np.ndarray) -> None:
        assert not self.capturing and array.shape == values.shape

    def begin_beside(self) -> None:
        pass

    def wait_for(self, transfer: Any) -> None:
        pass

    def upload_rows(self, *arguments: Any) -> Any:
        return _DONE

    upload_rows_beside = download_rows = upload_rows

    def capture(self, step: Callable[[], None], name: str) -> Callable[[], None]:
        self.capturing = True
        before = set(self.module.sources)
        with self.made.counting(CAPTURED):
            step()
        assert set(self.module.sources) == before, f"{name}: a module would be loaded while it is captured"
        self.capturing = False
        return partial(step)


class _RankOnNothing(ServingOnNothing):
    """One of several GPUs that are not there."""

    def __init__(
        self, directory: EngineDirectory, packed: Any, executor: str, gpu: int, share: tuple[int, int]
    ) -> None:
        super().__init__(directory)
        self._packed = packed
        self.share, self.stream = share, SimpleNamespace(wait_for_event=lambda event: None)
        self.module.driver.cuMemcpyDtoDAsync = lambda *arguments: (0,)  # type: ignore[attr-defined]
        self.module.driver.cuMemcpy2DAsync = lambda *arguments: (0,)  # type: ignore[attr-defined]

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def seen(self, array: DeviceArray) -> np.ndarray:
        return _ones(array) - (array.dtype == "uint32")  # no rank was waited for in vain


def ranks_on_nothing(directory: EngineDirectory, count: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend of so many such GPUs, which gather nothing where NCCL is asked for."""
    own = SimpleNamespace(gather=_nothing, broadcast=_nothing)
    nccl = SimpleNamespace(
        ranks=[own] * count, communicators=SimpleNamespace(group=nullcontext), watch=_nothing, close=_nothing
    )
    monkeypatch.setattr(rank_memory, "NcclRanks", lambda *arguments: nccl)
    monkeypatch.setattr(cuda_ranks, "CudaBackend", _RankOnNothing)
    monkeypatch.setattr(RankStreams, "_event", lambda streams, device: SimpleNamespace(record=lambda stream: None))
    made: Any = type("RanksOnNothing", (cuda_ranks.CudaRanks, _RankOnNothing), {})
    packed = model_layouts(directory.models, directory.checkpoints, directory.dtype)
    return made(directory, packed, "auto", (0,) * count)


def _nothing(*arguments: Any) -> None:
    """Done."""


def _ones(array: DeviceArray) -> np.ndarray:
    return np.ones(array.shape, _VIEWED.get(array.dtype, array.dtype))
