"""Turns on a GPU that tests of many processes share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def gpu_turn(alone: bool, folder: Path | None = None) -> Iterator[None]:
    """Has the GPU with others, or `alone`: when all who have it are done, and before those who come later.

    `folder`: of the locks, which go with their process; by default one that every process of the user finds.
    """
    import fcntl

    folder = folder or Path(tempfile.gettempdir())
    name = f"edgellm-tests-{os.getuid()}-gpu-{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"
    with ExitStack() as files:
        door, room = (files.enter_context((folder / f"{name}.{part}").open("w")) for part in ("door", "room"))
        fcntl.flock(door, fcntl.LOCK_EX)  # whoever waits for the room keeps it shut
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
