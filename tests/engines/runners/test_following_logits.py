"""Logits behind every token of a text: on NumPy, in fixed shapes, and as kernels would compute them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from fixed_shape_backend import FixedShapeBackend
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine

from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.comparison import open_runner, teacher_forced_logits
from edgellm.engines.runners.following_logits import FollowingLogits
from edgellm.engines.runners.sampling_state import SamplingValues

TEXT = [(11 * index + 5) % 250 for index in range(96)]


@pytest.fixture(scope="module")
def directory(tiny_engines: Path) -> EngineDirectory:
    return EngineDirectory.open(tiny_engines)


class TwinsBackend(NumpyBackend):
    """All engines are of hand-written kernels, on the kernels' twins."""

    fixed_shapes = True
    prompt_step = None

    def takes_any_key_range(self, shape: EngineShape) -> bool:
        return True

    def load_engine(self, shape: EngineShape) -> KernelEngine:
        engine = numpy_kernel_engine(self._configs[shape.model], shape)
        engine.attach(NumpyKernelDevice(), np.zeros(engine.scratch_bytes, np.uint8))
        return engine


def open_any(directory: EngineDirectory, backend: str) -> NumpyBackend:
    if backend == "kernels":
        return TwinsBackend(directory.config)
    if backend.startswith("fixed"):
        return FixedShapeBackend(directory, backend[len("fixed on ") :])
    return NumpyBackend(directory.config)


@contextmanager
def opened_runner(directory: EngineDirectory, backend: str) -> Iterator[BaseEngineRunner]:
    """ "numpy", "fixed" for engines of fixed shapes, "fixed on sm_86" where kernels take them, "kernels" for
    those kernels' own arithmetic."""
    checkpoint = directory.checkpoint()
    runner = BaseEngineRunner(open_any(directory, backend), directory.config, directory.limits, checkpoint)
    checkpoint.close()
    yield runner
    runner.close()


def following(
    runner: BaseEngineRunner, first: int, text: list[int] = TEXT, slot: int = 0
) -> tuple[list[int], np.ndarray]:
    """The sizes of the blocks, and the logits of all."""
    blocks = [block.copy() for block in FollowingLogits(runner).blocks(slot, text, first)]
    return [len(block) for block in blocks], np.concatenate(blocks)


@pytest.mark.parametrize(
    ("backend", "first", "sizes"),
    [
        ("numpy", 1, [64, 31]),
        ("numpy", 30, [64, 2]),
        ("fixed on sm_86", 1, [64, 16, 15]),
        ("fixed on sm_86", 40, [16, 16, 16, 8]),
        ("fixed", 90, [1] * 6),
        ("kernels", 1, [64, 16, 15]),
        ("kernels", 26, [64, 6]),
    ],
)
def test_they_are_those_of_decode_steps(directory: EngineDirectory, backend: str, first: int, sizes: list[int]) -> None:
    """To the end of the context, where padding reaches past it."""
    with open_runner("numpy", directory) as runner:
        expected = teacher_forced_logits(runner, TEXT[:first], TEXT[first:])
    with opened_runner(directory, backend) as runner:
        found_sizes, logits = following(runner, first)
    assert found_sizes == sizes
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("backend", ["numpy", "fixed on sm_86", "kernels"])
def test_another_slot_goes_on_as_it_was(directory: EngineDirectory, backend: str) -> None:
    def decoded(runner: BaseEngineRunner, disturbed: bool) -> list[int]:
        tokens = [int(runner.start(0, TEXT[:20], 0, SamplingValues()).wait()[0])]
        for step in range(8):
            if disturbed and step % 4 == 2:
                following(runner, 7, TEXT[30:], slot=1)
            tokens.append(int(runner.decode(1).wait()[0]))
        return tokens

    with opened_runner(directory, backend) as runner:
        expected = decoded(runner, disturbed=False)
    with opened_runner(directory, backend) as runner:
        assert decoded(runner, disturbed=True) == expected


@pytest.mark.parametrize(
    ("text", "first", "message"),
    [
        (TEXT, 0, "tokens from 0 on of 96 were asked for: expected a later token than the first, and at most 96"),
        (TEXT, 96, "tokens from 96 on of 96 were asked for"),
        ([*TEXT, 1], 1, "tokens from 1 on of 97 were asked for"),
        ([*TEXT[:5], 320], 2, "the token id 320, this model's are 0..319"),
        ([*TEXT[:5], -1], 2, "the token id -1"),
    ],
)
def test_what_is_no_text_of_the_model_is_refused(
    directory: EngineDirectory, text: list[int], first: int, message: str
) -> None:
    with open_runner("numpy", directory) as runner, pytest.raises(EngineError, match=message):
        following(runner, first, text)
