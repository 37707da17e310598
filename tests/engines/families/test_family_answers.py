"""Families as they are served: greedy text as of transformers, trees, batches, drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from golden_answers import (
    ANSWER,
    answer,
    assert_a_batch_gives_what_each_does_alone,
    assert_trees_give_what_plain_decoding_does,
    expected,
    make_runner,
)
from packed_checkpoints import write_packed
from tiny_families import FAMILIES, WINDOWED

from edgellm import LLM, Request, SamplingParams
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineDirectoryError
from edgellm.engines.model.limits import EngineLimits

DRAFTING = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False)
TEXTS = ("hello", "why is the sky blue, and what else is there to say of it?", "1 + 1")


FIRST, OTHERS = ("olmo2", "starcoder2"), ("olmo3", "exaone4", "granite4", "minicpm", "ernie4_5", "hunyuan")
WINDOWS = (
    "cwm_window_5",
    "gemma2",
    "gemma3",
    "gemma3_old_layout",
    "gemma4",
    "gemma4_plain",
    "gemma4_unified",
    "mistral_window_5",
    "phi3_window_7",
    "qwen2_window_7",
)
EXPERTS = ("qwen3_moe", "olmoe", "granitemoe", "lfm2_moe", "gpt_oss", "gemma4_moe", "qwen3_5_moe_text")
#: Hybrids with mixtures.
MIXED = ("granite4_moe", "nemotron_h_moe")
#: The first with KV rows of both kinds.
ROWS = pytest.mark.parametrize(
    ("family", "kv_cache"), [*product(FIRST, ("compute", "int8")), *product((*OTHERS, "gemma4"), ("int8",))]
)


@pytest.mark.parametrize("name", ["phi3_longrope_short", "phi3_longrope_long"])
def test_factors_follow_the_context_that_is_built_for(name: str) -> None:
    """400 tokens are within the trained length of the one, and beyond that of the other, whose texts all are, too."""
    prompt, tokens = expected(name)
    runner = make_runner(name)
    assert answer(runner, prompt, ANSWER) == tokens
    runner.close()


@pytest.mark.parametrize("family", [*FIRST, *OTHERS, *WINDOWS, *EXPERTS, *MIXED, "nemotron_h_latent"])
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    prompt, tokens = expected(family)
    assert len(tokens) == ANSWER
    runner = make_runner(family)
    assert answer(runner, prompt, ANSWER) == tokens
    runner.close()


@pytest.mark.parametrize(
    ("family", "kv_cache"),
    [
        *product(("olmo2", "gemma3", "gemma4"), ("compute", "int8")),
        *product(EXPERTS[-3:], ("compute",)),
        *product(MIXED, ("int8",)),
    ]
    + [*product(("starcoder2", "olmo3", "granite4", "hunyuan", "mistral_window_5", "phi3_window_7"), ("int8",))],
)
def test_trees_give_the_tokens_of_plain_decoding(family: str, kv_cache: str) -> None:
    """Of those with windows wider and deeper than these, around a ring."""
    runner = make_runner(family, kv_cache)
    assert_trees_give_what_plain_decoding_does(runner)
    runner.close()


@pytest.mark.parametrize(
    ("family", "kv_cache"),
    [
        ("olmo2", "int8"),
        ("starcoder2", "compute"),
        ("gemma3", "compute"),
        ("gemma4", "int8"),
        *product(EXPERTS[-3:], ("int8",)),
        *product(MIXED, ("int8",)),
    ],
)
def test_sequences_of_different_lengths_in_one_batch(family: str, kv_cache: str) -> None:
    runner = make_runner(family, kv_cache, slots=3)
    assert_a_batch_gives_what_each_does_alone(runner)
    runner.close()


@pytest.fixture
def directories(
    make_checkpoint: Callable[..., Path], make_draft: Callable[..., Path], tmp_path: Path
) -> Callable[..., list[Path]]:
    """(family, builder's `targets`) to a packed model with a packed draft, and the dense twins of both, without plans
    or with those of this GPU."""

    def build(family: str, targets: list[str] | None) -> list[Path]:
        models = write_packed(
            make_checkpoint(tmp_path / "model", 4, **(FAMILIES | WINDOWED)[family]),
            tmp_path / "packed",
            tmp_path / "twin",
            None,
        )
        drafts = write_packed(make_draft(tmp_path / "draft"), tmp_path / "packed_draft", tmp_path / "twin_draft", None)
        limits, found = EngineLimits(3, 64, 256, 4, 3, 12), []
        for model, draft in zip(models, drafts, strict=True):
            found.append(tmp_path / f"{model.name}_engines")
            dtype = "bfloat16" if family == "gemma4" else "float16"
            build_engine_directory(model, found[-1], limits, targets, dtype, draft=draft)
        return found

    return build


def answers(directory: Path, backend: str, drafting: DraftingConfig | None, kv_cache: str) -> list[tuple[int, ...]]:
    """A batch of three, greedy and drawn."""
    with LLM(directory, backend=backend, drafting=drafting, kv_cache=kv_cache) as llm:
        asked = []
        for number, text in enumerate(TEXTS):
            params = SamplingParams(
                temperature=0.9 * (number % 2), top_k=20, seed=number, max_tokens=24, ignore_eos=True
            )
            asked.append(Request(llm.tokenizer.encode_chat([{"role": "user", "content": text}]), None, params))
        return [response.token_ids for response in llm.handle(asked)]


@pytest.mark.parametrize("backend", ["numpy", pytest.param("tensorrt", marks=pytest.mark.gpu)])
@ROWS
def test_packed_and_drafted_answers_are_those_of_the_dense_twin(
    directories: Callable[..., list[Path]], family: str, backend: str, kv_cache: str
) -> None:
    packed, twin = directories(family, [] if backend == "numpy" else None)
    plain = answers(twin, backend, None, kv_cache)
    assert len(set(plain)) == len(plain)
    for directory, drafting in ((twin, DRAFTING), (packed, None), (packed, DRAFTING)):
        assert answers(directory, backend, drafting, kv_cache) == plain


@pytest.mark.parametrize(
    ("family", "key", "problem"),
    [
        ("olmo2", "attention_gate", "'joint_qk_norm' is True, expected false where gates stand"),
        ("starcoder2", "qk_norm", "'layer_norms' is True, expected false where heads are normed"),
    ],
)
def test_descriptions_of_what_no_family_has_are_refused(
    family: str, key: str, problem: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", **FAMILIES[family])
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 16, 96), [])
    path = tmp_path / "engines" / "edgellm.json"
    described = json.loads(path.read_text())
    described["config"][key] = True
    path.write_text(json.dumps(described))
    with pytest.raises(EngineDirectoryError, match=problem):
        EngineDirectory.open(tmp_path / "engines")
