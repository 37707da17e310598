"""Requests that are refused: each with its status, and the field or the reason by name."""

from __future__ import annotations

import base64
import io
import json
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from http_server import MODEL, ServerProcess, chat_body, raw_request, read_to_end, running, wait_for
from PIL import Image

from edgellm.opened_model import SHIPPED_MODEL

KEY, OTHER_KEY = "key-of-the-robot", "key-of-the-tablet"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that asks for a key, is known by a further name and to pages of another origin, and takes little."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# of the kitchen\n{OTHER_KEY}\n")
    options: list[object] = ["--api-key", KEY, "--api-key-file", keys, "--allowed-host", "robot.local"]
    options += ["--allowed-origin", "https://robot.example", "--max-body-mib", 1, "--max-images", 1]
    options += ["--max-image-pixels", 10_000, "--model-name", "pip", "--system", "You are a cat."]
    with running(*options, key=KEY) as server:
        yield server


WRONG_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "missing"),
    ({"model": 7}, "model", "no model 7"),
    ({"messages": None}, "messages", "missing"),
    ({"messages": []}, "messages", "no messages"),
    ({"messages": "hi"}, "messages", "expected a list"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages", "role 'robot'"),
    ({"messages": [{"role": "user"}]}, "messages", "no content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages",
        "is no sound: sounds are taken as base64",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "/etc/clip.mp4"}}]}]},
        "messages",
        "is no video: videos are taken as base64 and data URLs alone",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": "data:,x"}]}]},
        "messages",
        "this model has no encoder of videos",
    ),
    ({"n": 2}, "n", "one answer"),
    ({"n": True}, "n", "one answer"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "with stream alone"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "'usage'"),
    ({"temperature": -0.1}, "temperature", "from 0 to 100"),
    ({"temperature": "hot"}, "temperature", "from 0 to 100"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": [1]}, "frequency_penalty", "from -2 to 2"),
    ({"seed": 1.5}, "seed", "whole number"),
    ({"max_tokens": 0}, "max_tokens", "from 1"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "from 1"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
    ({"stop": [""]}, "stop", "empty string"),
    ({"stop": ["x"] * 33}, "stop", "at most 32"),
    ({"stop": "x" * 1001}, "stop", "1000 characters"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "whole number"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "vocabulary has 4096"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "nothing could be said"),
    ({"top_logprobs": 2}, "top_logprobs", "without logprobs"),
    ({"top_logprobs": 0}, "top_logprobs", "without logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"logprobs": 2}, "logprobs", "true or false"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "robot"}}}},
        "response_format",
        "robot",
    ),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format", "ignore_eos"),
    ({"guided_json": '{"type": '}, "guided_json", "OpenAI's field for this is response_format"),
    ({"guided_choice": []}, "guided_choice", "OpenAI's field for this is response_format"),
    ({"grammar": 'root ::= "yes"'}, "grammar", "'::=', as llama.cpp's grammars do"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "response_format"),
    ({"structured_outputs": {}}, "structured_outputs", "response_format"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "one thing"),
    ({"tools": [{"type": "function", "function": {"name": "a wave"}}]}, "tools[0].function.name", "letters"),
    ({"tool_choice": "required"}, "tool_choice", "has no tools"),
    ({"functions": [{"name": "wave"}]}, "functions", "not served"),
    ({"priority": "high"}, "priority", "whole number from -1000000 to 1000000"),
    ({"priority": True}, "priority", "whole number"),
    ({"priority": 1.5}, "priority", "whole number"),
    ({"priority": 10**7}, "priority", "whole number"),
    ({"deadline": "soon"}, "deadline", "number of seconds"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "minimal"),
    ({"reasoning": {"effort": "huge"}}, "reasoning_effort", "minimal"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, "reasoning.effort", "give one of them"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "values by name"),
    ({"continue_final_message": True}, "continue_final_message", "assistant"),
    ({"temprature": 1}, "temprature", "did you mean temperature"),
    ({"modalities": ["audio"]}, "modalities", "text"),
    ({"verbosity": "low"}, "verbosity", "not served"),
    ({"web_search_options": {}}, "web_search_options", "not served"),  # OpenAI's API searches by its own settings then
]


@pytest.mark.parametrize(("fields", "param", "words"), WRONG_FIELDS, ids=lambda value: str(value)[:50])
def test_wrong_fields_are_named(server: ServerProcess, fields: dict[str, Any], param: str, words: str) -> None:
    status, found, _ = server.chat(**fields)
    error = found["error"]
    assert status == (404 if param == "model" and fields["model"] is not None else 400), found
    assert error["param"] == param and words in error["message"], error
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": ["a", 3]}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 5, "n": 13}, "n"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "n"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [4096]}, "prompt"),
        ("/v1/completions", {"prompt": [2**40]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, "best_of"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "messages": []}, "messages"),
        ("/v1/responses", {"input": None}, "input"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": [{"type": "web_search_call"}]}, "input"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input"),
        ("/v1/responses", {"input": [{"type": "reasoning", "content": 3}]}, "input"),
        ("/v1/responses", {"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": "a", "background": True}, "background"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ("/v1/responses", {"input": "a", "truncation": "oldest"}, "truncation"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
    ],
)
def test_other_endpoints_name_wrong_fields_too(
    server: ServerProcess, path: str, fields: dict[str, Any], param: str
) -> None:
    status, found, _ = server.ask("POST", path, {"model": MODEL, **fields})
    assert (status, found["error"]["param"]) == (400, param), found


def test_a_name_that_is_reported_writes_no_header(server: ServerProcess) -> None:
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 1, "include": ["a\r\nset-cookie: b=c", "\u00e9"]}
    status, _, headers = server.ask("POST", "/v1/responses", body)
    assert (status, headers["edgellm-ignored"]) == (200, "include.a??set-cookie: b=c, include.?")
    assert "set-cookie" not in headers


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b'"text"', "expected a JSON object"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
    ],
)
def test_bodies_that_are_no_json_objects(server: ServerProcess, body: bytes, words: str) -> None:
    status, found, _ = server.ask("POST", "/v1/chat/completions", body)
    assert status == 400 and words in found["error"]["message"] and found["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_other_content_types(server: ServerProcess, kind: str) -> None:
    """A page of any origin may send these without being asked for more."""
    status, found, _ = server.ask("POST", "/v1/chat/completions", chat_body(), {"content-type": kind})
    assert status == 415 and "application/json" in found["error"]["message"]


def test_encoded_bodies_and_json_with_a_character_set(server: ServerProcess) -> None:
    path, body = "/v1/chat/completions", chat_body(max_tokens=1)
    assert server.ask("POST", path, body, {"content-encoding": "gzip"})[0] == 415
    assert server.ask("POST", path, body, {"content-type": "Application/JSON; charset=utf-8"})[0] == 200


def test_paths_and_methods(server: ServerProcess) -> None:
    for method, path, expected in (
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/models", 405),
        ("GET", "/v1/embeddings", 405),
        ("GET", "/v1/models/", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/page.html", 404),
        ("OPTIONS", "/v1/chat/completions", 405),
    ):
        status, found, _ = server.ask(method, path)
        assert status == expected and found["error"]["message"], (method, path, status)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "127.0.0.1@evil", "a b"]
)
def test_foreign_hosts_are_refused(server: ServerProcess, host: str) -> None:
    """A page's own name that was made to mean this machine."""
    for path in ("/health", "/v1/models", "/metrics"):
        status, found, _ = server.get(path, host=host)
        assert (status, found["error"]["code"]) == (421, "wrong_host")


def test_names_of_this_machine_are_its_own(server: ServerProcess, guarded: ServerProcess) -> None:
    for host in ("localhost", f"LOCALHOST:{server.port}", "127.0.0.1:1", "[::1]:8000"):
        assert server.get("/health", host=host)[0] == 200
    assert server.get("/health", host="robot.local")[0] == 421
    assert guarded.get("/health", host="robot.local:8000")[0] == 200
    assert guarded.get("/health", host="10.0.0.7")[0] == 421  # it listens on the loopback address alone


def test_pages_of_other_origins_are_refused(server: ServerProcess, guarded: ServerProcess) -> None:
    own = f"http://127.0.0.1:{server.port}"
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", own.replace("http", "ftp")):
        status, found, headers = server.get("/v1/models", origin=origin)
        assert (status, found["error"]["code"]) == (403, "wrong_origin")
        assert "access-control-allow-origin" not in headers
    assert server.get("/v1/models", origin=own)[0] == 200
    ours = {"origin": "https://robot.example", "authorization": f"Bearer {KEY}"}
    status, _, headers = guarded.get("/v1/models", **ours)
    assert status == 200 and headers["access-control-allow-origin"] == "https://robot.example"
    before = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    status, _, headers = guarded.ask("OPTIONS", "/v1/chat/completions", None, {"origin": ours["origin"], **before})
    assert status == 204 and "authorization" in (allowed := headers["access-control-allow-headers"])
    assert "x-session-id" in allowed  # by which proxies keep a conversation on one server
    status, _, headers = guarded.ask("OPTIONS", "/v1/chat/completions", None, {"origin": "https://a.b", **before})
    assert status == 403 and "access-control-allow-headers" not in headers


@pytest.mark.parametrize(
    "given", [None, "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xe9"]
)
def test_missing_and_wrong_keys(guarded: ServerProcess, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    for path in ("/v1/models", "/metrics", "/v1/nothing"):
        status, found, answered = guarded.get(path, **headers)
        assert (status, found["error"]["code"]) == (401, "invalid_api_key")
        assert answered["www-authenticate"] == "Bearer" and KEY not in found["error"]["message"]
    assert guarded.get("/health")[0] == 200


def test_each_key_opens_and_none_is_logged(guarded: ServerProcess) -> None:
    for key in (KEY, OTHER_KEY):
        assert guarded.get("/v1/models", authorization=f"bearer {key}")[0] == 200
    with pytest.raises(openai.AuthenticationError):
        guarded.client(api_key="wrong").models.list()
    assert KEY not in guarded.said and OTHER_KEY not in guarded.said


def test_the_server_s_name_and_system_prompt(guarded: ServerProcess) -> None:
    client = guarded.client()
    assert next(iter(client.models.list())).id == "pip"
    messages: Any = [{"role": "user", "content": "hi"}]
    with_system = guarded.ask("POST", "/tokenize", {"messages": messages}, {"authorization": f"Bearer {KEY}"})[1][
        "count"
    ]
    own = [{"role": "system", "content": "You are a cat."}, *messages]
    found = guarded.ask("POST", "/tokenize", {"messages": own}, {"authorization": f"Bearer {KEY}"})[1]
    assert found["count"] == with_system


def test_bodies_beyond_the_limit(guarded: ServerProcess) -> None:
    client = guarded.client()
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(model="pip", messages=[{"role": "user", "content": "x" * (1 << 20)}])
    assert raised.value.status_code == 413 and "1,048,576 bytes" in raised.value.message
    connection = guarded.connect()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {KEY}\r\n"
    connection.sendall(f"{head}Content-Length: 2000000\r\nExpect: 100-continue\r\n\r\n".encode())
    assert read_to_end(connection).startswith(b"HTTP/1.1 413")
    connection = guarded.connect()
    connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    with pytest.raises(OSError):  # it answers, and closes, after what it reads in vain
        for _ in range(100):
            connection.sendall(b"20000\r\n" + b"x" * 0x20000 + b"\r\n")
    assert guarded.metric("http_body_bytes") == 0


def test_bodies_together_beyond_what_is_held(guarded: ServerProcess) -> None:
    """Whoever sends halves of large bodies on many connections takes a bounded part of the memory."""
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {KEY}\r\nContent-Length: 1000000\r\n\r\n"
    with ExitStack() as opened:
        connections = [opened.enter_context(guarded.connect()) for _ in range(6)]
        for connection in connections:
            connection.sendall(head.encode() + b"x" * 900_000)
        refused, _, _ = select.select(connections, [], [], 10)  # which of them depends on how their bytes arrive
        assert refused and all(read_to_end(each).startswith(b"HTTP/1.1 503") for each in refused)
        assert guarded.metric("http_body_bytes") <= 4 << 20
    wait_for(lambda: guarded.metric("http_body_bytes") == 0)


def image_url(width: int, height: int) -> str:
    data = io.BytesIO()
    Image.new("RGB", (width, height)).save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"image_url": {"url": f"file://{SHIPPED_MODEL}/scenes/toys.png"}}, "data URLs alone"),
        ({"image_url": {"url": str(SHIPPED_MODEL / "scenes" / "toys.png")}}, "data URLs alone"),
        ({"image_url": {"url": "http://localhost/a.png"}}, "data URLs alone"),
        ({"image_url": 7}, "data URLs alone"),
        ({"path": str(SHIPPED_MODEL / "scenes" / "toys.png")}, "has path"),
        ({"type": "image", "image": str(SHIPPED_MODEL / "scenes" / "toys.png")}, "has image"),
        ({"image_url": {"url": image_url(1, 1)}, "path": "/etc/passwd"}, "has path"),
        ({"image_url": {"url": "data:image/png;base64,####"}}, "not base64"),
        ({"image_url": {"url": "data:image/png;base64,QUJD"}}, "not an image"),
        ({"image_url": {"url": image_url(101, 100)}}, "10,100 pixels"),
    ],
)
def test_images_from_elsewhere_and_too_large_ones(guarded: ServerProcess, part: dict[str, Any], words: str) -> None:
    """No request reads a file of the server's machine."""
    content = [{"type": "image_url", **part}, {"type": "text", "text": "What is it?"}]
    body = {"model": "pip", "messages": [{"role": "user", "content": content}]}
    for path in ("/v1/chat/completions", "/tokenize"):
        status, found, _ = guarded.ask("POST", path, body, {"authorization": f"Bearer {KEY}"})
        assert status == 400 and words in found["error"]["message"], found
        assert found["error"]["param"] == "messages"


def test_too_many_images(guarded: ServerProcess) -> None:
    part = {"type": "image_url", "image_url": {"url": image_url(2, 2)}}
    body = {"model": "pip", "messages": [{"role": "user", "content": [part, part]}]}
    _, found, _ = guarded.ask("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {KEY}"})
    assert found["error"]["code"] == "too_many_images"


def test_a_full_queue_says_when_to_ask_again() -> None:
    with running("--queue-limit", 1) as server:
        several = {"model": MODEL, "prompt": ["The"] * 9, "max_tokens": 900, "ignore_eos": True}
        assert server.ask("POST", "/v1/completions", several)[0] == 429  # those that found a place are cancelled
        wait_for(lambda: not server.metric("requests_running") + server.metric("requests_waiting"), 5)
        assert server.metric("requests_ended_total", outcome="cancelled") >= 1
        streams = [server.stream(ignore_eos=True, max_tokens=600)]
        streams[0].recv(100)  # it runs
        streams.append(server.stream(ignore_eos=True, max_tokens=600))
        while server.metric("requests_waiting") < 1:
            pass
        status, found, headers = server.chat()
        assert (status, found["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError):
            server.client().responses.create(model=MODEL, input="hi", stream=True)
        for stream in streams:
            stream.close()


def test_a_page_sees_no_other_s_answer_through_pipelining(server: ServerProcess) -> None:
    """Two requests sent at once on one connection are answered in their order."""
    connection = server.connect()
    last = raw_request({"prompt": "a"}, "/tokenize").replace(b"Host:", b"Connection: close\r\nHost:")
    connection.sendall(raw_request({"prompt": "The red cup"}, "/tokenize") + last)
    found = [json.loads(part[: part.index(b"}") + 1]) for part in read_to_end(connection).split(b"\r\n\r\n")[1:]]
    assert len(found) == 2 and found[0]["count"] > found[1]["count"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--host", "0.0.0.0"], 2, "--api-key-file"),
        (["--api-key", ""], 1, "key is empty"),
        (["--api-key", "two words"], 1, "spaces"),
        (["--api-key-file", "missing"], 1, "missing"),
        (["--port", "70000"], 2, "--port"),
        (["--model", "missing"], 1, "missing"),
        (["--model-name", "json"], 1, "LoRA adapter"),
        (["--queue-limit", "0"], 2, "--queue-limit"),
        (["--max-connections", "100000000"], 1, "open files"),
        (["--chat-template", "missing"], 1, "missing"),
    ],
)
def test_wrong_options(
    edgellm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found, _, err = edgellm("serve", *arguments)
    assert found == code and words in err, err


def test_a_port_that_is_taken(edgellm: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found, _, err = edgellm("serve", "--port", taken.getsockname()[1], "--backend", "numpy")
    assert found == 1 and "cannot listen" in err, err
