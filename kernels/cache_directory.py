"""Where files that can be made again are kept between runs."""

import os
from pathlib import Path

from edgellm.kernels.user_paths import user_folder, user_path


def user_cache_directory() -> Path:
    """Return the directory for compiled kernels, plans and remembered digests; it may not exist yet.

    `EDGELLM_CACHE_DIR` overrides it; otherwise it is `$XDG_CACHE_HOME/edgellm` or `~/.cache/edgellm`.
    """
    override = os.environ.get("EDGELLM_CACHE_DIR")
    if override:
        return user_path(override)
    return user_folder("XDG_CACHE_HOME", ".cache")
