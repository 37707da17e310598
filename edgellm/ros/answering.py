"""What the node does with goals, prompts and images, as messages of ROS 2 carry them (sensor_msgs). Nothing here needs
ROS 2."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np

from edgellm.errors import DeviceLostError, EdgeLLMError, EngineError, ImageError, RequestError, require
from edgellm.generation import Generation
from edgellm.kernels.errors import shown
from edgellm.llm import LLM
from edgellm.media.camera import Camera, Frame
from edgellm.requests import Request, Response
from edgellm.watching import Watch, WatchedAnswer, WatchOptions, choosing

#: The levels of diagnostic_msgs/DiagnosticStatus.
OK, WARN, ERROR = range(3)
#: How long closing waits for the watch's thread.
_CLOSING_SECONDS = 5.0
#: By the encoding's name (sensor_msgs/image_encodings.hpp): which of a pixel's values are red, green, blue and alpha;
#: and the bits of each.
_ENCODINGS: dict[str, tuple[tuple[int, ...], int]] = {
    "mono8": ((0,), 8),
    "rgb8": ((0, 1, 2), 8),
    "bgr8": ((2, 1, 0), 8),
    "rgba8": ((0, 1, 2, 3), 8),
    "bgra8": ((2, 1, 0, 3), 8),
    "mono16": ((0,), 16),
    "rgb16": ((0, 1, 2), 16),
    "bgr16": ((2, 1, 0), 16),
}
#: What files of JPEG and of PNG begin with.
_FILES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


@dataclass(frozen=True)
class Settings:
    """The node's parameters. `model` and `backend` are those of `LLM` (without a model: the one that ships).

    Prompts, and what is watched, have the instruction `system` in front ("": the model's own), `max_tokens` (0: the
    model's own) and a `deadline` in seconds (0: none). Prompts show the newest image, where one has come, if
    `show_image`; one that is older than `max_image_age` seconds (0: any) fails them. A `question` is asked about the
    newest image again and again, at most each `every` seconds. So many `goals` may be under way, more are rejected.
    Diagnostics come each `diagnostics_period` seconds.
    """

    model: str = ""
    backend: str = "auto"
    system: str = ""
    max_tokens: int = 0
    deadline: float = 0.0
    show_image: bool = True
    max_image_age: float = 0.0
    question: str = ""
    every: float = 1.0
    goals: int = 8
    diagnostics_period: float = 1.0


@dataclass(frozen=True)
class Goal:
    """What may be asked: the fields of the goal in `tools/ros2/edgellm_ros/action/Generate.action`, which describes
    them."""

    prompt: str = ""
    system: str = ""
    show_image: bool = False
    max_image_age: float = 0.0
    choice: tuple[str, ...] = ()
    json_schema: str = ""
    adapter: str = ""
    max_tokens: int = 0
    temperature: float = -1.0
    seed: int = -1
    deadline: float = 0.0
    priority: int = 0


@dataclass(frozen=True)
class Answered:
    """How a goal ended, as states of actions are called, and the values of the result's fields but for the `image`,
    which is the header of the message that was shown (None: none was)."""

    state: Literal["succeeded", "canceled", "aborted"]
    fields: dict[str, Any]
    image: Any = None


@dataclass
class _UnderWay:
    """A goal: when it was accepted, whether its client has cancelled it, whether it is to end, and what answers it."""

    accepted: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
    ends: bool = False
    generation: Generation | None = None


class Answering:
    """Answers goals and prompts with a model, about the newest image. Any thread may call what is public.

    `on_watched` is called with each answer to the `question` of the settings, by a thread of its own.
    """

    def __init__(self, llm: LLM, settings: Settings, on_watched: Callable[[WatchedAnswer], object]) -> None:
        self._llm, self._settings, self._on_watched = llm, settings, on_watched
        self._images: SimpleQueue[Any] = SimpleQueue()
        self._camera = Camera(iter(self._images.get, None))
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, _UnderWay] = {}
        self._prompt: object = None
        self._watch: Watch | None = None
        self._watching: threading.Thread | None = None
        #: Why the last answer failed, and why the last image was refused.
        self._problem: EdgeLLMError | None = None
        self._refused = ""
        self.ask_about(settings.question)

    def see(self, message: Any, seconds_ago: float = 0.0) -> None:
        """Take the image of a message, taken so many seconds ago, as the newest; ImageError for what `image_of`
        refuses, which leaves the one before."""
        try:
            image = image_of(message)
        except ImageError as error:
            self._refused = str(error)
            raise
        self._refused = ""
        self._images.put((time.perf_counter() - max(0.0, seconds_ago), image, message.header))

    @property
    def is_full(self) -> bool:
        """Whether as many goals are under way as may be."""
        return len(self._under_way) >= self._settings.goals

    def accept(self, key: Hashable) -> None:
        """A goal of that key will be answered: its deadline counts from now on, and it can be cancelled."""
        with self._lock:
            self._under_way[key] = _UnderWay()

    def answer(self, key: Hashable, goal: Any, on_piece: Callable[[str, int], object] | None = None) -> Answered:
        """Answer a goal that was accepted; it is a `Goal`, or a message with its fields. Raises nothing that is wrong
        with it: the result says so.

        `on_piece` is called with each piece of text as it comes, and how many tokens came so far.
        """
        frame, tokens, under_way = None, 0, self._under_way[key]
        try:
            frame = self._frame(goal) if goal.show_image else None
            with self._llm.submit(self._request(goal, frame, under_way.accepted)) as generation:
                with self._lock:
                    under_way.generation, ends = generation, under_way.ends
                if ends:
                    generation.cancel()
                for chunk in generation:
                    tokens += len(chunk.token_ids)
                    if on_piece is not None:
                        on_piece(chunk.text, tokens)
                response = generation.result()
            self._problem = None
        except EdgeLLMError as error:
            self._problem = error
            return Answered("aborted", {"error": str(error), "image_age": -1.0})
        finally:
            with self._lock:
                del self._under_way[key]
        if response.finish_reason not in ("cancelled", "deadline"):
            return _answered("succeeded", response, frame)
        is_cancelled = response.finish_reason == "cancelled" and under_way.cancelled
        return _answered("canceled" if is_cancelled else "aborted", response, frame)

    def cancel(self, key: Hashable) -> bool:
        """End a goal for its client, at the model's next step; False where it is not under way."""
        return self._end(key, cancelled=True)

    def stop(self) -> int:
        """End all that is under way, and the watch; gives how many answers."""
        self.ask_about("")
        return sum(self._end(key) for key in tuple(self._under_way))

    def reply(self, prompt: str) -> Answered:
        """Answer a prompt as the settings say; one that is under way still is aborted."""
        settings, key = self._settings, object()
        with self._lock:
            before, self._prompt = self._prompt, key
            self._under_way[key] = _UnderWay()
        self._end(before)
        goal = Goal(
            prompt,
            show_image=settings.show_image and self._camera.frame is not None,
            max_image_age=settings.max_image_age,
            max_tokens=settings.max_tokens,
            deadline=settings.deadline,
        )
        return self.answer(key, goal)

    def ask_about(self, question: str) -> None:
        """Watch the images with this question from now on; "" ends it. Raises RequestError."""
        settings, params, watch = self._settings, self._llm.default_params, None
        if question:
            params = replace(params, max_tokens=settings.max_tokens or params.max_tokens)
            system, deadline = settings.system or None, settings.deadline or None
            options: WatchOptions = {"every": settings.every, "system": system, "deadline": deadline}
            watch = self._llm.watch(self._camera, question, params, **options)
        if self._watch is not None:
            self._watch.close()
        self._watch = watch
        if watch is not None:
            self._watching = threading.Thread(target=self._follow, args=(watch,), name="edgellm-watch", daemon=True)
            self._watching.start()

    def diagnosis(self) -> tuple[int, str, dict[str, str]]:
        """The level, a sentence, and values by name, as diagnostics tell them."""
        frame, metrics, problem = self._camera.frame, self._llm.metrics(), self._problem
        level, message = OK, "answers"
        if problem is not None:
            level = ERROR if isinstance(problem, (EngineError, DeviceLostError)) else WARN
            message = f"the last answer failed: {problem}"
        elif self._refused:
            level, message = WARN, f"the last image was refused: {self._refused}"
        values = {
            "model": self._llm.directory.path,
            "backend": self._llm.backend_name,
            "requests running": metrics["requests_running"],
            "requests waiting": metrics["requests_waiting"],
            **{f"requests ended, {name}": count for name, count in metrics["requests"]["finished"].items()},
            "requests failed": metrics["requests"]["failed"],
            "tokens": metrics["tokens"],
            "seconds to the first token, 95 % within": metrics["time_to_first_token_seconds"]["p95"],
            "images": self._camera.frames,
            "seconds since the newest image": None if frame is None else round(_age(frame), 3),
        }
        return level, message, {name: "none yet" if value is None else str(value) for name, value in values.items()}

    def close(self) -> None:
        """End everything but the model."""
        self.stop()
        self._images.put(None)
        self._camera.close()
        if self._watching is not None:
            self._watching.join(_CLOSING_SECONDS)

    def _end(self, key: Hashable, cancelled: bool = False) -> bool:
        with self._lock:
            under_way = self._under_way.get(key)
            if under_way is None:
                return False
            under_way.ends, under_way.cancelled = True, under_way.cancelled or cancelled
        if under_way.generation is not None:
            under_way.generation.cancel()
        return True

    def _frame(self, goal: Any) -> Frame:
        """The newest frame, which is not older than the goal wants it."""
        frame = self._camera.frame
        if frame is None:
            raise ImageError(f"no image has come yet{f': {self._refused}' if self._refused else ''}")
        if goal.max_image_age and not _age(frame) <= goal.max_image_age:  # nor for one of NaN
            raise ImageError(f"the newest image is {_age(frame):.3g} s old: expected {goal.max_image_age:g} s at most")
        return frame

    def _request(self, goal: Any, frame: Frame | None, accepted: float) -> Request:
        """What the model is asked; RequestError for a goal that is wrong."""
        if goal.choice and goal.json_schema:
            raise RequestError("a goal has a choice and a json_schema: an answer has one of them")
        options: dict[str, Any] = {"priority": goal.priority}
        options |= {name: getattr(goal, name) for name in ("temperature", "seed") if not getattr(goal, name) < 0}
        if goal.max_tokens:
            options["max_tokens"] = goal.max_tokens
        if goal.deadline:
            options["deadline"] = goal.deadline - (time.perf_counter() - accepted)
        if goal.choice:
            options |= choosing(self._llm, list(goal.choice))
        if goal.json_schema:
            try:
                options["structure"] = schema = json.loads(goal.json_schema)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"json_schema is no JSON: {error}") from error
            require(isinstance(schema, dict), "json_schema", goal.json_schema, "a JSON schema that is an object")
        shown = [] if frame is None else [{"type": "image", "image": frame.image}]
        system = goal.system or self._settings.system
        messages = [{"role": "user", "content": [*shown, {"type": "text", "text": goal.prompt}]}]
        if system:
            messages.insert(0, {"role": "system", "content": system})  # type: ignore[dict-item]
        return Request.of(None, messages, self._llm.default_params, goal.adapter or None, **options)

    def _follow(self, watch: Watch) -> None:
        follows = True
        while follows:
            try:
                for answer in watch:
                    self._problem = None
                    self._on_watched(answer)
                follows = False
            except EdgeLLMError as error:
                self._problem = error  # the next image may be whole
                follows = isinstance(error, ImageError) and not self._camera.ended


def _age(frame: Frame) -> float:
    """How many seconds ago a frame was taken."""
    return time.perf_counter() - frame.taken


def _answered(state: Literal["succeeded", "canceled", "aborted"], response: Response, frame: Frame | None) -> Answered:
    usage, timings = response.usage, response.timings
    fields = {
        "text": response.text,
        "finish_reason": response.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "reused_tokens": usage.reused_tokens,
        "completion_tokens": usage.completion_tokens,
        "first_token_seconds": timings.time_to_first_token,
        "total_seconds": timings.total_seconds,
        "image_age": -1.0 if frame is None else _age(frame),
    }
    return Answered(state, fields, None if frame is None else frame.about)


def image_of(message: Any) -> np.ndarray | bytes:
    """What an Image shows, [H, W, C] uint8 or uint16 with its colours in the order of RGB(A), mostly a view of the
    message's data; or the file, JPEG or PNG, that a CompressedImage has, which is not looked into.

    Raises ImageError for another encoding or format, and for data that are shorter than the rows that they should have.
    """
    if hasattr(message, "format"):
        data = bytes(message.data)
        if not data.startswith(_FILES):
            raise ImageError(
                f"a compressed image of the format {shown(message.format)} holds neither JPEG nor PNG: choose one of "
                "them for image_transport's compressed topic"
            )
        return data
    if message.encoding not in _ENCODINGS:
        raise ImageError(
            f"an image has the encoding {shown(message.encoding)}: expected one of {', '.join(_ENCODINGS)}. Set the "
            "camera's driver to one of them, or convert it, as with image_proc"
        )
    order, bits = _ENCODINGS[message.encoding]
    height, width, step, size = message.height, message.width, message.step, len(message.data)
    row = width * len(order) * bits // 8
    if not row * height or step < row or size < step * height:
        raise ImageError(
            f"an image of {width} x {height} pixels of {message.encoding} has rows of {step} bytes, {size} in all: "
            f"expected rows of at least {row} bytes, and as many of them as it is high"
        )
    rows = np.frombuffer(message.data, np.uint8, step * height).reshape(height, step)[:, :row]
    if bits == 16:
        rows = rows.view(">u2" if message.is_bigendian else "<u2").astype(np.uint16, copy=False)
    pixels = rows.reshape(height, width, len(order))
    if order == (2, 1, 0):
        return pixels[..., ::-1]
    return pixels[..., order] if order != tuple(range(len(order))) else pixels
