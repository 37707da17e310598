"""Checks the messages of a conversation before a template sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgellm.errors import RequestError, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
#: What a message may say of how its answer was found: the first that there is, is all that templates are given.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
EXTRA_KEYS = ("name", "tool_calls", "tool_call_id", *REASONING_KEYS)


def checked_messages(messages: Sequence[dict[str, Any]], takes_images: bool = False) -> list[dict[str, Any]]:
    """A copy of `messages` as chat templates take them, or `RequestError` that names the message.

    A `content` is text, or a list of parts: {"type": "text", "text": ...}, and {"type": "image"} for each image where a
    model `takes_images`; that of an assistant's message may be empty, or None beside tool calls. Keys whose value is
    None, and unknown ones with an empty list, are left out, as clients of OpenAI's API send them. `reasoning_content`
    and `thinking`, the two names under which templates look for it, both hold what is given under one of
    `REASONING_KEYS`.
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
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{what} has the role {shown(role)}: expected one of {', '.join(ROLES)}")
    given = {key: value for key, value in message.items() if value is not None}
    unknown = sorted(shown(key) for key in given if key not in ("role", "content", *EXTRA_KEYS) and given[key] != [])
    if unknown:
        raise RequestError(
            f"{what} has the unknown key {unknown[0]}: expected role, content, or one of {', '.join(EXTRA_KEYS)}"
        )
    content = _checked_content(message, number, takes_images)
    if role == "user" and not _shows_anything(content):
        raise RequestError(f"{what} (user) is empty: write something for the model to answer")
    extras = {key: given[key] for key in EXTRA_KEYS if key in given}
    reasoning = next((given[key] for key in REASONING_KEYS if key in given), None)
    if reasoning is not None:
        extras = {"thinking": reasoning, **extras, "reasoning_content": reasoning}
    return {"role": role, "content": content, **extras}


def _shows_anything(content: Any) -> bool:
    parts = [content] if isinstance(content, str) else [part.get("text", "image") for part in content]
    return any(part.strip() for part in parts)


def _checked_content(message: dict[str, Any], number: int, takes_images: bool) -> str | list[dict[str, Any]] | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return None
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
    return parts


IMAGE_PARTS = ("image", "image_url", "input_image")
_OTHER_PARTS = ("video", "video_url", "audio", "input_audio")
#: Where an image part may have its image: the key, and whether it is a URL or a path.
_SOURCES = (("image", False), ("path", True), ("url", True), ("image_url", True))
_TEXT_EXAMPLE = '{"type": "text", "text": "..."}'


@dataclass(frozen=True, eq=False)
class ImageReference:
    """An image that a request shows: its `source`, as `read_image` takes it, or text: a URL or a path (`is_url`).

    `channels` is the order of an array's colours, "RGB" or "BGR"; `name` says in errors which image it is.
    """

    source: Any
    is_url: bool
    channels: Literal["RGB", "BGR"]
    name: str


def text_of_part(part: Any, what: str) -> str:
    """The text of a text part; RequestError names anything else."""
    if not is_image(part):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _OTHER_PARTS:
            raise RequestError(f"{what} is of type {kind!r}: only text and images can be sent")
        if kind == "text" and isinstance(part.get("text"), str):
            return part["text"]
    raise RequestError(f"{what} is not a text part: expected {_TEXT_EXAMPLE}")


def is_image(part: Any) -> bool:
    """Whether a part of a message is an image."""
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def image_of_part(part: dict[str, Any], what: str) -> ImageReference:
    """The image of an image part; RequestError where it has none, or several."""
    given = [(key, is_url) for key, is_url in _SOURCES if part.get(key) is not None]
    if len(given) != 1:
        raise RequestError(
            f"{what} is of type {part['type']!r} and has {'no image' if not given else 'several images'}: expected one "
            'of {"type": "image_url", "image_url": {"url": "data:image/png;base64,... or a path"}} and '
            '{"type": "image", "image": a path, bytes, a Pillow image or an array}'
        )
    key, is_url = given[0]
    source = part[key]
    if key == "image_url" and isinstance(source, dict):
        source = source.get("url")
    if is_url and not isinstance(source, str) and not hasattr(source, "__fspath__"):
        raise RequestError(f"{what}: {key} is a {type(source).__name__}: expected a data: URL, a file: URL or a path")
    return ImageReference(source, is_url or isinstance(source, str), part.get("channels", "RGB"), what)


def images_of_messages(messages: Sequence[dict[str, Any]]) -> list[ImageReference]:
    """The images of a conversation that was checked (`checked_messages`), in order."""
    return [
        image_of_part(part, part_name(index, number, message))
        for index, message in enumerate(messages, 1)
        if isinstance(message.get("content"), list)
        for number, part in enumerate(message["content"], 1)
        if is_image(part)
    ]


def images_of_prompt(images: Sequence[Any]) -> list[ImageReference]:
    """The images of a prompt without messages: each as `read_image` takes it, a URL, or an image part."""
    references = []
    for number, image in enumerate(images, 1):
        name = f"image {number}"
        references.append(
            image_of_part(image, name)
            if is_image(image)
            else ImageReference(image, isinstance(image, str), "RGB", name)
        )
    return references


def part_name(message_number: int, part_number: int, message: dict[str, Any]) -> str:
    """How errors name a part of a message; numbers begin with 1."""
    return f"part {part_number} of message {message_number} ({message.get('role')})"
