"""What the GPU, or the part of it that is measured, can read and multiply: what shares of it are shares of.

The kernels are those of `edgellm/device/limits.py`. What can be read is not the same all the time, least of all beside
a neighbour (`neighbour.py`): so `read_around` reads before and behind each figure, and a run in which a figure is above
what was read is thrown away.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import neighbour

from edgellm.device.forecast import Board
from edgellm.device.limits import DeviceLimits, Reader, Ring, fitting_rings, some_context
from edgellm.kernels.gpu import GPU

#: A figure that is so much above what was read before and behind it is none; one that reads fewer bytes than so many
#: times the second-level cache may have some of them from there.
MOST_SHARE, _CACHES = 1.03, 4


def scale_of_part(board: Board, multiprocessors: int, ghz: float) -> float:
    """By how many times a board is slower than a part of so many multiprocessors at a clock, in reading and in
    arithmetic alike, where that has as little bandwidth for each of its clocks as the board."""
    return multiprocessors * ghz / board.multiprocessor_ghz


class Reading(NamedTuple):
    """What was read, in GB/s, and what the neighbour got meanwhile, 0 without one."""

    read_gb_per_s: float
    neighbour_gb_per_s: float


class Readings:
    """What was read before a figure, and behind it."""

    def __init__(self, cache_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self.found: list[Reading] = []

    @property
    def read_gb_per_s(self) -> float:
        """The mean of what was read."""
        return sum(each.read_gb_per_s for each in self.found) / len(self.found)

    def read_share(self, name: str, nbytes: float, milliseconds: float) -> float:
        """What reading so many bytes in this time is of the bandwidth.

        Ends the process where it is more than MOST_SHARE, before anything of this run is kept: then the bandwidth was
        another while the figure was taken, or what is said to be read came from a cache.
        """
        share = nbytes / (milliseconds * 1e6) / self.read_gb_per_s
        if share > MOST_SHARE and nbytes >= _CACHES * self._cache_bytes:
            raise SystemExit(
                f"{name} reads {nbytes / milliseconds / 1e6:.0f} GB/s, {share:.0%} of what was read before and behind "
                f"it ({self} GB/s): this run is thrown away, nothing of it is kept"
            )
        return share

    def recorded(self) -> dict[str, list[float]]:
        """For results."""
        found = {"read_gb_per_s": [round(each.read_gb_per_s, 1) for each in self.found]}
        if any(each.neighbour_gb_per_s for each in self.found):
            found["neighbour_gb_per_s"] = [round(each.neighbour_gb_per_s, 1) for each in self.found]
        return found

    def __str__(self) -> str:
        return ", ".join(
            f"{each.read_gb_per_s:.0f}" + (f" beside {each.neighbour_gb_per_s:.0f}" if each.neighbour_gb_per_s else "")
            for each in self.found
        )


def rings_of(gpu: GPU) -> list[Ring]:
    """The rings among which the fastest counts. Beside a neighbour more bytes under way are more bandwidth, so that
    there are as many as decode kernels have."""
    fitting, of_kernels = fitting_rings(gpu), 2 if gpu.can_overlap else 1
    return [each for each in fitting if each.blocks == of_kernels or not gpu.measured_as.endswith(neighbour.BESIDE)]


def _reading(reader: Reader) -> Reading:
    """What is read through the fastest ring, beside what the neighbour gets meanwhile."""
    beside = neighbour.current()
    before = beside.counted() if beside else None
    found = reader.bandwidth(fastest_ring(), series=5)
    return Reading(found, beside.rate_since(before) if beside and before else 0.0)


@cache
def fastest_ring() -> Ring:
    """Which of the rings reads the most on this GPU, or this part of it."""
    with some_context(), Reader() as reader:
        return max(rings_of(reader.gpu), key=reader.bandwidth)


@cache
def device_limits() -> DeviceLimits:
    """Measured once; beside the neighbour where there is one."""
    with some_context(), Reader() as reader:
        found = _reading(reader).read_gb_per_s, reader.arithmetic()
        return DeviceLimits(*found, reader.gpu.multiprocessors, reader.clock())


@contextmanager
def read_around() -> Iterator[Readings]:
    """Read before and behind what happens inside, where a context is current."""
    fastest_ring()
    with Reader() as reader:
        found = Readings(_cache_bytes(reader))
        found.found.append(_reading(reader))
        yield found
        found.found.append(_reading(reader))


def _cache_bytes(reader: Reader) -> int:
    cuda = reader._cuda
    return int(cuda.Context.get_device().get_attribute(cuda.device_attribute.L2_CACHE_SIZE))
