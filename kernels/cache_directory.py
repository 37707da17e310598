"""Where files that can be made again are kept between runs."""

import os
from pathlib import Path


def user_cache_directory() -> Path:
    """Return the directory for compiled kernels, plans and remembered digests; it may not exist yet.

    `EDGELLM_CACHE_DIR` overrides it; otherwise it is `$XDG_CACHE_HOME/edgellm` or `~/.cache/edgellm`.
    """
    override = os.environ.get("EDGELLM_CACHE_DIR")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "edgellm"
