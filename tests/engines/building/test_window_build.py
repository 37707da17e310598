"""Directories of models that attend within windows: built for real, their kernels compiled; rows, memory, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from absent_gpu import TARGET, Module, prepare
from kernel_refusals import kernel_refusal
from published_families import GEMMA_3_1B, LLAMA_2_7B, MISTRAL_7B
from tiny_families import WINDOWED

from edgellm.engines.backends.executors import SHARED_MEMORY, Executors, planned_shapes
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.checks import choose_limits
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, EngineDirectoryError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import WINDOW_STEP, EngineLimits
from edgellm.engines.model.memory_plan import MEBIBYTE, plan_memory
from edgellm.kernels.compiler import compile_module
from edgellm.kernels.decode import tiled_linear
from edgellm.kernels.prefill.contract import RING_STEP


@pytest.mark.parametrize("kv_cache", ["compute", "int8"])
@pytest.mark.parametrize("family", WINDOWED)
def test_a_directory_is_built_and_its_kernels_compile(
    family: str, kv_cache: str, make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx")
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(tiled_linear, "tensor_map", lambda *arguments: tiled_linear._Map())
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **WINDOWED[family])
    limits = EngineLimits(2, prefill_chunk=80, kv_capacity=512, kv_cache=kv_cache, window_rows=192)
    report = build_engine_directory(
        checkpoint, tmp_path / "engines", limits, [TARGET], dtype="bfloat16", all_plans=True
    )
    directory = EngineDirectory.open(tmp_path / "engines", verify=True)
    assert planned_shapes(directory.models, limits, directory.dtype, TARGET) == []
    planned = planned_shapes(directory.models, limits, directory.dtype, TARGET, needless=True)
    assert {plan.shape for plan in report.plans} == set(planned)
    sizes = set() if family == "gemma4" else {80}  # TensorRT has nothing for its layers
    assert {shape.tokens for shape in planned} >= sizes and all(shape.segment for shape in planned)
    assert planned or not sizes
    module = Module()
    for shape in limits.engine_shapes():
        prepare(module, directory.config, shape, "bfloat16")
    windowed = [source for source in module.sources if ("HOST_WINDOW", 1) in source.macros]
    assert len({source.files for source in windowed}) == 2  # of decode steps, and of prompts
    for source in windowed:
        assert b".entry " in compile_module(source, TARGET.replace("sm", "compute")).code


def test_rows_are_chosen_where_nobody_says_how_many(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """As many as hold all of a short context; none where no window is shorter than it."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **WINDOWED["mistral"])
    for capacity, rows in ((70, 0), (96, 128), (900, 448)):
        limits = EngineLimits(2, prefill_chunk=16, kv_capacity=capacity)
        build_engine_directory(checkpoint, tmp_path / f"{capacity}", limits, [])
        assert EngineDirectory.open(tmp_path / f"{capacity}").limits.window_rows == rows


@pytest.mark.parametrize(
    ("published", "chunk", "windows", "others", "whole"),
    [
        (GEMMA_3_1B, None, 60.5, 129.5, 841.75),
        (GEMMA_3_1B, 512, 27.5, 129.5, 841.75),
        (MISTRAL_7B, 512, 608.0, 0.0, 4144.0),
    ],
)
def test_memory_at_a_context_of_32768(
    published: dict[str, Any], chunk: int | None, windows: float, others: float, whole: float
) -> None:
    """MiB of rows in bfloat16: of windows, of layers that see all; and of all layers if they did."""
    config = decoder_config(published)
    limits = choose_limits(config, kv_capacity=32768, prefill_chunk=chunk)
    everywhere = replace(config, layer_kinds=(), sliding_window=None)
    found, full = (
        plan_memory(each, own, decoder_weights(each), "bfloat16").items
        for each, own in ((config, limits), (everywhere, replace(limits, window_rows=0)))
    )
    assert found["KV rows of windows"] / MEBIBYTE == windows
    assert found["KV caches"] / MEBIBYTE == others
    assert full["KV caches"] / MEBIBYTE == whole and "KV rows of windows" not in full


def test_float16_is_refused_for_gemma_3(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **WINDOWED["gemma3"])
    for dtype in ("float16", None):  # the tiny tensors are float16
        with pytest.raises(BuildError, match="values of gemma3_text go beyond the range of float16: take --dtype"):
            build_engine_directory(checkpoint, tmp_path / "engines", None, [], dtype=dtype)


def test_a_window_below_every_context_is_what_is_wrong() -> None:
    with pytest.raises(BuildError, match=r"^config.json has sliding_window, .* Up to 8 tokens .* least context is 16"):
        choose_limits(decoder_config(LLAMA_2_7B | {"sliding_window": 8}))


def test_trees_of_wide_heads_run_on_kernels_everywhere() -> None:
    """TensorRT has no rings to run them whole."""
    config = decoder_config(GEMMA_3_1B)
    limits = choose_limits(config, kv_capacity=8192, has_draft=True)
    shape = limits.base_shape("verify", 1, 64, 8192, 64)
    for capability in ("sm_86", "sm_90"):  # those with the least and the most shared memory
        assert kernel_refusal(config, shape, "bfloat16", SHARED_MEMORY[capability]) is None
        alone = replace(limits, draft_top_k=0, draft_steps=0, verify_tree_size=0)
        assert planned_shapes({"base": config}, alone, "bfloat16", capability) == []
        planned = planned_shapes({"base": config}, alone, "bfloat16", capability, needless=True)
        assert planned and all(each.segment for each in planned)
    wide = Executors({"base": config}, limits, "float32", SHARED_MEMORY["sm_90"])
    assert "TensorRT has nothing for attention within a window" in str(wide.problem(shape))


def test_kernels_refuse_rings_of_parts_of_tiles() -> None:
    config = decoder_config(MISTRAL_7B)
    limits = choose_limits(config, kv_capacity=32768)
    assert WINDOW_STEP == RING_STEP
    for rows, words in ((limits.window_rows, None), (limits.window_rows + 8, "rings of windows have a multiple of 64")):
        shape = replace(limits.base_shape("decode", 1, 1, 32768), window_rows=rows)
        refusal = kernel_refusal(config, shape, "float16", SHARED_MEMORY["sm_90"])
        assert refusal is None if words is None else words in str(refusal)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("limits", {"window_rows": 64}, "'window_rows': it is 64, expected at least 134: a window of 70"),
        ("limits", {"window_rows": 0}, "'window_rows' is 0, expected a whole number from 1"),
        ("limits", {"window_rows": -64}, "'window_rows' is -64, expected a whole number"),
        ("limits", {"window_rows": "all"}, "'window_rows' is \"all\", expected a whole number"),
        ("config", {"sliding_window": 0}, "'sliding_window'"),
        ("config", {"sliding_window": None}, "'window_rows': it is 320, expected 0: no window is shorter"),
        ("config", {"layer_kinds": ["window"]}, "'layer_kinds' is .*, expected .*3"),
        ("config", {"layer_kinds": ["window", "window", "wall"]}, "'layer_kinds' is"),
        ("config", {"local_rope_theta": "x"}, "'local_rope_theta' is \"x\", expected a number or null"),
    ],
    ids=str,
)
def test_damaged_descriptions_are_refused(
    part: str, change: dict[str, Any], message: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **WINDOWED["mistral"])
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 16, 300), [])
    path = tmp_path / "engines" / "edgellm.json"
    described = json.loads(path.read_text())
    described[part] |= change
    path.write_text(json.dumps(described))
    with pytest.raises(EngineDirectoryError, match=message):
        EngineDirectory.open(tmp_path / "engines")
