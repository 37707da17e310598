"""The images of one prompt: where their tokens stand, what stands there instead of embeddings, and at which positions.

M-RoPE (Wang et al. 2024, Qwen2-VL; Bai et al. 2025, Qwen2.5-VL) gives every token three positions: time, height, width.
Those of text are equal and go on from the largest before it; an image's tokens count its rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgellm.engines.errors import EngineError
from edgellm.engines.model.config import DecoderConfig
from edgellm.kernels.arrays import Array

#: A token as the KV rows see it: its id, or for a token of an image the image's digest and the token's place in it.
TokenIdentity = int | tuple[str, int]


@dataclass(frozen=True, eq=False)
class ImageEmbeddings:
    """What the language model takes of one image.

    `rows` [M, H] compute stand for its M tokens; `deepstack` are [M, H] compute each, added at these tokens after the
    first layers. `digest` names the content, `grid` are (frames, height, width) in patches.
    """

    rows: Array
    deepstack: tuple[Array, ...]
    digest: str
    grid: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return sum(array.nbytes for array in (self.rows, *self.deepstack))


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a prompt of N tokens, in order; made by `place_images`.

    `spans` are (first token, tokens) of each of the `images`.
    `positions` [3, N] int32 are the M-RoPE positions of the whole prompt, None for a model without M-RoPE.
    """

    image_token_id: int
    spans: tuple[tuple[int, int], ...]
    images: tuple[ImageEmbeddings, ...]
    positions: np.ndarray | None

    @property
    def digests(self) -> tuple[str, ...]:
        """The digest of each image."""
        return tuple(image.digest for image in self.images)

    @property
    def position_delta(self) -> int:
        """Position less row of every token after the prompt."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - self.positions.shape[1]

    def within(self, first: int, stop: int) -> list[tuple[int, int, int]]:
        """What of the images stands at the prompt's tokens first..stop - 1: for each image that has any there (index of
        the image, its first row there, rows there)."""
        parts = []
        for index, (start, count) in enumerate(self.spans):
            begin, end = max(first, start), min(stop, start + count)
            if begin < end:
                parts.append((index, begin - start, end - begin))
        return parts

    def last_seen(self, first: int, stop: int) -> np.ndarray:
        """Which token is the last that each of first..stop - 1 sees, where a token of an image sees all of it: [n]
        int32, in the prompt's numbers."""
        seen = np.arange(first, stop, dtype=np.int32)
        for index, row, count in self.within(first, stop):
            start, tokens = self.spans[index]
            begin = start + row - first
            seen[begin : begin + count] = start + tokens - 1
        return seen

    def inside(self, place: int) -> int | None:
        """Which image the place lies in, so that a token of it is before and one behind; None for no image."""
        found = (index for index, (start, count) in enumerate(self.spans) if start < place < start + count)
        return next(found, None)

    def check(self, prompt_ids: np.ndarray) -> None:
        """Raise EngineError unless `prompt_ids` [N] have image tokens where the images are, and nowhere else."""
        found = np.flatnonzero(prompt_ids == self.image_token_id)
        expected = np.concatenate([np.arange(start, start + count) for start, count in self.spans] or [found[:0]])
        if not np.array_equal(found, expected):
            raise EngineError(
                f"the prompt has {len(found)} image tokens (id {self.image_token_id}) and {len(self.spans)} images "
                f"with {len(expected)}, or has them elsewhere: place the images for this very prompt"
            )
        if self.positions is not None and self.positions.shape != (3, len(prompt_ids)):
            raise EngineError(
                f"the prompt of {len(prompt_ids)} tokens has positions {self.positions.shape}: place the images for "
                "this very prompt"
            )

    def followed_by(self, tokens: int) -> PromptImages:
        """The images of the prompt with so many tokens of text behind it, which go on with its positions."""
        if self.positions is None or not tokens:
            return self
        following = np.arange(tokens, dtype=np.int32) + (self.positions.shape[1] + self.position_delta)
        return replace(self, positions=np.concatenate([self.positions, np.tile(following, (3, 1))], axis=1))

    def identities(self, token_ids: Sequence[int]) -> list[TokenIdentity]:
        """The tokens of a text that begins with the prompt, as KV rows see them: an image's tokens are told by its
        content, for all images have the same token id."""
        identities: list[TokenIdentity] = list(token_ids)
        for (start, count), digest in zip(self.spans, self.digests, strict=True):
            identities[start : start + count] = [(digest, index) for index in range(count)]
        return identities


def place_images(
    prompt_ids: Sequence[int], images: Sequence[ImageEmbeddings], image_token_id: int, config: DecoderConfig
) -> PromptImages:
    """Give the image tokens of a prompt [N] to its images, in order.

    `config` is the language model's. Raises EngineError where tokens and images do not match: other numbers of them, or
    an image's tokens that do not follow one another; and for images that another model's vision part made.
    """
    counts = [image.rows.shape[0] for image in images]
    found = np.flatnonzero(np.asarray(prompt_ids) == image_token_id)
    if len(found) != sum(counts):
        needed = f"{len(counts)} images with {sum(counts)} tokens" if counts else "no images"
        raise EngineError(
            f"the prompt has {len(found)} image tokens (id {image_token_id}), but there are {needed}: put one image "
            "marker into the prompt for each image, where it belongs"
        )
    spans: list[tuple[int, int]] = []
    place = 0
    for index, (image, count) in enumerate(zip(images, counts, strict=True)):
        start = int(found[place])
        if found[place + count - 1] != start + count - 1:
            raise EngineError(
                f"the {count} tokens of image {index + 1} are interrupted: the prompt has another token among them"
            )
        expected = [(count, config.hidden_size)] * (1 + config.deepstack_layers)
        shapes = [tuple(array.shape) for array in (image.rows, *image.deepstack)]
        if shapes != expected:
            raise EngineError(
                f"the embeddings of image {index + 1} have the shapes {shapes}, this language model takes {expected}: "
                "the vision part must be that of the same model"
            )
        if config.image_tokens and count != config.image_tokens:
            raise EngineError(
                f"image {index + 1} has {count} tokens, this language model takes images of {config.image_tokens}: the "
                "vision part must be that of the same model"
            )
        if config.image_tokens and spans and sum(spans[-1]) == start:
            raise EngineError(
                f"the images {index} and {index + 1} follow each other without a token between them: the model would "
                "take them for one. Put the tokens around them that the model's processor writes"
            )
        spans.append((start, count))
        place += count
    positions = None
    if config.mrope_section:
        grids = [image.grid for image in images]
        positions, _ = mrope_positions(len(prompt_ids), spans, grids, config.spatial_merge_size)
    return PromptImages(image_token_id, tuple(spans), tuple(images), positions)


def before_image(tokens: Sequence[TokenIdentity], place: int) -> int:
    """The `place` in a text, or the beginning of the image that it lies in, so that a token of it is before and one
    behind."""
    token = tokens[place] if place < len(tokens) else 0
    return place - token[1] if isinstance(token, tuple) else place


def mrope_positions(
    tokens: int, spans: Sequence[tuple[int, int]], grids: Sequence[tuple[int, int, int]], merge_size: int
) -> tuple[np.ndarray, int]:
    """M-RoPE positions [3, N] int32 of a prompt of N `tokens`, and the difference of position and row after it.

    `spans` are (first token, tokens) of each image, `grids` its patches in time, height and width; `merge_size` x
    `merge_size` patches make a token. As in transformers' `get_rope_index`, the tokens of an image stand at the next
    position plus their indices in time, height and width, and the text after it goes on after the longer side. Raises
    EngineError where a grid does not have as many tokens as its span.
    """
    positions = np.empty((3, tokens), np.int32)
    place = following = 0
    for (start, count), (time, height, width) in zip(spans, grids, strict=True):
        merged = time, height // merge_size, width // merge_size
        if math.prod(merged) != count:
            raise EngineError(f"an image of {count} tokens has a grid of {merged} tokens: expected as many")
        positions[:, place:start] = np.arange(following, following + start - place)
        following += start - place
        positions[:, start : start + count] = np.indices(merged).reshape(3, -1) + following
        following += max(merged[1:])
        place = start + count
    positions[:, place:] = np.arange(following, following + tokens - place)
    return positions, int(positions.max()) + 1 - tokens
