"""The system's headless Chromium, driven through its DevTools port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium-headless-shell", "headless_shell", "chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    *("--headless", "--remote-debugging-port=0", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-sync"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--lang=en-US"),
)
_KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "Tab": ("Tab", 9, "")}


def find_browser() -> str | None:
    """The path of a Chromium of this system, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class WebSocket:
    """One connection to a WebSocket of this machine: text messages, as DevTools exchange them."""

    def __init__(self, url: str, seconds: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._socket = socket.create_connection((parts.hostname, parts.port or 80), timeout=seconds)
        key = base64.b64encode(os.urandom(16)).decode()
        head = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        self._socket.sendall(f"{head}Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self._reader = self._socket.makefile("rb")
        status = self._reader.readline()
        if b" 101 " not in status:
            raise ConnectionError(f"{url} answers {status!r}: expected a WebSocket")
        while self._reader.readline().strip():
            pass

    def send(self, text: str) -> None:
        """Send a message, as one masked frame."""
        self._send_frame(0x1, text.encode())

    def receive(self) -> str:
        """The next message. Raises TimeoutError where none comes in time, ConnectionError at the end."""
        data = b""
        while True:
            head = self._reader.read(2)
            if len(head) < 2:
                raise ConnectionError("the browser has closed the connection")
            is_last, kind, size = head[0] & 0x80, head[0] & 0xF, head[1] & 0x7F
            if size > 125:
                size = int.from_bytes(self._reader.read(2 if size == 126 else 8), "big")
            part = self._reader.read(size)
            if kind == 0x9:
                self._send_frame(0xA, part)
            elif kind in (0x0, 0x1):
                data += part
                if is_last:
                    return data.decode()

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()
        self._socket.close()

    def _send_frame(self, kind: int, data: bytes) -> None:
        size = len(data)
        if size < 126:
            head = struct.pack("!BB", 0x80 | kind, 0x80 | size)
        else:
            head = struct.pack("!BBH" if size < 1 << 16 else "!BBQ", 0x80 | kind, 254 if size < 1 << 16 else 255, size)
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
        self._socket.sendall(head + mask + masked)


class Page:
    """A page in a browser of its own, used as a person would; a context manager.

    `requested` are the addresses that it asked for; `wrong` is what the browser says is wrong: errors in the console,
    exceptions, what a policy forbade. Answers of servers with an error's status are no part of it.
    """

    def __init__(self, *options: str, size: tuple[int, int] = (1280, 800), seconds: float = 30.0) -> None:
        path = find_browser()
        if path is None:
            raise FileNotFoundError(f"no browser was found: expected one of {', '.join(NAMES)}")
        self._home = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [path, *_OPTIONS, *root, *options, f"--user-data-dir={self._home.name}"]
        quiet = subprocess.DEVNULL  # its processes hold on to what they inherit
        self._process = subprocess.Popen([*command, "about:blank"], stdout=quiet, stderr=quiet, start_new_session=True)
        self._seconds, self._last = seconds, 0
        self.requested: list[str] = []
        self.wrong: list[str] = []
        self._fulfilled: dict[str, tuple[int, str, bytes]] = {}
        try:
            self._socket = WebSocket(self._address(), seconds)
            self._session: str | None = None
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log", "DOM", "Accessibility"):
                self.call(f"{domain}.enable")
            self.resize(*size)
        except BaseException:
            self.close()
            raise

    def _address(self) -> str:
        """The address of the port, which the browser writes down as soon as it listens."""
        written, until = Path(self._home.name, "DevToolsActivePort"), time.monotonic() + self._seconds
        while not written.is_file() or len(lines := written.read_text("ascii").split()) < 2:
            if self._process.poll() is not None or time.monotonic() > until:
                raise ConnectionError(f"the browser did not start: {' '.join(map(str, self._process.args))}")
            time.sleep(0.02)
        return f"ws://127.0.0.1:{lines[0]}{lines[1]}"

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a method of DevTools. Raises RuntimeError where it fails."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        self._socket.send(json.dumps(message if self._session is None else message | {"sessionId": self._session}))
        while (answer := json.loads(self._socket.receive())).get("id") != message["id"]:
            self._note(answer.get("method", ""), answer.get("params", {}))
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _note(self, event: str, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.wrong.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.wrong.append(str([each.get("value", each.get("description")) for each in told["args"]]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            if told["entry"]["source"] != "network":
                self.wrong.append(told["entry"]["text"])
        elif event == "Fetch.requestPaused":
            self._fulfill(told)

    def answer_instead(self, path: str, status: int, content_type: str, body: bytes) -> None:
        """Answer requests for a path in the server's place, from now on."""
        self._fulfilled[path] = status, content_type, body
        self.call("Fetch.enable", patterns=[{"urlPattern": f"*{each}"} for each in self._fulfilled])

    def answer_no_more(self) -> None:
        """Let the server answer everything."""
        self._fulfilled.clear()
        self.call("Fetch.disable")

    def _fulfill(self, told: dict[str, Any]) -> None:
        status, kind, body = self._fulfilled[urlsplit(told["request"]["url"]).path]
        headers = [{"name": "content-type", "value": kind}]
        parameters = {"requestId": told["requestId"], "responseCode": status, "responseHeaders": headers}
        parameters["body"] = base64.b64encode(body).decode()
        self._last += 1  # its result is of no account
        message = {"id": self._last, "method": "Fetch.fulfillRequest", "params": parameters}
        self._socket.send(json.dumps(message | {"sessionId": self._session}))

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, promises awaited. Raises RuntimeError for what it throws."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression as soon as that is true. Raises TimeoutError."""
        until = time.monotonic() + self._seconds
        while not (found := self.evaluate(expression)):
            if time.monotonic() > until:
                shown = self.evaluate("document.body.innerText")
                raise TimeoutError(f"{expression} did not come true; {self.wrong}; the page shows: {shown}")
            time.sleep(0.03)
        return found

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of what a selector finds first, whatever lies there."""
        place = (
            f"(() => {{ const it = document.querySelector({json.dumps(selector)});"
            "it.scrollIntoView({block: 'nearest'}); const box = it.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        x, y = self.evaluate(place)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def fill(self, selector: str, text: str) -> None:
        """Put a text into a field, in place of what it has."""
        self.click(selector)
        self.evaluate("document.activeElement.select()")
        self.call("Input.insertText", text=text) if text else self.press("Delete")

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key."""
        name, code, text = _KEYS.get(key, (key, {"Delete": 46}.get(key, 0), ""))
        parameters = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **parameters)
        self.call("Input.dispatchKeyEvent", type="keyUp", **parameters)

    def choose_files(self, selector: str, paths: Sequence[Path]) -> None:
        """Choose files in a field for files."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path.resolve()) for path in paths])

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Make the window so large, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, scheme: str) -> None:
        """Prefer "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        """The window as a PNG file."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser."""
        if hasattr(self, "_socket"):
            self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._home.cleanup()

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()
