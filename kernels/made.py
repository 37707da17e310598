"""What has to be made before kernels run, counted: modules compiled and loaded, plans built, graphs captured."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

COMPILED, LOADED, BUILT, CAPTURED = "modules compiled", "modules loaded", "plans built", "graphs captured"


class Made:
    """How many of each kind were made on a device, in how many `seconds` (those of threads side by side add up), and
    the bytes of device memory that graphs took. Any thread may count."""

    def __init__(self) -> None:
        kinds = COMPILED, LOADED, BUILT, CAPTURED
        self.counts, self.seconds, self.graph_bytes = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0.0), 0
        self._lock = threading.Lock()

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Around making one of a kind; what fails does not count."""
        began = time.perf_counter()
        yield
        with self._lock:
            self.counts[kind] += 1
            self.seconds[kind] += time.perf_counter() - began

    def __str__(self) -> str:
        """For people."""
        words = [f"{count} {kind} in {self.seconds[kind]:.2f} s" for kind, count in self.counts.items() if count]
        if self.graph_bytes:
            words.append(f"graphs take {self.graph_bytes / 2**20:.0f} MiB")
        return ", ".join(words) or "nothing had to be made"
