"""Reads how a model's images are preprocessed from its `preprocessor_config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families.decoders import class_defaults
from edgellm.engines.formats.strict_formats import JSONObject, as_json, is_integer, is_number, is_whole
from edgellm.multimodal.image_layout import Normalization

PREPROCESSOR_FILE = "preprocessor_config.json"
#: Where newer releases of transformers write the same fields, under the key "image_processor".
PROCESSOR_FILE = "processor_config.json"
#: The same of videos; where it is missing, what the file of images says counts.
VIDEO_FILE = "video_preprocessor_config.json"
_IMAGES = (PREPROCESSOR_FILE, None), (PROCESSOR_FILE, "image_processor")


class ProcessorKind(NamedTuple):
    """How the published processors of a kind cut an image, by the name of their class.

    It is of any size, in whole tokens (`keeps_shape`), or one square of the encoder's size, with colour around it where
    the kind `pads_to_square` and the file says so. Under the key `tokens_key` the file may say how many tokens it is.
    With a `longest_edge` it fits that, and a token stands behind each row of its own in prompts. Images of the encoder
    `cut`, which has a rule in `cut_rules.py`, are tiles and the whole, or one of them; with `channels_last` a patch has
    the channels of each pixel side by side. Values are `centred` where the encoder makes 2 x - 1 of what the file has
    of them, from 0 to 1. Of a video `size` may bound the pixels of all frames together (`bounds_all`).
    """

    name: str
    keeps_shape: bool = False
    pads_to_square: bool = False
    tokens_key: str = ""
    longest_edge: bool = False
    cut: str = ""
    channels_last: bool = False
    centred: bool = False
    bounds_all: bool = False


_TABLE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("processors.json").read_text("utf-8"))
#: By their name without a suffix.
PROCESSOR_KINDS, VIDEO_KINDS = (
    {name: ProcessorKind(name, **own) for name, own in _TABLE[what].items()} for what in ("images", "videos")
)
#: The class of the extractor of sounds' features, by the family of the encoder.
EXTRACTORS: dict[str, str] = _TABLE["sounds"]
_RESAMPLING_FILTERS = range(6)  # Pillow's numbers


@dataclass(frozen=True)
class ProcessorConfig:
    """The fields of a `preprocessor_config.json`, completed by its kind's defaults."""

    path: Path
    kind: ProcessorKind
    values: Mapping[str, Any]

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise CheckpointError for what the file says of `key`."""
        raise CheckpointError(
            f"{self.path}: {key} is {as_json(self.values.get(key))}, expected {expected}. "
            "Take the file as it was published with the weights."
        )

    def unsupported(self, key: str, supported: str) -> NoReturn:
        """Raise UnsupportedModelError for what the file says of `key`."""
        raise UnsupportedModelError(f"{self.path}: {key} is {as_json(self.values.get(key))}, supported is {supported}")

    def switch(self, key: str) -> bool:
        """true or false."""
        value = self.values.get(key)
        return value if isinstance(value, bool) else self.refuse(key, "true or false")

    def count(self, key: str) -> int:
        """A whole number above 0."""
        value = self.values.get(key)
        return value if is_whole(value, 1) else self.refuse(key, "a whole number above 0")

    def agree(self, **sizes: int) -> None:
        """Raise CheckpointError where the file does not say so of the `sizes`, by their names, which are the
        encoder's."""
        for key, size in sizes.items():
            if self.count(key) != size:
                self.refuse(key, f"{size}, as config.json has it of the vision encoder")

    def positive(self, key: str) -> float:
        """A number above 0."""
        value = self.values.get(key)
        return float(value) if is_number(value) and value > 0 else self.refuse(key, "a number above 0")

    def single(self, key: str, name: str) -> int:
        """The size that `key` holds under this name, and no other."""
        (size,) = self._sizes(key, name) or self.refuse(key, name)
        return size

    def resample(self) -> int:
        """Pillow's number of the resampling filter."""
        value = self.values.get("resample")
        if is_integer(value) and value in _RESAMPLING_FILTERS:
            return value
        self.refuse("resample", "0 to 5, a resampling filter of Pillow")

    def pair(self, key: str, first: str, second: str) -> tuple[int, int] | None:
        """The two sizes that `key` holds if it has both names and no other (others that are null do not count)."""
        sizes = self._sizes(key, first, second)
        return None if sizes is None else (sizes[0], sizes[1])

    def edge(self, key: str, name: str) -> int | None:
        """The size that `key` holds if it is that of the `name`, the shortest or longest edge, or a number alone."""
        if is_integer(self.values.get(key)):
            return self.count(key)
        (size,) = self._sizes(key, name) or (None,)
        return size

    def _sizes(self, key: str, *names: str) -> list[int] | None:
        value = self.values.get(key)
        if not isinstance(value, dict):
            return None
        given = {name: size for name, size in value.items() if size is not None}
        if set(given) != set(names):
            return None
        if not all(is_whole(size, 1) for size in given.values()):
            self.refuse(key, "whole numbers above 0")
        return [given[name] for name in names]

    def normalization(self) -> Normalization:
        """What happens to the values of the pixels."""
        factor = None
        if self.switch("do_rescale"):
            factor = self.positive("rescale_factor")
        if not self.switch("do_normalize"):
            half = (0.5, 0.5, 0.5) if self.kind.centred else None
            return Normalization(factor, half, half)
        if self.kind.centred:
            self.unsupported("do_normalize", "false: the encoder has the mean and the deviation in it")
        mean, deviation = (self._channels(key) for key in ("image_mean", "image_std"))
        if min(deviation) <= 0:
            self.refuse("image_std", "numbers above 0")
        return Normalization(factor, mean, deviation)

    def _channels(self, key: str) -> tuple[float, float, float]:
        value = self.values.get(key)
        listed = [value] * 3 if is_number(value) else value
        if not isinstance(listed, list) or len(listed) != 3 or not all(is_number(item) for item in listed):
            self.refuse(key, "three numbers, one for each channel")
        red, green, blue = map(float, listed)
        return red, green, blue


def read_processor_config(directory: Path) -> ProcessorConfig:
    """What the model in `directory` says of its images.

    Raises CheckpointError for a file that is missing or malformed, UnsupportedModelError for a processor of a kind that
    is not implemented.
    """
    path, values = processor_values(directory, _IMAGES)
    named = values.get("image_processor_type") or values.get("feature_extractor_type")
    name = str(named).removesuffix("Fast").removesuffix("Pil")
    kind = PROCESSOR_KINDS.get(_TABLE["alike"].get(name, name))
    if kind is None:
        raise UnsupportedModelError(
            f"{path}: image_processor_type is {as_json(named)}, supported are {', '.join(PROCESSOR_KINDS)}"
        )
    return _completed(path, kind, values)


def read_video_config(directory: Path, default: str) -> ProcessorConfig:
    """What the model in `directory` says of its videos, where it does not say it, of its images; of the kind `default`
    where neither names one. Raises as `read_processor_config` does."""
    path, values = processor_values(directory, ((PROCESSOR_FILE, "video_processor"), (VIDEO_FILE, None), *_IMAGES))
    name = values.get("video_processor_type") or default
    kind = VIDEO_KINDS.get(str(name))
    if kind is None:
        raise UnsupportedModelError(
            f"{path}: video_processor_type is {as_json(name)}, supported are {', '.join(VIDEO_KINDS)}"
        )
    config = _completed(path, kind, values)
    if config.values.get("cap_pixels_per_frame"):
        config.unsupported("cap_pixels_per_frame", "false")
    return config


def _completed(path: Path, kind: ProcessorKind, values: Mapping[str, Any]) -> ProcessorConfig:
    given = {key: value for key, value in values.items() if value is not None}
    config = ProcessorConfig(path, kind, class_defaults(kind.name) | given)
    if not config.switch("do_resize"):
        config.unsupported("do_resize", "true: images come in every size")
    return config


def processor_values(
    directory: Path, places: Sequence[tuple[str, str | None]], what: str = "images"
) -> tuple[Path, dict[str, Any]]:
    """The first file of `places` that is there, and has something at the key (None: as a whole), and what that says of
    `what`. Raises CheckpointError where there is none, and where it is no object."""
    advice = "Copy it from where the model was published."
    for name, key in places:
        path = directory / name
        if path.exists():
            values = JSONObject.read(path, CheckpointError, f"It says how {what} become input. {advice}").values
            inner = values if key is None else values.get(key)
            if isinstance(inner, dict):
                return path, inner
            if inner is not None:
                raise CheckpointError(f"{path}: {key} is {as_json(inner)}, expected an object")
    raise CheckpointError(f"{directory / PREPROCESSOR_FILE} is missing: it says how {what} become input. {advice}")
