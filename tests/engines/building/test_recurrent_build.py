"""Directories of models with recurrent layers: built for real, with plans of segments, and every kernel compiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from absent_gpu import TARGET, Module, prepare
from mtp_checkpoints import add_head
from tiny_families import RECURRENT
from tiny_multimodal import FAMILIES

from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.needed_kernels import planned_engines
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels.compiler import compile_module
from edgellm.kernels.decode import tiled_linear

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("cuda.bindings.nvrtc")


@pytest.mark.parametrize("family", RECURRENT)
def test_a_directory_is_built_and_its_kernels_compile(
    family: str, make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled_linear, "tensor_map", lambda *arguments: tiled_linear._Map())
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **RECURRENT[family])
    limits = EngineLimits(max_batch=2, prefill_chunk=80, kv_capacity=128)
    report = build_engine_directory(checkpoint, tmp_path / "engines", limits, [TARGET], dtype="float16", all_plans=True)
    directory = EngineDirectory.open(tmp_path / "engines", verify=True)
    assert planned_shapes(directory.models, limits, directory.dtype, TARGET) == []
    planned = planned_shapes(directory.models, limits, directory.dtype, TARGET, needless=True)
    assert {plan.shape for plan in report.plans} == set(planned)
    assert {shape.tokens for shape in planned} == {80} and all(shape.segment for shape in planned)
    assert planned_engines(directory.models, limits, "float16", {})["engine scratch"] > 0
    module = Module()
    for shape in limits.engine_shapes():
        prepare(module, directory.config, shape)
    sources = [source for source in module.sources if source.name.startswith("recurrent_")]
    files = {file for source in sources for file in source.files}
    assert "recurrent/convolution.cu" in files
    has_matrices = family in ("qwen3_5", "granite4_hybrid", "nemotron_h")
    assert ("recurrent/delta.cu" in files) == ("recurrent/gates.cu" in files) == has_matrices
    for source in sources:
        assert b".entry " in compile_module(source, TARGET.replace("sm", "compute")).code


def test_a_directory_with_encoder_and_head_is_built(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Qwen3.5 as it is published: of base, head and encoder kernels leave nothing over."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **FAMILIES["qwen3_5"] | {"tie_word_embeddings": False})
    limits = EngineLimits(1, 80, 128, draft_top_k=4, draft_steps=3, verify_tree_size=12, image_rows=(64, 128))
    report = build_engine_directory(add_head(checkpoint), tmp_path / "engines", limits, [TARGET], dtype="float16")
    directory = EngineDirectory.open(tmp_path / "engines", verify=True)
    assert directory.vision is not None and directory.draft is not None and not report.notes
    assert (directory.vision.config.family, directory.vision.config.deepstack_layers) == ("qwen3_5", ())
    assert directory.draft.config.generation == "mtp" and directory.draft.config.image_embeddings
    assert directory.config.mrope_section == directory.draft.config.decoder.mrope_section == (2, 1, 1)
    assert not report.plans
    models, found = directory.models, planned_shapes(directory.models, limits, directory.dtype, TARGET, needless=True)
    assert {shape.name for shape in found if shape.model == "vision"} == {"vision.encode-p64", "vision.encode-p128"}
    assert planned_shapes(models, limits, directory.dtype, TARGET) == []
