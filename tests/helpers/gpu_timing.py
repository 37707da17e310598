"""How long kernels take in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REPEATS = 50


def microseconds(gpu: Any, step: Callable[[], None], name: str, before: Callable[[], None] = lambda: None) -> float:
    """The least microseconds of one `step` over ten runs of a graph that holds many; `before` each run, not timed."""
    import pycuda.driver as cuda

    def many() -> None:
        for _ in range(REPEATS):
            step()

    before()
    many()  # loads code, which a capture must not do
    launch = gpu.capture(many, name)
    start, end, times = cuda.Event(), cuda.Event(), []
    for _ in range(10):
        before()
        start.record(gpu.stream)
        launch()
        end.record(gpu.stream)
        end.synchronize()
        times.append(start.time_till(end) * 1000 / REPEATS)
    return min(times)
