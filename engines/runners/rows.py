"""The states of a slot that arrive while steps run, and the buffers that the steps share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from edgellm.engines.backends.base import Backend, Transfer
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.runners.captured_steps import LoadedEngines
from edgellm.engines.runners.token_rows import TokenRows
from edgellm.kernels.arrays import Array, leading
from edgellm.kernels.sampling.contract import StepInputs

#: Copies that are begun before anything else is enqueued, and for each one that is waited for: the host's time for
#: launching must not be the bus's time for waiting.
_FIRST, _NEXT = 2, 3


class ArrivingRows:
    """Copies that begin one after the other as `rows` is read: names, each with its `Backend.upload_rows_beside`.

    They end in this order. Not thread-safe.
    """

    def __init__(self, backend: Backend, rows: Iterable[tuple[str, Transfer]]) -> None:
        """Begins the first of them; raises what reading `rows` does."""
        self._backend, self._rows = backend, iter(rows)
        self._begun: dict[str, Transfer] = {}
        self._latest: Transfer | None = None
        self._begin(_FIRST)

    def wait_for(self, name: str) -> None:
        """Let what is enqueued from now on wait for the rows of this name, and all before them."""
        while name not in self._begun:
            if not self._begin(1):
                raise KeyError(name)
        self._backend.wait_for(self._begun[name])
        self._begin(_NEXT)

    def wait_for_all(self) -> None:
        """Let what is enqueued from now on wait for everything."""
        while self._begin(_FIRST):
            pass
        if self._latest is not None:
            self._backend.wait_for(self._latest)

    def _begin(self, count: int) -> int:
        """Begin some more; how many there were."""
        for number in range(count):
            found = next(self._rows, None)
            if found is None:
                return number
            self._begun[found[0]] = self._latest = found[1]
        return count


class StepBuffers:
    """Buffers for steps of some tokens of all sequences together, and prefills of up to `limits.prefill_chunk` tokens.

    A prefill's own inputs are `prefill_ids` [C] int32, the row of its first token `prefill_start` [1] int32, the place
    of its last one `last_token_ids` [1, 1] int32, `state_tokens` [1] int32, how many there are, and where tokens of
    images look ahead `last_seen` [C] int32.
    """

    def __init__(
        self,
        backend: Backend,
        config: DecoderConfig,
        limits: EngineLimits,
        engines: LoadedEngines,
        tokens: int,
        model: str = "base",
    ) -> None:
        """`engines` are those of the steps, of up to so many `tokens`, of the `model` "base" or "draft"."""
        self._backend, self._config, self._engines = backend, config, engines
        rows, keys = max(tokens, limits.prefill_chunk), limits.key_ranges if model == "base" else limits.tree_key_ranges
        self._feature_size = len(config.feature_layers) * config.hidden_size
        self._features = backend.zeros((rows * self._feature_size,), "compute")
        self._embeds = backend.zeros((rows * config.hidden_size,), "compute")
        self._cos_sin = backend.zeros((rows * config.rotary_columns,), "compute")
        self._mask = backend.zeros((engines.mask_size(model, rows, max(keys)),), "bool")
        self.prefill_ids = backend.zeros((limits.prefill_chunk,), "int32")
        self.prefill_start = backend.zeros((1,), "int32")
        self.last_token_ids = backend.zeros((1, 1), "int32")
        self.state_tokens = backend.zeros((1,), "int32")
        self.last_seen = backend.zeros((limits.prefill_chunk if config.image_tokens else 1,), "int32")

    def upload_prompt(self, ids: np.ndarray, start: int, tokens: int, rows: TokenRows | None = None) -> Array:
        """The `ids` [n] of a prefill whose first row is `start`, padded to [1, tokens], on the device, with their own
        `rows`, where they have such."""
        padded = np.full((1, tokens), -1, np.int32)
        padded[0, : len(ids)] = ids
        token_ids = leading(self.prefill_ids, (1, tokens))
        self._backend.upload(token_ids, padded)
        if rows is not None:
            rows.bring(padded)
        self._backend.upload(self.prefill_start, np.asarray([start], np.int32))
        return token_ids

    def inputs(self, shape: EngineShape, start: Array) -> StepInputs:
        """The inputs that `prepare_step` fills; the new rows begin at `start` [B] int32. A mask that the shape's engine
        does not read has no keys."""
        batch, tokens, config = shape.batch, shape.tokens, self._config
        keys = shape.key_range if self._engines.reads_mask(shape) else 0
        return StepInputs(
            leading(self._embeds, (batch, tokens, config.hidden_size)),
            leading(self._cos_sin, (batch, tokens, config.rotary_columns)),
            leading(self._mask, (batch, 1, tokens, keys)),
            start,
        )

    def outputs(self, shape: EngineShape) -> dict[str, Array]:
        """The features that engines give out; nothing for a base model without a draft."""
        return {"hidden_states": self.features(shape.batch, shape.tokens)} if self._feature_size else {}

    def features(self, batch: int, tokens: int) -> Array:
        """The engines' output `hidden_states` [B, T, F]; F is 0 for a base model without a draft."""
        return leading(self._features, (batch, tokens, self._feature_size))

    def row_features(self, row: int) -> Array:
        """The features [1, 1, F] of one row of the latest prefill."""
        size = self._feature_size
        return self._features[row * size : (row + 1) * size].reshape(1, 1, size)


def bound_inputs(inputs: StepInputs) -> dict[str, Array]:
    """What an engine is bound to, by name: all but a mask that it does not read."""
    return {name: array for name, array in inputs._asdict().items() if name != "attention_mask" or array.size}
