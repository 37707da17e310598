"""Processor time that NVRTC takes for the kernels of a model's first start, by what the model is used for.

    python tools/bench/compile_speed.py [--architecture sm_90] [--dtype float16]

The engines of Llama-3.2-1B's shapes (context 4,096, one sequence; with a draft trees of 10 / 6 / 60) prepare their
launches on a GPU that is not there, and each kernel that they name is compiled, as when nothing is in the cache. Needs
NVRTC and CUDA's headers, no GPU. Processor time is that of this process and its threads.
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from provenance import provenance

from edgellm.engines.backends.executors import SHARED_MEMORY, kernel_executor
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.kernel_executors import StepKernels
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.kernels.acceptance.launcher import ADVANCE, WALK
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import ModuleSource, compile_module
from edgellm.kernels.decode import tiled_linear
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.sampling.launcher import DRAWING, step_source
from edgellm.kernels.tree.launcher import tree_source

BASE = DecoderConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 5e5, 64, "float16", True)
HEAD = DraftConfig(
    "3",
    DecoderConfig("llama", 128256, 2048, 8192, 1, 32, 8, 64, 131072, 1e-5, 5e5, 64, "float16", False),
    32000,
    True,
    (2, 8, 13),
    "none",
    "midlayer.",
    False,
    True,
    "model.embed_tokens.weight",
    "model.embed_tokens.weight",
    False,
    False,
    False,
)


class Module:
    """What launchers know of a GPU; it notes the sources of the kernels that they ask for."""

    def __init__(self, architecture: str) -> None:
        from cuda.bindings import driver

        self.driver, self.stream, self.architecture = driver, driver.CUstream(0), architecture
        self.multiprocessors, self.shared_limit = 132, SHARED_MEMORY[architecture]
        self.has_clusters = self.can_overlap = self.shared_limit > 200_000
        self.sources: dict[ModuleSource, None] = {}

    def load(self, source: ModuleSource) -> None:
        """Note a module that is loaded as a whole."""
        self.sources[source] = None

    def function(self, kernel: Any, shared_bytes: int) -> None:
        """Note the module of a kernel."""
        self.sources[kernel.source] = None


def prepare(module: Module, config: DecoderConfig | DraftConfig, shape: EngineShape, dtype: str) -> None:
    """Let an engine prepare its launches, if kernels run the shape."""
    executor, _ = kernel_executor(config, shape, dtype, module.shared_limit)
    if executor is None:
        return
    any_module: Any = module
    kernels = StepKernels(CudaDecodeKernels(any_module, dtype, BASE.head_dim), CudaTiledKernels(any_module, dtype))
    engine = KernelEngine(kernels, executor, config, shape, dtype, module.shared_limit)
    device = SimpleNamespace(
        zeros=lambda shape, dtype: DeviceArray(1 << 20, shape, dtype),
        part=lambda memory, offset, shape, dtype: DeviceArray(1 << 20, shape, dtype),
    )
    engine.attach(device, DeviceArray(1 << 20, (engine.scratch_bytes,), "uint8"))
    engine.load_kernels(dict.fromkeys(engine.tensor_names))


def processor_seconds(sources: list[ModuleSource], architecture: str) -> float:
    """Seconds of this process to compile modules."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    for source in sources:
        compile_module(source, architecture)
    return spent() - before


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="sm_90", choices=sorted(SHARED_MEMORY))
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    arguments = parser.parse_args()
    tiled_linear.tensor_map = lambda *ignored: tiled_linear.TensorMap()  # the driver's, which is not there
    print(provenance())
    known: set[ModuleSource] = set()
    plain = EngineLimits(1, 512, 4096)
    total = 0.0
    drafted = EngineLimits(1, 512, 4096, 10, 6, 60)
    uses: list[tuple[str, list[tuple[Any, EngineShape]], list[ModuleSource]]] = [
        ("plain, greedy", [(BASE, s) for s in plain.engine_shapes()], [step_source(arguments.dtype)]),
        ("drawn tokens", [], [DRAWING]),
        (
            "a draft",
            [(HEAD if s.model == "draft" else BASE, s) for s in drafted.engine_shapes()],
            [tree_source(arguments.dtype), WALK, ADVANCE],
        ),
    ]
    for use, shapes, others in uses:
        module = Module(arguments.architecture)
        for config, shape in shapes:
            prepare(module, config, shape, arguments.dtype)
        sources = [source for source in (*others, *module.sources) if source not in known]
        known |= set(sources)
        seconds = processor_seconds(sources, arguments.architecture)
        total += seconds
        print(f"{use}: {len(sources)} modules, {seconds:.1f} s, in all {total:.1f} s", flush=True)


if __name__ == "__main__":
    main()
