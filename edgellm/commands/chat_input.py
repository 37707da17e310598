"""The input of `edgellm chat`: lines of a terminal, with history and completion, or of a pipe, and messages of them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from edgellm.commands.chat_commands import FILE, is_command
from edgellm.commands.images import SUFFIXES, is_path
from edgellm.engines.formats.small_files import decoded
from edgellm.errors import RequestError
from edgellm.kernels.user_paths import user_folder, user_path

PROMPT, CONTINUATION = ">>> ", "... "
FENCE = '"""'
HISTORY_LENGTH = 1000


class PipedLines:
    """Lines of a pipe or file, UTF-8."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._offset = 0

    def read_line(self, prompt: str) -> str:
        """The next line without its end; `prompt` is not shown. EOFError says that there are no more."""
        data = self._stream.readline()
        if not data:
            raise EOFError
        start, self._offset = self._offset, self._offset + len(data)
        try:
            return data.decode("utf-8").rstrip("\r\n").removeprefix("" if start else "\ufeff")
        except UnicodeDecodeError as error:
            place = f"byte 0x{data[error.start]:02x} at byte offset {start + error.start}"
            raise RequestError(f"standard input is not UTF-8 text: invalid {place}") from error


class TerminalLines:
    """Lines typed at a terminal, with editing and, in `history_file`, a memory of earlier ones."""

    def __init__(self, history_file: Path | None) -> None:
        self._history_file = history_file
        try:
            import readline
        except ImportError:  # not part of every Python; the terminal's own editing remains
            self._readline = None
            return
        self._readline = readline
        readline.set_history_length(HISTORY_LENGTH)
        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
        if history_file is not None:
            with suppress(OSError):
                readline.read_history_file(history_file)

    def complete_with(self, candidates: Callable[[str], list[str]]) -> None:
        """Let Tab complete a line: `candidates` gets it up to the cursor and returns lines that begin with it."""
        readline = self._readline
        if readline is None:
            return
        found: list[str] = []

        def complete(text: str, number: int) -> str | None:
            if number == 0:
                start, line = readline.get_begidx(), readline.get_line_buffer()[: readline.get_endidx()]
                found[:] = [candidate[start:] for candidate in candidates(line)]
            return found[number] if number < len(found) else None

        readline.set_completer_delims(" \t\n")
        readline.set_completer(complete)
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")

    def read_line(self, prompt: str) -> str:
        """The next line; KeyboardInterrupt where Ctrl-C was pressed, EOFError at the end."""
        try:
            data = input(prompt).encode("utf-8", "surrogateescape")
        except UnicodeDecodeError as error:
            data = error.object
        except UnicodeEncodeError as error:
            raise RequestError(f"the line has half of a surrogate pair at position {error.start}") from error
        return decoded(data, "the line", RequestError)

    def close(self) -> None:
        """Keep the history, where it can be kept; only its owner can read it."""
        if self._readline is None or self._history_file is None:
            return
        with suppress(OSError):
            self._history_file.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history_file, os.O_WRONLY | os.O_CREAT, 0o600))
            self._readline.write_history_file(self._history_file)


def user_history_file() -> Path:
    """`$XDG_STATE_HOME/edgellm/chat_history`, by default under `~/.local/state`."""
    return user_folder("XDG_STATE_HOME", ".local/state") / "chat_history"


def open_lines(history: bool) -> PipedLines | TerminalLines:
    """Standard input, as a terminal where both ends are one."""
    if sys.stdin is None:
        raise RequestError("there is no standard input to read questions from")
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalLines(user_history_file() if history else None)
    return PipedLines(sys.stdin.buffer)


def read_message(lines: PipedLines | TerminalLines) -> str:
    """One message: a line, several that end in a backslash, or all between two triple quotes. Raises EOFError."""
    line = lines.read_line(PROMPT)
    if line.lstrip().startswith(FENCE):
        return "\n".join(_fenced(line.lstrip().removeprefix(FENCE), lines))
    parts = []
    while line.endswith("\\"):
        parts.append(line[:-1])
        try:
            line = lines.read_line(CONTINUATION)
        except EOFError:
            return "\n".join(parts)
    return "\n".join([*parts, line])


def _fenced(line: str, lines: PipedLines | TerminalLines) -> Iterator[str]:
    first = True
    while not line.rstrip().endswith(FENCE):
        if line or not first:
            yield line
        first = False
        try:
            line = lines.read_line(CONTINUATION)
        except EOFError:
            return
    if last := line.rstrip().removesuffix(FENCE):
        yield last


#: A word up to the cursor as terminals write paths: with backslashes before what shells would read.
_WORD = re.compile(r"(?:\\.|[^\s\\])*\Z", re.DOTALL)
_ESCAPED = re.compile(r"([\s\\'\"()&;|<>$`*?\[\]{}!#])")
#: What completes an argument: FILE, or the words that are possible now; None: nothing.
Argument = str | Callable[[], Iterable[str]] | None


def candidates(arguments: Mapping[str, Argument], line: str) -> list[str]:
    """The whole lines that `line`, which ends at the cursor, may become. `arguments` has all commands (without slash)
    that are offered, with what their argument may be. What is finished ends in a space; a folder in its slash."""
    head, space, argument = line.partition(" ")
    if is_command(line):
        if not space and (commands := [f"/{name} " for name in arguments if f"/{name}".startswith(line)]):
            return sorted(commands)
        if space and head[1:] in arguments:
            given, kind = argument.lstrip(), arguments[head[1:]]
            words = [f"{word} " for word in kind() if word.startswith(given)] if callable(kind) else []
            return [line[: len(line) - len(given)] + found for found in (_paths(given) if kind == FILE else words)]
    return _of_message(line)


def _of_message(line: str) -> list[str]:
    """The line with its last word completed where that begins as a path does: images and folders, as dropped ones."""
    match = _WORD.search(line)
    word = "" if match is None else match[0]
    if not is_path(word):
        return []
    plain = re.sub(r"\\(.)", r"\1", word)
    return [
        line + _ESCAPED.sub(r"\\\1", path[len(plain) :]) + ("" if path.endswith("/") else " ")
        for path in _paths(plain)
        if path.endswith("/") or Path(path).suffix.lower() in SUFFIXES
    ]


def _paths(text: str) -> Iterable[str]:
    """Files and folders (these with a slash) whose paths begin with `text`; hidden ones where it asks for them."""
    folder, slash, name = text.rpartition("/")
    try:
        with os.scandir(user_path(folder + slash) if slash else Path()) as entries:
            found = sorted((entry.name, entry.is_dir()) for entry in entries)
    except (OSError, ValueError):
        return
    for entry, is_folder in found:
        if entry.startswith(name) and (name or not entry.startswith(".")) and entry.isprintable():
            yield f"{folder}{slash}{entry}{'/' if is_folder else ''}"
