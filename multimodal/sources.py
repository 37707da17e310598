"""Where media come from, images, sound and videos: files, and URLs that hold their bytes or name a file."""

from __future__ import annotations

import base64
import binascii
import stat
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from edgellm.engines.errors import AudioError, ImageError

#: By kind of media, what a file may have before anything of it is decoded.
SOURCE_BYTES = {"image": 2**26, "audio": 2**28, "video": 2**28}
#: By kind of media, what is raised, and what errors call a piece of it.
_FAILURES = {"image": ImageError, "audio": AudioError, "video": ImageError}
NOUNS = {"image": "image", "audio": "sound", "video": "video"}


def bytes_of(source: object, kind: str) -> tuple[bytes, str] | None:
    """The bytes of a `kind` of media, of a path or as they are given, and what errors call them; None for another
    source. Raises the kind's error for what is no regular file, cannot be read, or is too large."""
    if isinstance(source, (str, Path)):
        return _file_bytes(Path(source), kind), str(source)
    if not isinstance(source, (bytes, bytearray, memoryview)):
        return None
    data, what = bytes(source), f"the {NOUNS[kind]}"
    _check_bytes(len(data), what, kind)
    return data, what


def _file_bytes(path: Path, kind: str) -> bytes:
    failure, noun = _FAILURES[kind], NOUNS[kind]
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait for its other end
            found = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            article = "an" if kind == "image" else "a"
            raise failure(f"{path} is {found}: expected the file of {article} {noun}")
        _check_bytes(status.st_size, str(path), kind)
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise failure(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _check_bytes(size: int, what: str, kind: str) -> None:
    if size > SOURCE_BYTES[kind]:
        raise _FAILURES[kind](f"{what} has {size} bytes: the most is {SOURCE_BYTES[kind]}. Save it smaller")


#: A scheme of one letter is the drive of a Windows path.
_SHORTEST_SCHEME = 2
_LONGEST_PATH = 4096


def source_of_url(url: str, kind: str) -> Path | bytes:
    """What `read_image` and `heard` take for a URL to a `kind` of media: the bytes of a `data:` URL, the path of a
    `file:` URL, or a plain path.

    Raises the kind's error for other schemes, a malformed URL, and more data than it may have, before it is decoded.
    """
    failure, noun = _FAILURES[kind], NOUNS[kind]
    scheme = url[: url.find(":")].lower() if ":" in url else ""
    if scheme == "data":
        return _data(url, kind)
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise failure(f"the {noun} {_shown(url)} is on the host {parts.netloc!r}: expected a file of this machine")
        return Path(unquote_to_bytes(parts.path).decode("utf-8", "surrogateescape"))
    if scheme in ("http", "https", "ftp") or (len(scheme) >= _SHORTEST_SCHEME and url[len(scheme) :].startswith("://")):
        raise failure(
            f"the {noun} {_shown(url)} would have to be fetched, which is never done: download it first, and give its "
            f"path, or its bytes as data:{kind}/...;base64,..."
        )
    if len(url) > _LONGEST_PATH:
        raise failure(
            f"the {noun} {_shown(url)} is too long for a path ({len(url)} characters): write data:{kind}/...;base64, "
            "before base64"
        )
    return Path(url)


def _data(url: str, kind: str) -> bytes:
    failure, noun = _FAILURES[kind], NOUNS[kind]
    head, comma, data = url.partition(",")
    if not comma:
        raise failure(f"the {noun}'s data: URL has no comma: expected data:{kind}/...;base64,...")
    if len(data) > SOURCE_BYTES[kind] // 3 * 4 + 4:
        raise failure(f"the {noun}'s data: URL has {len(data)} characters: the most is {SOURCE_BYTES[kind]} bytes")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode(unquote_to_bytes(data), validate=True)
    except (binascii.Error, ValueError) as error:
        raise failure(f"the {noun}'s data: URL is not base64 ({error})") from error


def _shown(url: str) -> str:
    return url if len(url) <= 80 else f"{url[:77]}..."
