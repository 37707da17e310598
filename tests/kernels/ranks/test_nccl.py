"""Where NCCL is found, what of it is called, and what watches those that wait: on a library that stands in for it."""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.testing
import pytest
from absent_gpu import Module
from decoy_nccl import build_decoy

from edgellm.engines.backends import rank_nccl
from edgellm.engines.backends.rank_memory import RankMemory, RankStreams
from edgellm.engines.backends.rank_nccl import NcclRanks
from edgellm.errors import DeviceLostError, MissingDependencyError
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.errors import KernelError
from edgellm.kernels.ranks import launcher, nccl
from edgellm.kernels.ranks.launcher import INBOX_BYTES, CudaRank, RanksArgument, Together
from edgellm.kernels.ranks.nccl import OLDEST, Communicators, NcclLibrary

EXTRA, OF_TORCH = Path("site", "nvidia", "nccl", "lib"), Path("other", "torch", "lib")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has the two from which modules are imported."""
    others = [each for each in sys.path if not any((Path(each) / name).is_dir() for name in ("nvidia/nccl", "torch"))]
    monkeypatch.setattr(sys, "path", [*(str(tmp_path / name) for name in ("site", "other")), *others])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return tmp_path


@pytest.fixture
def decoy(places: Path) -> Iterator[ctypes.CDLL]:
    yield ctypes.CDLL(str(build_decoy(places / EXTRA)))


def test_the_extra_is_found_before_that_of_torch_and_both_before_the_systems(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_system = build_decoy(places / "system", 22000)
    monkeypatch.setattr(nccl, "_NAME", str(of_system))
    assert (NcclLibrary().version, NcclLibrary().path) == ("2.20.0", str(of_system))
    monkeypatch.setattr(nccl, "_NAME", "libnccl.so.2")
    of_torch = build_decoy(places / OF_TORCH, 22809)
    (of_torch.parent.parent / "__init__.py").write_text("raise AssertionError('torch is not imported')")
    importlib.invalidate_caches()
    assert (NcclLibrary().version, NcclLibrary().path) == ("2.28.9", str(of_torch))
    wheel = build_decoy(places / EXTRA)
    assert (NcclLibrary().version, NcclLibrary().path) == ("2.30.5", str(wheel))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, r"nvidia/nccl/lib/libnccl.so.2 does not load as NCCL \("),
        ((23005, "ncclAllGather"), r"does not load as NCCL \(.*ncclAllGather"),
        ((OLDEST - 1,), "lib/libnccl.so.2 is NCCL 2.17.99; expected 2.18.0 or later"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(places: Path, made: Any, said: str) -> None:
    """And nothing else is taken in its place."""
    build_decoy(places / OF_TORCH)
    library = build_decoy(places / EXTRA, *made or ())
    if made is None:
        library.unlink()
        library.write_text("a pointer to a large file: invalid")
    with pytest.raises(MissingDependencyError, match=said):
        NcclLibrary()


@pytest.mark.usefixtures("places")
def test_none_is_an_error_that_says_what_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_NAME", "libno_nccl.so.2")
    with pytest.raises(
        MissingDependencyError, match=r"libno.*nvidia-nccl-cu13 .*PyTorch.*loader.*install '\.\[nccl\]' in"
    ):
        NcclLibrary()


def test_ranks_gather_in_a_group_and_errors_have_its_words(decoy: ctypes.CDLL) -> None:
    with pytest.raises(KernelError, match="ncclCommInitAll of NCCL failed: invalid usage: GPU 4 twice"):
        Communicators([4, 4])
    ranks = Communicators([0, 1])
    with pytest.raises(KernelError, match="ncclAllGather of NCCL failed: invalid usage"):
        ranks.rank(0, 0).gather(0, 0, 1)
    assert ranks.failure() is None
    decoy.decoy_fail(1)
    assert ranks.failure() == (1, "internal error: a link is down")
    ranks.close()
    assert decoy.decoy_destroyed() == 2
    with pytest.raises(KernelError, match="the communicators of NCCL have ended"), ranks.group():
        pass
    ranks.abort()
    assert decoy.decoy_aborted() == 0 and ranks.failure() is None


class Device:
    """Of a GPU that is not there, with memory of the host."""

    def __init__(self, index: int) -> None:
        self.gpu = SimpleNamespace(index=index)
        self.stream = SimpleNamespace(handle=0, is_done=lambda: True, wait_for_event=lambda event: None)
        self.current, self.free_memory = nullcontext, lambda: (0, 0)


class Sums:
    """Ranks on such devices, whose progress and values are here."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch, seconds: float = 30.0) -> None:
        monkeypatch.setattr(RankStreams, "_event", lambda streams, device: SimpleNamespace(record=lambda stream: None))
        devices: Any = [Device(index) for index in range(count)]
        self.inboxes = [np.zeros(count * INBOX_BYTES // 4, np.float32) for _ in range(count)]
        places: Any = [DeviceArray(inbox.ctypes.data, inbox.shape, "float32") for inbox in self.inboxes]
        self.progress = np.zeros((count, 2), np.uint32)
        self.memory = object.__new__(RankMemory)
        self.memory._devices, self.memory._failure, self.memory._seconds = devices, None, seconds
        self.nccl = self.memory.nccl = NcclRanks(devices, places, seconds)
        self.nccl.watch(self.progress, self.memory.fail, self.memory._has_missed)
        self.streams, self.kernels = RankStreams(devices, self.memory, lambda: None), list[CudaRank]()
        for rank, inbox in enumerate(self.inboxes):
            argument = RanksArgument(own=rank, count=count, blocks=256)
            argument.inboxes[rank] = inbox.ctypes.data
            self.kernels.append(CudaRank(Module(), "float32", argument, self.nccl.ranks[rank]))
        monkeypatch.setattr(CudaRank, "_begun", lambda kernels: partial(self._count, kernels._argument.own, 0))
        monkeypatch.setattr(CudaRank, "_add", lambda kernels, *given: partial(self._add, kernels._argument.own, *given))
        monkeypatch.setattr(CudaRank, "copy", copied)
        monkeypatch.setattr(Together, "overlap_previous", None)

    def run(self, make: Callable[[int, CudaRank], Sequence[Any]]) -> None:
        self.streams.run([make(rank, kernels) for rank, kernels in enumerate(self.kernels)])
        assert (self.progress == self.progress[0, 0]).all() and self.progress.any()

    def _count(self, rank: int, which: int) -> None:
        self.progress[rank, which] += 1

    def _add(
        self, rank: int, pieces: int = 0, places: Sequence[int] = (0, 0), is_float: bool = True, scale: float = 1.0
    ) -> None:
        if pieces:
            parts = self.inboxes[rank][: len(self.inboxes) * 4 * pieces].reshape(-1, 4 * pieces)
            total = sum(parts[1:], parts[0]) * np.float32(scale)
            output, residual = (DeviceArray(place, (4 * pieces,), "float32") for place in places)
            host(output)[...] = host(residual) + total if residual.pointer else total
        self._count(rank, 1)


def host(array: DeviceArray) -> np.ndarray:
    """What is at an address of the host."""
    values = (ctypes.c_float * array.size).from_address(array.pointer)
    return np.frombuffer(values, np.float32).reshape(array.shape)


def copied(kernels: CudaRank, source: DeviceArray, target: DeviceArray, column: int = 0) -> Callable[[], None]:
    width = source.shape[-1]
    return partial(np.copyto, host(target)[..., column : column + width], host(source))


def on_host(values: np.ndarray) -> DeviceArray:
    return DeviceArray(values.ctypes.data, values.shape, "float32", values)


@pytest.mark.usefixtures("decoy")
def test_ranks_add_in_their_order_whatever_stands_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces; a sum takes what the one before it has made."""
    sums, random = Sums(3, monkeypatch), np.random.default_rng(1)
    monkeypatch.setattr(launcher, "INBOX_BYTES", 160)
    values = [(random.standard_normal(96) * 10.0 ** random.integers(-3, 4, 96)).astype(np.float32) for _ in range(3)]
    residual, outputs = random.standard_normal(96).astype(np.float32), [np.zeros(96, np.float32) for _ in range(3)]

    def own(rank: int, kernels: CudaRank) -> list[Any]:
        first = kernels.sum(on_host(values[rank]), on_host(outputs[rank]), on_host(residual), 0.5)
        second = kernels.sum(on_host(outputs[rank]), on_host(outputs[rank]))
        return [*[lambda: None] * (20 * rank), first, second, lambda: None]

    sums.run(own)
    once = residual + np.float32(0.5) * (values[0] + values[1] + values[2])
    for output in outputs:
        np.testing.assert_array_equal(output, once + once + once)
    assert sums.progress[0, 0] == 6
    sums.memory.close()


@pytest.mark.usefixtures("decoy")
@pytest.mark.parametrize("rows", [1, 5])
def test_inputs_go_to_all_ranks_and_columns_come_to_the_first(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time, where an inbox has no place for more."""
    sums, widths = Sums(3, monkeypatch), (5, 4, 5)
    monkeypatch.setattr(launcher, "INBOX_BYTES", 48)
    values = [
        np.random.default_rng(rank).standard_normal((rows, width), np.float32) for rank, width in enumerate(widths)
    ]
    given = [np.full((rows, 5), rank, np.float32) for rank in range(3)]
    others = [np.full(2, -rank, np.float32) for rank in range(3)]
    whole = np.full((rows, 14), np.nan, np.float32)

    def own(rank: int, kernels: CudaRank) -> list[Any]:
        pairs = ([on_host(arrays[each]) for arrays in (given, others)] for each in (0, rank))
        return [*kernels.bring(*pairs), kernels.columns(on_host(values[rank]), widths, on_host(whole))]

    given[0][...], others[0][...] = values[0], 7
    sums.run(own)
    np.testing.assert_array_equal(whole, np.concatenate(values, axis=1))
    for rank in (1, 2):
        np.testing.assert_array_equal(given[rank], values[0])
        assert (others[rank] == 7).all()
    sums.memory.close()


def test_a_rank_for_which_others_wait_is_named_and_they_are_ended(
    decoy: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = Sums(3, monkeypatch, seconds=0.2)
    sums.progress[:] = [[1, 0], [2**32 - 1, 2**32 - 1], [1, 0]]  # they count on beyond 2 ** 32
    deadline = time.monotonic() + 10
    while decoy.decoy_aborted() < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert decoy.decoy_aborted() == 3
    with pytest.raises(DeviceLostError, match=r"rank 1 of 3 \(GPU 1\) has failed: rank 0 waited 0.2 s for what it"):
        sums.streams.run([[], [], []])
    sums.memory.close()


def test_what_nccl_reports_of_a_rank_ends_the_model_at_once(
    decoy: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_nccl, "min", lambda *seconds: 0.01, raising=False)
    sums = Sums(2, monkeypatch)
    decoy.decoy_fail(1)
    sums.nccl._watching.join(10)
    with pytest.raises(DeviceLostError, match=r"rank 1 of 2 \(GPU 1\) failed: internal error: a link is down"):
        sums.memory.check()
    sums.memory.close()
    assert (decoy.decoy_aborted(), decoy.decoy_destroyed()) == (2, 0)
