"""Plans of several shapes built side by side."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from edgellm.engines.decoder_config import DecoderConfig, EngineShape
from edgellm.engines.tensorrt_operations import build_plan

_MOST_THREADS = 4


def build_plans(
    config: DecoderConfig,
    shapes: Sequence[EngineShape],
    dtype: str,
    attention: str,
    target: str,
    is_in_vain: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[EngineShape, bytes, float]]:
    """Build a plan of each shape for the compute capability `target`; yields shape, plan and the seconds it took.

    Plans come as they are done. Ends early once `is_in_vain` says so. Raises BuildError. A builder that is at work
    cannot be stopped: when the caller leaves, it ends by itself within seconds and its plan is dropped.
    """

    def timed(shape: EngineShape) -> tuple[EngineShape, bytes, float]:
        started = time.perf_counter()
        return shape, build_plan(config, shape, dtype, attention, target), time.perf_counter() - started

    executor = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1, max(1, len(shapes))), "edgellm-plans")
    try:
        pending: set[Future] = {executor.submit(timed, shape) for shape in shapes}
        while pending and not is_in_vain():
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
