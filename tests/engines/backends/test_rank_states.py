"""Recurrent states that ranks on GPUs share, with the host's memory in the place of theirs, are those of one GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from absent_gpu import Module
from decode_models import RECURRENT

from edgellm.engines.backends.cuda_backend import CudaBackend
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.cuda_ranks import CudaRanks
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.backends.rank_memory import RankedArray
from edgellm.engines.backends.rank_weights import RankWeights
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.states import decoder_states
from edgellm.engines.runners.states import ModelStates
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.recurrent.contract import AcceptedPath
from edgellm.kernels.recurrent.launcher import CudaRecurrent
from edgellm.kernels.recurrent.twin import NumpyRecurrent

SLOTS, ROWS, NODES = 3, 20, 5


def view(array: DeviceArray) -> np.ndarray:
    """Host memory as NumPy has it."""
    buffer = (ctypes.c_char * array.nbytes).from_address(array.pointer)
    return np.frombuffer(buffer, np.dtype(array.dtype)).reshape(array.shape)


def on_host(values: np.ndarray) -> DeviceArray:
    return DeviceArray(values.ctypes.data, values.shape, values.dtype.name, values)


class HostDevice:
    """What `CudaDevice` does with memory, on the host; kernels are twins."""

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        pass

    def empty(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        return on_host(np.zeros(shape, dtype))

    zeros = empty

    def zeros_side_by_side(self, edge: Any) -> dict[str, DeviceArray]:
        return {name: on_host(np.zeros(shape, dtype)) for name, (shape, dtype) in edge.items()}

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        view(target)[...] = view(source)

    def upload_rows(self, target: DeviceArray, values: np.ndarray, rows: int, first: int = 0) -> None:
        assert first == 0 and values.flags.c_contiguous and values.shape[1] >= rows
        view(target)[:, :rows] = values[:, :rows]

    def download_rows(self, source: DeviceArray, values: np.ndarray, rows: int, first: int = 0) -> None:
        assert first == 0 and values.flags.c_contiguous
        values[:, :rows] = view(source)[:, :rows]


class HostRanks(CudaRanks):
    def __init__(self, config: Any, count: int) -> None:
        directory: Any = SimpleNamespace(config=config, limits=EngineLimits(), dtype="float32", draft=None)
        self._parts, self.compute_dtype = RankWeights(directory, count, {}), "float32"
        self._module, self.ran = Module(), 0
        others: list[Any] = [object.__new__(CudaBackend) for _ in range(1, count)]
        for other in others:
            other.compute_dtype, other._module = "float32", Module()
        self._ranks = [self, *others]

    def run(self, launches: Sequence[Sequence[Callable[[], object]]]) -> None:
        self.ran += 1
        for (launch,) in launches:
            launch()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (name for name in vars(HostDevice) if not name.startswith("_")):
        monkeypatch.setattr(CudaDevice, name, getattr(HostDevice, name))
    for name in ("commit_columns", "commit_matrices", "commit_scans"):

        def commit(self: Any, layers: Any, path: Any, name: str = name) -> Any:
            own = [type(layer)(*map(view, layer)) for layer in layers]
            return getattr(NumpyRecurrent(), name)(own, AcceptedPath(*map(view, path)))

        monkeypatch.setattr(CudaRecurrent, name, commit)


@pytest.mark.parametrize(
    ("name", "count"),
    [("gated_delta_nets", 2), ("gated_delta_nets", 4), ("state_spaces", 2), ("short_convolutions", 2)],
)
def test_states_of_ranks_are_those_of_one(host: None, name: str, count: int) -> None:
    """They come from snapshots, change places, begin anew, take what was accepted of a tree, and go into snapshots."""
    config, random = RECURRENT[name], np.random.default_rng(3)
    layers, starts = decoder_states(config), np.arange(SLOTS, dtype=np.int32)
    ranks = HostRanks(config, count)
    of_ranks = ModelStates(ranks, layers, SLOTS, ROWS, on_host(starts.copy()), is_base=True)
    of_one = ModelStates(NumpyBackend(config), layers, SLOTS, ROWS, starts, is_base=True)
    backends: list[tuple[Any, ModelStates]] = [(ranks, of_ranks), (NumpyBackend(config), of_one)]
    rows = {slot: {each.name: each.rows for each in of_one.of_slot(slot, ROWS)} for slot in range(SLOTS)}
    snapshots = [{n: random.standard_normal(s, np.float32) for n, (s, _) in of_one.saved(ROWS).items()} for _ in rows]
    edge = {name: array.shape for name, array in of_one.kept_inputs(SLOTS, NODES).of(2, NODES).items()}
    inputs = {name: random.standard_normal(shape, np.float32) for name, shape in edge.items()}
    inputs |= {name: -np.abs(values) for name, values in inputs.items() if "gates" in name}
    path = np.array([[0, 1, 3], [0, 2, 0]], np.int32), np.array([3, 0], np.int32)
    found = []
    for backend, states in backends:
        for slot, saved in enumerate(snapshots):
            for each in states.of_slot(slot, ROWS):
                backend.upload_rows(each.memory, saved[each.name], each.rows)
        states.swap(0, 2)
        states.copy(0, 1)
        states.clear_slot(2)
        kept: Any = states.kept_inputs(SLOTS, NODES).of(2, NODES)
        for name, array in kept.items():
            if isinstance(array, RankedArray):
                for ranges, part in array.parts:
                    view(part)[...] = np.concatenate([inputs[name][..., slice(*each)] for each in ranges], axis=-1)
            else:
                array[...] = inputs[name]
        accepted = [on_host(each) for each in path] if backend is ranks else path
        states.replay(slice(0, 2), kept, *accepted)()
        after = [{name: np.zeros_like(values) for name, values in saved.items()} for saved in snapshots]
        for slot, values in enumerate(after):
            for each in states.of_slot(slot, ROWS):
                backend.download_rows(each.memory, values[each.name], each.rows)
        found.append(after)
    assert ranks.ran == len({state.commit for state in of_one._layers if hasattr(state, "commit")})
    for slot in range(SLOTS):
        for name, values in found[1][slot].items():
            np.testing.assert_array_equal(found[0][slot][name], values, err_msg=f"{slot} {name}")
            assert name.startswith(("k_", "v_")) or (values == 0).all() == (slot == 2)
    accepted_of = [name for name in found[1][0] if (found[1][0][name] != snapshots[2][name]).any()]
    assert len(accepted_of) == len(of_one._recurrent)
