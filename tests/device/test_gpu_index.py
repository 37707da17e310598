"""A GPU has an index: what is found, chosen, opened and refused where there are several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgellm import LLM
from edgellm.drafting.config import present_preset
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.errors import EdgeLLMError, RequestError
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.dlpack import CPU, CUDA, SharedArray
from edgellm.kernels.errors import KernelError
from edgellm.kernels.gpu import absent_gpu, choose_gpu, current_compute_capability, find_gpu, stand_in, visible_gpus
from edgellm.opened_model import SHIPPED_MODEL
from tests.helpers.command_line import Edgellm

THOR = replace(absent_gpu("sm_110", 20, 227 << 10), index=1)
HAS_ONE = find_gpu() is not None


@pytest.fixture
def second() -> Iterator[None]:
    """As if a GPU of index 1 were there, which stands in."""
    stand_in(THOR)
    yield
    choose_gpu(None)
    stand_in(None)


def test_a_stand_in_is_the_gpu_of_its_index_and_the_one_that_is_meant(second: None) -> None:
    assert find_gpu() is find_gpu(1) is THOR and visible_gpus()[-1] is THOR
    choose_gpu(1)
    with pytest.raises(KernelError, match=r"there is no GPU 7\. The driver shows .*1 \(a GPU of sm_110 with 20 multi"):
        choose_gpu(7)
    assert find_gpu() is THOR  # what was refused is not chosen


@pytest.mark.skipif(HAS_ONE, reason="a GPU is present")
def test_a_gpu_that_is_not_there_is_refused_and_nothing_computed_elsewhere(second: None) -> None:
    with pytest.raises(KernelError, match=r"there is no GPU 0\. The driver shows 1 \("):
        open_backend("auto", EngineDirectory.open(SHIPPED_MODEL), gpu=0)
    stand_in(None)
    with pytest.raises(KernelError, match=r"there is no GPU 1\. The driver shows none"):
        LLM(gpu=1)


@pytest.mark.parametrize("wrong", [-1, True, "1", 1.0])
def test_what_is_no_index_is_refused(wrong: object) -> None:
    with pytest.raises(RequestError, match=r"gpu is .*: expected the index of a GPU, from 0 on, or None"):
        LLM(gpu=wrong)  # type: ignore[arg-type]


def test_numpy_opens_no_gpu() -> None:
    with LLM(backend="numpy", gpu=1, drafting=None) as llm:
        assert llm.gpu is None and "GPU" not in repr(llm)


def test_the_preset_of_drafting_is_that_of_the_gpu_which_is_opened(second: None) -> None:
    assert present_preset("tensorrt", 1) == "thor"
    with pytest.raises(KernelError, match="no GPU 5"):
        present_preset("tensorrt", 5)


def test_shared_memory_says_which_gpu_it_is_on() -> None:
    array = DeviceArray(1 << 20, (1, 2, 3), "float16")
    assert SharedArray(array, (1, 2, 3), None, 1).__dlpack_device__() == (CUDA, 1)
    assert SharedArray(np.zeros((2, 3), np.float32), (2, 3), None, None).__dlpack_device__() == (CPU, 0)


@pytest.mark.skipif(HAS_ONE, reason="a GPU is present")
@pytest.mark.parametrize(
    "command", [("generate", "hi"), ("doctor",), ("info",), ("build", "a", "b"), ("quantize", "a", "b")]
)
def test_commands_refuse_a_gpu_that_is_not_there(edgellm: Edgellm, command: tuple[str, ...]) -> None:
    code, _, told = edgellm(*command, "--gpu", 3)
    assert code == 1 and "there is no GPU 3" in told


def test_a_settings_file_names_the_gpu(edgellm: Edgellm, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("gpu: 7\nsampling: {max_tokens: 2}\n")
    code, _, told = edgellm("generate", "hi", "--config", file)
    assert code == 1 and "there is no GPU 7" in told
    code, said, _ = edgellm("generate", "hi", "--config", file, "--backend", "numpy")
    assert code == 0 and said.strip()  # which opens none
    file.write_text("gpu: first\n")
    code, _, told = edgellm("generate", "hi", "--config", file)
    assert code == 1 and "gpu is 'first': expected a whole number from 0 on, or null" in told


@pytest.mark.gpu
def test_the_second_gpu_answers_as_the_first() -> None:
    if len(visible_gpus()) < 2:
        pytest.skip("there is one GPU")
    prompt, answers = "The red cup stands on the left, and the robot", []
    for index in (0, 1):
        with LLM(gpu=index) as llm:
            assert llm.gpu == index and f"GPU {index}" in repr(llm)
            answers.append(llm.generate(prompt, max_tokens=24).token_ids)
    if current_compute_capability(0) == current_compute_capability(1):
        assert answers[0] == answers[1]
    with LLM(gpu=0) as first, LLM(gpu=1) as other:  # side by side in one process, each in its own thread
        streams = [each.stream(prompt, max_tokens=24) for each in (first, other)]
        assert [each.result().token_ids for each in streams] == answers
    with pytest.raises(EdgeLLMError, match="there is no GPU 99"):
        LLM(gpu=99)
