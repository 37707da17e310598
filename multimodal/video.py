"""Videos as a vision encoder takes them, sampled and preprocessed as published processors do it.

A video is frames with their times. As many as the encoder sees together (`temporal_patch_size`, 2 in Qwen's) are a
part, which is encoded by itself as an image is; where the last part lacks frames, the last one is repeated.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image

from edgellm.engines.errors import ImageError
from edgellm.engines.formats.digests import hash_bytes
from edgellm.engines.model.vision import VisionConfig
from edgellm.multimodal.image_input import SOURCE_PIXELS, Channels, ImageSource, read_image
from edgellm.multimodal.image_layout import ImageLayout, Size
from edgellm.multimodal.image_processor import SmartResizeProcessor, check_aspect_ratio
from edgellm.multimodal.prepared_image import PreparedImage, PreparedParts, image_digest
from edgellm.multimodal.processor_config import read_video_config
from edgellm.multimodal.sources import bytes_of

#: A path, the bytes of a file, or frames with their times in seconds.
VideoSource = str | Path | bytes | Sequence[tuple[float, ImageSource]]
#: Containers that hold what they show: playlists and the like name files and addresses, which nobody asked for.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,gif,flv,ogg"
#: What a file may have before it is decoded: pixels of all frames, 20 minutes of 1920 x 1080 at 30 a second.
_DECODED_PIXELS = 36_000 * 1920 * 1080


@dataclass(frozen=True, eq=False)
class PreparedVideo(PreparedParts):
    """A video for a vision encoder: `tiles` are its parts in time, `seconds` the mean of the times of the first and the
    last frame of each, `interval` how many seconds there are from one part to the next."""

    seconds: tuple[float, ...]
    interval: float
    kind: ClassVar[str] = "video"

    @property
    def digest(self) -> str:
        """The SHA-256 of its parts' digests and their times."""
        return hash_bytes(f"{[part.digest for part in self.tiles]} {self.seconds} {self.interval}".encode())


class _Clip(NamedTuple):
    """Frames [H, W, 3] uint8 as they are read, the `times` of these in seconds, and how many there are a second."""

    frames: Iterator[np.ndarray]
    times: Sequence[float]
    rate: float


@dataclass(frozen=True)
class VideoProcessor:
    """How one model wants its videos: `frames` says how each frame is resized and cut.

    Of a file `rate` frames a second are taken, evenly, `fewest` to `most` of them, all frames where there are fewer.
    The bounds on pixels of `frames` are those of one frame or, of Qwen3-VL's kind (`bounds_all`), of all together; a
    frame has `max_patches` patches at most.
    """

    frames: SmartResizeProcessor
    bounds_all: bool
    rate: float
    fewest: int
    most: int
    max_patches: int

    @classmethod
    def open(cls, directory: Path, vision: VisionConfig, max_patches: int) -> VideoProcessor:
        """The processor that `directory` describes. Raises CheckpointError and UnsupportedModelError."""
        default = "Qwen2VLVideoProcessor" if vision.family == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
        config = read_video_config(directory, default)
        frames = SmartResizeProcessor.open(config, vision, None)
        counts = config.count("min_frames"), config.count("max_frames")
        return cls(frames, config.kind.bounds_all, config.positive("fps"), *counts, max_patches)

    def prepare(self, source: VideoSource, channels: Channels = "RGB", most_tokens: int = 1 << 31) -> PreparedVideo:
        """Prepare a video: a file, which the package av decodes, or frames, pairs (seconds, image) of which all are
        taken, each image as `read_image` takes it, arrays with their `channels`.

        Raises ImageError for what is no video, is damaged, or has more tokens than `most_tokens`.
        """
        clip, merge = self._clip(source, channels), self.frames.merge_size
        first = next(clip.frames, None)
        if first is None:
            raise ImageError("the video has no frames that can be decoded: expected at least one")
        height, width = first.shape[:2]
        count, together = len(clip.times), self.frames.temporal_patch_size
        sizes = self.frames.patch_size, merge, together
        layout = ImageLayout(self.size(count, height, width), self.frames.resample, self.frames.normalization, *sizes)
        tokens = layout.patches // merge**2
        if (whole := -(-count // together) * tokens) > most_tokens:
            raise ImageError(
                f"the video is {whole} tokens, {tokens} for each {together} of {count} frames: the context holds "
                f"{most_tokens}. Show fewer or smaller frames, or build with a larger --kv-capacity"
            )
        parts, pending = [], [first]
        while pending:
            pending += islice(clip.frames, together - len(pending))
            if (other := next((frame.shape for frame in pending if frame.shape != first.shape), None)) is not None:
                raise ImageError(
                    f"a frame of the video has {other[1]} x {other[0]} pixels, the first one {width} x {height}: "
                    "expected as many in all"
                )
            pixels = np.stack([*pending, *pending[-1:] * (together - len(pending))])
            digest = image_digest(pixels, layout)
            if count * height * width > SOURCE_PIXELS:  # else resized where they are not known by their digest
                images = map(Image.fromarray, pixels)
                resized = [np.asarray(each.resize(layout.resized[::-1], layout.resample)) for each in images]
                pixels = np.stack(resized)
            parts.append(PreparedImage(pixels, (pixels.shape[1], pixels.shape[2]), layout, tokens, digest))
            pending = list(islice(clip.frames, 1))
        last = len(clip.times) - 1
        ends = [(place, min(place + together - 1, last)) for place in range(0, len(parts) * together, together)]
        seconds = tuple((clip.times[begin] + clip.times[end]) / 2 for begin, end in ends)
        held = sum(part.held_pixels for part in parts)
        return PreparedVideo(tuple(parts), held, seconds, together / clip.rate)

    def size(self, count: int, height: int, width: int) -> Size:
        """Height and width of each of `count` frames after resizing: by the published processors' `smart_resize`, then
        within `max_patches`. Raises ImageError."""
        frames = self.frames
        size = self._size_of_all(count, height, width) if self.bounds_all else frames.resized_size(height, width)
        bounded = replace(frames, min_pixels=0, max_pixels=self.max_patches * frames.patch_size**2)
        return bounded.resized_size(*size)

    def places(self, total: int, rate: float) -> np.ndarray:
        """Which of a file's `total` frames are taken, `rate` a second, in ascending order: by `sample_frames` of the
        published processors."""
        wanted, together = total / rate * self.rate, self.frames.temporal_patch_size
        if self.bounds_all:
            count = min(max(int(wanted), self.fewest), self.most, total)
            return np.linspace(0, total - 1, count).round().astype(np.int64)
        most = min(self.most, total) // together * together
        count = int(min(max(wanted, self.fewest), most)) // together * together
        return np.arange(0, total, total / max(count, 1)).astype(np.float32).astype(np.int64)

    def _size_of_all(self, count: int, height: int, width: int) -> Size:
        check_aspect_ratio(height, width)
        frames, together = self.frames, self.frames.temporal_patch_size
        side, count = frames.patch_size * frames.merge_size, max(count, together)
        if min(height, width) < side:
            growth = max(side / height, side / width)
            height, width = int(height * growth), int(width * growth)
        rows, columns = round(height / side), round(width / side)
        pixels = round(count / together) * together * rows * columns * side**2
        if pixels > frames.max_pixels:
            shrinking = math.sqrt(count * height * width / frames.max_pixels)
            rows, columns = (max(1, math.floor(edge / shrinking / side)) for edge in (height, width))
        elif pixels < frames.min_pixels:
            growth = math.sqrt(frames.min_pixels / (count * height * width))
            rows, columns = (math.ceil(edge * growth / side) for edge in (height, width))
        return rows * side, columns * side

    def _clip(self, source: Any, channels: Channels) -> _Clip:
        if (found := bytes_of(source, "video")) is not None:
            return self._decoded(*found)
        pairs = isinstance(source, (list, tuple)) and all(
            isinstance(each, (list, tuple)) and len(each) == 2 and isinstance(each[0], Real) and math.isfinite(each[0])
            for each in source
        )
        if not pairs or not source:
            raise ImageError(
                f"a video is {'empty' if pairs else 'a ' + type(source).__name__}: expected a path, the "
                "bytes of a file, or a list of frames with their times, pairs (seconds, image)"
            )
        times = [float(seconds) for seconds, _ in source]
        if times[0] < 0 or sorted(times) != times:
            raise ImageError("the times of the video's frames are not in order: expected seconds from 0 on, ascending")
        rate = (len(times) - 1) / (times[-1] - times[0]) if times[-1] > times[0] else math.inf
        return _Clip((read_image(image, channels=channels) for _, image in source), times, rate)

    def _decoded(self, data: bytes, what: str) -> _Clip:
        """The frames that are taken of a file. Their times are those of its mean rate, as published."""
        try:
            import av
        except ImportError as error:
            raise ImageError(
                f"{what} is a file, which the package av decodes (pip install av): install it, or give frames with "
                "their times, pairs (seconds, image)"
            ) from error
        try:
            with _opened(av, data) as container:
                stream = container.streams.video[0]
                rate = float(stream.average_rate or stream.guessed_rate or 24)
                total = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
                pixels = total * stream.width * stream.height
        except Exception as error:  # whatever hostile bytes make a decoder raise
            raise ImageError(f"{what} is no video that av reads, or it is damaged: {error}") from error
        if not 0 < pixels <= _DECODED_PIXELS or stream.width * stream.height > SOURCE_PIXELS:
            raise ImageError(
                f"{what} has {total} frames of {stream.width} x {stream.height} pixels: expected some, {SOURCE_PIXELS} "
                f"pixels in one and {_DECODED_PIXELS} in all at most. Cut it, or save it smaller"
            )
        places = self.places(total, rate).tolist()
        taken = _frames(av, data, places, what)
        return _Clip(taken, [place / rate for place in places], len(places) / total * rate)


def _opened(av: Any, data: bytes) -> Any:
    return av.open(io.BytesIO(data), options={"format_whitelist": _CONTAINERS, "protocol_whitelist": "none"})


def _frames(av: Any, data: bytes, places: Sequence[int], what: str) -> Iterator[np.ndarray]:
    """The frames [H, W, 3] uint8 at these places of a file; fewer where it has not as many as it says."""
    wanted = set(places)
    try:
        with _opened(av, data) as container:
            for place, frame in enumerate(islice(container.decode(video=0), places[-1] + 1)):
                if place in wanted:
                    yield frame.to_ndarray(format="rgb24")
    except Exception as error:
        raise ImageError(f"{what} is damaged: {error}. Save or send it again") from error
