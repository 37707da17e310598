"""The tool that imitates a device by a clock: what it says of steps follows from what it was told."""

from __future__ import annotations

import time

import pytest

from edgellm.decoding import loop
from tools.bench.host_time import CHOICE, Bench, Machine, imitated, measure


def test_the_clock_waits_for_the_device_and_not_for_the_host() -> None:
    machine = Machine(0.001, 1.0)
    began = machine.perf_counter()
    first, second = machine.launch(0.5), machine.launch(0.25)
    assert second == pytest.approx(first + 0.25) and machine.perf_counter() - began < 0.1
    machine.wait(first)
    assert machine.perf_counter() >= first and machine.waited > 0.4
    machine.wait(first)
    assert machine.perf_counter() < second, "what is done is not waited for"
    time.sleep(0.02)
    assert machine.perf_counter() < first + 0.02, "other work of the machine does not count"


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(0.02, 0.0, 1.0)


def test_beside_a_slow_device_the_host_is_hidden(bench: Bench) -> None:
    """Steps under rules take no longer than others: their forward passes begin before tokens are known."""
    with imitated(bench.machine):
        asked = bench.asked("schema", 2)
        plain, ruled = bench.answered(asked, False, None), bench.answered(asked, True, None)
        kinds = dict(bench.runner.kinds)
        assert kinds["begun"] >= sum(len(one.answer or ()) - 1 for one in asked) - len(asked)
        assert ruled["tokens_per_second"] == pytest.approx(plain["tokens_per_second"], rel=0.02)
        bench.runner.backend.steps_ahead = 0
        waiting = bench.answered(asked, True, None)
        bench.runner.backend.steps_ahead = 1
        assert "begun" not in bench.runner.kinds
        assert waiting["tokens_per_second"] < ruled["tokens_per_second"]
        assert 1 / ruled["tokens_per_second"] > (1 - CHOICE) * 0.02
    assert loop.time is time


def test_what_was_said_before_pays_beside_a_slow_device(bench: Bench) -> None:
    with imitated(bench.machine):
        action, chat = measure(bench, "action", 2, 2), measure(bench, "chat", 2, 2)
    assert action["ratio"] > 1.3 and action["steps"]["round"] > 0
    assert chat["ratio"] > 0.9
    assert action["plain_host_us"] > 0
