"""Building engine directories with a vision encoder: its section of edgellm.json, its plans, what is refused."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from golden_vision import golden_checkpoint, golden_config, golden_directory
from typer.testing import CliRunner

from edgellm.commands.app import create_app
from edgellm.engines.backends.plan_files import network_digest
from edgellm.engines.backends.platform import find_tensorrt
from edgellm.engines.backends.tensorrt_operations import build_plan
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.checks import choose_image_rows
from edgellm.engines.building.planning import refresh_plans
from edgellm.engines.building.plans import build_plans
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, CheckpointError, EngineDirectoryError
from edgellm.engines.model.limits import EngineLimits, vision_shape
from edgellm.multimodal.vision_layout import window_rows
from tools.demo_model.describe import describe_in_place

needs_tensorrt = pytest.mark.skipif(find_tensorrt() is None, reason="TensorRT is not installed")
LIMITS = EngineLimits(1, 16, 64, image_rows=(64, 128))
#: One golden model of each kind of encoder; the others are variants.
FAMILIES = ("llava_clip", "llava_siglip", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


def vision_folder(name: str, place: Path) -> Path:
    """The vision part of a golden model, as it is published apart."""
    return golden_checkpoint(name, place)


@needs_tensorrt
@pytest.mark.parametrize(
    ("name", "dtype", "attention"),
    [("qwen3_vl", "bfloat16", "composed")] + [(name, "float16", "native") for name in FAMILIES],
)
def test_every_family_builds(name: str, dtype: str, attention: str) -> None:
    config = golden_config(name)
    rows = choose_image_rows(config)[0] if config.image_side else 288  # windows of 16 and of 36 patches
    assert len(build_plan(config, vision_shape(rows), dtype, attention, "sm_86")) > 1000


@needs_tensorrt
@pytest.mark.parametrize("all_plans", [True, False])
def test_a_multimodal_checkpoint(tmp_path: Path, all_plans: bool) -> None:
    """Kernels run the encoder, so it has plans where all are asked for."""
    checkpoint = golden_checkpoint("qwen3_vl", tmp_path / "checkpoint")
    settings = {"attention": "composed", "all_plans": all_plans}
    report = build_engine_directory(checkpoint, tmp_path / "engines", LIMITS, ["sm_86"], **settings)
    names, encoders = {plan.shape.name for plan in report.plans}, {"vision.encode-p64", "vision.encode-p128"}
    assert names & encoders == (encoders if all_plans else set())
    assert "base.decode-b1-t1-l64-s1-2" in names  # whose heads kernels refuse
    assert report.vision == golden_config("qwen3_vl")
    directory = EngineDirectory.open(tmp_path / "engines", verify=True)
    assert directory.vision is not None
    assert (directory.vision.config, directory.vision.path) == (report.vision, directory.path)
    assert directory.vision.files is None
    assert directory.limits.image_rows == (64, 128)
    assert "preprocessor_config.json" in directory.files
    assert {path.stem for path in directory.plans_path.rglob("vision.*.engine")} == names & encoders
    with directory.vision.checkpoint() as opened:
        assert "model.visual.merger.norm.weight" in opened.tensors


@needs_tensorrt
def test_a_vision_encoder_that_was_published_apart(tmp_path: Path, make_checkpoint) -> None:
    text = make_checkpoint(tmp_path / "text", 1, hidden_size=24, num_attention_heads=2, num_key_value_heads=1)
    vision = vision_folder("llava_siglip", tmp_path / "eyes")
    limits = replace(LIMITS, image_rows=(16,))
    build_engine_directory(text, tmp_path / "engines", limits, ["sm_86"], vision=vision)
    directory = EngineDirectory.open(tmp_path / "engines", verify=True)
    assert directory.vision is not None
    assert directory.vision.path == tmp_path / "engines" / "vision"
    assert set(directory.vision.files) == {"config.json", "preprocessor_config.json", "model.safetensors"}
    assert directory.vision.config == golden_config("llava_siglip")
    (directory.path / "vision" / "config.json").write_text("{}")
    with pytest.raises(EngineDirectoryError, match=r"vision/config.json: 2 bytes"):
        EngineDirectory.open(directory.path)


def test_a_folder_vision_is_described_in_place(tmp_path: Path, make_checkpoint) -> None:
    place = make_checkpoint(tmp_path / "text", 1, hidden_size=24, num_attention_heads=2, num_key_value_heads=1)
    vision = vision_folder("llava_clip", place / "vision")
    (vision / "tokenizer.json").unlink()
    directory = describe_in_place(place)
    assert directory.vision is not None
    assert directory.limits.image_rows == (16,)
    with pytest.raises(BuildError, match="the limits have no vision engines"):
        describe_in_place(place, EngineLimits(1, 16, 64))
    shutil.rmtree(vision)
    with pytest.raises(EngineDirectoryError, match=r"vision/.*missing"):
        EngineDirectory.open(place)
    assert describe_in_place(place).vision is None


def test_without_vision_engines_a_multimodal_checkpoint_is_a_language_model(tmp_path: Path) -> None:
    place = golden_checkpoint("qwen2_5_vl", tmp_path / "checkpoint")
    directory = describe_in_place(place, EngineLimits(1, 16, 64))
    assert directory.vision is None
    assert "vision" not in json.loads((place / "edgellm.json").read_text())
    with pytest.raises(EngineDirectoryError, match=r"no vision encoder.*--vision"):
        directory.model_config("vision")


def test_default_limits_have_engines_for_a_megapixel() -> None:
    rows = choose_image_rows(golden_config("qwen3_vl"))
    assert rows[-1] == 4096
    assert list(rows) == sorted(set(rows))
    assert max(larger / smaller for smaller, larger in pairwise(rows)) <= 2
    assert max(larger / smaller for smaller, larger in pairwise(rows[2:])) <= 4 / 3
    windowed = golden_config("qwen2_5_vl_old_layout")
    rows = choose_image_rows(windowed, 1000)
    assert all(size % windowed.window_patches == 0 for size in rows)
    assert 1000 < rows[-1] < 1500
    assert choose_image_rows(golden_config("llava_clip")) == (16,)
    assert choose_image_rows(windowed, 0) == choose_image_rows(golden_config("llava_clip"), 0) == ()
    assert choose_image_rows(None) == ()


@pytest.mark.parametrize("patches", [4, 100, 1000, 4096])
def test_every_image_of_so_many_patches_fits(patches: int) -> None:
    config = golden_config("qwen2_5_vl")
    rows = config.rows_for_patches(patches)
    assert config.patches_within(rows) >= patches
    assert config.rows_for_patches(config.patches_within(rows)) <= rows
    for height in range(2, patches + 1, 2):
        width = patches // height // 2 * 2
        if width and max(height, width) <= 4 * min(height, width):
            assert window_rows((1, height, width), 2, config.window_merged_side) <= rows
    assert golden_config("qwen3_vl").rows_for_patches(patches) == patches
    assert golden_config("qwen3_vl").patches_within(patches) == patches


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        (None, 100, "takes no images"),
        ("llava_clip", 100, "every image has 16 patches"),
        ("qwen3_vl", 3, "from 4 to 65536"),
        ("qwen2_5_vl", 10**6, "from 16 to 65536"),
    ],
)
def test_image_patches_that_cannot_be(name: str | None, asked: int, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        choose_image_rows(golden_config(name) if name else None, asked)


@pytest.mark.parametrize("rows", [(64, 32), (30,), (0, 64), (64, 64)])
def test_rows_that_do_not_suit_the_encoder(rows: tuple[int, ...], tmp_path: Path) -> None:
    place = golden_checkpoint("qwen2_5_vl", tmp_path / "checkpoint")
    with pytest.raises(BuildError, match="image_rows are"):
        describe_in_place(place, replace(LIMITS, image_rows=rows))


def test_vision_of_another_model(tmp_path: Path, make_checkpoint) -> None:
    vision = vision_folder("llava_clip", tmp_path / "eyes")
    text = make_checkpoint(tmp_path / "text", 1)
    with pytest.raises(CheckpointError, match="embeddings of 24 elements, the language model takes 64"):
        build_engine_directory(text, tmp_path / "engines", targets=[], vision=vision)
    with pytest.raises(CheckpointError, match="is no vision encoder"):
        build_engine_directory(text, tmp_path / "engines", targets=[], vision=text)
    whole = golden_checkpoint("qwen3_vl", tmp_path / "whole")
    with pytest.raises(BuildError, match="has a vision encoder of its own"):
        build_engine_directory(whole, tmp_path / "engines", targets=[], vision=vision)
    (whole / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"preprocessor_config.json is missing"):
        build_engine_directory(whole, tmp_path / "engines", targets=[])
    os.mkfifo(whole / "preprocessor_config.json")
    with pytest.raises(CheckpointError, match=r"preprocessor_config.json cannot be read: it is a pipe"):
        build_engine_directory(whole, tmp_path / "engines", targets=[])
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize("change", ["vision", "limits"])
def test_a_description_that_contradicts_itself(change: str, tmp_path: Path) -> None:
    directory = golden_directory("qwen3_vl", tmp_path / "engines")
    file = directory.path / "edgellm.json"
    values = json.loads(file.read_text())
    if change == "vision":
        del values["vision"]
    else:
        values["limits"]["image_rows"] = []
    file.write_text(json.dumps(values))
    with pytest.raises(EngineDirectoryError, match="'vision' and 'limits' disagree"):
        EngineDirectory.read(directory.path)


def test_the_network_follows_configuration_and_rows() -> None:
    config = golden_config("qwen2_5_vl")
    digests = {
        network_digest(one, vision_shape(rows), "float16", "composed")
        for one in (config, replace(config, full_attention_layers=(2,)), replace(config, intermediate_size=48))
        for rows in (64, 128)
    }
    assert len(digests) == 6
    renamed = replace(config, tensor_prefix="visual.", projector_prefix="visual.")
    assert network_digest(renamed, vision_shape(64), "float16", "composed") in digests


@needs_tensorrt
@pytest.mark.parametrize("plans", [(), pytest.param(("--all-plans",), marks=pytest.mark.slow)])
def test_the_command_builds_and_tells(tmp_path: Path, compiled: list, plans: tuple[str, ...]) -> None:
    checkpoint = golden_checkpoint("qwen2_5_vl", tmp_path / "checkpoint")
    target = tmp_path / "engines"
    arguments = ["--prefill-chunk", "16", "--kv-capacity", "64", "--max-image-patches", "100"]
    arguments += ["--target", "sm_86:46", "--attention", "composed"]
    built = CliRunner().invoke(create_app(), ["build", str(checkpoint), str(target), *arguments, *plans])
    assert built.exit_code == 0, built.output
    assert ("vision.encode-p160" in built.output) == bool(plans)
    told = CliRunner().invoke(create_app(), ["info", str(target)])
    assert told.exit_code == 0, told.output
    assert "qwen2_5_vl" in told.output
    assert f"images of up to {golden_config('qwen2_5_vl').patches_within(160)} patches" in told.output
    facts = json.loads(CliRunner().invoke(create_app(), ["info", str(target), "--json"]).output)
    assert facts["vision"]["config"]["window_size"] == 16
    assert facts["vision"]["parameters"] > 10_000
    assert facts["memory"]["vision weights"] > 0
    (checkpoint / "preprocessor_config.json").unlink()
    blind = [str(checkpoint), str(tmp_path / "blind"), *arguments[:4], "--max-image-patches", "0", *arguments[6:]]
    assert CliRunner().invoke(create_app(), ["build", *blind]).exit_code == 0
    assert EngineDirectory.open(tmp_path / "blind").vision is None
    for plan in [*(target / "plans").rglob("vision.encode-p160.engine")]:
        plan.unlink()
        assert not any(built.seconds for built in refresh_plans(target, ["sm_86"]).plans)  # kernels take what is lost
        report = refresh_plans(target, ["sm_86"], all_plans=True)
        assert plan.exists()
        assert [built.shape.name for built in report.plans if built.seconds] == ["vision.encode-p160"]


@needs_tensorrt
@pytest.mark.slow  # processes build plans of decoders in test_builder_workers.py
def test_another_process_describes_the_same_encoder(tmp_path: Path) -> None:
    directory = golden_directory("llava_siglip", tmp_path / "engines", "float16")
    shapes = [vision_shape(16)]
    (plan,) = build_plans(directory.models, shapes, "float16", "composed", "sm_86", workers=1)
    assert plan.shape == shapes[0]
    assert len(plan.data) > 1000
