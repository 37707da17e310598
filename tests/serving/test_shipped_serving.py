"""The shipped model on NumPy, served in every way: the answers are those of plain decoding alone.

The full run is `python -m tools.bench.serving_equality`; its output lies in tools/bench/results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from edgellm.opened_model import SHIPPED_MODEL

pytestmark = pytest.mark.skipif(not (SHIPPED_MODEL / "draft").exists(), reason="the shipped model has no draft head")


@pytest.fixture
def equality(repository: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(repository))
    from tools.bench import serving_equality

    return serving_equality


def check(equality: object, folder: Path, prompts: int, tokens: int, ways: Sequence[str], draftings: Sequence[str]):
    directory = equality.build(SHIPPED_MODEL, folder / "engines", equality.Server())
    asked = equality.held_out_conversations(prompts)
    found = equality.compare_all(directory, equality.Server(), asked, tokens, ways, draftings)
    for served in found:
        assert served.explained, equality.line(served)
        assert served.way == "alone" or served.reused > 0.4 * served.prompt_tokens
    return found


@pytest.mark.parametrize("drafting", [pytest.param("plain", marks=pytest.mark.slow), "drafted"])
def test_a_sample_of_prompts(equality: object, tmp_path: Path, drafting: str) -> None:
    found = check(equality, tmp_path, 1, 8, ["snapshot", "turns"], [drafting])
    assert [served.answers for served in found] == [1, 2] * 2


@pytest.mark.slow
def test_100_prompts_in_every_way(equality: object, tmp_path: Path) -> None:
    found = check(equality, tmp_path, 100, 32, equality.WAYS, list(equality.DRAFTINGS))
    assert sum(len(served.differences) for served in found) <= 0.01 * sum(served.answers for served in found)
