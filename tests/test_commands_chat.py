"""`edgellm chat`, by pipe and at a pseudo-terminal, on a real model with random weights and the NumPy backend."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgellm.commands.app import run
from edgellm.commands.chat_input import PipedLines, read_message
from edgellm.engines.builder import build_engine_directory
from edgellm.engines.decoder_config import EngineLimits
from edgellm.errors import RequestError
from edgellm.llm import LLM
from edgellm.sampling_params import SamplingParams
from edgellm.text.tokenizer import Tokenizer

CONTEXT = 1500


@pytest.fixture(scope="module")
def engines(tiny_checkpoint, tmp_path_factory) -> Path:
    """The tiny model with room for a conversation."""
    folder = tmp_path_factory.mktemp("chat")
    checkpoint, target = folder / "checkpoint", folder / "robot"
    checkpoint.mkdir()
    for file in tiny_checkpoint.iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (checkpoint / "config.json").write_text(json.dumps(config))
    build_engine_directory(checkpoint, target, EngineLimits(max_batch=1, prefill_chunk=128, kv_capacity=CONTEXT), [])
    return target


@pytest.fixture(autouse=True)
def private_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("EDGELLM_CONFIG", "EDGELLM_DEBUG", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def chat(engines, monkeypatch, capfd):
    """Pipes lines into `edgellm chat` in this process; returns exit code, standard output and standard error."""

    def call(lines: str | bytes, *options: object, model: Path = engines) -> tuple[int, str, str]:
        data = lines.encode() if isinstance(lines, str) else lines
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        with pytest.raises(SystemExit) as left:
            run(["chat", str(model), *map(str, options)])
        out, err = capfd.readouterr()
        return left.value.code or 0, out, err

    return call


def conversation(engines, questions: list[str], system: str | None = None, **params) -> list[dict[str, str]]:
    """What the API answers to the same questions."""
    messages = [{"role": "system", "content": system}] if system else []
    with LLM(engines, backend="numpy") as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": llm.chat(messages, SamplingParams(**params)).text})
    return messages


def answers(messages: list[dict[str, str]]) -> str:
    return "".join(message["content"] + "\n" for message in messages if message["role"] == "assistant")


def test_every_piped_line_is_a_question_of_one_conversation(chat, engines):
    code, out, err = chat("hello\n\n  \nwhy?\nüber 你好\n", "--max-tokens", 8)
    assert (code, err) == (0, "")
    assert out == answers(conversation(engines, ["hello", "why?", "über 你好"], max_tokens=8))


def test_messages_of_several_lines(chat, engines):
    code, out, _ = chat('first\\\nsecond\n"""\nthird\n\n fourth\n"""\n"""one line"""\n', "--max-tokens", 8)
    questions = ["first\nsecond", "third\n\n fourth", "one line"]
    assert (code, out) == (0, answers(conversation(engines, questions, max_tokens=8)))


def test_commands_change_the_conversation(chat, engines):
    changes = "/set max_tokens 4\n/set temperature 0.9\n/set seed 5\n"
    lines = f"/system Be kind.\nhello\n/reset\n{changes}hello\n//slash\n/bye\nnever\n"
    code, out, err = chat(lines, "--max-tokens", 8)
    first = conversation(engines, ["hello"], "Be kind.", max_tokens=8)
    second = conversation(engines, ["hello", "/slash"], "Be kind.", max_tokens=4, temperature=0.9, seed=5)
    assert (code, out) == (0, answers(first) + answers(second))
    assert err.splitlines() == [
        "The system prompt is set; the conversation goes on. /reset starts a new one.",
        "The conversation is forgotten.",
        "max_tokens 4",
        "temperature 0.9",
        "seed 5",
    ]


def test_system_prompt_is_shown_and_removed(chat):
    _, _, err = chat('/system\n/system ""\n/system\n', "--system", "You are Pip.")
    assert err.splitlines()[0] == "You are Pip."
    assert err.splitlines()[-1] == "There is no system prompt."


def test_help_and_settings_are_listed(chat):
    code, _, err = chat("/help\n/?\n/set\n/set top_p\n")
    assert code == 0
    assert err.count("/save FILE") == 2
    settings = dict(line.split(" ", 1) for line in err.splitlines() if re.match(r"[a-z_]+ \S+$", line))
    assert settings["temperature"] == "0" and settings["stop"] == "none" and settings["top_p"] == "1"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/hepl", "/hepl is no command: did you mean /help?; /help lists them"),
        ("/frobnicate now", "/frobnicate is no command; /help lists them"),
        ("/set temprature 1", "there is no setting 'temprature': did you mean temperature?"),
        ("/set top_p 7", "top_p is 7: expected a number above 0 and up to 1"),
        ("/set seed many", "seed is 'many': expected a whole number from 0"),
        ("/save", "/save needs the name of a file: /save FILE"),
        ("/load /no/such/file", "/no/such/file cannot be read: No such file or directory"),
        ("/save /no/such/folder/file", "/no/such/folder/file cannot be written: No such file or directory"),
    ],
)
def test_wrong_commands_give_a_hint_and_the_chat_goes_on(chat, engines, line, message):
    code, out, err = chat(f"{line}\nhello\n", "--max-tokens", 4)
    assert err.strip() == f"error: {message}" or err.startswith(f"error: {message}")
    assert (code, out) == (1, answers(conversation(engines, ["hello"], max_tokens=4)))


def test_settings_take_what_people_write(chat):
    lines = (
        '/set stop END\n/set stop ["a", "b"]\n/set stop 3\n/set stop none\n/set max_tokens none\n/set ignore_eos true\n'
    )
    assert chat(lines)[2].splitlines() == [
        "stop ['END']",
        "stop ['a', 'b']",
        "stop ['3']",
        "stop none",
        "max_tokens none",
        "ignore_eos true",
    ]


def test_saved_conversation_goes_on_where_it_was(chat, engines, tmp_path):
    path = tmp_path / "talk.json"
    code, _, err = chat(f"hello\n/save {path}\n", "--max-tokens", 8, "--system", "Be kind.")
    assert (code, err) == (0, f"Saved 2 messages to {path}.\n")
    saved = json.loads(path.read_text())
    assert (saved["system"], saved["model"], saved["settings"]["max_tokens"]) == ("Be kind.", "robot", 8)
    assert [file.name for file in tmp_path.iterdir() if "talk" in file.name] == ["talk.json"]
    code, out, err = chat(f"/load {path}\nand?\n")
    expected = conversation(engines, ["hello", "and?"], "Be kind.", max_tokens=8)
    assert saved["messages"] == expected[1:3]
    assert (code, out) == (0, expected[-1]["content"] + "\n")
    assert err == f"Loaded 2 messages from {path}.\n"


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
GOOD_FILE = {
    "format": "edgellm conversation 1",
    "model": "x",
    "system": None,
    "messages": [USER, ASSISTANT],
    "settings": {},
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100000, "is not JSON"),
        ([], "no conversation that /save wrote"),
        (GOOD_FILE | {"format": "other"}, "no conversation that /save wrote"),
        (GOOD_FILE | {"mesages": []}, "unknown key 'mesages': did you mean messages?"),
        (GOOD_FILE | {"system": 5}, "system is a int: expected text or null"),
        (GOOD_FILE | {"messages": "hi"}, "messages is a str"),
        (GOOD_FILE | {"messages": [USER]}, "has no answer"),
        (GOOD_FILE | {"messages": [ASSISTANT, USER]}, "message 1 is of assistant"),
        (GOOD_FILE | {"messages": [{"role": "robot", "content": ""}]}, "has the role 'robot'"),
        (GOOD_FILE | {"settings": []}, "settings is a list"),
        (GOOD_FILE | {"settings": {"top_q": 1}}, "unknown key 'top_q': did you mean top_p?"),
        (GOOD_FILE | {"settings": {"top_p": 5}}, "top_p is 5: expected"),
    ],
)
def test_files_that_are_no_conversation_change_nothing(chat, engines, tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    code, out, err = chat(f"hello\n/load {path}\nand?\n", "--max-tokens", 4)
    assert message in err and str(path) in err
    assert (code, out) == (1, answers(conversation(engines, ["hello", "and?"], max_tokens=4)))


def test_stats(chat, engines):
    code, _, err = chat(
        "/stats\nhello\nwhy?\n/stats\n", "--max-tokens", 6, "--temperature", 0.8, "--seed", 3, "--stats"
    )
    assert code == 0
    assert "no answer yet" in err
    with LLM(engines, backend="numpy") as llm:
        first = llm.tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    lines = re.findall(
        r"\[(\d+) prompt tokens(?: \((\d+) reused\))? \| 6 tokens, ([\d.]+) tokens/s \| first token", err
    )
    assert lines[0][0] == str(len(first))
    assert int(lines[1][1]) >= len(first)
    assert "ended by length" in err and f"/{CONTEXT}]" in err
    assert "seed 3" in err and "session: 2 answers, 12 tokens" in err
    assert "robot (qwen3), numpy backend" in err


def test_sampling_defaults_come_from_the_model(chat, engines, tmp_path):
    """Where generation_config.json asks for sampling; a settings file and the command line go before it."""
    model = tmp_path / "sampling"
    checkpoint = engines.parent / "checkpoint"
    copied = tmp_path / "checkpoint"
    copied.mkdir()
    for file in checkpoint.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    published = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (copied / "generation_config.json").write_text(json.dumps(published))
    build_engine_directory(copied, model, EngineLimits(max_batch=1, prefill_chunk=16, kv_capacity=64), [])
    (tmp_path / "settings.yaml").write_text("sampling: {top_k: 30, top_p: 0.9}\n")
    _, _, err = chat("/set\n", "--config", tmp_path / "settings.yaml", "--top-p", 0.8, model=model)
    assert {"temperature 0.6", "top_k 30", "top_p 0.8", "min_p 0"} <= set(err.splitlines())
    assert "temperature 0" in chat("/set\n")[2].splitlines()


def test_a_full_context_is_said_and_the_chat_goes_on(chat, engines):
    more = "more\n" * 5  # at least 25 tokens each
    code, out, err = chat(f"{'x' * 1440}\n{more}/reset\n/set max_tokens 4\nhello\n")
    lines = err.splitlines()
    assert lines[0] == f"The context is full ({CONTEXT} tokens), the answer was cut: /reset starts anew."
    full = [
        line for line in lines if re.fullmatch(rf"The context is full \(\d+ of {CONTEXT} tokens\): /reset .*", line)
    ]
    assert len(full) == len([line for line in lines if line.startswith("error: the prompt has")]) > 0
    assert lines[-2:] == ["The conversation is forgotten.", "max_tokens 4"]
    assert code == 1
    assert out.endswith(answers(conversation(engines, ["hello"], max_tokens=4)))


def test_a_question_longer_than_the_context(chat, engines):
    code, out, err = chat(f"{'x' * 1600}\nhello\n", "--max-tokens", 4)
    assert "error: the prompt has" in err and f"the context {CONTEXT}" in err
    assert (code, out) == (1, answers(conversation(engines, ["hello"], max_tokens=4)))


def test_invalid_utf8_is_named_by_its_offset(chat):
    code, _, err = chat(b"hello\nab\xe4c\n", "--max-tokens", 2)
    assert code == 1
    assert err == "error: standard input is not UTF-8 text: invalid byte 0xe4 at byte offset 8\n"


def test_reading_of_messages():
    def messages(text: str) -> list[str]:
        lines, found = PipedLines(io.BytesIO(text.encode())), []
        while True:
            try:
                found.append(read_message(lines))
            except EOFError:
                return found

    assert messages("\ufeffa\r\nb\n") == ["a", "b"]
    assert messages('"""a\nb"""\nc') == ["a\nb", "c"]
    assert messages('  """\n  a\n"""  \n') == ["  a"]
    assert messages("a\\\n\\\nb\\") == ["a\n\nb"]
    assert messages('"""never closed\nx') == ["never closed\nx"]
    assert messages('""""""\nx') == ["", "x"]
    with pytest.raises(RequestError, match="offset 2"):
        read_message(PipedLines(io.BytesIO(b"ab\xff")))


# Makes standard input the controlling terminal, so that Ctrl-C typed there becomes a signal, then runs Python anew.
AT_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """A process of `edgellm chat` at a pseudo-terminal, with someone typing."""

    def __init__(self, engines: Path, *options: str, **environment: str) -> None:
        self.master, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL, "-m", "edgellm", "chat", str(engines), *options],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**os.environ, "TERM": "xterm", **environment},
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
def terminal(engines):
    opened = []

    def start(*options: str, **environment: str) -> Terminal:
        opened.append(Terminal(engines, *options, **environment))
        return opened[-1]

    yield start
    for item in opened:
        item.close()


CONTROL_D = "\x04"


def test_ctrl_c_stops_an_answer_and_the_session_goes_on(terminal, engines):
    session = terminal()
    assert "robot on the numpy backend, context 1500 tokens" in session.wait_for(">>> ")
    session.type("tell me\n")
    session.wait_for(r"tell me\r\n(\x1b\[\?2004l)?\r?[^\x1b\r]")
    session.type("\x03")
    stopped = session.wait_for(r"ended by cancelled[^\n]*\n")
    assert "\x1b[2m[" in stopped
    assert int(re.search(r"\| (\d+) tokens?", stopped)[1]) < 1400
    session.wait_for(">>> ")
    session.type("/set max_tokens 3\n")
    session.wait_for("max_tokens 3\r\n")
    session.wait_for(">>> ")
    session.type("and now?\n")
    line = session.wait_for(r"ended by length[^\n]*\n")
    assert " 3 tokens, " in line
    # What was shown of the stopped answer is part of the conversation.
    turns = [("user", "tell me"), ("assistant", ""), ("user", "and now?")]
    without = Tokenizer.from_directory(engines).encode_chat([{"role": role, "content": text} for role, text in turns])
    assert int(re.search(r"\[(\d+) prompt tokens", line)[1]) > len(without)
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
    for options, kept in ((("--no-history",), False), ((), True)):
        session = terminal("--max-tokens", "2", *options)
        session.wait_for(">>> ")
        session.type("a question to remember\n")
        session.wait_for("ended by")
        session.wait_for(">>> ")
        session.type("/exit\n")
        assert session.exit_code() == 0
        path = tmp_path / "state" / "edgellm" / "chat_history"
        assert path.exists() == kept
    assert "a question to remember" in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    session = terminal("--max-tokens", "2")
    session.wait_for(">>> ")
    session.type("\x1b[A\x1b[A")
    session.wait_for("a question to remember")
    session.type("\n")
    session.wait_for("ended by")


def test_plain_where_colour_is_unwanted(terminal):
    session = terminal("--max-tokens", "2", "--system", "x", NO_COLOR="1")
    session.wait_for(">>> ")
    session.type('"""\nseveral\n')
    session.wait_for(r"\.\.\. ")
    session.type('lines"""\n')
    assert "\x1b[2m" not in session.wait_for(r"ended by length[^\n]*\n")
