"""The neighbour of a part of a GPU: what it is to leave, how that is found, and what its presence says of a figure."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
import neighbour
from device_limits import Reading, Readings, rings_of, scale_of_part
from neighbour import Counted, Neighbour, NeighbourError, begin, blocks_that_leave, current, rate, resting

from edgellm.device.forecast import BOARDS
from edgellm.device.limits import SOURCE
from edgellm.kernels.gpu import GPU, find_gpu

L2 = 50 << 20
H200_PART = GPU("", "sm_90", (13, 0), 0, "compute_87", 16, 163 << 10, False, False)


@pytest.mark.parametrize(
    ("name", "multiprocessors", "expected"),
    [("orin", 16, 311.9), ("orin-nx", 8, 172.8), ("orin-nano", 8, 198.0), ("thor", 24, 411.8)],
)
def test_a_part_is_left_the_ratio_of_its_board(name: str, multiprocessors: int, expected: float) -> None:
    """As an H200's multiprocessors run at 1.98 GHz."""
    board = BOARDS[name]
    left = board.gb_per_s * scale_of_part(board, multiprocessors, 1.98)
    assert left == pytest.approx(expected, abs=0.1)
    assert left / (multiprocessors * 1.98) == pytest.approx(board.gb_per_s / (board.multiprocessors * board.ghz))


def test_the_page_has_the_table_of_boards(repository: Path) -> None:
    page = (repository / "docs" / "pages" / "as_on_a_device.md").read_text(encoding="utf-8")
    for name, board in BOARDS.items():
        (line,) = (each for each in page.splitlines() if each.startswith(f"| `{name}` | {board.title}, "))
        cells = [cell.strip() for cell in line.split("|")]
        multiprocessors = 24 if name == "thor" else board.multiprocessors
        assert f", {board.multiprocessors}" in cells[2]
        assert cells[3].split()[0] == f"{board.ghz:g}" and cells[4] == f"{board.gb_per_s:g}"
        scale = scale_of_part(board, multiprocessors, 1.98)
        assert cells[5].startswith(f"{board.gb_per_s * scale:.0f} GB/s") and cells[6] == f"{scale:.2f} ms"


def shared(own: float, each: float, alone: float = 1100.0) -> Callable[[int], float]:
    """What a part with so many bytes under way reads beside blocks with as many each."""
    return lambda blocks: min(alone, 2500.0 * own / (own + blocks * each))


@pytest.mark.parametrize("target", [211.0, 312.0, 700.0])
def test_the_blocks_are_found_that_leave_it(target: float) -> None:
    blocks, left = blocks_that_leave(target, 464, shared(1.0, 0.128))
    assert left[blocks] == pytest.approx(target, rel=0.05)
    assert left == {tried: shared(1.0, 0.128)(tried) for tried in left} and len(left) < 13


def test_a_neighbour_that_cannot_leave_it_is_refused() -> None:
    with pytest.raises(NeighbourError, match=r"reads 1100 GB/s alone, 833 beside the most readers .*: expected 312"):
        blocks_that_leave(312.0, 16, shared(1.0, 0.125))
    with pytest.raises(NeighbourError, match=r"200 GB/s alone.*expected 312.*--alone"):
        blocks_that_leave(312.0, 464, shared(1.0, 0.125, alone=200.0))


def test_what_a_neighbour_gets_is_counted_by_its_own_clock() -> None:
    before, now = Counted(1000, 500), Counted(1000 + 4 * 3_000_000, 500 + 4 * 1_500_000)
    assert rate(before, now, 4) == pytest.approx(4 * 2.0)  # four warps, 2 bytes in a nanosecond each
    assert rate(now, now, 4) == 0.0


class FakeDriver:
    """Calls of the driver that succeed: those that it saw, by name; blocks read 2 bytes a nanosecond and warp."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.read = [0, 0]
        self.failing = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return SimpleNamespace(**dict.fromkeys(FLAGS, 1))

        def call(*given: Any) -> tuple[Any, ...]:
            self.seen.append(name)
            if name == self.failing:
                return (700,)
            if name == "cuMemcpyDtoH":
                (ctypes.c_ulonglong * 2).from_address(given[0])[:] = self.read
            if name == "cuEventSynchronize":
                time.sleep(0.0005)
            return 0, {"cuOccupancyMaxActiveBlocksPerMultiprocessor": 4}.get(name, 1)

        return call


FLAGS = (
    "CU_STREAM_CAPTURE_MODE_RELAXED",
    "CU_GREEN_CTX_DEFAULT_STREAM",
    "CU_STREAM_NON_BLOCKING",
    "CU_EVENT_BLOCKING_SYNC",
    "CU_EVENT_DISABLE_TIMING",
)
REST = SimpleNamespace(sm=SimpleNamespace(smCount=116))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver without a GPU, and launches that it counts."""
    bindings = pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    fake = FakeDriver()

    class Module:
        def __init__(self, gpu: GPU, stream: Any) -> None:
            assert stream.handle == 1

        def function(self, kernel: Any, shared: int) -> int:
            return 1

        def close(self) -> None:
            fake.seen.append("close")

    def launch(module: Any, kernel: Any, grid: tuple[int, int, int], threads: int, *given: Any) -> Callable[[], None]:
        def launched() -> None:
            fake.seen.append(f"launch {grid[0]}")
            warps = grid[0] * threads // 32
            fake.read[0] += warps * 3_000_000
            fake.read[1] += warps * 1_500_000

        return launched

    monkeypatch.setattr(bindings, "driver", fake, raising=False)
    monkeypatch.setattr(neighbour, "KernelModule", Module)
    monkeypatch.setattr(neighbour, "Launch", launch)
    monkeypatch.setattr(neighbour, "_current", None)
    yield fake
    if neighbour._current is not None:
        neighbour._current.end()


def ended() -> bool:
    """Whether no neighbour's thread runs."""
    return not any(each.name == "neighbour" for each in threading.enumerate())


def test_a_neighbour_reads_as_it_is_told_until_it_ends(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    left, told, read_with = shared(1.0, 0.128), list[int](), Neighbour.read_with

    def noted(made: Neighbour, blocks: int) -> None:
        told.append(blocks)
        read_with(made, blocks)

    monkeypatch.setattr(Neighbour, "read_with", noted)
    made = begin(REST, H200_PART, lambda: 312.0, lambda: left(told[-1]))
    assert current() is made and made.most_blocks == 4 * 116
    assert left(made.blocks) == pytest.approx(312.0, rel=0.05)
    before = made.counted()
    time.sleep(0.05)
    assert made.rate_since(before) == pytest.approx(made.blocks * 2.0)
    blocks = made.blocks
    with resting():
        assert made.blocks == 0
        before = made.counted()
        time.sleep(0.05)
        assert made.counted() == before and made.rate_since(before) == 0.0
    assert made.blocks == blocks
    made.end()
    assert ended() and driver.seen[-1] == "cuStreamDestroy" and "close" in driver.seen
    assert "cuMemFree" in driver.seen


def test_a_neighbour_that_fails_says_so_where_it_is_asked(driver: FakeDriver) -> None:
    made = Neighbour(REST, H200_PART)
    made.read_with(10)
    driver.failing = "cuEventRecord"
    with pytest.raises(NeighbourError, match="has ended: CUDA reported 700"):
        made.read_with(20)
    with pytest.raises(NeighbourError, match="has ended"):
        made.counted()
    made.end()
    assert ended()


@pytest.mark.skipif(find_gpu() is not None, reason="a GPU is present")
def test_a_neighbour_that_cannot_begin_says_so_and_ends() -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    with pytest.raises(NeighbourError, match="has ended"):
        Neighbour(None, H200_PART)
    with pytest.raises(NeighbourError, match="has ended"):
        begin(None, H200_PART, lambda: 300.0, lambda: 300.0)
    assert current() is None and ended()


def test_a_figure_is_a_share_of_what_was_read_before_and_behind_it() -> None:
    around = Readings(L2)
    around.found += [Reading(300.0, 2000.0), Reading(310.0, 2010.0)]
    assert around.read_share("a step", 3.05e9, 10.0) == pytest.approx(1.0)
    assert around.recorded() == {"read_gb_per_s": [300.0, 310.0], "neighbour_gb_per_s": [2000.0, 2010.0]}
    assert around.read_share("within what is allowed", 3.05e9, 9.75) == pytest.approx(1.0256, abs=1e-4)
    alone = Readings(L2)
    alone.found += [Reading(1000.0, 0.0)] * 2
    assert alone.recorded() == {"read_gb_per_s": [1000.0, 1000.0]}


def test_a_run_that_reads_more_than_there_is_is_thrown_away() -> None:
    around = Readings(L2)
    around.found += [Reading(300.0, 2000.0), Reading(302.0, 1990.0)]
    message = (
        r"the loop reads 355 GB/s, 118% of what was read .* \(300 beside 2000, 302 beside 1990 GB/s\): .* thrown away"
    )
    with pytest.raises(SystemExit, match=message):
        around.read_share("the loop", 3.55e9, 10.0)
    assert around.read_share("what a cache holds", 100e6, 0.2) > 1.5


@pytest.mark.parametrize(
    ("name", "overlaps", "limit", "blocks"),
    [
        ("orin+beside", False, 163 << 10, {1}),
        ("thor+beside", True, 227 << 10, {2}),
        ("orin", False, 163 << 10, {1, 2}),
        ("rtx", False, 99 << 10, {1}),
        ("", True, 227 << 10, {1, 2}),
    ],
)
def test_beside_a_neighbour_as_many_bytes_are_under_way_as_kernels_have(
    name: str, overlaps: bool, limit: int, blocks: set[int]
) -> None:
    gpu = GPU("", "sm_90", (13, 0), 0, "sm_90", 16, limit, overlaps, overlaps, name)
    rings = rings_of(gpu)
    assert {each.blocks for each in rings} == blocks
    assert {each.tiles * each.depth * 256 * 16 for each in rings} == {64 << 10}
    assert {each.kernel for each in rings} == set(SOURCE.expressions)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("name", BOARDS)
def test_a_part_of_the_gpu_has_its_board_s_ratio(repository: Path, tmp_path: Path, name: str) -> None:
    """In a process of its own, which ends though an error ends its script."""
    from tools.bench.as_device import MODES

    gpu = find_gpu()
    if gpu is None or (refusal := MODES[name].refusal(gpu)):
        pytest.skip(f"no GPU that can stand for {name}: {refusal if gpu else 'there is none'}")
    script = tmp_path / "fails.py"
    lines = (
        "import json",
        "from provenance import provenance",
        "print(json.dumps(provenance()))",
        "raise KeyError('told')",
    )
    script.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "tools/bench/as_device.py", name, str(script)]
    run = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == 1 and "KeyError: 'told'" in run.stderr, run.stderr
    found = json.loads(run.stdout)
    limits, beside = found["limits"], found["neighbour"]
    ratio = limits["read_gb_per_s"] / (limits["multiprocessors"] * limits["clock_ghz"])
    assert ratio == pytest.approx(BOARDS[name].gb_per_s / BOARDS[name].multiprocessor_ghz, rel=0.1)
    assert beside["left"]["0"] > 1.5 * limits["read_gb_per_s"] and beside["blocks"] > 0
