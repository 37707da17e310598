"""NVTX ranges for NVIDIA's profilers, through a C library that is loaded only when ranges are asked for.

CUDA 13 has it as `libnvtx3interop.so.1` (also in the wheel `nvidia-nvtx`), earlier toolkits as `libnvToolsExt.so.1`.
Without a profiler attached a range costs a function call. A range is on the host's thread, around what enqueues the
work; Nsight Systems shows for it what the GPU did ("NVTX GPU projection").
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgellm.engines.backends.base import Backend
from edgellm.errors import MissingDependencyError

_NAMES = ("libnvtx3interop.so.1", "libnvToolsExt.so.1")


def library_candidates() -> list[str]:
    """Where the library may be: in the wheel, in the toolkit, or where the system's loader finds it."""
    wheels = [Path(folder) / "nvidia" for folder in sys.path if (Path(folder) / "nvidia").is_dir()]
    toolkits = [Path(folder) for folder in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if folder]
    folders = [folder for wheel in wheels for folder in sorted(wheel.glob("*/lib"))]
    folders += [toolkit / "lib64" for toolkit in toolkits]
    return [str(folder / name) for folder in folders for name in _NAMES if (folder / name).is_file()] + list(_NAMES)


class NvtxRanges:
    """Pushes and pops ranges (see `Observer`). Raises MissingDependencyError without the library."""

    def __init__(self) -> None:
        library = _load()
        self._push, self._pop = library.nvtxRangePushA, library.nvtxRangePop
        self._push.argtypes, self._push.restype = [ctypes.c_char_p], ctypes.c_int
        self._pop.argtypes, self._pop.restype = [], ctypes.c_int

    @contextmanager
    def device_span(self, backend: Backend, name: str, **details: Any) -> Iterator[None]:
        """See `Observer`."""
        with self.host_span(name, **details):
            yield

    @contextmanager
    def host_span(self, name: str, **details: Any) -> Iterator[None]:
        """See `Observer`."""
        self._push(f"edgellm: {name}".encode())
        try:
            yield
        finally:
            self._pop()

    def finish(self) -> None:
        """There is nothing left to do."""


def _load() -> Any:
    failures = []
    for candidate in library_candidates():
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            failures.append(str(error))
    raise MissingDependencyError(
        f"NVTX ranges need one of {', '.join(_NAMES)}, and none loads ({'; '.join(failures)}). Install the wheel "
        "nvidia-nvtx, or leave the ranges out."
    )
