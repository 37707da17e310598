"""Mixtures of experts on a GPU: as transformers and NumPy compute them, with one row's bits in every step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from decode_models import MIXED, TREE, Loaded, assert_step_equals_twin, random_model, step_shape
from decode_models import gpu as gpu  # a fixture
from golden_answers import ANSWER, GOLDENS, expected
from mxfp4_checkpoints import write_mxfp4
from packed_checkpoints import write_packed
from rounded_arithmetic import open_rounded_runner
from tiny_families import MIXTURES, PROMPT, TOLERANCES

from edgellm import LLM, Request, SamplingParams
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families import decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import greedy_tokens, open_runner, teacher_forced_logits

pytestmark = pytest.mark.gpu

#: Without states that are committed apart.
STEPS = MIXED.keys() - {"qwen3_5_moe"}
TEXTS = ("hello", "why is the sky blue, and what else is there to say of it?", "1 + 1")
DRAFTING = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False)


@pytest.mark.parametrize("parents", [(None,), TREE], ids=["decode", "tree"])
@pytest.mark.parametrize("family", sorted(STEPS))
def test_a_step_is_the_twins(gpu, family: str, parents: tuple[int | None, ...]) -> None:
    """Of float16: in coarser arithmetic a row may choose another expert, of nearly the same score."""
    assert_step_equals_twin(gpu, MIXED[family], [77], 128, "float16", parents)


@pytest.mark.parametrize("family", sorted(STEPS))
def test_a_sequence_has_the_same_bits_in_every_batch(gpu, family: str) -> None:
    """Alone, and among up to 63 others, that run on other kernels of linear layers."""
    config, rows, starts = MIXED[family], 128, [(37 * number) % 120 for number in range(64)]
    arrays = random_model(config, len(starts), rows, starts)
    inputs = {"inputs_embeds", "rope_rotary_cos_sin", "kvcache_start_index", "attention_mask"}

    def logits(chosen: slice) -> np.ndarray:
        own = {
            name: array[chosen].copy() if name in inputs or "_cache_" in name else array
            for name, array in arrays.items()
        }
        loaded = Loaded(gpu, config, step_shape(own, rows), own, "float16")
        loaded.engine.enqueue()
        return gpu.download(loaded.arrays["logits"])

    together = logits(slice(0, 64))
    for chosen in (slice(0, 1), slice(63, 64), slice(1, 4), slice(4, 21)):
        np.testing.assert_array_equal(logits(chosen), together[chosen])


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "gemma4_moe"])  # of those whose heads kernels take
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """But where NumPy's two likeliest tokens are as close as float16 tells them apart."""
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        config = decoder_config(checkpoint.config, checkpoint.generation_config)
    limits = EngineLimits(1, prefill_chunk=16, kv_capacity=128, window_rows=0 if config.window is None else 128)
    directory = EngineDirectory(GOLDENS / name, config, "float16", "auto", limits, {}, "", name)
    prompt, tokens = expected(name)
    with open_runner("tensorrt", directory) as runner:
        found = greedy_tokens(runner, prompt, ANSWER)
    with open_runner("numpy", directory) as runner:
        logits = teacher_forced_logits(runner, prompt, tokens)
    first = next((n for n, pair in enumerate(zip(found, tokens, strict=True)) if pair[0] != pair[1]), None)
    print(f"\n{name}: {'all' if first is None else first} of {ANSWER} tokens are transformers'")
    if first is not None:
        second, top = np.sort(logits[first])[-2:]
        assert top - second <= 4 * TOLERANCES["float16"] * np.abs(logits).max()


@pytest.mark.parametrize(
    ("family", "dtype"), [pair for pair in product(MIXTURES, TOLERANCES) if pair != ("gemma4_moe", "float16")]
)
def test_logits_agree_with_numpy(family: str, dtype: str, tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    """A prompt of 100 tokens, in chunks of many rows and of few. Most logits are within the dtype's tolerance, or as
    far away as by NumPy's rounded arithmetic: where two experts score alike, rounding may choose the other one, and
    what follows from it is farther away."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **MIXTURES[family])
    limits = EngineLimits(max_batch=2, prefill_chunk=80, kv_capacity=192)
    build_engine_directory(checkpoint, tmp_path / "engines", limits, None, dtype=dtype)
    directory, prompt = EngineDirectory.open(tmp_path / "engines"), (PROMPT * 3)[:100]
    with open_runner("numpy", directory) as runner:
        answer = greedy_tokens(runner, prompt, 24)
        logits = teacher_forced_logits(runner, prompt, answer)
    with open_runner("tensorrt", directory) as runner:
        found = teacher_forced_logits(runner, prompt, answer)
    with open_rounded_runner(directory) as runner:
        rounding = teacher_forced_logits(runner, prompt, answer)
    typical, allowed = (
        np.median(np.abs(values - logits).max(axis=-1) / np.abs(logits).max()) for values in (found, rounding)
    )
    print(f"\n{family} {dtype}: median {typical:.2%}, of rounded arithmetic {allowed:.2%}")
    assert typical <= max(TOLERANCES[dtype], allowed) and np.isfinite(found).all()


def answers(directory: Path, drafting: DraftingConfig | None = None) -> list[tuple[int, ...]]:
    """A batch of three, greedy and drawn, then one of them alone."""
    with LLM(directory, backend="tensorrt", drafting=drafting) as llm:
        asked = []
        for number, text in enumerate(TEXTS):
            params = SamplingParams(temperature=0.9 * (number % 2), seed=number, max_tokens=24, ignore_eos=True)
            asked.append(Request(llm.tokenizer.encode_chat([{"role": "user", "content": text}]), None, params))
        answered = llm.handle(asked)
        errors = [each for each in answered if isinstance(each, Exception)]
        assert not errors
        found = [response.token_ids for response in answered]
        alone = [response.token_ids for response in llm.handle(asked[1:2])]
    assert alone == found[1:2] and len(set(found)) == len(TEXTS)
    return found


@pytest.mark.parametrize("family", sorted(MIXTURES.keys() - {"gpt_oss"}))
def test_packed_and_drafted_answers_are_those_of_the_dense_twin(
    family: str, make_checkpoint: Callable[..., Path], make_draft: Callable[..., Path], tmp_path: Path
) -> None:
    source, draft = make_checkpoint(tmp_path / "model", 4, **MIXTURES[family]), make_draft(tmp_path / "draft")
    limits, found = EngineLimits(3, 128, 256, draft_top_k=4, draft_steps=3, verify_tree_size=12), []
    for model in write_packed(source, tmp_path / "packed", tmp_path / "twin"):
        engines = tmp_path / f"{model.name}_engines"
        dtype = "bfloat16" if family == "gemma4_moe" else "float16"
        build_engine_directory(model, engines, limits, None, dtype, draft=draft)
        found += [answers(engines), answers(engines, DRAFTING)]
    assert found[0] == found[1] == found[2] == found[3]


def test_the_blocks_of_gpt_oss_answer_as_their_dense_twin(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", 4, **MIXTURES["gpt_oss"], dtype="float32", torch_dtype=None)
    found = []
    for model in write_mxfp4(source, tmp_path):
        engines = tmp_path / f"{model.name}_engines"
        build_engine_directory(model, engines, EngineLimits(3, 128, 256), None, "float16")
        found.append(answers(engines))
    assert found[0] == found[1]
