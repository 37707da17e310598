"""`edgellm doctor` on the machine that runs the tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from command_line import Edgellm
from safetensors.numpy import load_file, save_file

from edgellm.engines.model.limits import EngineLimits
from edgellm.errors import KernelError
from edgellm.kernels.gpu import find_gpu
from tools.demo_model.describe import describe_in_place


def doctor(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgellm", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_names_every_part_and_checks_the_model(tiny_engines: Path) -> None:
    result = doctor(tiny_engines)
    assert result.returncode == 0, result.stdout + result.stderr
    found = {line.split()[0] for line in result.stdout.splitlines() if line.strip()}
    assert {"system", "GPU", "driver", "TensorRT", "pycuda", "NVRTC", "memory", "cache", "model", "plans"} <= found
    assert "NumPy: 8 tokens, all logits finite" in result.stdout


def test_a_draft_is_named_and_compared_with_plain_decoding(tiny_draft_engines: Path) -> None:
    result = doctor(tiny_draft_engines)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "EAGLE-3" in result.stdout and "adaptive, up to chain" in result.stdout
    assert "drafting on numpy: 32 tokens equal those of plain decoding" in result.stdout


@pytest.mark.skipif(find_gpu() is not None, reason="a GPU is present")
def test_without_a_gpu_it_says_so(tiny_engines: Path) -> None:
    output = doctor(tiny_engines).stdout
    assert "none found (no NVIDIA driver, or it shows no device): the NumPy backend is used" in output
    assert "no GPU to compare with" in output


def test_weights_that_compute_nonsense_are_found(tiny_checkpoint: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint, damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, damaged / "model.safetensors")
    describe_in_place(damaged, EngineLimits(1, 16, 96))
    result = doctor(damaged)
    assert result.returncode == 1
    assert "expected finite numbers" in result.stdout
    result = doctor("--json", "-m", damaged)
    said = json.loads(result.stdout)
    assert (result.returncode, said["ok"], said["checks"][0]["ok"]) == (1, False, False)
    assert "expected finite numbers" in said["checks"][0]["text"]


def test_a_check_that_fails_is_a_fault_of_the_report(
    edgellm: Edgellm, tiny_engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise KernelError("compiling linear failed")

    monkeypatch.setattr("edgellm.commands.doctor.teacher_forced_logits", fail)
    monkeypatch.setattr("edgellm.commands.doctor._CHECKS", [("memory", lambda: 1 // 0)])
    code, out, err = edgellm("doctor", tiny_engines, "--json")
    said = json.loads(out)
    (found,) = said["checks"]
    assert (code, err, found["ok"], found["text"]) == (1, "", False, "FAILED, KernelError: compiling linear failed")
    assert said["machine"]["memory"].startswith("not usable: ")


def test_all_of_it_as_json(tiny_draft_engines: Path) -> None:
    result = doctor("--model", tiny_draft_engines, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    said = json.loads(result.stdout)
    assert {"system", "GPU", "driver", "TensorRT", "pycuda", "NVRTC", "memory", "exchange", "cache"} == set(
        said["machine"]
    )
    assert said["model"] == {"path": str(tiny_draft_engines), "family": "qwen3", "dtype": "float16"}
    checks = {check["name"]: check for check in said["checks"]}
    assert said["ok"] and checks["numpy"]["tokens"] == 8
    assert checks["drafting on numpy"]["first_difference"] is None and checks["drafting on numpy"]["tokens"] == 32
    gpu = find_gpu()
    assert bool(said["executors"]) is (gpu is not None)
    assert said["gpu"] == (None if gpu is None else json.loads(json.dumps(asdict(gpu))))
    assert checks["gpu"]["ok"] is (None if gpu is None else True)
