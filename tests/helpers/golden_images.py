"""The golden models that take images, and what transformers computed with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from golden_files import golden_folder, largest_difference
from golden_vision import GoldenImage
from safetensors import safe_open

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.families import decoder_config
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.media import MediaEmbeddings, PromptMedia, place_media

FOLDER = golden_folder("image_prompts")
#: Those whose images see themselves, and the others.
WHOLE_IMAGES = sorted(path.name for path in FOLDER.iterdir() if path.name.startswith("gemma3"))
#: Those whose prompts see themselves.
WHOLE_PROMPTS = ("paligemma", "paligemma2")
NAMES = sorted(
    path.name for path in FOLDER.iterdir() if path.is_dir() and path.name not in (*WHOLE_IMAGES, *WHOLE_PROMPTS)
)
TOLERANCE = 1e-4
#: Of the largest logit. Processors sum in other orders, and the delta rule makes most of it: 1.4e-5 without AVX-512.
RELATIVE = 2e-5


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """No logit is farther from the expected one than float32's rounding explains."""
    assert largest_difference(found, expected) <= RELATIVE * np.abs(found).max()


class GoldenModel:
    """One folder: `config`, `token_ids` [T], `images`, their places in the prompt, and the expected tensors by name."""

    def __init__(self, name: str) -> None:
        self.path = FOLDER / name
        with Checkpoint.open(self.path) as checkpoint:
            self.config = decoder_config(checkpoint.config, checkpoint.generation_config)
            checkpoint.check(decoder_weights(self.config))
        with safe_open(self.path / "expected.safetensors", "np") as file:
            self.expected = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dictionary
        self.token_ids = self.expected["token_ids"].tolist()
        grids = self.expected["grids"].tolist()
        self.images = [self._image(index, tuple(grid)) for index, grid in enumerate(grids)]

    def _image(self, index: int, grid: tuple[int, int, int]) -> MediaEmbeddings:
        features = [self.expected[f"image{index}.deepstack{layer}"] for layer in range(self.config.deepstack_layers)]
        rows = self.expected[f"image{index}.rows"]
        if self.config.image_tokens:  # what the language model multiplies is divided before
            rows = rows / np.float32(self.config.embedding_scale)
        return MediaEmbeddings(rows, tuple(features), f"image {index}", grid, runs_of(self.config.family, grid))

    def placed(self) -> PromptMedia:
        """The images in the prompt."""
        return place_media(self.token_ids, {self.config.media["image"]: self.images}, self.config)

    def placed_before(self, stop: int) -> PromptMedia:
        """What of the images stands before the token `stop`, which may be in the middle of one."""
        whole = self.placed()
        spans = []
        for span, _, count in whole.within(0, stop):
            layers = tuple(layer[:count] for layer in span.embeddings.deepstack)
            seen = replace(span.embeddings, rows=span.embeddings.rows[:count], deepstack=layers)
            spans.append(replace(span, places=span.places[:count], embeddings=seen))
        return PromptMedia(tuple(spans), None if whole.positions is None else whole.positions[:, :stop])

    def runner(self, limits: EngineLimits) -> BaseEngineRunner:
        """The language model on NumPy."""
        with Checkpoint.open(self.path) as checkpoint:
            return BaseEngineRunner(NumpyBackend(self.config), self.config, limits, checkpoint)

    def assert_continued(self, runner: BaseEngineRunner, slot: int = 0) -> None:
        """Decode steps of the slots up to this one give the expected logits behind the prompt that it has."""
        for token, expected in zip(self.expected["continued"], self.expected["continued_logits"], strict=True):
            runner.force_token(slot, int(token))
            runner.decode(slot + 1).wait()
            assert_close(runner.logits(slot), expected)


def runs_of(family: str, grid: tuple[int, int, int]) -> tuple[int, ...]:
    """Mistral 3's tokens follow each other in rows of the picture, each of two patches."""
    return (grid[2] // 2,) * (grid[1] // 2) if family == "mistral3" else ()


def prepared_images(golden: GoldenModel) -> list[GoldenImage]:
    """The patches of each image, as a processor would have made them."""
    pixels, images, first = golden.expected["pixel_values"].astype(np.float32), [], 0
    for index, grid in enumerate(golden.expected["grids"].tolist()):
        if pixels.ndim == 4:  # whole pictures: rows and columns of patches, each channel by channel
            _, channels, height, width = pixels.shape
            rows, columns = grid[1:]
            cut = pixels[index].reshape(channels, rows, height // rows, columns, width // columns)
            patches = cut.transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
        else:
            count = int(np.prod(grid))
            patches = pixels[first : first + count]
            first += count
        tokens = golden.expected[f"image{index}.rows"].shape[0]
        made = GoldenImage(np.ascontiguousarray(patches), tuple(grid), tokens, f"image {index}", patches, ())
        images.append(replace(made, runs=runs_of(golden.config.family, made.grid)))
    return images
