"""Building engine directories: for real, and with what is refused before anything is written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from build_folders import names_in, run_python
from safetensors.numpy import load_file, save_file

from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.plan_files import Platform, load_or_build_plan
from edgellm.engines.backends.platform import load_tensorrt
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.planning import refresh_plans
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, CheckpointError, EngineDirectoryError, PlanError, UnsupportedModelError
from edgellm.engines.formats.digests import recall_digest
from edgellm.engines.model.limits import EngineLimits

pytest.importorskip("tensorrt_rtx")


def test_each_gpu_gets_the_plans_that_it_needs(checkpoint: Path, tmp_path: Path) -> None:
    """None, as kernels run every step; where TensorRT is to run them, all."""
    limits = EngineLimits(max_batch=1, prefill_chunk=80, kv_capacity=128)
    stages: dict[str, list[tuple[int, int]]] = {}
    report = build_engine_directory(
        checkpoint,
        tmp_path / "engines",
        limits,
        targets=["sm_86", "sm_120", "sm_86"],
        progress=lambda stage, done, total: stages.setdefault(stage, []).append((done, total)),
        all_plans=True,
    )
    library = load_tensorrt()
    directory = EngineDirectory.open(tmp_path / "engines", verify=True)
    every_shape = planned_shapes(directory.models, limits, directory.dtype, "sm_86", needless=True)
    assert planned_shapes(directory.models, limits, directory.dtype, "sm_86") == []
    assert {shape.tokens for shape in every_shape} == {1, 80}
    for target in ("sm_86", "sm_120"):
        platform = Platform(target, library.flavour, library.version)
        entries = {built.shape: built for built in report.plans if built.platform == platform}
        assert entries.keys() == set(every_shape)
        for part in every_shape:
            plan, was_built = load_or_build_plan(directory, part, platform)
            assert not was_built
            assert entries[part].size == len(plan) > 10_000
            assert entries[part].seconds > 0
    assert len(report.plans) == 2 * len(every_shape)
    assert report.targets == ["sm_86", "sm_120"]
    missing = every_shape[0]
    (
        directory.plans_path / Platform("sm_86", library.flavour, library.version).folder / f"{missing.name}.engine"
    ).unlink()
    with pytest.raises(PlanError, match=f"no plan {missing.name} .* --refresh-plans"):
        load_or_build_plan(directory, missing, Platform("sm_86", library.flavour, library.version))
    every = refresh_plans(tmp_path / "engines", ["sm_86"], all_plans=True)
    assert [plan.shape for plan in every.plans if plan.seconds] == [missing]
    assert names_in(tmp_path) == {"engines"}
    weights = (checkpoint / "model.safetensors").stat().st_size
    assert stages["weights"][-1] == (weights, weights)
    assert stages["plans"][-1] == (len(report.plans), len(report.plans))
    assert stages["finish"][-1] == (1, 1)
    assert report.weight_bytes == weights
    assert report.peak_host_bytes > 10_000_000


def test_weights_are_copied_as_they_are_and_remembered(
    checkpoint: Path, built_directory: Path, limits: EngineLimits
) -> None:
    source, copy = checkpoint / "model.safetensors", built_directory / "model.safetensors"
    assert copy.read_bytes() == source.read_bytes()
    assert not copy.is_symlink()
    remembered = recall_digest(copy)
    assert remembered is not None
    assert remembered.sha256 == hashlib.sha256(source.read_bytes()).hexdigest()


def test_weights_can_be_linked(checkpoint: Path, limits: EngineLimits, tmp_path: Path) -> None:
    report = build_engine_directory(checkpoint, tmp_path / "engines", limits, weights="link")
    link = tmp_path / "engines" / "model.safetensors"
    assert link.is_symlink()
    assert link.resolve() == (checkpoint / "model.safetensors").resolve()
    assert report.weights == "link"
    EngineDirectory.open(tmp_path / "engines", verify=True).checkpoint().close()


def test_shards_and_their_index_come_along(
    sharded_checkpoint: Path, checkpoint: Path, limits: EngineLimits, tmp_path: Path
) -> None:
    build_engine_directory(sharded_checkpoint, tmp_path / "engines", limits)
    directory = EngineDirectory.open(tmp_path / "engines")
    assert len(directory.weight_files) == 2
    opened = directory.checkpoint()
    for name, expected in load_file(checkpoint / "model.safetensors").items():
        np.testing.assert_array_equal(opened.raw(name), expected)
    opened.close()


def test_optional_files_come_along_and_others_stay(own_checkpoint: Path, limits: EngineLimits, tmp_path: Path) -> None:
    (own_checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    (own_checkpoint / "system_prompt.txt").write_text("")
    (own_checkpoint / "system_prompt_image.txt").write_text("")
    (own_checkpoint / "README.md").write_text("about")
    (own_checkpoint / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", "notes.txt", ".hidden.jinja"):
        (own_checkpoint / "additional_chat_templates" / name).write_text("{{ tools }}")
    build_engine_directory(own_checkpoint, tmp_path / "engines", limits)
    assert names_in(tmp_path / "engines" / "additional_chat_templates") == {"tool_use.jinja"}
    assert {"chat_template.jinja", "system_prompt.txt", "system_prompt_image.txt"} <= names_in(tmp_path / "engines")
    assert "README.md" not in names_in(tmp_path / "engines")
    opened = EngineDirectory.open(tmp_path / "engines")
    assert "additional_chat_templates/tool_use.jinja" in opened.files
    (tmp_path / "engines" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ other }}")
    with pytest.raises(EngineDirectoryError, match=r"tool_use\.jinja: 1\d bytes, expected|tool_use\.jinja: SHA-256"):
        EngineDirectory.open(tmp_path / "engines")


def test_a_directory_of_files_with_odd_names_opens(own_checkpoint: Path, limits: EngineLimits, tmp_path: Path) -> None:
    file, name = own_checkpoint / "model.safetensors", "Ünsloth merged (1 of 1).safetensors"
    index = {"weight_map": dict.fromkeys(load_file(file), name)}
    file.rename(own_checkpoint / name)
    (own_checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    for weights in ("copy", "link"):
        build_engine_directory(own_checkpoint, tmp_path / weights, limits, weights=weights)
        assert name in EngineDirectory.open(tmp_path / weights).files


def test_float32_checkpoint_computes_in_float16_unless_told(
    own_checkpoint: Path, limits: EngineLimits, tmp_path: Path
) -> None:
    tensors = load_file(own_checkpoint / "model.safetensors")
    save_file(
        {name: values.astype(np.float32) for name, values in tensors.items()}, own_checkpoint / "model.safetensors"
    )
    config = json.loads((own_checkpoint / "config.json").read_text())
    (own_checkpoint / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    assert build_engine_directory(own_checkpoint, tmp_path / "half", limits).dtype == "float16"
    build_engine_directory(own_checkpoint, tmp_path / "brain", limits, dtype="bfloat16")
    assert EngineDirectory.open(tmp_path / "brain").dtype == "bfloat16"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU: plans would be built for it")
def test_without_gpu_and_target_there_are_no_plans(checkpoint: Path, limits: EngineLimits, tmp_path: Path) -> None:
    report = build_engine_directory(checkpoint, tmp_path / "engines", limits)
    assert not report.plans and not report.notes  # as kernels run every step
    assert not (tmp_path / "engines" / "plans").exists()
    (note,) = build_engine_directory(checkpoint, tmp_path / "planned", limits, all_plans=True).notes
    assert "No GPU was found" in note and "--target" in note


def test_without_tensorrt_the_directory_is_made_for_numpy(checkpoint: Path, tmp_path: Path) -> None:
    result = run_python(
        """
        import sys
        for name in ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"):
            sys.modules[name] = None  # as if they were not installed
        from edgellm.engines.building.builder import build_engine_directory
        from edgellm.engines.errors import MissingDependencyError
        report = build_engine_directory(sys.argv[1], sys.argv[2], all_plans=True)
        print(report.notes[0])
        try:
            build_engine_directory(sys.argv[1], sys.argv[2] + "2", targets=["sm_999"])
        except MissingDependencyError as error:
            print(error)
        """,
        checkpoint,
        tmp_path / "engines",
    )
    assert result.returncode == 0, result.stderr
    assert "No TensorRT was found" in result.stdout
    assert "NumPy backend" in result.stdout
    assert "tensorrt_rtx is not installed" in result.stdout and "Kernels are for sm_80, " in result.stdout
    assert names_in(tmp_path) == {"engines"}
    EngineDirectory.open(tmp_path / "engines")


def drop_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def truncate_weights(path: Path) -> None:
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size // 2)


def transpose_a_weight(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: np.ascontiguousarray(tensors[name].T)}, path / "model.safetensors")


def drop_a_weight(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors")


def change_family(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["FancyForCausalLM"], "model_type": "fancy"}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (drop_weights, CheckpointError, "safetensors"),
        (truncate_weights, CheckpointError, "model.safetensors"),
        (transpose_a_weight, CheckpointError, "model.layers.1.mlp.down_proj.weight"),
        (drop_a_weight, CheckpointError, "model.norm.weight"),
        (change_family, UnsupportedModelError, "(?i)fancy"),
        (lambda path: (path / "tokenizer.json").unlink(), CheckpointError, "tokenizer.json is missing"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), CheckpointError, "cannot be read as a tokenizer"),
        (lambda path: (path / "config.json").write_text("{"), CheckpointError, "config.json is not valid JSON"),
        (lambda path: (path / "config.json").unlink(), CheckpointError, "config.json"),
        (lambda path: (path / "generation_config.json").write_text("[]"), CheckpointError, "generation_config.json"),
        (shutil.rmtree, CheckpointError, "does not exist"),
    ],
)
def test_bad_checkpoints_are_refused_before_anything_is_written(
    own_checkpoint: Path,
    limits: EngineLimits,
    tmp_path: Path,
    damage: Callable[[Path], None],
    error: type[Exception],
    message: str,
) -> None:
    damage(own_checkpoint)
    before = names_in(tmp_path)
    with pytest.raises(error, match=message):
        build_engine_directory(own_checkpoint, tmp_path / "engines", limits, targets=["sm_86"])
    assert names_in(tmp_path) == before


def test_tokenizer_of_a_larger_model_is_refused(own_checkpoint: Path, limits: EngineLimits, tmp_path: Path) -> None:
    tokenizer = json.loads((own_checkpoint / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["huge"] = 320
    (own_checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"token ids up to 320, but the model's vocabulary has only 320 entries"):
        build_engine_directory(own_checkpoint, tmp_path / "engines", limits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["sm_87"]}, r"--target is sm_87: TensorRT-RTX .* cannot build for it .* JetPack"),
        ({"targets": ["sm_110"]}, r"--target is sm_110: .* JetPack"),
        ({"targets": ["sm_86", "86"]}, r"--target is '86': expected a compute capability such as sm_86"),
        ({"targets": ["sm_70"]}, r"--target is sm_70: .* on a machine with that GPU"),
        ({"dtype": "int8"}, r"--dtype is 'int8': expected one of float16"),
        ({"attention": "flash"}, r"--attention is 'flash': expected one of auto, native, composed"),
        ({"weights": "move"}, r"--weights is 'move': expected one of copy, link"),
        ({"limits": EngineLimits(1, 16, 4096)}, r"--kv-capacity is 4096"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    checkpoint: Path, limits: EngineLimits, tmp_path: Path, options: dict, message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        build_engine_directory(checkpoint, tmp_path / "engines", **({"limits": limits} | options))
    assert names_in(tmp_path) == set()


def test_memory_stays_far_below_the_size_of_the_weights(own_checkpoint: Path, tmp_path: Path) -> None:
    """The vocabulary is made so large that the embedding has 192 MiB."""
    rows = (192 << 20) // (64 * 2)
    tensors = load_file(own_checkpoint / "model.safetensors")
    tensors["model.embed_tokens.weight"] = np.zeros((rows, 64), np.float16)
    save_file(tensors, own_checkpoint / "model.safetensors")
    del tensors
    config = json.loads((own_checkpoint / "config.json").read_text())
    (own_checkpoint / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    result = run_python(
        """
        import resource, sys
        from edgellm.engines.building.builder import build_engine_directory
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(build_engine_directory(sys.argv[1], sys.argv[2]).peak_host_bytes - before)
        """,
        own_checkpoint,
        tmp_path / "engines",
    )
    assert int(result.stdout) < 48 << 20, result.stderr


def test_refreshing_builds_only_what_is_missing_or_refused(
    built_directory: Path, limits: EngineLimits, tmp_path: Path
) -> None:
    target = Path(shutil.copytree(built_directory, tmp_path / "engines"))
    (plan,) = (target / "plans").rglob("*.engine")
    assert plan.stem == "base.decode-b1-t1-l128" and refresh_plans(target, ["sm_86"]).plans == []  # kernels take all
    plan.unlink()
    for built in (True, False, True):
        report = refresh_plans(target, ["sm_86"], all_plans=True)
        assert [each.shape.name for each in report.plans if each.seconds] == [plan.stem] * built
        if not built:
            plan.write_bytes(b"damaged")
    EngineDirectory.open(target, verify=True)
