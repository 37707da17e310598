"""The LLM object on the NumPy backend: answers, streams, reuse of the KV cache, ends, errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

from edgellm import LLM, AsyncLLM, ContextError, EdgeLLMError, Request, RequestError, SamplingParams
from edgellm.requests import RequestOptions, SamplingOptions

MESSAGES = [{"role": "user", "content": "hello"}]
SAMPLED = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=11, max_tokens=20, ignore_eos=True)
GREEDY = SamplingParams(ignore_eos=True)


@pytest.fixture
def model(tiny_engines: Path) -> Iterator[LLM]:
    with LLM(tiny_engines, backend="numpy") as opened:
        yield opened


def test_a_prompt_far_beyond_the_context_is_refused_by_its_size(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "1" * 100_000
    assert model.count_tokens(text) == 100_000
    monkeypatch.setattr("edgellm.text.tokenizer.encoded", lambda *_: pytest.fail("it was encoded"))
    for ask in (lambda: model.generate(text), lambda: model.chat([{"role": "user", "content": text}])):
        with pytest.raises(ContextError, match=r"at least \d{4} tokens and the context 96"):
            ask()


def test_keywords_are_all_fields_of_sampling_and_of_requests() -> None:
    sampling = {field.name for field in fields(SamplingParams)}
    assert set(SamplingOptions.__annotations__) == sampling | {"response_format"}
    positional = {"prompt", "messages", "params", "adapter"}
    assert set(RequestOptions.__annotations__) == (set(Request.__dataclass_fields__) | sampling) - positional


def test_sampling_is_said_in_keywords(model: LLM) -> None:
    options = {field.name: getattr(SAMPLED, field.name) for field in fields(SAMPLED)}
    expected = model.chat(MESSAGES, SAMPLED).token_ids
    assert model.chat("hello", **options).token_ids == expected  # a text is the user's message
    assert model.stream_chat("hello", replace(SAMPLED, seed=3), seed=11).result().token_ids == expected
    session = model.create_session(params=GREEDY, temperature=1.0, top_k=50, top_p=0.9, max_tokens=20)
    assert session.send("hello", seed=11).token_ids == expected
    assert session.retry(seed=11, max_tokens=2).result().token_ids == expected[:2]
    assert model.generate("hello", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
    for ask in (model.chat, model.stream_chat, model.generate, model.stream, model.create_session, session.send):
        with pytest.raises(TypeError, match="unknown keyword argument 'temprature': did you mean temperature"):
            ask("x", temprature=1)
    with pytest.raises(RequestError, match="top_p is 2: expected a number"):
        session.send("x", top_p=2)


def test_several_answers_of_one_prompt(model: LLM, tiny_engines: Path) -> None:
    alone = [model.chat("hello", replace(SAMPLED, seed=seed)).token_ids for seed in (11, 12, 13)]
    answer = model.chat("hello", SAMPLED, n=3)
    assert [each.token_ids for each in answer.choices] == alone
    assert len({each.token_ids for each in model.generate("hello", SAMPLED, seed=None, n=2).choices}) == 2
    for n in (0, True, 129, 1.5):
        with pytest.raises(RequestError, match=f"n is {n}: expected a whole number from 1 to 128"):
            model.generate("hello", n=n)
    with pytest.raises(RequestError, match="empty"):
        model.generate("", n=2)

    async def ask() -> list[tuple[int, ...]]:
        async with AsyncLLM(tiny_engines, backend="numpy") as llm:
            return [each.token_ids for each in (await llm.chat("hello", SAMPLED, n=3)).choices]

    assert asyncio.run(ask()) == alone


def test_reuse_of_the_cache_is_counted_and_changes_nothing(model: LLM, tiny_engines: Path) -> None:
    first = model.generate("one two three", SAMPLED)
    assert first.usage.reused_tokens == 0
    again = model.generate("one two three", SAMPLED)
    assert again.usage.reused_tokens == again.usage.prompt_tokens - 1
    assert again.token_ids == first.token_ids
    edited = model.generate("one two four", SAMPLED)
    assert edited.usage.reused_tokens == len("one two ")
    continued = model.generate([*model.tokenizer.encode("one two four"), *edited.token_ids[:5], 65], SAMPLED)
    assert continued.usage.reused_tokens == continued.usage.prompt_tokens - 1
    with LLM(tiny_engines, backend="numpy") as fresh:
        assert fresh.generate("one two four", SAMPLED).token_ids == edited.token_ids
        prompt = [*fresh.tokenizer.encode("one two four"), *edited.token_ids[:5], 65]
        assert LLM.generate(fresh, prompt, SAMPLED).token_ids == continued.token_ids


def test_the_context_limit_ends_an_answer(model: LLM) -> None:
    response = model.generate("x" * 80, SamplingParams(ignore_eos=True))
    assert (response.finish_reason, response.usage.completion_tokens) == ("context", 16)
    longest = model.generate("x" * 95, SamplingParams(ignore_eos=True))
    assert (longest.finish_reason, longest.usage.completion_tokens) == ("context", 1)
    with pytest.raises(RequestError, match=r"96 tokens.*context 96.*--kv-capacity"):
        model.generate("x" * 96)
    assert model.generate("x", SamplingParams(max_tokens=1)).finish_reason == "length"


def test_stop_ids_and_stop_strings(model: LLM) -> None:
    free = model.generate("abc", SAMPLED)
    stop_id = free.token_ids[7]
    count = free.token_ids.index(stop_id) + 1
    stopped = model.generate(
        "abc", SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=11, stop_token_ids=(stop_id,))
    )
    assert (stopped.finish_reason, stopped.stop_match, stopped.usage.completion_tokens) == ("stop", stop_id, count)
    string = next(part for part in (free.text[i : i + 2] for i in range(3, len(free.text))) if part.strip())
    cut = model.generate(
        "abc",
        SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=11, stop=(string,), ignore_eos=True, max_tokens=20),
    )
    assert (cut.finish_reason, cut.stop_match) == ("stop_string", string)
    assert cut.text == free.text[: free.text.index(string)]


def test_an_unknown_backend_is_refused(tiny_engines: Path) -> None:
    with pytest.raises(EdgeLLMError, match="auto, numpy, tensorrt"):
        LLM(tiny_engines, backend="cuda")


def test_python_m_edgellm_works_from_any_folder(tmp_path: Path) -> None:
    version = subprocess.run(
        [sys.executable, "-m", "edgellm", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert version.stdout.startswith("edgellm 0.")
