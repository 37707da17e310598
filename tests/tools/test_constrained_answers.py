"""A sample of what `tools.bench.constrained_answers` judges, and answers that it finds wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.engines.building import builder
from edgellm.opened_model import SHIPPED_MODEL

pytestmark = pytest.mark.skipif(not (SHIPPED_MODEL / "draft").exists(), reason="the shipped model has no draft head")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tools.bench import constrained_answers as bench

    return bench.tiny_model(tmp_path_factory.mktemp("tiny"), "numpy")


@pytest.mark.parametrize(
    ("answers", "prompts", "ways"),
    [
        (4, 1, ["forced"]),
        *(pytest.param(*each, ["tree", "forced"], marks=pytest.mark.slow) for each in ((10, 1), (40, 2))),
    ],
)
def test_a_sample_is_valid_and_alike_drafted_and_plain(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int, prompts: int, ways: list[str]
) -> None:
    from tools.bench import constrained_answers as bench

    monkeypatch.setattr(builder, "planned_shapes", lambda *_: [])  # what a build's report says takes three seconds
    shipped = bench.shipped_model(tmp_path / "shipped", "numpy")
    for name, found in bench.validity(shipped, tiny, "numpy", answers).items():
        assert found.holds, (name, found)
        assert found.reasoned == 0 if name == "shipped" else found.reasoned > answers / 8
    for comparison in bench.equality(shipped, "numpy", prompts, ways, ["sampled"]):
        assert not comparison.differences, bench.line(comparison)
