"""A camera at 30 pictures a second, and questions about what it sees that come when they come.

The camera keeps only its newest frame. A question is answered with a frame that was taken after it was asked, never
with an older one, and a newer question takes the place of one that is still being answered. Every answer says which
frame it is about. Run it: python tools/examples/camera_loop.py [ENGINE_DIR] [--seconds N]
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from edgellm.generation import Generation
from edgellm.llm import LLM
from edgellm.multimodal.image_input import read_image
from edgellm.sampling_params import SamplingParams

CAMERA_RATE = 30.0  # frames a second
HEIGHT, WIDTH = 120, 160
SCENE_SECONDS = 2.0
MEAN_PAUSE = 0.7  # seconds between questions
POLL_SECONDS = 0.005
QUESTIONS = ("What is on the table?", "How many objects are there?", "What is at the front left?")
PARAMS = SamplingParams(temperature=0, max_tokens=64)


@dataclass(frozen=True, eq=False)
class Frame:
    """A picture [H, W, 3] uint8, its number, and when it was taken (seconds of `time.perf_counter`)."""

    number: int
    taken: float
    pixels: np.ndarray


@dataclass(frozen=True)
class Answer:
    """What was answered to a question, when that was asked, and the frame that was looked at."""

    question: str
    asked: float
    frame: int
    taken: float
    text: str


def draw_frame(number: int) -> np.ndarray:
    """A square that wanders over a table and changes its colour; its number stands in bits along the upper edge."""
    pixels = np.full((HEIGHT, WIDTH, 3), (180, 160, 130), np.uint8)
    row, column = 20 + number * 3 % 60, number * 5 % 120
    pixels[row : row + 30, column : column + 30] = [number * step % 256 for step in (37, 59, 83)]
    return numbered(pixels, number)


def numbered(pixels: np.ndarray, number: int) -> np.ndarray:
    """The picture with the number in 32 bits along its upper edge, white for 1."""
    width = pixels.shape[1] // 32
    for bit in range(32):
        pixels[:2, width * bit : width * (bit + 1)] = 255 * (number >> bit & 1)
    return pixels


def scene_frames(directory: Path) -> Callable[[int], np.ndarray]:
    """Draws the sample scenes that came with a model (`directory`/scenes), another every two seconds; without any,
    `draw_frame`."""
    scenes = [read_image(path) for path in sorted((directory / "scenes").glob("*.png"))]
    frames = round(SCENE_SECONDS * CAMERA_RATE)
    return (lambda number: numbered(scenes[number // frames % len(scenes)].copy(), number)) if scenes else draw_frame


class Camera:
    """Takes frames in a thread of its own and keeps the newest."""

    def __init__(self, draw: Callable[[int], np.ndarray] = draw_frame, rate: float = CAMERA_RATE) -> None:
        self.frames = 0
        self._draw, self._period = draw, 1.0 / rate
        self._changed = threading.Condition()
        self._newest: Frame | None = None
        self._running = True
        self._thread = threading.Thread(target=self._run, name="camera", daemon=True)
        self._thread.start()

    def after(self, seconds: float) -> Frame:
        """The newest frame, once it was taken at `seconds` or later."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None and self._newest.taken >= seconds)
            return self._newest

    def close(self) -> None:
        """Take no more frames."""
        self._running = False
        self._thread.join()

    def __enter__(self) -> Camera:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        due = time.perf_counter()
        while self._running:
            taken = time.perf_counter()
            frame = Frame(self.frames, taken, self._draw(self.frames))
            with self._changed:
                self._newest, self.frames = frame, self.frames + 1
                self._changed.notify_all()
            due = max(due + self._period, taken)
            time.sleep(max(0.0, due - time.perf_counter()))


def random_questions(seed: int, mean_pause: float = MEAN_PAUSE) -> Iterator[tuple[float, str]]:
    """Pauses in seconds and questions, without end."""
    source = random.Random(seed)
    while True:
        yield source.expovariate(1.0 / mean_pause), source.choice(QUESTIONS)


def ask(llm: LLM, frame: Frame, question: str, params: SamplingParams = PARAMS) -> Generation:
    """Begin to answer a question about a frame."""
    parts = [{"type": "image", "image": frame.pixels}, {"type": "text", "text": question}]
    return llm.stream_chat([{"role": "user", "content": parts}], params)


def watch(
    llm: LLM, camera: Camera, questions: Iterator[tuple[float, str]], seconds: float, tell: Callable[[Answer], None]
) -> int:
    """Answer questions for so many seconds; returns how many were given up for a newer one."""
    end, given_up = time.perf_counter() + seconds, 0
    pause, question = next(questions)
    due = time.perf_counter() + pause
    request_state: tuple[Generation, str, float, Frame] | None = None
    while (now := time.perf_counter()) < end:
        if request_state is not None and request_state[0].finished:
            generation, text, asked, frame = request_state
            tell(Answer(text, asked, frame.number, frame.taken, generation.result().text))
            request_state = None
        if now >= due:
            if request_state is not None:
                request_state[0].cancel()
                given_up += 1
            frame = camera.after(now)
            request_state = ask(llm, frame, question), question, now, frame
            pause, question = next(questions)
            due = now + pause
        time.sleep(POLL_SECONDS)
    if request_state is not None:
        request_state[0].cancel()
    return given_up


def main(arguments: Sequence[str] | None = None) -> None:
    """Show answers as they come, and what was done in the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine_directory", type=Path, nargs="?", help="default: the shipped model")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args(arguments)

    def show(answer: Answer) -> None:
        waited = time.perf_counter() - answer.asked
        print(f"frame {answer.frame}, {waited:.2f} s: {answer.question} {answer.text.strip()}")

    with LLM(options.engine_directory) as llm, Camera(scene_frames(llm.directory.path)) as camera:
        given_up = watch(llm, camera, random_questions(time.time_ns()), options.seconds, show)
        counts = llm.metrics()["multimodal"]
        print(f"{camera.frames} frames; {counts['images']} looked at in {counts['seconds']:.2f} s; {given_up} given up")


if __name__ == "__main__":
    main()
