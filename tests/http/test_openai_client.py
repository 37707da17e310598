"""OpenAI's own client is answered as `LLM` answers in Python."""

from __future__ import annotations

import base64
import json
import math
from typing import Any, Literal

import jsonschema
import openai
import pytest
from http_server import MODEL, ServerProcess, chat_body

import edgellm
from edgellm import LLM, SamplingParams
from edgellm.http.errors import TRANSCRIPTIONS
from edgellm.opened_model import SHIPPED_MODEL

QUESTION = "Where is the red cup?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
DRAWN = {"temperature": 1.3, "seed": 11, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.3}
SCHEMA = {
    "type": "object",
    "properties": {"object": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 9}},
    "required": ["object", "count"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA, "strict": True}}


def deltas(stream: Any) -> tuple[str, list[Any]]:
    """The text of a stream of chunks, and all of them."""
    chunks = list(stream)
    return "".join(each.choices[0].delta.content or "" for each in chunks if each.choices), chunks


def test_models_are_the_model_and_its_adapters(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "json", "pirate", "tools"]
    assert client.models.retrieve("pirate").model_extra["parent"] == MODEL
    with pytest.raises(openai.NotFoundError, match="did you mean pirate"):
        client.models.retrieve("pirates")


def test_a_chat_is_answered_as_in_python(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.chat(MESSAGES)
    found = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert found.choices[0].message.content == expected.text and found.choices[0].message.role == "assistant"
    assert found.choices[0].message.annotations == []
    assert (found.choices[0].finish_reason, found.model, found.object) == ("stop", MODEL, "chat.completion")
    usage = found.usage
    assert usage is not None and usage.prompt_tokens == expected.usage.prompt_tokens
    assert usage.completion_tokens == expected.usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    again = client.chat.completions.create(model=MODEL, messages=MESSAGES).usage
    assert again.prompt_tokens_details.cached_tokens > 0.8 * usage.prompt_tokens


def test_a_stream_has_the_same_text_its_role_first_and_its_end_last(client: openai.OpenAI, llm: LLM) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "stream": True, **DRAWN}
    text, chunks = deltas(client.chat.completions.create(**options, stream_options={"include_usage": True}))
    expected = llm.chat(MESSAGES, SamplingParams(**DRAWN))
    assert text == expected.text and len({each.id for each in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [each.choices[0].finish_reason for each in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == expected.usage.completion_tokens
    _, chunks = deltas(client.chat.completions.create(**options))
    assert all(each.choices and each.usage is None for each in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_model(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    expected = llm.chat(MESSAGES, SamplingParams(logprobs=3)).logprobs
    found = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=3, stream=stream)
    tokens = (
        [token for chunk in found if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
        if stream
        else found.choices[0].logprobs.content
    )
    assert "".join(token.token for token in tokens) == llm.chat(MESSAGES).text
    assert expected is not None and len(expected) == len(tokens) + 1  # the last one ends the turn
    for token, other in zip(tokens, expected, strict=False):
        assert math.isclose(token.logprob, other.logprob, abs_tol=1e-5)
        assert bytes(token.bytes).decode() == token.token and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_fulfilled(client: openai.OpenAI, stream: bool) -> None:
    found = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=FORMAT, stream=stream)
    text = deltas(found)[0] if stream else found.choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)
    any_object = {"type": "json_object"}
    found = client.chat.completions.create(
        model="json", messages=MESSAGES, response_format=any_object, stream=stream, max_tokens=200
    )
    assert isinstance(json.loads(deltas(found)[0] if stream else found.choices[0].message.content), dict)


GUIDES: list[dict[str, Any]] = [
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA, "regex": None}},
    {"guided_choice": ["yes", "no"]},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"guided_regex": "(yes|no)"},
    {"structured_outputs": {"regex": "(yes|no)"}},
    {"grammar": 'start: "yes" | "no"'},
    {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
]


@pytest.mark.parametrize("fields", GUIDES, ids=lambda fields: str(fields)[:50])
def test_fields_of_other_servers_mean_what_a_response_format_does(client: openai.OpenAI, fields: Any) -> None:
    text = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=fields).choices[0].message.content
    assert text in ("yes", "no") or jsonschema.validate(json.loads(text), SCHEMA) is None


def test_a_class_is_parsed_by_the_client(client: openai.OpenAI) -> None:
    from pydantic import BaseModel, ConfigDict

    class Seen(BaseModel):
        model_config = ConfigDict(extra="forbid")
        colour: Literal["red", "blue"]
        certain: bool

    found = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Seen)
    assert isinstance(found.choices[0].message.parsed, Seen)


def test_sampling_is_that_of_the_request(client: openai.OpenAI, llm: LLM) -> None:
    text = llm.chat(MESSAGES).text
    stopped = client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=[" front", "none"])
    assert stopped.choices[0].message.content == text.partition(" front")[0]
    assert (stopped.choices[0].finish_reason, stopped.choices[0].model_extra["stop_reason"]) == ("stop", " front")
    for limit in ("max_tokens", "max_completion_tokens"):
        cut = client.chat.completions.create(model=MODEL, messages=MESSAGES, **{limit: 3})
        assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)
    token = llm.tokenizer.encode("The", add_special_tokens=False)[0]
    biased = client.chat.completions.create(model=MODEL, messages=MESSAGES, logit_bias={str(token): -100})
    assert biased.choices[0].message.content == llm.chat(MESSAGES, SamplingParams(logit_bias={token: -100})).text
    assert biased.choices[0].message.content != text
    more = {
        "min_tokens": 16,
        "top_k": 5,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "bad_words": ["red"],
        "deadline": 30,
    }
    drawn = client.chat.completions.create(model=MODEL, messages=MESSAGES, **DRAWN, extra_body=more)
    del more["deadline"]
    assert drawn.choices[0].message.content == llm.chat(MESSAGES, SamplingParams(**DRAWN, **more)).text
    assert drawn.usage.completion_tokens >= 16
    response = client.responses.create(model=MODEL, input="Who are you?", extra_body={"min_tokens": 16})
    completion = client.completions.create(model=MODEL, prompt="The", max_tokens=20, extra_body={"min_tokens": 16})
    assert response.usage.output_tokens >= 16 and completion.usage.completion_tokens >= 16
    with pytest.raises(openai.BadRequestError, match="min_tokens is 6 and max_tokens 5"):
        client.completions.create(model=MODEL, prompt="The", max_tokens=5, extra_body={"min_tokens": 6})


def test_images_come_as_data_urls(client: openai.OpenAI, llm: LLM) -> None:
    path = SHIPPED_MODEL / "scenes" / "toys.png"
    url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    parts = [{"type": "text", "text": "What do you see?"}, {"type": "image_url", "image_url": {"url": url}}]
    found = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    expected = llm.chat([{"role": "user", "content": [parts[0], {"type": "image", "image": str(path)}]}])
    assert found.choices[0].message.content == expected.text
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    items = [{"role": "user", "content": [{"type": "input_text", "text": "What do you see?"}]}]
    items[0]["content"].append({"type": "input_image", "image_url": url, "detail": "auto"})
    assert client.responses.create(model=MODEL, input=items).output_text == expected.text


def completing(server: ServerProcess, stream: bool) -> openai.OpenAI:
    """OpenAI's client; by its types each piece of a completion's stream has ended, as none of OpenAI's API has."""
    return server.client(_strict_response_validation=not stream)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_continue_a_prompt(server: ServerProcess, llm: LLM, stream: bool) -> None:
    client = completing(server, stream)
    expected = llm.generate("The red cup", SamplingParams(max_tokens=12, logprobs=2))
    for prompt in ("The red cup", ["The red cup"], llm.tokenizer.encode("The red cup")):
        found = client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, logprobs=2, stream=stream)
        pieces = list(found) if stream else [found]
        assert "".join(each.choices[0].text for each in pieces) == expected.text
        tokens = [token for each in pieces if each.choices[0].logprobs for token in each.choices[0].logprobs.tokens]
        offsets = [at for each in pieces if each.choices[0].logprobs for at in each.choices[0].logprobs.text_offset]
        assert "".join(tokens) == expected.text and len(tokens) == 12
        assert all(expected.text[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True))
        assert pieces[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_completions_answer_lists_of_prompts_each_several_times(server: ServerProcess, llm: LLM, stream: bool) -> None:
    prompts: list[Any] = ["The red cup", "The blue bowl"]
    drawn = {"temperature": 1.5, "max_tokens": 6}
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompts,
        "n": 2,
        "best_of": 2,
        "seed": 7,
        "echo": True,
        **drawn,
    }
    told = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    found = completing(server, stream).completions.create(**options, **told)
    pieces = list(found) if stream else [found]
    texts, ends = [""] * 4, [""] * 4
    for choice in (choice for each in pieces for choice in each.choices):
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason or ""
    expected = [llm.generate(prompt, SamplingParams(**drawn, seed=7 + more)) for prompt in prompts for more in (0, 1)]
    assert texts == [prompts[index // 2] + each.text for index, each in enumerate(expected)]
    assert ends == [each.finish_reason for each in expected] and expected[0].text != expected[1].text
    usage = pieces[-1].usage
    assert usage.completion_tokens == sum(each.usage.completion_tokens for each in expected)
    assert usage.prompt_tokens == sum(each.usage.prompt_tokens for each in expected[::2])


@pytest.mark.parametrize("stream", [False, True])
def test_the_oldest_turns_leave_where_that_is_asked_for(client: openai.OpenAI, stream: bool) -> None:
    """A call and its result leave together; system messages and the last question stay."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    systems = [{"role": "system", "content": text} for text in ("You are Pip, a small tabletop robot.", "Be brief.")]
    messages: list[Any] = [
        systems[0],
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello!"},
        systems[1],
        {"role": "user", "content": "cup " * 600},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "bowl " * 600},
        {"role": "assistant", "content": "I see."},
        *MESSAGES,
    ]
    tools: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    options: dict[str, Any] = {"model": MODEL, "tools": tools, "tool_choice": "none", "max_tokens": 12}
    options["extra_body"] = {"truncation": "auto"}
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        client.chat.completions.create(**options | {"extra_body": {}, "messages": messages})
    raw = client.chat.completions.with_raw_response.create(**options, messages=messages, stream=stream)
    assert raw.headers["edgellm-dropped-messages"] == "6"
    alone = client.chat.completions.with_raw_response.create(**options, messages=[*systems, *MESSAGES])
    assert "edgellm-dropped-messages" not in alone.headers
    text = deltas(raw.parse())[0] if stream else raw.parse().choices[0].message.content
    assert text == alone.parse().choices[0].message.content
    items = [{"role": "user", "content": "cup " * 1200}, {"role": "assistant", "content": "Yes."}, *MESSAGES]
    found = client.responses.with_raw_response.create(model=MODEL, input=items, truncation="auto", stream=stream)
    assert found.headers["edgellm-dropped-messages"] == "2"
    last = list(found.parse())[-1].response if stream else found.parse()
    assert (
        last.truncation == "auto"
        and last.output_text == client.responses.create(model=MODEL, input=QUESTION).output_text
    )
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        client.responses.create(model=MODEL, input="cup " * 2000, truncation="auto")


def test_completions_end_after_sixteen_tokens_and_repeat_token_ids_as_text(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode("The red cup")
    found = client.completions.create(model=MODEL, prompt=ids, echo=True, extra_body={"ignore_eos": True})
    assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 16)
    assert found.choices[0].text.startswith("The red cup")


def test_responses_answer_text_and_conversations(client: openai.OpenAI, llm: LLM) -> None:
    found = client.responses.create(model=MODEL, input=QUESTION, metadata={"robot": "pip"})
    assert found.output_text == llm.chat(MESSAGES).text and found.status == "completed"
    assert found.metadata == {"robot": "pip"} and found.usage.input_tokens == llm.count_tokens(MESSAGES)
    asked = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    said = llm.chat(asked).text
    follow = {"role": "user", "content": "And the blue one?"}
    expected = llm.chat([*asked, {"role": "assistant", "content": said}, follow])
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.responses.create(model=MODEL, input=items, instructions="Be brief.")
    assert first.output_text == said and first.instructions == "Be brief."
    items += [item.model_dump(exclude_none=True) for item in first.output]
    found = client.responses.create(model=MODEL, input=[*items, follow], instructions="Be brief.")
    assert found.output_text == expected.text
    cut = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_all_members_that_the_api_describes(client: openai.OpenAI, stream: bool) -> None:
    given: dict[str, Any] = {"user": "me", "safety_identifier": "s", "prompt_cache_key": "k", "presence_penalty": 0.5}
    options: dict[str, Any] = {"model": MODEL, "input": QUESTION, "extra_body": {**given, "frequency_penalty": 0.25}}
    found = client.responses.create(**options, max_output_tokens=4, top_logprobs=2, stream=stream)
    whole = (list(found)[-1].response if stream else found).to_dict()
    assert whole["status"] == "incomplete" and whole["completed_at"] is None
    expected = {**given, "frequency_penalty": 0.25, "top_logprobs": 2, "background": False, "service_tier": "default"}
    expected |= {"max_tool_calls": None, "instructions": None, "reasoning": {"effort": None, "summary": None}}
    expected |= {"previous_response_id": None, "error": None, "store": False, "truncation": "disabled", "metadata": {}}
    expected |= {"text": {"format": {"type": "text"}}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    assert {name: whole.get(name, "missing") for name in expected} == expected
    ended = client.responses.create(model=MODEL, input=QUESTION, reasoning={"effort": "low"}).to_dict()
    assert ended["completed_at"] >= ended["created_at"] and ended["reasoning"]["effort"] == "low"


def test_a_server_says_what_there_is(server: ServerProcess) -> None:
    assert server.get("/version")[:2] == (200, {"version": edgellm.__version__})
    status, found, _ = server.get("/v1")
    assert status == 200 and {"POST /v1/chat/completions", "GET /v1/models", "GET /version"} <= set(found["endpoints"])
    for method, path in (each.split() for each in found["endpoints"]):
        taken = (415,) if path == TRANSCRIPTIONS else (200, 400, 404)  # a form alone
        assert server.ask(method, path, {} if method == "POST" else None)[0] in taken, path
    for path, expected in (
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "did you mean /v1/messages?"),
        ("/nothing", "expected one of those that GET /v1 lists"),
    ):
        status, refused, _ = server.ask("POST", path, {})
        assert (status, refused["error"]["message"]) == (404, f"POST {path}: Not Found: {expected}")
    status, refused, _ = server.get("/v1/chat/completions")
    assert (status, refused["error"]["message"].split(": ")[1:]) == (405, ["Method Not Allowed", "expected POST"])


def test_responses_stream_their_events_in_order(client: openai.OpenAI, llm: LLM) -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, top_logprobs=1) as stream:  # which checks the order
        events = list(stream)
        final = stream.get_final_response()
    kinds = list(dict.fromkeys(each.type for each in events))
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]
    assert final.output_text == llm.chat(MESSAGES).text
    assert "".join(each.token for each in final.output[0].content[0].logprobs) == final.output_text
    numbers = [each.sequence_number for each in events]
    assert numbers == sorted(numbers)


def test_responses_take_a_schema_and_what_a_function_returned(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "seen", "schema": SCHEMA, "strict": True}}
    found = client.responses.create(model=MODEL, input=QUESTION, text=form)
    jsonschema.validate(json.loads(found.output_text), SCHEMA)
    called: list[Any] = [
        {"role": "user", "content": "Wave."},
        {"type": "function_call", "call_id": "c1", "name": "wave", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]
    assert client.responses.create(model=MODEL, input=called, max_output_tokens=4).status in ("incomplete", "completed")


def test_tokens_are_counted_as_they_are_paid_for(server: ServerProcess, llm: LLM) -> None:
    status, found, _ = server.ask("POST", "/tokenize", {"model": MODEL, "prompt": "The red cup"})
    assert (status, found["tokens"]) == (200, llm.tokenizer.encode("The red cup"))
    _, found, _ = server.ask("POST", "/tokenize", {"messages": MESSAGES})
    assert found["count"] == len(found["tokens"]) == llm.count_tokens(MESSAGES)
    assert found["max_model_len"] == llm.context_length
    assert server.chat()[1]["usage"]["prompt_tokens"] == found["count"]


def test_a_deadline_gives_what_there_is(server: ServerProcess) -> None:
    _, found, _ = server.chat(deadline=0.3, ignore_eos=True)
    choice = found["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline") and choice["message"]["content"]


def test_what_changes_nothing_is_reported(server: ServerProcess, client: openai.OpenAI) -> None:
    status, found, headers = server.chat(
        user="me",
        metadata={"a": "b"},
        reasoning={"effort": "low", "summary": "auto"},
        chat_template_kwargs={"nothing": 1},
        seed=None,
        cache_prompt=True,
        keep_alive="5m",
    )
    assert status == 200 and found["choices"][0]["message"]["content"]
    expected = "user, metadata, cache_prompt, keep_alive, chat_template_kwargs.nothing, reasoning_effort"
    expected += ", reasoning.summary"
    assert sorted(headers["edgellm-ignored"].split(", ")) == sorted(expected.split(", "))
    assert "edgellm-ignored" not in server.chat()[2]
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, user="me")
    assert raw.headers["edgellm-ignored"] == "user"


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "cup " * 2000}])
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "messages")
    assert "maximum context length is 1024" in str(raised.value)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


def test_a_body_that_http_client_sends_is_what_the_openai_client_sends(server: ServerProcess, llm: LLM) -> None:
    """A second client, which knows nothing of OpenAI's API."""
    import httpx

    url = f"http://{server.host}:{server.port}/v1/chat/completions"
    with httpx.stream("POST", url, json=chat_body(stream=True), timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks) == llm.chat(MESSAGES).text
