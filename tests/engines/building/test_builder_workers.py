"""The processes that build plans: as many answers as requests, and an end in every case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.engines.building.plans import build_plans
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError
from edgellm.engines.model.limits import EngineShape

pytest.importorskip("tensorrt_rtx")
pytestmark = pytest.mark.usefixtures("own_workers")


@pytest.fixture
def directory(plain_directory: Path) -> EngineDirectory:
    return EngineDirectory.open(plain_directory)


def every_child() -> set[int]:
    """Processes that this one started, from the kernel's list."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(number) for task in tasks for number in task.read_text().split()}


@pytest.fixture
def children() -> Callable[[], set[int]]:
    """The processes that were started since the test began."""
    before = every_child()
    return lambda: every_child() - before


@pytest.mark.parametrize(
    "workers", [0, None, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_every_shape_is_built_once(
    directory: EngineDirectory, workers: int | None, children: Callable[[], set[int]]
) -> None:
    shapes = directory.limits.engine_shapes()
    plans = list(build_plans(directory.models, shapes, "float16", "auto", "sm_86", workers=workers))
    assert sorted(plan.shape.name for plan in plans) == sorted(shape.name for shape in shapes)
    assert all(len(plan.data) > 10_000 and plan.seconds > 0 for plan in plans)
    assert (plans[-1].workers_peak_bytes > 50_000_000) == (workers != 0)
    assert not children()


@pytest.mark.parametrize("workers", [0, 1])
def test_refusals_of_tensorrt_arrive(
    directory: EngineDirectory, workers: int, children: Callable[[], set[int]]
) -> None:
    shapes = directory.limits.engine_shapes()
    with pytest.raises(BuildError, match="sm_87"):
        list(build_plans(directory.models, shapes, "float16", "auto", "sm_87", workers=workers))
    assert not children()


def test_killed_worker_is_an_error(directory: EngineDirectory, children: Callable[[], set[int]]) -> None:
    shapes = [EngineShape("prefill", 1, tokens, 128, 144) for tokens in range(1, 100)]
    with pytest.raises(BuildError, match=r"ended: exit code -9 \(killed, perhaps for want of memory\)"):
        for _ in build_plans(directory.models, shapes, "float16", "auto", "sm_86", workers=1):
            for child in children():
                os.kill(child, signal.SIGKILL)
    assert not children()


def test_building_in_vain_ends_early(directory: EngineDirectory, children: Callable[[], set[int]]) -> None:
    shapes = [EngineShape("prefill", 1, tokens, 128, 144) for tokens in range(1, 100)]
    built: list[str] = []
    for plan in build_plans(directory.models, shapes, "float16", "auto", "sm_86", lambda: len(built) >= 2, workers=1):
        built.append(plan.shape.name)
    assert len(built) == 2
    assert not children()


def test_leaving_the_iteration_ends_the_workers(directory: EngineDirectory, children: Callable[[], set[int]]) -> None:
    shapes = [EngineShape("prefill", 1, tokens, 128, 144) for tokens in range(1, 100)]
    plans = build_plans(directory.models, shapes, "float16", "auto", "sm_86", workers=1)
    next(plans)
    assert len(children()) == 1
    plans.close()
    assert not children()


def test_worker_ends_with_its_parent(directory: EngineDirectory) -> None:
    code = (
        "import os, sys\n"
        "from edgellm.engines.model.limits import EngineShape\n"
        "from edgellm.engines.directories.engine_directory import EngineDirectory\n"
        "from edgellm.engines.building.plans import build_plans\n"
        "shapes = [EngineShape('prefill', 1, tokens, 128, 144) for tokens in range(1, 100)]\n"
        "config = EngineDirectory.open(sys.argv[1]).config\n"
        "plans = build_plans({'base': config}, shapes, 'float16', 'auto', 'sm_86', workers=1)\n"
        "next(plans)\n"
        "print(open('/proc/self/task/%d/children' % os.getpid()).read(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, directory.path], check=False, capture_output=True, text=True)
    (worker,) = map(int, result.stdout.split())
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}/cmdline").exists() and Path(f"/proc/{worker}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.05)
