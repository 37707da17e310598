"""What Tab completes at the prompt of `edgellm chat`: commands, what they take, and paths of files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from edgellm.commands.chat_commands import COMMANDS, ChatState
from edgellm.commands.images import PATH_STARTS, SUFFIXES
from edgellm.commands.settings import SAMPLING_KEYS
from edgellm.kernels.user_paths import user_path

#: A word up to the cursor as terminals write paths: with backslashes before what shells would read.
_WORD = re.compile(r"(?:\\.|[^\s\\])*\Z", re.DOTALL)
_ESCAPED = re.compile(r"([\s\\'\"()&;|<>$`*?\[\]{}!#])")
#: The argument of a command that is a path; None there means any file.
FILE = "file"
#: What completes an argument: FILE, or the words that are possible now.
Argument = str | Callable[[], Iterable[str]]


def chat_completion(state: ChatState) -> ChatCompletion:
    """What completes the lines of this chat."""
    kinds: dict[str, Argument] = {
        "adapter": lambda: state.llm.adapters,
        "set": lambda: SAMPLING_KEYS,
        **dict.fromkeys(("image", "save", "load"), FILE),
    }
    return ChatCompletion({name: kinds.get(name.rstrip("!")) for name in COMMANDS})


class ChatCompletion:
    """Completes the line of a chat.

    `arguments` has all commands (without slash) that are offered, with what their argument may be, or None.
    """

    def __init__(self, arguments: Mapping[str, Argument | None]) -> None:
        self._arguments = arguments

    def candidates(self, line: str) -> list[str]:
        """Every way to go on with `line`, which ends at the cursor: whole lines that begin with it.

        What is finished ends in a space; a folder ends in its slash.
        """
        head, space, argument = line.partition(" ")
        if line.startswith("/") and not line.startswith("//"):
            if not space and (commands := [f"/{name} " for name in self._arguments if f"/{name}".startswith(line)]):
                return sorted(commands)
            if space and head[1:] in self._arguments:
                given = argument.lstrip()
                before = line[: len(line) - len(given)]
                return [before + found for found in self._of_argument(self._arguments[head[1:]], given)]
        return _of_message(line)

    def _of_argument(self, kind: Argument | None, argument: str) -> list[str]:
        if kind is None:
            return []
        if kind == FILE:
            return list(_paths(argument))
        assert callable(kind)
        return [f"{word} " for word in kind() if word.startswith(argument)]


def _of_message(line: str) -> list[str]:
    """The line with its last word completed where that begins as a path does: images and folders, as dropped ones."""
    match = _WORD.search(line)
    word = "" if match is None else match[0]
    if not word.startswith(PATH_STARTS) or word.startswith("//"):
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
