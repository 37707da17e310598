"""Directories of models with recurrent layers: built for real, with plans of segments, and every kernel compiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_families import RECURRENT

from edgellm.engines.backends.executors import SHARED_MEMORY, kernel_executor, planned_shapes
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.kernel_executors import StepKernels
from edgellm.engines.backends.planned_engines import planned_engines
from edgellm.engines.backends.split_engine import SplitEngine
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.config import EngineLimits, EngineShape
from edgellm.engines.model.programs import model_program
from edgellm.engines.model.segments import segment_shapes
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import ModuleSource, compile_module
from edgellm.kernels.decode import tiled_linear
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.prefill.launcher import CudaPrefill
from edgellm.kernels.recurrent.launcher import CudaRecurrent

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("cuda.bindings.nvrtc")

TARGET = "sm_86"
DEVICE: Any = SimpleNamespace(
    zeros=lambda shape, dtype: DeviceArray(1 << 20, shape, dtype),
    part=lambda memory, offset, shape, dtype: DeviceArray(1 << 20, shape, dtype),
)


class Module:
    """What launchers know of a GPU that is not there; it notes the sources of the kernels that they ask for."""

    multiprocessors, has_clusters, can_overlap, architecture = 16, False, False, TARGET

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver, self.stream, self.shared_limit = driver, driver.CUstream(0), SHARED_MEMORY[TARGET]
        self.sources: dict[ModuleSource, None] = {}

    def load(self, source: ModuleSource) -> None:
        self.sources[source] = None

    def function(self, kernel: Any, shared_bytes: int) -> None:
        assert shared_bytes <= self.shared_limit
        self.sources[kernel.source] = None


def prepare(module: Any, config: Any, shape: EngineShape) -> str:
    """Let the engine of a shape prepare its launches; its name."""
    limit, recurrent = module.shared_limit, CudaRecurrent(module)
    executor, _ = kernel_executor(config, shape, "float16", limit)
    if executor is not None:
        few, many = CudaDecodeKernels(module, "float16", config.head_dim), CudaTiledKernels(module, "float16")
        engine: Any = KernelEngine(
            StepKernels(few, many, recurrent=recurrent), executor, config, shape, "float16", limit
        )
    else:
        program = model_program(config, shape)
        engines: Any = {
            part.segment: SimpleNamespace(takes_packed=False, scratch_bytes=0, attach=lambda *arguments: None)
            for part in segment_shapes(program)
        }
        engine = SplitEngine(CudaPrefill(module), program, engines, "float16", (), recurrent)
    engine.attach(DEVICE, DeviceArray(1 << 20, (engine.scratch_bytes,), "uint8"))
    engine.load_kernels(dict.fromkeys(engine.tensor_names))
    return "kernels" if executor is not None else "split"


@pytest.mark.parametrize("family", RECURRENT)
def test_a_directory_is_built_and_its_kernels_compile(
    family: str, make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled_linear, "tensor_map", lambda *arguments: tiled_linear._Map())
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **RECURRENT[family])
    limits = EngineLimits(max_batch=2, prefill_chunk=80, kv_capacity=128)
    report = build_engine_directory(checkpoint, tmp_path / "engines", limits, [TARGET], dtype="float16")
    directory = EngineDirectory.open(tmp_path / "engines", verify=True)
    needed = planned_shapes(directory.models, limits, directory.dtype, TARGET)
    assert {plan.shape for plan in report.plans} == set(needed)
    assert needed and all(shape.segment is not None and shape.tokens == 80 for shape in needed)
    assert planned_engines(directory.models, limits, "float16", {})["engine scratch"] > 0
    module, ways = Module(), {}
    for shape in limits.engine_shapes():
        ways.setdefault(prepare(module, directory.config, shape), set()).add((shape.phase, shape.tokens))
    assert ways["split"] == {("prefill", 80)} and ("decode", 1) in ways["kernels"]
    sources = [source for source in module.sources if source.name.startswith("recurrent_")]
    files = {file for source in sources for file in source.files}
    assert "recurrent/convolution.cu" in files
    assert ("recurrent/delta.cu" in files) == ("recurrent/gates.cu" in files) == (family == "qwen3_5")
    for source in sources:
        assert compile_module(source, TARGET).code.startswith(b"\x7fELF")
