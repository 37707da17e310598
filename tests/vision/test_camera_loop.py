"""The example of a camera's loop: which frame answers which question, and that nothing grows."""

from __future__ import annotations

import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from edgellm.llm import LLM
from edgellm.sampling_params import SamplingParams

#: The model's answers are random: they end by their length.
PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def example(repository: Path) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("camera_loop", repository / "tools" / "examples" / "camera_loop.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.ask.__defaults__ = (PARAMS,)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def llm(multimodal_engines: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(multimodal_engines("qwen2_5_vl"), backend="numpy") as opened:
        yield opened


def watch(example: ModuleType, llm: LLM, seconds: float, pause: float, tell: Callable[..., None]) -> tuple[int, int]:
    """Frames that were taken, and questions given up."""
    with example.Camera() as camera:
        given_up = example.watch(llm, camera, example.random_questions(7, pause), seconds, tell)
        return camera.frames, given_up


def check(example: ModuleType, llm: LLM, answers: list) -> None:
    """Every answer is about a frame taken after its question, the next one then, and about what that shows."""
    delays = [answer.taken - answer.asked for answer in answers]
    assert min(delays) >= 0
    assert np.median(delays) < 2 / example.CAMERA_RATE
    numbers = [answer.frame for answer in answers]
    assert numbers == sorted(set(numbers))
    for answer in answers[:5]:
        frame = example.Frame(answer.frame, 0.0, example.draw_frame(answer.frame))
        assert example.ask(llm, frame, answer.question).result().text == answer.text


@pytest.mark.parametrize("seconds", [4.0, pytest.param(20.0, marks=pytest.mark.slow)])
def test_no_question_is_answered_with_a_stale_frame(example: ModuleType, llm: LLM, seconds: float) -> None:
    answers: list = []
    frames, _ = watch(example, llm, seconds=seconds, pause=0.4, tell=answers.append)
    assert len(answers) >= 3
    assert frames > seconds * example.CAMERA_RATE / 2
    check(example, llm, answers)
    assert len({answer.text for answer in answers}) > 1
    counts = llm.metrics()["multimodal"]
    assert counts["images"] - counts["reused_images"] < frames  # only what was asked about was looked at


def test_a_newer_question_takes_the_place_of_an_older_one(example: ModuleType, llm: LLM) -> None:
    answers: list = []
    _, given_up = watch(example, llm, seconds=2.0, pause=0.02, tell=answers.append)
    assert given_up > 5
    assert all(answer.taken >= answer.asked for answer in answers)
    assert answers == sorted(answers, key=lambda answer: answer.asked)


def test_frames_tell_their_numbers(example: ModuleType) -> None:
    first, second = example.draw_frame(1), example.draw_frame(2)
    assert first.shape == (120, 160, 3) and first.dtype == np.uint8
    bits = example.draw_frame(0b1011)[0, 2::5, 0] // 255
    assert bits.tolist() == [1, 1, 0, 1] + [0] * 28
    assert np.any(first != second)


def test_sample_scenes_are_shown_in_turn(example: ModuleType, tmp_path: Path) -> None:
    assert example.scene_frames(tmp_path) is example.draw_frame
    (tmp_path / "scenes").mkdir()
    for name, value in (("a", 10), ("b", 200)):
        Image.new("RGB", (96, 64), (value, 0, 0)).save(tmp_path / "scenes" / f"{name}.png")
    draw = example.scene_frames(tmp_path)
    assert [draw(number)[9, 9, 0] for number in (0, 59, 60, 119, 120)] == [10, 10, 200, 200, 10]
    assert draw(5)[0, :9:3, 0].tolist() == [255, 0, 255]
    assert draw(0)[0].max() == 0


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow
def test_ten_minutes_do_not_grow(example: ModuleType, llm: LLM) -> None:
    answers = 0

    def count(answer) -> None:
        nonlocal answers
        answers += 1

    started = time.perf_counter()
    sizes = []
    for seconds in (60.0, 180.0, 180.0, 180.0):  # the first fills caches
        watch(example, llm, seconds, 0.5, count)
        gc.collect()
        sizes.append(resident_bytes())
        print(f"{time.perf_counter() - started:.0f} s: {answers} answers, {sizes[-1] / 2**20:.1f} MiB")
    assert answers > 200
    assert max(sizes[1:]) - sizes[0] < 16 << 20
    assert sizes[3] - sizes[2] < 4 << 20
