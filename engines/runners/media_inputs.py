"""Brings the media of a prompt to the inputs of prefill engines, chunk by chunk.

A span may begin in one chunk and end in another, or in rows that are reused: what of it belongs to a chunk follows
from the chunk's place in the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edgellm.engines.backends.base import Backend, Readback, uploaded
from edgellm.engines.errors import EngineError
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import most_tokens
from edgellm.engines.model.rotary import mrope_axes
from edgellm.engines.model.row_steps import SOUND_ROWS
from edgellm.engines.runners.media import MediaSpan, PromptMedia
from edgellm.kernels.arrays import Array, leading


class MediaRows:
    """Puts rows of media in the place of embeddings, and compares how many the device took with how many there are."""

    def __init__(self, backend: Backend, slots: int) -> None:
        self._backend = backend
        self._inserted = backend.zeros((slots,), "int32")
        self._expected = [0] * slots

    def insert(
        self,
        slot: int,
        parts: Sequence[tuple[MediaSpan, int, int]],
        rows: Sequence[Array],
        token_ids: Array,
        target: Array,
    ) -> None:
        """Set the rows of `target` [1, T, H] that stand for media.

        `parts` is what of the media the chunk `token_ids` [1, T] has (`PromptMedia.within`), and `rows` all that the
        encoder made for each of these spans, [M, H]; padding follows the chunk's tokens.
        """
        before: Counter[int] = Counter()  # the kernel counts the tokens of one id
        inserted = self._inserted[slot : slot + 1]
        for (span, row, count), each in zip(parts, rows, strict=True):
            token = span.kind.token_id
            self._backend.image_kernels.insert_image_rows(each, token_ids, target, inserted, token, row - before[token])
            before[token] += count
            self._expected[slot] += count

    def checked(self, slot: int, read: Callable[[], Readback]) -> Readback:
        """The tokens that are `read` behind the count of inserted rows; where it is not as expected: EngineError."""
        inserted, expected = self._backend.read(self._inserted), self._expected[slot]
        return _CheckedTokens(read(), lambda: self.check(slot, int(inserted.wait()[slot]), expected))

    def check(self, slot: int, inserted: int, expected: int) -> None:
        """Raise EngineError if other rows were inserted for the slot than were expected."""
        missing = expected - inserted
        self._expected[slot] -= missing  # it is counted on from what the device has
        if missing:
            raise EngineError(
                f"{missing} rows of the prompt's media did not reach their tokens: their embeddings are not those that "
                "its places were counted for"
            )


class _CheckedTokens(NamedTuple):
    """See `MediaRows.checked`."""

    tokens: Readback
    check: Callable[[], None]

    def wait(self) -> np.ndarray:
        values = self.tokens.wait()
        self.check()
        return values


class MediaInputs:
    """The media of prompts among the inputs of one model's prefill engines, base or draft.

    `rows` puts their rows in the place of embeddings; None: the model embeds their tokens as it does any other. To the
    outputs of the first layers engines add features of media at their tokens, else zeros (deepstack), to embeddings the
    rows of the sound that a slot hears, if the model adds sound.
    """

    def __init__(
        self,
        backend: Backend,
        config: DecoderConfig,
        limits: EngineLimits,
        rotary_table: Array,
        rows: MediaRows | None = None,
    ) -> None:
        self._backend, self._config, self._rotary_table, self.rows = backend, config, rotary_table, rows
        size = limits.prefill_chunk * config.hidden_size
        self._deepstack = [backend.zeros((size,), "compute") for _ in range(config.deepstack_layers)]
        self._zeros = backend.zeros((size,), "compute") if self._deepstack else None
        self._holds_features = False
        #: What each slot hears: the rows [N, H] that belong to its first N tokens, in equal parts but for the last.
        self._heard: list[list[Array]] = [[]] * limits.max_batch
        if config.adds_sound:
            size = most_tokens(limits) * config.hidden_size
            self._sound, self._silence = (backend.zeros((size,), "compute") for _ in range(2))
        if config.mrope_section:
            self._axes = uploaded(backend, mrope_axes(config))
            self._positions = backend.zeros((3 * limits.prefill_chunk,), "int32")

    def check(self, prompt_ids: np.ndarray, media: PromptMedia | None) -> None:
        """Raise EngineError unless `media` stand where the prompt [N] has tokens for them."""
        given = set() if media is None else {span.kind.token_id for span in media.spans}
        if media is not None:
            media.check(prompt_ids)
        if self._config.adds_sound:
            return
        for name, token, *_ in self._config.media.values():
            if token not in given and (prompt_ids == token).any():
                raise EngineError(
                    f"the prompt has {name} tokens (id {token}), but no {name}s: give one for each marker"
                )

    def engine_inputs(self, shape: EngineShape) -> dict[str, Array]:
        """What an engine is bound to for media alone, by name; of another phase than prefill nothing but sound."""
        if self._config.adds_sound:
            return self._sound_rows(self._sound, shape)
        if shape.phase != "prefill":
            return {}
        size = (1, shape.tokens, self._config.hidden_size)
        return {f"deepstack_features_{index}": leading(buffer, size) for index, buffer in enumerate(self._deepstack)}

    def write(
        self,
        slot: int,
        media: PromptMedia | None,
        row: int,
        tokens: tuple[int, int],
        token_ids: Array,
        inputs: Mapping[str, Array],
    ) -> None:
        """Complete the `inputs` of a chunk, which hold embeddings and plain rotary rows.

        The chunk's `token_ids` [1, T] are the prompt's `tokens` (first, stop) and padding; they go to rows `row`.. of
        the KV caches, and so to the positions of these rows.
        """
        if self._holds_features and self._zeros is not None:
            for buffer in self._deepstack:
                self._backend.copy(buffer, self._zeros)
            self._holds_features = False
        if self._config.adds_sound:
            self.bring_sound(0, slot, *tokens)
        if media is None:
            return
        if self.rows is not None and (parts := media.within(*tokens)):
            rows = [span.embeddings.rows for span, _, _ in parts]
            self.rows.insert(slot, parts, rows, token_ids, inputs["inputs_embeds"])
            for index, buffer in enumerate(self._deepstack):
                target = leading(buffer, (*token_ids.shape, self._config.hidden_size))
                rows = [span.embeddings.deepstack[index] for span, _, _ in parts]
                self.rows.insert(slot, parts, rows, token_ids, target)
            self._holds_features = bool(self._deepstack)
        if self._config.mrope_section and media.positions is not None:
            self._write_positions(media.positions[:, row : row + tokens[1] - tokens[0]], inputs["rope_rotary_cos_sin"])

    def silence(self, shape: EngineShape) -> dict[str, Array]:
        """What an engine is bound to for a text that hears nothing; nothing where the model adds no sound."""
        return self._sound_rows(self._silence, shape) if self._config.adds_sound else {}

    def _sound_rows(self, rows: Array, shape: EngineShape) -> dict[str, Array]:
        return {SOUND_ROWS: leading(rows, (shape.batch, shape.tokens, self._config.hidden_size))}

    def hear(self, slot: int, media: PromptMedia | None) -> None:
        """Let a slot hear what is added to the embeddings of its text, or nothing."""
        self._heard[slot] = [] if media is None else [each.rows for each in media.added]

    def move(self, source: int, target: int) -> None:
        """Let a slot hear what another one heard."""
        self._heard[target], self._heard[source] = self._heard[source], []

    def bring_sound(self, place: int, slot: int, first: int, stop: int) -> None:
        """Put the rows of what a slot hears at its tokens first..stop - 1 to those of a step's inputs from `place` on;
        zeros where there are no such."""
        width, parts = self._config.hidden_size, self._heard[slot]
        size = parts[0].shape[0] if parts else 1
        target = self._sound[place * width : (place + stop - first) * width]
        for number in range(first // size, min(-(-stop // size), len(parts))):
            begun = number * size
            rows = parts[number][max(0, first - begun) : stop - begun].reshape(-1)
            self._backend.copy(target[: rows.size], rows)
            target = target[rows.size :]
        if target.size:
            self._backend.copy(target, self._silence[: target.size])

    def _write_positions(self, positions: np.ndarray, rope_rotary_cos_sin: Array) -> None:
        """Set the first n of `rope_rotary_cos_sin` [1, T, R] to those of tokens at the M-RoPE `positions` [3, n]."""
        tokens = rope_rotary_cos_sin.shape[1]
        padded = np.zeros((3, tokens), np.int32)
        padded[:, : positions.shape[1]] = positions
        chunk = leading(self._positions, (3, tokens))
        self._backend.upload(chunk, padded)
        self._backend.image_kernels.mrope_rotary_rows(chunk, self._axes, self._rotary_table, rope_rotary_cos_sin)
