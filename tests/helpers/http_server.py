"""`edgellm serve` in a process of its own, and what tests ask of it with plain sockets."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import openai
from forked_program import ForkedProgram
from openai.types.responses import ResponseStreamEvent
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

MODEL = "shipped"


class ServerProcess:
    """A server on a free port of this machine; `said` is what it wrote to its standard error so far.

    Its `environment` has further variables; words before its command may be what is `starting` it, and files are handed
    on to it (`pass_fds`). Where there are such words, and where it is not `forked`, a Python of its own starts it."""

    def __init__(
        self,
        *arguments: object,
        key: str = "no key",
        environment: Mapping[str, str] | None = None,
        starting: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        forked: bool = True,
    ) -> None:
        words = [str(word) for word in ("serve", "--port", 0, "--backend", "numpy", *arguments)]
        variables = {**os.environ, "EDGELLM_CONFIG": os.devnull, **(environment or {})}
        self.process: ForkedProgram | subprocess.Popen[str]
        if forked and not starting:
            self.process = ForkedProgram(words, variables)
        else:
            command = [*starting, sys.executable, "-m", "edgellm", *words]
            self.process = subprocess.Popen(
                command, stderr=subprocess.PIPE, text=True, env=variables, pass_fds=pass_fds
            )
        self.key, self.said = key, ""
        lines = self._lines = queue.Queue[str]()

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.said += line
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        listening = None
        while listening is None:  # the first start of a file says what it makes of it
            line = lines.get(timeout=60)
            assert line, self.said
            listening = re.search(r"http://(.+):(\d+);", line)
        self.host, self.port = listening[1], int(listening[2])

    def wait_until_ready(self) -> ServerProcess:
        """Wait until the model is open, as the server says; asking it again and again would hold that up."""
        line = "not yet"
        while not line.startswith("Ready: "):
            line = self._lines.get(timeout=60)
            assert line, self.said
        assert self.get("/health")[0] == 200
        return self

    def client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client, which asks once, and raises what in an answer is not as its types say."""
        given = {"api_key": self.key, "max_retries": 0, "timeout": 60, "_strict_response_validation": True} | options
        return openai.OpenAI(base_url=f"http://{self.host}:{self.port}/v1", **given)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (parsed where it is JSON) and headers of the answer to one request on a connection of its
        own."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        sent = {} if data is None else {"content-type": "application/json"}
        connection.request(method, path, data, {**sent, **(headers or {})})
        response = connection.getresponse()
        content, found = response.read(), {name.lower(): value for name, value in response.getheaders()}
        connection.close()
        if found.get("content-type") == "application/json":
            return response.status, json.loads(content), found
        return response.status, content.decode(), found

    def get(self, path: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """The answer to a GET."""
        return self.ask("GET", path, None, headers)

    def chat(self, **fields: Any) -> tuple[int, Any, dict[str, str]]:
        """The answer to a chat's body, of which these fields are other or further ones."""
        return self.ask("POST", "/v1/chat/completions", chat_body(**fields))

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        """A connection."""
        made = socket.socket()
        if receive_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(30)
        made.connect((self.host, self.port))
        return made

    def stream(self, receive_bytes: int | None = None, **fields: Any) -> socket.socket:
        """A connection on which a chat's answer begins to stream."""
        made = self.connect(receive_bytes)
        made.sendall(raw_request(chat_body(stream=True, **fields)))
        return made

    def metric(self, name: str, **labels: str) -> float:
        """A value of `/metrics`; 0 where it was never counted."""
        lines = self.get("/metrics", authorization=f"Bearer {self.key}")[1].splitlines()
        text = "\n".join(line for line in lines if f"edgellm_{name}" in line)
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"edgellm_{name}" and labels.items() <= sample.labels.items()
        ]
        return sum(found)

    def open_files(self) -> int:
        """How many files and sockets the server has open."""
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def processor_seconds(self) -> float:
        """What the server has taken of the processors so far, whatever else they do."""
        found = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(found[11]) + int(found[12])) / os.sysconf("SC_CLK_TCK")

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def running(*arguments: object, **about: Any) -> Iterator[ServerProcess]:
    """A server that is ready, with these options, made as `ServerProcess` is; it ends well, and in time."""
    server = ServerProcess(*arguments, **about)
    try:
        yield server.wait_until_ready()
        if server.process.poll() is None:
            server.terminate()
        assert server.process.wait(20) == 0, server.said
        assert "Traceback" not in server.said
    finally:
        server.process.kill()
        server.process.wait()


def chat_body(**fields: Any) -> dict[str, Any]:
    """A chat's body: a short question, but for the fields that are given."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "Where is the red cup?"}], **fields}


def raw_request(body: Any, path: str = "/v1/chat/completions") -> bytes:
    """A POST as it goes over the wire."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """What a condition gives as soon as that is true."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.02)
    return found


@cache
def _event_type() -> TypeAdapter[Any]:
    return TypeAdapter(ResponseStreamEvent)


def response_events(lines: Iterable[str | bytes]) -> list[Any]:
    """The events of a stream of `/v1/responses`, from the JSON of each, as OpenAI's types strictly have them."""
    return [_event_type().validate_json(line, strict=True) for line in lines]


def read_to_end(connection: socket.socket) -> bytes:
    """All that still comes."""
    found = b""
    while True:
        try:
            data = connection.recv(1 << 16)
        except ConnectionResetError:
            return found
        if not data:
            return found
        found += data
