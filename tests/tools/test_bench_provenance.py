"""What a benchmark's result says of its own making: a command that can be run again, and no folder of the machine."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgellm.kernels.gpu import GPU

ARGUMENTS = ["--ways", "batch of 3", "--output", "/somewhere/deep/found.json"]


@pytest.mark.parametrize(
    ("script", "module", "program"),
    [
        ("tools/bench/tries/step.py", None, "tools/bench/tries/step.py"),
        ("/elsewhere/step.py", None, "step.py"),
        ("tools/bench/serving.py", "tools.bench.serving", "-m tools.bench.serving"),
    ],
)
def test_the_command_can_be_run_again(
    repository: Path, monkeypatch: pytest.MonkeyPatch, script: str, module: str | None, program: str
) -> None:
    monkeypatch.syspath_prepend(str(repository))
    from tools.bench.provenance import provenance

    spec = None if module is None else SimpleNamespace(name=module)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", [str(repository / script), *ARGUMENTS])
    found = provenance()
    assert found["command"] == f"python {program} --ways 'batch of 3' --output found.json"
    assert found["date"] == date.today().isoformat()
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}." in found["machine"]
    assert "/" not in found["machine"]


@pytest.mark.parametrize(("beside", "named"), [(True, "orin.nx+beside"), (False, "orin.nx")])
def test_a_result_says_what_board_its_part_stands_for(
    repository: Path, monkeypatch: pytest.MonkeyPatch, beside: bool, named: str
) -> None:
    monkeypatch.syspath_prepend(str(repository))
    from tools.bench import provenance as module
    from tools.bench.device_limits import DeviceLimits

    limits = DeviceLimits(173.0, 39.0, 8, 1.98)
    neighbour = SimpleNamespace(blocks=40, target=172.84, left={0: 550.04, 40: 173.0})
    gpu = GPU("NVIDIA H200 as orin-nx", "sm_90", (13, 0), 0, "compute_87", 8, 163 << 10, False, False, named)
    monkeypatch.setattr(module, "find_gpu", lambda: gpu)
    monkeypatch.setattr(module, "device_limits", lambda: limits)
    monkeypatch.setattr(module.neighbour, "current", lambda: neighbour if beside else None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    found = module.provenance()
    assert (found["measured_as"], found["board"]) == (named, "Jetson Orin NX 16GB")
    assert found["board_scale"] == pytest.approx(1.98 / 1.173, abs=1e-4)
    expected = {"blocks": 40, "target_gb_per_s": 172.8, "left": {0: 550.0, 40: 173.0}}
    assert found.get("neighbour") == (expected if beside else None)
