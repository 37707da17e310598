"""`Watch`: one question about a stream of images, answered again and again by its newest frame."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from edgellm.errors import require, require_kind
from edgellm.media.camera import Camera, Frame
from edgellm.multimodal.image_input import read_image
from edgellm.requests import Request, Response
from edgellm.sampling_params import SamplingParams, as_float
from edgellm.snapshots.contents import common_beginning

if TYPE_CHECKING:
    from edgellm.llm import LLM

logger = logging.getLogger("edgellm.watching")

#: The smallest image that a budget of time is measured with, in pixels.
_LEAST_PIXELS = 128 * 128


@dataclass(frozen=True, eq=False)
class WatchedAnswer:
    """An answer about a stream: to which `question`, about which `frame`, the `response`, and when it was `asked` and
    had `ended`, in seconds of `time.perf_counter`. The model saw the frame of the number `shown`, which is an earlier
    one where the newest differed from it by less than was asked for."""

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


class Watch:
    """Asks a model about the newest frame of a stream: an iterator of `WatchedAnswer`s, which ends with the stream.

    Nothing is asked before the next answer is wanted, and then it is about the newest frame: no answer is older than a
    frame and an answer. No frame is asked about twice, unless the `question` was set meanwhile, by any thread.

    `stream` is a `Camera`, or what it takes as its source, which is then closed with this. `every` is the least time
    between the beginnings of two answers, in seconds; `deadline` ends an answer so many seconds after its frame was
    taken. With `cancels` a newer frame, as soon as `every` allows another answer, and a new question end the answer
    under way, which is not given; `cancelled` counts these. So a model that takes longer than that never answers.

    `system` is the fixed instruction in front (None: the model's own, "": none). The question follows the image, so
    that another question reuses the image's rows; one that is `fixed` stands before it, so that another frame reuses
    the question's. `response.usage.reused_tokens` tells. `choice` are the texts that an answer may be: where each is
    one token, an answer is one step. Other keywords are those of `LLM.stream_chat`.

    With `latency_budget_ms` images are made as small as it takes for the first token to come within so many
    milliseconds from the frame on, as was measured here with the first frame: some requests go before its answer.
    `least_difference` is how far a frame must differ from the one that the model saw last, in the mean of all values
    (0 to 255): below, that one's rows are taken. `notes` say what was found out: the size of images, and what a chat
    template's own order costs; they are logged, too.
    """

    def __init__(
        self,
        llm: LLM,
        stream: Any,
        question: str,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        every: float = 0.0,
        deadline: float | None = None,
        cancels: bool = False,
        fixed: bool = False,
        system: str | None = None,
        choice: Sequence[str] | None = None,
        latency_budget_ms: float | None = None,
        least_difference: float = 0.0,
        **options: Any,
    ) -> None:
        for name, value in (("every", every), ("least_difference", least_difference)):
            require(0 <= as_float(value) < math.inf, name, value, "a number of at least 0")
        for name, limit in (("deadline", deadline), ("latency_budget_ms", latency_budget_ms)):
            require(limit is None or 0 < as_float(limit) < math.inf, name, limit, "more than 0, or None")
        self._question = _checked(question)
        self._llm, self._params, self._adapter, self._options = llm, params, adapter, options
        self._every, self._deadline, self._cancels, self._fixed = every, deadline, cancels, fixed
        self._system, self._budget, self._least_difference = system, latency_budget_ms, least_difference
        if choice is not None:
            self._options |= _choosing(llm, choice)
        self.notes: list[str] = []
        self.cancelled = 0
        self._asked_at, self._asked, self._closed = -math.inf, "", False
        self._answered, self._shown = -math.inf, (-1, np.empty(0, np.uint8))
        #: Which part of a frame's pixels an image has; None: not decided yet.
        self._share: float | None = None
        self._owns = not isinstance(stream, Camera)
        self.camera = Camera(stream) if self._owns else stream

    @property
    def question(self) -> str:
        """What the next answer is about."""
        return self._question

    @question.setter
    def question(self, question: str) -> None:
        self._question = _checked(question)
        self.camera.wake()

    def close(self) -> None:
        """End it, and the answer under way."""
        self._closed = True
        self.camera.wake()
        if self._owns:
            self.camera.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[WatchedAnswer]:
        return self

    def __next__(self) -> WatchedAnswer:
        """The answer about the next frame; raises what the stream or a request does."""
        while (frame := self._next_frame()) is not None:
            if self._share is None:
                self._prepare(frame, self._question)  # which takes a while: the newest is another then
            elif (answer := self._answer(frame, self._question)) is not None:
                return answer
        self.close()
        raise StopIteration

    def _next_frame(self) -> Frame | None:
        """The newest frame, once one is to be answered; None at the end."""
        camera = self.camera
        with camera.changed:
            camera.changed.wait_for(lambda: self._closed, max(0.0, self._asked_at + self._every - time.perf_counter()))
            camera.changed.wait_for(lambda: self._closed or camera.ended or self._is_due())
            if self._closed or not self._is_due():
                camera.raise_failure()
                return None
            return camera.frame

    def _is_due(self) -> bool:
        """Whether the newest frame, or the question, is another than what was asked last."""
        frame = self.camera.frame
        return frame is not None and (frame.taken > self._answered or self._question != self._asked)

    def _answer(self, frame: Frame, question: str) -> WatchedAnswer | None:
        """The answer about a frame; None for one that was cancelled."""
        shown, image = self._image_of(frame)
        self._asked_at = asked = time.perf_counter()
        self._answered, self._asked = frame.taken, question
        options = self._options
        if self._deadline is not None:
            options = {**options, "deadline": self._deadline - (asked - frame.taken)}
        messages = self._messages(image, frame, question)
        with self._llm.stream_chat(messages, self._params, self._adapter, **options) as generation:
            generation.on_change(self.camera.wake)
            with (changed := self.camera.changed):
                changed.wait_for(lambda: generation.finished or self._closed, self._every if self._cancels else None)
                changed.wait_for(lambda: generation.finished or self._closed or self._is_due())
            if not generation.finished:
                self.cancelled += 1
                return None  # which ends it
            response = generation.result()
        return WatchedAnswer(question, frame, shown, asked, time.perf_counter(), response)

    def _image_of(self, frame: Frame) -> tuple[int, Any]:
        """What the model is shown of a frame, and that frame's number; or those of the last one, which differs by
        little."""
        if self._share == 1.0 and not self._least_difference:
            return frame.number, frame.image
        pixels = _scaled(read_image(frame.image, channels=frame.channels), self._share or 1.0)
        if self._least_difference:
            number, last = self._shown
            if last.shape == pixels.shape and mean_difference(last, pixels) < self._least_difference:
                return number, last
            self._shown = frame.number, pixels
        return frame.number, pixels

    def _messages(self, image: Any, frame: Frame, question: str) -> list[dict[str, Any]]:
        channels = frame.channels if image is frame.image else "RGB"
        parts: list[dict[str, Any]] = [{"type": "image", "image": image, "channels": channels}]
        parts.insert(0 if self._fixed else 1, {"type": "text", "text": question})
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, {"role": "user", "content": parts}]

    def _prepare(self, frame: Frame, question: str) -> None:
        """Find out what the template makes of the order, and how large images may be."""
        self._note_order(frame, question)
        self._share = 1.0
        if self._budget is not None:
            pixels = read_image(frame.image, channels=frame.channels)
            self._share = self._fitting_share(pixels, frame, question, self._budget / 1000)

    def _note_order(self, frame: Frame, question: str) -> None:
        """Say so where the chat template has an order of its own, and what that costs."""
        ids, others = (
            self._llm._runtime.prompt_ids(
                Request.of(None, self._messages(frame.image, frame, text), adapter=self._adapter)
            )
            for text in (question, f"Now: {question}")
        )
        markers = self._llm._runtime.media_tokens
        before = next(place for place, token in enumerate(ids) if token in markers)
        image = sum(token in markers for token in ids)
        leads = common_beginning(ids, others) < before
        if leads != self._fixed:
            behind = len(ids) - before - image
            self._note(
                f"the chat template writes the image before the question, which is fixed: the {behind} tokens behind "
                "the image are computed anew for each frame"
                if self._fixed
                else "the chat template writes the question before the image: the image's "
                f"{image} tokens are computed anew for each question"
            )

    def _fitting_share(self, pixels: np.ndarray, frame: Frame, question: str, budget: float) -> float:
        """The largest part of a frame's pixels whose first token comes within `budget` seconds, as measured with halves
        of halves; between two of them by a straight line, which costs that grow ever faster stay below."""
        share, tokens, slower = 1.0, 0, (1.0, 0.0)
        found = (1.0, math.inf)
        while True:
            image = _scaled(pixels, share)
            count = self._llm.count_tokens(self._messages(image, frame, question))
            if count != tokens:  # else the encoder would get no fewer
                tokens, found = count, (share, self._first_token_seconds(pixels, share, frame, question))
                if found[1] <= budget:
                    break
                slower = found
            if share * pixels.shape[0] * pixels.shape[1] < 2 * _LEAST_PIXELS:
                break
            share /= 2
        share, seconds = found
        if seconds <= budget and share < 1.0:
            part = (budget - seconds) / (slower[1] - seconds)
            share, seconds = share + part * (slower[0] - share), budget
        height, width = _scaled(pixels, share).shape[:2]
        found_out = "within" if seconds <= budget else "the least of all sizes, and more than"
        self._note(
            f"images of {width} x {height} pixels: the first token comes {1000 * seconds:.3g} ms after the frame, as "
            f"measured here, {found_out} the budget of {1000 * budget:.4g} ms"
        )
        return share

    def _first_token_seconds(self, pixels: np.ndarray, share: float, frame: Frame, question: str) -> float:
        """Seconds from a frame to the first token, the second time: the first one makes ready what the size needs."""
        seconds = math.inf
        for number in range(2):
            other = pixels.copy()
            other[: len(other) // 2] ^= 1 + number  # known by no cache
            began = time.perf_counter()
            messages = self._messages(_scaled(other, share), frame, question)
            self._llm.chat(messages, self._params, self._adapter, **{**self._options, "max_tokens": 1})
            seconds = time.perf_counter() - began
        return seconds

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


def _choosing(llm: LLM, choice: Sequence[str]) -> dict[str, Any]:
    """The keywords under which an answer is one of these texts: its only token where each is one, else a structure."""
    require_kind(isinstance(choice, (list, tuple)) and len(choice) > 0, "choice", choice, "a list of texts")
    tokenizer = llm.tokenizer
    found = [tokenizer.encode(_checked(text, "choice")) for text in choice]
    ids = [each[0] for each in found if len(each) == 1]
    if [tokenizer.decode([each]) for each in ids] == list(choice):
        return {"allowed_token_ids": ids, "max_tokens": 1}
    return {"structure": list(choice)}


def _checked(text: Any, name: str = "question") -> str:
    require_kind(isinstance(text, str) and bool(text.strip()), name, text, "text")
    return text
