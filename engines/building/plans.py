"""Plans of several shapes, built side by side by processes of their own, and the report of a build.

This module is also what such a process runs (`main`).
"""

from __future__ import annotations

import json
import os
import queue
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgellm.engines.backends.plan_files import Platform
from edgellm.engines.backends.tensorrt_operations import build_plan
from edgellm.engines.errors import BuildError, EdgeLLMError
from edgellm.engines.families.programs import ModelConfig
from edgellm.engines.formats.strict_formats import JSONObject, plain_values
from edgellm.engines.model.config import DecoderConfig, DraftConfig, Mixture
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import available_memory
from edgellm.engines.model.vision import VisionConfig
from edgellm.kernels.compilations import usable_cores
from edgellm.kernels.kept import Manifest

_MOST_WORKERS = 4
#: A worker took 370 MB for Llama-3.2-1B's shapes; more is left free, as a device that runs out of memory freezes.
_WORKER_BYTES = 1 << 30


@dataclass(frozen=True)
class PlanBytes:
    """A built plan, the seconds that it took, and the peak memory in bytes of the processes that build, together."""

    shape: EngineShape
    data: bytes
    seconds: float
    workers_peak_bytes: int


@dataclass(frozen=True)
class BuiltPlan:
    """One plan: its size in bytes and the seconds that it took, 0.0 where a valid one was there already."""

    platform: Platform
    shape: EngineShape
    size: int
    seconds: float


@dataclass(frozen=True)
class BuiltKernels:
    """The compiled kernels of one target: what their manifest says, and the seconds that they took."""

    manifest: Manifest
    seconds: float


@dataclass
class BuildReport:
    """What was built. Sizes in bytes, of all models and adapters together; `seconds` by stage (weights and plans side
    by side). `targets` are the compute capabilities built for; `made_bytes` are those of a packed head and a packed
    draft.

    `peak_host_bytes` is the largest resident memory of this process so far and of those that built plans, summed: an
    upper bound, as they share libraries. `kernels` are those compiled for targets. `notes` are what a user should know.
    `token_seconds` are those that a check spent on a token of the model, which are in none of the others.
    """

    path: Path
    config: DecoderConfig
    dtype: str
    limits: EngineLimits
    draft: DraftConfig | None = None
    vision: VisionConfig | None = None
    weights: str = "copy"
    weight_bytes: int = 0
    made_bytes: int = 0
    published_bytes: int = 0
    plans: list[BuiltPlan] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0
    peak_host_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    workers_peak_bytes: int = 0
    targets: list[str] = field(default_factory=list)
    kernels: list[BuiltKernels] = field(default_factory=list)
    token_seconds: float = 0.0


def build_plans(
    models: Mapping[str, ModelConfig],
    shapes: Sequence[EngineShape],
    dtype: str,
    attention: str,
    target: str,
    is_in_vain: Callable[[], bool] = lambda: False,
    workers: int | None = None,
) -> Generator[PlanBytes, None, None]:
    """Build a plan of each shape for the compute capability `target`; they come as they are done.

    `models` has the configuration by `EngineShape.model`. `workers` processes build (0: this process does; None: as
    many as cores and memory allow, up to 4). They are ended when the caller leaves the iteration, and it ends early
    once `is_in_vain` says so. Raises BuildError.
    """
    count = _worker_count() if workers is None else workers
    if count == 0:
        for shape in shapes:
            if is_in_vain():
                return
            started = time.perf_counter()
            plan = build_plan(models[shape.model], shape, dtype, attention, target)
            yield PlanBytes(shape, plan, time.perf_counter() - started, 0)
        return
    processes = [_Worker() for _ in range(min(count, len(shapes)))]
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in processes:
        idle.put(worker)

    def build(shape: EngineShape) -> PlanBytes:
        worker, config = idle.get(), plain_values(models[shape.model])
        values = {"config": config, "shape": plain_values(shape), "dtype": dtype, "attention": attention}
        try:
            data, seconds = worker.build(shape.name, values | {"target": target})
        finally:
            idle.put(worker)  # the next one waits for it, to fail as well
        return PlanBytes(shape, data, seconds, sum(each.peak_bytes for each in processes))

    pool = ThreadPoolExecutor(count, "edgellm-plans")
    waiting = {pool.submit(build, shape) for shape in shapes}
    try:
        while waiting and not is_in_vain():
            done, _ = wait(waiting, 0.5, FIRST_COMPLETED)
            if done:
                waiting.remove(future := done.pop())
                yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in processes:
            worker.process.kill()
        pool.shutdown()
        for worker in processes:
            worker.close()


class _Worker:
    """A building process. Ctrl-C is for the parent alone, which then ends it."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        folders = [str(Path(entry).absolute()) for entry in sys.path if entry]
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from edgellm.engines.building.plans import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd="/",  # a folder of the user's could hide a module
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
            start_new_session=True,
        )

    def build(self, name: str, request: dict[str, Any]) -> tuple[bytes, float]:
        """The plan `name` that is asked for, and the seconds that it took. Raises BuildError with the reason that the
        process gives, or its last words where it has ended."""
        requests, answers = self.process.stdin, self.process.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()
            answer = json.loads(answers.readline() or "{}")
            plan = answers.read(answer.get("size", 0))
        except (OSError, ValueError):  # a line that was cut is no JSON
            answer = {}
        if "error" in answer:
            raise BuildError(answer["error"])
        if not answer or len(plan) != answer["size"]:
            raise BuildError(f"The process that built {name} ended: {self._last_words()}")
        self.peak_bytes = answer["peak_bytes"]
        return plan, answer["seconds"]

    def close(self) -> None:
        self.process.communicate()
        self._log.close()

    def _last_words(self) -> str:
        code = self.process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else "it said nothing"
        killed = " (killed, perhaps for want of memory)" if code == -9 else ""
        return f"exit code {code}{killed}, {reason}"


def _worker_count() -> int:
    """As many workers as cores and free memory allow; 0 where this is not plain Python, which alone can be started
    again."""
    name = Path(sys.executable or "").name
    if not name.startswith("python") or getattr(sys, "frozen", False):
        return 0
    return max(1, min(_MOST_WORKERS, usable_cores(), (available_memory() or 0) // _WORKER_BYTES))


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _build(line: bytes) -> bytes:
    request = JSONObject.parse(line, "the request", BuildError)
    shape = request.object("shape").dataclass(EngineShape)
    kind: type[Any] = {"draft": DraftConfig, "vision": VisionConfig}.get(shape.model, DecoderConfig)
    config = request.object("config").dataclass(kind, decoder=DecoderConfig, mixture=Mixture)
    return build_plan(config, shape, *(request.get(key, "str") for key in ("dtype", "attention", "target")))


def main() -> None:
    """Answer requests on standard input until there are no more; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        started = time.perf_counter()
        plan, header = b"", dict[str, Any]()
        try:
            plan = _build(line)
            header = {"size": len(plan), "seconds": time.perf_counter() - started, "peak_bytes": peak_memory()}
        except EdgeLLMError as error:
            header = {"error": str(error)}
        answers.write(json.dumps(header).encode() + b"\n" + plan)
        answers.flush()
