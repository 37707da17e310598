"""Images named by a URL, as clients of chat interfaces send them; nothing is ever fetched from a network."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from edgellm.multimodal.errors import ImageError
from edgellm.multimodal.image_input import DEFAULT_LIMITS, ImageLimits

#: A scheme of one letter is the drive of a Windows path.
_SHORTEST_SCHEME = 2
_LONGEST_PATH = 4096


def image_of_url(url: str, limits: ImageLimits = DEFAULT_LIMITS) -> Path | bytes:
    """What `read_image` takes for a URL: the bytes of a `data:` URL, the path of a `file:` URL, or a plain path.

    Raises ImageError for other schemes, a malformed URL, and data beyond `limits`, before it is decoded.
    """
    scheme = url[: url.find(":")].lower() if ":" in url else ""
    if scheme == "data":
        return _data(url, limits)
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ImageError(
                f"the image {_shown(url)} is on the host {parts.netloc!r}: expected a file of this machine"
            )
        return Path(unquote_to_bytes(parts.path).decode("utf-8", "surrogateescape"))
    if scheme in ("http", "https", "ftp") or (len(scheme) >= _SHORTEST_SCHEME and url[len(scheme) :].startswith("://")):
        raise ImageError(
            f"the image {_shown(url)} would have to be fetched, which is never done: download it first, and give its "
            "path, or its bytes as data:image/...;base64,..."
        )
    if len(url) > _LONGEST_PATH:
        raise ImageError(
            f"the image {_shown(url)} is too long for a path ({len(url)} characters): write data:image/...;base64, "
            "before base64"
        )
    return Path(url)


def _data(url: str, limits: ImageLimits) -> bytes:
    head, comma, data = url.partition(",")
    if not comma:
        raise ImageError("the image's data: URL has no comma: expected data:image/...;base64,...")
    if len(data) > limits.max_bytes // 3 * 4 + 4:
        raise ImageError(f"the image's data: URL has {len(data)} characters: the most is {limits.max_bytes} bytes")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode(unquote_to_bytes(data), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the image's data: URL is not base64 ({error})") from error


def _shown(url: str) -> str:
    return url if len(url) <= 80 else f"{url[:77]}..."
