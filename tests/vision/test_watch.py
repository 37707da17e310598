"""Streams of images: the newest frame answers, once; what is reused, what ends an answer, and that nothing grows."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import edgellm.watching
from edgellm.asynchronous import AsyncLLM
from edgellm.errors import ImageError, MissingDependencyError, RequestError
from edgellm.llm import LLM
from edgellm.media.camera import Camera
from edgellm.multimodal.image_input import read_image
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.text.template import ChatTemplate
from edgellm.watching import Watch, mean_difference

#: Writes a message's images before its texts, as templates of LLaVA models do.
IMAGES_FIRST = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<|image_pad|>\n{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{% endif %}\n{% endfor %}assistant:"
)
BOAT, LAMP = "Is there a boat in the photo?", "Is there a lamp in the photo?"
PERIOD = 0.1


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(backend="numpy") as opened:
        opened.chat([{"role": "user", "content": [{"type": "image", "image": scene("toys")}]}], max_tokens=1)
        yield opened


@pytest.fixture(scope="module")
def tiny(multimodal_engines: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(multimodal_engines("qwen3_vl"), backend="numpy", drafting=None) as opened:
        yield opened


def scene(name: str) -> np.ndarray:
    return read_image(SHIPPED_MODEL / "scenes" / f"{name}.png")


def frames(count: int, period: float = PERIOD) -> Iterator[tuple[float, np.ndarray]]:
    """Toys with a boat in the first half, a desk with a lamp in the second: with times, each with its own number."""
    toys, study, start = scene("toys"), scene("study"), time.perf_counter()
    for number in range(count):
        pixels = (toys if number < count / 2 else study).copy()
        pixels[0, 0] = number % 256, number // 256, 0
        yield start + number * period, pixels


def test_a_camera_keeps_the_newest() -> None:
    gate = threading.Event()

    def source() -> Iterator[np.ndarray]:
        yield from np.zeros((3, 2, 2, 3), np.uint8)
        gate.wait()
        yield np.full((2, 2, 3), 7, np.uint8)
        raise OSError("unplugged")

    began = time.perf_counter()
    with Camera(source(), rate=200.0) as camera:
        camera.wait(lambda: camera.frames == 3)
        frame = camera.frame
        camera.wait(lambda: camera.frames > 3, timeout=0.01)
        assert camera.frame is frame and not camera.ended
        threading.Timer(0.02, gate.set).start()
        camera.wait(lambda: camera.ended)
        latest = camera.frame
        assert (latest.number, latest.image[0, 0, 0]) == (3, 7) and latest.taken > frame.taken >= began
        with pytest.raises(OSError, match="unplugged"):
            camera.raise_failure()


def test_times_hold_frames_back_and_closing_ends_the_wait() -> None:
    now = time.perf_counter()
    with Camera([(now, "a.png"), (now + 0.05, "b.png"), (now + 60, "c.png")]) as camera:
        camera.wait(lambda: camera.frames == 1)
        assert camera.frame.image == "a.png"
        camera.wait(lambda: camera.frames == 2)
        assert (camera.frame.image, camera.frame.taken) == ("b.png", now + 0.05)
        assert 0.05 <= time.perf_counter() - now < 5
    assert camera.ended and camera.frame.image == "b.png"


def test_what_is_no_source_is_refused(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    for source in (None, b"bytes", 1.5, True):
        with pytest.raises(RequestError, match="source"):
            Camera(source)
    with pytest.raises(RequestError, match="source is 1000000000000: expected a device's number"):
        Camera(10**12)
    for shape in ((48, 64, 3), (5, 48, 64), (64,)):  # rows would be taken for grey frames
        with pytest.raises(RequestError, match=r"source is a ndarray: .*, or frames \[N, H, W, 3\]"):
            Camera(np.zeros(shape, np.uint8))
    with Camera(np.zeros((2, 48, 64, 3), np.uint8)) as camera:
        camera.wait(lambda: camera.ended)
    assert (camera.frames, camera.frame.image.shape) == (2, (48, 64, 3))
    with pytest.raises(RequestError, match="rate"):
        Camera([], rate=0)
    with pytest.raises(RequestError, match='channels is \'GBR\': expected "RGB" or "BGR"'):
        Camera([], channels="GBR")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(MissingDependencyError, match="opencv-python-headless"):
        Camera("clip.mp4")
    choices: tuple[dict[str, Any], ...] = ({"choice": "Yes"}, {"choice": []}, {"choice": [1, 2]})
    for wrong in ({"every": -1}, {"deadline": 0}, {"latency_budget_ms": float("nan")}, *choices):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            llm.watch([], BOAT, **wrong)
    for question in (7, None):
        with pytest.raises(RequestError, match=r"question is a .*: expected text"):
            llm.watch([], question)
    with pytest.raises(TypeError, match=r"'latency_budget': did you mean latency_budget_ms\?"):
        llm.watch([], BOAT, latency_budget=7)


def test_opencv_plays_a_file_at_its_rate(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    path = str(tmp_path / "clip.avi")
    clip = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*"MJPG"), 20.0, (64, 48))
    for blue in (0, 120, 240):
        clip.write(np.full((48, 64, 3), (blue, 0, 0), np.uint8))
    clip.release()
    began = time.perf_counter()
    with Camera(path) as camera:
        camera.wait(lambda: camera.ended)
    frame = camera.frame
    assert time.perf_counter() - began >= 0.1
    assert (frame.number, frame.channels, frame.image.shape) == (2, "BGR", (48, 64, 3))
    assert abs(int(frame.image[9, 9, 0]) - 240) < 9
    with pytest.raises(ImageError, match="cannot open"):
        Camera(str(tmp_path / "none.avi"))


def test_a_stream_is_answered_by_its_newest_frames(llm: LLM) -> None:
    came: list[float] = []  # when the camera wanted the frame behind each, having kept that one

    def stream(period: float) -> Iterator[tuple[float, np.ndarray]]:
        came.clear()
        for item in frames(16, period):
            yield item
            came.append(time.perf_counter())

    for times in (1, 4, 16):  # a busy machine answers fewer
        answers = list(llm.watch(stream(times * PERIOD), BOAT, choice=["Yes", "No"]))
        numbers = [answer.frame.number for answer in answers]
        assert numbers == sorted(set(numbers)) and numbers[-1] == 15
        if len(numbers) > 2:
            break
    assert len(numbers) > 2
    for answer in answers:
        number = answer.frame.number
        assert answer.text == ("Yes" if number < 8 else "No")
        assert (answer.response.usage.completion_tokens, answer.shown) == (1, number)
        assert answer.frame.taken <= answer.asked < answer.ended
        assert answer.age == answer.ended - answer.frame.taken
        assert number == 15 or answer.asked < came[number + 1] + 0.1  # but for what a busy machine delays
        assert answer is answers[0] or answer.response.usage.reused_tokens >= 50  # the instruction's


def test_another_question_reuses_the_image(llm: LLM) -> None:
    pixels = np.array(scene("toys"))
    with llm.watch([pixels], BOAT) as watch:
        first = next(watch)
        pixels[:] = 0  # as a camera's buffer: the frame was read, and is not read again
        watch.question = LAMP
        second = next(watch)
    assert (first.text[:4], second.text[:3], second.question) == ("Yes,", "No,", LAMP)
    image = 81
    assert first.response.usage.reused_tokens < second.response.usage.reused_tokens - image
    assert second.frame is first.frame and watch.notes == []
    with pytest.raises(StopIteration):  # it is closed
        next(watch)


def test_a_fixed_question_is_reused_where_the_template_lets_it_stand_in_front(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 40, 40, 3), np.uint8)
    question, reused = "What is to be seen here, and what is beside it?", []
    for fixed in (False, True):
        answers = [next(tiny.watch([image], question, system="Look.", fixed=fixed, max_tokens=2)) for image in pixels]
        reused.append(answers[1].response.usage.reused_tokens)
    tokens = len(tiny.tokenizer.encode(question))
    assert reused[1] >= reused[0] + tokens - 2
    monkeypatch.setattr(tiny.tokenizer, "chat_template", ChatTemplate({"default": IMAGES_FIRST}, "this test"))
    shown, usages = [], []
    for image in pixels:
        before = tiny.metrics()["multimodal"]["image_tokens"]
        watch = tiny.watch([image], question, system="Look.", fixed=True, max_tokens=1)
        usages.append(next(watch).response.usage)
        shown.append(tiny.metrics()["multimodal"]["image_tokens"] - before)
    behind = usages[1].prompt_tokens - usages[1].reused_tokens - shown[1]
    (note,) = watch.notes
    assert f"the image before the question, which is fixed: the {behind} tokens behind the image" in note


def test_every_and_deadline(llm: LLM) -> None:
    answers = list(llm.watch(frames(8), BOAT, every=0.3))
    asked = [answer.asked for answer in answers]
    assert 2 <= len(asked) <= 4 and min(b - a for a, b in itertools.pairwise(asked)) >= 0.3
    ages = []
    for _ in range(3):  # a busy machine may be late for one
        with llm.watch([scene("toys")], BOAT, deadline=0.3, ignore_eos=True, max_tokens=500) as watch:
            answer = next(watch)
        assert answer.response.finish_reason == "deadline"
        ages.append(answer.age)
    assert min(ages) < 1.3


def test_a_newer_frame_ends_the_old_answer_within_steps(llm: LLM) -> None:
    before = llm.metrics()

    def second_behind_five_tokens() -> Iterator[np.ndarray]:
        yield scene("toys")
        while llm.metrics()["tokens"] - before["tokens"] < 5:
            time.sleep(0.001)
        yield scene("study")

    watch = llm.watch(second_behind_five_tokens(), BOAT, cancels=True, max_tokens=120, ignore_eos=True)
    (answer,) = list(watch)  # behind the second frame comes no newer one: its answer runs to its end
    after = llm.metrics()
    assert (watch.cancelled, answer.frame.number, len(answer.response.token_ids)) == (1, 1, 120)
    assert after["requests"]["finished"]["cancelled"] - before["requests"]["finished"].get("cancelled", 0) == 1
    assert 5 <= after["tokens"] - before["tokens"] - 120 < 60


def test_frames_that_differ_by_little_take_the_rows_of_the_last(llm: LLM) -> None:
    def brighter() -> Iterator[np.ndarray]:
        for number in range(7):
            yield np.full((144, 144, 3), 100 + number, np.uint8)
            shown.wait()
            shown.clear()

    shown, answers = threading.Event(), []
    encoded = _encoded(llm)
    for answer in llm.watch(brighter(), BOAT, least_difference=2.5, choice=["Yes", "No"]):
        answers.append(answer)
        shown.set()
    assert [answer.frame.number for answer in answers] == list(range(7))
    assert [answer.shown for answer in answers] == [0, 0, 0, 3, 3, 3, 6]  # what changes slowly is seen in time
    assert _encoded(llm) - encoded == 3
    assert mean_difference(np.uint8([[[1, 2, 250]]]), np.uint8([[[3, 0, 0]]])) == pytest.approx(254 / 3)


def _encoded(llm: LLM) -> int:
    counts = llm.metrics()["multimodal"]
    return counts["images"] - counts["reused_images"]


class _Costs(Watch):
    """First tokens that take a second for a megapixel, and a tenth beside."""

    def _first_token_seconds(self, pixels: np.ndarray, share: float, *_: object) -> float:
        return 0.1 + share * pixels.shape[0] * pixels.shape[1] / 1e6


@pytest.mark.parametrize(
    ("budget", "side", "said"), [(2000, 1000, "within"), (400, 548, "within"), (1, 125, "the least of all")]
)
def test_a_budget_picks_the_pixels(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, budget: float, side: int, said: str
) -> None:
    monkeypatch.setattr(LLM, "count_tokens", lambda self, messages: messages[-1]["content"][0]["image"].size)
    monkeypatch.setattr(edgellm.watching, "_LEAST_PIXELS", 15_000)
    watch = _Costs(tiny, [np.zeros((1000, 1000, 3), np.uint8)], "What?", latency_budget_ms=budget, max_tokens=1)
    next(watch)
    assert f"images of {side} x {side} pixels" in watch.notes[0] and said in watch.notes[0]


def test_a_budget_is_measured_here(llm: LLM) -> None:
    watch = llm.watch(frames(3000, 0.02), BOAT, latency_budget_ms=0.01, choice=["Yes", "No"])
    answer = next(watch)
    (note,) = watch.notes  # this encoder's images have one size: smaller ones cost the same, and none is tried
    assert "288 x 288" in note and "more than the budget of 0.01 ms" in note
    assert answer.frame.number > 0  # not the frame that was measured with
    watch.close()
    for _ in range(2):  # what was measured before with the same frame makes it no faster
        encoded = _encoded(llm)
        next(llm.watch([scene("toys")], BOAT, latency_budget_ms=5000, choice=["Yes", "No"]))
        assert _encoded(llm) - encoded >= 2


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def watched_sizes(llm: LLM, parts: int, count: int, source: object, **options: object) -> list[int]:
    """The process's memory after each of some parts of so many answers, of which none is about a frame twice."""
    sizes, last = [], -1
    with llm.watch(source, "What is it?", **options) as watch:
        for _ in range(parts):
            for answer in itertools.islice(watch, count):
                assert answer.frame.number > last
                last = answer.frame.number
            gc.collect()
            sizes.append(resident_bytes())
    return sizes


def test_many_frames_do_not_grow(tiny: LLM) -> None:
    random = np.random.default_rng(0)
    source = (random.integers(0, 256, (64, 64, 3), np.uint8) for _ in itertools.count())
    with Camera(source, rate=100.0) as camera:
        sizes = watched_sizes(tiny, 3, 30, camera, max_tokens=1)
    assert sizes[2] - sizes[1] < 2 << 20


@pytest.mark.slow
def test_ten_minutes_do_not_grow(llm: LLM) -> None:
    began = time.perf_counter()
    sizes = watched_sizes(llm, 10, 580, frames(6000), choice=["Yes", "No"])
    assert time.perf_counter() - began > 500
    assert max(sizes[1:]) - sizes[1] < 4 << 20


def test_the_example_answers(repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["camera_loop.py", "--seconds", "0.1"])
    runpy.run_path(str(repository / "tools" / "examples" / "camera_loop.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "What is on the table? I see" in said and "frames came" in said


def test_a_watch_may_be_awaited() -> None:
    """Its answers are those of a watch; a task that is cancelled ends it, and leaves a camera that is not its own."""

    async def run() -> None:
        llm = AsyncLLM(backend="numpy")
        with pytest.raises(RequestError, match="not open yet"):
            llm.watch([], BOAT)
        async with llm:
            async with llm.watch(list(frames(1)), BOAT) as watch:
                answers = [answer.text[:3] async for answer in watch]
            assert answers == ["Yes"] and watch.watch.camera.closed
            with Camera([scene("study")]) as camera:
                other = llm.watch(camera, BOAT)
                assert (await anext(other)).text.startswith("No")
                camera.ended = False  # as if another frame might come
                waiting = asyncio.ensure_future(anext(other))
                await asyncio.sleep(0.05)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                assert await anext(other, None) is None and not camera.closed

    asyncio.run(run())


def test_a_closed_camera_lets_its_source_go() -> None:
    """A device that stayed open could not be opened again while the closed camera is still held."""
    released = threading.Event()

    def device() -> Iterator[np.ndarray]:
        try:
            while True:
                yield np.zeros((2, 2, 3), np.uint8)
        finally:
            released.set()

    camera = Camera(device(), rate=np.float32(1000))
    camera.wait(lambda: camera.frames > 1 or camera.ended)
    camera.close()
    camera.raise_failure()
    assert released.is_set() and camera.frames > 1


@pytest.mark.parametrize("wrong", [("now", 1), (math.nan, 1), (math.inf, 1), (time.time(), 1), (1.0,), (1, 2, 3, 4)])
def test_frames_with_times_of_another_clock_are_refused(wrong: tuple[object, ...]) -> None:
    with Camera([wrong]) as camera:
        camera.wait(lambda: camera.ended, timeout=5)
        with pytest.raises(ImageError, match=r"frame 0 of the source .* seconds of time.perf_counter\(\)"):
            camera.raise_failure()


def test_times_that_go_back_and_numpys_are_taken() -> None:
    now = np.float32(time.perf_counter() - 2000)
    with Camera([(now, 1), (now - 1, 2, "about"), (None, 3)]) as camera:
        camera.wait(lambda: camera.ended, timeout=5)
        camera.raise_failure()
        assert camera.frames == 3 and camera.frame is not None and camera.frame.taken > now


def test_a_clock_that_goes_back_ends_no_watch(llm: LLM) -> None:
    gates = [threading.Event() for _ in range(3)]

    def source() -> Iterator[tuple[float, np.ndarray]]:
        now = time.perf_counter()
        for number, gate in enumerate(gates):
            gate.wait(10)
            yield now - number, scene("toys")

    with Camera(source()) as camera, llm.watch(camera, BOAT, max_tokens=1) as watch:
        for number, gate in enumerate(gates):
            gate.set()
            assert next(watch).frame.number == number
        assert next(watch, None) is None


def test_a_watch_goes_on_behind_a_damaged_frame(llm: LLM) -> None:
    frames: SimpleQueue[object] = SimpleQueue()
    with Camera(iter(frames.get, None)) as camera, llm.watch(camera, BOAT, max_tokens=1) as watch:
        for number, image in enumerate((b"damaged", scene("toys"), b"damaged", scene("study"))):
            frames.put((None, image))
            if isinstance(image, bytes):
                with pytest.raises(ImageError, match="is not an image"):
                    next(watch)
            else:
                assert next(watch).frame.number == number
        frames.put(None)
        assert next(watch, None) is None


def test_a_loop_that_was_left_lets_its_source_go(llm: LLM) -> None:
    released = threading.Event()

    def device() -> Iterator[np.ndarray]:
        try:
            while True:
                time.sleep(0.002)
                yield scene("toys")
        finally:
            released.set()

    for _ in llm.watch(device(), BOAT, max_tokens=1):
        break
    gc.collect()
    assert released.wait(5)
