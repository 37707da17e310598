"""Checks the messages of a conversation before a template sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgellm.errors import RequestError
from edgellm.text.message_parts import image_of_part, is_image, part_name, text_of_part

ROLES = ("system", "developer", "user", "assistant", "tool")
EXTRA_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")


def checked_messages(messages: Sequence[dict[str, Any]], takes_images: bool = False) -> list[dict[str, Any]]:
    """A copy of `messages` as chat templates take them, or `RequestError` that names the message.

    Every `content` is one string, text parts joined by line ends; or, where a model `takes_images` and the message
    shows some, a list of parts: {"type": "text", "text": ...}, and {"type": "image"} for each image. The content of an
    assistant's message may be empty, or None beside tool calls.
    """
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is a {type(messages).__name__}: expected a list of messages")
    if not messages:
        raise RequestError("there are no messages: expected at least one")
    return [_checked_message(message, number, takes_images) for number, message in enumerate(messages, 1)]


def _checked_message(message: Any, number: int, takes_images: bool) -> dict[str, Any]:
    what = f"message {number}"
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
    content = _checked_content(message, number, takes_images)
    if role == "user" and isinstance(content, str) and not content.strip():
        raise RequestError(f"{what} (user) is empty: write something for the model to answer")
    extras = {key: message[key] for key in EXTRA_KEYS if message.get(key) is not None}
    return {"role": role, "content": content, **extras}


def _checked_content(message: dict[str, Any], number: int, takes_images: bool) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return ""
    if not isinstance(content, list):
        found = "no content" if content is None else f"content of type {type(content).__name__}"
        raise RequestError(f"message {number} ({message['role']}) has {found}: expected text, or a list of parts")
    parts = []
    for place, part in enumerate(content, 1):
        what = part_name(number, place, message)
        if not is_image(part):
            parts.append({"type": "text", "text": text_of_part(part, what)})
        elif not takes_images:
            raise RequestError(
                f"{what} is of type {part['type']!r}, but this model has no vision engine: send text only"
            )
        else:
            image_of_part(part, what)
            parts.append({"type": "image"})
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts
