"""How many threads NumPy's OpenBLAS uses for the products of a small model: one.

A product of a small matrix takes microseconds, and threads that wait for each other in between cost more than they
give: where other programs keep the cores busy, a token took 3 to 20 times as long with two threads as with one. The
library has no argument for it, only a setting of the process, which is put back after each step.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

#: NumPy's own wheels rename OpenBLAS's functions; systems' packages do not.
_NAMES = ("scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads", "openblas_{}_num_threads64_")
_PLAIN_NAME = "openblas_{}_num_threads"


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """One thread inside; without effect where NumPy uses another library."""
    functions = _openblas()
    if functions is None:
        yield
        return
    get, set_threads = functions
    before = get()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


@lru_cache(maxsize=1)
def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """The functions that get and set the number of threads, of the OpenBLAS that this process has loaded (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line and len(line.split()) > 5}
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in (*_NAMES, _PLAIN_NAME):
            if hasattr(library, name.format("get")) and hasattr(library, name.format("set")):
                get, set_threads = (getattr(library, name.format(verb)) for verb in ("get", "set"))
                set_threads.restype = None
                return get, set_threads
    return None
