"""What the launchers of all kernels declared by contracts share: checks, packing, launches, workspaces."""

from __future__ import annotations

import ctypes
from typing import Any

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.contracts import Contracts
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch

#: The type of a template's instantiation for arrays of a compute dtype.
CUDA_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


class Launcher:
    """Launches the kernels of one protocol, or prepares their launches, on arrays in device memory and the stream of
    `module`, in order."""

    def __init__(self, module: KernelModule, protocol: type) -> None:
        self._module = module
        self._check = Contracts(protocol, DeviceArray)

    def _packed(self, kernel: str, *arguments: Any) -> tuple[dict[str, Any], ctypes.Array]:
        """What `Contracts` finds of a kernel's arguments, and the struct that it takes."""
        sizes = self._check(kernel, *arguments)
        return sizes, self._check.pack(kernel, sizes, *arguments)

    def _launch(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        threads: int,
        arguments: tuple[Any, ...],
        shared_bytes: int = 0,
        early: bool = False,
        zeroed: DeviceArray | None = None,
    ) -> None:
        """Enqueue a kernel; whole numbers among `arguments` become unsigned integers, arrays their addresses.

        `early`: it waits for its predecessor itself, and so may start while that one still runs, where the GPU can do
        that. `zeroed` is the workspace that it leaves zero as it finds it: it is cleared where a launch fails, since
        the kernels before this one have written there what this one would have cleared.
        """
        (x, y, z), module, values = (*grid, 1, 1)[:3], self._module, [*map(_argument, arguments)]
        try:
            if early and module.can_overlap:
                launch = Launch(module, kernel, (x, y, z), threads, shared_bytes, values)
                launch.overlap_previous()
                launch()
                return
            function = module.function(kernel, shared_bytes)
            pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            (status,) = module.driver.cuLaunchKernel(
                function, x, y, z, threads, 1, 1, shared_bytes, module.stream, ctypes.addressof(pointers), 0
            )
            if status != module.driver.CUresult.CUDA_SUCCESS:
                raise KernelError(f"launching {kernel.expression} failed: {status}")
        except KernelError:
            if zeroed is not None:
                self._fill(zeroed, 0)
            raise

    def _fill(self, array: DeviceArray, value: int) -> None:
        """Set every byte of an array, in order with the kernels."""
        driver = self._module.driver
        (status,) = driver.cuMemsetD8Async(array.pointer, value, array.nbytes, self._module.stream)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"setting {array.nbytes} bytes of device memory failed: {status}")

    def _blocks(self, vocabulary: int, rows: int, threads: int) -> int:
        """Blocks for each of `rows` rows: as many as the GPU runs at once, no more than have four tokens a thread."""
        most = max(1, _BLOCKS_PER_MULTIPROCESSOR * self._module.multiprocessors // rows)
        return min(-(-vocabulary // (4 * threads)), most)


#: Blocks of 512 threads that a multiprocessor runs at once; more than these only wait in line.
_BLOCKS_PER_MULTIPROCESSOR = 4


def check_workspace(kernel: str, workspace: DeviceArray, needed: int, alignment: int, tells: str) -> None:
    """Raise KernelError for a workspace of fewer bytes than a kernel needs, as the method `tells` says, or one that
    does not begin at a multiple of `alignment`."""
    if workspace.size < needed:
        raise KernelError(f"{kernel}: workspace has {workspace.size} bytes; expected at least {needed} ({tells})")
    if workspace.pointer % alignment:
        raise KernelError(
            f"{kernel}: workspace starts at {workspace.pointer:#x}; expected a multiple of {alignment} bytes"
        )


def _argument(value: Any) -> Any:
    if isinstance(value, DeviceArray):
        return ctypes.c_void_p(value.pointer)
    return ctypes.c_uint(value) if isinstance(value, int) else value
