"""Images that a conversation shows: read once, named by their paths, and found where they are dropped into a line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from edgellm.errors import RequestError
from edgellm.kernels.user_paths import user_path

if TYPE_CHECKING:
    from edgellm.llm import LLM

#: Files with these names are taken for images where they are dropped; `/image` reads any name.
SUFFIXES = frozenset(
    [".png", ".jpg", ".jpeg", ".jpe", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm", ".pgm"]
)
#: How a URL begins, whose second slash a path has lost.
_URL = re.compile(r"(https?|data):", re.IGNORECASE)
#: A word as terminals write the path of a dropped file: quoted, or with backslashes before what shells would read.
_WORD = re.compile(r"""(?<!\S)(?:'(?:[^']|'\\'')*'|"(?:[^"\\]|\\.)*"|(?:\\.|[^\s\\])+)(?!\S)""", re.DOTALL)

#: A part of a message; beside what the model gets it has "name", the path it was read from.
Part = dict[str, Any]


def read_image_file(path: Path) -> Part:
    """The image of a file as a part of a message; RequestError and ImageError say what is wrong with it."""
    from edgellm.multimodal.image_input import read_image

    if _URL.match(str(path)):
        raise RequestError(f"{str(path)[:200]} is a URL, and nothing is fetched here: expected the file of an image")
    path = user_path(path)
    return {"type": "image", "image": read_image(path), "name": str(path.absolute())}


def shown_content(attached_images: Sequence[Part], text: str) -> str | list[Part]:
    """The content of a message with these images before its text."""
    return [*attached_images, {"type": "text", "text": text}] if attached_images else text


def image_in_words(part: Part) -> str:
    """ "cup.png (640 x 480)"."""
    height, width = part["image"].shape[:2]
    return f"{Path(part['name']).name} ({width} x {height})"


def require_vision(llm: LLM) -> None:
    """RequestError for a model that takes text only."""
    if not llm.has_vision_model:
        raise RequestError(
            f"{llm.directory.path} has no vision model, it cannot see images: leave them out, or take a model that can"
        )


def is_path(word: str) -> bool:
    """Whether a word begins as full paths do, or those from a folder on that everybody knows."""
    return word.startswith(("/", "~/", "./", "../")) and not word.startswith("//") and "\n" not in word


def dropped_files(message: str) -> tuple[str, list[Path]]:
    """A message without the image files that were dropped into it, and these: words that are the full path of a file
    (or begin with ~/, ./ or ../, or are a file: URL) with an image's name."""
    whole = _image_file(message.strip())
    if whole is not None:  # as some terminals paste a path with spaces
        return "", [whole]
    files: list[Path] = []

    def taken(match: re.Match[str]) -> str:
        file = _image_file(_unquoted(match[0]))
        if file is None:
            return match[0]
        files.append(file)
        return ""

    text = _WORD.sub(taken, message)
    return (text.strip(), files) if files else (message, [])


def require_image_there(message: str) -> None:
    """RequestError where a message begins with the path of an image, perhaps a dropped one, that is not there."""
    line = message.strip()
    match = _WORD.match(line)
    words = [_unquoted(match[0])] if match else []
    for word in (*words, line):  # the whole line, as some terminals paste a path with spaces
        if is_path(word) and Path(word).suffix.lower() in SUFFIXES:
            raise RequestError(f"there is no file {word}")


def _image_file(text: str) -> Path | None:
    if text.lower().startswith("file://"):
        parts = urlsplit(text)
        text = unquote(parts.path) if parts.netloc in ("", "localhost") else ""
    if not is_path(text) or "\0" in text:
        return None
    path = user_path(text)
    try:
        return path if path.suffix.lower() in SUFFIXES and path.is_file() else None
    except OSError:  # longer than names may be
        return None


def _unquoted(word: str) -> str:
    if word.startswith("'"):
        return word[1:-1].replace("'\\''", "'")
    return re.sub(r"\\(.)", r"\1", word[1:-1] if word.startswith('"') else word, flags=re.DOTALL)
