"""Every family against what transformers computed: whole prompts, every prefix, chunks, batches, padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import golden_folder, largest_difference
from golden_sequences import Sequences

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.model.config import Mixture
from edgellm.engines.model.decoder import decoder_program
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.rotary import rotary_table
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.sampling_state import SamplingValues

GOLDENS = golden_folder("decoder")
NAMES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())
TOLERANCE = 1e-4
LFM2_MOE = Mixture(6, 2, 16, "sigmoid", True, True, 1e-6, 1.5, (0,))


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """Within 1e-4, on logits whose standard deviation is above 1."""
    assert found.dtype == np.float32
    assert largest_difference(found, expected) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str) -> None:
    sequences = Sequences(GOLDENS / name, batch=2)
    assert np.nanstd(sequences.expected) > 1
    assert_close(sequences.logits(sequences.token_ids, [0, 0]), sequences.expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_prefix_then_single_tokens(name: str) -> None:
    sequences = Sequences(GOLDENS / name)
    token_ids, expected = sequences.token_ids[:1], sequences.expected[:1]
    length = token_ids.shape[1]
    for prefix in range(1, length):
        for cache in sequences.caches.values():
            cache[...] = 0
        assert_close(sequences.logits(token_ids[:, :prefix], [0]), expected[:, :prefix])
        for row in range(prefix, min(prefix + 3, length)):
            found = sequences.logits(token_ids[:, row : row + 1], [row], key_range=row + 1)
            assert_close(found, expected[:, row : row + 1])


@pytest.mark.parametrize("name", NAMES)
def test_chunks_equal_the_whole(name: str) -> None:
    sequences, chunk = Sequences(GOLDENS / name), 5
    token_ids = sequences.token_ids[:1]
    found = [
        sequences.logits(token_ids[:, start : start + chunk], [start]) for start in range(0, token_ids.shape[1], chunk)
    ]
    assert_close(np.concatenate(found, axis=1), sequences.expected[:1])


@pytest.mark.parametrize("name", ["llama_untied", "qwen2_yarn", "qwen3_biases_bfloat16"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_sequences_of_different_lengths_in_one_batch(name: str, tokens: int) -> None:
    starts = [3, 17, 9]
    sequences = Sequences(GOLDENS / name, batch=len(starts))
    rows = [0, 1, 0]
    for slot, (row, start) in enumerate(zip(rows, starts, strict=True)):
        alone = Sequences(GOLDENS / name)
        alone.logits(sequences.token_ids[row : row + 1, :start], [0])
        for cache_name, cache in alone.caches.items():
            sequences.caches[cache_name][slot] = cache[0]
    windows = [slice(start, start + tokens) for start in starts]
    token_ids = np.stack([sequences.token_ids[row, window] for row, window in zip(rows, windows, strict=True)])
    expected = np.stack([sequences.expected[row, window] for row, window in zip(rows, windows, strict=True)])
    assert_close(sequences.logits(token_ids, starts), expected)


@pytest.mark.parametrize("name", ["llama_biases_head_dim_10", "qwen3"])
def test_padding_changes_nothing(name: str) -> None:
    sequences, padded = Sequences(GOLDENS / name), Sequences(GOLDENS / name)
    token_ids = sequences.token_ids[:1]
    sequences.logits(token_ids[:, :7], [0])
    chunk = np.full((1, 16), -1)
    chunk[:, :7] = token_ids[:, :7]
    found = padded.logits(chunk, [0])
    assert_close(found[:, :7], sequences.expected[:1, :7])
    for cache_name, cache in padded.caches.items():
        np.testing.assert_allclose(cache[:, :, :7], sequences.caches[cache_name][:, :, :7], atol=1e-5)
    # What padding left in the rows behind is hidden, and overwritten as the sequence grows.
    assert any(np.abs(cache[:, :, 7:16]).max() > 0 for cache in padded.caches.values())
    assert_close(padded.logits(token_ids[:, 7:], [7]), sequences.expected[:1, 7:])


def test_last_token_ids_select_rows() -> None:
    sequences = Sequences(GOLDENS / "llama_untied", batch=2)
    bindings = sequences.run(sequences.token_ids, [0, 0])
    for selected in ([[23], [5]], [[0, 4, 4], [23, 1, 0]]):
        rows = np.asarray(selected, np.int32)
        bound = {name: bindings[name] for name in bindings if "present" not in name and name != "logits"}
        bound |= {"last_token_ids": rows, "logits": np.full((2, rows.shape[1], 80), np.nan, np.float32)}
        logits = bound["logits"]
        shape = EngineShape("prefill", 2, 24, sequences.rows, sequences.rows, selected=rows.shape[1])
        ProgramGraph(NumpyOperations(bound, sequences.weights), decoder_program(sequences.config, shape)).run()
        assert bound["logits"] is logits
        assert_close(logits, np.stack([sequences.expected[b, rows[b]] for b in range(2)]))


def test_features_are_the_inputs_of_their_layers() -> None:
    sequences = Sequences(GOLDENS / "llama_untied", batch=2)
    bindings = sequences.run(sequences.token_ids, [0, 0], feature_layers=(0, 1))
    hidden = sequences.config.hidden_size
    assert bindings["hidden_states"].shape == (2, 24, 2 * hidden)
    np.testing.assert_array_equal(bindings["hidden_states"][..., :hidden], bindings["inputs_embeds"])
    assert np.abs(bindings["hidden_states"][..., hidden:] - bindings["inputs_embeds"]).max() > 0.1


@pytest.mark.parametrize("name", ["llama_llama3", "qwen2_yarn", "granite_tied", "gemma", "smollm3_list_tied"])
def test_a_runner_gives_the_logits_of_transformers(name: str) -> None:
    """Embedding, positions and steps as they are served; a prompt, then single tokens."""
    sequences = Sequences(GOLDENS / name)
    token_ids, expected = sequences.token_ids[0].tolist(), sequences.expected[0]
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        limits = EngineLimits(prefill_chunk=16, kv_capacity=len(token_ids))
        limits = replace(limits, window_rows=limits.rows_for_window(sequences.config.window))
        runner = BaseEngineRunner(NumpyBackend(sequences.config), sequences.config, limits, checkpoint)
    runner.start(0, token_ids[:18], 0, SamplingValues()).wait()
    assert_close(runner.logits(0), expected[17])
    for row in range(18, len(token_ids)):
        runner.force_token(0, token_ids[row])
        runner.decode(1).wait()
        assert_close(runner.logits(0), expected[row])
    runner.close()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("llama_llama3", {"rope_scaling": None}),
        ("granite_tied", {"embedding_scale": 1.0}),
        ("granite_tied", {"residual_scale": 1.0}),
        ("granite_tied", {"attention_scale": None}),
        ("granite_biases", {"logits_scale": 1.0}),
        ("smollm3_interval", {"nope_layers": ()}),
        ("smollm3_list_tied", {"nope_layers": (1,)}),
        ("gemma", {"norm_offset": 0.0}),
        ("gemma", {"embedding_scale": 1.0}),
        ("gemma", {"hidden_act": "silu"}),
        ("ministral3", {"rope_scaling": None}),
        (
            "ministral3_far",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 7}},
        ),
        ("cwm", {"rope_scaling": None}),
        ("mistral_window_5", {"sliding_window": 6}),
        ("gemma3", {"sliding_window": 4}),
        ("gemma3", {"attention_scale": None}),
        ("gemma3", {"norm_offset": 0.0}),
        ("gemma3_old_layout", {"local_rope_theta": 1000.0}),
        ("gemma3_old_layout", {"rope_scaling": None}),
        ("gemma4", {"rope_scaling": None}),
        ("gemma4", {"local_rope_theta": 10000.0}),
        ("gemma4", {"attention_scale": None}),
        ("gemma4", {"value_norms": False}),
        ("gemma4", {"layer_scalars": False}),
        ("gemma4", {"layer_embedding_size": 0}),
        ("gemma4", {"logits_cap": 0.0}),
        ("gemma4_plain", {"layer_scalars": False}),
        ("olmo2", {"qk_norm": False}),
        ("olmo2", {"post_norms": False}),
        ("olmo3", {"local_rope_theta": None}),
        ("olmo3", {"rope_scaling": None}),
        ("olmo3", {"joint_qk_norm": False, "qk_norm": False}),
        ("olmo3", {"sliding_window": 6}),
        ("exaone4", {"nope_layers": ()}),
        ("exaone4", {"post_norms": False}),
        ("exaone4", {"sliding_window": 4}),
        ("granite4", {"nope_layers": (0, 1)}),
        ("granite4", {"attention_scale": None}),
        ("ernie4_5", {"rotates_neighbours": False}),
        ("ernie4_5", {"mlp_bias": False}),
        ("hunyuan", {"norms_behind_rotation": False}),
        ("hunyuan", {"rope_theta": 10000.0}),
        ("phi3_longrope_short", {"rope_scaling": None}),
        ("phi3_longrope_long", {"rope_scaling": None}),
        ("minicpm", {"embedding_scale": 1.0}),
        ("minicpm", {"residual_scale": 1.0}),
        ("minicpm", {"logits_scale": 1.0}),
        ("starcoder2", {"layer_norms": False}),
        ("starcoder2", {"hidden_act": "silu"}),
        ("starcoder2", {"sliding_window": 6}),
        ("starcoder2", {"mlp_bias": False}),
        ("qwen3_moe", {"mixture": Mixture(6, 2, 16, normalized=False, dense_layers=(1,))}),
        ("qwen3_moe", {"mixture": Mixture(6, 1, 16, dense_layers=(1,))}),
        ("gemma4_moe", {"mixture": Mixture(6, 2, 16, beside_mlp=True)}),
        ("olmoe", {"joint_qk_norm": False, "qk_norm": False}),
        ("olmoe", {"mixture": Mixture(6, 2, 16)}),
        ("granitemoe", {"residual_scale": 1.0}),
        ("granitemoe", {"mixture": Mixture(5, 2, 16, normalized=False)}),
        ("lfm2_moe", {"mixture": replace(LFM2_MOE, scores="softmax")}),
        ("lfm2_moe", {"mixture": replace(LFM2_MOE, correction=False)}),
        ("lfm2_moe", {"mixture": replace(LFM2_MOE, scale=1.0)}),
        ("gpt_oss", {"attention_sinks": False}),
        ("gpt_oss", {"mixture": Mixture(5, 2, 16, biases=True, limit=7.0)}),
        ("gpt_oss", {"mixture": Mixture(5, 2, 16, limit=1.5)}),
        ("gpt_oss", {"sliding_window": 7}),
        ("qwen3_5_moe_text", {"mixture": Mixture(6, 2, 16)}),
        ("qwen3_5_text", {"norm_offset": 0.0}),
        ("qwen3_5_text", {"rope_theta": 10000.0}),
    ],
    ids=str,
)
def test_what_a_family_has_of_its_own_would_be_missed(name: str, changed: dict[str, Any]) -> None:
    sequences = Sequences(GOLDENS / name, batch=2)
    assert all(getattr(sequences.config, key) != value for key, value in changed.items())
    assert name != "lfm2_moe" or sequences.config.mixture == LFM2_MOE
    sequences.config = replace(sequences.config, **changed)
    sequences.table = rotary_table(sequences.config, sequences.rows)
    assert largest_difference(sequences.logits(sequences.token_ids, [0, 0]), sequences.expected) > 100 * TOLERANCE
