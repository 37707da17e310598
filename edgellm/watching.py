"""`Watch`: one question about a stream of images, answered again and again by its newest frame."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np
from PIL import Image

from edgellm.engines.closing import Closing
from edgellm.errors import EdgeLLMError, require, require_kind
from edgellm.media.camera import Camera, Frame
from edgellm.multimodal.image_input import read_image
from edgellm.requests import Request, RequestOptions, Response, check_keywords
from edgellm.sampling_params import SamplingParams, as_float
from edgellm.snapshots.contents import common_beginning

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("edgellm.watching")

#: The smallest image that a budget of time is measured with, in pixels.
_LEAST_PIXELS = 128 * 128


@dataclass(frozen=True, eq=False)
class WatchedAnswer:
    """The `response` to a `question` about a stream's `frame`, and when it was `asked` and had `ended`, in seconds of
    `time.perf_counter`. The model saw the frame of the number `shown`: an earlier one where this differs by little."""

    question: str
    frame: Frame
    shown: int
    asked: float
    ended: float
    response: Response

    @property
    def text(self) -> str:
        """What was answered."""
        return self.response.text

    @property
    def age(self) -> float:
        """How many seconds ago the frame was taken when the answer had ended."""
        return self.ended - self.frame.taken


class WatchOptions(RequestOptions, total=False):
    """Keywords of a watch: they are described with `Watch`, those of the requests with `Request`."""

    every: float
    cancels: bool
    fixed: bool
    system: str | None
    choice: Sequence[str] | None
    latency_budget_ms: float | None
    least_difference: float


class Watch(Closing, Iterator[WatchedAnswer]):
    """Asks a model about the newest frame of a stream: an iterator of `WatchedAnswer`s, which ends with the stream.

    Nothing is asked before the next answer is wanted, and then it is about the newest frame: no answer is older than a
    frame and an answer. No frame is asked about twice, unless `question` was set to another meanwhile.

    `stream` is a `Camera`, or what it takes as its source, and is then closed with this. `every` is the least time
    between the beginnings of two answers, in seconds; `deadline` ends an answer so many seconds after its frame was
    taken. With `cancels` a newer frame ends the answer under way, as soon as `every` allows another: it is not given,
    and `cancelled` counts it. A model that takes longer than that never answers.

    `system` is the fixed instruction in front (None: the model's own, "": none). The question follows the image, so
    that another question reuses the image's rows; one that is `fixed` stands before it, so that another frame reuses
    the question's: `response.usage.reused_tokens` tells. `choice` are the texts that an answer may be: where each is
    one token, so is the answer. Other keywords are those of `Request`.

    With `latency_budget_ms` images are as large as they may be for the first token to come within so many milliseconds
    from the frame on, as is measured here with the first frame, by some requests before its answer. A frame that
    differs from what the model saw last by less than `least_difference`, in the mean of all values (0 to 255), takes
    the rows of that. `notes` say, as the log does, what was found: the size of images, and what it costs that a chat
    template has another order.
    """

    def __init__(
        self,
        llm: Any,
        stream: Any,
        question: str,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        **options: Unpack[WatchOptions],
    ) -> None:
        """`llm` is an `LLM`, whose module imports this one."""
        check_keywords(options, tuple(WatchOptions.__annotations__))
        self._every, self._least_difference = options.pop("every", 0.0), options.pop("least_difference", 0.0)
        self._deadline, self._budget = options.pop("deadline", None), options.pop("latency_budget_ms", None)
        self._cancels, self._fixed = options.pop("cancels", False), options.pop("fixed", False)
        self._system, choice = options.pop("system", None), options.pop("choice", None)
        require_kind(isinstance(question, str), "question", question, "text")
        for name, value in (("every", self._every), ("least_difference", self._least_difference)):
            require(0 <= as_float(value) < math.inf, name, value, "a number of at least 0")
        for name, limit in (("deadline", self._deadline), ("latency_budget_ms", self._budget)):
            require(limit is None or 0 < as_float(limit) < math.inf, name, limit, "more than 0, or None")
        self.question, self._llm, self._params, self._adapter = question, llm, params, adapter
        self._options: dict[str, Any] = {**options, **({} if choice is None else choosing(llm, choice))}
        Request.of(None, question, params, adapter, **self._options)  # refuses what is wrong now
        self.notes: list[str] = []
        self.cancelled = 0
        #: When was asked last, about which frame, and what.
        self._asked_at, self._answered, self._asked = -math.inf, -1, ""
        #: Which part of a frame's pixels an image has (None: not decided yet); the frame that was asked about last;
        #: what the model saw last, with that frame's number, and the pixels to compare others with.
        self._share: float | None = None
        self._seen: Frame | None = None
        self._shown: tuple[int, Any, np.ndarray] = -1, None, np.empty(0, np.uint8)
        self._closed, self._owns = False, not isinstance(stream, Camera)
        self.camera = Camera(stream) if self._owns else stream
        if self._owns:  # else a loop that was left would keep a device for ever
            finalize(self, self.camera.stop).atexit = False

    def close(self) -> None:
        """End this, and an answer under way; close the stream, unless it was a `Camera`, whose closing ends this, too.
        Any thread may call it."""
        self._closed = True
        self.camera.wake()
        if self._owns:
            self.camera.close()

    def __next__(self) -> WatchedAnswer:
        """The answer about the next frame; raises what the stream or a request does: behind a frame that was damaged
        the next call goes on."""
        camera = self.camera
        while True:
            camera.wait(self._is_over, max(0.0, self._asked_at + self._every - time.perf_counter()))
            camera.wait(lambda: camera.ended or self._is_over() or self._is_due())
            frame = camera.frame
            if frame is None or self._is_over() or not self._is_due():
                camera.raise_failure()
                raise StopIteration
            question = self.question
            try:
                if self._share is None:
                    self._prepare(frame, question)  # takes a while: the newest is another then
                elif (answer := self._answer(frame, question)) is not None:
                    return answer
            except EdgeLLMError:
                self._answered, self._asked = frame.number, question  # who goes on is answered about the next one
                raise

    def _is_over(self) -> bool:
        return self._closed or self.camera.closed

    def _is_due(self) -> bool:
        """Whether the newest frame, or the question, is another than what was asked last."""
        frame = self.camera.frame
        return frame is not None and (frame.number > self._answered or self.question != self._asked)

    def _answer(self, frame: Frame, question: str) -> WatchedAnswer | None:
        """The answer about a frame; None for one that was cancelled."""
        camera, options = self.camera, self._options
        self._asked_at = asked = time.perf_counter()
        self._answered, self._asked = frame.number, question
        shown, image = self._image_of(frame)
        if self._deadline is not None:
            options = {**options, "deadline": self._deadline - (time.perf_counter() - frame.taken)}
        messages = self._messages(image, frame, question)
        with self._llm.stream_chat(messages, self._params, self._adapter, **options) as generation:
            generation.on_change(camera.wake)
            camera.wait(lambda: generation.finished or self._is_over(), self._every if self._cancels else None)
            camera.wait(lambda: generation.finished or self._is_over() or self._is_due())
            if not generation.finished:
                self.cancelled += 1
                return None  # which ends it
            response = generation.result()
        return WatchedAnswer(question, frame, shown, asked, time.perf_counter(), response)

    def _image_of(self, frame: Frame) -> tuple[int, Any]:
        """What the model is shown of a frame, prepared once for all questions about it, and that frame's number; or
        those of the last one."""
        last = pixels = self._shown[2]
        if frame is not self._seen:
            image, channels = frame.image, frame.channels
            if self._share != 1.0 or self._least_difference:
                image = pixels = _scaled(read_image(image, channels=channels), self._share or 1.0)
                channels = "RGB"
            is_like = pixels is not last and last.shape == pixels.shape
            if not is_like or mean_difference(last, pixels) >= self._least_difference:
                self._shown = frame.number, self._llm._runtime.prepare_image(image, channels), pixels
            self._seen = frame
        return self._shown[:2]

    def _messages(self, image: Any, frame: Frame, question: str) -> list[dict[str, Any]]:
        channels = frame.channels if image is frame.image else "RGB"
        parts: list[dict[str, Any]] = [{"type": "image", "image": image, "channels": channels}]
        parts.insert(0 if self._fixed else 1, {"type": "text", "text": question})
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, {"role": "user", "content": parts}]

    def _prepare(self, frame: Frame, question: str) -> None:
        """Find out what the chat template makes of the order, and how large images may be."""
        ids, others = (
            self._llm._runtime.prompt_ids(Request.of(None, self._messages(frame.image, frame, text)))
            for text in (question, f"Now: {question}")
        )
        shown = [place for place, token in enumerate(ids) if token in self._llm._runtime.media_tokens]
        if (common_beginning(ids, others) < shown[0]) != self._fixed:
            lost = f"before the question, which is fixed: the {len(ids) - 1 - shown[-1]} tokens behind the image"
            lost = lost if self._fixed else f"behind the question: its {len(shown)} tokens"
            each = "frame" if self._fixed else "question"
            self._note(f"the chat template writes the image {lost} are computed anew for each {each}")
        self._share = 1.0 if self._budget is None else self._fitting_share(frame, question, self._budget / 1000)

    def _fitting_share(self, frame: Frame, question: str, budget: float) -> float:
        """The largest part of a frame's pixels whose first token comes within `budget` seconds, as measured with halves
        of halves; between two of them by a straight line, which costs that grow ever faster stay below."""
        pixels, tokens = read_image(frame.image, channels=frame.channels), 0
        measured: list[tuple[float, float]] = []
        for halvings in range(max(1, (pixels[..., 0].size // _LEAST_PIXELS).bit_length())):
            share, before = 0.5**halvings, tokens
            tokens = self._llm.count_tokens(self._messages(_scaled(pixels, share), frame, question))
            if tokens != before:  # else the encoder would get no fewer
                measured.append((share, self._first_token_seconds(pixels, share, frame, question)))
            if measured[-1][1] <= budget:
                break
        share, seconds = measured[-1]
        if seconds <= budget and len(measured) > 1:
            larger, slower = measured[-2]
            share, seconds = share + (budget - seconds) / (slower - seconds) * (larger - share), budget
        height, width = _scaled(pixels, share).shape[:2]
        verdict = "within" if seconds <= budget else "the least of all sizes, and more than"
        self._note(
            f"images of {width} x {height} pixels: the first token comes {1000 * seconds:.3g} ms after the frame, as "
            f"measured here, {verdict} the budget of {1000 * budget:.4g} ms"
        )
        return share

    def _first_token_seconds(self, pixels: np.ndarray, share: float, frame: Frame, question: str) -> float:
        """Seconds from a frame to the first token, the second time: the first one makes ready what the size needs."""
        for _ in range(2):
            other = pixels ^ np.random.default_rng().integers(4, size=pixels.shape, dtype=np.uint8)  # no cache knows it
            began = time.perf_counter()
            messages = self._messages(_scaled(other, share), frame, question)
            self._llm.chat(messages, self._params, self._adapter, **{**self._options, "max_tokens": 1})
        return time.perf_counter() - began

    def _note(self, sentence: str) -> None:
        self.notes.append(sentence)
        logger.info("%s", sentence)


def mean_difference(first: np.ndarray, second: np.ndarray) -> float:
    """The mean of how far values of two images [H, W, 3] uint8 are apart, 0 to 255."""
    return float(np.mean(np.maximum(first, second) - np.minimum(first, second)))


def _scaled(pixels: np.ndarray, share: float) -> np.ndarray:
    """An image [H, W, 3] uint8 with about that share of its pixels."""
    if share >= 1.0:
        return pixels
    height, width = (max(1, round(edge * math.sqrt(share))) for edge in pixels.shape[:2])
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def choosing(llm: Any, choice: Sequence[str]) -> dict[str, Any]:
    """The keywords under which an answer is one of these texts: its only token where each is one, else a structure."""
    are_texts = isinstance(choice, (list, tuple)) and all(isinstance(each, str) for each in choice)
    require(are_texts and len(choice) > 0, "choice", choice, "a list of texts, at least one")
    ids = [token for text in choice for token in llm.tokenizer.encode(text, add_special_tokens=False)]
    if [llm.tokenizer.decode([token]) for token in ids] == list(choice):
        return {"allowed_token_ids": ids, "max_tokens": 1}
    return {"structure": list(choice)}
