"""`edgellm chat` at a pseudo-terminal, on a real model with random weights and the NumPy backend."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from edgellm import LLM
from edgellm.commands import chat
from edgellm.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("private_files")

# Makes standard input the controlling terminal, so that Ctrl-C typed there becomes a signal, then runs Python anew.
AT_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """A process of `edgellm chat` at a pseudo-terminal, with someone typing."""

    def __init__(self, chat_engines: Path, *options: str, columns: int = 120, **environment: str) -> None:
        self.master, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL, "-m", "edgellm", "chat", str(chat_engines), *options],
            stdin=child,
            stdout=child,
            stderr=child,
            env={key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
            | {"TERM": "xterm", **environment},
            start_new_session=True,
        )
        os.close(child)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C; Python's readline does not see it while it is still busy with an earlier key."""
        time.sleep(0.3)
        self.type("\x03")

    def send_signal(self, number: int) -> None:
        """As the system does; the same holds for other signals."""
        time.sleep(0.3)
        self.process.send_signal(number)

    def wait_for(self, pattern: str, seconds: float = 20) -> str:
        """Read until `pattern` occurs; return what came before and with it."""
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} did not come; the terminal shows {self.seen!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += self._read()
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def exit_code(self) -> int:
        """Read on until the process has ended."""
        deadline = time.monotonic() + 20
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end; the terminal shows {self.seen!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += self._read()
        return self.process.returncode

    def _read(self) -> str:
        try:
            return os.read(self.master, 65536).decode("utf-8", errors="replace")
        except OSError:  # the other end is closed
            return ""

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(chat_engines):
    opened = []

    def start(*options: str, columns: int = 120, **environment: str) -> Terminal:
        opened.append(Terminal(chat_engines, *options, columns=columns, **environment))
        return opened[-1]

    yield start
    for item in opened:
        item.close()


CONTROL_D = "\x04"


def test_ctrl_c_stops_an_answer_and_the_session_goes_on(terminal, chat_engines):
    session = terminal()
    assert "robot on the numpy backend, context 600 tokens" in session.wait_for(">>> ")
    session.type("tell me\n")
    session.wait_for(r"tell me\r\n(\x1b\[\?2004l)?\r?[^\x1b\r]")
    session.type("\x03")
    stopped = session.wait_for(r"ended by cancelled[^\n]*\n")
    assert "\x1b[2m[" in stopped
    assert int(re.search(r"\[(\d+) tokens?", stopped)[1]) < 1400
    session.wait_for(">>> ")
    session.type("/set max_tokens 3\n")
    session.wait_for("max_tokens 3\r\n")
    session.wait_for(">>> ")
    session.type("and now?\n")
    line = session.wait_for(r"ended by length[^\n]*\n")
    assert "[3 tokens, " in line
    # What was shown of the stopped answer is part of the conversation.
    turns = [("user", "tell me"), ("assistant", ""), ("user", "and now?")]
    without = Tokenizer.from_directory(chat_engines).encode_chat(
        [{"role": role, "content": text} for role, text in turns]
    )
    assert int(re.search(r"context (\d+)/", line)[1]) > len(without) + 3
    session.wait_for(">>> ")
    session.type(CONTROL_D)
    assert session.exit_code() == 0


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_leaves(terminal):
    session = terminal("--max-tokens", "3")
    session.wait_for(">>> ")
    session.type("half a li")
    session.wait_for("half a li")
    session.interrupt()
    session.wait_for("Press Ctrl-C again or Ctrl-D to leave")
    session.wait_for(">>> ")
    session.type("whole\n")
    session.wait_for("ended by length")
    session.wait_for(">>> ")
    session.interrupt()
    session.wait_for("Press Ctrl-C again")
    session.wait_for(">>> ")
    session.interrupt()
    assert session.exit_code() == 0


def test_history_is_kept_between_sessions(terminal, tmp_path):
    session = terminal("--max-tokens", "2")
    session.wait_for(">>> ")
    session.type("a question to remember\n")
    session.wait_for("ended by")
    session.wait_for(">>> ")
    session.type("/exit\n")
    assert session.exit_code() == 0
    path = tmp_path / "state" / "edgellm" / "chat_history"
    assert "a question to remember" in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    session = terminal("--max-tokens", "2")
    session.wait_for(">>> ")
    session.type("\x1b[A\x1b[A")
    session.wait_for("a question to remember")
    session.type("\n")
    session.wait_for("ended by")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGHUP])
def test_a_terminal_that_is_closed_loses_neither_history_nor_trace(terminal, tmp_path, number):
    session = terminal("--max-tokens", "4", "--trace", str(tmp_path / "trace.json"))
    session.wait_for(">>> ")
    session.type("a question to remember\n")
    session.wait_for("ended by")
    session.wait_for(">>> ")
    session.send_signal(number)
    assert session.exit_code() == 128 + number
    assert "a question to remember" in (tmp_path / "state" / "edgellm" / "chat_history").read_text()
    assert any(event["name"] == "prefill" for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


def test_plain_where_colour_is_unwanted_and_without_history_where_that_is(terminal, tmp_path):
    """Notes break between words."""
    session = terminal("--max-tokens", "2", "--no-history", columns=40, NO_COLOR="1")
    greeting = session.wait_for(">>> ").rpartition("\r\n")[0]
    lines = [re.sub(r"\x1b\[[\d;?]*[a-z]", "", line).strip("\r") for line in greeting.split("\r\n")]
    assert max(map(len, lines)) <= 40 and len(lines) >= 3
    assert "on the numpy backend, context 600 tokens. /help lists the commands, Ctrl-D leaves." in " ".join(lines)
    session.type('"""\nseveral\n')
    session.wait_for(r"\.\.\. ")
    session.type('lines"""\n')
    assert "\x1b[2m" not in session.wait_for(r"ended by\s+length[^\n]*\n")
    session.wait_for(">>> ")
    session.type("/exit\n")
    assert session.exit_code() == 0
    assert not (tmp_path / "state" / "edgellm" / "chat_history").exists()


def test_tab_completes_commands_and_what_they_take(terminal, tmp_path):
    (tmp_path / "talk of today.json").write_text("{}")
    (tmp_path / "cup (1).png").write_bytes(b"")
    session = terminal("--max-tokens", "2")
    session.wait_for(">>> ")
    session.type("/se\tmax_t\t5\n")
    session.wait_for(r"/set max_tokens 5\r\n(\x1b\[\?2004l)?\r?max_tokens 5\r\n")
    session.wait_for(">>> ")
    session.type(f"/lo\t{tmp_path}/ta\t\n")
    session.wait_for(re.escape(f"error: {tmp_path}/talk of today.json is no conversation")[:60])
    session.wait_for(">>> ")
    session.type(f"look at {tmp_path}/cu\t")
    session.wait_for(re.escape(r"cup\ \(1\).png "))
    session.type("\x15/s\t\t")
    shown = session.wait_for(r"/system\s")
    assert all(name in shown for name in ("/save", "/set", "/stats"))


def test_the_shipped_model_is_said_to_be_a_toy(chat_engines):
    for engines, is_toy in ((None, True), (chat_engines, False)):
        with LLM(engines, backend="numpy") as llm:
            assert ("a toy of 10.8 M parameters" in chat._greeting(llm, None)) == is_toy
