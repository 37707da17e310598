"""Whatever an argument is, what is raised is an error of the package's own, and the model goes on."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_answers import SHORT
from wrong_values import wrong_values

from edgellm import LLM, DraftingConfig, EdgeLLMError, Request, Response, SamplingParams, SpecDecodeRuntime

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def llm(serving_engines: Path) -> Iterator[LLM]:
    with LLM(serving_engines, backend="numpy", drafting=None) as opened:
        yield opened


@pytest.fixture(scope="module")
def runtime(serving_engines: Path) -> Iterator[SpecDecodeRuntime]:
    with SpecDecodeRuntime(serving_engines, backend="numpy") as opened:
        yield opened


@pytest.fixture(scope="module")
def shipped() -> Iterator[LLM]:
    with LLM(backend="numpy", drafting=None) as opened:
        yield opened


def check(call: Callable[[Any], object], but: tuple[type, ...] = ()) -> None:
    """`call` takes every value, or raises an EdgeLLMError that can be shown; values of types `but` are left out."""
    refused = 0
    for place, value in enumerate(wrong_values()):
        if isinstance(value, but):
            continue
        try:
            call(value)
        except EdgeLLMError as error:
            refused += 1
            assert str(error)
        except Exception as error:
            pytest.fail(f"value {place}, a {type(value).__name__}: {type(error).__name__}: {error}")
    assert refused  # else this tests nothing


#: Callables are called: what they raise is theirs.
FUNCTIONS = (type, type(len), type(lambda: None))


def fields_of(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize("name", fields_of(SamplingParams))
def test_sampling(name: str) -> None:
    check(lambda value: SamplingParams(**{name: value}))


@pytest.mark.parametrize("name", fields_of(DraftingConfig))
def test_drafting(name: str) -> None:
    kind = {"kind": "choices"} if name == "choices" else {}
    check(lambda value: DraftingConfig(**(kind | {name: value})))


@pytest.mark.parametrize("name", fields_of(Request))
def test_requests(llm: LLM, name: str) -> None:
    asked = {"messages": MESSAGES} if name == "continue_final_message" else {"prompt": "x"}
    others = {"params": SHORT} | ({} if name in ("prompt", "messages") else asked)
    but = FUNCTIONS if name == "stop_when" else ()
    check(lambda value: llm.submit(Request(**(others | {name: value}))).result(), but)


def test_a_model(llm: LLM, tmp_path: Path) -> None:
    def handle(requests: Any) -> None:
        assert all(isinstance(each, (Response, EdgeLLMError)) for each in llm.handle(requests))

    check(llm.submit)
    check(handle)
    check(llm.count_tokens)
    check(lambda value: llm.count_tokens("x", images=value))
    check(lambda value: llm.generate("x", SHORT, n=value))
    check(lambda value: llm.count_tokens(MESSAGES, continue_final_message=value))
    check(llm.cache_system_prompt)
    check(lambda value: llm.cache_system_prompt("x", value))
    check(lambda value: llm.cache_system_prompt("x", None, value), (type(None), str, Path))  # which write files
    check(lambda value: llm.cache_system_prompt("x", None, f"{value}\0" if isinstance(value, str) else 5))
    check(llm.load_snapshot)
    check(lambda value: llm.load_snapshot(tmp_path / "none", value))
    check(llm.use_drafting)
    check(llm.observe)
    check(llm.call, FUNCTIONS)
    assert llm.generate("x", SHORT).finish_reason == "length"


def test_generations(llm: LLM) -> None:
    def waited(wait: Callable[[Any], object]) -> Callable[[Any], None]:
        def call(value: Any) -> None:
            try:
                wait(value)
            except TimeoutError as error:
                assert "seconds" in str(error)

        return call

    check(waited(lambda value: llm.stream("x", SHORT).next_chunk(value)))
    check(waited(lambda value: llm.stream("x", SHORT).result(value)))
    check(lambda value: llm.stream("x", SHORT).on_change(value), FUNCTIONS)


def test_sessions(llm: LLM) -> None:
    check(lambda value: llm.create_session(value).send("x", SHORT))
    check(lambda value: llm.create_session(params=value))
    check(lambda value: llm.create_session(adapter=value))
    check(llm.create_session().replace)
    check(lambda value: llm.create_session(params=SHORT).send(value))
    check(lambda value: llm.create_session(params=SHORT).send("x", value))
    check(lambda value: llm.create_session(params=SHORT).send("x", SHORT, value))
    check(lambda value: llm.create_session(params=SHORT).run("x", max_answers=value))
    check(lambda value: llm.create_session(tools=[value]))
    check(lambda value: llm.create_session(params=SHORT).run("x", tools=value))


def test_tokenizers(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    check(tokenizer.encode)
    check(tokenizer.decode)
    check(tokenizer.id_to_token)
    check(tokenizer.token_to_id)
    check(tokenizer.encode_chat)
    check(lambda value: tokenizer.encode_chat(MESSAGES, tools=value))
    check(lambda value: tokenizer.encode_chat(MESSAGES, thing=value))


def test_messages_with_images(shipped: LLM) -> None:
    def part(value: dict[str, Any]) -> None:
        shipped.count_tokens([{"role": "user", "content": [{"type": "text", "text": "x"}, value]}])

    pixels = np.zeros((32, 32, 3), np.uint8)
    check(lambda value: shipped.count_tokens("x", images=[value]))
    check(lambda value: part({"type": "text", "text": value}))
    check(lambda value: part({"type": "image", "image": value}))
    check(lambda value: part({"type": "image", "image": pixels, "channels": value}))
    check(lambda value: part({"type": "image", "path": value}))
    check(lambda value: part({"type": "image", "url": value}))
    check(lambda value: part({"type": "image_url", "image_url": value}))
    check(lambda value: part({"type": "image_url", "image_url": {"url": value}}))
    check(lambda value: shipped.count_tokens([{"role": value, "content": "x"}]))
    check(lambda value: shipped.count_tokens([{"role": "assistant", "content": "x", "tool_calls": value}]))


@pytest.mark.parametrize("name", [name for name in inspect.signature(LLM.__init__).parameters if name != "self"])
def test_opening(serving_engines: Path, name: str) -> None:
    options = {"engine_directory": serving_engines, "backend": "numpy", "drafting": None}
    but = FUNCTIONS if name == "progress" else ()
    check(lambda value: LLM(**(options | {name: value})).close(), but)


def test_runtimes(serving_engines: Path, runtime: SpecDecodeRuntime) -> None:
    request = Request("x", params=SHORT)
    check(runtime.handle_request)
    check(lambda value: runtime.handle_request(request, value), FUNCTIONS)
    check(lambda value: runtime.handle_request([request], value))
    check(runtime.prepare)
    check(runtime.count_tokens)
    check(lambda value: runtime.system_prompt_snapshot("x", None, value))
    check(lambda value: SpecDecodeRuntime(serving_engines, backend="numpy", metrics=value).close(), (type(None),))
