"""The forecast for boards: what a step is said to take, by bytes and by arithmetic, and what the page says of it."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
from board_forecast import CHAIN, MODELS, OTHERS, PUBLISHED, TREE, WEIGHTS, Model, forecast, main
from probes import state_traffic, weight_bytes

from edgellm.device.forecast import BOARDS, CLOCKS, REACHED, Clocks, Cost, round_shapes, step_cost
from edgellm.engines.families import decoder_config
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.expert_steps import for_kernels

ORIN = BOARDS["orin"]


@pytest.mark.parametrize(
    ("name", "weights"), [*(("llama-1b", weights) for weights in WEIGHTS), ("LFM2-8B-A1B", "int4")]
)
def test_the_steps_together_read_what_the_engine_reads(name: str, weights: str) -> None:
    directory = Model(name, weights, 512).directory(None)
    shape, packed = directory.limits.base_shape("decode", 1, 1, 640), directory.layouts.get("base", {})
    program = for_kernels(model_program(directory.config, shape))
    read = sum(step_cost(each, shape, "float16", packed, 512).nbytes for each in program.steps)
    weight = weight_bytes(directory.config, shape, "float16", packed)
    states = state_traffic(directory.config, directory.limits, "float16", 512)
    assert read == pytest.approx(weight + sum(states.values()), rel=1e-9)


def test_a_step_takes_the_larger_of_its_times() -> None:
    half_reached = Cost(204.8e9 / 2, 0.0, 0.0).seconds(ORIN, 0.5, 0.0)
    assert half_reached == pytest.approx(1.0)
    assert Cost(1.0, ORIN.multiprocessor_ghz * 3e9, 0.0).seconds(ORIN, 1.0, 0.0) == pytest.approx(3.0)
    assert Cost(204.8e9, 0.0, 1024 * ORIN.multiprocessor_ghz * 3e9).seconds(ORIN, 1.0, 0.25) == pytest.approx(3.25)


def test_a_plain_step_is_that_of_its_bytes_on_every_board() -> None:
    """So that with the whole bandwidth and no edges it is as fast as the memory."""
    model = Model("llama-8b", "float16", 512)
    for board in BOARDS.values():
        rate = 1 / model.seconds(board, reached=1.0, edge=0.0)
        assert rate == pytest.approx(board.gb_per_s / model.weight_gb, rel=0.01)
        assert 1 / model.seconds(board) == pytest.approx(REACHED * rate, rel=0.02)


RESULTS, PART_CLOCKS = (
    Path(__file__).parents[2] / "tools" / "bench" / "results",
    1.98e9 * 16,
)  # of 16 multiprocessors of an H200, a second


def measured_steps(name: str) -> dict[int, tuple[float, float]]:
    """By rows, clocks of the steps of the base, and their weights if they are of 16 bits."""
    found = json.loads(lzma.decompress((RESULTS / name).read_bytes()))
    found = found.get("llama-8b", found)
    steps = {key: each for key, each in found.get("table", found)["engines"].items() if key.startswith("base.")}
    return {
        int(key.split("-t")[1].split("-")[0]): (each["ms"] * 1e-3 * PART_CLOCKS, each["bytes"] / 2)
        for key, each in steps.items()
    }


def test_clocks_of_a_weight_are_those_of_the_results() -> None:
    dense = measured_steps("2026-11-23-h200-as-orin-8b.json.xz")
    packed = measured_steps("2026-11-23-h200-packed-as-orin.json.xz")
    head = MODELS["llama-8b"]["vocab_size"] * MODELS["llama-8b"]["hidden_size"]  # which was dense in both
    assert set(CLOCKS["dense"].by_rows) == set(CLOCKS["packed"].by_rows) == set(dense) == set(packed)
    for rows, (clocks, weights) in dense.items():
        assert CLOCKS["dense"].of(rows) == pytest.approx(clocks / weights, rel=1e-6)
    layers = dense[1][1] - head
    for rows, (clocks, _) in packed.items():
        expected = (clocks - CLOCKS["dense"].of(rows) * head) / layers
        assert CLOCKS["packed"].of(rows) == pytest.approx(expected, rel=1e-6)
    known = Clocks({1: 1.0, 8: 2.0})
    assert [known.of(rows) for rows in (1, 2, 8, 16)] == [1.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (CHAIN, ["accept-b1-t4", "propose-b1-t1", "propose-b1-t1", "verify-b1-t4"]),
        (TREE, ["accept-b1-t5", *["propose-b1-t10"] * 3, "verify-b1-t16"]),
    ],
)
def test_a_round_has_the_engines_that_it_runs(plan, expected: list[str]) -> None:
    directory = Model("llama-1b", "float16", 512).directory(plan)
    assert [each.name.split(".")[1].rpartition("-")[0] for each in round_shapes(directory.limits, plan)] == expected


def test_a_row_says_what_fits_and_what_others_published() -> None:
    tokens = {CHAIN.name: 2.0, TREE.name: 3.0}
    large = forecast(Model("llama-8b", "float16", 512), "orin-nano", tokens)
    assert not large["fits"] and "plain" not in large
    row = forecast(Model("llama-8b", "int4+int8", 512), "orin-nano", tokens)
    assert [each["tokens_per_second"] for each in row["published"]] == ["19.1 (MLC, INT4)"]
    assert row["plain"] < row["at_most"]
    chain = row[CHAIN.name]
    assert chain["tokens_per_second"] == pytest.approx(2.0 * row["plain"] / chain["round_in_plain_steps"])


def test_models_are_of_the_published_sizes() -> None:
    """In billions of weights, by a plain step's reading."""
    sizes = {"llama-1b": 1.24, "llama-3b": 3.21, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen3-1.7b": 1.72}
    sizes |= {"qwen3-4b": 4.02, "Qwen3-30B-A3B": 3.04}  # of experts those that are chosen
    for name, billions in sizes.items():
        assert Model(name, "float16", 512).weight_gb == pytest.approx(2 * billions, rel=0.01)
    for name, billions in {"llama-8b": 8.03, "qwen2.5-7b": 7.62, "Qwen3-30B-A3B": 30.53}.items():
        assert Model(name, "float16", 512).memory_gb == pytest.approx(2 * billions, rel=0.01)
    assert all(decoder_config(each).num_layers for each in MODELS.values())
    assert all(each.board in BOARDS and each.model in MODELS and each.weights in WEIGHTS for each in PUBLISHED)


@pytest.mark.parametrize("names", [OTHERS[::4], pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_page_of_models_has_plain_speeds_of_the_tool(
    capsys: pytest.CaptureFixture[str], names: tuple[str, ...]
) -> None:
    main(["--models", *names, "--weights", "int4+int8"])
    plain: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:]]
        if cells and cells[0] in names:
            plain.setdefault(cells[0], []).append(str(round(float(cells[4]))) if cells[4] else cells[3])
    page = (Path(__file__).parents[2] / "docs" / "pages" / "supported.md").read_text(encoding="utf-8")
    assert plain.keys() == set(names)
    for name, (orin, nx, nano, thor) in plain.items():
        beside = f"| {name} | does not fit beside 3 GiB |"
        assert f"{beside if beside in page else f'| {name} | {nano} |'} {nx} | {orin} | {thor} |" in page
