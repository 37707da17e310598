"""The boards that the project is for: what they have, at their highest power mode, and who says so.

One table: what a forecast counts with, what `edgellm doctor --full` expects, and what tools set a neighbour by.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.kernels.gpu import GPU


@dataclass(frozen=True)
class Board:
    """A board: its multiprocessors and their clock in GHz, the bandwidth of its memory in GB/s, its memory in GB, and
    what kernels are compiled for; `source` says where that was published, all of it by NVIDIA."""

    title: str
    multiprocessors: int
    ghz: float
    gb_per_s: float
    memory_gb: int
    architecture: str
    source: str

    @property
    def multiprocessor_ghz(self) -> float:
        """Clocks of all multiprocessors together, 1e9 a second."""
        return self.multiprocessors * self.ghz


#: A multiprocessor has 128 cores: NVIDIA's pages count those.
BOARDS = {
    "orin": Board(
        "Jetson AGX Orin 64GB",
        16,
        1.3,
        204.8,
        64,
        "compute_87",
        "technical specifications of the Jetson AGX Orin series: 2,048 cores, 1.3 GHz, 204.8 GB/s",
    ),
    "orin-nx": Board(
        "Jetson Orin NX 16GB",
        8,
        1.173,
        102.4,
        16,
        "compute_87",
        "data sheet of the Jetson Orin NX series (DS-10712-001): 1,024 cores, 918 MHz, 102.4 GB/s; "
        "1,173 MHz in the mode MAXN_SUPER, which came with JetPack 6.2",
    ),
    "orin-nano": Board(
        "Jetson Orin Nano Super 8GB",
        8,
        1.02,
        102.0,
        8,
        "compute_87",
        "page of the Jetson Orin Nano Super Developer Kit: 1,024 cores, 1,020 MHz, 102 GB/s",
    ),
    "thor": Board(
        "Jetson Thor T5000",
        20,
        1.575,
        273.0,
        128,
        "sm_110",
        "technical specifications of the Jetson Thor series: 2,560 cores, 1.575 GHz, 273 GB/s",
    ),
}


def board_of(gpu: GPU) -> Board | None:
    """The board that a GPU is of, by compute capability, multiprocessors and memory, of which the system keeps some."""
    for board in BOARDS.values():
        number = board.architecture.rpartition("_")[2]
        is_kind = gpu.compute_capability == f"sm_{number}" and gpu.multiprocessors == board.multiprocessors
        if is_kind and 0.7 < gpu.total_memory / 1e9 / board.memory_gb < 1.1:
            return board
    return None
