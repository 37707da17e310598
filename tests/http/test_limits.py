"""What one request, or one client, may cost: bodies before they are parsed, images, and threads that read."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from edgellm.asynchronous import AsyncLLM
from edgellm.decoding.sequence import DecodingSequence
from edgellm.errors import EngineError, RequestError, TemplateError, did_you_mean
from edgellm.http import completions, fields
from edgellm.http.app import Service
from edgellm.http.bodies import MOST_VALUES, TEXT_BYTES, check_body, check_images
from edgellm.http.errors import HTTPError, http_error, without_folders
from edgellm.http.fields import ServedModel
from edgellm.http.guard import Guard
from edgellm.http.readers import ImageMemory, Readers
from edgellm.opened_model import SHIPPED_MODEL

MODEL = ServedModel("m")
DATA = "data:image/png;base64," + "A" * TEXT_BYTES


def showing(url: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return {"model": "m", "messages": [{"role": "user", "content": parts}], **more}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a" * (TEXT_BYTES - 100)},
        {"prompt": "[,{" * (TEXT_BYTES // 4)},
        {"prompt": '",\\' * (TEXT_BYTES // 8)},
        {"prompt": [12] * (MOST_VALUES + 1)},
        {"bad_words": [[number, number] for number in range(99_000)]},
        showing(DATA),
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": DATA}]}]},
    ],
    ids=["a long text", "brackets in a text", "quotes in a text", "token ids", "words of ids", "an image", "an input"],
)
def test_bodies_that_cost_little_are_taken(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    check_body(data, TEXT_BYTES)
    check_images(data, body, TEXT_BYTES)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" + b"[]," * 400_000 + b"[]]", "more than 300,000 JSON values"),
        (b'{"a":"\\",[",' + b'"a":1,' * (MOST_VALUES + 1) + b'"b":1}', "more than 300,000 JSON values"),
        (b"[" + b'"",' * (MOST_VALUES + 1) + b"1]", "more than 300,000 JSON values"),
        (b"[" + b"[1]," * (MOST_VALUES + 1) + b"1]", "more than 300,000 JSON values"),
        (b'{"prompt": "' + b"a" * TEXT_BYTES + b'"}', "bytes beside its images"),
        (b'{"prompt": "\\"data:' + b"a" * TEXT_BYTES + b'"}', "bytes beside its images"),
        (b'["data:",' * 400_000 + b"1", "bytes beside its images"),
        (json.dumps({"model": "m", "prompt": DATA}).encode(), "bytes beside its images"),
        (json.dumps({"model": "m", DATA: 1}).encode(), "bytes beside its images"),
        (json.dumps({"model": "m", "messages": [{"role": "user", "content": DATA}]}).encode(), "beside its images"),
        (json.dumps(showing("data:,", prompt=DATA)).encode(), "bytes beside its images"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else "",
)
def test_bodies_that_cost_much_are_refused_before_anything_of_them_is_read(body: bytes, words: str) -> None:
    with pytest.raises(HTTPError, match=words) as raised:
        completions.completion(body, MODEL)
    assert (raised.value.status, raised.value.code) == (413, "body_too_large")


def test_what_is_found_in_hostile_bodies_is_found_in_one_pass() -> None:
    for body in (b'"' + b'\\"' * 700_000, b'"\\' * 700_000, b"[1" * 700_000, b'[,"data:"' * 100_000):
        started = time.process_time()
        try:
            check_body(body, TEXT_BYTES)
        except HTTPError as error:
            assert error.status == 413
        assert time.process_time() - started < 1


def test_long_names_are_cut() -> None:
    name = "temperatur" * 150_000
    started = time.process_time()
    with pytest.raises(HTTPError) as raised:
        completions.completion(json.dumps({"model": "m", "prompt": "a", name: 1}).encode(), MODEL)
    assert time.process_time() - started < 1
    assert len(raised.value.message) <= 2000 and raised.value.param == name[:100]
    assert did_you_mean("temprature", ["temperature"]) == ": did you mean temperature?"
    part = {"type": "image_url", "image_url": {"url": "data:,", "x" * 100_000: 1}}
    with pytest.raises(HTTPError) as raised:
        completions.chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).encode(), MODEL)
    assert len(raised.value.message) <= 2000


def png(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_images_of_a_request_are_limited_together() -> None:
    model = ServedModel("m", image_pixels=100)
    image = {"type": "image_url", "image_url": {"url": png(10, 10)}}

    def ask(count: int) -> int:
        messages = [{"role": "user", "content": [image] * count}]
        return completions.chat(json.dumps({"model": "m", "messages": messages}).encode(), model).pixels

    assert ask(4) == 400
    with pytest.raises(HTTPError, match=r"images of 500 pixels: at most 400 are taken.*--max-image-pixels"):
        ask(5)


class Sized:
    """An image that was prepared."""

    held_pixels = 100


def test_images_of_all_requests_are_limited_until_they_are_encoded() -> None:
    memory = ImageMemory(250)
    waiting = DecodingSequence((), None, None, prepared_media=(Sized(), Sized()))  # type: ignore[arg-type]
    with memory.reading(200) as hand_over:
        with pytest.raises(HTTPError, match="all the room") as raised, memory.reading(100):
            pass
        assert raised.value.status == 503 and "retry-after" in raised.value.headers
        hand_over(waiting)
    with memory.reading(0), memory.reading(50), pytest.raises(HTTPError), memory.reading(1):
        pass
    waiting.prepared_media = ()
    with memory.reading(250):
        pass


class Blocked:
    """Functions that wait until they may go on, and when each was begun."""

    def __init__(self) -> None:
        self.go_on, self.begun = threading.Event(), list[str]()

    def __call__(self, name: str) -> Callable[[], str]:
        def wait() -> str:
            self.begun.append(name)
            self.go_on.wait(20)
            return name

        return wait


def test_a_client_does_not_keep_others_waiting() -> None:
    async def ask() -> None:
        readers, blocked = Readers(3), Blocked()
        asked = [asyncio.ensure_future(readers.run(name[0], blocked(name))) for name in ("a1", "a2", "a3", "a4", "b1")]
        await asyncio.sleep(0.1)
        assert blocked.begun == ["a1", "a2", "b1"]
        asked += [asyncio.ensure_future(readers.run(name[0], blocked(name))) for name in ("a5", "c1", "b2")]
        asked.pop(3).cancel()  # a client that goes away while it waits
        await asyncio.sleep(0.1)
        blocked.go_on.set()
        assert await asyncio.gather(*asked) == ["a1", "a2", "a3", "b1", "a5", "c1", "b2"]
        assert blocked.begun[3] == "c1" and "a4" not in blocked.begun
        with pytest.raises(ZeroDivisionError):
            await readers.run("a", lambda: 1 // 0)
        blocked = Blocked()
        asked = [asyncio.ensure_future(readers.run(name, blocked(name), name != "c")) for name in "abc"]
        await asyncio.sleep(0.1)
        assert blocked.begun == ["a", "c"]  # of large ones one at a time
        blocked.go_on.set()
        assert await asyncio.gather(*asked) == ["a", "b", "c"]

    asyncio.run(ask())


def test_threads_that_take_too_long_are_lost_and_replaced_up_to_a_bound() -> None:
    async def ask() -> None:
        readers, blocked = Readers(2, 0.05, 1), Blocked()
        for number in range(2):
            with pytest.raises(HTTPError, match=r"more than 0\.05 seconds to be read") as raised:
                await readers.run("a", blocked(str(number)))
            assert raised.value.status == 400 and readers.lost == number + 1 and not readers.are_lost
        assert await readers.run("b", lambda: "read") == "read"
        with pytest.raises(HTTPError):
            await readers.run("b", blocked("2"))
        assert readers.are_lost
        blocked.go_on.set()  # what ends after all is lost no more
        while readers.lost:
            await asyncio.sleep(0.01)
        assert await readers.run("a", lambda: "read") == "read"

    asyncio.run(ask())


def test_health_tells_of_lost_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, blocked = fields.parse_json, threading.Event()

    def slow(body: bytes, *arguments: Any) -> Any:
        if b"forever" in body:
            blocked.wait(20)
        return parse(body, *arguments)

    async def ask() -> None:
        service = Service(AsyncLLM(SHIPPED_MODEL, backend="numpy"), MODEL, Guard())
        await service.open()
        service._readers = Readers(2, 0.1, 1)
        transport = httpx.ASGITransport(service.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for lost in (1, 2, 3):
                found = await client.post("/tokenize", json={"prompt": "forever"})
                assert found.status_code == 400 and found.json()["error"]["code"] == "reading_time"
                health = await client.get("/health")
                assert health.json() == {"status": "stuck" if lost == 3 else "ready", "lost_readers": lost}
                assert health.status_code == (503 if lost == 3 else 200)
                found = await client.post("/tokenize", json={"prompt": "hello"})
                assert found.status_code == (503 if lost == 3 else 200), found.text
            blocked.set()
            while (health := await client.get("/health")).json() != {"status": "ready"}:
                await asyncio.sleep(0.01)
        await service._llm.close()

    monkeypatch.setattr(fields, "parse_json", slow)
    asyncio.run(ask())


class Read:
    """Something that was read of a request."""


def test_a_refused_request_is_let_go_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when garbage is collected: a body may have megabytes."""
    read: list[weakref.ref[Read]] = []

    def refuse(*_: Any) -> None:
        held = Read()
        read.append(weakref.ref(held))
        raise RequestError("no JSON")

    async def ask() -> None:
        service = Service(AsyncLLM(SHIPPED_MODEL, backend="numpy"), MODEL, Guard())
        await service.open()
        transport = httpx.ASGITransport(service.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            gc.disable()
            try:
                assert (await client.post("/tokenize", json={})).status_code == 400
                await asyncio.sleep(0.05)
                assert [each() for each in read] == [None]
            finally:
                gc.enable()
        await service._llm.close()

    monkeypatch.setattr(fields, "parse_json", refuse)
    asyncio.run(ask())


def test_errors_name_no_folder_of_the_server(tmp_path: Path) -> None:
    told = http_error(EngineError(f"{tmp_path}/plans/base.engine is damaged: build {tmp_path} anew"), {})
    assert told.message == f"base.engine is damaged: build {tmp_path.name} anew"
    known = without_folders(f"the template of {tmp_path}/a.json of /my/own: '#/a/b'", (tmp_path,))
    assert known == "the template of a.json of /my/own: '#/a/b'"
    for error in (RequestError("#/a/b, 1/2, http://x/y/z"), TemplateError("/a/b is the client's own")):
        assert http_error(error, {}).message == str(error)


def test_tools_that_a_template_does_not_know_name_no_folder(tmp_path: Path) -> None:
    from edgellm.text.template import ChatTemplate

    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")

    async def ask() -> httpx.Response:
        template = ChatTemplate.from_file(tmp_path / "plain.jinja")
        service = Service(AsyncLLM(SHIPPED_MODEL, backend="numpy"), MODEL, Guard(), template=template)
        await service.open()
        transport = httpx.ASGITransport(service.app())
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [{"name": "look"}]}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found = await client.post("/v1/chat/completions", json=body)
        await service._llm.close()
        return found

    found = asyncio.run(ask())
    assert found.status_code == 400 and "plain.jinja" in found.text and tmp_path.name not in found.text
