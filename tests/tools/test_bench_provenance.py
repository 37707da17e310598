"""What a benchmark's result says of its own making: a command that can be run again, and no folder of the machine."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

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
