"""Tests that must not take long, whatever breaks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def within_seconds(seconds: float) -> Iterator[None]:
    """Fail a test whose Python code takes more of the processor's time in this thread, the main one."""

    def fail(*_: Any) -> None:
        raise AssertionError(f"this took more than {seconds} seconds of processor time")

    before = signal.signal(signal.SIGVTALRM, fail)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
