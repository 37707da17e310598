"""The shipped model on NumPy, served in every way: the answers are those of plain decoding alone.

The full run is `python -m tools.bench.serving_equality`; its output lies in tools/bench/results.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations, product
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
    directory = equality.build(SHIPPED_MODEL, folder / "engines", "numpy")
    asked = equality.held_out_conversations(prompts)
    found = equality.compare_all(directory, "numpy", asked, tokens, ways, draftings)
    for served in found:
        assert served.explained, equality.line(served)
        assert served.way == "alone" or served.reused > 0.4 * served.prompt_tokens
    return found


@pytest.mark.parametrize("drafting", [pytest.param("plain", marks=pytest.mark.slow), "drafted"])
def test_a_sample_of_prompts(equality: object, tmp_path: Path, drafting: str) -> None:
    found = check(equality, tmp_path, 3, 8, ["snapshot", "turns", "batch of 3"], [drafting])
    assert [served.answers for served in found] == [3, 6, 18] * 2


@pytest.mark.slow
def test_100_prompts_in_every_way(equality: object, tmp_path: Path) -> None:
    found = check(equality, tmp_path, 100, 32, equality.WAYS, list(equality.DRAFTINGS))
    assert sum(len(served.differences) for served in found) <= 0.01 * sum(served.answers for served in found)


def test_every_place_of_a_batch(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository))
    from tools.bench.serving_ways import orders

    for size in (4, 5, 8):
        few, each = list(range(size)), 1 + size % 2
        found = list(map(tuple, orders(few)))
        assert len(found) == size * each
        places = Counter((member, place) for order in found for place, member in enumerate(order))
        pairs = Counter(pair for order in found for pair in pairwise(order))
        assert places == dict.fromkeys(product(few, few), each)
        assert pairs == dict.fromkeys(permutations(few, 2), each)
    assert len(set(map(tuple, orders(few[:3])))) == 6 and list(orders([7])) == [(7,)]


def test_a_comparison_goes_on_where_it_ended(equality: object, tmp_path: Path) -> None:
    record = equality.Record(tmp_path / "record", {"prompts": 12})
    arguments = Namespace(
        backend="numpy", draftings=["plain"], samplings=["greedy", "sampled"], ways=["alone", "turns"]
    )
    record.begin()
    served = equality.Served("alone", "plain", "greedy", 2, 3, 24, 30, 5, [equality.Difference(1, 2, 3e-5, 1e-4)], 1.5)
    record.add(1, served)
    record.path.write_text(record.path.read_text() + '{"share": 0, "way": "tur')
    record.begin()
    record.add(1, replace(served, way="turns", sampling="sampled"))
    assert record.done() == [(1, served), (1, replace(served, way="turns", sampling="sampled"))]
    left = [(job.share, job.samplings, job.ways) for job in equality.jobs_left(record, arguments, 2)]
    both = ("alone", "turns")
    assert left == [
        (0, ("greedy",), both),
        (0, ("sampled",), both),
        (1, ("greedy",), ("turns",)),
        (1, ("sampled",), ("alone",)),
    ]
    twice = equality.merged([(0, served), (1, served)])
    assert [(each.answers, each.seconds, len(each.differences)) for each in twice] == [(6, 3.0, 2)]
    with pytest.raises(ValueError, match="remove it"):
        equality.Record(record.path, {"prompts": 13}).begin()
