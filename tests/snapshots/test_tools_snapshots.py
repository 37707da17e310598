"""Prompts that are cached with tools and template variables: chats with the same ones reuse them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM, Request, SamplingParams
from edgellm.commands.cache import build_snapshots
from edgellm.commands.cache_prompts import CachePrompt, with_cached_prompt
from edgellm.commands.models import open_model
from edgellm.commands.settings import Settings
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.errors import RequestError
from edgellm.snapshots.file import read_snapshot
from edgellm.snapshots.system_prompt import PromptRecord

SYSTEM, VARIABLES = "Be kind.", {"level": "low"}
TOOLS = [{"type": "function", "function": {"name": "grasp", "at": "cup"}}]
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% if tools %}<{{ tools | tojson }}>{% endif %}{% if level is defined %}{{ level }} {% endif %}"
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
)
#: What the template makes of it before the user's words, a token a byte.
TOKENS = len(f"<{json.dumps(TOOLS)}>low [system] Be kind.\n[user] ")
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engines(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a template that renders tools and a variable."""
    folder = tmp_path_factory.mktemp("tools")
    checkpoint = shutil.copytree(tiny_checkpoint, folder / "checkpoint")
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    build_engine_directory(checkpoint, folder / "engines", EngineLimits(2, 32, 160), [])
    return folder / "engines"


@pytest.fixture
def llm(engines: Path) -> Iterator[LLM]:
    with LLM(engines, backend="numpy") as opened:
        yield opened


def reused(llm: LLM, tools: list[dict[str, Any]] | None, variables: dict[str, str]) -> int:
    """How many tokens of a chat with tools and variables come from elsewhere, once every slot holds other tokens."""
    crowded_out(llm)
    prompt = llm.tokenizer.encode_chat(MESSAGES, tools=tools, **variables)
    return llm.generate(prompt, GREEDY).usage.reused_tokens


def crowded_out(llm: LLM) -> None:
    """Let every slot hold tokens that no chat begins with."""
    slots = llm.directory.limits.max_batch
    llm.handle([Request([9, 8, slot], None, GREEDY) for slot in range(slots)])


def test_a_prompt_cached_with_tools_is_reused_by_chats_with_them(llm: LLM, tmp_path: Path) -> None:
    prompt = llm.tokenizer.encode_chat(MESSAGES, tools=TOOLS, **VARIABLES)
    expected = llm.generate(prompt, GREEDY)
    kept = llm.cache_system_prompt(SYSTEM, save=tmp_path / "x", tools=TOOLS, template_variables=VARIABLES)
    assert kept.tokens == TOKENS
    assert reused(llm, TOOLS, VARIABLES) == TOKENS
    assert reused(llm, None, {}) == 0
    assert reused(llm, TOOLS, {"level": "high"}) < TOKENS
    crowded_out(llm)
    found = llm.generate(prompt, GREEDY)
    assert (found.usage.reused_tokens, found.token_ids) == (TOKENS, expected.token_ids)
    assert read_snapshot(tmp_path / "x").prompt == PromptRecord(SYSTEM, TOOLS, VARIABLES)


@pytest.fixture
def built(engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings that name a snapshot which `cache build` made with tools and variables."""
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path))
    settings = Settings(engines, "numpy")
    build_snapshots(settings, [CachePrompt("pip", SYSTEM)], tmp_path / "snapshots", 1 << 30, False, TOOLS, VARIABLES)
    return replace(settings, system_cache="pip")


def test_a_snapshot_brings_its_tools(built: Settings, capfd: pytest.CaptureFixture[str]) -> None:
    settings, tools, variables = with_cached_prompt(built)
    assert (settings.system, tools, variables) == (SYSTEM, TOOLS, VARIABLES)
    assert with_cached_prompt(built, False, TOOLS, VARIABLES) == (settings, TOOLS, VARIABLES)
    with open_model(settings, tools=tools, template_variables=variables) as llm:
        assert reused(llm, tools, variables) == TOKENS
    assert "is of another system prompt" not in capfd.readouterr().err


def test_other_tools_beside_a_snapshot_are_refused(built: Settings) -> None:
    with pytest.raises(RequestError) as caught:
        with_cached_prompt(built, False, [{"type": "function", "function": {"name": "drop"}}], None)
    assert f"of the tools {json.dumps(TOOLS)}, but [{{" in str(caught.value) and "(--tools)" in str(caught.value)


def test_variables_of_a_conversation_go_before_those_of_a_snapshot(
    built: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that the template does not show in the system prompt leaves the snapshot of use; another is said."""
    for given, is_said in (({"enable_thinking": False}, False), ({"level": "high"}, True)):
        settings, tools, variables = with_cached_prompt(built, False, None, given)
        assert variables == VARIABLES | given
        with open_model(settings, tools=tools, template_variables=variables) as llm:
            assert (reused(llm, tools, variables) == TOKENS) != is_said
        assert ("is of another system prompt" in capfd.readouterr().err) == is_said
