"""Measuring as on another device: in a part of the GPU that is there, with that device's limits and code.

    python tools/bench/eagle_speed.py --as orin
    python tools/bench/eagle_speed.py --as orin --alone
    python -m pytest --as orin -m gpu
    python tools/bench/as_device.py orin -m edgellm generate hello

A part that stands for a board has a neighbour, which leaves it the board's own ratio of bandwidth to arithmetic
(`neighbour.py`); `--alone` it has none, nor in tests, nor in tools that time nothing.

`parse` gives a script these options; a process of its own that measures too is started with `python()`, while this
one's neighbour is `resting`. What is imitated and what is not stands in docs/pages/as_on_a_device.md. Nothing here is
an option of `edgellm`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import neighbour

from edgellm.device.forecast import BOARDS
from edgellm.kernels.gpu import GPU, find_gpu, stand_in
from edgellm.kernels.user_paths import user_cache_directory


class ModeError(Exception):
    """A mode that does not exist, or that the GPU which is there cannot serve."""


@dataclass(frozen=True)
class Mode:
    """A device that a GPU can stand for.

    Its multiprocessors (0: those of the GPU), the bytes of shared memory that a block may have, and what kernels are
    compiled for: PTX that the driver translates, without clusters and dependent launches, or (empty) the GPU's own
    code, which must have them.
    """

    multiprocessors: int
    shared_limit: int
    ptx: str

    def refusal(self, gpu: GPU) -> str | None:
        """Why a GPU cannot stand for the device, None if it can."""
        if gpu.multiprocessors < self.multiprocessors:
            return f"it has {gpu.multiprocessors} multiprocessors, expected at least {self.multiprocessors}"
        if gpu.shared_limit < self.shared_limit:
            return f"its blocks have {gpu.shared_limit} bytes of shared memory, expected at least {self.shared_limit}"
        if self.ptx and int(gpu.compute_capability[3:]) < int(self.ptx[8:]):
            return f"its driver cannot translate the code of {self.ptx}"
        if not self.ptx and not gpu.has_clusters:
            return "it has no clusters, which came with sm_90"
        return None

    def gpu(self, present: GPU, name: str) -> GPU:
        """What kernels are to know of the GPU that is there."""
        newer = not self.ptx
        part = self.multiprocessors and Partition(self.multiprocessors)
        return replace(
            present,
            name=f"{present.name} as {name.removesuffix(neighbour.BESIDE)}",
            architecture=self.ptx or present.architecture,
            multiprocessors=self.multiprocessors or present.multiprocessors,
            shared_limit=self.shared_limit,
            can_overlap=newer,
            has_clusters=newer,
            measured_as=name.replace("-", "."),  # folders are named after it, in which a dash begins what follows
            enter_partition=part.enter if part else None,
        )


#: Jetsons: AGX Orin, Orin NX and Orin Nano (sm_87), and Thor (sm_110; it has 20 multiprocessors, partitions come in
#: eights); an RTX PC (sm_86, which sm_89 is like; sm_120 has the same shared memory).
MODES = {
    "orin": Mode(16, 163 << 10, "compute_87"),
    "orin-nx": Mode(8, 163 << 10, "compute_87"),
    "orin-nano": Mode(8, 163 << 10, "compute_87"),
    "rtx": Mode(0, 99 << 10, "compute_86"),
    "thor": Mode(24, 227 << 10, ""),
}


class Partition:
    """A green context of so many multiprocessors of a GPU: made at its first use, kept as long as the process
    is. `rest` is then the resource of the others."""

    def __init__(self, multiprocessors: int) -> None:
        self._count = multiprocessors
        self._context: Any = None
        self._kept: tuple[Any, ...] = ()
        self.rest: Any = None

    def enter(self) -> None:
        """Put it in the place of the context that is current in this thread, the device's primary one.

        What is made from now on (streams, memory, modules, TensorRT's contexts) belongs to it.
        """
        from cuda.bindings import driver

        if self._context is None:
            self._context, *self._kept = self._make(driver)
        _checked(driver, driver.cuCtxSetCurrent(self._context))

    def _make(self, driver: Any) -> tuple[Any, ...]:
        device = _checked(driver, driver.cuCtxGetDevice())
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = _checked(driver, driver.cuDeviceGetDevResource(device, kind))
        groups, _, self.rest = _checked(driver, driver.cuDevSmResourceSplitByCount(1, whole, 0, self._count))
        group = groups[0]
        if group.sm.smCount != self._count:
            raise ModeError(f"the GPU's parts have {group.sm.smCount} multiprocessors, expected {self._count}")
        description = _checked(driver, driver.cuDevResourceGenerateDesc([group], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        green = _checked(driver, driver.cuGreenCtxCreate(description, device, flags))
        return _checked(driver, driver.cuCtxFromGreenCtx(green)), green, group


def _checked(driver: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise ModeError(f"CUDA reported {status} while a part of the GPU was made ready: it takes CUDA 12.9 or later")
    return values[0] if len(values) == 1 else values


def enter(name: str | None, beside: bool = False) -> None:
    """Measure as on a device from now on, in this process (None: as it is), before anything is opened; for a part
    `beside` a neighbour, which `begin_neighbour` begins.

    What is compiled, built and measured meanwhile is kept in a cache directory of its own. Raises ModeError.
    """
    if name is None:
        return
    if name not in MODES:
        raise ModeError(f"there is no device {name!r} to measure as: expected one of {', '.join(MODES)}")
    present = find_gpu()
    if present is None:
        raise ModeError(f"{name} is measured on an NVIDIA GPU: there is none (no driver, or it shows no device)")
    if present.measured_as:
        raise ModeError(f"this process measures as {measured_as()} already")
    refusal = MODES[name].refusal(present)
    if refusal is not None:
        raise ModeError(f"{present.name} cannot stand for {name}: {refusal}")
    made = MODES[name].gpu(present, name + (neighbour.BESIDE if beside and name in BOARDS else ""))
    stand_in(made)
    cache = user_cache_directory()
    if cache.name != f"as-{made.measured_as}":  # that of the process which started this one
        os.environ["EDGELLM_CACHE_DIR"] = str(cache / f"as-{made.measured_as}")


def begin_neighbour() -> None:
    """Begin the neighbour of this process's part, where it is measured beside one. Raises ModeError."""
    gpu, name = find_gpu(), measured_as()
    if gpu is None or name is None or not is_beside() or neighbour.current() is not None:
        return
    from device_limits import fastest_ring, scale_of_part

    from edgellm.device.limits import Reader
    from edgellm.engines.backends.cuda_device import CudaDevice

    part = getattr(gpu.enter_partition, "__self__", None)
    assert isinstance(part, Partition)
    device = CudaDevice()
    try:
        ring = fastest_ring()
        with Reader() as reader:

            def target() -> float:
                board = BOARDS[name]
                return board.gb_per_s * scale_of_part(board, gpu.multiprocessors, reader.clock())

            neighbour.begin(part.rest, gpu, target, lambda: reader.bandwidth(ring))
    except neighbour.NeighbourError as error:
        raise ModeError(str(error)) from error
    finally:
        device.close()


def measured_as() -> str | None:
    """The name of the device that this process measures as, None where it measures the GPU as it is."""
    gpu = find_gpu()
    name = gpu.measured_as.removesuffix(neighbour.BESIDE).replace(".", "-") if gpu is not None else ""
    return name or None


def is_beside() -> bool:
    """Whether this process measures a part of the GPU that has a neighbour."""
    gpu = find_gpu()
    return gpu is not None and gpu.measured_as.endswith(neighbour.BESIDE)


def python() -> list[str]:
    """The command of a Python that measures as this process does; while it runs, this one's neighbour is `resting`."""
    name, alone = measured_as(), [] if is_beside() else ["--alone"]
    return [sys.executable] if name is None else [sys.executable, str(Path(__file__).resolve()), *alone, name]


def one_of(*names: str) -> Callable[[str], str]:
    """The `type` of an argument that is given any number of times, where `choices` refuse a list as default."""

    def checked(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(names)}")
        return name

    return checked


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, times: bool = True
) -> argparse.Namespace:
    """The command line of a benchmark, which has the option `--as` too: it is in effect when this returns, and the
    neighbour reads. What `times` nothing has no neighbour, nor the option `--alone`."""
    what = "measure as on this device: in a part of the GPU, with that device's limits and code"
    beside = ", beside a neighbour that leaves it a board's bandwidth" if times else ""
    parser.add_argument("--as", dest="measured_as", choices=list(MODES), help=what + beside)
    if times:
        parser.add_argument("--alone", action="store_true", help=_ALONE)
    found = parser.parse_args(arguments)
    try:
        enter(found.measured_as, times and not found.alone)
        begin_neighbour()
    except ModeError as error:
        parser.error(f"--as {found.measured_as}: {error}")
    return found


_ALONE = "with --as: without the neighbour, so with more bandwidth for the arithmetic than a board has"


def main() -> None:
    """Run `-m MODULE` or a script, with its arguments, as on a device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", action="store_true", help=_ALONE + "; stands before the name")
    parser.add_argument("name", choices=list(MODES))
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-m MODULE, or a script, and its arguments")
    arguments = parser.parse_args()
    module, program = arguments.program[:1] == ["-m"], arguments.program
    if len(program) <= module:
        parser.error("nothing to run: expected -m MODULE, or a script")
    try:
        enter(arguments.name, not arguments.alone)
        begin_neighbour()
    except ModeError as error:
        parser.error(str(error))
    sys.argv = program[module:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
