"""The GPU's time of what a stream is given, by CUDA events."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any


def gpu_milliseconds(
    stream: Any, step: Callable[[], Any], repeats: int, series: int = 5, before: Callable[[], Any] = lambda: None
) -> float:
    """Median over the series, each of so many repeats, of the milliseconds of one `step`.

    `before` runs ahead of each series and is not timed: steps that lengthen a sequence begin at the same length there.
    """
    import pycuda.driver as cuda

    spans = []
    for _ in range(series):
        before()
        begin, end = cuda.Event(), cuda.Event()
        begin.record(stream)
        for _ in range(repeats):
            step()
        end.record(stream)
        end.synchronize()
        spans.append(begin.time_till(end) / repeats)
    return statistics.median(spans)
