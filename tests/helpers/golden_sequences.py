"""Runs golden models on NumPy, as tests of families and of packed weights compare them with transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors import safe_open

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.families import decoder_config
from edgellm.engines.model.decoder import EMBEDDING, decoder_program, decoder_weights, unread_tensors
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.rotary import rotary_table
from edgellm.engines.model.row_steps import TOKEN_ROWS
from edgellm.engines.runners.token_rows import TokenRows


class Sequences:
    """B sequences and their states, run chunk by chunk; positions and masks are written out one by one.

    With KV rows of int8 they compute in float64, as the NumPy backend does. A window's ring has `window_rows`: none
    more than a prompt of all tokens needs.
    """

    def __init__(
        self,
        directory: Path,
        batch: int = 1,
        rows: int | None = None,
        kv_cache: str = "compute",
        window_rows: int | None = None,
    ) -> None:
        with Checkpoint.open(directory) as checkpoint:
            self.config = decoder_config(checkpoint.config, checkpoint.generation_config)
            specs = decoder_weights(self.config)
            checkpoint.check(specs, unread_tensors(self.config))
            self.weights = load_numpy_weights(checkpoint, specs)
            backend: Any = SimpleNamespace(compute_dtype="float32", zeros=lambda shape, dtype: None)
            self.token_rows = TokenRows(backend, self.config, checkpoint, 0)
        self.batch, self.kv_cache = batch, kv_cache
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
        states = decoder_program(self.config, self.shape("prefill", batch, 1, self.rows)).states
        dtypes = {"compute": np.float32, "float32": np.float32, "int8": np.int8}
        self.caches = {name: np.zeros(shape, dtypes[dtype]) for name, (shape, dtype) in states.items()}

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
        if self.config.is_recurrent:
            bindings["state_tokens"] = (token_ids >= 0).sum(axis=1, dtype=np.int32)
        if self.config.token_row_size:
            bindings[TOKEN_ROWS] = self.token_rows.of(token_ids)
        for layer in range(self.config.deepstack_layers):  # without images
            bindings[f"deepstack_features_{layer}"] = np.zeros_like(bindings["inputs_embeds"])
        shape = self.shape("prefill", batch, tokens, key_range)
        config = replace(self.config, feature_layers=feature_layers)
        self.compute(decoder_program(config, shape), bindings)
        return bindings

    def shape(self, phase: str, batch: int, tokens: int, key_range: int) -> EngineShape:
        """An engine that gives logits of every token."""
        own = {"kv_cache": self.kv_cache, "window_rows": self.window_rows}
        return EngineShape(phase, batch, tokens, key_range, self.rows, selected=tokens, **own)

    def compute(self, program: Program, bindings: dict[str, np.ndarray]) -> None:
        """Run a program on what is bound."""
        ProgramGraph(NumpyOperations(bindings, self.weights, self.kv_cache == "int8"), program).run()

    def logits(self, token_ids: np.ndarray, starts: list[int], key_range: int | None = None) -> np.ndarray:
        """Logits [B, T, V] of every token."""
        return self.run(token_ids, starts, key_range)["logits"]
