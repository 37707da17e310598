"""Many clients at a time, well-behaved and not: answers stay what they are alone, and nothing is left behind."""

from __future__ import annotations

import random
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from http_server import MODEL, ServerProcess, chat_body, raw_request, read_to_end, running

from edgellm import LLM, SamplingParams

CLIENTS = 64
QUESTIONS = (
    "Where is the red cup?",
    "What is on the table?",
    "Please pick up the red cup.",
    "How full is your battery?",
)
#: What is drawn for an answer: few, so that each has been asked alone before.
SEEDS = (1, 2)
LIMIT = 6
BAD = (b"{", b"[]", b'{"model": "shipped"}', b'{"model": "x", "messages": []}', b"\xff" * 100)


def drawn(question: str, seed: int, stream: bool) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    return {
        "model": MODEL,
        "messages": messages,
        "temperature": 0.8,
        "seed": seed,
        "max_tokens": LIMIT,
        "stream": stream,
    }


class Clients:
    """Clients that ask until they are to stop, each in its own thread, and count what they saw."""

    def __init__(self, server: ServerProcess, expected: dict[tuple[str, int], str]) -> None:
        self.server, self.expected = server, expected
        self.seen: Counter[str] = Counter()
        self.wrong: list[object] = []
        self.stop = threading.Event()

    def run(self, number: int) -> None:
        chance = random.Random(number)
        acts: list[Callable[[random.Random], str]] = [self.ask] * 4 + [
            self.break_off,
            self.read_slowly,
            self.send_nonsense,
        ]
        while not self.stop.is_set():
            try:
                self.seen[chance.choice(acts)(chance)] += 1
            except Exception as error:
                self.wrong.append(error)
                return

    def ask(self, chance: random.Random) -> str:
        """Ask as clients should, and compare the answer; a full queue is asked again."""
        question, seed, stream = chance.choice(QUESTIONS), chance.choice(SEEDS), chance.random() < 0.7
        if stream:
            chunks = self.server.client(max_retries=20).chat.completions.create(**drawn(question, seed, True))
            text = "".join(each.choices[0].delta.content or "" for each in chunks)
        else:
            found = self.server.client(max_retries=20).chat.completions.create(**drawn(question, seed, False))
            text = found.choices[0].message.content
        if text != self.expected[question, seed]:
            self.wrong.append((question, seed, text))
        return "answered"

    def break_off(self, chance: random.Random) -> str:
        """Go away at any time."""
        connection = self.server.stream(ignore_eos=True, max_tokens=500, temperature=1.0, seed=chance.randrange(9))
        connection.settimeout(chance.random())
        try:
            for _ in range(chance.randrange(5)):
                connection.recv(100)
        except TimeoutError:
            pass
        connection.close()
        return "broken off"

    def read_slowly(self, chance: random.Random) -> str:
        """Take a few bytes now and then."""
        connection = self.server.connect(2048)
        connection.sendall(raw_request(drawn(chance.choice(QUESTIONS), 1, True)))
        connection.settimeout(60)
        try:
            while (data := connection.recv(200)) and b"[DONE]" not in data:
                time.sleep(0.01)
        finally:
            connection.close()
        return "read slowly"

    def send_nonsense(self, chance: random.Random) -> str:
        """Send what is no request, or half of one."""
        connection = self.server.connect()
        if chance.random() < 0.5:
            connection.sendall(raw_request(chat_body())[: chance.randrange(300)])
        else:
            body = chance.choice(BAD)
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            status = read_to_end(connection)[9:12]
            if status not in (b"400", b"404"):
                self.wrong.append(status)
        connection.close()
        return "nonsense"


KINDS = ("answered", "broken off", "read slowly", "nonsense")


@pytest.mark.parametrize(
    "seconds", [2, pytest.param(20, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.slow)]
)
def test_clients_of_all_kinds(llm: LLM, seconds: int) -> None:
    """For so long, and until clients of each kind have come; prints a line of what was seen (pytest -s)."""
    expected = {
        (question, seed): llm.chat(
            [{"role": "user", "content": question}], SamplingParams(temperature=0.8, seed=seed, max_tokens=LIMIT)
        ).text
        for question in QUESTIONS
        for seed in SEEDS
    }
    with running("--queue-limit", CLIENTS) as server:
        clients = Clients(server, expected)
        threads = [threading.Thread(target=clients.run, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        time.sleep(seconds / 2)
        before = server.metric("resident_memory_bytes") / 2**20
        time.sleep(seconds / 2)
        until = time.monotonic() + 60
        while min(clients.seen[each] for each in KINDS) <= 5 and not clients.wrong and time.monotonic() < until:
            time.sleep(0.05)
        after = server.metric("resident_memory_bytes") / 2**20
        clients.stop.set()
        for thread in threads:
            thread.join(60)
        left = left_behind(server)
        differing = sum(isinstance(each, tuple) for each in clients.wrong)
        print(
            f"{CLIENTS} clients for {seconds} s: {dict(sorted(clients.seen.items()))}, {differing} answers differ, "
            f"{len(clients.wrong) - differing} other errors, {left:.0f} left behind, memory {before:.1f} MiB at half, "
            f"{after:.1f} at the end"
        )
        assert clients.wrong == []
        assert min(clients.seen[each] for each in KINDS) > 5
        assert left == 0 and server.metric("requests_ended_total", outcome="failed") == 0
        assert after - before < 24


def left_behind(server: ServerProcess, seconds: float = 10.0) -> float:
    """What a server still holds so many seconds after its clients went away, or as soon as that is nothing: requests,
    bytes of bodies, and answers and connections but for those of the one who asks."""
    until, names = time.monotonic() + seconds, ("requests_running", "requests_waiting", "http_body_bytes")
    while True:
        found = sum(map(server.metric, (*names, "http_answers", "http_connections")))
        if found == 2 or time.monotonic() > until:
            return found - 2
        time.sleep(0.05)


def first_byte(server: ServerProcess) -> float:
    """Seconds until the first byte of an answer on a connection that is open already."""
    with socket.create_connection((server.host, server.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = raw_request(chat_body(stream=True, max_tokens=2))
        started = time.perf_counter()
        connection.sendall(request)
        assert connection.recv(1) == b"H"
        taken = time.perf_counter() - started
        while b"[DONE]" not in connection.recv(1 << 16):
            pass
        return taken


@pytest.mark.slow  # a measurement: nothing else may run beside it
def test_the_first_byte_comes_as_soon_as_in_python(server: ServerProcess, llm: LLM) -> None:
    messages, params = chat_body()["messages"], SamplingParams(max_tokens=2)

    def first_chunk() -> float:
        started = time.perf_counter()
        answer = llm.stream_chat(messages, params)
        answer.next_chunk()
        taken = time.perf_counter() - started
        answer.result()
        return taken

    python, http = [], []
    for _ in range(40):  # by turns, so that what else the machine does hits both
        python.append(first_chunk())
        http.append(first_byte(server))
    added = statistics.median(http) - statistics.median(python)
    print(f"first byte {statistics.median(http) * 1e3:.2f} ms, of Python {statistics.median(python) * 1e3:.2f} ms")
    assert added < 0.003
