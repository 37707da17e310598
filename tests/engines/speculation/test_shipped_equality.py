"""The shipped model with its draft head on NumPy: drafted answers are plain ones. A sample here, all of it when slow.

The full run is `python -m tools.bench.drafting_equality`; its output lies in tools/bench/results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from edgellm.engines.building import builder
from edgellm.opened_model import SHIPPED_MODEL

pytestmark = pytest.mark.skipif(not (SHIPPED_MODEL / "draft").exists(), reason="the shipped model has no draft head")


@pytest.fixture
def equality(repository: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(repository))
    from tools.bench import drafting_equality

    monkeypatch.setattr(builder, "planned_shapes", lambda *_: [])  # what its report says takes three seconds
    return drafting_equality


def check(
    equality: object, folder: Path, prompts: int, tokens: int, kinds: Sequence[str], kv_cache: str = "compute"
) -> list:
    directory = equality.build(SHIPPED_MODEL, folder / "engines", "numpy", kv_cache)
    ids = equality.held_out_prompts(directory, prompts)
    found = equality.compare(directory, "numpy", ids, tokens, kinds, list(equality.SAMPLINGS))
    for comparison in found:
        assert comparison.explained, equality.line(comparison)
    return found


def test_a_sample_of_prompts(equality: object, tmp_path: Path) -> None:
    found = check(equality, tmp_path, 1, 16, ["chain 5", "tree 10/3/16"])
    assert all(comparison.mean_acceptance_length > 1.5 for comparison in found if comparison.sampling == "greedy")


@pytest.mark.slow  # test_int8_kv_cache.py drafts beside such rows, too
def test_a_sample_with_kv_rows_of_8_bits(equality: object, tmp_path: Path) -> None:
    for comparison in check(equality, tmp_path, 1, 12, ["chain 2", "tree 10/6/60"], "int8"):
        assert not comparison.differences, equality.line(comparison)


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", ["compute", "int8"])
def test_200_prompts_of_every_kind(equality: object, tmp_path: Path, kv_cache: str) -> None:
    found = check(equality, tmp_path, 200, 128, list(equality.KINDS), kv_cache)
    assert sum(len(comparison.differences) for comparison in found) <= 0.01 * 200 * len(found)
