"""`Camera`: a stream of images of which the newest counts, taken by a thread of its own."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.engines.closing import Closing
from edgellm.errors import ImageError, MissingDependencyError, require, require_kind, shown
from edgellm.sampling_params import as_float

if TYPE_CHECKING:
    from edgellm.multimodal.image_input import Channels, ImageSource

#: How long `close` waits for a source that is in the middle of a frame.
_CLOSING_SECONDS = 2.0
#: No source knows its frames for longer: such a time is of another clock, `time.time` for example.
_MOST_AHEAD_SECONDS = 86400.0


@dataclass(frozen=True, eq=False)
class Frame:
    """An image as messages take it (an array [H, W, 3] uint8 with its `channels`, "RGB" or "BGR", or what else
    `read_image` reads), its number in the stream, from 0, when it was taken, in seconds of `time.perf_counter`, and
    what the source said `about` it."""

    number: int
    taken: float
    image: ImageSource
    channels: Channels = "RGB"
    about: Any = None


class Camera(Closing):
    """Takes the frames of a source in a thread of its own and keeps the newest: nobody who asks waits for older ones.

    The `source` is what OpenCV opens, where that is installed: a number or /dev/videoN (V4L2 on Linux), a pipeline of
    GStreamer (text with " ! " in it, ending in appsink), the path or URL of a video, whose file is played at its own
    rate; or any iterable of images, or of tuples (seconds, image) or (seconds, image, about): one with a time that has
    not come yet is held back until then. Frames come `rate` times a second at most. `channels` is the order of the
    colours of arrays; OpenCV's are "BGR".

    `frame` is the newest (None: none yet), `frames` how many came. Where the source ends, `ended` is true and its last
    frame stays; what it raises is raised by `raise_failure`. Close it, or use it as a context manager.
    """

    def __init__(self, source: Any, *, rate: float | None = None, channels: Channels = "RGB") -> None:
        is_opened = isinstance(source, (int, str, Path)) and not isinstance(source, bool)
        expected = "a device's number, a path, URL or pipeline, an iterable of images, or frames [N, H, W, 3]"
        are_frames = len(getattr(source, "shape", range(4))) == 4  # rows of an image are iterable, too
        is_given = is_opened or (isinstance(source, Iterable) and not isinstance(source, bytes) and are_frames)
        require_kind(is_given, "source", source, expected)
        require(not isinstance(source, int) or abs(source) < 2**31, "source", source, "a device's number, as 0")
        require(channels in ("RGB", "BGR"), "channels", channels, '"RGB" or "BGR"')
        require(rate is None or as_float(rate) > 0, "rate", rate, "frames a second, more than 0, or None")
        if is_opened:
            capture, own_rate = _opened(source)
            source, rate, channels = _captured(capture), rate or own_rate, "BGR"
        self.frame: Frame | None = None
        self.frames, self.ended, self.closed = 0, False, False
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._source, self._channels, self._period = source, channels, 0.0 if rate is None else 1.0 / as_float(rate)
        self._thread = threading.Thread(target=self._run, name="edgellm-camera", daemon=True)
        self._thread.start()

    def wait(self, condition: Callable[[], object], timeout: float | None = None) -> None:
        """Wait until something is so, for `timeout` seconds at most: it is asked for with each frame, at the end, and
        by `wake`."""
        with self._changed:
            self._changed.wait_for(condition, timeout)

    def wake(self) -> None:
        """Let those who `wait` look again."""
        with self._changed:
            self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raise what the source raised, if it did."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """As `close`, but does not wait for a source that is in the middle of a frame."""
        self.ended = self.closed = True
        self.wake()

    def close(self) -> None:
        """Take no more frames."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING_SECONDS)  # a source that waits for its device for longer is left alone

    def _run(self) -> None:
        due = time.perf_counter()
        try:
            for number, item in zip(count(), self._source, strict=False):
                taken, image, about = _timed(number, item)
                due = max(due, time.perf_counter() if taken is None else taken)
                self.wait(lambda: self.closed, min(max(0.0, due - time.perf_counter()), threading.TIMEOUT_MAX))
                if self.closed:
                    return
                self.frame = Frame(number, due if taken is None else taken, image, self._channels, about)
                self.frames = number + 1
                self.wake()
                due += self._period
        except Exception as error:  # whoever asks for a frame is told
            self._failure = error
        finally:
            self._source = None  # a device is released, for the next who opens it
            self.ended = True
            self.wake()


def _timed(number: int, item: Any) -> tuple[float | None, Any, Any]:
    """What a source gives for a frame, with its time (None: it names none) and what it says about it; ImageError for
    another tuple, and for times of another clock."""
    if not isinstance(item, tuple):
        return None, item, None
    taken, image, about = (*item, None)[:3] if len(item) in (2, 3) else (math.nan, None, None)
    taken, now = None if taken is None else as_float(taken), time.perf_counter()
    if taken is not None and not -math.inf < taken < now + _MOST_AHEAD_SECONDS:
        raise ImageError(
            f"frame {number} of the source is {shown(item)}: expected an image, (seconds, image) or (seconds, image, "
            f"about), in seconds of time.perf_counter(), which is {now:.1f} now"
        )
    return taken, image, about


def _opened(source: int | str | Path) -> tuple[Any, float | None]:
    """OpenCV's capture of a source, and the rate of a file; MissingDependencyError without
    OpenCV, ImageError where it cannot open it."""
    try:
        import cv2
    except ImportError as error:
        raise MissingDependencyError(
            f"the source {source!r} is opened by OpenCV, which is not installed: install opencv-python-headless, or "
            "give an iterable of images"
        ) from error
    name = str(source)
    is_device, is_file = isinstance(source, int) or name.startswith("/dev/video"), Path(name).is_file()
    backend = cv2.CAP_V4L2 if is_device and sys.platform == "linux" else cv2.CAP_ANY
    backend = cv2.CAP_GSTREAMER if " ! " in name else backend
    capture = cv2.VideoCapture(source if isinstance(source, int) else name, backend)
    if not capture.isOpened():
        raise ImageError(
            f"OpenCV cannot open {name!r}: expected a camera that nobody else uses, a video that it can decode, or a "
            "pipeline that ends in appsink (cv2.getBuildInformation() says whether it was built with GStreamer)"
        )
    capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # else frames wait there
    rate = capture.get(cv2.CAP_PROP_FPS) if is_file else 0.0
    return capture, rate if rate > 0 else None


def _captured(capture: Any) -> Iterator[Any]:
    """The frames of a capture [H, W, 3] uint8 in OpenCV's order, to the end."""
    try:
        while (read := capture.read())[0]:
            yield read[1]
    finally:
        capture.release()
