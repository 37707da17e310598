"""Gemma 3 with images: `config.json`, both layouts of its tensors, builds for GPUs, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from absent_gpu import TARGET, Module, prepare
from golden_images import FOLDER
from golden_vision import golden_checkpoint
from published_families import GEMMA_3_4B
from tiny_multimodal import WHOLE_IMAGES

from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.tensorrt_operations import build_plan
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.checks import choose_limits
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, CheckpointError, EngineDirectoryError, UnsupportedModelError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.programs import model_program
from edgellm.engines.families.vision_config import read_vision, read_vision_config
from edgellm.engines.families.vision_encoders import vision_weights
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits, vision_shape
from edgellm.kernels.compiler import compile_module
from edgellm.kernels.decode import tiled_linear


def name_of(value: object) -> str:
    """How a parameter is called: a text is itself, a folder its name; of others nothing."""
    return value.name if isinstance(value, Path) else value if isinstance(value, str) else ""


def changed(part: str | None = None, **changes: Any) -> dict[str, Any]:
    """The published configuration with other fields."""
    return GEMMA_3_4B | (changes if part is None else {part: GEMMA_3_4B[part] | changes})


def rename(file: Path, old: str, new: str) -> None:
    """Call tensors of a file otherwise; NumPy has no bfloat16 to write them anew."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = {name.replace(old, new): entry for name, entry in json.loads(content[8:end]).items()}
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[end:])


def test_published_sizes() -> None:
    """The parameters are those of the published model, 4,300,079,472."""
    config, vision = decoder_config(GEMMA_3_4B), read_vision_config(GEMMA_3_4B)
    assert vision is not None
    specs = [*decoder_weights(config), *vision_weights(vision)]
    assert sum(math.prod(spec.shape) for spec in specs) == 4_300_079_472
    assert (config.family, config.image_token_id, config.image_tokens, config.window) == ("gemma3", 262144, 256, 1024)
    assert (config.embedding_scale, config.post_norms, config.eos_token_ids) == (2560**0.5, True, (1, 106))
    assert (vision.image_side, vision.spatial_merge_size, vision.token_count((1, 64, 64))) == (64, 4, 256)
    assert (vision.vision_start_token_id, vision.vision_end_token_id, vision.activation) == (
        255999,
        256000,
        "gelu_tanh",
    )


def test_what_the_file_leaves_out_is_that_of_the_class() -> None:
    usual = ("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image")
    short = {key: value for key, value in GEMMA_3_4B.items() if key not in usual}
    assert decoder_config(short) == decoder_config(GEMMA_3_4B)
    assert read_vision_config(short) == read_vision_config(GEMMA_3_4B)
    text = {key: value for key, value in GEMMA_3_4B["text_config"].items() if key != "hidden_size"}
    assert decoder_config(changed() | {"text_config": text}).hidden_size == 2304
    assert read_vision_config(changed() | {"text_config": text}).out_hidden_size == 2304


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (changed(mm_tokens_per_image=255), CheckpointError, "mm_tokens_per_image is 255, expected the square of"),
        (changed(mm_tokens_per_image=9), CheckpointError, "that divides 64, the patches along"),
        (changed(mm_tokens_per_image=0), CheckpointError, "mm_tokens_per_image is 0, expected a whole number from 1"),
        (changed(image_token_index="x"), CheckpointError, 'image_token_index is "x", expected a token id'),
        (changed(boi_token_index=-1), CheckpointError, "boi_token_index is -1, expected a token id"),
        (changed("vision_config", image_size=897, patch_size=13), CheckpointError, "divides 69, the patches along"),
        (changed("vision_config", model_type="clip_vision_model"), UnsupportedModelError, "supported is siglip_vision"),
        (changed("vision_config", num_attention_heads=7), CheckpointError, "1152 is not a multiple of"),
    ],
    ids=name_of,
)
def test_wrong_fields_are_refused(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_vision_config(config)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (changed(image_token_index=262208), CheckpointError, "image_token_index is 262208, expected a token id from 0"),
        (changed("text_config", model_type="gemma2"), UnsupportedModelError, 'model_type is "gemma2", supported are'),
        (
            changed("text_config", final_logit_softcapping=30.0),
            UnsupportedModelError,
            "final_logit_softcapping is 30.0",
        ),
        (changed(mm_tokens_per_image=[]), CheckpointError, r"mm_tokens_per_image is \[\], expected a whole number"),
    ],
    ids=name_of,
)
def test_other_language_models_are_refused(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decoder_config(config)


@pytest.mark.parametrize(
    ("folder", "tower", "projector"),
    [
        (FOLDER / "gemma3_window_6", "vision_tower.", "multi_modal_projector."),
        (FOLDER / "gemma3_window_24", "model.vision_tower.", "model.multi_modal_projector."),
        ("gemma3_window_6", "vision_tower.vision_model.", "multi_modal_projector."),
        ("gemma3_window_24", "model.vision_tower.vision_model.", "model.multi_modal_projector."),
    ],
    ids=name_of,
)
def test_names_of_older_and_newer_layouts(folder: Path | str, tower: str, projector: str, tmp_path: Path) -> None:
    """The first of the shorter names is how the model was published."""
    if isinstance(folder, str):
        folder = shutil.copytree(FOLDER / folder, tmp_path / "model")
        rename(folder / "model.safetensors", "vision_tower.", "vision_tower.vision_model.")
    with Checkpoint.open(folder) as checkpoint:
        vision = read_vision(checkpoint)
        checkpoint.check(decoder_weights(decoder_config(checkpoint.config)))
    assert vision is not None and (vision.tensor_prefix, vision.projector_prefix) == (tower, projector)


@pytest.mark.parametrize("missing", ["mm_input_projection_weight", "mm_soft_emb_norm.weight", "post_layernorm.weight"])
def test_half_a_projector_is_refused_by_name(missing: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / "gemma3_window_6", tmp_path / "model")
    rename(folder / "model.safetensors", missing, "linear_1.weight")
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError) as error:
        read_vision(checkpoint)
    assert "2 differences" in str(error.value)
    assert re.search(rf"missing: \S*{missing} \[16", str(error.value))
    assert re.search(r"unknown: \S*\.linear_1.weight \[16", str(error.value))


def test_float16_is_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **WHOLE_IMAGES["gemma3"])
    for dtype in ("float16", None):  # the tiny tensors are float16
        with pytest.raises(BuildError, match="values of gemma3 go beyond the range of float16: take --dtype bfloat16"):
            build_engine_directory(checkpoint, tmp_path / "engines", None, [], dtype=dtype)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("config", {"image_tokens": 9}, "an image has 16 tokens, but 'image_tokens' of the model is 9"),
        ("config", {"image_tokens": -1}, "'image_tokens' is -1, expected a whole number"),
        ("vision", {"spatial_merge_size": 3}, "'spatial_merge_size' is 3, expected a divisor of the image's side, 8"),
        ("vision", {"image_size": None}, "'image_size' is None, but a vision encoder of gemma3 has one"),
    ],
    ids=str,
)
def test_damaged_descriptions_are_refused(
    part: str, change: dict[str, Any], message: str, multimodal_engines: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(multimodal_engines("gemma3"), tmp_path / "engines")
    described = json.loads((folder / "edgellm.json").read_text())
    (described["config"] if part == "config" else described["vision"]["config"]).update(change)
    (folder / "edgellm.json").write_text(json.dumps(described))
    with pytest.raises(EngineDirectoryError, match=message):
        EngineDirectory.open(folder)


@pytest.mark.parametrize("kv_cache", ["compute", "int8"])
def test_a_directory_is_built_and_its_kernels_compile(
    kv_cache: str, make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a plan: kernels run decoder and encoder, and compile for the target."""
    pytest.importorskip("tensorrt_rtx")
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(tiled_linear, "tensor_map", lambda *arguments: tiled_linear._Map())
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **WHOLE_IMAGES["gemma3"])
    limits = EngineLimits(2, prefill_chunk=80, kv_capacity=512, kv_cache=kv_cache, window_rows=192, image_rows=(64,))
    report = build_engine_directory(checkpoint, tmp_path / "engines", limits, [TARGET], dtype="bfloat16")
    directory = EngineDirectory.open(tmp_path / "engines", verify=True)
    needed = planned_shapes(directory.models, limits, directory.dtype, TARGET)
    assert needed == [] and not report.plans
    module = Module()
    for shape in limits.engine_shapes():
        if shape.model == "base":
            prepare(module, directory.config, shape, "bfloat16")
    ahead = [source for source in module.sources if ("HOST_AHEAD", 1) in source.macros]
    assert len(ahead) == 2 and {dict(source.macros)["HOST_WINDOW"] for source in ahead} == {0, 1}
    for source in ahead:
        assert b".entry " in compile_module(source, TARGET.replace("sm", "compute")).code


def test_which_plans_the_published_model_needs() -> None:
    """None, but its encoder's where TensorRT runs it; an image of 256 tokens is in chunks of 512 and more."""
    config, vision = decoder_config(GEMMA_3_4B), read_vision_config(GEMMA_3_4B)
    assert vision is not None
    limits = choose_limits(config, vision=vision, kv_capacity=8192)
    models = {"base": config, "vision": vision}
    assert planned_shapes(models, limits, "bfloat16", TARGET) == []
    every = planned_shapes(models, limits, "bfloat16", TARGET, needless=True)
    assert [shape.name for shape in every if shape.model == "vision"] == ["vision.encode-p4096"]
    ahead = {
        shape.tokens: model_program(config, shape).attentions[0].looks_ahead
        for shape in limits.engine_shapes()
        if shape.phase == "prefill"
    }
    assert ahead == {16: False, 128: False, 512: True, 2048: True}


@pytest.mark.slow
def test_the_published_encoder_is_built_for_a_gpu() -> None:
    pytest.importorskip("tensorrt_rtx")
    assert len(build_plan(read_vision_config(GEMMA_3_4B), vision_shape(4096), "bfloat16", target=TARGET)) > 1 << 20


def test_a_golden_model_is_built_for_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    checkpoint = golden_checkpoint("gemma3_window_24", tmp_path / "checkpoint", FOLDER)
    limits = EngineLimits(1, prefill_chunk=128, kv_capacity=128, image_rows=(36,), window_rows=192)
    report = build_engine_directory(checkpoint, tmp_path / "engines", limits, [TARGET], all_plans=True)
    names = {plan.shape.name for plan in report.plans}
    assert "vision.encode-p36" in names
    assert EngineDirectory.open(tmp_path / "engines").dtype == "bfloat16"
