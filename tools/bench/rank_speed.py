"""How long GPUs that share a model take: to add what they have, within a captured graph, and for whole models.

python -m tools.bench.rank_speed                 two ranks on the first GPU, of which one waits for the other
python -m tools.bench.rank_speed --gpus 0 1      on two GPUs
python -m tools.bench.rank_speed --gpus 0 1 --nccl      by NCCL beside, and what it takes of each one's memory
python -m tools.bench.rank_speed --gpus 0 1 --models llama-8b:float16 llama-8b:int4

`--models` are shapes and weights of `random_model.py`: prompts, steps, memory, and whether tokens are the same again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.rank_memory import BY_NCCL, WAIT_SECONDS, RankMemory, RankStreams
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.memory_plan import MEBIBYTE
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.kernels.launch import KernelModule
from edgellm.kernels.ranks.launcher import CudaRank

#: Rows and columns of what is added: a token's of Llama-1B and 8B, a tree's, chunks of prompts.
SHAPES = ((1, 2048), (1, 4096), (16, 4096), (512, 4096), (4096, 4096))
#: Sums in a graph.
_COUNT = 50
#: Tokens of a short prompt and of a long one; steps.
_SHORT, _LONG, _STEPS = 128, 4000, 64


class Ranks(NamedTuple):
    """Ranks on devices, their kernels, and what runs them."""

    devices: Sequence[CudaDevice]
    memory: RankMemory
    kernels: Sequence[CudaRank]
    streams: RankStreams

    def each(self, make: Callable[[int, CudaDevice, CudaRank], Any]) -> list[Any]:
        """What is made of each rank, in its device's context."""
        found = []
        for rank, (device, kernels) in enumerate(zip(self.devices, self.kernels, strict=True)):
            with device.current():
                found.append(make(rank, device, kernels))
        return found

    def arrays(self, values: Sequence[np.ndarray]) -> list[Any]:
        """Each rank's values in its memory."""

        def copied(rank: int, device: CudaDevice, kernels: CudaRank) -> Any:
            array = device.empty(values[rank].shape, values[rank].dtype.name)
            device.upload(array, values[rank])
            device.synchronize()
            return array

        return self.each(copied)

    def seen(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """What is in each rank's array, once all work is done."""
        self.devices[0].synchronize()
        return self.each(lambda rank, device, kernels: device.download(arrays[rank]))


@contextmanager
def opened_ranks(gpus: Sequence[int], dtype: str = "float16", wait_seconds: float = WAIT_SECONDS) -> Iterator[Ranks]:
    """Ranks on the GPUs of these indices, of which several may be the same."""
    with ExitStack() as opened:
        devices = []
        for index in reversed(gpus):  # the first rank's context is current
            devices.insert(0, CudaDevice(index))
            opened.callback(devices[0].close)
        memory, kernels = RankMemory(devices, wait_seconds), []
        opened.callback(memory.close)
        for rank, device in enumerate(devices):
            with device.current():
                module = KernelModule(device.gpu, device.stream)
                opened.callback(_close, device, module)
                kernels.append(memory.kernels(rank, module, dtype))
        yield Ranks(devices, memory, kernels, RankStreams(devices, memory, kernels[0].joined()))


def _close(device: CudaDevice, module: KernelModule) -> None:
    with device.current():
        module.close()


def microseconds(ranks: Ranks, shape: tuple[int, int]) -> float:
    """The least microseconds of a sum over ten runs of a graph that holds many."""
    import pycuda.driver as cuda

    values = ranks.arrays([np.ones(shape, np.float32)] * len(ranks.devices))
    outputs = ranks.arrays([np.zeros(shape, np.float32)] * len(ranks.devices))

    def launches(rank: int, device: CudaDevice, kernels: CudaRank) -> list[Any]:
        made = [kernels.sum(values[rank], outputs[rank]) for _ in range(_COUNT)]
        for launch in made[1:]:
            launch.overlap_previous()
        return made

    made, first = ranks.each(launches), ranks.devices[0]
    ranks.streams.run(made)
    graph = first.capture(lambda: ranks.streams.run(made), "sums")
    start, end, times = cuda.Event(), cuda.Event(), []
    for _ in range(10):
        start.record(first.stream)
        graph()
        end.record(first.stream)
        end.synchronize()
        times.append(start.time_till(end) * 1000 / _COUNT)
    ranks.memory.check()
    return min(times)


def model_figures(shape: str, weights: str, gpus: Sequence[int]) -> list[float]:
    """Print what a model takes on one GPU or several; milliseconds of a prompt and of steps, and MiB of the first."""
    sys.path.insert(0, str(Path(__file__).parent))
    from random_model import RandomRanks, RandomTensorRTBackend, loop_milliseconds, random_prompt, shape_directory

    with TemporaryDirectory() as folder, ExitStack() as opened:
        directory = shape_directory(Path(folder), shape, EngineLimits(1, 2048, 4608), weights)
        backend: Any = RandomRanks(directory, gpus) if len(gpus) > 1 else RandomTensorRTBackend(directory)
        runner = BaseEngineRunner(backend, directory.config, directory.limits, directory.checkpoint())
        opened.callback(runner.close)

        def prompt(tokens: int) -> float:
            begin = time.perf_counter()
            runner.start(0, random_prompt(tokens), 0, SamplingValues()).wait()
            return (time.perf_counter() - begin) * 1000

        def answer() -> list[int]:
            prompt(_LONG)
            return [int(runner.decode(1).wait()[0]) for _ in range(_STEPS)]

        again = "the same" if answer() == answer() else "OTHERS"
        found = [min(prompt(_LONG) for _ in range(4))]
        found += [min(loop_milliseconds(runner, tokens, _STEPS) for _ in range(3)) for tokens in (_LONG, _SHORT)]
        each = backend.each if len(gpus) > 1 else lambda run: [run(0, backend)]
        used = [(total - free) / MEBIBYTE for free, total in each(lambda rank, own: own.free_memory())]
        print(
            f"{shape} {weights} on {list(gpus)}: {_LONG} tokens {found[0]:.1f} ms; a step behind these {found[1]:.3f}, "
            f"behind {_SHORT} {found[2]:.3f}; {[round(size) for size in used]} MiB in use; tokens again {again}",
            flush=True,
        )
        return [*found, used[0]]


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[0, 0])
    parser.add_argument("--nccl", action="store_true", help="sums by NCCL, too; models by it alone")
    parser.add_argument("--models", nargs="+", metavar="SHAPE:WEIGHTS", help="such as llama-8b:int4, in place of sums")
    given = parser.parse_args()
    os.environ[BY_NCCL] = "1" if given.nccl and given.models else ""
    for name in given.models or ():
        shape, _, weights = name.partition(":")
        one, all_of_them = (model_figures(shape, weights, gpus) for gpus in (given.gpus[:1], given.gpus))
        print("  of one GPU's", *(f"{new / old:.3f}" for new, old in zip(all_of_them, one, strict=True)), flush=True)
    if given.models:
        return
    for way in ("", "1") if given.nccl else ("",):
        os.environ[BY_NCCL] = way
        with opened_ranks(given.gpus) as ranks:
            nccl = ranks.memory.nccl
            by = "their memory" if nccl is None else f"{nccl}, MiB: {[size >> 20 for size in nccl.nbytes]}"
            print(f"{len(given.gpus)} ranks on GPUs {given.gpus} by {by}")
            for shape in SHAPES:
                print(f"[{shape[0]}, {shape[1]}]: {microseconds(ranks, shape):.2f} us a sum", flush=True)


if __name__ == "__main__":
    main()
