"""The embeddings that each token has for all layers (Gemma 4): rows that the host looks up in the checkpoint's file,
since the table is as large as all other weights together, and a step needs one row a token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm.engines.backends.base import Backend
from edgellm.engines.checkpoints.checkpoint import Checkpoint, converted
from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.tensors import STORAGE
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import token_table
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.row_steps import TOKEN_ROWS
from edgellm.engines.runners.captured_steps import HostStage, Stages
from edgellm.kernels.arrays import Array, leading

#: Packed rows that are dequantized at a time: what a processor's cache has room for.
_TOGETHER = 16


class TokenRows:
    """Looks rows up in the table of a checkpoint, which may be closed afterwards, and brings them to the one place from
    which every engine reads those of its step: steps run one after the other. It does nothing for a model without."""

    def __init__(self, backend: Backend, config: DecoderConfig, checkpoint: Checkpoint, tokens: int) -> None:
        """Steps have up to so many `tokens`, of all sequences together. Raises CheckpointError where the table is
        missing or of another shape."""
        self._backend, self._size, self._count = backend, config.token_row_size, config.vocab_size
        self._media, self._padding = [kind.token_id for kind in config.media.values()], config.padding_id
        self._rows = backend.zeros((tokens * self._size,), "compute")
        for spec in token_table(config):
            self._info, self._packed = checkpoint.part_infos(*spec.parts[0])[0], checkpoint.reader(*spec.parts[0])
            if self._packed is None and self._info.shape != spec.shape:
                raise CheckpointError(
                    f"{self._info.file}: tensor {spec.name!r} is {self._info.dtype} {list(self._info.shape)}, expected "
                    f"{list(spec.shape)}. Take config.json and weights of one and the same model"
                )
            if self._packed is None:
                self._read = checkpoint.row_reader(spec.name)

    def of(self, token_ids: np.ndarray) -> np.ndarray:
        """The rows [.., size] of tokens in the backend's compute dtype (bfloat16 as its bits), those of media the row
        of the padding id, zeros for ids that are none, as -1. Raises CheckpointError for a value that has no place in
        it."""
        ids = token_ids.reshape(-1).tolist()  # few: a step waits for them, and each call of NumPy takes a microsecond
        known = [0 <= token < self._count for token in ids]
        shown = [self._padding if token in self._media else token for token in ids]
        rows = self._values(np.array([token if is_known else 0 for token, is_known in zip(shown, known, strict=True)]))
        if not all(known):
            rows[np.logical_not(known)] = 0
        return rows.reshape(*token_ids.shape, self._size)

    def _values(self, ids: np.ndarray) -> np.ndarray:
        """A copy of the rows [n, size] of ids [n]."""
        dtype, packed = self._backend.compute_dtype, self._packed
        if packed is None:
            return converted(self._info, self._read(ids).view(STORAGE[self._info.dtype]), dtype)
        rows = np.empty((len(ids), self._size), STORAGE[dtype])
        for first in range(0, len(ids), _TOGETHER):
            part = packed(ids[first : first + _TOGETHER]).unpacked()
            rows[first : first + _TOGETHER] = converted(self._info, part.values(), dtype, "float32")
        return rows

    def bring(self, token_ids: np.ndarray) -> None:
        """Bring the rows of the next step's tokens [B, T], in order with the other work."""
        if self._size:
            self._backend.upload(self._place(*token_ids.shape), self.of(token_ids))

    def stages(self, token_ids: Array, before: Callable[[], None] | None = None) -> Stages:
        """What brings those of tokens [B, T] on the device: a step whose tokens were drawn there, or a tree that was
        laid out there, waits for the host to know them. Meanwhile the device does what can be done `before`."""
        if before is None:
            return {"token rows": HostStage(self._follow, token_ids)} if self._size else {}
        asked = HostStage(self._ask, token_ids)
        return {"asked for tokens": asked, "before token rows": before, "token rows": HostStage(self._answer)}

    def bound(self, shape: EngineShape) -> dict[str, Array]:
        """What engines of a shape are bound to: the input `TOKEN_ROWS` [B, T, size]."""
        return {TOKEN_ROWS: self._place(shape.batch, shape.tokens)} if self._size else {}

    def _place(self, batch: int, tokens: int) -> Array:
        return leading(self._rows, (batch, tokens, self._size))

    def _follow(self, token_ids: Array) -> None:
        self._ask(token_ids)
        self._answer()

    def _ask(self, token_ids: Array) -> None:
        self._asked = self._backend.read(token_ids)

    def _answer(self) -> None:
        self.bring(self._asked.wait())
