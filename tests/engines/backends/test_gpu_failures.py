"""What the GPU's side leaves behind where something fails, in stand-ins for what cannot be made to fail for real."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_device import cuda_device

from edgellm.engines.backends import cuda_backend
from edgellm.engines.backends import cuda_device as device_file
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.backends.tensorrt_engine import TensorRTEngine
from edgellm.engines.errors import EngineError, KernelError, MissingDependencyError
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.kernels import compiler, nvrtc
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.made import Made

SHAPE = EngineShape("decode", 1, 1, 64, 64)
DIRECTORY: Any = SimpleNamespace(dtype="float16", limits=EngineLimits(), kept_kernels=lambda gpu: None)


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
    vars(device).update({"_context": context, "_readbacks": {}, "_first_event": None, "made": Made(), **attributes})
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

    def open_device(device: CudaDevice, index: int | None) -> None:
        device.gpu, device.stream, device.made = None, FailingStream(), Made()

    def refuse(*arguments: Any, **named: Any) -> None:
        raise KernelError("NVRTC refused the kernels")

    monkeypatch.setattr(CudaDevice, "__init__", open_device)
    monkeypatch.setattr(CudaDevice, "close", lambda device: log.append("closed"))
    kernels = SimpleNamespace(close=lambda: log.append("unloaded"), side_by_side=lambda waits: nullcontext())
    monkeypatch.setattr(cuda_backend, "KernelModule", lambda gpu, stream, kept, made: kernels)
    monkeypatch.setattr(cuda_backend, "CudaSampling", SimpleNamespace(workspace_bytes=refuse))
    with pytest.raises(KernelError, match="NVRTC refused"):
        cuda_backend.CudaBackend(DIRECTORY)
    assert log == ["unloaded", "closed"]


@pytest.mark.parametrize("missing", ["NVRTC", "headers"])
def test_a_gpu_without_a_compiler_names_what_to_install(missing, monkeypatch, tmp_path):
    """Plans alone do not serve: sampling, trees and acceptance are kernels, too."""
    log: list[str] = []

    def open_device(device: CudaDevice, index: int | None) -> None:
        device.gpu, device.stream, device.made = None, FailingStream(), Made()

    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CudaDevice, "__init__", open_device)
    monkeypatch.setattr(CudaDevice, "close", lambda device: log.append("closed"))
    module = SimpleNamespace(
        load=lambda source: compiler.compiled_now(source, "sm_90"),
        side_by_side=lambda waits: nullcontext(),
        close=lambda: None,
    )
    monkeypatch.setattr(CudaDevice, "empty", lambda device, shape, dtype: DeviceArray(16, tuple(shape), dtype))
    monkeypatch.setattr(CudaDevice, "zeros", lambda device, shape, dtype: DeviceArray(16, tuple(shape), dtype))
    monkeypatch.setattr(cuda_backend, "KernelModule", lambda gpu, stream, kept, made: module)
    if missing == "NVRTC":
        monkeypatch.setattr(nvrtc, "_libraries", list)
        monkeypatch.setattr(compiler, "find_nvrtc", nvrtc.find_nvrtc.__wrapped__)
    else:
        monkeypatch.setattr(compiler, "find_nvrtc", lambda release: SimpleNamespace(release=(13, 0)))
        monkeypatch.setattr(compiler, "_wheel_headers", lambda major_version: [])
        monkeypatch.setattr(compiler, "toolkit_roots", lambda: [])
    wheel = "nvidia-cuda-nvrtc" if missing == "NVRTC" else "nvidia-cuda-runtime"
    with pytest.raises(MissingDependencyError, match=f"pip install .*{wheel}"):
        cuda_backend.CudaBackend(DIRECTORY)
    assert log == ["closed"]


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
    config = DecoderConfig("llama", 97, 64, 128, 1, 4, 2, 16, 256, 1e-5, 10000.0, 16, "float16", True)
    choice, _ = kernel_choice(config, SHAPE, "float16", 1 << 20)
    assert choice is not None
    engine = KernelEngine(StepKernels(None, None), choice, config, SHAPE, "float16")
    engine._launches = [lambda: None]
    start, mask = DeviceArray(16, (1,), "int32"), DeviceArray(16, (3,), "int32")
    with pytest.raises(EngineError, match=r"attention_mask is int32 \(3,\), the engine expects bool \(1, 1, 1, 64\)"):
        engine.bind({"kvcache_start_index": start, "attention_mask": mask})
    with pytest.raises(EngineError, match="never bound: inputs_embeds"):
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


def test_arrays_side_by_side_share_pieces_of_memory(monkeypatch):
    monkeypatch.setattr(device_file, "_PIECE", 1000)
    pieces: list[DeviceArray] = []

    def zeros(device: CudaDevice, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        pieces.append(DeviceArray(4096 * (1 + len(pieces)), shape, dtype))
        return pieces[-1]

    monkeypatch.setattr(CudaDevice, "zeros", zeros)
    device, _ = opened_device()
    edge = {"a": ((3, 100), "float16"), "b": ((2,), "float32"), "c": ((300,), "uint8"), "d": ((5000,), "int8")}
    found = device.zeros_side_by_side(edge | {"e": ((1,), "int32")})
    assert [piece.shape for piece in pieces] == [(768 + 256,), (512 + 5120,), (256,)]
    assert {name: (array.shape, array.dtype) for name, array in found.items() if name != "e"} == edge
    assert [found[name].pointer for name in "abcde"] == [4096, 4096 + 768, 8192, 8192 + 512, 12288]
    assert [pieces.index(found[name].owner) for name in "abcde"] == [0, 0, 1, 1, 2]
    assert device.zeros_side_by_side({}) == {}
