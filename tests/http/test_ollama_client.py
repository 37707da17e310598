"""ollama's API, asked by ollama's own client, whose types are strict."""

from __future__ import annotations

import base64
import json
from datetime import datetime
from typing import Any

import jsonschema
import pytest
from http_server import MODEL, ServerProcess

from edgellm import LLM, SamplingParams, __version__
from edgellm.http.bodies import check_body, check_images
from edgellm.http.errors import HTTPError
from edgellm.http.fields import ParsedRequest, ServedModel
from edgellm.http.ollama import chat, chat_messages, generate
from edgellm.opened_model import SHIPPED_MODEL

MESSAGES = [{"role": "user", "content": "Where is the red cup?"}]
SCHEMA = {
    "type": "object",
    "properties": {"seen": {"enum": ["cup", "bowl"]}},
    "required": ["seen"],
    "additionalProperties": False,
}
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look_at",
        "description": "Look at an object.",
        "parameters": {"type": "object", "properties": {"object": {"type": "string"}}, "required": ["object"]},
    },
}


def asked_by(server: ServerProcess) -> Any:
    """The client, where it is installed."""
    return pytest.importorskip("ollama").Client(host=f"http://{server.host}:{server.port}")


@pytest.mark.parametrize("stream", [False, True])
def test_chats_are_those_of_python(server: ServerProcess, llm: LLM, stream: bool) -> None:
    options = {"temperature": 1.2, "seed": 5, "num_predict": 40, "min_p": 0.01, "repeat_penalty": 1.1, "num_ctx": 99}
    drawn = {"temperature": 1.2, "seed": 5, "max_tokens": 40, "min_p": 0.01, "repetition_penalty": 1.1}
    expected = llm.chat(MESSAGES, SamplingParams(**drawn, logprobs=1))
    asked: Any = {"model": f"{MODEL}:latest", "messages": MESSAGES, "options": options, "keep_alive": "5m"}
    found = asked_by(server).chat(**asked, stream=stream, logprobs=True, top_logprobs=1)
    pieces = list(found) if stream else [found]
    assert "".join(each.message.content for each in pieces) == expected.text
    assert "".join(token.token for each in pieces for token in each.logprobs or []) == expected.text
    last = pieces[-1]
    assert [each.done for each in pieces] == [False] * (len(pieces) - 1) + [True] and (len(pieces) > 2) == stream
    assert (last.eval_count, last.prompt_eval_count) == (expected.usage.completion_tokens, llm.count_tokens(MESSAGES))
    assert last.total_duration >= last.prompt_eval_duration + last.eval_duration > 10_000  # nanoseconds
    assert last.done_reason == ("length" if expected.finish_reason == "length" else "stop")


def test_generating_images_formats_and_loading(server: ServerProcess, llm: LLM) -> None:
    client = asked_by(server)
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    found = client.generate(MODEL, MESSAGES[0]["content"], system="Be brief.", suffix="", context=[])
    assert found.response == llm.chat(system).text
    raw = client.generate(MODEL, "The red", raw=True, stream=True, options={"num_predict": 5})
    assert "".join(each.response for each in raw) == llm.generate("The red", SamplingParams(max_tokens=5)).text
    toys = SHIPPED_MODEL / "scenes" / "toys.png"
    assert "ball" in client.generate(MODEL, "What do you see?", images=[toys.read_bytes()]).response
    chosen = client.chat(MODEL, MESSAGES, format=SCHEMA).message.content
    jsonschema.validate(json.loads(chosen), SCHEMA)
    assert isinstance(json.loads(client.generate(MODEL, "Wave.", format="json").response), dict)
    for found in (client.generate(MODEL, keep_alive=0), client.chat(MODEL), *client.generate(MODEL, stream=True)):
        assert found.done and found.done_reason == "load"
    continued = [*MESSAGES, {"role": "assistant", "content": "The red"}]
    assert client.chat(MODEL, continued).message.content == llm.chat(continued, continue_final_message=True).text


@pytest.mark.parametrize("stream", [False, True])
def test_calls_have_objects_and_their_results_go_on(server: ServerProcess, stream: bool) -> None:
    client, asked = asked_by(server), {"role": "user", "content": "Look at the white bowl and the red cup."}
    found = client.chat("tools", [asked], tools=[LOOK], stream=stream)
    pieces = list(found) if stream else [found]
    calls = [call for each in pieces for call in each.message.tool_calls or []]
    objects = [(call.function.name, call.function.arguments) for call in calls]
    assert objects == [("look_at", {"object": "white bowl"}), ("look_at", {"object": "red cup"})]
    assert (pieces[-1].done_reason, "".join(each.message.content for each in pieces)) == ("stop", "")
    said = {"role": "assistant", "content": "", "tool_calls": [call.model_dump() for call in calls]}
    results = [{"role": "tool", "tool_name": "look_at", "content": "done"} for _ in calls]
    more = client.chat("tools", [asked, said, *results], tools=[LOOK])
    assert more.message.content and more.prompt_eval_count > pieces[-1].prompt_eval_count


def test_models_are_listed_and_shown(server: ServerProcess) -> None:
    client = asked_by(server)
    names = [each.model for each in client.list().models]
    assert names == [MODEL, "json", "pirate", "tools"]
    first = client.list().models[0]
    assert first.size > 10**6 and len(first.digest) == 64 and first.details.parameter_size == "10.8M"
    found = client.show(MODEL)
    assert {"completion", "vision"} <= set(found.capabilities) and "messages" in found.template
    assert found.modelinfo[f"{found.details.family}.block_count"] > 0
    assert client.show("json").details.parent_model == MODEL
    assert server.get("/api/version")[1] == {"version": __version__}
    assert client.show(f"{MODEL}:latest") == found
    running = client.ps().models
    assert [(each.model, each.name, each.digest) for each in running] == [(name, name, first.digest) for name in names]
    assert running[0].size > first.size and running[0].size_vram == 0 and running[0].context_length == 1024
    assert running[0].details == first.details and running[0].expires_at.year > datetime.now().year + 20
    assert client.pull(f"{MODEL}:latest").status == "success"
    assert [each.status for each in client.pull("json", stream=True)] == ["success"]
    with pytest.raises(pytest.importorskip("ollama").ResponseError, match="did you mean shipped") as raised:
        client.pull("shiped")
    assert raised.value.status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n"),
        ({"options": {"repeat_last_n": 0, "presence_penalty": 1}}, "options.repeat_last_n"),
        ({"options": {"penalize_newline": False, "frequency_penalty": 1}}, "options.penalize_newline"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"num_kepp": 4}}, "options.num_kepp"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"num_keep": 4}}, "options.num_keep"),
        ({"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"seed": 1}, "seed": 2}, "options.seed"),
        ({"format": "xml"}, "format"),
        ({"shift": True}, "shift"),
        ({"think": "huge"}, "think"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 0, "logprobs": False}, "top_logprobs"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "images": [1]}]}, "messages"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1]}, "context"),
        ({"raw": True, "system": "x"}, "system"),
    ],
    ids=str,
)
def test_what_would_not_be_kept_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    is_chat = param not in ("template", "context", "system")
    given = {"model": MODEL, **({"messages": MESSAGES} if is_chat else {"prompt": "hi"}), **fields}
    with pytest.raises(HTTPError) as refused:
        (chat if is_chat else generate)(json.dumps(given).encode(), ServedModel(MODEL))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param.rpartition(".")[2] in refused.value.message


def test_options_and_thinking_are_those_of_the_inner_request() -> None:
    def read(**fields: Any) -> ParsedRequest:
        model = ServedModel(
            MODEL, params=SamplingParams(max_tokens=7), template_variables=frozenset(["enable_thinking"])
        )
        return chat(json.dumps({"model": MODEL, "messages": MESSAGES, **fields}).encode(), model)

    assert read().request.params == SamplingParams(max_tokens=7) and read().stream and not read(stream=False).stream
    free = read(options={"num_predict": -1, "seed": -1, "mirostat": 0, "stop": ["x"]}).request.params
    assert free == SamplingParams(max_tokens=None, stop=["x"])
    off = {"repeat_last_n": 64, "repeat_penalty": 1.0, "penalize_newline": False, "tfs_z": 1.0, "num_keep": 0}
    loading = {"num_gpu": 1, "num_thread": 4, "use_mmap": True, "mirostat": 0, "mirostat_tau": 5.0}
    taken = read(options=off | loading)
    assert taken.request.params == SamplingParams(max_tokens=7)
    assert taken.ignored == tuple(f"options.{each}" for each in loading if each != "mirostat")
    thoughts = {think: read(think=think).request.template_variables for think in (True, False, "low")}
    assert thoughts == {each: {"enable_thinking": bool(each)} for each in thoughts}
    assert read().conversation is not None and read(truncate=False).conversation is None


def test_errors_stand_as_text(server: ServerProcess) -> None:
    status, found, _ = server.ask("POST", "/api/chat", {"model": MODEL, "messages": MESSAGES, "colour": 1})
    assert status == 400 and found["error"].startswith("the field 'colour' is unknown")
    assert server.get("/api/nothing")[0] == 404
    _, _, headers = server.ask("POST", "/api/generate", {"model": MODEL, "prompt": "hi", "options": {"num_gpu": 1}})
    assert headers["edgellm-ignored"] == "options.num_gpu" and headers["content-type"] == "application/x-ndjson"


def test_bodies_need_no_content_type_but_those_of_pages_do(server: ServerProcess) -> None:
    """litellm sends none, `curl -d` that of a form."""
    body = {"model": MODEL, "messages": MESSAGES, "stream": False}
    own = f"http://{server.host}:{server.port}"
    for kind in ("", "application/x-www-form-urlencoded"):
        assert server.ask("POST", "/api/chat", body, {"content-type": kind})[0] == 200
        assert server.ask("POST", "/api/chat", body, {"content-type": kind, "origin": own})[0] == 415
        assert server.ask("POST", "/api/chat", body, {"content-type": kind, "origin": "null"})[0] == 403
    assert server.ask("POST", "/api/chat", body, {"content-type": "text/plain"})[0] == 415


def test_results_are_matched_to_calls_by_name_and_order() -> None:
    calls = [{"function": {"name": name, "arguments": {"n": n}}} for n, name in enumerate("aba")]
    tools = [{"role": "tool", "content": "", "tool_name": name} for name in "baa"]
    said, *results = chat_messages([{"role": "assistant", "tool_calls": calls}, *tools])
    ids = [call["id"] for call in said["tool_calls"]]
    assert [each["tool_call_id"] for each in results] == [ids[1], ids[0], ids[2]]
    assert said["tool_calls"][2]["function"] == {"name": "a", "arguments": '{"n": 2}'}


def test_images_do_not_count_as_text_and_text_does_not_count_as_images() -> None:
    image = base64.b64encode(bytes(range(256)) * 40).decode()
    shown = {"messages": [{"role": "user", "images": [image]}], "images": [image]}
    text = {"messages": [{"role": "user", "content": image}]}
    for value, is_taken in ((shown, True), (text, False)):
        body = json.dumps(value).encode()
        check_body(body, 10_000)
        try:
            check_images(body, value, 10_000)
            assert is_taken
        except HTTPError as error:
            assert not is_taken and error.status == 413
