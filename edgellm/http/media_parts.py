"""Parts of messages that show images and videos or let hear sounds: their bytes, of base64 and data URLs alone.

No request reads a file of this machine, and nothing is fetched. Errors name the part, and the field `param`.
"""

from __future__ import annotations

import io
import sys
from typing import Any

from PIL import Image

from edgellm.errors import shown
from edgellm.http.errors import HTTPError, http_error
from edgellm.multimodal.image_input import readable_formats
from edgellm.multimodal.sources import source_of_url


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
        message = f"{what} {found}: images are taken as data URLs alone, {expected}"
        raise HTTPError(400, message, param=param, code="invalid_image")
    data = _data(url, "image", param)
    pixels = _pixels(data)
    if pixels > most_pixels:
        message = f"{what} has {pixels:,} pixels: at most {most_pixels:,} are taken (--max-image-pixels)"
        raise HTTPError(400, message, param=param, code="image_too_large")
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
        raise HTTPError(400, message, param=param, code=f"invalid_{kind}")
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
