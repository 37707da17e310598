"""Measuring as on another device: what it refuses, what the runtime knows of the GPU then, what is kept apart."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernel_refusals import kernel_refusal

from edgellm.engines.backends.executors import SHARED_MEMORY, planned_shapes
from edgellm.engines.backends.plan_files import Platform, plan_candidates, present_platform
from edgellm.engines.backends.platform import find_tensorrt
from edgellm.engines.backends.tensorrt_engine import RuntimeCache
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels.gpu import GPU, find_gpu, stand_in
from edgellm.kernels.launch import KernelModule
from edgellm.kernels.user_paths import user_cache_directory
from tools.bench.as_device import MODES, ModeError, enter, measured_as, one_of, parse, python
from tools.bench.same_bits import ON_TENSORRT, compare

H200 = GPU("NVIDIA H200", "sm_90", (13, 0), 141 << 30, "sm_90", 132, 232_448, True, True)
RTX_4090 = GPU("NVIDIA RTX 4090", "sm_89", (13, 0), 24 << 30, "sm_89", 128, 101_376, False, False)
A100 = GPU("NVIDIA A100", "sm_80", (13, 0), 80 << 30, "sm_80", 108, 166_912, False, False)
LLAMA_8B = DecoderConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 5e5, 128, "float16", False)
needs_tensorrt = pytest.mark.skipif(find_tensorrt() is None, reason="TensorRT is not installed")


@pytest.fixture
def h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GPU]:
    """As if an H200 were there, with a cache of its own."""
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path))
    stand_in(H200)
    yield H200
    stand_in(None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("orin", ("compute_87", 16, 163 << 10, False)),
        ("orin-nx", ("compute_87", 8, 163 << 10, False)),
        ("orin-nano", ("compute_87", 8, 163 << 10, False)),
        ("rtx", ("compute_86", 132, 99 << 10, False)),
        ("thor", ("sm_90", 24, 227 << 10, True)),
    ],
)
def test_the_launch_code_gets_what_the_device_has(h200: GPU, name: str, expected: tuple) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    enter(name)
    gpu = find_gpu()
    assert gpu is not None and measured_as() == name
    module = KernelModule(gpu, SimpleNamespace(handle=0))
    assert (module.architecture, module.multiprocessors, module.shared_limit, module.has_clusters) == expected
    assert module.can_overlap == module.has_clusters
    assert (gpu.enter_partition is None) == (name == "rtx")  # which takes the whole GPU
    assert gpu.compute_capability == "sm_90"  # what TensorRT builds for
    assert SHARED_MEMORY[{"rtx": "sm_86", "thor": "sm_110"}.get(name, "sm_87")] == gpu.shared_limit


@pytest.mark.parametrize("name", MODES)
def test_shapes_that_the_device_sends_to_tensorrt_get_plans(h200: GPU, name: str) -> None:
    limits = EngineLimits(1, 512, 1024)
    before = planned_shapes({"base": LLAMA_8B}, limits, "float16", "sm_90")
    enter(name)
    limit = MODES[name].shared_limit
    refused = [each for each in limits.all_engine_shapes() if kernel_refusal(LLAMA_8B, each, "float16", limit)]
    planned = planned_shapes({"base": LLAMA_8B}, limits, "float16", "sm_90")
    assert {(each.phase, each.tokens) for each in planned} == {(each.phase, each.tokens) for each in refused}
    assert set(before) <= set(planned)
    elsewhere = planned_shapes({"base": LLAMA_8B}, limits, "float16", "sm_120")
    assert elsewhere == planned_shapes({"base": LLAMA_8B}, limits, "float16", "sm_86")  # not of the GPU that is there


@needs_tensorrt
@pytest.mark.parametrize(
    ("name", "beside", "folder"),
    [("orin", False, "orin"), ("orin-nx", True, "orin.nx+beside"), ("thor", True, "thor+beside")],
)
def test_nothing_that_is_kept_meets_a_run_without_the_mode(
    h200: GPU, tiny_engines: Path, name: str, beside: bool, folder: str
) -> None:
    directory = EngineDirectory.open(tiny_engines)

    def places() -> dict[str, str]:
        """Where kernels, plans, and what TensorRT compiled are kept."""
        platform = present_platform()
        assert platform is not None and Platform.from_folder(platform.folder) == platform
        shape = directory.limits.engine_shapes()[0]
        plans = plan_candidates(directory, shape, platform, "network")
        runtime = RuntimeCache(f"{platform.folder} {directory.description_sha256}")
        return {
            "cache": str(user_cache_directory()),
            "plan in the directory": str(plans[0]),
            "plan in the cache": str(plans[1]),
            "runtime cache": str(runtime._path),
        }

    before = places()
    enter(name, beside)
    found = places()
    assert all(found[what] != before[what] for what in before)
    assert found["cache"] == f"{before['cache']}/as-{folder}"


def test_a_process_of_its_own_measures_as_its_parent_does(h200: GPU) -> None:
    assert python() == [sys.executable]
    enter("thor")
    interpreter, program, *options = python()
    assert (interpreter, Path(program).name, options) == (sys.executable, "as_device.py", ["--alone", "thor"])
    cache = user_cache_directory()
    stand_in(H200)  # as the process finds it, with this one's environment
    enter("thor")
    assert user_cache_directory() == cache
    with pytest.raises(ModeError, match="measures as thor already"):
        enter("orin")


@pytest.mark.parametrize(
    ("gpu", "name", "reason"),
    [
        (RTX_4090, "orin", "blocks have 101376 bytes of shared memory, expected at least 166912"),
        (RTX_4090, "thor", "blocks have 101376 bytes"),
        (A100, "orin", "cannot translate the code of compute_87"),
        (replace(A100, shared_limit=232_448), "thor", "no clusters"),
        (replace(H200, multiprocessors=14), "orin", "14 multiprocessors, expected at least 16"),
    ],
)
def test_a_gpu_that_cannot_stand_for_a_device_is_refused(h200: GPU, gpu: GPU, name: str, reason: str) -> None:
    stand_in(gpu)
    with pytest.raises(ModeError, match=reason):
        enter(name)
    assert find_gpu() == gpu and measured_as() is None


def test_an_unknown_device_is_refused(h200: GPU) -> None:
    with pytest.raises(
        ModeError, match="no device 'nano' to measure as: expected one of orin, orin-nx, orin-nano, rtx, thor"
    ):
        enter("nano")


def test_a_benchmark_measures_as_its_command_line_says(h200: GPU, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(argparse.ArgumentParser(), []).measured_as is None and measured_as() is None
    assert parse(argparse.ArgumentParser(), ["--as", "rtx"]).measured_as == "rtx" == measured_as()
    stand_in(A100)
    with pytest.raises(SystemExit):
        parse(argparse.ArgumentParser(), ["--as", "orin"])
    assert "--as orin: NVIDIA A100 cannot stand for orin" in capsys.readouterr().err


def test_parts_of_a_benchmark_are_checked_and_have_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", type=one_of("steps", "loops"), default=["steps", "loops"])
    assert parser.parse_args([]).parts == ["steps", "loops"]
    assert parser.parse_args(["loops"]).parts == ["loops"]
    with pytest.raises(SystemExit):
        parser.parse_args(["step"])
    assert "'step' is not one of steps, loops" in capsys.readouterr().err


@pytest.mark.skipif(find_gpu() is not None, reason="a GPU is present")
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "pytest", "--as", "orin", "tests/tools/test_as_device.py", "-p", "no:cacheprovider"],
        ["tools/bench/eagle_speed.py", "table", "--as", "orin"],
        *([f"tools/bench/{name}_speed.py", "--as", "orin"] for name in ("gpu", "eagle", "kernel", "prefill")),
        ["-m", "tools.bench.drafting_equality", "--as", "orin"],
        ["tools/bench/as_device.py", "orin", "-m", "edgellm", "doctor"],
        ["tools/bench/as_device.py", "--alone", "orin", "-m", "edgellm", "doctor"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_without_a_gpu_the_error_says_so(repository: Path, command: list[str]) -> None:
    run = subprocess.run([sys.executable, *command], cwd=repository, capture_output=True, text=True, check=False)
    assert run.returncode
    assert "orin is measured on an NVIDIA GPU: there is none" in run.stderr


def test_runs_are_compared_where_kernels_compute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(name: str, **digests: str) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"digests": digests}))

    write("whole", decode="a", verify="b", accept="c")
    write("orin", decode="a", verify=f"{ON_TENSORRT}too wide", accept="c")
    assert compare(tmp_path)
    out = capsys.readouterr().out
    assert "not compared: verify as orin: TensorRT: too wide" in out
    assert "2 of 3 the same, 0 differ, 1 on TensorRT" in out
    write("rtx", decode="a", verify="b", accept="d")
    assert not compare(tmp_path)
    assert "DIFFERENT accept: orin c, rtx d, whole c" in capsys.readouterr().out
