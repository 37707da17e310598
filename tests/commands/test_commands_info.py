"""`edgellm info` as a user types it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tiny_families import RECURRENT
from typer.testing import CliRunner, Result

from edgellm.commands.app import create_app
from edgellm.commands.descriptions import executor_facts, sizes_in_words
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits, EngineShape


def info(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), ["info", *map(str, arguments)])


def facts(*arguments: object) -> dict:
    result = info(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def own_directory(built_directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built_directory, tmp_path / "engines"))


def test_facts_are_those_of_the_model(built_directory: Path, checkpoint: Path, limits: EngineLimits) -> None:
    said = facts(built_directory)
    tensors = load_file(checkpoint / "model.safetensors")
    assert said["parameters"] == sum(math.prod(values.shape) for values in tensors.values())
    assert said["memory"]["weights"] == sum(values.nbytes for values in tensors.values())
    # keys and values, 2 layers, 2 heads of 16, float16, and the rows that a padded last chunk may reach into
    assert said["memory"]["KV caches"] == 2 * 2 * 2 * 16 * 2 * (limits.kv_capacity + limits.prefill_chunk)
    assert said["weights"] == {"model.safetensors": (checkpoint / "model.safetensors").stat().st_size}
    assert said["limits"] == {"max_batch": 1, "prefill_chunk": 16, "kv_capacity": 128}
    assert said["config"]["eos_token_ids"] == [1]
    (platform,) = [entry for entry in said["plans"] if entry["platform"].startswith("sm_86-rtx-")]
    assert [platform[name] for name in ("plans", "expected", "needless", "problems")] == [0, 0, 1, []]
    (kernels,) = said["executors"]["sm_86"]
    assert kernels == {"name": "kernels", "shapes": "base decode 1; base prefill 16", "reason": None}
    assert platform["bytes"] == sum(path.stat().st_size for path in (built_directory / "plans").rglob("*.engine"))
    assert said["differences"] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lfm2", "2 short convolutions over 3 tokens, 1 of attention"),
        ("qwen3_5", "2 of the gated delta rule (2 key heads of 16, 4 value heads of 24, behind convolutions over 4 "),
    ],
)
def test_layers_of_several_kinds(
    name: str, words: str, tmp_path: Path, make_checkpoint: Callable[..., Path], limits: EngineLimits
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **RECURRENT[name])
    build_engine_directory(checkpoint, tmp_path / "engines", limits, [])
    result, said = info(tmp_path / "engines"), facts(tmp_path / "engines")
    assert result.exit_code == 0 and words in result.stdout
    tensors = load_file(checkpoint / "model.safetensors")
    assert said["parameters"] == sum(math.prod(values.shape) for values in tensors.values())
    small = sum(values.size for key, values in tensors.items() if key.endswith(("conv1d.weight", "A_log", "dt_bias")))
    small += sum(values.size for key, values in tensors.items() if ".conv.conv." in key)
    assert said["memory"]["weights"] == 2 * (said["parameters"] + small)  # which are of float32


def test_text_names_what_matters(built_directory: Path) -> None:
    result = info(built_directory)
    assert result.exit_code == 0, result.output
    plans = "none needed and 1 for --executor tensorrt alone"
    for words in ("llama", "float16", "context 128", "end of sequence 1", "sm_86-rtx-", plans, "KV caches"):
        assert words in result.stdout


def test_executors_are_told_by_phase_tokens_and_batch(tiny_draft_engines: Path) -> None:
    models = EngineDirectory.open(tiny_draft_engines).models
    limits = EngineLimits(8, 128, 4096, 70, 6, 60, max_lora_rank=72, lora_slots=2)
    told = {line["shapes"]: line["reason"] for line in executor_facts(models, limits, "float16", "sm_90")}
    kernels, *planned = told
    assert told[kernels] is None and "draft accept 7; draft propose 1" in kernels
    steps = [step for shapes in planned for step in shapes.split("; ")]
    assert any(step.startswith("draft propose ") and step.endswith("70") for step in steps)
    adapted = [shapes for shapes, reason in told.items() if reason and "not in 2 places, of rank 72" in reason]
    assert {"base decode 1", "base decode with adapters 1", "base verify with adapters 2, 4, 8, 16, 32, 64"} <= set(
        "; ".join(adapted).split("; ")
    )
    some = [EngineShape("decode", batch, tokens, 64, 64) for batch, tokens in ((1, 10), (2, 7), (1, 7))]
    assert sizes_in_words(some, {(7, 1), (7, 2), (7, 4), (10, 1)}) == "7 (batch 1, 2), 10"
    (line,) = executor_facts(models, limits, "float16", "sm_75")
    assert (line["name"], line["reason"]) == ("TensorRT", "no kernels for this GPU")
    (line, *_) = executor_facts(models, EngineLimits(8, 16, 96), "float32", "sm_90")
    assert line["name"] == "TensorRT" and "not float32" in line["reason"]


def test_executors_tell_that_kernels_run_every_step_and_where_not(tiny_draft_engines: Path) -> None:
    models = EngineDirectory.open(tiny_draft_engines).models
    limits = EngineLimits(1, 512, 4096, 10, 6, 60, max_lora_rank=8, lora_slots=2)
    found: dict[str, dict[str, str | None]] = {}
    for line in executor_facts(models, limits, "bfloat16", "sm_90"):
        found.setdefault(line["name"], {}).update(dict.fromkeys(line["shapes"].split("; "), line["reason"]))
    assert found.keys() == {"kernels"}
    assert {"base prefill 16, 128, 512", "draft prefill 16, 128, 512"} <= found["kernels"].keys()
    heads_of_20 = {**models, "base": replace(models["base"], head_dim=20, rotary_dim=20)}
    for line in executor_facts(heads_of_20, limits, "float16", "sm_90"):
        assert line["name"] == "kernels, and TensorRT for some steps" or "base" not in line["shapes"]


def test_directory_without_plans_says_how_they_come_to_be(plain_directory: Path) -> None:
    result = info(plain_directory)
    assert result.exit_code == 0, result.output
    assert "first use" in result.stdout


def test_verified_directory_says_so(own_directory: Path) -> None:
    result = info(own_directory, "--verify")
    assert result.exit_code == 0, result.output
    assert "every file is as described" in result.stdout


def test_verify_names_every_difference(own_directory: Path) -> None:
    weights = own_directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (own_directory / "tokenizer_config.json").unlink()
    plan = next((own_directory / "plans").rglob("*.engine"))
    plan.write_bytes(plan.read_bytes()[:-1])
    result = info(own_directory, "--verify")
    assert result.exit_code == 1
    assert "model.safetensors: SHA-256" in result.stdout
    assert "tokenizer_config.json: missing" in result.stdout
    assert f"{plan} has " in result.stdout
    assert "--refresh-plans" in result.stdout


def test_differences_without_verify_are_told_too(own_directory: Path) -> None:
    (own_directory / "config.json").write_text("{}")
    result = info(own_directory)
    assert result.exit_code == 1
    assert "config.json: 2 bytes" in result.stdout


def test_checkpoint_is_refused_with_advice(checkpoint: Path) -> None:
    result = info(checkpoint)
    assert result.exit_code == 1
    assert "edgellm build" in " ".join(result.stderr.split())
