"""Conversations on disk: what `/save` writes and `/load` reads."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.commands.images import read_image_file
from edgellm.commands.settings import SAMPLING_KEYS
from edgellm.engines.errors import at_place, explained
from edgellm.engines.formats.small_files import read_text
from edgellm.engines.formats.strict_formats import parse_json
from edgellm.errors import EdgeLLMError, RequestError, did_you_mean
from edgellm.kernels.atomic_write import write_atomically
from edgellm.sampling_params import SamplingParams
from edgellm.text.messages import ENCODER_NAMES, checked_messages, is_image

if TYPE_CHECKING:
    from edgellm.sessions import Session

FORMAT = "edgellm conversation 1"
_ANY_FORMAT = "edgellm conversation "
KEYS = ("format", "model", "adapter", "system", "messages", "settings")
LARGEST_FILE = 64 * 1024 * 1024


@dataclass
class Conversation:
    """A system prompt, the turns so far (user and assistant in turn), how answers are drawn, the LoRA adapter that
    answers (None: none), and the name of the model that it was had with ("": unknown)."""

    system: str | None
    messages: list[dict[str, Any]]
    params: SamplingParams
    adapter: str | None
    model: str


def save_conversation(path: Path, session: Session, model: str, replaces_any: bool = False) -> int:
    """Write the conversation of a session as JSON in place of one, or of any ordinary file where this `replaces_any`:
    whole or not at all, through a link. Returns how many messages it has; raises RequestError."""
    _check_replaced(path, replaces_any)
    messages = session.messages[0 if session.system is None else 1 :]
    content = {
        "format": FORMAT,
        "model": model,
        "adapter": session.adapter,
        "system": session.system or None,
        "messages": [_with_paths(message) for message in messages],
        "settings": {key: getattr(session.params or SamplingParams(), key) for key in SAMPLING_KEYS},
    }
    data = (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
    with explained(f"{path} cannot be written", RequestError):
        write_atomically(Path(os.path.realpath(path)), data)
    return len(messages)


def _check_replaced(path: Path, replaces_any: bool) -> None:
    """Raise RequestError where a file would be lost that is not to be replaced, and for what is no file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}") from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "no ordinary file"
        raise RequestError(f"{path} is {kind}: expected the name of a file for a conversation")
    if replaces_any:
        return
    with suppress(RequestError):
        content = _read_json(path)
        if isinstance(content, dict) and str(content.get("format")).startswith(_ANY_FORMAT):
            return
    raise RequestError(f"{path} is there and no conversation: choose another name, or overwrite it with /save! FILE")


def load_conversation(path: Path) -> Conversation:
    """Read a conversation; RequestError says what is wrong with the file."""
    content = _read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RequestError(f'{path} is no conversation that /save wrote: expected an object with "format": "{FORMAT}"')
    with at_place(str(path), EdgeLLMError, RequestError):
        return _checked(content)


def _read_json(path: Path) -> Any:
    return parse_json(read_text(path, LARGEST_FILE, RequestError), str(path), RequestError)


def _checked(content: dict[str, Any]) -> Conversation:
    for key in content:
        if key not in KEYS:
            raise RequestError(f"unknown key {key!r}{did_you_mean(key, KEYS)}")
    model = content.get("model", "")
    if not isinstance(model, str):
        raise RequestError("model is not text")
    adapter, system, messages, settings = (content.get(key) for key in ("adapter", "system", "messages", "settings"))
    for name, value in (("adapter", adapter), ("system", system)):
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{name} is a {type(value).__name__}: expected text or null")
    if not isinstance(settings, dict):
        raise RequestError(f"settings is a {type(settings).__name__}: expected an object")
    for key in settings:
        if key not in SAMPLING_KEYS:
            raise RequestError(f"settings has the unknown key {key!r}{did_you_mean(key, SAMPLING_KEYS)}")
    return Conversation(system, _checked_turns(messages), SamplingParams(**settings), adapter, model)


def _checked_turns(messages: Any) -> list[dict[str, Any]]:
    if messages == []:
        return []
    checked = checked_messages(messages, media=ENCODER_NAMES)
    for index, message in enumerate(checked):
        expected = "assistant" if index % 2 else "user"
        if message["role"] != expected:
            raise RequestError(f"message {index + 1} is of {message['role']}: expected user and assistant in turn")
    if len(checked) % 2:
        raise RequestError("the last message has no answer: expected user and assistant in turn")
    return [_with_pixels(message, given) for message, given in zip(checked, messages, strict=True)]


def _with_paths(message: dict[str, Any]) -> dict[str, Any]:
    """A message as it is kept in a file: of its images the paths."""
    if not isinstance(message["content"], list):
        return message
    parts = [{"type": "image", "path": part["name"]} if is_image(part) else part for part in message["content"]]
    return {**message, "content": parts}


def _with_pixels(message: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A checked message with the images whose paths are given."""
    if not isinstance(message["content"], list):
        return message
    parts = []
    for part in given["content"]:
        if is_image(part) and not isinstance(part.get("path"), str):
            raise RequestError("an image has no path: expected the path of its file")
        parts.append(read_image_file(Path(part["path"])) if is_image(part) else part)
    return {**message, "content": parts}
