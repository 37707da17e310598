"""Round costs on disk: bound to device and directory, written whole, measured again where a file cannot be trusted."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.drafting.costs import PLAIN, Device, RoundCosts, RoundCostsError, read_round_costs, round_costs
from edgellm.engines.directories.engine_directory import EngineDirectory

COSTS = RoundCosts({PLAIN: {1: 0.004, 2: 0.006}, "chain 2": {1: 0.007, 2: 0.01}})


@pytest.fixture
def directory(tiny_engines, tmp_path, monkeypatch) -> EngineDirectory:
    """An engine directory and a cache directory of this test's own."""
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copytree(tiny_engines, tmp_path / "engines")
    return EngineDirectory.open(tmp_path / "engines")


class Measuring:
    """Stands for a measurement, and counts how often it was asked for."""

    def __init__(self, costs: RoundCosts = COSTS) -> None:
        self.costs, self.calls = costs, 0

    def __call__(self) -> RoundCosts:
        self.calls += 1
        return self.costs


def kept(directory, measure, names=(PLAIN, "chain 2"), batches=(1, 2)) -> RoundCosts:
    return round_costs(directory, "numpy", names, batches, measure)


def files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in tmp_path.rglob("*") if "round-costs" in path.name)


def test_measured_once_and_kept(directory, tmp_path):
    measure = Measuring()
    assert kept(directory, measure) == COSTS
    assert kept(EngineDirectory.open(directory.path), measure) == COSTS
    assert measure.calls == 1
    (path,) = files(tmp_path)  # no temporary file stays behind
    assert path.is_relative_to(tmp_path / "cache" / "plans")
    assert EngineDirectory.open(directory.path).differences(verify=True) == []


def test_measured_again_for_configurations_that_are_not_covered(directory):
    measure = Measuring()
    kept(directory, measure)
    more = Measuring(RoundCosts({**COSTS.measured, "chain 3": {1: 0.008, 2: 0.012}}))
    assert kept(directory, more, (PLAIN, "chain 3")) == more.costs
    assert kept(directory, more, (PLAIN, "chain 2", "chain 3")) == more.costs
    assert (measure.calls, more.calls) == (1, 1)
    assert kept(directory, Measuring(), batches=(1, 2, 4)) == COSTS


def test_bound_to_the_directory(directory):
    measure = Measuring()
    kept(directory, measure)
    kept(replace(directory, description_sha256="0" * 64), measure)
    assert measure.calls == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not valid JSON"),
        (lambda text: text.replace("0.004", "0.001"), "its digest is not that of its content"),
        (lambda text: text.replace('"numpy"', '"tensorrt"', 1), "measured with another backend: 'tensorrt'"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 9'), "this EdgeLLM reads 1"),
        (lambda text: text.replace('"device"', '"machine"'), "unknown keys 'machine'"),
        (lambda text: "[]", "expected an object"),
    ],
)
def test_a_damaged_file_is_a_warning_and_measured_again(directory, tmp_path, caplog, change, message):
    kept(directory, Measuring())
    (path,) = files(tmp_path)
    path.write_text(change(path.read_text()))
    again = Measuring()
    with caplog.at_level(logging.WARNING, "edgellm.drafting"):
        assert kept(directory, again) == COSTS
    assert again.calls == 1
    assert message in caplog.text and str(path) in caplog.text and "measured again" in caplog.text
    assert kept(directory, again) == COSTS and again.calls == 1  # the file was replaced


@pytest.mark.parametrize(
    "seconds",
    [
        {"chain 2": {"1": 0.1}},
        {PLAIN: {}},
        {PLAIN: {"1": 0.0}},
        {PLAIN: {"0": 0.1}},
        {PLAIN: {"one": 0.1}},
        {PLAIN: {"1": "fast"}},
    ],
)
def test_figures_that_cannot_be_are_refused(directory, tmp_path, seconds):
    from edgellm.drafting import costs as module

    kept(directory, Measuring())
    (path,) = files(tmp_path)
    values = json.loads(path.read_text()) | {"seconds": seconds, "sha256": module._digest(seconds)}
    path.write_text(json.dumps(values))
    with pytest.raises(RoundCostsError, match=r"chain|seconds|plain"):
        read_round_costs(path, Device.present(directory, "numpy"))


def test_where_nothing_can_be_written_the_figures_serve_and_a_warning_says_so(directory, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path / "file" / "below"))
    measure = Measuring()
    assert kept(directory, measure) == COSTS
    assert "cannot be kept" in caplog.text and "Not a directory" in caplog.text


def test_batches_between_those_measured():
    assert COSTS.seconds("chain 2", 1) == 0.007
    costs = RoundCosts({PLAIN: {1: 0.004, 8: 0.018}})
    assert costs.seconds(PLAIN, 4) == pytest.approx(0.010)
    assert costs.seconds(PLAIN, 16) == 0.018
