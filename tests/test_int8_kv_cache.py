"""A KV cache of 8 bits from the outside: where it is asked for, what it takes, and that answers stay what they were."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kernel_refusals import kernel_refusal

from edgellm import Request, SamplingParams
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.executors import Executors, planned_shapes
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.checks import check_limits
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, EngineDirectoryError
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import open_runner, teacher_forced_logits
from edgellm.llm import LLM
from edgellm.opened_model import SHIPPED_MODEL

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, top_p=0.9, seed=5)
QUESTIONS = ["What is a robot?", "Name three colours of the rainbow, please.", "The red cup stands", "Count to ten."]
shipped = pytest.mark.skipif(not (SHIPPED_MODEL / "draft").exists(), reason="the shipped model has no draft head")


@pytest.fixture(scope="module")
def int8_engines(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("engines") / "int8"
    build_engine_directory(tiny_checkpoint, target, EngineLimits(2, 16, 96, kv_cache="int8"), [])
    return target


@shipped
def test_drafts_batches_and_adapters_change_no_answer() -> None:
    """Each answer alone and plain, against all of them at once, drafted, half of them by an adapter."""
    name = next(iter(EngineDirectory.read(SHIPPED_MODEL).adapters))
    requests = [
        Request(question, None, params, adapter=adapter)
        for question in QUESTIONS[:1]
        for params in (PARAMS, SAMPLED)
        for adapter in (None, name)
    ]
    with LLM(backend="numpy", kv_cache="int8", drafting=None) as llm:
        alone = [llm.handle([request])[0].token_ids for request in requests]
    with LLM(backend="numpy", kv_cache="int8", drafting=DraftingConfig(10, 5, 32)) as llm:
        drafted = llm.handle(requests)
    assert [response.token_ids for response in drafted] == alone
    assert sum(response.drafting.accepted_tokens for response in drafted) > 0


@shipped
def test_logits_are_close_to_those_without_it_and_the_same_however_a_prompt_is_cut() -> None:
    directory = EngineDirectory.open(SHIPPED_MODEL)
    prompt, answer = [(37 * index) % 900 + 20 for index in range(50)], [5, 77, 300, 21, 8, 90]
    logits = {}
    for kind in ("compute", "int8"):
        with open_runner("numpy", directory.with_kv_cache(kind)) as runner:
            logits[kind] = teacher_forced_logits(runner, prompt, answer)
            again = teacher_forced_logits(runner, [*prompt, *answer[:3]], answer[3:])
        if kind == "int8":  # decode steps and prefill chunks write the same rows: computed in float64
            np.testing.assert_allclose(again, logits[kind][3:], atol=1e-5)
    difference = np.abs(logits["int8"] - logits["compute"])
    assert 1e-4 < difference.max() < 0.05 * np.abs(logits["compute"]).max()


def test_a_directory_is_built_for_it_and_opened_otherwise(int8_engines: Path, tiny_engines: Path) -> None:
    assert json.loads((int8_engines / "edgellm.json").read_text())["limits"]["kv_cache"] == "int8"
    assert "kv_cache" not in json.loads((tiny_engines / "edgellm.json").read_text())["limits"]
    for path, built in ((int8_engines, "int8"), (tiny_engines, "compute")):
        for asked in (None, "compute", "int8"):
            with LLM(path, backend="numpy", kv_cache=asked) as llm:
                assert llm.directory.limits.kv_cache == (asked or built)
                dtypes = llm.call(dtypes_of).result()
                assert dtypes == ({"int8", "float32"} if (asked or built) == "int8" else {"float32"})


def dtypes_of(runtime: object) -> set[str]:
    return {str(tensor.dtype) for tensor in runtime._open_runner().base.states.tensors.values()}


def test_the_plan_says_what_the_rows_take(int8_engines: Path) -> None:
    with open_runner("numpy", EngineDirectory.open(int8_engines)) as runner:
        held = sum(tensor.nbytes for tensor in runner.states.tensors.values())
        assert runner.memory_plan.items["KV caches"] == held


def test_wrong_kinds_are_refused(tiny_engines: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineDirectoryError, match="kv_cache is 'int4': expected one of compute, int8, or None"):
        LLM(tiny_engines, backend="numpy", kv_cache="int4")
    limits = EngineLimits(kv_cache="fp8")
    with pytest.raises(BuildError, match="--kv-cache is 'fp8': expected one of compute, int8"):
        check_limits(EngineDirectory.read(tiny_engines).config, limits, beyond_trained_context=True)
    values = json.loads((tiny_engines / "edgellm.json").read_text())
    values["limits"]["kv_cache"] = "q8"
    (tmp_path / "edgellm.json").write_text(json.dumps(values))
    with pytest.raises(EngineDirectoryError, match="'kv_cache' is 'q8', expected one of compute, int8"):
        EngineDirectory.read(tmp_path)


def test_kernels_take_every_step_and_no_plan_is_needed(int8_engines: Path) -> None:
    directory = EngineDirectory.read(int8_engines)
    for shape in directory.limits.engine_shapes():
        choice, reason = kernel_choice(directory.config, shape, "float16", 227 << 10)
        assert choice is not None, reason
    wide = EngineLimits(1, 512, 1024, kv_cache="int8")
    assert planned_shapes(directory.models, wide, "float16", "sm_90") == []
    every = planned_shapes(directory.models, wide, "float16", "sm_90", needless=True)
    assert every and all(shape.segment for shape in every)


def test_heads_that_no_kernel_takes_are_refused_with_the_reason(int8_engines: Path) -> None:
    config = replace(EngineDirectory.read(int8_engines).config, head_dim=24, rotary_dim=24)
    decode = EngineLimits(kv_cache="int8").base_shape("decode", 1, 1, 1024)
    reason = kernel_refusal(config, decode, "float16", 227 << 10)
    assert "KV caches of int8 for head sizes in multiples of 16, not 24" in str(reason)
    plain = replace(decode, kv_cache="compute")
    assert kernel_refusal(config, plain, "float16", 227 << 10) is None
    models = {"base": config}
    assert planned_shapes(models, EngineLimits(kv_cache="int8"), "float16", "sm_90") == []  # nothing that TensorRT has


def test_tensorrt_refuses_a_step_that_only_it_would_run(int8_engines: Path) -> None:
    directory = EngineDirectory.read(int8_engines)
    shape = directory.limits.base_shape("prefill", 1, 16, 96)
    refusal = str(Executors(directory.models, directory.limits, "float32", 227 << 10).problem(shape))
    assert re.search(r"base.prefill.* cannot run .*float16 and bfloat16.* 8 bits. Take --kv-cache compute", refusal)
