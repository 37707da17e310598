"""What engines of the base model are fed with, and their features: memory that the engines of all shapes share."""

from __future__ import annotations

from edgellm.engines.backends.base import Backend
from edgellm.engines.model.config import DecoderConfig, EngineLimits, EngineShape
from edgellm.kernels.arrays import Array, leading


class StepBuffers:
    """Buffers for steps of up to `limits.max_batch` sequences and prefills of up to `limits.prefill_chunk` tokens.

    `mask` [n] bool is the memory of all masks. A prefill's own inputs are `prefill_ids` [C] int32, the row of its first
    token `prefill_start` [1] int32, and the place of its last one `last_token_ids` [1, 1] int32.
    """

    def __init__(self, backend: Backend, config: DecoderConfig, limits: EngineLimits) -> None:
        self._config = config
        rows = max(limits.max_batch, limits.prefill_chunk)
        self._feature_size = len(config.feature_layers) * config.hidden_size
        self._features = backend.zeros((rows * self._feature_size,), "compute")
        self._embeds = backend.zeros((rows * config.hidden_size,), "compute")
        self._cos_sin = backend.zeros((rows * config.rotary_dim,), "compute")
        self.mask = backend.zeros((rows * max(limits.key_ranges),), "bool")
        self.prefill_ids = backend.zeros((limits.prefill_chunk,), "int32")
        self.prefill_start = backend.zeros((1,), "int32")
        self.last_token_ids = backend.zeros((1, 1), "int32")

    def inputs(self, shape: EngineShape, start: Array) -> dict[str, Array]:
        """The inputs that embedding lookup and `prepare_attention` fill; the new rows begin at `start` [B] int32."""
        batch, tokens, config = shape.batch, shape.tokens, self._config
        inputs = {
            "inputs_embeds": leading(self._embeds, (batch, tokens, config.hidden_size)),
            "rope_rotary_cos_sin": leading(self._cos_sin, (batch, tokens, config.rotary_dim)),
            "attention_mask": leading(self.mask, (batch, 1, tokens, shape.key_range)),
            "kvcache_start_index": start,
        }
        if shape.selected < tokens:
            inputs["last_token_ids"] = self.last_token_ids
        return inputs

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
