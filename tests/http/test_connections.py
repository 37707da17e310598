"""Connections that are slow, silent, many, or gone, and a server that ends: with real sockets."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import openai
import pytest
from http_server import MODEL, ServerProcess, chat_body, raw_request, read_to_end, running, wait_for

#: An answer of several seconds: nothing but its limit ends it.
LONG = {"ignore_eos": True, "max_tokens": 700}
MOST = 40


@pytest.fixture(scope="module")
def strict() -> Iterator[ServerProcess]:
    """A server that waits for nobody for long."""
    limits = ["--header-seconds", 1, "--body-seconds", 1.2, "--stall-seconds", 1, "--max-connections", MOST]
    with running(*limits) as server:
        yield server


def closed(server: ServerProcess, reason: str) -> float:
    return server.metric("http_connections_closed_total", reason=reason)


def test_a_silent_connection_is_closed(strict: ServerProcess) -> None:
    before, started = closed(strict, "silent"), time.monotonic()
    assert read_to_end(strict.connect()) == b""
    assert 0.9 < time.monotonic() - started < 6 and closed(strict, "silent") == before + 1


def test_slow_headers_are_not_waited_for(strict: ServerProcess) -> None:
    """However often a byte comes."""
    connection, found = strict.connect(), b""
    connection.settimeout(0.05)
    started = time.monotonic()
    for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"x" * 1000:
        try:
            connection.sendall(bytes([byte]))
            found = connection.recv(1000)
            break
        except TimeoutError:
            pass
    assert found.startswith(b"HTTP/1.1 408 Request Timeout") and b'"slow_headers"' in found
    assert time.monotonic() - started < 6 and read_to_end(connection) == b""


def test_headers_that_come_in_pieces_but_in_time_are_answered(strict: ServerProcess) -> None:
    connection = strict.connect()
    for part in (b"GET /hea", b"lth HTTP/1.1\r\nHo", b"st: localhost\r\nConnection: close\r", b"\n\r\n"):
        connection.sendall(part)
        time.sleep(0.05)
    assert read_to_end(connection).startswith(b"HTTP/1.1 200")


def test_slow_bodies_are_not_waited_for(strict: ServerProcess) -> None:
    connection = strict.connect()
    request = raw_request(chat_body())
    connection.sendall(request[:-10])
    found = read_to_end(connection)
    assert found.startswith(b"HTTP/1.1 408") and b'"slow_body"' in found
    refused = strict.connect()  # an answer has gone before the body came, which never does
    refused.sendall(request[:-10].replace(b"application/json", b"text/plain"))
    assert read_to_end(refused).startswith(b"HTTP/1.1 415")


def test_an_idle_connection_is_kept_for_a_while_and_closed(strict: ServerProcess) -> None:
    connection = strict.connect()
    for _ in range(2):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = b""
        while not found.endswith(b"}"):
            found += connection.recv(1000)
        assert found.startswith(b"HTTP/1.1 200")
        time.sleep(0.2)
    assert read_to_end(connection) == b""


@pytest.mark.parametrize("data", [b"\0\1\2\3\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_http_is_answered_in_json(strict: ServerProcess, data: bytes) -> None:
    """The last one has no host, which HTTP/1.1 asks for."""
    connection = strict.connect()
    connection.sendall(data)
    head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "no_http"


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["without an end", "whole"])
@pytest.mark.parametrize("size", [20_000, 100_000])
def test_headers_have_a_limit_in_one_piece_too(strict: ServerProcess, size: int, end: bytes) -> None:
    connection = strict.connect()
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * size + end)
    head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431") and json.loads(body)["error"]["code"] == "long_headers"


@pytest.mark.parametrize(
    ("target", "host", "expected"),
    [
        ("http://localhost/v1/models/json?x", "evil.example", (200, "json")),
        ("HTTP://LOCALHOST:1", "localhost", (200, "<!doctype html>")),
        ("https://evil.example/health", "localhost", (421, "wrong_host")),
        ("http://me@localhost/health", "localhost", (421, "wrong_host")),
        ("localhost:80", "localhost", (404, "Not Found")),
    ],
)
def test_targets_may_name_the_host(strict: ServerProcess, target: str, host: str, expected: tuple[int, str]) -> None:
    """The header Host does not count beside them (RFC 9112, 3.2.2)."""
    connection = strict.connect()
    padding = "A: " + "x" * 15_000  # within the limit
    connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{padding}\r\nConnection: close\r\n\r\n".encode())
    found = read_to_end(connection).decode()
    assert found.startswith(f"HTTP/1.1 {expected[0]} ") and expected[1] in found


def test_connections_beyond_the_limit_are_closed(strict: ServerProcess) -> None:
    wait_for(lambda: strict.metric("http_connections") == 1)
    before = closed(strict, "too many")
    connections = [strict.connect() for _ in range(MOST + 20)]
    answers = [read_to_end(each) for each in connections]  # those within are closed as silent
    assert sum(found.startswith(b"HTTP/1.1 503") for found in answers) == 20
    assert answers[:MOST] == [b""] * MOST
    assert strict.chat(max_tokens=1)[0] == 200 and closed(strict, "too many") == before + 20


def is_served(server: ServerProcess) -> bool:
    """Whether a place among the connections is free, and who has it is answered."""
    try:
        return server.chat(max_tokens=2)[0] == 200
    except OSError:  # turned away before the request was sent
        return False


FLOOD = """
import resource, socket, sys
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
kept = []
for _ in range(int(sys.argv[2])):
    try:
        kept.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20))
    except OSError as error:
        print(error)
        break
print(len(kept), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("wanted", [3_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_idle_connections_of_another_process(strict: ServerProcess, wanted: int) -> None:
    count = min(wanted, int(subprocess.check_output(["bash", "-c", "ulimit -Hn"]).replace(b"unlimited", b"99999")) - 50)
    flood = subprocess.Popen(
        [sys.executable, "-c", FLOOD, str(strict.port), str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    before = closed(strict, "too many") + closed(strict, "silent")
    try:
        assert flood.stdout is not None
        assert int(flood.stdout.readline()) == count
        wait_for(lambda: is_served(strict), 20)
        assert strict.metric("http_connections") <= MOST
        assert closed(strict, "too many") + closed(strict, "silent") >= before + count - MOST
        assert strict.open_files() < MOST + 600
    finally:
        flood.communicate(b"")


def test_a_slow_reader_blocks_nobody_and_is_closed(strict: ServerProcess) -> None:
    """Its answer is computed to its end meanwhile; what it does not take is at most that answer."""
    before = closed(strict, "slow reader")
    stuck = strict.stream(receive_bytes=4096, logprobs=True, top_logprobs=20, ignore_eos=True, max_tokens=300)
    wait_for(lambda: strict.metric("requests_running") == 1)
    wait_for(lambda: closed(strict, "slow reader") == before + 1, 30)
    stuck.close()
    wait_for(lambda: strict.metric("requests_running") == 0)
    assert strict.chat(max_tokens=2)[0] == 200
    wait_for(lambda: strict.metric("http_connections") == 1)


def test_a_reader_that_is_slow_but_reads_gets_everything(strict: ServerProcess) -> None:
    slow = strict.stream(receive_bytes=4096, logprobs=True, top_logprobs=20, ignore_eos=True, max_tokens=100)
    found = b""
    while b"[DONE]" not in found:
        data = slow.recv(20_000)
        assert data, found[-500:]
        found += data
        time.sleep(0.02)
    slow.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_cancelled(server: ServerProcess, stream: bool) -> None:
    """Within a round, and it leaves its place in the queue, too."""
    before = server.metric("requests_ended_total", outcome="cancelled")
    connections = []
    for _ in range(3):
        connections.append(server.connect())
        connections[-1].sendall(raw_request(chat_body(stream=stream, **LONG)))
    wait_for(lambda: server.metric("requests_running") + server.metric("requests_waiting") == 3)
    for connection in connections:
        connection.close()
    began = server.processor_seconds()
    wait_for(lambda: server.metric("requests_ended_total", outcome="cancelled") == before + 3, 30)
    assert server.processor_seconds() - began < 2 and server.metric("requests_running") == 0
    wait_for(lambda: server.metric("http_answers") == 1)  # that of /metrics


def test_a_client_that_goes_away_while_it_sends(server: ServerProcess) -> None:
    for size in (10, 100):
        connection = server.connect()
        connection.sendall(raw_request(chat_body())[:-size])
        connection.close()
    wait_for(lambda: server.metric("http_body_bytes") == 0 and server.metric("http_answers") == 1)
    assert server.chat(max_tokens=1)[0] == 200


def test_random_ends_leave_nothing_behind(server: ServerProcess) -> None:
    """Streams that are broken off at any time, among others whose answers stay the same."""
    expected = server.chat()[1]["choices"][0]["message"]["content"]
    files = server.open_files()

    def break_off(number: int) -> None:
        connection = server.stream(temperature=1.0, seed=number, **LONG)
        connection.settimeout(0.02 * (number % 7) + 0.01)
        try:
            while connection.recv(50):
                pass
        except TimeoutError:
            pass
        connection.close()

    threads = [threading.Thread(target=break_off, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    assert all(server.chat()[1]["choices"][0]["message"]["content"] == expected for _ in range(3))
    for thread in threads:
        thread.join()
    wait_for(lambda: server.metric("http_answers") == 1 and server.metric("requests_running") == 0)
    wait_for(lambda: server.metric("http_connections") == 1 and server.metric("requests_waiting") == 0)
    assert server.open_files() <= files + 1


def test_sigterm_finishes_what_runs_and_turns_new_requests_away() -> None:
    with running() as server:
        stream = server.client().chat.completions.create(
            model=MODEL, messages=chat_body()["messages"], stream=True, max_tokens=120, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        server.terminate()
        wait_for(lambda: server.get("/health")[1] == {"status": "ending"})
        status, found, headers = server.chat()
        assert (status, found["error"]["code"], int(headers["retry-after"])) == (503, "ending", 5)
        with pytest.raises(openai.InternalServerError):
            server.client().models.list()
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(10) == 0
    with pytest.raises(ConnectionRefusedError):
        server.connect()


def test_sigterm_cancels_what_takes_too_long_and_says_so() -> None:
    with running("--shutdown-seconds", 0.3) as server:
        whole = server.connect()
        stream = server.stream(**LONG)
        stream.recv(100)
        whole.sendall(raw_request(chat_body(**LONG)))
        wait_for(lambda: server.metric("requests_waiting") == 1)
        server.terminate()
        found = read_to_end(stream)
        last = json.loads(found.split(b"data: ")[-1].partition(b"\n\n")[0])
        assert last["error"]["code"] == "ending" and b"[DONE]" not in found
        assert read_to_end(whole).startswith(b"HTTP/1.1 503")
        assert server.process.wait(5) == 0


def test_the_openai_client_raises_what_ends_a_stream() -> None:
    with running("--shutdown-seconds", 0) as server:
        stream = server.client().chat.completions.create(
            model=MODEL, messages=chat_body()["messages"], stream=True, max_tokens=700, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        server.terminate()
        with pytest.raises(openai.APIError, match="the server has ended"):
            list(stream)


def test_it_listens_while_the_model_is_loaded() -> None:
    """The first requests may come before that, and are told to ask again."""
    server = ServerProcess()
    try:
        with socket.create_connection((server.host, server.port)):
            states = set()
            while "ready" not in states:
                status, found, headers = server.get("/health")
                states.add(found["status"])
                time.sleep(0.05)  # asking without a pause holds up what is loaded
                assert (status == 200) == (found["status"] == "ready") and ("retry-after" in headers) == (status != 200)
            assert states == {"loading", "ready"}
        server.terminate()
        assert server.process.wait(10) == 0
    finally:
        server.process.kill()
