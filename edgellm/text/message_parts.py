"""The parts of a message: text, and images in the formats of OpenAI's clients and of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgellm.errors import RequestError

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
