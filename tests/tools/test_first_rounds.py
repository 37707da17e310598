"""tools/bench/first_rounds.py: what it makes of gaps, and a kind that runs."""

from __future__ import annotations

from typing import Any

import pytest

from tools.bench.first_rounds import judged, run_kind

ROUNDS = 4


@pytest.mark.parametrize(
    ("first", "following", "later", "reached"),
    [
        ([1, 1, 1, 1], [1, 1, 1, 1], 0, True),
        ([9, 1, 1, 1], [1, 1, 1, 1], 0, True),  # up to 10 ms more than usual
        ([30, 1, 1, 1], [1, 25, 1, 1], 0, True),
        ([30, 1, 1, 1], [1, 1, 1, 1], 0, False),
        ([1, 1, 1, 1], [1, 1, 1, 1], 1, False),
    ],
)
def test_the_goal(first: list[int], following: list[int], later: int, reached: bool) -> None:
    found: dict[str, Any] = {"gaps": [gap / 1000 for gap in first + following], "later": {"graphs captured": later}}
    result = judged(found, ROUNDS)
    assert result["reached"] is reached
    assert result["longest_ms"]["first"] == max(first) and result["median_ms"]["next"] == 1


@pytest.mark.parametrize("kind", ["two", "schema"])
def test_a_kind_runs(kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from edgellm.engines.directories.engine_directory import EngineDirectory

    monkeypatch.setattr(EngineDirectory, "with_kv_cache", EngineDirectory.with_kv_cache)  # which it replaces
    found = run_kind(kind, ROUNDS, "numpy")
    assert len(found["gaps"]) == 2 * ROUNDS and min(found["gaps"]) > 0 and not any(found["later"].values())
    assert "first token" in capsys.readouterr().out
