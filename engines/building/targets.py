"""The GPUs that kernels are compiled for: a compute capability, and how many multiprocessors its boards have.

Which kernels are fastest depends on that number. Those of published boards are listed here; `sm_89:46` names others,
such as a part of a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from edgellm.engines.backends.executors import SHARED_MEMORY
from edgellm.engines.errors import BuildError
from edgellm.kernels.gpu import GPU, absent_gpu

#: The multiprocessors of published boards, by NVIDIA's tables of products and data sheets: where these give CUDA cores,
#: a multiprocessor has 64 of them on sm_80, and 128 on the others.
BOARDS = {
    # A30, A100.
    "sm_80": (56, 108),
    # A2 and A16 10, RTX 3050 laptop 16, 3050 of 6 GB 18, 3050 20, A2000 26, 3060 28, 3060 laptop 30, 3060 Ti 38, 3070
    # laptop 40, 3070 46, 3070 Ti and A4000 48, A4500 56, 3080 Ti laptop 58, A5000 64, 3080 68, 3080 of 12 GB 70, A10
    # 72, 3080 Ti and A5500 80, 3090 82, 3090 Ti, A40 and A6000 84.
    "sm_86": (10, 16, 18, 20, 26, 28, 30, 38, 40, 46, 48, 56, 58, 64, 68, 70, 72, 80, 82, 84),
    # Jetson Orin Nano 4 GB; Nano 8 GB and NX; AGX Orin 32 GB; AGX Orin 64 GB.
    "sm_87": (4, 8, 14, 16),
    # RTX 4050 laptop 20, 2000 Ada 22, 4060 24, 4060 Ti 34, 4070 laptop 36, 4070 46, 4000 Ada 48, 4070 Super 56, L4 and
    # 4080 laptop 58, 4070 Ti and 4500 Ada 60, 4070 Ti Super 66, 4080 and 4090 laptop 76, 4080 Super 80, 5000 Ada 100,
    # 4090 D 114, 4090 128, L40, L40S and 6000 Ada 142. L20 92.
    "sm_89": (20, 22, 24, 34, 36, 46, 48, 56, 58, 60, 66, 76, 80, 92, 100, 114, 128, 142),
    # H20, H100 PCIe, H100 SXM and H200.
    "sm_90": (78, 114, 132),
    # Jetson T4000; T5000 (AGX Thor).
    "sm_110": (12, 20),
    # RTX 5050 20, 5060 laptop 26, 5060 30, PRO 2000 34, 5060 Ti and 5070 laptop 36, 5070 Ti laptop 46, 5070 48, 5080
    # laptop 60, 5070 Ti and PRO 4000 70, PRO 4500 and 5090 laptop 82, 5080 84, PRO 5000 110, 5090 170, PRO 6000 188.
    "sm_120": (20, 26, 30, 34, 36, 46, 48, 60, 70, 82, 84, 110, 170, 188),
    # GB10 (DGX Spark).
    "sm_121": (48,),
}
_TARGET = re.compile(r"(sm_\d{2,3})(?::(\d{1,3}))?")


@dataclass(frozen=True)
class Target:
    """A compute capability, and the multiprocessors of the GPUs of it that are built for: none where there are no
    kernels for it, and TensorRT runs everything."""

    capability: str
    multiprocessors: tuple[int, ...]

    @property
    def gpus(self) -> list[GPU]:
        limit = SHARED_MEMORY[self.capability]
        return [absent_gpu(self.capability, count, limit) for count in self.multiprocessors]


def read_targets(named: Iterable[str]) -> list[Target]:
    """Targets as a user names them, each item one or several behind commas: "sm_87" for all its published boards,
    "sm_89:46" for GPUs of so many multiprocessors. Raises BuildError."""
    counts: dict[str, set[int]] = {}
    for name in (part.strip() for item in named for part in item.split(",")):
        match = _TARGET.fullmatch(name)
        if match is None:
            raise BuildError(
                f"--target is {name!r}: expected a compute capability such as sm_86, or with multiprocessors sm_86:46"
            )
        capability, count = match[1], match[2]
        if capability not in SHARED_MEMORY:
            if count is not None:
                raise BuildError(f"--target is {name}: there are kernels for {', '.join(SHARED_MEMORY)}")
            counts.setdefault(capability, set())
            continue
        if count is None and capability not in BOARDS:
            raise BuildError(
                f"--target is {name}: its boards are not listed, so say how many multiprocessors the GPU has, as in "
                f"{name}:148"
            )
        if count is not None and int(count) == 0:
            raise BuildError(f"--target is {name}: expected at least 1 multiprocessor")
        counts.setdefault(capability, set()).update(BOARDS[capability] if count is None else (int(count),))
    return [Target(capability, tuple(sorted(found))) for capability, found in counts.items()]
