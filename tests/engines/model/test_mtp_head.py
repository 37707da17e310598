"""Qwen3.5's head for multi-token prediction against layers of transformers: prefill, accept, chains and trees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden_files import largest_difference
from golden_sequences import Sequences
from mtp_checkpoints import DECODERS, GOLDENS, HEADS, golden_checkpoint
from safetensors import safe_open

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.families import decoder_config
from edgellm.engines.families.drafts import read_mtp
from edgellm.engines.model.decoder import EMBEDDING, decoder_weights
from edgellm.engines.model.draft_decoder import draft_engine_weights, draft_program, draft_weights
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.rotary import rotary_table
from edgellm.engines.model.states import decoder_states, state_edge

TOLERANCE, ROWS = 1e-4, 40
every_head = pytest.mark.parametrize("name", HEADS)


class Head:
    """A golden head on NumPy; each step writes its KV rows behind `start`."""

    def __init__(self, name: str, folder: Path) -> None:
        with safe_open(GOLDENS / name / "expected.safetensors", "np") as file:
            self.expected = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            self.metadata = file.metadata()
        with Checkpoint.open(golden_checkpoint(name, folder / name)) as checkpoint:
            base = decoder_config(checkpoint.config, checkpoint.generation_config, dtype=checkpoint.dtype)
            base_weights = load_numpy_weights(checkpoint, decoder_weights(base))
            self.config = read_mtp(checkpoint, base)
            own = load_numpy_weights(checkpoint, draft_weights(self.config))
        self.weights = draft_engine_weights(self.config, "accept", own, base_weights)
        self.embedding, self.table = base_weights[EMBEDDING], rotary_table(self.config.decoder, ROWS)
        edge = state_edge(decoder_states(self.config.decoder), 1, ROWS)
        self.caches = {state: np.zeros(shape, np.float32) for state, (shape, _) in edge.items()}

    def run(
        self, phase: str, hidden: np.ndarray, token_ids: np.ndarray, start: int, depths: np.ndarray, visible: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits and hidden states of T tokens; each sees the rows before `start` less the width of `visible` beyond T,
        and those in `visible` [T, >= T]."""
        count, before = len(token_ids), start - (visible.shape[1] - len(token_ids))
        mask = np.zeros((1, 1, count, ROWS), bool)
        mask[..., :before] = True
        mask[0, 0, :, before : start + count] = visible
        bindings = {
            "inputs_embeds": self.embedding[token_ids][None],
            "hidden_states_from_draft" if phase == "propose" else "hidden_states_input": hidden[None],
            "rope_rotary_cos_sin": self.table[before + depths][None],
            "attention_mask": mask,
            "kvcache_start_index": np.asarray([start], np.int32),
            **self.caches,
        }
        shape = EngineShape(phase, 1, count, ROWS, ROWS, count, "draft")
        ProgramGraph(NumpyOperations(bindings, self.weights), draft_program(self.config, shape)).run()
        return bindings["logits"][0], bindings["hidden_states"][0]

    def feed(self, phase: str, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Entries of the base's tokens: feature i with token i + 1."""
        count = rows.stop - rows.start
        tokens, features = self.expected["token_ids"][1:][rows], self.expected["features"][rows]
        return self.run(phase, features, tokens, rows.start, np.arange(count), np.tri(count, dtype=bool))


def assert_close(found: tuple[np.ndarray, np.ndarray], expected: dict[str, np.ndarray], part: str) -> None:
    for values, key in zip(found, ("logits", "hidden_states"), strict=True):
        wanted = expected[f"{part}_{key}"]
        assert largest_difference(values, wanted) <= TOLERANCE, (part, key)


@every_head
def test_prefill_accept_and_a_tree_equal_the_reference(name: str, tmp_path: Path) -> None:
    head = Head(name, tmp_path)
    expected, prefilled = head.expected, len(head.expected["prefill_logits"])
    length = prefilled + len(expected["accept_logits"])
    assert np.nanstd(expected["prefill_logits"]) > 0.5 and set(head.metadata) >= {"torch", "transformers"}
    assert_close(head.feed("prefill", slice(0, prefilled)), expected, "prefill")
    accepted = head.feed("accept", slice(prefilled, length))
    assert_close(accepted, expected, "accept")

    width = len(expected["level1_tokens"])
    alone, depth = np.eye(width, dtype=bool), np.zeros(width, int)
    taken = np.repeat(accepted[1][-1:], width, axis=0)
    first = head.run("propose", taken, expected["level1_tokens"], length, depth, alone)
    assert_close(first, expected, "level1")
    parents = expected["level2_parents"]
    visible = np.concatenate((alone[parents], alone), axis=1)
    second = head.run("propose", first[1][parents], expected["level2_tokens"], length + width, depth + 1, visible)
    assert_close(second, expected, "level2")


@every_head
def test_a_chain_of_three_equals_the_reference(name: str, tmp_path: Path) -> None:
    """Each step takes the normed hidden state of the one before."""
    head = Head(name, tmp_path)
    expected, length = head.expected, len(head.expected["token_ids"]) - 1
    logits, hidden = head.feed("prefill", slice(0, length))
    for step in range(3):
        token = logits[-1:].argmax(axis=-1)
        assert token[0] == expected["chain_tokens"][step]
        seen = np.ones((1, step + 1), bool)
        logits, hidden = head.run("propose", hidden[-1:], token, length + step, np.asarray([step]), seen)
        assert largest_difference(logits[0], expected["chain_logits"][step]) <= TOLERANCE
        assert largest_difference(hidden[0], expected["chain_hidden_states"][step]) <= TOLERANCE


@every_head
def test_the_features_are_the_bases_last_hidden_states(name: str) -> None:
    with safe_open(GOLDENS / name / "expected.safetensors", "np") as file:
        token_ids, features = file.get_tensor("token_ids"), file.get_tensor("features")
    base = Sequences(DECODERS / name)
    found = base.run(token_ids[None], [0], feature_layers=(base.config.num_layers,))["hidden_states"]
    assert found.shape == (1, *features.shape) and np.abs(found[0] - features).max() <= TOLERANCE
