"""One token of what a build made."""

from __future__ import annotations

import math
from pathlib import Path

from edgellm.built import TRIAL_TEXT
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.programs import model_weights
from edgellm.engines.model.memory_plan import available_memory
from edgellm.kernels.gpu import find_gpu

#: Tokens of it that any context has room for.
_LONGEST = 8
#: Of the free memory, what weights may take for a token to be computed unasked.
_SHARE = 4


def fits_easily(path: Path) -> bool:
    """Whether the weights of an engine directory take at most a quarter of the memory that is free for them, on the
    GPU where there is one. NumPy computes in float32."""
    directory = EngineDirectory.open(path)
    if find_gpu() is None:
        specs = (spec for config in directory.models.values() for spec in model_weights(config))
        size, free = sum(4 * math.prod(spec.shape) for spec in specs), available_memory() or 0
    else:
        from edgellm.engines.backends.cuda_device import gpu_memory

        size = sum((path / name).stat().st_size for name in directory.weight_files)
        free, _ = gpu_memory()
    return size * _SHARE <= free


def compute_token(path: Path) -> None:
    """Open a model as a start opens it, on the GPU where there is one, and compute a token; EdgeLLMError where that
    fails. What is compiled and built for it is kept where the next start finds it."""
    from edgellm.requests import Request
    from edgellm.runtime import SpecDecodeRuntime
    from edgellm.sampling_params import SamplingParams

    with SpecDecodeRuntime(path, drafting="auto") as runtime:
        prompt = runtime.tokenizer.encode(TRIAL_TEXT)[:_LONGEST]
        runtime.handle_request(Request(prompt, params=SamplingParams(max_tokens=1, ignore_eos=True)))
