"""A writer that is killed at any point leaves the old snapshot or the new one, never a broken one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def killed(folder: Path, kills: int, kind: str, seed: int = 0) -> dict[str, int]:
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "helpers" / "killed_writer.py"),
        str(folder),
        str(seed),
        str(kills),
        kind,
    ]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def check_moments(counts: dict[str, int], kills: int) -> None:
    assert counts["old"] + counts["new"] == kills and counts["survived"] == 0
    assert min(counts["old"], counts["new"], counts["left behind"]) > 0


def test_killed_at_random_moments(tmp_path: Path) -> None:
    check_moments(killed(tmp_path, 20, "moments"), 20)


@pytest.mark.slow
def test_killed_at_two_hundred_random_moments(tmp_path: Path) -> None:
    counts = killed(tmp_path, 200, "moments", seed=1)
    print(counts)
    check_moments(counts, 200)


def test_killed_before_each_line(tmp_path: Path) -> None:
    counts = killed(tmp_path, 2000, "lines")
    print(counts)
    assert counts["survived"] == 1
    assert counts["old"] > 30 and counts["new"] >= 2  # after the renaming, and once not at all
    assert counts["left behind"] > 10
