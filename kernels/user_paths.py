"""Paths as people write them, and where their files lie."""

from __future__ import annotations

import os
from pathlib import Path

#: What account databases have for users without a home: nothing is there, and nothing is written.
_NO_HOME = Path("/nonexistent")


def user_path(path: str | Path) -> Path:
    """The path with a leading "~" or "~NAME" replaced by that home directory, as shells do it: one that there is none
    of stays as it is, and is then a file that does not exist."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):  # ValueError: a null character in the name
        return Path(path)


def resolved(path: Path) -> Path:
    """The path without links, as far as there is something. A link to itself stays, where releases of Python before
    3.13 raise RuntimeError in `Path.resolve`."""
    return Path(os.path.realpath(path))


def printable(name: object) -> str:
    """The name of a file, or another that somebody else gave, to be shown: what would break a line, steer a terminal or
    be no character is written as Python's strings have it (`\\n`, `\\x1b`, `\\udcff`)."""
    text = str(name)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def user_folder(variable: str, otherwise: str) -> Path:
    """EdgeLLM's folder in the one that an environment variable names (as XDG_CACHE_HOME does), else in `otherwise`
    under the user's home; a service may have neither, and then finds and keeps nothing."""
    if base := os.environ.get(variable):
        return Path(base) / "edgellm"
    home = user_path("~")
    return (home if home.is_absolute() else _NO_HOME) / otherwise / "edgellm"


def user_cache_directory() -> Path:
    """Return the directory for compiled kernels, plans and remembered digests; it may not exist yet.

    `EDGELLM_CACHE_DIR` overrides it; otherwise it is `$XDG_CACHE_HOME/edgellm` or `~/.cache/edgellm`.
    """
    if override := os.environ.get("EDGELLM_CACHE_DIR"):
        return user_path(override)
    return user_folder("XDG_CACHE_HOME", ".cache")
