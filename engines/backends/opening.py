"""Which backend computes."""

from __future__ import annotations

from typing import Any, cast

from edgellm.engines.backends.base import EXECUTORS, Backend
from edgellm.engines.backends.device_layouts import model_layouts
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.kernels.gpu import find_gpu, visible_gpus

BACKENDS = ("auto", "numpy", "tensorrt")


def open_backend(
    name: str, directory: EngineDirectory, executor: str = EXECUTORS[0], gpu: int | None = None, gpus: int = 1
) -> Backend:
    """Open the backend `name`: "numpy", "tensorrt" (the GPU), or "auto", which takes the GPU where one is present.

    `gpu` is the index of the GPU (None: see `find_gpu`); KernelError for one that is not there, also on "auto".
    `gpus` is how many share the base's steps: that GPU, or the first, and those behind it. EngineError for what they
    cannot share, and where there are not as many. NumPy has as many ranks.
    `executor` is one of `EXECUTORS`; on NumPy another than "auto" is refused with EngineError. On "auto" a machine with
    a GPU but without pycuda, or without TensorRT where a shape needs it, raises MissingDependencyError rather than
    silently computing on the CPU. Packed weights that its kernels do not take are refused there with EngineError.
    """
    for kind, given, known in (("backend", name, BACKENDS), ("executor", executor, EXECUTORS)):
        if given not in known:
            raise EngineError(f"unknown {kind} {given!r}; expected one of {', '.join(known)}")
    if name == "numpy" or (name == "auto" and find_gpu(gpu) is None):
        if executor != EXECUTORS[0]:
            raise EngineError(f"the executor {executor} runs steps on a GPU, and NumPy computes here: leave it out")
        from edgellm.engines.backends.numpy_backend import NumpyBackend
        from edgellm.engines.backends.numpy_ranks import NumpyRanks

        # Types: either takes arrays of its own kind alone, and what a backend gave goes to no other one.
        configs: list[Any] = [directory.models.get(model) for model in ("base", "draft", "vision", "audio")]
        return cast(Backend, NumpyBackend(*configs) if gpus == 1 else NumpyRanks(gpus, *configs))
    indices = rank_gpus(gpu, gpus) if gpus > 1 else ()
    packed = model_layouts(directory.models, directory.checkpoints, directory.dtype)
    from edgellm.engines.backends.cuda_backend import CudaBackend
    from edgellm.engines.backends.cuda_ranks import CudaRanks

    if indices:
        return cast(Backend, CudaRanks(directory, packed, executor, indices))
    return cast(Backend, CudaBackend(directory, packed, executor, gpu))


def rank_gpus(first: int | None, count: int) -> tuple[int, ...]:
    """The indices of so many GPUs of one kind, from that of an index on (None: see `find_gpu`). Raises EngineError
    where there are fewer."""
    start = find_gpu(first)
    alike = [
        gpu.index
        for gpu in visible_gpus()
        if start is not None and gpu.index >= start.index and gpu.compute_capability == start.compute_capability
    ]
    if len(alike) < count:
        shown = ", ".join(f"{gpu.index} ({gpu.name}, {gpu.compute_capability})" for gpu in visible_gpus()) or "none"
        where, are = "" if first is None else f" from GPU {first} on", "is" if len(alike) == 1 else "are"
        raise EngineError(
            f"gpus is {count}, and{where} there {are} {len(alike)} of one kind: the driver shows {shown}. Take as many "
            "as there are, or --backend numpy"
        )
    return tuple(alike[:count])
