"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path


def user_path(path: str | Path) -> Path:
    """The path with a leading "~" or "~NAME" replaced by that home directory, as shells do it: one that there is none
    of stays as it is, and is then a file that does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
