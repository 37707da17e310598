"""Answers of `/v1/responses` that are kept, and their events, as the strict types of OpenAI's client have them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from http_server import MODEL, ServerProcess, response_events, running
from openai.types.responses import Response, ResponseItemList
from pydantic import TypeAdapter
from starlette.requests import Request

from edgellm.http.errors import HTTPError
from edgellm.http.fields import ServedModel
from edgellm.http.kept_responses import Items, KeptResponses
from edgellm.http.responses import input_messages, response_request
from edgellm.opened_model import SHIPPED_MODEL

QUESTION = "Where is the red cup?"
PARAMETERS = {"type": "object", "properties": {"object": {"type": "string"}}, "required": ["object"]}
LOOK: Any = {"type": "function", "name": "look_at", "description": "Look at an object.", "parameters": PARAMETERS}
LOOK |= {"strict": True}


@pytest.fixture(scope="module")
def keeping() -> Iterator[ServerProcess]:
    with running("--keep-responses", 2) as server:
        yield server


def test_a_conversation_goes_on_from_an_answer_that_is_kept(keeping: ServerProcess) -> None:
    client = keeping.client()
    first = client.responses.create(model=MODEL, input=QUESTION, instructions="Be brief.", store=True)
    follow: Any = {"role": "user", "content": "And the blue one?"}
    whole = [{"role": "user", "content": QUESTION}, *(each.to_dict() for each in first.output), follow]
    options: Any = {"model": MODEL, "input": [follow], "previous_response_id": first.id}
    found = client.responses.create(**options)
    alone = client.responses.create(model=MODEL, input=whole, store=False)  # instructions are of one answer alone
    assert (found.output_text, found.usage.input_tokens) == (alone.output_text, alone.usage.input_tokens)
    assert (found.previous_response_id, found.to_dict()["store"], alone.to_dict()["store"]) == (first.id, True, False)
    assert client.responses.retrieve(found.id).to_dict() == found.to_dict()
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=r"not found: .*send all of the conversation as input") as lost:
        client.responses.create(**options)
    assert (lost.value.param, lost.value.code) == ("previous_response_id", "previous_response_not_found")
    for ask in (client.responses.retrieve, client.responses.delete):
        for response_id in (first.id, alone.id):
            with pytest.raises(openai.NotFoundError, match=response_id):
                ask(response_id)
    with pytest.raises(openai.BadRequestError, match="stream"):
        list(client.responses.retrieve(found.id, stream=True))
    again = client.responses.create(
        **options | {"previous_response_id": found.id}
    )  # which outlives what it went on from
    assert again.usage.input_tokens > found.usage.input_tokens


def test_events_are_those_of_the_api_and_calls_go_on(keeping: ServerProcess) -> None:
    client = keeping.client()
    options: Any = {"model": "tools", "tools": [{**LOOK, "parameters": {**PARAMETERS, "additionalProperties": False}}]}
    asked = "Look at the white bowl."
    raw = client.responses.with_raw_response.create(input=asked, stream=True, **options)
    lines = [line[6:] for line in raw.http_response.iter_lines() if line.startswith("data: ")]
    events = response_events(lines)
    assert [each.sequence_number for each in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(each.type.removeprefix("response.") for each in events))
    called = ["function_call_arguments.delta", "function_call_arguments.done"]
    expected = ["created", "in_progress", "output_item.added", *called, "output_item.done", "completed"]
    assert kinds == expected
    answer = Response.model_validate(json.loads(lines[-1])["response"])
    assert answer.id == events[0].response.id
    output: Any = {"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "done"}
    found = client.responses.create(input=[output], previous_response_id=answer.id, **options)
    items = [{"role": "user", "content": asked}, answer.output[0].to_dict(), output]
    assert found.output_text == client.responses.create(input=items, **options).output_text != ""


def test_the_items_that_an_answer_was_given_to_are_listed(keeping: ServerProcess) -> None:
    client, image = keeping.client(), base64.b64encode((SHIPPED_MODEL / "scenes" / "toys.png").read_bytes()).decode()
    shown = {"type": "input_image", "image_url": f"data:image/png;base64,{image}"}
    seen: Any = [{"type": "input_text", "text": "What do you see?"}, shown]
    first = client.responses.create(model=MODEL, input=[{"role": "user", "content": seen}])
    said: Any = [{"role": "assistant", "content": "Hm."}, {"type": "message", "role": "user", "content": QUESTION}]
    second = client.responses.create(model=MODEL, input=said, previous_response_id=first.id, instructions="Be brief.")
    items = list(client.responses.input_items.list(second.id, order="asc", limit=3))  # of two pages
    assert [each.role for each in items] == ["user", "assistant", "assistant", "user"]
    assert items[0].content[1].image_url == shown["image_url"] and items[1].id == first.output[0].id
    assert [each.content[0].text for each in items] == [seen[0]["text"], first.output_text, "Hm.", QUESTION]
    assert client.responses.input_items.list(second.id).data == items[::-1]
    assert client.responses.input_items.list(second.id, after=items[0].id).data == []
    for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "?"}, "after")):
        with pytest.raises(openai.BadRequestError, match=f"{param} is "):
            client.responses.input_items.list(second.id, **query)
    with pytest.raises(openai.NotFoundError, match="resp_0"):
        client.responses.input_items.list("resp_0")
    counted = client.responses.input_tokens.count(model=MODEL, input=said, previous_response_id=first.id)
    whole = client.responses.create(model=MODEL, input=said, previous_response_id=first.id).usage
    assert counted.input_tokens == whole.input_tokens > 150  # those of the image, too


def test_calls_and_results_are_listed_with_ids() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look_at", "arguments": "{}", "status": None}
    given = [call, {"type": "function_call_output", "call_id": "c", "output": "done"}]
    given.append({"type": "reasoning", "summary": []})
    kept = KeptResponses(1)
    kept.keep(Items(tuple(given), 9), {"id": "a", "output": []})
    scope = {"type": "http", "path_params": {"id": "a"}, "query_string": b"order=asc&include=x", "headers": []}
    listed = json.loads(kept.input_items(Request(scope)).body)
    found = TypeAdapter(ResponseItemList).validate_python(listed, strict=True)
    assert [each.id for each in found.data] == ["fc_0", "fco_1", "rs_2"] and found.first_id == "fc_0"
    assert listed["data"][1] == {"id": "fco_1", "status": "completed", **given[1]}


def test_reasoning_is_handed_back() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": "aG0="}
    said = {"role": "assistant", "content": "Yes."}
    assert input_messages([item, said], None) == [{**said, "reasoning_content": "hm"}]
    with pytest.raises(HTTPError, match=r"input\[0\] has an encrypted_content that is not from this server"):
        input_messages([{**item, "encrypted_content": "?"}], None, [said])


def test_the_oldest_answers_go_by_number_and_by_bytes() -> None:
    kept = KeptResponses(2, 1000)
    for name in "abc":
        kept.keep(Items(("x",), 300), {"id": name, "output": ["y"]})
    assert kept.conversation("c").items == ("x", "y") and kept.conversation(None) == Items()
    kept.keep(Items((), 900), {"id": "d", "output": []})
    for name in "abc":
        with pytest.raises(HTTPError, match="not found"):
            kept.conversation(name)
    body = json.dumps({"model": MODEL, "input": "hi", "previous_response_id": "d"}).encode()
    asked = response_request(body, ServedModel(MODEL), kept)
    assert asked.items is not None and asked.items.size > 900
    with pytest.raises(HTTPError, match="--keep-responses N") as refused:
        response_request(body, ServedModel(MODEL))
    assert (refused.value.status, refused.value.param) == (400, "previous_response_id")
