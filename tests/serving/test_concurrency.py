"""Many threads at once: nothing is lost or mixed up, and nothing is left behind."""

from __future__ import annotations

import gc
import random
import resource
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from edgellm.drafting.config import DraftingConfig
from edgellm.errors import EngineError, QueueFullError
from edgellm.generation import Generation
from edgellm.llm import LLM
from edgellm.requests import Request

Answers = tuple[list[Request], list[tuple[tuple[int, ...], str, str]]]
THREADS = 16


class Caller:
    """Asks one request after another, cancels some, lets some be late, some fail; checks each answer."""

    def __init__(self, served: LLM, answers: Answers, seed: int, count: int) -> None:
        self._served, self._answers, self._random, self._count = served, answers, random.Random(seed), count
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[object] = []

    def run(self) -> None:
        for _ in range(self._count):
            try:
                self._one()
            except BaseException as error:  # the main thread tells
                self.wrong.append(error)

    def _one(self) -> None:
        index, kind = self._random.randrange(len(self._answers[0])), self._random.choice(KINDS)
        request, (ids, text, reason) = self._answers[0][index], self._answers[1][index]
        deadline = self._random.uniform(0.001, 0.05) if kind == "deadline" else None
        request = Request(
            prompt=[*request.prompt, 4000] if kind == "failing" else request.prompt,
            params=request.params,
            deadline=deadline,
        )
        generation = self._submit(request)
        if kind == "failing":
            with pytest.raises(EngineError, match=r"0\.\.319"):
                generation.result(60)
            self.outcomes["failed"] += 1
            return
        if kind == "cancel":
            cancelling = threading.Timer(self._random.uniform(0, 0.02), generation.cancel)
            cancelling.start()
        elif kind == "cancel after reading":
            for _, _chunk in zip(range(self._random.randrange(3)), generation, strict=False):
                pass
            generation.cancel()
        response = generation.result(60)
        self.outcomes[response.finish_reason] += 1
        partial = response.finish_reason in ("cancelled", "deadline")
        if partial and kind == "all":
            self.wrong.append(f"ended as {response.finish_reason} without reason")
        found = response.token_ids, response.text, response.finish_reason
        if not partial and found != (ids, text, reason):
            self.wrong.append((found, ids, text, reason))
        if partial and response.token_ids != ids[: len(response.token_ids)]:
            self.wrong.append((response.token_ids, ids))
        if kind == "cancel":
            cancelling.join()

    def _submit(self, request: Request) -> Generation:
        while True:
            try:
                return self._served.submit(request)
            except QueueFullError:
                self.outcomes["refused"] += 1
                time.sleep(0.002)


#: Half of the requests are cancelled, late, or fail.
KINDS = ("all", "all", "all", "all", "cancel", "cancel after reading", "deadline", "failing")


@pytest.mark.parametrize("count", [96, pytest.param(2000, marks=pytest.mark.slow)])
def test_cancellations_deadlines_and_errors_among_many_threads(
    serving_engines: Path, alone: Answers, count: int, drafting: DraftingConfig | None
) -> None:
    threads_before = {*threading.enumerate()}
    with LLM(serving_engines, backend="numpy", drafting=drafting, queue_limit=12) as served:
        served.handle(alone[0][:8])
        callers = [Caller(served, alone, seed, count // THREADS) for seed in range(THREADS)]
        threads = [threading.Thread(target=caller.run) for caller in callers]
        growth = _memory()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        growth = _memory() - growth
        assert [caller.wrong for caller in callers if caller.wrong] == []
        outcomes = sum((caller.outcomes for caller in callers), Counter())
        refused = outcomes.pop("refused", 0)
        assert sum(outcomes.values()) == count
        assert all(outcomes[kind] > 0 for kind in ("length", "cancelled", "deadline", "failed"))
        metrics = served.metrics()
        ended = metrics["requests"]
        assert ended["accepted"] == count + 8 == sum(ended["finished"].values()) + ended["failed"]
        assert (ended["failed"], ended["refused"]) == (outcomes["failed"], refused)
        assert (metrics["requests_waiting"], metrics["requests_running"]) == (0, 0)
        assert served.call(lambda runtime: runtime._runner.base.lengths).result() == [0] * 4
        after = served.handle(alone[0][:8])
        assert [response.token_ids for response in after] == [ids for ids, _, _ in alone[1][:8]]
    assert not {*threading.enumerate()} - threads_before
    assert growth < 0.01 * _memory() or count < 2000  # fewer do not fill what is kept for reuse
    print(f"{count} requests: {dict(outcomes)}, {refused} times refused, memory {growth:+d} KiB of {_memory()}")


@pytest.mark.parametrize("rounds", [500, *(pytest.param(count, marks=pytest.mark.slow) for count in (2000, 100_000))])
def test_memory_stays_flat_over_many_rounds(serving_engines: Path, alone: Answers, rounds: int) -> None:
    with LLM(serving_engines, backend="numpy", drafting=None) as served:
        requests, expected = alone
        seconds, objects, memory = time.perf_counter(), [], []
        done, step = 0, rounds // 10
        while done < rounds:
            found = served.handle(requests)
            assert [response.token_ids for response in found] == [ids for ids, _, _ in expected]
            done = served.metrics()["rounds"]
            if done >= step * (len(memory) + 1):
                del found
                gc.collect()
                objects.append(len(gc.get_objects()))
                memory.append(_memory())
        seconds = time.perf_counter() - seconds
    print(f"{done} rounds in {seconds:.0f} s; memory {memory} KiB; objects {objects}")
    warm = len(memory) // 3
    assert memory[-1] < memory[warm] * 1.01
    assert objects[-1] < objects[warm] * 1.01


def _memory() -> int:
    """Resident memory of this process in KiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024
