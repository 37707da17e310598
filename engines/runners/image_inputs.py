"""Brings the images of a prompt to the inputs of prefill engines, chunk by chunk.

An image may begin in one chunk and end in another, or in rows that are reused: what of it belongs to a chunk follows
from the chunk's place in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edgellm.engines.backends.base import Backend, Readback, uploaded
from edgellm.engines.errors import EngineError
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.rotary import mrope_axes
from edgellm.engines.runners.prompt_images import PromptImages
from edgellm.kernels.arrays import Array, leading


class ImageRows:
    """Puts rows of images in the place of embeddings, and compares how many the device took with how many there are."""

    def __init__(self, backend: Backend, slots: int) -> None:
        self._backend = backend
        self._inserted = backend.zeros((slots,), "int32")
        self._expected = [0] * slots

    def insert(
        self,
        slot: int,
        images: PromptImages,
        rows: Sequence[Array],
        chunk: tuple[int, int],
        token_ids: Array,
        target: Array,
    ) -> None:
        """Set the rows of `target` [1, T, H] that stand for image tokens.

        `rows` has [M, H] of each image, `chunk` (first, stop) says which of the prompt's tokens `token_ids` [1, T] are;
        padding follows them.
        """
        before = 0
        for index, row, count in images.within(*chunk):
            self._backend.image_kernels.insert_image_rows(
                rows[index],
                token_ids,
                target,
                self._inserted[slot : slot + 1],
                images.image_token_id,
                row - before,
            )
            before += count
            self._expected[slot] += count

    def checked(self, slot: int, tokens: Readback) -> Readback:
        """`tokens`, which raise EngineError if the device has inserted other rows for the slot than there are."""
        inserted, expected = self._backend.read(self._inserted), self._expected[slot]

        def difference() -> int:
            missing = expected - int(inserted.wait()[slot])
            self._expected[slot] -= missing  # it is counted on from what the device has
            return missing

        return _CheckedTokens(tokens, difference)


class _CheckedTokens:
    """See `ImageRows.checked`."""

    def __init__(self, tokens: Readback, difference: Callable[[], int]) -> None:
        self._tokens, self._difference = tokens, difference

    def wait(self) -> np.ndarray:
        values, missing = self._tokens.wait(), self._difference()
        if missing:
            raise EngineError(
                f"{missing} image rows of the prompt did not reach their tokens: the embeddings of its images are not "
                "those that its places were counted for"
            )
        return values


class MRopeRows:
    """Rotary rows of prompt tokens that have three positions, for one model."""

    def __init__(self, backend: Backend, config: DecoderConfig, limits: EngineLimits, rotary_table: Array) -> None:
        self._backend, self._table = backend, rotary_table
        self._axes = uploaded(backend, mrope_axes(config))
        self._positions = backend.zeros((3 * limits.prefill_chunk,), "int32")

    def write(self, positions: np.ndarray, first: int, count: int, rope_rotary_cos_sin: Array) -> None:
        """Set the first `count` of `rope_rotary_cos_sin` [1, T, R]: those of prompt tokens `first`.., of a prompt whose
        tokens stand at `positions` [3, N]."""
        tokens = rope_rotary_cos_sin.shape[1]
        padded = np.zeros((3, tokens), np.int32)
        padded[:, :count] = positions[:, first : first + count]
        chunk = leading(self._positions, (3, tokens))
        self._backend.upload(chunk, padded)
        self._backend.image_kernels.mrope_rotary_rows(chunk, self._axes, self._table, rope_rotary_cos_sin)


class DeepstackInputs:
    """What prefill engines add to the outputs of their first layers: features of images at their tokens, else zeros."""

    def __init__(self, backend: Backend, config: DecoderConfig, limits: EngineLimits) -> None:
        self._backend, self._hidden = backend, config.hidden_size
        size = limits.prefill_chunk * config.hidden_size
        self._buffers = [backend.zeros((size,), "compute") for _ in range(config.deepstack_layers)]
        self._zeros = backend.zeros((size,), "compute") if self._buffers else None
        self._holds_features = False

    def inputs(self, shape: EngineShape) -> dict[str, Array]:
        """The inputs of an engine by name; none of another phase than prefill."""
        if shape.phase != "prefill":
            return {}
        size = (1, shape.tokens, self._hidden)
        return {f"deepstack_features_{index}": leading(buffer, size) for index, buffer in enumerate(self._buffers)}

    def fill(
        self, rows: ImageRows, slot: int, images: PromptImages | None, chunk: tuple[int, int], token_ids: Array
    ) -> None:
        """Set the inputs for a chunk of a prompt, as `ImageRows.insert` takes it."""
        if self._holds_features and self._zeros is not None:
            for buffer in self._buffers:
                self._backend.copy(buffer, self._zeros)
        if images is None or not (self._buffers and images.within(*chunk)):
            self._holds_features = False
            return
        self._holds_features = True
        for index, buffer in enumerate(self._buffers):
            features = [layers[index] for layers in images.deepstack]
            target = leading(buffer, (*token_ids.shape, self._hidden))
            rows.insert(slot, images, features, chunk, token_ids, target)


class ImageInputs:
    """The images of prompts among the inputs of one model's prefill engines, base or draft.

    `rows` puts their rows in the place of embeddings; None: the model embeds image tokens as it does any other.
    """

    def __init__(
        self,
        backend: Backend,
        config: DecoderConfig,
        limits: EngineLimits,
        rotary_table: Array,
        rows: ImageRows | None = None,
    ) -> None:
        self.rows = rows
        self._image_token_id = config.image_token_id
        self._positions = MRopeRows(backend, config, limits, rotary_table) if config.mrope_section else None
        self._deepstack = DeepstackInputs(backend, config, limits)

    def check(self, prompt_ids: np.ndarray, images: PromptImages | None) -> None:
        """Raise EngineError unless `images` stand where the prompt [N] has image tokens."""
        if images is not None:
            images.check(prompt_ids)
        elif self._image_token_id is not None and (prompt_ids == self._image_token_id).any():
            raise EngineError(
                f"the prompt has image tokens (id {self._image_token_id}), but no images: give one for each marker"
            )

    def engine_inputs(self, shape: EngineShape) -> dict[str, Array]:
        """What an engine is bound to for images alone."""
        return self._deepstack.inputs(shape)

    def write(
        self,
        slot: int,
        images: PromptImages | None,
        row: int,
        tokens: tuple[int, int],
        token_ids: Array,
        inputs: Mapping[str, Array],
    ) -> None:
        """Complete the `inputs` of a chunk, which hold embeddings and plain rotary rows.

        The chunk's `token_ids` [1, T] are the prompt's `tokens` (first, stop) and padding; they go to rows `row`.. of
        the KV caches, and so to the positions of these rows.
        """
        if self.rows is not None:
            self._deepstack.fill(self.rows, slot, images, tokens, token_ids)
        if images is None:
            return
        if self.rows is not None:
            self.rows.insert(slot, images, images.rows, tokens, token_ids, inputs["inputs_embeds"])
        if self._positions is not None and images.positions is not None:
            count = tokens[1] - tokens[0]
            self._positions.write(images.positions, row, count, inputs["rope_rotary_cos_sin"])
