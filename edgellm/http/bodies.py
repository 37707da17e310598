"""What a body would cost, found before it is parsed: its text beside images, and its values."""

from __future__ import annotations

import re
from typing import Any

from edgellm.http.errors import HTTPError

#: Bytes of a body beside its images: so many, or so many for each token of the context, whichever is more.
TEXT_BYTES, TOKEN_BYTES = 2 * 2**20, 16
#: JSON values of a body, those of lists of whole numbers apart: token ids take as many as the text has.
MOST_VALUES = 300_000
#: A string, or the beginning of one that has no end; some of them with what is before them; and a long list of whole
#: numbers. None of these patterns ever tries a second way to match.
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"?'
_STRINGS = re.compile(_STRING, re.DOTALL)
_SOME_STRINGS = re.compile(rb'(?:[^"]*' + _STRING + rb"){1,1000}", re.DOTALL)
#: What the text of an image begins with: a data URL, a field that has such a name, or so much base64 (clients of
#: ollama's API send neither).
_DATA = re.compile(rb'"(?:data(?::|"\s*:\s*")|[A-Za-z0-9+/]{4096})')
_WHOLE_NUMBERS = re.compile(rb"\[[\s\d,]{100,}\]")


def check_body(body: bytes, most: int) -> None:
    """Raise HTTPError for a body of more than `most` bytes of text, or too many values. Strings that begin like an
    image, and those of fields named "data", do not count here, wherever they stand: see `check_images`."""
    text = _without_data(body, most)
    if len(text) > most:
        raise _too_large(most)
    if _values(text) <= MOST_VALUES:
        return
    text = _without_strings(text)
    if text.count(b"[") + text.count(b"{") > MOST_VALUES or _values(_WHOLE_NUMBERS.sub(b"[]", text)) > MOST_VALUES:
        message = f"the body has more than {MOST_VALUES:,} JSON values, lists of whole numbers apart"
        raise HTTPError(413, message, code="body_too_large")


def check_images(body: bytes, value: dict[str, Any], most: int) -> None:
    """Raise HTTPError for a body, parsed as `value`, of more than `most` bytes beside its images."""
    if len(body) > most:
        shown = [_image_bytes(value.get(name)) for name in ("messages", "input")]
        if len(body) - sum(shown) - _listed_bytes([value]) - _listed_bytes(value.get("messages")) > most:
            raise _too_large(most)


def _without_data(body: bytes, most: int) -> bytes:
    """A body in which images are cut off where they begin, or its beginning that has more than `most` bytes."""
    parts, size, place = [], 0, 0
    while size <= most and (match := _DATA.search(body, place)) is not None:
        begin, end = match.span()
        parts.append(body[place:end])
        size += end - place
        is_quoted = body[begin - 1 : begin] == b"\\"  # within another string
        place = end if is_quoted or (closing := body.find(b'"', end)) < 0 else closing
    return b"".join([*parts, body[place : place + most + 1]])


def _without_strings(text: bytes) -> bytes:
    """A body's text with a quote for each string, piece by piece, so that other threads have their turn."""
    pieces, place = [], 0
    while (match := _SOME_STRINGS.match(text, place)) is not None:
        pieces.append(_STRINGS.sub(b'"', match[0]))
        place = match.end()
    return b"".join([*pieces, text[place:]])


def _values(text: bytes) -> int:
    """One behind each comma, and one that begins each list and object that is not empty."""
    return sum(map(text.count, (b",", b"[", b"{"))) - text.count(b"[]") - text.count(b"{}")


def _image_bytes(messages: Any) -> int:
    """The bytes of the images, videos and sounds that messages show: their data URLs, or what a `source` has."""
    size = 0
    for message in _objects(messages):
        parts = _objects(message.get("content"))
        for part in [*parts, *(inner for each in parts for inner in _objects(each.get("content")))]:
            url = part.get("image_url") or part.get("audio_url") or part.get("video_url")
            for name in ("source", "input_audio"):
                if isinstance(source := part.get(name), dict):
                    data, url = source.get("data"), source.get("url")
                    size += len(data) if isinstance(data, str) else 0
            url = url.get("url") if isinstance(url, dict) else url
            size += len(url) - len("data:") if isinstance(url, str) and url.startswith("data:") else 0
    return size


def _objects(values: Any) -> list[dict[str, Any]]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def _listed_bytes(objects: Any) -> int:
    """The bytes of the images that objects have as a list of texts, `images`."""
    found = (each.get("images") for each in _objects(objects))
    images = (image for listed in found if isinstance(listed, list) for image in listed if isinstance(image, str))
    return sum(map(len, images))


def _too_large(most: int) -> HTTPError:
    message = f"the body has more than {most:,} bytes beside its images, which are the most for this model's context"
    return HTTPError(413, message, code="body_too_large")
