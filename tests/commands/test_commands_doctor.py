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


def test_it_names_every_part_and_checks_the_model(edgellm: Edgellm, tiny_engines: Path) -> None:
    code, out, err = edgellm("doctor", tiny_engines)
    assert code == 0, out + err
    found = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert {"system", "GPU", "driver", "TensorRT", "pycuda", "NVRTC", "memory", "cache", "model", "plans"} <= found
    assert "NumPy: 8 tokens, all logits finite" in out
    if find_gpu() is None:
        assert "none found (no NVIDIA driver, or it shows no device): the NumPy backend is used" in out
        assert "no GPU to compare with" in out


def test_a_draft_is_named_and_compared_with_plain_decoding(edgellm: Edgellm, tiny_draft_engines: Path) -> None:
    code, out, err = edgellm("doctor", tiny_draft_engines)
    assert code == 0, out + err
    assert "EAGLE-3" in out and "adaptive, up to chain" in out
    assert "drafting on numpy: 32 tokens equal those of plain decoding" in out


def test_weights_that_compute_nonsense_are_found(edgellm: Edgellm, tiny_checkpoint: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint, damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, damaged / "model.safetensors")
    describe_in_place(damaged, EngineLimits(1, 16, 96))
    code, out, _ = edgellm("doctor", damaged)
    assert code == 1 and "expected finite numbers" in out
    code, out, _ = edgellm("doctor", "--json", "-m", damaged)
    said = json.loads(out)
    assert (code, said["ok"], said["checks"][0]["ok"]) == (1, False, False)
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
    command = [sys.executable, "-m", "edgellm", "doctor", "--model", str(tiny_draft_engines), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
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
