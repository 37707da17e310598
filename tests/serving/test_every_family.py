"""What is served works with every family of text: drafts, int8 rows, rules, adapters, conversations, snapshots."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_families import FAMILIES, MIXTURES, ONE_GROUP, RECURRENT, WINDOWED

from edgellm import LLM, DraftingConfig, Request, SamplingParams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits

TREE = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.9, top_k=20, seed=3)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", 7]}}, "additionalProperties": False, "required": ["a"]}
SYSTEM = "You are a robot at a table with red cups. "
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where?"}]
UNTIED = {"tie_word_embeddings": False}  # else with scaled embeddings each token is followed by itself
EVERY = FAMILIES | WINDOWED | RECURRENT | MIXTURES | ONE_GROUP
#: Those whose layers differ most from others'; the rest are like them, or are served in tests of their own.
FAST = {"gpt_oss", "granite4"}


@pytest.mark.parametrize(
    "family", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in EVERY]
)
def test_what_is_served_is_the_same_however_it_is(
    family: str,
    make_checkpoint: Callable[..., Path],
    make_adapter: Callable[..., Path],
    tiny_draft: Path,
    tmp_path: Path,
) -> None:
    """Drafted, and behind a snapshot, answers are those of a model without either."""
    checkpoint, limits = (
        make_checkpoint(tmp_path / "checkpoint", **EVERY[family] | UNTIED),
        EngineLimits(2, 16, 192, 4, 3, 12),
    )
    limits = replace(limits, max_lora_rank=4, lora_slots=1)
    engines = tmp_path / "engines"
    build_engine_directory(checkpoint, engines, limits, [], "bfloat16", draft=tiny_draft)
    adapter = make_adapter(tmp_path / "own", EngineDirectory.open(engines).models["base"])

    def said(llm: LLM) -> list[list[int]]:
        asked = [Request(text, None, params) for text, params in (("hello", GREEDY), ("1 + 1", DRAWN))]
        found = [[*each.token_ids] for each in llm.handle(asked)]
        ruled = llm.generate("hello", replace(DRAWN, max_tokens=40, ignore_eos=False), structure=SCHEMA)
        json.loads(ruled.text)
        found += [[*ruled.token_ids], [*llm.generate("hello", GREEDY, adapter="own").token_ids]]
        session = llm.create_session(params=GREEDY)
        session.send("hello")
        found += [[*session.send("and?").token_ids], [*llm.chat(MESSAGES, GREEDY).token_ids]]
        return found

    with LLM(
        engines, backend="numpy", kv_cache="int8", drafting=None, adapters={"own": adapter}, state_budget=0
    ) as llm:
        plain = said(llm)
    assert plain[0] != plain[3]
    with LLM(engines, backend="numpy", kv_cache="int8", drafting=TREE, adapters={"own": adapter}) as llm:
        llm.cache_system_prompt(SYSTEM, save=tmp_path / "snapshot")
        assert said(llm) == plain
    with LLM(engines, backend="numpy", kv_cache="int8", drafting=TREE) as llm:
        llm.load_snapshot(tmp_path / "snapshot")
        found = llm.chat(MESSAGES, GREEDY)
        assert [*found.token_ids] == plain[-1] and found.usage.reused_tokens > 10
