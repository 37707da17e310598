"""The GPUs that kernels are compiled for: a compute capability, and how many multiprocessors its boards have.

Which kernels are fastest depends on that number. Those of published boards are in targets.json; `sm_89:46` names
others, such as a part of a GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgellm.engines.backends.executors import SHARED_MEMORY
from edgellm.engines.errors import BuildError
from edgellm.kernels.gpu import GPU, absent_gpu

#: The multiprocessors of published boards, by NVIDIA's tables of products and data sheets: where these give CUDA cores,
#: a multiprocessor has 64 of them on sm_80, and 128 on the others. The table says beside each number which have it.
BOARDS = {
    capability: tuple(map(int, boards))
    for capability, boards in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8")).items()
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
