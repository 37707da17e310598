"""A sample of what `tools.bench.constrained_answers` judges, and answers that it finds wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgellm import SamplingParams, SpecDecodeRuntime
from edgellm.opened_model import SHIPPED_MODEL

pytestmark = pytest.mark.skipif(not (SHIPPED_MODEL / "draft").exists(), reason="the shipped model has no draft head")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tools.bench import constrained_answers as bench

    return bench.tiny_model(tmp_path_factory.mktemp("tiny"), "numpy")


@pytest.mark.parametrize(
    ("answers", "prompts"), [(4, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((10, 1), (40, 2)))]
)
def test_a_sample_is_valid_and_alike_drafted_and_plain(tiny: Path, tmp_path: Path, answers: int, prompts: int) -> None:
    from tools.bench import constrained_answers as bench

    shipped = bench.shipped_model(tmp_path / "shipped", "numpy")
    for name, found in bench.validity(shipped, tiny, "numpy", answers).items():
        assert found.holds, (name, found)
        assert found.reasoned == 0 if name == "shipped" else found.reasoned > answers / 8
    for comparison in bench.equality(shipped, "numpy", prompts, ["tree", "forced"], ["sampled"]):
        assert not comparison.differences, bench.line(comparison)


def test_wrong_answers_are_found(tiny: Path) -> None:
    from tools.bench import constrained_answers as bench

    number = next(number for number in range(99) if bench.schema(number).get("required") == ["action", "to"])
    with SpecDecodeRuntime(tiny, backend="numpy") as runtime:
        begins = {runtime.tokenizer.token_to_id("<think>"): -100.0}
        params = SamplingParams(structure=bench.Structure(json=bench.schema(number)), logit_bias=begins)
        right = runtime.handle_request(bench.Request([5, 6], None, params))
    found = bench.Validity()
    found.judge(number, right)
    found.judge(number, replace(right, finish_reason="stop", structured_from=0, text=right.text[:-1]))
    found.judge(number + 1, right)
    found.judge(number, ValueError("no answer"))
    assert (found.answers, found.exceptions, len(found.wrong)) == (4, 1, 3) and not found.holds
