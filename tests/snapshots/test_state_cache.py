"""At which places of texts recurrent states are kept, how many, and which slot a prompt takes for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tiny_families import RECURRENT

from edgellm import RequestError, SpecDecodeRuntime
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.errors import DeviceMemoryError
from edgellm.engines.model.limits import EngineLimits
from edgellm.snapshots.contents import KVContents, SlotChoice, choose_slot
from edgellm.snapshots.kept_on_host import StateKeeper, chosen_places

NEAR = (24, 4, 6)
TEXT = list(range(100))


def test_chosen_places() -> None:
    assert chosen_places(30, 0, (), 9) == []  # shorter than what a copy is worth
    assert chosen_places(300, 0, (), 9) == [284]
    assert chosen_places(300, 240, (), 9) == []
    assert chosen_places(300, 0, (100, 60, 290, 300), 9) == [100, 284]  # what is more certain comes first
    assert chosen_places(300, 0, (60, 100), 9) == [100, 284] and chosen_places(300, 0, (70, 100), 9) == [70, 284]
    assert chosen_places(300, 0, (250,), 9) == [250]
    assert chosen_places(5000, 0, (), 9) == [1024, 2048, 3072, 4096, 4984]
    assert chosen_places(5000, 1500, (1530,), 9) == [2048, 3072, 4096, 4984]
    assert chosen_places(5000, 0, (), 2) == [2048, 4096, 4984]  # farther apart where there is little room
    assert chosen_places(5000, 0, (), 0) == [4984]
    assert chosen_places(100, 10, (15, 50, 53), 9, NEAR) == [24, 50, 72, 96]
    for places in (chosen_places(4000, 100, range(0, 4000, 37), 9), chosen_places(99, 3, (20, 40), 9, NEAR)):
        least = 6 if places[-1] < 100 else 64
        assert places == sorted(places) and all(b - a >= least for a, b in pairwise(places))


@pytest.fixture(scope="module")
def runtime(
    make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SpecDecodeRuntime]:
    folder = tmp_path_factory.mktemp("recurrent")
    checkpoint = make_checkpoint(folder / "checkpoint", **RECURRENT["qwen3_5"])
    build_engine_directory(checkpoint, folder / "engines", EngineLimits(3, 16, 128), [])
    with SpecDecodeRuntime(folder / "engines", backend="numpy") as opened:
        yield opened


@pytest.fixture
def keeper(runtime: SpecDecodeRuntime) -> Iterator[StateKeeper]:
    made = StateKeeper(runtime._open_runner())
    made.most = 4
    yield made
    made.close()


def fill(runtime: SpecDecodeRuntime, slot: int, value: float) -> None:
    for each in runtime._open_runner().base.states.recurrent_of_slot(slot):
        each.memory[...] = value


def values(runtime: SpecDecodeRuntime, slot: int) -> set[float]:
    held = runtime._open_runner().base.states.recurrent_of_slot(slot)
    return {float(value) for each in held for value in np.unique(each.memory)}


def test_the_latest_place_of_the_same_text_and_adapter(runtime: SpecDecodeRuntime, keeper: StateKeeper) -> None:
    for value, place in ((1.0, 10), (2.0, 30), (3.0, 50)):
        fill(runtime, 0, value)
        keeper.keep(0, TEXT, place, None)
    other = [*TEXT[:40], 7, *TEXT[41:]]
    assert [keeper.latest(TEXT, None, limit) for limit in (99, 50, 49, 29, 9)] == [50, 50, 30, 10, 0]
    assert keeper.latest(other, None, 99) == 30 and keeper.latest(TEXT, "json", 99) == 0
    assert keeper.latest(TEXT[:30], None, 99) == 30 and keeper.latest(TEXT[:29], None, 99) == 10
    fill(runtime, 1, 9.0)
    keeper.put_back(1, other, 30, None)
    assert values(runtime, 1) == {2.0} and values(runtime, 0) == {3.0}
    image = [("a" * 64, 0), ("a" * 64, 1)]
    keeper.keep(0, [*TEXT[:5], *image, 9], 8, None)
    assert keeper.latest([*TEXT[:5], *image, 9, 9], None, 99) == 8
    for wrong in ([("b" * 64, 0), image[1]], image[::-1], [5, 6]):
        assert keeper.latest([*TEXT[:5], *wrong, 9, 9], None, 99) == 0


def test_what_was_used_least_recently_goes_first(runtime: SpecDecodeRuntime, keeper: StateKeeper) -> None:
    texts = [[number, *TEXT] for number in range(6)]
    for number in range(4):
        fill(runtime, 0, float(number))
        keeper.keep(0, texts[number], 20, None)
    assert keeper.nbytes == 4 * keeper.size
    keeper.put_back(1, texts[0], 20, None)
    keeper.keep(0, texts[1], 20, None)  # is there already
    fill(runtime, 0, 4.0)
    keeper.keep(0, texts[4], 20, None)
    assert [keeper.latest(text, None, 99) for text in texts] == [20, 20, 0, 20, 20, 0]
    for number in (0, 1, 3, 4):
        keeper.put_back(1, texts[number], 20, None)
        assert values(runtime, 1) == {float(number)}


def test_the_beginning_that_texts_share_stays(runtime: SpecDecodeRuntime, keeper: StateKeeper) -> None:
    fill(runtime, 0, 1.0)
    keeper.keep(0, TEXT, 10, None)
    for number in range(8):
        text = [*TEXT[:40], number, *TEXT]
        keeper.keep(0, text, 60, None)
        keeper.put_back(0, text, 60, None)
    assert keeper.latest(TEXT, None, 99) == 10


def test_without_memory_less_is_kept(
    runtime: SpecDecodeRuntime, keeper: StateKeeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper.keep(0, TEXT, 10, None)

    def none_left(*_: object) -> None:
        raise DeviceMemoryError("no more")

    monkeypatch.setattr(NumpyBackend, "host_memory", none_left)
    keeper.keep(0, TEXT, 20, None)
    assert "states of texts are kept at fewer places: no more" in caplog.text
    assert keeper.latest(TEXT, None, 99) == 20 and keeper.nbytes == keeper.size
    keeper.most = 0
    keeper.close()
    keeper.keep(0, TEXT, 10, None)
    assert keeper.latest(TEXT, None, 99) == 0 and keeper.chosen(TEXT, 0, [50], None) == []


class Places:
    """States at these places of any text."""

    def __init__(self, *places: int) -> None:
        self._places = places

    def latest(self, tokens: object, adapter: object, limit: int) -> int:
        return max((place for place in self._places if place <= limit), default=0)


def contents(kept: Places, *held: tuple[list[int], int]) -> list[KVContents]:
    found = [KVContents(kept) for _ in held]
    for each, (tokens, place) in zip(found, held, strict=True):
        each.replace(tokens, None, place)
    return found


def test_what_of_a_slot_is_of_use() -> None:
    (held,) = contents(Places(10, 30), (TEXT[:50], 50))
    assert held.reusable(TEXT) == 50 and held.reusable(TEXT[:50]) == 30  # the last token is computed again
    assert held.reusable([*TEXT[:40], 1]) == 30 and held.reusable([*TEXT[:20], 1]) == 10
    assert held.reusable([*TEXT[:9], 1]) == 0 and held.reusable(TEXT, "json") == 0
    held.bind("json")
    assert held.reusable(TEXT) == 0 and held.place == 0
    (drafted,) = contents(Places(10), (TEXT[:51], 50))
    drafted.replace(TEXT[:51], 50, 50)
    assert drafted.reusable(TEXT) == 50
    drafted.replace(TEXT[:51], 47, 50)  # the draft has not come so far
    assert drafted.reusable(TEXT) == 10
    drafted.replace(TEXT[:50], 50, 50)  # nor is the token behind it known
    assert drafted.reusable(TEXT) == 10


def test_which_slot_is_taken() -> None:
    """Another conversation that begins alike is worth what is kept of the beginning, and copied for it."""
    long = [*TEXT[:20], *range(200, 260)]
    held = contents(Places(20), ([7, 7], 2), (long, 80))
    assert choose_slot(held, range(2), [*TEXT[:20], 99, 98], None) == SlotChoice(0, copied=1)
    assert choose_slot(held, range(2), [*long, 1], None) == SlotChoice(1)
    held = contents(Places(), ([7, 7], 2), (long, 80))
    assert choose_slot(held, range(2), [*TEXT[:20], 99, 98], None) == SlotChoice(0)  # of no use without a state
    assert choose_slot(held, range(2), [*long, 1], None) == SlotChoice(1)
    held[0].copy_from(held[1])
    assert held[0].reusable([*long, 1]) == held[0].place == 80


@pytest.mark.parametrize("budget", [-1, 1.5, True, "1", None])
def test_wrong_budgets(runtime: SpecDecodeRuntime, budget: object) -> None:
    with pytest.raises(RequestError, match=r"state_budget is .*: expected a whole number of bytes, 0 or more"):
        SpecDecodeRuntime(runtime.directory.path, backend="numpy", state_budget=budget)  # type: ignore[arg-type]


def test_what_the_commands_and_the_plan_say(runtime: SpecDecodeRuntime, edgellm: Callable[..., tuple]) -> None:
    states = runtime._states
    assert states is not None
    base = runtime._open_runner().base
    held = sum(each.memory.nbytes for slot in range(3) for each in base.states.recurrent_of_slot(slot))
    plan = runtime.planned_memory
    assert 0 < plan["recurrent states"] - held < held and plan["inputs of recurrent layers"] > 0
    tensors = base.states.tensors.items()
    assert plan["KV caches"] == sum(tensor.nbytes for name, tensor in tensors if "cache" in name)
    assert "host: states at places of texts, at most" in base.memory_plan.describe()
    code, out, _ = edgellm("info", runtime.directory.path, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["host_memory"]["states at places of texts"] == 256 << 20
    assert facts["host_memory"]["state"] * 3 == held and facts["memory"]["recurrent states"] == plan["recurrent states"]
    _, out, _ = edgellm("info", runtime.directory.path)
    size = facts["host_memory"]["state"]
    places = f"{(256 << 20) // size:,} of {size / 2**20:,.2f} MiB"
    assert f"of the host up to 256.0 MiB: states at places of texts, {places}" in out


def test_a_model_with_attention_alone_keeps_none(tiny_engines: Path, edgellm: Callable[..., tuple]) -> None:
    with SpecDecodeRuntime(tiny_engines, backend="numpy") as opened:
        assert opened._states is None and "recurrent states" not in opened.planned_memory
        assert list(opened._open_runner().base.memory_plan.host) == ["rows of answers that give way"]
    _, out, _ = edgellm("info", tiny_engines)
    assert "recurrent" not in out and "states at places" not in out
