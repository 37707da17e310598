"""What the GPU's side leaves behind where something fails, in stand-ins for what cannot be made to fail for real."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_device import cuda_device

from edgellm.engines.backends import tensorrt_backend
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.cuda_kernel_engine import CudaKernelEngine
from edgellm.engines.backends.tensorrt_engine import TensorRTEngine
from edgellm.engines.errors import EngineError, KernelError
from edgellm.engines.model.config import EngineLimits, EngineShape
from edgellm.kernels.arrays import DeviceArray

SHAPE = EngineShape("decode", 1, 1, 64, 64)


class FailingStream:
    """A stream of a GPU that has reported a failure."""

    handle = 0

    def synchronize(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")


def opened_device(**attributes: Any) -> tuple[CudaDevice, list[str]]:
    """A device without a GPU, and the log of what is done with its context."""
    log: list[str] = []
    device = object.__new__(CudaDevice)
    context = SimpleNamespace(pop=lambda: log.append("left"))
    vars(device).update({"_context": context, "_readbacks": {}, "_first_event": None, **attributes})
    return device, log


def test_a_device_that_failed_is_left_all_the_same():
    device, log = opened_device(stream=FailingStream(), _copy_stream=FailingStream())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.close()
    assert log == ["left"]
    device.close()
    assert log == ["left"]


def test_a_capture_that_fails_leaves_no_graph(monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    destroyed = []
    success = driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(driver, "cuStreamBeginCapture", lambda stream, mode: (success,))
    monkeypatch.setattr(driver, "cuStreamEndCapture", lambda stream: (success, "half a graph"))
    monkeypatch.setattr(driver, "cuGraphDestroy", destroyed.append)
    device, _ = opened_device(stream=FailingStream())

    def step() -> None:
        raise EngineError("not to be captured")

    assert device.capture(step, "a step") is step
    assert destroyed == ["half a graph"]


def test_a_backend_that_cannot_be_opened_leaves_its_device(monkeypatch):
    log: list[str] = []

    def open_device(device: CudaDevice) -> None:
        device.compute_capability, device.stream = "sm_90", FailingStream()

    def refuse(*arguments: Any, **named: Any) -> None:
        raise KernelError("NVRTC refused the kernels")

    monkeypatch.setattr(tensorrt_backend, "load_tensorrt", lambda: None)
    monkeypatch.setattr(CudaDevice, "__init__", open_device)
    monkeypatch.setattr(CudaDevice, "close", lambda device: log.append("closed"))
    kernels = SimpleNamespace(close=lambda: log.append("unloaded"))
    monkeypatch.setattr(tensorrt_backend, "CudaDecodeKernels", lambda capability, stream: kernels)
    monkeypatch.setattr(tensorrt_backend, "CudaSampling", SimpleNamespace(workspace_bytes=refuse))
    with pytest.raises(KernelError, match="NVRTC refused"):
        tensorrt_backend.TensorRTBackend(SimpleNamespace(dtype="float16", limits=EngineLimits()))
    assert log == ["unloaded", "closed"]


def test_an_engine_without_an_execution_context_says_so():
    strategies = SimpleNamespace(USER_MANAGED=0)
    library = SimpleNamespace(module=SimpleNamespace(ExecutionContextAllocationStrategy=strategies), version="1.6")
    configuration = SimpleNamespace(set_execution_context_allocation_strategy=lambda strategy: None)
    engine = SimpleNamespace(
        create_runtime_config=lambda: configuration, create_execution_context=lambda configuration: None
    )
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
    cache = SimpleNamespace(attach=lambda configuration: None)
    with pytest.raises(EngineError, match=r"TensorRT 1.6 made no execution context for base.decode-b1-t1-l64; its log"):
        TensorRTEngine(library, runtime, b"", SHAPE, cache)


def test_a_binding_that_is_refused_leaves_no_launch_of_the_bindings_before():
    class Engine(CudaKernelEngine):
        @staticmethod
        def unsupported(*arguments: Any) -> None:
            return None

        def _prepare(self) -> list:
            return []

    edge = {"first": ((2,), "int32"), "second": ((2,), "int32")}
    engine = Engine(None, SimpleNamespace(num_layers=0, num_kv_heads=1), SHAPE, edge, {}, ())
    engine._launches = [lambda: None]
    with pytest.raises(EngineError, match=r"second is int32 \(3,\), the engine expects int32 \(2,\)"):
        engine.bind({"first": DeviceArray(16, (2,), "int32"), "second": DeviceArray(16, (3,), "int32")})
    with pytest.raises(EngineError, match="never bound: second"):
        engine.enqueue()


@pytest.mark.gpu
def test_garbage_with_device_memory_does_not_end_a_capture():
    with cuda_device() as device:
        array = device.zeros((4,), "int32")
        gc.collect()
        gc.disable()
        for _ in range(10):
            cycle: list = [device.empty((1,), "int32")]
            cycle.append(cycle)
        del cycle
        gc.enable()

        def step() -> None:
            assert [[number] for number in range(5000)]  # as many objects as make Python collect garbage
            device._cuda.memset_d32_async(array.pointer, 7, array.size, device.stream)

        captured = device.capture(step, "a step")
        assert captured is not step
        captured()
        np.testing.assert_array_equal(device.download(array), [7, 7, 7, 7])
