"""Engine directories with adapters: built for real by TensorRT-RTX, described, verified, and refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kernel_refusals import kernel_refusal
from typer.testing import CliRunner, Result

from edgellm.commands.app import create_app
from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.plan_files import Platform, load_or_build_plan, network_digest
from edgellm.engines.backends.platform import load_tensorrt
from edgellm.engines.backends.tensorrt_operations import TensorRTOperations, build_plan
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.planning import refresh_plans
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import AdapterError, BuildError, EngineDirectoryError
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.model.adapted_projections import SCALES, adapted_projections, adapter_bytes
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_program, decoder_weights
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineLimits, EngineShape
from tools.demo_model.describe import describe_in_place

LIMITS = EngineLimits(2, 16, 96, max_lora_rank=12, lora_slots=2)
LLAMA = DecoderConfig("llama", 96, 64, 128, 2, 4, 2, 16, 256, 1e-5, 10000.0, 16, "float16", True)
FAMILIES = {
    "llama_biases": replace(LLAMA, attention_bias=True, attention_output_bias=True, mlp_bias=True),
    "qwen2": replace(LLAMA, family="qwen2", attention_bias=True, dtype="bfloat16"),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=32, rotary_dim=32),
}


def edgellm(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), list(map(str, arguments)))


def with_adapters(limits: EngineLimits) -> list[EngineShape]:
    """The engines with adapters."""
    return [shape for shape in limits.all_engine_shapes() if shape.lora_slots]


def test_limits_name_every_engine() -> None:
    plain = replace(LIMITS, max_lora_rank=0, lora_slots=0)
    assert LIMITS.engine_shapes() == plain.engine_shapes() == plain.all_engine_shapes()
    assert [shape.name for shape in with_adapters(LIMITS)] == [f"{shape.name}.lora" for shape in plain.engine_shapes()]
    assert LIMITS.all_engine_shapes() == LIMITS.engine_shapes() + with_adapters(LIMITS)
    assert LIMITS.lora_rank == 16
    drafting = replace(LIMITS, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    assert {(shape.model, shape.phase) for shape in with_adapters(drafting)} == {
        ("base", "decode"),
        ("base", "prefill"),
        ("base", "verify"),
    }


@pytest.mark.parametrize(("family", "attention"), [("qwen3", "native"), ("llama_biases", "composed")])
def test_every_phase_of_every_family_builds(family: str, attention: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    config = FAMILIES[family]
    limits = replace(LIMITS, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    for phase, batch in (("prefill", 1), ("verify", 2)):
        shape = next(each for each in with_adapters(limits) if (each.phase, each.batch) == (phase, batch))
        assert len(build_plan(config, shape, config.dtype, attention, "sm_86")) > 1000


def test_the_edge_of_an_engine_with_adapters() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    config, shape = FAMILIES["qwen3"], LIMITS.with_adapters(EngineShape("decode", 2, 1, 64, 80))
    network = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(
        1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    )
    ProgramGraph(TensorRTOperations(trt, network, "float16", "composed"), decoder_program(config, shape)).run()
    inputs = {network.get_input(index).name: network.get_input(index) for index in range(network.num_inputs)}
    projections = adapted_projections(decoder_weights(config))
    assert len(projections) == 4 * config.num_layers
    edges = dict(edge for each in projections for edge in each.edge(2, 16))
    for name, expected in edges.items():
        assert tuple(inputs[name].shape) == expected
        assert inputs[name].dtype == trt.float16
    assert tuple(inputs[SCALES].shape) == (2, 2)
    assert {name for name in inputs if "lora" in name} == set(edges) | {SCALES}
    assert edges["model.layers.0.self_attn.qkv_proj.lora_a"] == (2 * 3 * 16, 64)
    assert edges["model.layers.1.mlp.gate_up_proj.lora_b"] == (2 * 2 * 16, 256)
    assert adapter_bytes(projections, LIMITS, "float16") == 2 * sum(math.prod(edge) for edge in edges.values())


def test_networks_without_adapters_are_what_they_were() -> None:
    """A directory with adapters shares the plans without them with one that has none."""
    plain = replace(LIMITS, max_lora_rank=0, lora_slots=0)
    digests = [
        [network_digest(LLAMA, shape, "float16", "auto") for shape in limits.engine_shapes()]
        for limits in (plain, LIMITS)
    ]
    assert digests[0] == digests[1]
    adapted = {network_digest(LLAMA, shape, "float16", "auto") for shape in with_adapters(LIMITS)}
    others = replace(LIMITS, lora_slots=3), replace(LIMITS, max_lora_rank=17)
    for limits in others:
        adapted |= {network_digest(LLAMA, shape, "float16", "auto") for shape in with_adapters(limits)}
    assert len(adapted) == 3 * len(digests[0])
    assert adapted.isdisjoint(digests[0])


def test_adapters_of_high_rank_are_left_to_tensorrt() -> None:
    shape = EngineShape("decode", 1, 1, 1024, 1040)
    for limits in (LIMITS, replace(LIMITS, max_lora_rank=64, lora_slots=8)):
        assert kernel_refusal(LLAMA, limits.with_adapters(shape), "float16", 232_448) is None
    found = kernel_refusal(LLAMA, replace(LIMITS, max_lora_rank=65).with_adapters(shape), "float16", 232_448)
    assert found is not None
    assert "the linear layer model.layers.0.self_attn.qkv_proj: LoRA adapters are applied" in found


@pytest.mark.parametrize("plans", [(), pytest.param(("--all-plans",), marks=pytest.mark.slow)])
def test_a_build_from_the_command_line(
    tiny_checkpoint: Path,
    tiny_adapters: dict[str, Path],
    tiny_config: DecoderConfig,
    tmp_path: Path,
    compiled: list,
    plans: tuple[str, ...],
) -> None:
    pytest.importorskip("tensorrt_rtx")
    target = tmp_path / "engines"
    loras = [f"--lora={name}={path}" for name, path in tiny_adapters.items()]
    small = ("--prefill-chunk", "16", "--kv-capacity", "64", "--max-batch", "1", "--target", "sm_86:46")
    result = edgellm("build", tiny_checkpoint, target, *loras, *small, *plans)
    assert result.exit_code == 0, result.output
    directory = EngineDirectory.open(target, verify=True)
    assert directory.limits == EngineLimits(1, 16, 64, max_lora_rank=12, lora_slots=3)
    assert {name: adapter.rank for name, adapter in directory.adapters.items()} == {
        "wide": 12,
        "attention": 3,
        "mlp": 4,
    }
    for name, adapter in directory.adapters.items():
        assert {file.name for file in (target / "lora" / name).iterdir()} == set(adapter.files)
        read = adapter.read(tiny_config)
        assert read.digest == adapter.digest == LoraAdapter.read(tiny_adapters[name], tiny_config).digest
    library = load_tensorrt()
    platform = Platform("sm_86", library.flavour, library.version)
    planned = planned_shapes(directory.models, directory.limits, directory.dtype, "sm_86", needless=bool(plans))
    # Of those that kernels run as well TensorRT runs chunks of many rows alone.
    assert {shape.phase for shape in planned} == ({"decode"} if plans else set())
    adapted = [shape.name for shape in planned if shape.lora_slots][:1]
    for shape in planned:
        plan, was_built = load_or_build_plan(directory, shape, platform)
        assert len(plan) > 10_000
        assert not was_built
        assert f" {shape.name} " in result.output
    steps = (*("base decode 1", "base prefill 16"), *("base decode with adapters 1", "base prefill with adapters 16"))
    assert f"  sm_86       kernels: {'; '.join(steps)}\n" in result.output
    for words in ("wide: rank 12", "attention: rank 3", "3 at once, rank up to 12"):
        assert words in result.output
    listed = edgellm("info", target, "--verify")
    assert listed.exit_code == 0, listed.output
    for words in ("wide: rank 12", "3 at once, rank up to 12", "LoRA adapters", "every file is as described"):
        assert words in listed.output
    facts = json.loads(edgellm("info", target, "--json").output)
    assert facts["lora"]["mlp"]["digest"] == directory.adapters["mlp"].digest
    for name in adapted:
        (target / "plans" / platform.folder / f"{name}.engine").unlink()
        report = refresh_plans(target, ["sm_86"], all_plans=True)
        assert [plan.shape.name for plan in report.plans if plan.seconds] == [name]


def test_a_rank_alone_leaves_room_for_adapters(tiny_checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "engines"
    result = edgellm("build", tiny_checkpoint, target, "--max-lora-rank", 8, "--lora-slots", 5)
    assert result.exit_code == 0, result.output
    directory = EngineDirectory.open(target, verify=True)
    assert (directory.limits.max_lora_rank, directory.limits.lora_slots, directory.adapters) == (8, 5, {})
    assert "5 at once, rank up to 8" in edgellm("info", target).output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--lora", "{wide}"), 2, "expected NAME=DIR"),
        (("--lora", "a={wide}", "--lora", "a={mlp}"), 2, "'a' is the name of"),
        (("--lora", "../a={wide}"), 1, "an adapter cannot be called '../a'"),
        (("--lora", "a={wide}", "--max-lora-rank", "8"), 1, "--max-lora-rank is 8: expected a whole number from 12"),
        (("--lora", "a={wide}", "--lora-slots", "33"), 1, "--lora-slots is 33: expected a whole number from 1 to 32"),
        (("--lora", "a={wide}", "--lora-slots", "0"), 1, "--lora-slots is 0"),
        (("--lora-slots", "2"), 1, "--max-lora-rank is 0: expected a whole number from 1 to 1024"),
        (("--max-lora-rank", "2000"), 1, "--max-lora-rank is 2000"),
        (("--lora", "a={checkpoint}"), 1, "adapter_config.json"),
        (("--lora", "a={checkpoint}/nowhere"), 1, "does not exist"),
    ],
)
def test_builds_that_are_refused(
    arguments: tuple[str, ...],
    code: int,
    words: str,
    tiny_checkpoint: Path,
    tiny_adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    places = {**tiny_adapters, "checkpoint": tiny_checkpoint}
    result = edgellm("build", tiny_checkpoint, tmp_path / "engines", *(part.format(**places) for part in arguments))
    assert words in " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == code
    assert not (tmp_path / "engines").exists()


def test_an_adapter_of_another_model(
    tiny_adapters: dict[str, Path], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", hidden_size=32)
    with pytest.raises(AdapterError, match="wrong shape"):
        build_engine_directory(other, tmp_path / "engines", adapters={"wide": tiny_adapters["wide"]}, targets=[])
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lora: (lora / "mlp" / "adapter_config.json").unlink(), "lora/mlp/adapter_config.json: missing"),
        (lambda lora: shutil.rmtree(lora / "wide"), "lora/wide/adapter_model.safetensors: missing"),
        (lambda lora: shutil.copytree(lora / "wide", lora / "new"), "lora/new/: not described"),
        (lambda lora: _flip(lora / "wide" / "adapter_model.safetensors"), "lora/wide/adapter_model.safetensors: SHA"),
        (lambda lora: (lora / "mlp" / "adapter_config.json").write_text("{}"), "2 bytes, expected"),
    ],
)
def test_changed_directories(
    change: Callable[[Path], Any], words: str, tiny_lora_engines: Path, tmp_path: Path
) -> None:
    engines = shutil.copytree(tiny_lora_engines, tmp_path / "engines")
    EngineDirectory.open(engines)
    change(engines / "lora")
    with pytest.raises(EngineDirectoryError, match=words):
        EngineDirectory.open(engines, verify=True)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values["lora"]["wide"].update(rank=13), "'lora' and 'limits' disagree"),
        (lambda values: values["limits"].pop("lora_slots"), "'lora' and 'limits' disagree"),
        (lambda values: values["lora"].update({"../x": values["lora"]["mlp"]}), "not a plain name"),
        (lambda values: values["lora"]["mlp"]["files"].pop("adapter_config.json"), "expected the files"),
        (lambda values: values["lora"]["mlp"].update(more=1), "unknown keys 'more'"),
        (lambda values: values["lora"]["mlp"].update(rank="4"), "'rank' is"),
    ],
)
def test_descriptions_that_are_refused(
    change: Callable[[dict[str, Any]], Any], words: str, tiny_lora_engines: Path, tmp_path: Path
) -> None:
    engines = shutil.copytree(tiny_lora_engines, tmp_path / "engines")
    path = engines / "edgellm.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(EngineDirectoryError, match=words):
        EngineDirectory.read(engines)


def test_a_checkpoint_described_in_place(tiny_checkpoint: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    assert "lora" not in describe_in_place(directory).path.joinpath("edgellm.json").read_text()
    for name in ("wide", "mlp"):
        shutil.copytree(tiny_adapters[name], directory / "lora" / name)
    described = describe_in_place(directory)
    assert list(described.adapters) == ["mlp", "wide"]
    assert (described.limits.max_lora_rank, described.limits.lora_slots) == (12, 2)
    with pytest.raises(BuildError, match="--max-lora-rank is 4"):
        describe_in_place(directory, replace(described.limits, max_lora_rank=4))
