"""Runs golden models on NumPy, as tests of families and of packed weights compare them with transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import safe_open

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.families import decoder_config
from edgellm.engines.model.config import EngineShape
from edgellm.engines.model.decoder import EMBEDDING, decoder_program, decoder_weights
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.rotary import rotary_table


class Sequences:
    """B sequences and their KV caches, run chunk by chunk; positions and masks are written out one by one."""

    def __init__(self, directory: Path, batch: int = 1, rows: int | None = None, window_rows: int | None = None) -> None:
        """`rows` of context; `window_rows` of a window's ring: none more than a prompt of all tokens needs."""
        with Checkpoint.open(directory) as checkpoint:
            self.config = decoder_config(checkpoint.config, checkpoint.generation_config)
            specs = decoder_weights(self.config)
            checkpoint.check(specs)
            self.weights = load_numpy_weights(checkpoint, specs)
        self.batch = batch
        with safe_open(directory / "expected.safetensors", "np") as file:
            self.token_ids, self.expected = file.get_tensor("token_ids"), file.get_tensor("logits")
            self.metadata = file.metadata()
            assert {"torch", "transformers"} <= set(self.metadata)
        length, window = self.token_ids.shape[1], self.config.window
        self.rows = length + 16 if rows is None else rows
        self.window_rows = 0
        if window is not None and window < length:
            self.window_rows = window + length - 1 if window_rows is None else window_rows
        self.table = rotary_table(self.config, self.rows, context=length)
        states = decoder_program(self.config, self._shape(batch, 1, self.rows)).states
        self.caches = {name: np.zeros(shape, np.float32) for name, (shape, _) in states.items()}

    def _shape(self, batch: int, tokens: int, key_range: int) -> EngineShape:
        return EngineShape("prefill", batch, tokens, key_range, self.rows, tokens, window_rows=self.window_rows)

    def run(
        self, token_ids: np.ndarray, starts: list[int], key_range: int | None = None, feature_layers: tuple = ()
    ) -> dict[str, np.ndarray]:
        """All outputs for `token_ids` [B, T], whose first stand at `starts`; id -1 is padding."""
        batch, tokens = token_ids.shape
        key_range = key_range or self.rows
        embeds = self.weights[EMBEDDING][np.maximum(token_ids, 0)]
        embeds[token_ids < 0] = 0
        cos_sin = np.zeros((batch, tokens, self.config.rotary_columns), np.float32)
        mask = np.zeros((batch, 1, tokens, key_range), bool)
        for b in range(batch):
            for t in range(tokens):
                row = starts[b] + t
                cos_sin[b, t] = self.table[min(row, len(self.table) - 1)]
                for j in range(key_range):
                    mask[b, 0, t, j] = j <= row
        bindings = {
            "inputs_embeds": embeds.astype(np.float32),
            "rope_rotary_cos_sin": cos_sin,
            "attention_mask": mask,
            "kvcache_start_index": np.asarray(starts, np.int32),
            **self.caches,
        }
        for layer in range(self.config.deepstack_layers):  # without images
            bindings[f"deepstack_features_{layer}"] = np.zeros_like(bindings["inputs_embeds"])
        shape = self._shape(batch, tokens, key_range)
        config = replace(self.config, feature_layers=feature_layers)
        ProgramGraph(NumpyOperations(bindings, self.weights), decoder_program(config, shape)).run()
        return bindings

    def logits(self, token_ids: np.ndarray, starts: list[int], key_range: int | None = None) -> np.ndarray:
        """Logits [B, T, V] of every token."""
        return self.run(token_ids, starts, key_range)["logits"]
