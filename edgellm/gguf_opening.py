"""GGUF files in the place of engine directories: each is opened through one of its own in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from edgellm.engines.checkpoints.weight_files import is_gguf_file
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.errors import EngineDirectoryError
from edgellm.kernels.cache_directory import user_cache_directory

logger = logging.getLogger("edgellm.gguf")


def engine_directory_of(path: Path) -> Path:
    """The engine directory that a GGUF file is opened through, made where there is none, or none of this file as it is
    now; any other path as it is.

    The file is known by its place. Whether it is still what the directory was made of is found as of all weight files:
    by size, time and inode, then by its digest. Raises what a build raises.
    """
    if not is_gguf_file(path):
        return path
    real = Path(os.path.realpath(path))
    target = user_cache_directory() / "gguf" / f"{real.stem}-{hashlib.sha256(os.fsencode(real)).hexdigest()[:12]}"
    try:
        EngineDirectory.open(target)
    except EngineDirectoryError as error:
        logger.info("An engine directory of %s is made: %s", path, error)
        _build(real, target)
    return target


def _build(path: Path, target: Path) -> None:
    from edgellm.engines.building.builder import build_engine_directory
    from edgellm.engines.building.gguf_folder import checkpoint_folder
    from edgellm.tool_calls.formats import checkpoint_format

    target.parent.mkdir(parents=True, exist_ok=True)
    with checkpoint_folder(path) as folder:
        build_engine_directory(folder, target, weights="link", force=True, tool_format=checkpoint_format(folder, None))
