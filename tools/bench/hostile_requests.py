"""What hostile requests cost a server: how long `/health` waits meanwhile, and the memory of the process.

    python tools/bench/hostile_requests.py [--python PYTHON] [--clients 4] [--seconds 4]

Each kind of request is asked by several clients at once, again and again, of a new server with the shipped model, which
PYTHON runs: one whose environment has another checkout compares the two. "lag" is that of a clock in this process.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from PIL import Image

MIB = 1 << 20


def prompt(text: str) -> bytes:
    """A body for `/tokenize`."""
    return json.dumps({"prompt": text}).encode()


def chat(content: object, **more: object) -> bytes:
    """A chat's body."""
    return json.dumps({"model": "shipped", "messages": [{"role": "user", "content": content}], **more}).encode()


def images(count: int) -> bytes:
    """A chat that shows images of 16 megapixels."""
    file = io.BytesIO()
    Image.new("1", (4000, 4000)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return chat([{"type": "image_url", "image_url": {"url": url}}] * count + [{"type": "text", "text": "What?"}])


REQUESTS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "nothing": ("", bytes),
    "8 MB of digits": ("/tokenize", lambda: prompt("1" * 8_000_000)),
    "2 MB of digits": ("/tokenize", lambda: prompt("1" * 2_000_000)),
    "2 MB of spaces": ("/tokenize", lambda: prompt(" " * 2_000_000)),
    "a chat with 2 MB of digits": ("/v1/chat/completions", lambda: chat("1" * 2_000_000)),
    "a chat with 2 MB of special tokens": ("/v1/chat/completions", lambda: chat("<|im_start|>" * 170_000)),
    "31 MiB of lists": ("/tokenize", lambda: b'{"prompt": [' + b"[]," * (31 * MIB // 3) + b"[]]}"),
    "2 MiB of lists": ("/tokenize", lambda: b'{"prompt": [' + b"[]," * 690_000 + b"[]]}"),
    "290,000 lists": ("/tokenize", lambda: b'{"prompt": [' + b"[]," * 290_000 + b"[]]}"),
    "600,000 token ids": ("/tokenize", lambda: b'{"prompt": [' + b"12," * 600_000 + b"12]}"),
    "a name of 30 MB": ("/tokenize", lambda: b'{"' + b"prompts" * 4_300_000 + b'": 1}'),
    "a name of 2 MB": ("/tokenize", lambda: b'{"' + b"prompts" * 290_000 + b'": 1}'),
    "1,024 bad words of 1,000 digits": (
        "/v1/chat/completions",
        lambda: chat("hi", max_tokens=1, bad_words=[f"{number:04}{'1' * 996}" for number in range(1024)]),
    ),
    "16 images of 16 megapixels": ("/v1/chat/completions", lambda: images(16)),
    "4 images of 16 megapixels": ("/v1/chat/completions", lambda: images(4)),
}


class Server:
    """A server with the shipped model."""

    def __init__(self, python: str) -> None:
        command = [python, "-m", "edgellm", "serve", "--port", "0", "--backend", "numpy"]
        environment = {**os.environ, "EDGELLM_CONFIG": os.devnull}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        found = re.search(r"http://(.+):(\d+);", self.process.stderr.readline())
        assert found is not None
        self.address = found[1], int(found[2])
        while self.ask("GET", "/health") != 200:
            time.sleep(0.1)

    def ask(self, method: str, path: str, body: bytes | None = None) -> int:
        """The status of an answer; 0 where the connection ends without one."""
        connection = http.client.HTTPConnection(*self.address, timeout=120)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            response.read()
            return response.status
        except OSError:
            return 0
        finally:
            connection.close()

    def memory(self, name: str) -> int:
        """`VmHWM` or `VmRSS`, in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{name}:\s+(\d+)", status)[1]) // 1024  # type: ignore[index]


def measure(python: str, name: str, clients: int, seconds: float) -> str:
    """A row of the table."""
    path, make = REQUESTS[name]
    body, server, statuses = make(), Server(python), Counter[int]()
    slowest, before, until = 0.0, server.memory("VmRSS"), time.monotonic() + seconds

    def ask() -> None:
        while path and time.monotonic() < until:
            began = time.monotonic()
            statuses[server.ask("POST", path, body)] += 1
            nonlocal slowest
            slowest = max(slowest, time.monotonic() - began)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    waits, lag = [], 0.0
    while time.monotonic() < until or any(thread.is_alive() for thread in threads):
        began = time.monotonic()
        server.ask("GET", "/health")
        waits.append(time.monotonic() - began)
        began = time.monotonic()
        time.sleep(0.01)
        lag = max(lag, time.monotonic() - began - 0.01)
    waits.sort()
    answered = ", ".join(f"{count} x {status or 'none'}" for status, count in sorted(statuses.items())) or "-"
    figures = (waits[len(waits) // 2], waits[int(len(waits) * 0.99)], waits[-1], lag)
    row = f"| {name} | {len(body) / 1e6:.1f} MB | {answered} | {slowest:.1f} s | "
    row += " | ".join(f"{value * 1000:.0f}" for value in figures)
    row += f" | {server.memory('VmHWM') - before} |"
    server.process.kill()
    server.process.wait()
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", default="", help="a part of the names of requests")
    given = parser.parse_args()
    print("| request | size | answers | slowest | health ms: median | 99 % | most | lag | memory, MiB more |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in REQUESTS:
        if given.only in name:
            print(measure(given.python, name, given.clients, given.seconds), flush=True)


if __name__ == "__main__":
    main()
