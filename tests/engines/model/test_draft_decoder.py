"""Draft heads of every generation against the PyTorch reference; base features and tree verification against paths."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_files import golden_folder, largest_difference
from safetensors import safe_open

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_draft_to_target, load_numpy_weights
from edgellm.engines.families import decoder_config
from edgellm.engines.families.drafts import read_draft
from edgellm.engines.model.config import DRAFT_EMBEDDING
from edgellm.engines.model.decoder import EMBEDDING, decoder_program, decoder_weights
from edgellm.engines.model.draft_decoder import draft_engine_weights, draft_program, draft_weights
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.rotary import rotary_table

GOLDENS = golden_folder("draft")
BASES = sorted(path.name for path in GOLDENS.glob("*_base"))
HEADS = sorted(path.name for path in GOLDENS.iterdir() if path.name not in BASES)
TOLERANCE = 1e-4
ROWS = 40


def expected_of(name: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(GOLDENS / name / "expected.safetensors", "np") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118 - not a dict


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == np.float32
    largest = float(np.abs(found).max())  # up to 80, where processors without AVX-512 are 1.1e-5 of it apart
    assert largest_difference(found, expected) <= max(TOLERANCE, 2e-5 * largest)


def positions_of(table: np.ndarray, starts: np.ndarray, depths: np.ndarray, visible: np.ndarray) -> dict:
    """The three position inputs of B sequences; token t sees the rows before `starts` and those in `visible` [T, T]."""
    batch, tokens = len(starts), len(depths)
    mask = np.zeros((batch, 1, tokens, ROWS), bool)
    for b, start in enumerate(starts):
        mask[b, :, :, : start - visible.shape[1] + tokens] = True
        mask[b, 0, :, start - visible.shape[1] + tokens : start + tokens] = visible
    cos_sin = np.stack([table[start - visible.shape[1] + tokens + depths] for start in starts])
    return {"rope_rotary_cos_sin": cos_sin, "attention_mask": mask, "kvcache_start_index": np.asarray(starts, np.int32)}


class Base:
    """A base of the golden files on the NumPy interpreter."""

    def __init__(self, name: str, feature_layers: tuple[int, ...]) -> None:
        with Checkpoint.open(GOLDENS / name) as checkpoint:
            config = decoder_config(checkpoint.config, checkpoint.generation_config)
            self.weights = load_numpy_weights(checkpoint, decoder_weights(config))
        self.config = replace(config, feature_layers=feature_layers)
        self.table = rotary_table(config, ROWS)
        shape = (1, config.num_kv_heads, ROWS, config.head_dim)
        self.caches = {
            f"{kind}_cache_{layer}": np.zeros(shape, np.float32) for layer in range(config.num_layers) for kind in "kv"
        }

    def run(
        self, phase: str, token_ids: np.ndarray, start: int, depths: np.ndarray, visible: np.ndarray
    ) -> dict[str, np.ndarray]:
        tokens = len(token_ids)
        bindings = {
            "inputs_embeds": self.weights[EMBEDDING][token_ids][None],
            **positions_of(self.table, np.asarray([start]), depths, visible),
            **self.caches,
        }
        shape = EngineShape(phase, 1, tokens, ROWS, ROWS, tokens)
        ProgramGraph(NumpyOperations(bindings, self.weights), decoder_program(self.config, shape)).run()
        return bindings

    def prefill(self, token_ids: np.ndarray, start: int = 0) -> dict[str, np.ndarray]:
        tokens = len(token_ids)
        return self.run("prefill", token_ids, start, np.arange(tokens), np.tri(tokens, dtype=bool))


class Head:
    """A draft head of the golden files, or its copy in `folder`, with the base that it belongs to.

    Every sequence of the batch is the same.
    """

    def __init__(self, name: str, batch: int = 1, folder: Path = GOLDENS) -> None:
        self.expected, self.metadata = expected_of(name)
        base_path = GOLDENS / self.metadata["base"]
        with Checkpoint.open(base_path) as base, Checkpoint.open(folder / name) as checkpoint:
            base_config = decoder_config(base.config, base.generation_config)
            base_weights = load_numpy_weights(base, decoder_weights(base_config))
            self.config = read_draft(checkpoint, base, base_config)
            own = load_numpy_weights(checkpoint, draft_weights(self.config))
            self.mapping = load_draft_to_target(checkpoint, self.config)
        self.weights = draft_engine_weights(self.config, "accept", own, base_weights)
        self.embedding = own[DRAFT_EMBEDDING] if self.config.has_embedding else base_weights[self.config.base_embedding]
        states, _ = expected_of(self.metadata["base"])
        self.token_ids = states["token_ids"]
        self.features = np.concatenate([states["entering"][layer - 1] for layer in self.config.feature_layers], axis=1)
        self.batch = batch
        decoder = self.config.decoder
        self.table = rotary_table(decoder, ROWS)
        shape = (batch, decoder.num_kv_heads, ROWS, decoder.head_dim)
        self.caches = {f"{kind}_cache_0": np.zeros(shape, np.float32) for kind in "kv"}

    def run(
        self,
        phase: str,
        hidden: np.ndarray,
        token_ids: np.ndarray,
        start: int,
        depths: np.ndarray,
        visible: np.ndarray,
        selected: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits and hidden states of the first sequence, once all are found to be equal."""
        name = "hidden_states_from_draft" if phase == "propose" else "hidden_states_input"
        count = len(token_ids)
        bindings = {
            "inputs_embeds": np.repeat(self.embedding[token_ids][None], self.batch, axis=0),
            name: np.repeat(hidden[None], self.batch, axis=0),
            **positions_of(self.table, np.full(self.batch, start), depths, visible),
            **self.caches,
        }
        if selected is not None:
            bindings["last_token_ids"] = np.repeat(selected[None].astype(np.int32), self.batch, axis=0)
            count = len(selected)
        shape = EngineShape(phase, self.batch, len(token_ids), ROWS, ROWS, count, "draft")
        ProgramGraph(NumpyOperations(bindings, self.weights), draft_program(self.config, shape)).run()
        for output in ("logits", "hidden_states"):
            for row in bindings[output]:
                assert_close(row, bindings[output][0])
        return bindings["logits"][0], bindings["hidden_states"][0]

    def feed(self, phase: str, rows: slice, selected: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Entries of the base's tokens: feature i with token i + 1."""
        count = rows.stop - rows.start
        return self.run(
            phase,
            self.features[rows],
            self.token_ids[1:][rows],
            rows.start,
            np.arange(count),
            np.tri(count, dtype=bool),
            selected,
        )


def test_there_are_heads_of_every_kind() -> None:
    configs = [Head(name).config for name in HEADS]
    assert {config.generation for config in configs} == {"1", "3", "3.1"}
    assert {config.feature_norm for config in configs} == {"none", "each", "whole"}
    for switch in ("has_embedding", "has_head", "has_mapping", "fc_bias", "norm_before_residual", "feed_back_normed"):
        assert {getattr(config, switch) for config in configs} == {True, False}, switch
    for switch in ("qk_norm", "attention_bias", "attention_output_bias", "mlp_bias"):
        assert {getattr(config.decoder, switch) for config in configs} == {True, False}, switch


@pytest.mark.parametrize("name", HEADS)
def test_prefill_accept_and_propose_equal_the_reference(name: str) -> None:
    head = Head(name, batch=2)
    expected, prefilled = head.expected, len(head.expected["prefill_logits"])
    length = prefilled + len(expected["accept_logits"])
    assert np.nanstd(expected["prefill_logits"]) > 0.5
    assert set(head.metadata) >= {"torch", "transformers"}
    assert json.loads(head.metadata["layers"]) == list(head.config.feature_layers)
    logits, hidden = head.feed("prefill", slice(0, prefilled))
    assert_close(logits, expected["prefill_logits"])
    assert_close(hidden, expected["prefill_hidden_states"])
    logits, hidden = head.feed("accept", slice(prefilled, length))
    assert_close(logits, expected["accept_logits"])
    assert_close(hidden, expected["accept_hidden_states"])

    width = len(expected["level1_tokens"])
    alone = np.eye(width, dtype=bool)
    taken = np.repeat(hidden[-1:], width, axis=0)
    depth = np.zeros(width, int)
    logits, hidden = head.run("propose", taken, expected["level1_tokens"], length, depth, alone)
    assert_close(logits, expected["level1_logits"])
    assert_close(hidden, expected["level1_hidden_states"])
    parents = expected["level2_parents"]
    visible = np.concatenate((alone[parents], alone), axis=1)
    logits, hidden = head.run("propose", hidden[parents], expected["level2_tokens"], length + width, depth + 1, visible)
    assert_close(logits, expected["level2_logits"])
    assert_close(hidden, expected["level2_hidden_states"])


@pytest.mark.parametrize("name", HEADS)
def test_chunks_and_selected_rows_equal_the_whole(name: str) -> None:
    head, expected = Head(name), expected_of(name)[0]
    count = len(expected["prefill_logits"])
    for start in range(0, count, 5):
        stop = min(start + 5, count)
        selected = np.asarray([stop - start - 1])
        logits, hidden = head.feed("prefill", slice(start, stop), selected)
        assert_close(logits, expected["prefill_logits"][stop - 1 : stop])
        assert_close(hidden, expected["prefill_hidden_states"][stop - 1 : stop])


@pytest.mark.parametrize("changes", [{"truncated_vocab_size": 48, "architectures": ["LlamaForCausalLM"]}, {}])
def test_a_reduced_vocabulary_without_its_usual_name_equals_the_reference(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(GOLDENS / "eagle3", tmp_path / "eagle3")
    path = tmp_path / "eagle3" / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key != "draft_vocab_size"}
    path.write_text(json.dumps(config | changes))
    head, expected = Head("eagle3", folder=tmp_path), expected_of("eagle3")[0]
    logits, hidden = head.feed("prefill", slice(0, len(expected["prefill_logits"])))
    assert logits.shape[1] == 48
    assert_close(logits, expected["prefill_logits"])
    assert_close(hidden, expected["prefill_hidden_states"])
    np.testing.assert_array_equal(head.mapping, Head("eagle3").mapping)


def test_the_mapping_adds_offsets() -> None:
    head = Head("eagle3")
    with Checkpoint.open(GOLDENS / "eagle3") as checkpoint:
        kept = np.flatnonzero(checkpoint.integers("t2d"))
    assert head.mapping.dtype == np.int32
    np.testing.assert_array_equal(head.mapping, kept)
    np.testing.assert_array_equal(Head("eagle1").mapping, np.arange(80))


@pytest.mark.parametrize("name", BASES)
def test_features_equal_transformers(name: str) -> None:
    expected, metadata = expected_of(name)
    assert set(metadata) == {"torch", "transformers"}
    layers = tuple(range(1, len(expected["entering"]) + 1))
    hidden = Base(name, layers).prefill(expected["token_ids"])["hidden_states"][0]
    for index, layer in enumerate(np.split(hidden, len(layers), axis=1)):
        assert_close(np.ascontiguousarray(layer), expected["entering"][index])


@pytest.mark.parametrize("name", BASES)
def test_features_do_not_change_the_logits(name: str) -> None:
    token_ids = expected_of(name)[0]["token_ids"]
    plain = Base(name, ()).prefill(token_ids)
    assert "hidden_states" not in plain
    for layers in ((1,), (Base(name, ()).config.num_layers,)):
        np.testing.assert_array_equal(Base(name, layers).prefill(token_ids)["logits"], plain["logits"])


TREES = {"chain": [-1, 0, 1, 2], "bushy": [-1, 0, 0, 0, 1, 1, 3, 4, 6], "depth one": [-1, 0, 0, 0], "root alone": [-1]}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", BASES)
def test_verifying_a_tree_equals_running_each_path(name: str, tree: str) -> None:
    base = Base(name, (1, Base(name, ()).config.num_layers))
    prompt, parents = expected_of(name)[0]["token_ids"][:9], TREES[tree]
    tokens = (np.arange(len(parents)) * 13 + 5) % base.config.vocab_size
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    visible = np.zeros((len(parents), len(parents)), bool)
    for node, path in enumerate(paths):
        visible[node, path] = True
    depths = np.asarray([len(path) - 1 for path in paths])
    base.prefill(prompt)
    found = base.run("verify", tokens, len(prompt), depths, visible)
    for node, path in enumerate(paths):
        whole = Base(name, base.config.feature_layers).prefill(np.concatenate((prompt, tokens[path])))
        assert_close(found["logits"][0, node], whole["logits"][0, -1])
        assert_close(found["hidden_states"][0, node], whole["hidden_states"][0, -1])
