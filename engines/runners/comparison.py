"""Comparing backends: the logits that one gives for a text that the other, or a reference, wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.media import PromptMedia
from edgellm.engines.runners.sampling_state import SamplingValues

#: Largest difference of logits from float32 NumPy that a compute dtype explains, relative to the largest logit.
LOGIT_TOLERANCES = {"float16": 0.01, "bfloat16": 0.03, "float32": 0.001}


@contextmanager
def open_runner(
    backend: str, directory: EngineDirectory, with_adapters: bool = False, executor: str = "auto"
) -> Iterator[BaseEngineRunner]:
    """A runner for the directory's base model on `backend`, by `executor` (see `open_backend`), closed at the end;
    `with_adapters` with its adapters."""
    config, adapters = directory.config, None
    if with_adapters:
        adapters = {name: adapter.read(config) for name, adapter in directory.adapters.items()}
    opened = open_backend(backend, directory, executor)
    with closing(directory.checkpoint()) as checkpoint:
        try:
            runner = BaseEngineRunner(opened, config, directory.limits, checkpoint, adapters=adapters)
        except BaseException:
            opened.close()
            raise
    with closing(runner):
        yield runner


def greedy_tokens(
    runner: BaseEngineRunner, prompt_ids: Sequence[int], count: int, media: PromptMedia | None = None
) -> list[int]:
    """The first `count` tokens of the greedy answer, end-of-sequence tokens not heeded."""
    tokens = [int(runner.start(0, prompt_ids, 0, SamplingValues(), media).wait()[0])]
    while len(tokens) < count:
        tokens.append(int(runner.decode(1).wait()[0]))
    runner.stop(0)
    return tokens


def teacher_forced_logits(
    runner: BaseEngineRunner, prompt_ids: Sequence[int], answer_ids: Sequence[int], media: PromptMedia | None = None
) -> np.ndarray:
    """Logits [len(answer_ids), V] float32 from which each of `answer_ids` was, or would have been, drawn.

    The prompt goes through the prefill engines, the answer through the decode engine.
    """
    runner.start(0, prompt_ids, 0, SamplingValues(), media).wait()
    logits = [runner.logits(0)]
    for token in answer_ids[:-1]:
        runner.force_token(0, token)
        runner.decode(1).wait()
        logits.append(runner.logits(0))
    runner.stop(0)
    return np.stack(logits)
