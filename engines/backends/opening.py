"""Which backend computes."""

from __future__ import annotations

from typing import cast

from edgellm.engines.backends.base import Backend
from edgellm.engines.backends.device_layouts import model_layouts
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.kernels.gpu import find_gpu

BACKENDS = ("auto", "numpy", "tensorrt")


def open_backend(name: str, directory: EngineDirectory) -> Backend:
    """Open the backend `name`: "numpy", "tensorrt", or "auto", which takes TensorRT where a GPU is present.

    On "auto" a machine with a GPU but without pycuda, or without TensorRT where a shape needs it, raises
    MissingDependencyError rather than silently computing on the CPU. Packed weights that its kernels do not take are
    refused there with EngineError.
    """
    if name not in BACKENDS:
        raise EngineError(f"unknown backend {name!r}; expected one of {', '.join(BACKENDS)}")
    if name == "numpy" or (name == "auto" and find_gpu() is None):
        from edgellm.engines.backends.numpy_backend import NumpyBackend

        draft = None if directory.draft is None else directory.draft.config
        vision = None if directory.vision is None else directory.vision.config
        # Types: either takes arrays of its own kind alone, and what a backend gave goes to no other one.
        return cast(Backend, NumpyBackend(directory.config, draft, vision))
    packed = model_layouts(directory.models, directory.checkpoints, directory.dtype)
    from edgellm.engines.backends.cuda_backend import CudaBackend

    return cast(Backend, CudaBackend(directory, packed))
