"""What a body would cost, found before it is parsed: its text beside images, and its values; and the bytes of images,
videos and sounds that parts of its messages have, of base64 and data URLs alone.

No request reads a file of this machine, and nothing is fetched. Errors name the part, and the field `param`.
"""

from __future__ import annotations

import io
import re
import sys
from typing import Any

from PIL import Image

from edgellm.errors import shown
from edgellm.http.errors import HTTPError, http_error, refused
from edgellm.multimodal.image_input import readable_formats
from edgellm.multimodal.sources import source_of_url

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
#: Fields with the bytes of images, videos and sounds, as text or as an object's.
_MEDIA = ("image_url", "audio_url", "video_url", "url", "source", "input_audio", "data", "images")


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
    if len(body) > most and len(body) - _media_bytes(value) > most:
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


def _media_bytes(value: Any, shows: bool = False, depth: int = 10) -> int:
    """The bytes of the images, videos and sounds that the parts of messages, or a list `images`, show; of texts in
    these all (`shows`)."""
    if isinstance(value, str) or not depth:
        return len(value) if shows and isinstance(value, str) else 0
    if isinstance(value, list):
        return sum(_media_bytes(each, shows, depth - 1) for each in value)
    fields = value if isinstance(value, dict) else {}
    parts = {key: each for key, each in fields.items() if key in _MEDIA or key in ("messages", "input", "content")}
    return sum(_media_bytes(each, shows or key in _MEDIA, depth - 1) for key, each in parts.items())


def _too_large(most: int) -> HTTPError:
    message = f"the body has more than {most:,} bytes beside its images, which are the most for this model's context"
    return HTTPError(413, message, code="body_too_large")


def image_of_part(part: dict[str, Any], what: str, param: str, most_pixels: int) -> tuple[bytes, int, bool]:
    """The bytes of an image, its pixels, and whether the part asks for a detail, which changes nothing. Raises
    HTTPError, also for one of more than `most_pixels`, before it is decoded."""
    source = part.get("image_url")
    described = source if isinstance(source, dict) else {"url": source, "detail": part.get("detail")}
    url = described.get("url")
    others = sorted(set(part) - {"type", "image_url", "detail"} | set(described) - {"url", "detail"})
    if others or not isinstance(url, str) or url[:5].lower() != "data:":
        found = f"has {', '.join(others)}" if others else f"shows {shown(url)[:80]}"
        expected = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        raise refused(param, f"{what} {found}: images are taken as data URLs alone, {expected}", "invalid_image")
    data = _data(url, "image", param)
    pixels = _pixels(data)
    if pixels > most_pixels:
        message = f"{what} has {pixels:,} pixels: at most {most_pixels:,} are taken (--max-image-pixels)"
        raise refused(param, message, "image_too_large")
    return data, pixels, described.get("detail") not in (None, "auto")


#: By kind, what errors call a piece, and how a part has one.
_FILES = {
    "audio": ("sound", '{"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}'),
    "video": ("video", '{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,..."}}'),
}


def file_of_part(part: dict[str, Any], kind: str, what: str, param: str) -> bytes:
    """The bytes of the file of a sound or a video. Raises HTTPError."""
    url, given = part.get(f"{kind}_url"), part.get(f"input_{kind}")
    url = url.get("url") if isinstance(url, dict) else url
    if isinstance(given, dict) and isinstance(given.get("data"), str):
        url = f"data:{kind}/x;base64,{given['data']}"
    if not isinstance(url, str) or url[:5].lower() != "data:" or set(part) - {"type", f"{kind}_url", f"input_{kind}"}:
        noun, expected = _FILES[kind]
        message = f"{what} is no {noun}: {noun}s are taken as base64 and data URLs alone, {expected}"
        raise refused(param, message, f"invalid_{kind}")
    return _data(url, kind, param)


def _data(url: str, kind: str, param: str) -> bytes:
    try:
        data = source_of_url(url, kind)
    except Exception as error:
        raise http_error(error, {"": param}) from error
    assert isinstance(data, bytes)  # a data URL is never a path
    return data


def _pixels(data: bytes) -> int:
    """How many pixels a file says that it has; 0 where it is no image that can be read, which the engine explains."""
    try:
        with Image.open(io.BytesIO(data), formats=readable_formats()) as image:
            return image.width * image.height
    except Image.DecompressionBombError:
        return sys.maxsize
    except Exception:  # whatever hostile bytes make a decoder raise
        return 0
