"""The sound kernels on the GPU."""

from __future__ import annotations

from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.contracts import cuda_header
from edgellm.kernels.launch import Kernel, KernelModule
from edgellm.kernels.launcher import Launcher
from edgellm.kernels.sounds.contract import TILE, SoundKernels, part_samples

#: A row of a tile has so many values, of which the last ones keep rows' banks apart.
_PITCH, _WARP, _THREADS = TILE + 4, 32, 256
SOUNDS = ModuleSource(
    "sounds",
    ("sounds/mel.cu",),
    ("measure_sounds", "place_features"),
    (("TILE", TILE), ("PITCH", _PITCH)),
    (("sounds/arguments.cuh", cuda_header(SoundKernels)),),
)


class CudaSounds(Launcher):
    """See `edgellm.kernels.sounds.contract.SoundKernels`; arrays are `DeviceArray`."""

    def __init__(self, module: KernelModule) -> None:
        super().__init__(module, SoundKernels)

    def measure_sounds(self, samples, counts, slots, tables, logarithms, maxima):
        sizes, packed = self._packed("measure_sounds", samples, counts, slots, tables, logarithms, maxima)
        threads = -(-sizes["K"] // _WARP) * _WARP
        shared = 4 * (2 * sizes["K"] * _PITCH + part_samples(TILE, tables.hop, sizes["Z"]))
        self._launch(Kernel(SOUNDS, "measure_sounds"), (sizes["T"], sizes["P"]), threads, (packed,), shared)

    def place_features(self, logarithms, slots, placing, features):
        sizes, packed = self._packed("place_features", logarithms, slots, placing, features)
        self._launch(Kernel(SOUNDS, "place_features"), (-(-sizes["N"] // _THREADS),), _THREADS, (packed,))
