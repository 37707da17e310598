"""Drafting on the GPU for prompts with images: the tokens of plain decoding there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_drafting import answers, assert_explained
from mtp_checkpoints import add_head
from tiny_multimodal import FAMILIES, prompt_with_images, tiny_image

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.media import PromptMedia
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import chain, tree

pytestmark = pytest.mark.gpu

LIMITS = EngineLimits(max_batch=2, prefill_chunk=32, kv_capacity=128, draft_top_k=4, draft_steps=4, verify_tree_size=16)
GREEDY, SAMPLED = SamplingValues(), SamplingValues(1.0, 0, 0.9, 0.0, seed=5)
PLANS = [chain(4), tree(4, 4, 16)]


def prompt_of(runner: BaseEngineRunner, index: int) -> tuple[list[int], PromptMedia]:
    """Two prompts: one with two images, one with one."""
    images = [tiny_image(runner.backend, runner.config, grid, seed) for seed, grid in enumerate([(4, 10), (6, 6)])]
    return prompt_with_images(runner.config, images[index:], index, 9)


def images_of(runner: BaseEngineRunner, index: int) -> PromptMedia:
    return prompt_of(runner, index)[1]


@pytest.mark.parametrize(("family", "agreeing"), [("qwen2_5_vl", False), ("qwen3_vl", True)])
def test_drafted_answers_are_those_of_plain_decoding(
    family: str,
    agreeing: bool,
    make_tiny_pair: Callable[..., tuple[Path, Path]],
    open_eagle: Callable[..., Any],
    tmp_path: Path,
) -> None:
    head = {"rope_scaling": FAMILIES[family]["rope_scaling"]}
    base, draft = make_tiny_pair(3, agreeing, head, **FAMILIES[family] | {"tie_word_embeddings": False})
    build_engine_directory(base, tmp_path / "engines", LIMITS, None, dtype="float16", draft=draft)
    assert_drafted_is_plain(EngineDirectory.open(tmp_path / "engines"), open_eagle, f"{family}, agreeing {agreeing}")


@pytest.mark.parametrize("agreeing", [False, True])
def test_a_head_in_the_checkpoint_drafts_over_recurrent_layers(
    agreeing: bool, make_checkpoint: Callable[..., Path], open_eagle: Callable[..., Any], tmp_path: Path
) -> None:
    base = make_checkpoint(tmp_path / "base", **FAMILIES["qwen3_5"] | {"tie_word_embeddings": False})
    build_engine_directory(add_head(base, agreeing), tmp_path / "engines", LIMITS, None, dtype="float16")
    directory = EngineDirectory.open(tmp_path / "engines")
    assert directory.draft is not None and directory.draft.config.generation == "mtp"
    assert_drafted_is_plain(directory, open_eagle, f"qwen3_5, agreeing {agreeing}")


def assert_drafted_is_plain(directory: EngineDirectory, open_eagle: Callable[..., Any], what: str) -> None:
    """Two prompts, by chains and trees, greedy and drawn."""
    different = 0
    with open_eagle(directory, "tensorrt") as runner:
        prompts = [prompt_of(runner.base, index)[0] for index in range(2)]
        for samplings in ([GREEDY, GREEDY], [SAMPLED, GREEDY]):
            plain = answers(runner, prompts, samplings, None, images=images_of)
            for plan in PLANS:
                found = answers(runner, prompts, samplings, plan, images=images_of)
                named = f"{what} {plan.name}"
                different += assert_explained(directory, prompts, samplings, plain, found, named, images_of)
    print(f"\n{what}: {different} of 8 answers differ within rounding")
    assert different <= 1
