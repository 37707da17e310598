"""The embeddings that each token has for all layers (Gemma 4): rows that the host looks up in the checkpoint's mapped
file, since the table is as large as all other weights together, and a step needs one row a token.

A step's rows are there before it is launched, so its tokens must be known on the host: what draws them, and what lays a
tree out, is waited for. Captured steps read the rows from where they are always brought.
"""

from __future__ import annotations

import numpy as np

from edgellm.engines.backends.base import Backend
from edgellm.engines.checkpoints.checkpoint import Checkpoint, converted
from edgellm.engines.errors import CheckpointError
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import token_table
from edgellm.kernels.arrays import Array


class TokenRows:
    """Looks rows up in the table of a checkpoint, which may be closed afterwards. Of a model without one the `size` of
    rows is 0, and nobody asks for any."""

    def __init__(self, backend: Backend, config: DecoderConfig, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError where the table is missing, packed, or of another shape."""
        self._backend, self.size, self._table = backend, config.token_row_size, np.empty((0, 0), np.float32)
        for spec in token_table(config):
            self._info = checkpoint.info(spec.name)
            if checkpoint.layout(spec.name, spec.shape) is not None or self._info.shape != spec.shape:
                raise CheckpointError(
                    f"{self._info.file}: tensor {spec.name!r} is {self._info.dtype} {list(self._info.shape)}, expected "
                    f"{list(spec.shape)}, not packed. Take config.json and weights of one and the same model"
                )
            self._table = checkpoint.raw(spec.name)

    def of(self, token_ids: np.ndarray) -> np.ndarray:
        """The rows [.., size] of tokens in the backend's compute dtype (bfloat16 as its bits), zeros for padding (-1).
        Raises CheckpointError for a value that has no place in it."""
        rows = self._table[np.maximum(token_ids, 0)]
        rows[token_ids < 0] = 0
        return converted(self._info, rows, self._backend.compute_dtype)

    def bring(self, target: Array, token_ids: np.ndarray) -> None:
        """Set `target` [B, T, size] to the rows of tokens [B, T], in order with the other work."""
        self._backend.upload(target, self.of(token_ids))

    def follow(self, target: Array, token_ids: Array) -> None:
        """The same of tokens on the device, for which everything enqueued before is waited for."""
        self.bring(target, self._backend.read(token_ids).wait())
