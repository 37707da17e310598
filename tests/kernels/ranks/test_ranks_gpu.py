"""What ranks give each other, on one GPU that all of them share, and on several where they are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decoy_nccl import ask_for_nccl

from edgellm.engines.backends.rank_memory import BY_NCCL
from edgellm.engines.errors import DeviceLostError
from edgellm.kernels.gpu import visible_gpus
from edgellm.kernels.ranks.launcher import CudaRank
from tools.bench.rank_speed import Ranks, opened_ranks

pytestmark = pytest.mark.gpu

#: Elements: one piece, a block and less or more, all blocks, 256 KB, several rounds, a prompt's.
SIZES = (4, 1020, 1028, 65_536, 65_540, 1_000_000, 3_000_000)


def in_order(values: Sequence[np.ndarray], scale: float = 1.0, residual: np.ndarray | None = None) -> np.ndarray:
    """Sums in float32 in the order of ranks."""
    total = values[0].copy()
    for each in values[1:]:
        total += each
    total *= np.float32(scale)
    return total if residual is None else residual.astype(np.float32) + total


def random_values(count: int, size: int, seed: int) -> list[np.ndarray]:
    """Of several magnitudes, so that the order of a sum shows."""
    random = np.random.default_rng(seed)
    return [
        (random.standard_normal(size) * 10.0 ** random.integers(-3, 4, size)).astype(np.float32) for _ in range(count)
    ]


def run(ranks: Ranks, make: Callable[[int, CudaRank], list[Any]]) -> Callable[[], None]:
    """Makes launches, overlapping as engines' do, and gives what runs them."""

    def launches(rank: int, device: Any, kernels: CudaRank) -> list[Any]:
        made = make(rank, kernels)
        for launch in made[1:]:
            launch.overlap_previous()
        return made

    made = ranks.each(launches)
    return lambda: ranks.streams.run(made)


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("count", [2, 3, 8])
def test_sums_have_the_bits_of_float32_in_the_order_of_ranks(count: int) -> None:
    with opened_ranks((0,) * count) as ranks:
        for number, size in enumerate(SIZES if count < 8 else SIZES[:5]):
            values = random_values(count, size, number)
            given, outputs = ranks.arrays(values), ranks.arrays([np.zeros(size, np.float32)] * count)
            run(ranks, lambda rank, kernels, given=given, outputs=outputs: [kernels.sum(given[rank], outputs[rank])])()
            expected = in_order(values)
            for found in ranks.seen(outputs):
                np.testing.assert_array_equal(found, expected, err_msg=f"{size}")
        ranks.memory.check()


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_residuals_are_added_to_what_is_scaled(dtype: str) -> None:
    values, size = random_values(2, 8192, 3), 8192
    residual = np.random.default_rng(4).standard_normal(size).astype(dtype)
    with opened_ranks((0, 0)) as ranks:
        given, kept = ranks.arrays(values), ranks.arrays([residual, residual])
        outputs = kept if dtype == "float32" else ranks.arrays([np.zeros(size, np.float32)] * 2)  # also in place
        run(ranks, lambda rank, kernels: [kernels.sum(given[rank], outputs[rank], kept[rank], 0.22)])()
        for found in ranks.seen(outputs):
            np.testing.assert_array_equal(found, in_order(values, 0.22, residual))


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("count", [2, 8])
def test_a_captured_graph_is_repeated_with_other_values(count: int) -> None:
    """An odd number of sums, so that places of messages change from run to run."""
    sizes = (4096, 8, 70_000)
    with opened_ranks((0,) * count) as ranks:
        every = [random_values(count, size, size) for size in sizes]
        given = [ranks.arrays(values) for values in every]
        outputs = [ranks.arrays([np.zeros(size, np.float32)] * count) for size in sizes]
        step = run(
            ranks,
            lambda rank, kernels: [
                kernels.sum(one[rank], other[rank]) for one, other in zip(given, outputs, strict=True)
            ],
        )
        step()
        graph = ranks.devices[0].capture(step, "sums")
        assert graph is not step
        for turn in range(200):
            if turn % 20 == 0:
                every = [random_values(count, size, size + turn) for size in sizes]
                for arrays, values in zip(given, every, strict=True):
                    ranks.each(lambda rank, device, _, own=arrays, new=values: device.upload(own[rank], new[rank]))
                ranks.each(lambda rank, device, _: device.synchronize())
            graph()
            if turn % 20 in (0, 19):
                for arrays, values in zip(outputs, every, strict=True):
                    for found in ranks.seen(arrays):
                        np.testing.assert_array_equal(found, in_order(values), err_msg=f"turn {turn}")
        ranks.memory.check()


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize(("rows", "widths"), [(1, (11, 12)), (5, (7, 6, 7)), (64, (24_576, 24_576)), (3, (1, 4))])
def test_columns_come_together_on_the_first(rows: int, widths: tuple[int, ...]) -> None:
    values = [
        np.random.default_rng(rank).standard_normal((rows, width)).astype(np.float32)
        for rank, width in enumerate(widths)
    ]
    with opened_ranks((0,) * len(widths)) as ranks:
        given = ranks.arrays(values)
        (output, *_) = ranks.arrays([np.full((rows, sum(widths)), -1, np.float32) for _ in widths])
        run(ranks, lambda rank, kernels: [kernels.columns(given[rank], widths, output)])()
        ranks.devices[0].synchronize()
        np.testing.assert_array_equal(ranks.devices[0].download(output), np.concatenate(values, axis=1))


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("size", [64, 65_540])
def test_a_rank_that_does_not_come_is_named_and_nothing_hangs(size: int) -> None:
    with opened_ranks((0, 0, 0), wait_seconds=0.3) as ranks:
        values = ranks.arrays([np.ones(size, np.float32)] * 3)
        step = run(ranks, lambda rank, kernels: [kernels.sum(values[rank], values[rank])] if rank != 1 else [])
        before = time.monotonic()
        step()
        ranks.devices[0].synchronize()
        assert 0.2 < time.monotonic() - before < 5
        with pytest.raises(DeviceLostError, match=r"rank 1 of 3 \(GPU 0\) has failed: rank 0 waited 0.3 s for what it"):
            ranks.memory.check()
        with pytest.raises(DeviceLostError, match=r"rank 1 of 3 .* Open the model anew"):  # and no one waits again
            step()


def test_gpus_of_their_own() -> None:
    indices = [gpu.index for gpu in visible_gpus()][:8]
    if len(indices) < 2:
        pytest.skip("there is one GPU")
    with opened_ranks(indices) as ranks:
        for size in SIZES:
            values = random_values(len(indices), size, size)
            given, outputs = ranks.arrays(values), ranks.arrays([np.zeros(size, np.float32)] * len(indices))
            step = run(ranks, lambda rank, kernels, one=given, other=outputs: [kernels.sum(one[rank], other[rank])] * 3)
            step()
            graph = ranks.devices[0].capture(step, "sums")
            for _ in range(50):
                graph()
            for found in ranks.seen(outputs):
                np.testing.assert_array_equal(found, in_order(values))
        ranks.memory.check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [(1, 2048), (16, 4096), (512, 4096), (1500, 4096)], ids=str)
def test_sums_by_nccl_have_the_bits_of_our_own(rows: tuple[int, int], dtype: str, monkeypatch: Any) -> None:
    """With a residual of a model's dtype, in graphs that are repeated, too; the last in several pieces."""
    ask_for_nccl(monkeypatch)
    size, found = rows[0] * rows[1], []
    values = [random_values(2, size, turn) for turn in range(2)]
    numbers = np.random.default_rng(9).standard_normal(size, np.float32)
    residual = numbers.astype(np.float16) if dtype == "float16" else (numbers.view(np.uint32) >> 16).astype(np.uint16)
    for way in ("", "1"):
        monkeypatch.setenv(BY_NCCL, way)
        with opened_ranks((0, 1), dtype) as ranks:
            assert (ranks.memory.nccl is not None) is (way == "1")
            given, outputs = ranks.arrays(values[0]), ranks.arrays([np.zeros(size, np.float32)] * 2)
            kept = [replace(each, dtype=dtype) for each in ranks.arrays([residual] * 2)]

            def sums(rank: int, kernels: CudaRank, given=given, kept=kept, outputs=outputs) -> list[Any]:
                first = kernels.sum(given[rank], outputs[rank], kept[rank], 0.22)
                return [first, kernels.sum(outputs[rank], outputs[rank])]

            step = run(ranks, sums)
            step()
            seen = [ranks.seen(outputs)]
            graph = ranks.devices[0].capture(step, "sums")
            assert graph is not step
            for new in values:
                ranks.each(lambda rank, device, _, given=given, new=new: device.upload(given[rank], new[rank]))
                ranks.each(lambda rank, device, _: device.synchronize())
                for _ in range(100):
                    graph()
                seen.append(ranks.seen(outputs))
            ranks.memory.check()
            found.append(np.array(seen).view(np.uint32))
            del graph
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[1][:, 0], found[1][:, 1])  # on both GPUs


@pytest.mark.parametrize("captured", [False, True])
def test_a_rank_that_does_not_come_to_a_gather_is_named_and_nothing_hangs(captured: bool, monkeypatch: Any) -> None:
    ask_for_nccl(monkeypatch)
    with opened_ranks((0, 1), wait_seconds=1.0) as ranks:
        values = ranks.arrays([np.ones(65_540, np.float32)] * 2)
        step = run(ranks, lambda rank, kernels: [kernels.sum(values[rank], values[rank])] * 3 if rank == 0 else [])
        graph, before = ranks.devices[0].capture(step, "sums") if captured else step, time.monotonic()
        assert (graph is not step) is captured
        graph()
        ranks.devices[0].synchronize()
        assert 0.9 < time.monotonic() - before < 10
        with pytest.raises(DeviceLostError, match=r"rank 1 of 2 \(GPU 1\) has failed: rank 0 waited 1 s for what it"):
            ranks.memory.check()
        with pytest.raises(DeviceLostError, match=r"rank 1 of 2 .* Open the model anew"):
            step()
        del graph
