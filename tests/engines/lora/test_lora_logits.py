"""Every family with adapters against what PEFT computed, alone and several adapters in one batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import golden_folder, largest_difference
from safetensors.numpy import load_file

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.families import decoder_config
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.model.adapted_projections import SCALES, adapted_projections
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import EMBEDDING, decoder_program, decoder_weights
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.rotary import rotary_table

BASES = golden_folder("decoder")
GOLDENS = golden_folder("lora")
NAMES = sorted(path.name for path in GOLDENS.iterdir() if (BASES / path.name.split(".")[0]).is_dir())
TOLERANCE = 1e-4
RANK = 16


class Adapted:
    """A golden model with adapters, run without a runner: positions and masks are written out one by one."""

    def __init__(self, base: str, adapters: list[str], batch: int = 2, **changed: Any) -> None:
        with Checkpoint.open(BASES / base) as checkpoint:
            config = decoder_config(checkpoint.config, checkpoint.generation_config)
            self.config: DecoderConfig = replace(config, **changed)
            self.weights = load_numpy_weights(checkpoint, decoder_weights(self.config))
        expected = load_file(BASES / base / "expected.safetensors")
        self.token_ids, self.without = expected["token_ids"], expected["logits"]
        self.adapters = [LoraAdapter.read(GOLDENS / name, self.config) for name in adapters]
        self.expected = [load_file(GOLDENS / name / "expected.safetensors")["logits"] for name in adapters]
        self.batch, self.rows = batch, 40
        states = decoder_program(self.config, self._shape(1)).states
        self.caches = {name: np.zeros(shape, np.float32) for name, (shape, _) in states.items()}
        for each in adapted_projections(decoder_weights(self.config)):
            packed = [each.pack(adapter.pairs, RANK) for adapter in self.adapters]
            for index, (name, edge) in enumerate(each.edge(len(adapters), RANK)):
                self.weights[name] = np.concatenate([pair[index] for pair in packed])
                assert self.weights[name].shape == edge

    def _shape(self, tokens: int) -> EngineShape:
        shape = EngineShape("prefill", self.batch, tokens, self.rows, self.rows, selected=tokens)
        window_rows = 0 if self.config.window is None else self.rows  # more than its window and the longest chunk
        return replace(shape, window_rows=window_rows, lora_slots=len(self.adapters), lora_rank=RANK)

    def logits(self, token_ids: np.ndarray, start: int, chosen: list[int | None]) -> np.ndarray:
        """[B, T, V] with the adapter of index `chosen` in each sequence (None: without)."""
        batch, tokens = token_ids.shape
        table = rotary_table(self.config, self.rows, context=self.token_ids.shape[1])
        scales = np.zeros((batch, len(self.adapters)), np.float32)
        for sequence, index in enumerate(chosen):
            if index is not None:
                scales[sequence, index] = 1
        bindings = {
            "inputs_embeds": self.weights[EMBEDDING][token_ids],
            "rope_rotary_cos_sin": np.stack([table[start : start + tokens]] * batch),
            "attention_mask": np.stack([np.tri(tokens, self.rows, start, dtype=bool)[None]] * batch),
            "kvcache_start_index": np.full(batch, start, np.int32),
            SCALES: scales,
            **self.caches,
        }
        if self.config.is_recurrent:
            bindings["state_tokens"] = np.full(batch, tokens, np.int32)
        program = decoder_program(self.config, self._shape(tokens))
        ProgramGraph(NumpyOperations(bindings, self.weights), program).run()
        return bindings["logits"]


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert largest_difference(found, expected) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_peft(name: str) -> None:
    model = Adapted(name.split(".")[0], [name])
    assert np.nanmax(np.abs(model.expected[0] - model.without)) > 1
    assert_close(model.logits(model.token_ids, 0, [0, 0]), model.expected[0])


def test_adapters_reach_projections_in_several_products() -> None:
    """As a checkpoint has them that packs some of what the delta rule projects."""
    name = "qwen3_5_text_narrow.all_linear"
    model = Adapted(name.split(".")[0], [name], delta_products=(0, 0, 1, 1))
    assert any("ba_proj" in each for each in model.weights)
    assert_close(model.logits(model.token_ids, 0, [0, 0]), model.expected[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_then_single_tokens(name: str) -> None:
    model = Adapted(name.split(".")[0], [name], batch=1)
    found = [model.logits(model.token_ids[:1, :9], 0, [0])]
    length = model.token_ids.shape[1]
    found += [model.logits(model.token_ids[:1, row : row + 1], row, [0]) for row in range(9, length)]
    assert_close(np.concatenate(found, axis=1), model.expected[0][:1])


def test_several_adapters_in_one_batch() -> None:
    names = [name for name in NAMES if name.startswith("llama_untied.")]
    model = Adapted("llama_untied", names, batch=5)
    assert len(names) == 3
    chosen = [2, None, 0, 1, 2]
    token_ids = model.token_ids[[0, 1, 0, 1, 1]]
    expected = np.stack(
        [
            (model.without if index is None else model.expected[index])[row]
            for row, index in zip([0, 1, 0, 1, 1], chosen, strict=True)
        ]
    )
    assert_close(model.logits(token_ids[:, :10], 0, chosen), expected[:, :10])
    for row in range(10, 24):
        assert_close(model.logits(token_ids[:, row : row + 1], row, chosen), expected[:, row : row + 1])


def test_a_sequence_without_adapter_is_computed_as_without_adapters() -> None:
    model = Adapted("qwen2", ["qwen2.patterns"])
    found = model.logits(model.token_ids, 0, [0, None])
    alone = Adapted("qwen2", ["qwen2.patterns"])
    unadapted = alone.logits(model.token_ids, 0, [None, None])
    np.testing.assert_array_equal(found[1], unadapted[1])
    assert_close(unadapted, model.without)
    assert np.abs(found[0] - unadapted[0]).max() > 1
