"""Which launches become a chain of linear layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode import chain
from edgellm.kernels.decode.contract import MOST_LAYERS, LinearWeights, NormedInput
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.launch import KernelModule

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")


@pytest.fixture(autouse=True)
def maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver makes them."""
    monkeypatch.setattr(chain, "weight_map", lambda module, linear, gated: [0] * 16)


COUNTERS = DeviceArray(1 << 20, (MOST_LAYERS,), "uint32")


class Kernels:
    """Launches on memory that nobody reads, for a GPU that is not there."""

    def __init__(self, shared_limit: int = 232_448, has_tensor_maps: bool = True, is_alone: bool = True) -> None:
        self.module: Any = SimpleNamespace(
            driver=driver,
            stream=driver.CUstream(0),
            multiprocessors=132,
            shared_limit=shared_limit,
            has_clusters=has_tensor_maps,
            can_overlap=True,
            has_gpu_alone=lambda: is_alone,
            load=lambda source: None,
            function=lambda kernel, shared_bytes: None,
        )
        self.kernels = CudaDecodeKernels(self.module, "float16", 64)

    def residual(self, columns: int = 2048, rows: int = 1) -> Any:
        x, before = array(rows, columns), array(rows, 2048, dtype="float32")
        return self.kernels.linear_residual(x, LinearWeights(array(2048, columns)), before, before)

    def gate_up(self, rows: int = 1) -> Any:
        weights = LinearWeights(array(16384, 2048))
        return self.kernels.norm_gate_up(normed(rows), weights, "silu", array(rows, 8192))

    def linear(self, rows: int = 1, next_early: bool = True) -> Any:
        weights, output = LinearWeights(array(3072, 2048)), array(rows, 3072, dtype="float32")
        return self.kernels.norm_linear([normed(rows)], weights, output, next_early=next_early)

    def scaled(self) -> Any:
        return self.kernels.scale_rows(array(1, 2048), 2.0, array(1, 2048, dtype="float32"))

    def layer(self, rows: int = 1) -> list[Any]:
        return [self.residual(2048, rows), self.gate_up(rows), self.residual(8192, rows), self.linear(rows)]

    def chained(self, launches: list[Any]) -> list[int]:
        """Of each launch the layers that it is a chain of, 0 for one that stayed as it was."""
        chained = self.kernels.chained(launches, COUNTERS)
        return [0 if launch in launches else launch.arguments[0].count for launch in chained]


def array(*shape: int, dtype: str = "float16") -> DeviceArray:
    return DeviceArray(1 << 20, shape, dtype)


def normed(rows: int) -> NormedInput:
    return NormedInput(array(rows, 2048, dtype="float32"), array(2048), 1e-5)


def test_layers_between_others_become_one_launch() -> None:
    kernels = Kernels()
    between = kernels.scaled()
    launches = [kernels.linear(), between, *kernels.layer(), between, *kernels.layer()[:3], between]
    assert kernels.chained(launches) == [0, 0, 4, 0, 3, 0]
    assert kernels.chained(kernels.layer() + kernels.layer()) == [4, 4]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_ring_takes_what_memory_is_left(rows: int) -> None:
    kernels = Kernels()
    (launch,) = kernels.kernels.chained(kernels.layer(rows), COUNTERS)
    assert kernels.module.shared_limit - 20_480 < launch.shared_bytes <= kernels.module.shared_limit
    assert launch.arguments[0].slots == {1: 9, 2: 8, 4: 6}[rows]


def test_layers_that_no_chain_takes_stay_as_they_are() -> None:
    kernels = Kernels()
    assert kernels.chained(kernels.layer(9)) == [0, 0, 0, 0], "of more rows"
    assert kernels.chained([kernels.residual(), kernels.gate_up(2)]) == [0, 0], "of other rows than the one in front"
    assert kernels.chained([kernels.gate_up(), kernels.residual(8224)]) == [0, 0], "of a part of a chunk"
    assert kernels.chained([kernels.gate_up(), kernels.linear(next_early=False)]) == [0, 0], "where the next must wait"
    assert Kernels(has_tensor_maps=False).chained(kernels.layer()) == [0, 0, 0, 0], "of an older GPU"
    assert Kernels(is_alone=False).chained(kernels.layer()) == [0, 0, 0, 0], "beside another runtime's chains"
    small = Kernels(shared_limit=60_000)
    assert small.chained(small.layer()[:2]) == [0, 0], "without memory for a ring"


def test_one_module_of_a_process_has_chains() -> None:
    one, other = KernelModule.__new__(KernelModule), KernelModule.__new__(KernelModule)
    for module in (one, other):
        module.driver, module.stream = SimpleNamespace(cuStreamSynchronize=lambda stream: None), None
        module._loaded = {}
    assert one.has_gpu_alone() and one.has_gpu_alone() and not other.has_gpu_alone()
    other.close()
    assert not other.has_gpu_alone()
    one.close()
    assert other.has_gpu_alone() and not one.has_gpu_alone()
    del other, module
    assert one.has_gpu_alone(), "the other one is gone"
