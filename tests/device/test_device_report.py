"""The page of `edgellm bench --report`: what it says with and without a GPU, and the forecast beside it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from edgellm.benchmark.comparing import parse_configurations
from edgellm.benchmark.device_report import forecasts, page
from edgellm.device.forecast import BOARDS
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.decoder import decoder_weights
from edgellm.kernels.gpu import find_gpu
from edgellm.opened_model import SHIPPED_MODEL

ORIN = BOARDS["orin"]


def asked(folder: Path) -> list[object]:
    (folder / "prompts.txt").write_text("one\nand two\n")
    options = ["--prompts", folder / "prompts.txt", "--repeat", 1, "--max-tokens", 12]
    return [*options, "--configurations", "chain:2,adaptive", "--report", folder / "new" / "report"]


@pytest.fixture
def results(edgellm, tiny_draft_engines: Path, tmp_path: Path) -> dict[str, Any]:
    code, _, err = edgellm("bench", tiny_draft_engines, *asked(tmp_path), "--backend", "numpy")
    assert code == 0, err
    found = tmp_path / "new" / "report"
    assert {each.name for each in found.iterdir()} == {"report.md", "speed.svg", "figures.json"}
    values = json.loads((found / "figures.json").read_text())
    assert (found / "report.md").read_text() == page(values)
    return values


def test_a_page_without_a_gpu(results: dict[str, Any]) -> None:
    assert results["device"]["gpu"] is None and results["forecast"] == {}
    assert results["first_token"]["seconds"] > 0 and results["first_token"]["computed_tokens"] >= 1
    assert results["memory"]["weights"] > 0 and results["memory"]["draft weights"] > 0
    written = page(results)
    for part in ("# tiny_draft on ", "| plain | ", "| chain:2 | ", "| adaptive | ", "| draft weights | "):
        assert part in written
    assert "There is no forecast" in written and "No GPU computed" in written
    assert "chain:2: all 2 answers equal plain's" in written and "![Speeds](speed.svg)" in written


def test_a_page_of_a_board(results: dict[str, Any], tiny_draft_engines: Path) -> None:
    directory = EngineDirectory.open(tiny_draft_engines)
    chosen = parse_configurations("chain:2,adaptive", directory.limits, "numpy", {})
    found = forecasts(directory, ORIN, chosen, results["configurations"], results["context"])
    assert set(found) == {"plain", "chain:2"}, "what chooses anew has no forecast"
    gpu = {"compute_capability": "sm_87", "multiprocessors": 16, "total_memory": 64 << 30, "driver_cuda": [12, 6]}
    limits = {"read_gb_per_s": 180.0, "mma_tflop_per_s": 40.0, "clock_ghz": 1.3}
    board = {"title": ORIN.title, "gb_per_s": ORIN.gb_per_s, "source": ORIN.source}
    device = results["device"] | {"gpu": gpu, "limits": limits, "board": board}
    written = page(results | {"device": device, "forecast": found})
    assert written.startswith("# tiny_draft on Jetson AGX Orin 64GB\n")
    assert f"| {found['plain']['expected']:.1f} | {found['plain']['most']:.1f} |" in written
    assert "- reads 180 GB/s of 204.8 by technical specifications" in written
    assert "at 1.3 GHz" in written and "driver for CUDA 12.6" in written and "85% of the board's bandwidth" in written


def test_a_forecast_is_of_the_tokens_a_round_that_were_measured() -> None:
    directory = EngineDirectory.open(SHIPPED_MODEL)
    chosen = parse_configurations("chain:3,tree:10/4/16,suffix", directory.limits, "numpy", {})

    def of(tokens: float, context: int = 200) -> dict[str, dict[str, float]]:
        return forecasts(directory, ORIN, chosen, [{"mean_acceptance_length": tokens}] * len(chosen), context)

    one, two = of(1.0), of(2.0)
    assert set(one) == {"plain", "chain:3", "tree:10/4/16"}
    assert two["plain"] == one["plain"] and two["chain:3"]["most"] == pytest.approx(2 * one["chain:3"]["most"])
    assert all(each["expected"] < each["most"] for each in one.values())
    assert one["chain:3"]["most"] < one["plain"]["most"], "a round that gives one token costs more than a plain step"
    assert of(1.0, 1000)["plain"]["most"] < one["plain"]["most"]
    weights = sum(2 * math.prod(spec.shape) for spec in decoder_weights(directory.config))
    assert one["plain"]["most"] < ORIN.gb_per_s * 1e9 / weights, "no step is faster than its weights are read"


def test_a_folder_that_cannot_be_made_is_named_before_anything_runs(edgellm, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = edgellm("bench", "--report", tmp_path / "file" / "report")
    assert code == 1 and "cannot be made: Not a directory" in " ".join(err.split())


@pytest.mark.gpu
@pytest.mark.alone
def test_a_page_of_this_gpu(edgellm, tmp_path: Path) -> None:
    code, _, err = edgellm("bench", *asked(tmp_path), "--backend", "tensorrt")
    assert code == 0, err
    written = (tmp_path / "new" / "report" / "report.md").read_text()
    print(written)
    values = json.loads((tmp_path / "new" / "report" / "figures.json").read_text())
    gpu = find_gpu()
    assert gpu is not None and values["device"]["gpu"]["name"] == gpu.name
    assert values["device"]["limits"]["read_gb_per_s"] > 10 and "- reads " in written and "TFLOP/s" in written
    assert values["memory"]["free"] > 0 and values["first_token"]["seconds"] < 5
