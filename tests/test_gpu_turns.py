"""Tests of the GPU share it; those that measure it have it to themselves."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from gpu_turns import gpu_turn


def test_one_who_measures_waits_for_all_and_nobody_passes(tmp_path: Path) -> None:
    order: list[str] = []
    leave = Event()

    def take(name: str, stays: bool = False) -> None:
        with gpu_turn(name == "alone", tmp_path):
            order.append(f"{name} came")
            if stays:
                leave.wait(10)
            order.append(f"{name} left")

    with ThreadPoolExecutor(4) as threads:
        turns = [threads.submit(take, name, True) for name in ("first", "second")]
        until = time.monotonic() + 10
        while len(order) < 2 and time.monotonic() < until:
            time.sleep(0.001)
        assert sorted(order) == ["first came", "second came"]  # at once
        for name in ("alone", "late"):
            turns.append(threads.submit(take, name))
            time.sleep(0.1)
        assert len(order) == 2
        leave.set()
        for turn in turns:
            turn.result(10)
    assert order[4:] == ["alone came", "alone left", "late came", "late left"]
