"""On a GPU: a directory with kept kernels needs no compiler and no TensorRT, and nothing is compiled after opening."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM, SamplingParams
from edgellm.engines.backends import platform
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.planning import add_targets
from edgellm.engines.building.targets import read_targets
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels import compilations, compiler
from edgellm.kernels.compiler import CompiledModule, ModuleSource
from edgellm.kernels.errors import MissingDependencyError
from edgellm.kernels.gpu import find_gpu
from edgellm.opened_model import SHIPPED_MODEL
from tools.demo_model.describe import describe_in_place

pytestmark = pytest.mark.gpu

#: Chunks of prompts that kernels take: nothing is left for TensorRT.
LIMITS = EngineLimits(max_batch=2, prefill_chunk=16, kv_capacity=256)
ASKED: list[dict[str, Any]] = [
    {},
    {"structure": ["red", "blue"]},
    {"params": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3, repetition_penalty=1.1, max_tokens=24)},
    {"params": SamplingParams(logit_bias={5: 2.0}, max_tokens=8)},
]


def ask_everything(llm: LLM) -> list[list[int]]:
    """Greedy, drawn, with rules and biases: what asks for kernels of every kind."""
    params = {"params": SamplingParams(max_tokens=24)}
    return [llm.generate("The red cup is on the table, and the robot", **(params | each)).token_ids for each in ASKED]


@pytest.fixture
def compiled_now(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that are compiled since."""
    found, compile_one = list[str](), compilations.compiled_now

    def note(source: ModuleSource, architecture: str) -> CompiledModule:
        found.append(source.name)
        return compile_one(source, architecture)

    monkeypatch.setattr(compilations, "compiled_now", note)
    return found


def here(times: int = 1) -> str:
    """This GPU as a target, or one of so many times as many multiprocessors."""
    gpu = find_gpu()
    assert gpu is not None
    return f"{gpu.architecture}:{times * gpu.multiprocessors}"


def refuse(*arguments: Any) -> Any:
    raise MissingDependencyError("it is not installed")


@pytest.mark.parametrize("times", [1, 2])
def test_a_kept_directory_needs_neither_compiler_nor_tensorrt(
    times: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Path(shutil.copytree(checkpoint, tmp_path / "robot"))
    describe_in_place(target, LIMITS)
    add_targets(target, read_targets([here(times)]))
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "find_nvrtc", refuse)
    monkeypatch.setattr(platform, "_search", lambda: (None, "it is not installed"))
    for kv_cache in ("compute", "int8"):
        with LLM(target, backend="tensorrt", kv_cache=kv_cache) as llm:
            assert all(ask_everything(llm))
    assert not (tmp_path / "cache" / "kernels").exists()


def test_a_kept_directory_with_a_draft_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_now: list[str]
) -> None:
    """The shipped model with its draft and adapters, whose long prompts TensorRT computes."""
    target = tmp_path / "robot"
    shipped = EngineDirectory.open(SHIPPED_MODEL)
    limits = replace(shipped.limits, image_rows=())
    adapters = {name: adapter.path for name, adapter in shipped.adapters.items()}
    parts: dict[str, Any] = {"draft": SHIPPED_MODEL / "draft", "adapters": adapters}
    build_engine_directory(SHIPPED_MODEL, target, limits, kernels=read_targets([here()]), **parts)
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path / "cache"))
    with LLM(target, backend="tensorrt", drafting="auto") as llm:
        assert all(ask_everything(llm))
    assert compiled_now == []


def test_nothing_is_compiled_after_opening(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_now: list[str]
) -> None:
    target = Path(shutil.copytree(checkpoint, tmp_path / "robot"))
    describe_in_place(target, LIMITS)
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path / "cache"))
    with LLM(target, backend="tensorrt") as llm:
        llm.generate("a", SamplingParams(max_tokens=1))
        opened = list(compiled_now)
        assert len(opened) > 8
        assert all(ask_everything(llm))
        assert compiled_now == opened
    with LLM(target, backend="tensorrt") as llm:
        assert all(ask_everything(llm))
    assert compiled_now == opened
