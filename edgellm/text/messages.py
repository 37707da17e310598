"""Checks the messages of a conversation before a template sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgellm.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
EXTRA_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
NON_TEXT_PARTS = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio")


def checked_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy of `messages` with every `content` one string, or `RequestError` that names the message.

    Text parts are joined by line ends. The content of an assistant's message may be empty, or None beside tool calls.
    """
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is a {type(messages).__name__}: expected a list of messages")
    if not messages:
        raise RequestError("there are no messages: expected at least one")
    return [_checked_message(message, f"message {number}") for number, message in enumerate(messages, 1)]


def _checked_message(message: Any, what: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{what} is a {type(message).__name__}: expected an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{what} has the role {role!r}: expected one of {', '.join(ROLES)}")
    unknown = sorted(str(key) for key in message if key not in ("role", "content", *EXTRA_KEYS))
    if unknown:
        raise RequestError(
            f"{what} has the unknown key {unknown[0]!r}: expected role, content, or one of {', '.join(EXTRA_KEYS)}"
        )
    content = _checked_content(message, f"{what} ({role})")
    if role == "user" and not content.strip():
        raise RequestError(f"{what} (user) is empty: write something for the model to answer")
    extras = {key: message[key] for key in EXTRA_KEYS if message.get(key) is not None}
    return {"role": role, "content": content, **extras}


def _checked_content(message: dict[str, Any], what: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return ""
    if not isinstance(content, list):
        found = "no content" if content is None else f"content of type {type(content).__name__}"
        raise RequestError(f"{what} has {found}: expected text, or a list of text parts")
    return "\n".join(_checked_part(part, f"part {number} of {what}") for number, part in enumerate(content, 1))


def _checked_part(part: Any, what: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in NON_TEXT_PARTS:
        raise RequestError(f"{what} is of type {kind!r}, but this model has no vision engine: send text only")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(f'{what} is not a text part: expected {{"type": "text", "text": "..."}}')
    return part["text"]
