"""Two servers behind HAProxy and nginx with the documentation's configurations; one is killed, ends, or is full."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_server import MODEL, ServerProcess, chat_body, raw_request, wait_for
from proxy_process import NAME, PROGRAMS, ProxyProcess

from edgellm.opened_model import SHIPPED_MODEL

KEY = "open sesame".replace(" ", "-")
OPTIONS = ("--api-key", KEY, "--allowed-host", NAME, "--shutdown-seconds", 60, "--trusted-proxy", "127.0.0.1")
OPTIONS += ("--log-level", "info", "--log-format", "json")
TOYS = SHIPPED_MODEL / "scenes" / "toys.png"
STREAMS = 16
#: Tokens of an answer that others wait for, of the beginning that is surely seen of it, and of those that wait.
CUT, LONG, SHORT = 200, 40, 4
#: What `--queue-limit` is by default, and the one request at work that the shipped model has a slot for.
FULL = 65
_numbers = count()


class Pair:
    """Two servers; each keeps its port over restarts."""

    def __init__(self) -> None:
        with ThreadPoolExecutor() as pool:
            self.servers = list(pool.map(lambda _: ServerProcess(*OPTIONS, key=KEY), range(2)))
        for server in self.servers:
            server.wait_until_ready()

    def restart(self, index: int) -> None:
        """Start a server that has ended, on its port; it is being loaded then."""
        self.servers[index] = ServerProcess(*OPTIONS, "--port", self.servers[index].port, key=KEY)

    def answered(self) -> list[float]:
        """How many chats each has begun to answer."""
        return [
            server.metric("http_responses_total", path="/v1/chat/completions", status="200") for server in self.servers
        ]

    def waiting(self, index: int) -> float:
        server = self.servers[index]
        return server.metric("requests_waiting") + server.metric("requests_running")

    def close(self) -> None:
        for server in self.servers:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.fixture(scope="module", params=["haproxy", "nginx"])
def kind(request: pytest.FixtureRequest) -> str:
    for program in (request.param, "openssl"):
        if PROGRAMS.get(program, shutil.which(program)) is None:
            pytest.skip(f"there is no {program} on this machine (Debian: apt-get install {program})")
    return str(request.param)


@pytest.fixture(scope="module")
def proxy(kind: str, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    ports = [server.port for server in pair.servers]
    made = ProxyProcess(kind, ports, KEY, tmp_path_factory.mktemp(kind))
    wait_for(lambda: made.client.get("/health").status_code == 200)
    yield made
    made.close()


def ask(proxy: ProxyProcess, session: str | None = None, **fields: Any) -> httpx.Response:
    """A chat's answer through the proxy."""
    headers = {} if session is None else {"x-session-id": session}
    return proxy.client.post("/v1/chat/completions", json=chat_body(**fields), headers=headers)


def sessions(proxy: ProxyProcess, pair: Pair, each: int) -> list[list[str]]:
    """Names of new conversations, so many for each server, and which server the proxy has given them to."""
    found: list[list[str]] = [[], []]
    while min(map(len, found)) < each:
        name, before = f"conversation-{next(_numbers)}", pair.answered()
        assert ask(proxy, name, max_tokens=1).status_code == 200
        found[pair.answered()[1] - before[1] == 1].append(name)
        assert sum(map(len, found)) < 60, "one of the servers gets nothing"
    return [names[:each] for names in found]


@dataclass
class Stream:
    """A client of OpenAI's API that asks through the proxy, in a thread, and what it has seen; one whose answer is not
    streamed begins to see it when it is complete."""

    proxy: ProxyProcess
    session: str
    seed: int
    tokens: int
    is_streamed: bool = True
    text: str = ""
    pieces: int = 0
    finish_reason: str | None = None
    error: Exception | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            asked = drawn(self.seed, self.tokens) | {"extra_headers": {"x-session-id": self.session}}
            if not self.is_streamed:
                choice = self.proxy.openai.chat.completions.create(**asked).choices[0]
                self.text, self.finish_reason = choice.message.content or "", choice.finish_reason
                return
            for chunk in self.proxy.openai.chat.completions.create(**asked, stream=True):
                self.pieces += 1
                self.text += chunk.choices[0].delta.content or ""
                self.finish_reason = chunk.choices[0].finish_reason or self.finish_reason
        except Exception as error:
            self.error = error

    def expected(self, pair: Pair) -> str:
        return alone(pair.servers[1], self.seed, self.tokens)

    def is_whole(self, pair: Pair) -> bool:
        """Whether it ended well, with the answer that is given alone."""
        return self.error is None and self.finish_reason == "length" and self.text == self.expected(pair)


def drawn(seed: int, tokens: int) -> dict[str, Any]:
    return chat_body(temperature=0.8, seed=seed, max_tokens=tokens) | {"extra_body": {"ignore_eos": True}}


@cache
def alone(server: ServerProcess, seed: int, tokens: int) -> str:
    """An answer of a server that nothing else is asked of."""
    return server.client().chat.completions.create(**drawn(seed, tokens)).choices[0].message.content or ""


def begin_streams(proxy: ProxyProcess, pair: Pair, total: int) -> list[list[Stream]]:
    """As many streams, half of them for each server. The first one of the first server has an answer of `CUT` tokens,
    which is at its beginning while the others wait; a busy machine begins them slowly."""
    names = sessions(proxy, pair, 2)
    for seed, tokens in ((0, LONG), (0, SHORT), (1, SHORT)):
        alone(pair.servers[1], seed, tokens)
    streams = [[Stream(proxy, names[0][0], 0, CUT)], []]
    wait_for(lambda: streams[0][0].pieces > 0)
    for number in range(total - 1):
        index, seed = (number + 1) % 2, number // 2 % 2
        streams[index].append(Stream(proxy, names[index][seed], seed, SHORT, is_streamed=number % 8 < 6))
    wait_for(lambda: pair.waiting(0) >= total // 2 - 1)
    return streams


def join(streams: list[list[Stream]], seconds: float) -> None:
    """Wait for all; none may take longer."""
    until = time.monotonic() + seconds
    for stream in chain(*streams):
        stream.thread.join(max(0.0, until - time.monotonic()))
        assert not stream.thread.is_alive(), "a stream hangs"


def comes_back(proxy: ProxyProcess, pair: Pair, index: int) -> None:
    """Start a server anew; it gets requests again, and until then, nobody notices that it is not there."""
    pair.restart(index)
    until = time.monotonic() + 60
    while pair.answered()[index] == 0:
        assert ask(proxy, f"conversation-{next(_numbers)}", max_tokens=1).status_code == 200
        assert time.monotonic() < until, "the server gets nothing any more"
        time.sleep(0.05)
    pair.servers[index].wait_until_ready()


@pytest.mark.parametrize("rounds", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_a_killed_server(proxy: ProxyProcess, pair: Pair, rounds: int) -> None:
    """What it had not begun to answer the other one answers; what it was streaming ends with an error."""
    for _ in range(rounds):
        lose_one(proxy, pair)


def lose_one(proxy: ProxyProcess, pair: Pair) -> None:
    """Kill a server while it streams one answer and others wait, and start it anew."""
    streams = begin_streams(proxy, pair, STREAMS)
    lost = streams[0][0]
    assert lost.finish_reason is None
    pair.servers[0].process.kill()
    join(streams, 60)
    failed = [each for each in chain(*streams) if each.error is not None]
    assert failed == [lost]
    assert isinstance(lost.error, (openai.APIConnectionError, httpx.TransportError))
    beginning = alone(pair.servers[1], lost.seed, LONG)  # or more than that
    assert lost.finish_reason is None and (lost.text.startswith(beginning) or beginning.startswith(lost.text))
    assert all(each.is_whole(pair) for each in chain(*streams) if each is not lost)
    pair.servers[0].process.wait()
    comes_back(proxy, pair, 0)


def test_a_server_that_ends_loses_nothing(proxy: ProxyProcess, pair: Pair) -> None:
    """It finishes what it has taken; what comes then the other one answers, before health checks know of it and
    after."""
    streams = begin_streams(proxy, pair, 16)
    names = sorted({each.session for each in streams[0]})
    pair.servers[0].terminate()
    wait_for(lambda: pair.servers[0].get("/health")[1] == {"status": "ending"})
    turned_away = [ask(proxy, name, max_tokens=1) for name in names * 2]
    assert [each.status_code for each in turned_away] == [200] * 4
    join(streams, 60)
    assert all(each.is_whole(pair) for each in chain(*streams))
    assert pair.servers[0].process.wait(20) == 0, pair.servers[0].said
    assert ask(proxy, names[0], max_tokens=1).status_code == 200
    comes_back(proxy, pair, 0)


def test_conversations_stay_on_their_server(proxy: ProxyProcess, pair: Pair) -> None:
    """Each turn reuses the rows of the turns before it, which one server alone has."""
    names = [each[0] for each in sessions(proxy, pair, 1)]
    messages: list[list[dict[str, str]]] = [[], []]
    before = [0, 0]
    for turn in ("Where is the red cup?", "Please pick it up.", "What is on the table?"):
        for index, name in enumerate(names):
            messages[index].append({"role": "user", "content": turn})
            found = ask(proxy, name, messages=messages[index], max_tokens=12).json()
            messages[index].append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= before[index]
            before[index] = found["usage"]["prompt_tokens"] - 1


def test_a_browser_stays_on_the_server_of_its_page(proxy: ProxyProcess, pair: Pair) -> None:
    given = [proxy.client.get("/").headers["set-cookie"] for _ in range(2)]
    assert given[0] != given[1] and all("; Secure; HttpOnly; SameSite=Strict" in each for each in given)
    cookie = {"cookie": given[0].partition(";")[0]}
    assert "set-cookie" not in proxy.client.get("/", headers=cookie).headers
    before = pair.answered()
    origin = {"origin": f"https://{NAME}:{proxy.port}"}  # as pages ask
    for _ in range(5):
        found = proxy.client.post("/v1/chat/completions", json=chat_body(max_tokens=1), headers=cookie | origin)
        assert found.status_code == 200
    assert sorted(now - then for now, then in zip(pair.answered(), before, strict=True)) == [0, 5]


def test_requests_of_no_conversation_go_to_both(proxy: ProxyProcess, pair: Pair) -> None:
    before = pair.answered()
    wait_for(lambda: ask(proxy, max_tokens=1).status_code == 200 and min(map(gained(pair, before), range(2))) > 0)


def gained(pair: Pair, before: list[float]) -> Callable[[int], float]:
    now = pair.answered()
    return lambda index: now[index] - before[index]


def test_a_client_that_goes_away_is_cancelled(proxy: ProxyProcess, pair: Pair) -> None:
    """Whether it has been answered or waits."""
    for stream in (True, False):
        body = with_headers(raw_request(chat_body(ignore_eos=True, max_tokens=700, stream=stream)))
        connections = [proxy.connect() for _ in range(6)]
        for each in connections:
            each.sendall(body)
        wait_for(lambda: sum(map(pair.waiting, range(2))) == 6)
        for each in connections:
            each.close()
        wait_for(lambda: sum(map(pair.waiting, range(2))) == 0, 4)


def test_pieces_come_as_they_are_made(proxy: ProxyProcess) -> None:
    times: list[float] = []
    for _ in proxy.openai.chat.completions.create(**drawn(1, LONG), stream=True):
        times.append(time.monotonic())
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < (times[-1] - times[0]) / 2 and statistics.median(gaps) > 1e-4


def test_haproxy_speaks_no_http_2(proxy: ProxyProcess) -> None:
    """There a client could not tell a stream that a lost server left unfinished from a whole one."""
    with proxy.connect("h2", "http/1.1") as connection:
        assert connection.selected_alpn_protocol() == {"haproxy": "http/1.1", "nginx": "h2"}[proxy.kind]


def test_keys_hosts_and_bodies_are_passed_on(proxy: ProxyProcess) -> None:
    client, path = proxy.client, "/v1/chat/completions"
    wrong_key = client.post(path, json=chat_body(), headers={"authorization": "Bearer wrong"})
    assert (wrong_key.status_code, wrong_key.json()["error"]["code"]) == (401, "invalid_api_key")
    wrong_host = client.post(path, json=chat_body(), headers={"host": "elsewhere.example"})
    assert (wrong_host.status_code, wrong_host.json()["error"]["code"]) == (421, "wrong_host")
    for size, status in ((33, 413), (31, 200)):
        image = base64.b64encode(TOYS.read_bytes() + bytes((size << 20) * 3 // 4)).decode()
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        messages = [{"role": "user", "content": [shown, {"type": "text", "text": "What do you see?"}]}]
        data = json.dumps(chat_body(max_tokens=1, messages=messages)).encode()
        large = client.post(path, content=data, headers={"content-type": "application/json"})
        assert large.status_code == status
        assert status == 200 or large.json()["error"]["code"] == "too_large"
    assert client.get("/metrics").status_code == 404


def test_a_server_knows_the_address_that_asks(proxy: ProxyProcess, pair: Pair) -> None:
    """What a client says itself of its address is not believed."""
    ours = "127.0.0.9"
    with proxy.connect(address=ours) as connection:
        said = f"Host: {NAME}:{proxy.port}\r\nX-Forwarded-For: 127.0.0.8\r\nConnection: close\r\n"
        connection.sendall(f"GET /v1/nothing HTTP/1.1\r\n{said}Authorization: Bearer {KEY}\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
    wait_for(lambda: any(f'"client": "{ours}"' in server.said for server in pair.servers))
    assert not any("127.0.0.8" in server.said for server in pair.servers)


def with_headers(request: bytes, more: str = "") -> bytes:
    """A request with the key, and what more its headers are to have."""
    return request.replace(b"\r\n", f"\r\nAuthorization: Bearer {KEY}\r\n{more}".encode(), 1)


def fill(server: ServerProcess) -> list[socket.socket]:
    """Connections whose requests are all that a server runs and queues."""
    connections = []
    for _ in range(FULL):
        connections.append(server.connect())
        connections[-1].sendall(with_headers(raw_request(chat_body(ignore_eos=True, max_tokens=700))))
    wait_for(lambda: server.metric("requests_waiting") == FULL - 1)
    return connections


def test_a_full_server(proxy: ProxyProcess, pair: Pair) -> None:
    """nginx asks the other one. HAProxy knows how many requests it has given to a server itself, and gives it no more;
    a queue that others have filled it cannot know, and hands on what the server says."""
    (name,), _ = sessions(proxy, pair, 1)
    connections = fill(pair.servers[0])
    try:
        found = ask(proxy, name, max_tokens=1)
        if proxy.kind == "nginx":
            assert found.status_code == 200
        else:
            assert found.status_code == 429 and int(found.headers["retry-after"]) > 0
    finally:
        for each in connections:
            each.close()
    wait_for(lambda: pair.waiting(0) == 0)


def test_a_conversation_of_many_requests_fills_no_server(proxy: ProxyProcess, pair: Pair) -> None:
    """Requests of one conversation beyond what its server takes go to the other one; none is refused."""
    (name,), _ = sessions(proxy, pair, 1)
    refused = pair.servers[0].metric("requests_refused_total")
    body = with_headers(raw_request(chat_body(ignore_eos=True, max_tokens=700)), f"X-Session-Id: {name}\r\n")
    connections = [proxy.connect() for _ in range(FULL + 5)]
    try:
        for each in connections:
            each.sendall(body)
        wait_for(lambda: pair.waiting(0) == FULL and pair.waiting(1) > 0)
        if proxy.kind == "haproxy":
            assert pair.servers[0].metric("requests_refused_total") == refused
    finally:
        for each in connections:
            each.close()
    wait_for(lambda: pair.waiting(0) + pair.waiting(1) == 0)


def test_without_any_server_there_is_an_error_of_openai_s_form(kind: str, tmp_path: Path) -> None:
    with socket.socket() as first, socket.socket() as second:  # which listen on nothing
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        proxy = ProxyProcess(kind, [first.getsockname()[1], second.getsockname()[1]], KEY, tmp_path)
        try:
            with pytest.raises(openai.InternalServerError, match="ask again soon") as raised:
                proxy.openai.chat.completions.create(model=MODEL, messages=chat_body()["messages"])
            assert raised.value.code == "unavailable"
        finally:
            proxy.close()
