"""Clients of all kinds in threads: they ask until they are to stop, compare what they get, and count what they saw."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from http_server import ServerProcess, chat_body, raw_request, read_to_end
from load_requests import QUESTIONS, Answer, Asked, Broken, Refused, ask, chat

#: What is sent for a request, with the statuses that it may have.
BAD = (b"{", b"[]", b'{"model": "shipped"}', b'{"model": "x", "messages": []}', b"\xff" * 100)
#: Acts beside the kinds of requests.
BAD_ACTS = ("broken off", "read slowly", "nonsense")


class Clients:
    """So many clients of a server, which may be lost (`lose`) or end (`end`) meanwhile, and another take its place.

    An answer is wrong where it differs from the `expected` one, by `Asked.key`. It may break off where the server is
    lost, having begun as expected; of a server that ends it may not where it was asked before.
    """

    def __init__(
        self, server: ServerProcess, requests: Sequence[Asked], expected: dict[str, Answer], count: int
    ) -> None:
        self.server, self._requests, self._expected = server, requests, expected
        self.seen: Counter[str] = Counter()
        self.first_bytes: list[float] = []
        self.wrong: list[object] = []
        self._stop = threading.Event()
        self._is_there = threading.Event()
        self._is_there.set()
        #: Since when the server was lost, or was told to end.
        self._lost = self._ending = float("inf")
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End all, when each has its answer."""
        self._stop.set()
        self._is_there.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a client hangs"

    def lose(self) -> None:
        """The server is about to be killed."""
        self._is_there.clear()
        self._lost = time.monotonic()

    def found(self, server: ServerProcess) -> None:
        """Another server is there."""
        self.server, self._lost = server, float("inf")
        self._is_there.set()

    def end(self) -> None:
        """The server is about to be told to end."""
        self._ending = time.monotonic()

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        acts: list[Callable[[random.Random, str], str]] = [self._break_off, self._read_slowly, self._send_nonsense]
        client = f"192.0.2.{number}"
        asked = self._requests[-1 - number % len(self._requests)]  # so that each kind comes soon
        while not self._stop.is_set():
            server, began = self.server, time.monotonic()
            try:
                if chance.random() < 0.8:
                    act = self._ask(server, asked, chance.random() < 0.7, client)
                else:
                    act = chance.choice(acts)(chance, client)
                self.seen[act] += 1
            except Exception as error:
                is_told = min(self._lost, self._ending) < float("inf") or server is not self.server
                if not (is_told and isinstance(error, (Broken, OSError))):
                    self.wrong.append(error)
                    return
                self.seen["lost"] += 1
                if began > self._ending:
                    self._stop.wait(0.05)
            self._is_there.wait()
            asked = chance.choice(self._requests)

    def _ask(self, server: ServerProcess, asked: Asked, stream: bool, client: str) -> str:
        """Ask as clients should, and compare the answer; a full queue is asked again."""
        expected = self._expected[asked.key]
        began = time.monotonic()
        while True:
            try:
                found = ask(server, asked, stream, client)
                break
            except Refused as error:
                if error.status == 429:
                    self.seen["queue full"] += 1
                    self._stop.wait(error.retry_after / 4)
                    began = time.monotonic()
                elif error.status == 503 and time.monotonic() > self._ending:
                    self._stop.wait(0.05)
                    return "told that it ends"
                else:
                    raise
            except Broken as error:
                if not expected.text.startswith(error.begun):
                    self.wrong.append((asked, error.begun))
                if began < self._ending < float("inf"):
                    self.wrong.append((asked, "lost by a server that ends"))
                raise
        if found != expected:
            self.wrong.append((asked, found))
        self.first_bytes.append(found.first_byte)
        return asked.kind

    def _break_off(self, chance: random.Random, client: str) -> str:
        """Go away at any time."""
        connection = self.server.connect()
        body = chat_body(stream=True, ignore_eos=True, max_tokens=500, temperature=1.0, seed=chance.randrange(9))
        connection.sendall(_of_client(client, raw_request(body)))
        connection.settimeout(chance.random())
        try:
            for _ in range(chance.randrange(5)):
                connection.recv(100)
        except TimeoutError:
            pass
        connection.close()
        return "broken off"

    def _read_slowly(self, chance: random.Random, client: str) -> str:
        """Take a few bytes now and then."""
        connection = self.server.connect(2048)
        connection.sendall(_of_client(client, raw_request(chat(chance.choice(QUESTIONS), 1) | {"stream": True})))
        connection.settimeout(120)
        try:
            while (data := connection.recv(200)) and b"[DONE]" not in data:
                time.sleep(0.01)
        finally:
            connection.close()
        return "read slowly"

    def _send_nonsense(self, chance: random.Random, client: str) -> str:
        """Send what is no request, or half of one."""
        connection = self.server.connect()
        connection.settimeout(120)
        if chance.random() < 0.5:
            connection.sendall(raw_request(chat_body())[: chance.randrange(300)])
        else:
            body = chance.choice(BAD)
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(_of_client(client, head.encode() + body))
            status = read_to_end(connection)[9:12]
            if status not in (b"400", b"404") and self._lost == self._ending:
                self.wrong.append(status)
        connection.close()
        return "nonsense"


def _of_client(client: str, request: bytes) -> bytes:
    """A request that comes by a proxy from the address of a client."""
    return request.replace(b"\r\n", f"\r\nX-Forwarded-For: {client}\r\n".encode(), 1)
