"""The GPU's time of a prefill on TensorRT, by what of the decoder's network is computed in float32.

    python -m tools.bench.tries.prefill_networks build [--work DIRECTORY] [--processes 8]
    python -m tools.bench.tries.prefill_networks measure [--work DIRECTORY]

`build` makes plans with Llama-3.2-1B's shapes for the present GPU, of which it asks the properties only; `measure` runs
them by turns, 512 tokens behind 1,500 others, on a quiet GPU. Prints milliseconds, medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_timer import gpu_milliseconds
from random_checkpoint import checkpoint_in

from edgellm.engines.backends.gpu import current_compute_capability
from edgellm.engines.backends.tensorrt_engine import RuntimeCache, TensorRTEngine
from edgellm.engines.backends.tensorrt_operations import TensorRTOperations, build_plan
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.config import EngineLimits, EngineShape
from edgellm.engines.model.decoder import DecoderDescription
from edgellm.engines.runners.comparison import open_runner

FLAGS = {
    "residual": (DecoderDescription, "wide_residual"),
    "norm": (TensorRTOperations, "wide_norm"),
    "activation": (TensorRTOperations, "wide_activation"),
    "linear": (TensorRTOperations, "wide_linear"),
    "attention": (TensorRTOperations, "wide_attention"),
}
VARIANTS = (
    "",
    "residual",
    "norm activation",
    "linear",
    "linear attention",
    "norm activation linear",
    "residual norm activation linear",
    "residual norm activation linear attention",
)
LIMITS = EngineLimits(1, 512, 4096)
SHAPE = EngineShape("prefill", 1, 512, 4096, LIMITS.kv_rows)
COMMITTED = 1500


def set_wide(names: str) -> None:
    """What is computed in float32 from now on, and nothing else."""
    for name, (owner, attribute) in FLAGS.items():
        setattr(owner, attribute, name in names.split())


def engine_directory(work: Path) -> EngineDirectory:
    """Of random weights, without plans."""
    checkpoint, engines = checkpoint_in(work), work / "engines-prefill"
    if not engines.exists():
        build_engine_directory(checkpoint, engines, LIMITS, None, weights="link")
    return EngineDirectory.open(engines)


def build_one(work: Path, names: str) -> str:
    """The plan of a variant, in a process of its own."""
    set_wide(names)
    directory, started = EngineDirectory.open(work / "engines-prefill"), time.perf_counter()
    data = build_plan(directory.config, SHAPE, directory.dtype, directory.attention, current_compute_capability())
    plan_of(work, names).write_bytes(data)
    return f"{names or 'nothing'}: built in {time.perf_counter() - started:.0f} s"


def plan_of(work: Path, names: str) -> Path:
    """Where the plan of a variant lies."""
    return work / f"prefill-{'-'.join(names.split())}.plan"


def build(work: Path, processes: int) -> None:
    """All plans."""
    engine_directory(work)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for future in [pool.submit(build_one, work, names) for names in VARIANTS]:
            try:
                print(future.result(), flush=True)
            except Exception as error:
                print(f"not built: {error}", flush=True)


def measure(work: Path) -> None:
    """All plans by turns, each on the runner's weights, caches and inputs."""
    with open_runner("tensorrt", engine_directory(work)) as runner:
        backend, one = runner.backend, slice(0, 1)
        stream = backend.device.stream
        cache = RuntimeCache("prefill networks")
        times: dict[str, list[float]] = {}
        engines = {}
        for names in VARIANTS:
            try:
                plan = plan_of(work, names).read_bytes()
                engine = TensorRTEngine(backend._library, backend._runtime, plan, SHAPE, cache)
                engine.attach(backend.device, backend.device.empty((engine.scratch_bytes,), "uint8"))
                runner.engines.replace(SHAPE, engine)
                runner._engine(SHAPE, one)
                runner.backend.upload(runner._buffers.prefill_start, np.asarray([COMMITTED], np.int32))
                engine.enqueue()
                backend.synchronize()
                engines[names] = engine
            except Exception as error:
                print(f"{names or 'nothing'}: {type(error).__name__}: {error}", flush=True)
        for _ in range(5):
            for names, engine in engines.items():
                times.setdefault(names, []).append(gpu_milliseconds(stream, engine.enqueue, 5, series=1))
        plain = statistics.median(times[min(times)])  # the empty name comes first
        for names, found in times.items():
            middle = statistics.median(found)
            span, scratch = f"{min(found):.3f}..{max(found):.3f}", engines[names].scratch_bytes >> 20
            change = f"{middle / plain - 1:+.1%}"
            print(f"{names or 'nothing':34} {middle:.3f} ms ({change}; {span}), scratch {scratch} MiB", flush=True)
        engines.clear()  # before their context is left
        del engine


def main() -> None:
    """Build or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "measure"))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-bench")
    parser.add_argument("--processes", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.what == "build":
        build(arguments.work, arguments.processes)
    else:
        measure(arguments.work)


if __name__ == "__main__":
    main()
