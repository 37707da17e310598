"""Steps and rounds whose tokens' own embeddings the host looks up (Gemma 4), also where engines have fixed shapes and
steps are captured: the rows of a step are there before it runs, whoever chose its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_checkpoints import write_packed
from runner_steps import take_step
from safetensors.numpy import load_file, save_file
from tiny_families import WINDOWED
from token_rules import ruled_answers, rules

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.quantization.compressed_tensors import PackQuantized
from edgellm.engines.runners.captured_steps import HostStage
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.runners.token_rows import TokenRows
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, given, tree
from edgellm.engines.speculation.round import RoundKey
from edgellm.engines.speculation.runner import DecodingRunner

LIMITS = EngineLimits(max_batch=4, prefill_chunk=16, kv_capacity=96, draft_top_k=4, draft_steps=4, verify_tree_size=16)
PLAIN = EngineLimits(max_batch=1, prefill_chunk=16, kv_capacity=96)
PROMPTS = [[(7 * index + 5 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33))]
GREEDY, DRAWN = SamplingValues(), SamplingValues(1.0, 0, 0.9, 0.0, 1.1, 0.1, 0.05, seed=5)


def answers(runner: DecodingRunner, sampling: SamplingValues, plans: list[DraftPlan | None]) -> list[list[int]]:
    """24 tokens of all prompts together, the plans in turn, each step launched before the last one is read."""
    found = [runner.start(slot, prompt, 0, sampling).wait().tolist() for slot, prompt in enumerate(PROMPTS)]
    under_way, count = take_step(runner, len(PROMPTS), plans[0]), 1
    while min(map(len, found)) < 24:
        following = take_step(runner, len(PROMPTS), plans[count % len(plans)])
        for tokens, emitted in zip(found, under_way.wait(), strict=True):
            tokens.extend(emitted)
        under_way, count = following, count + 1
    under_way.wait()
    for slot in range(len(PROMPTS)):
        runner.stop(slot)
    return [tokens[:24] for tokens in found]


@pytest.fixture(scope="module")
def directory(
    make_checkpoint: Callable[..., Path], make_draft: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> EngineDirectory:
    folder = tmp_path_factory.mktemp("token_rows")
    checkpoint = make_checkpoint(folder / "model", 4, **WINDOWED["gemma4"])
    build_engine_directory(checkpoint, folder / "engines", LIMITS, [], "bfloat16", draft=make_draft(folder / "draft"))
    return EngineDirectory.open(folder / "engines")


@pytest.mark.parametrize("values", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_rounds_equal_plain_decoding(runner: DecodingRunner, values: SamplingValues) -> None:
    plain = answers(runner, values, [None])
    assert len({tuple(tokens) for tokens in plain}) == len(plain)
    for plans in ([chain(4)], [tree(4, 4, 16)], [tree(4, 2, 7), None, chain(2)]):
        assert answers(runner, values, plans) == plain, plans[0].name


@pytest.mark.parametrize("plan", [chain(4), tree(4, 4, 16), given(12, 4)], ids=lambda plan: plan.name)
def test_rounds_under_rules_equal_plain_decoding(runner: DecodingRunner, plan: DraftPlan | None) -> None:
    asked = PROMPTS[:2], [DRAWN] * 2
    plain, _ = ruled_answers(runner, *asked, [rules(1), None], None)
    assert ruled_answers(runner, *asked, [rules(1), None], plan, plain)[0] == plain


@pytest.mark.parametrize("plan", [None, tree(4, 4, 16)], ids=["plain", "tree"])
def test_rows_of_other_tokens_would_be_seen(
    runner: DecodingRunner, plan: DraftPlan | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(runner, GREEDY, [plan])
    bring = TokenRows.bring
    monkeypatch.setattr(TokenRows, "bring", lambda rows, ids: bring(rows, ids) if len(ids) == 1 else None)  # of prompts
    assert answers(runner, GREEDY, [plan]) != expected


@pytest.mark.parametrize("fixed", ["fixed", pytest.param("tensorrt", marks=pytest.mark.gpu)])
def test_what_the_host_brings_splits_a_step(
    directory: EngineDirectory, open_eagle: Callable[..., Any], fixed: str
) -> None:
    """All captures are made beforehand, around the stages of the host, which are no failures of them."""
    with open_eagle(directory, fixed) as runner:
        runner.plan_captures([tree(4, 4, 16)])
        while runner.capture_next():
            pass
        assert not runner.uncaptured
        steps = [launches for key, launches in runner.base.steps.captures.items() if key[0] != "choice"]
        assert steps
        for launches in steps:
            assert [isinstance(launch, HostStage) for launch in launches] == [True, False, True, False]
        rounds = [launches for key, launches in runner._steps.captures.items() if isinstance(key, RoundKey)]
        assert rounds
        for launches in rounds:
            assert [isinstance(launch, HostStage) for launch in launches] == [False, True, False]


def test_rows_are_those_of_the_file(directory: EngineDirectory) -> None:
    config, backend = directory.config, NumpyBackend(directory.config)
    with directory.checkpoint() as checkpoint:
        rows = TokenRows(backend, config, checkpoint, 1)
        table = load_file(checkpoint.files[0])["model.embed_tokens_per_layer.weight"]
    found = rows.of(np.array([[3, -1], [319, 3]], np.int32))
    np.testing.assert_array_equal(found[[0, 1, 1], [0, 0, 1]], table[[3, 319, 3]].astype(np.float32))
    assert found.shape == (2, 2, 4 * 32) and not found[0, 1].any() and not rows.of(np.array([320])).any()
    backend.compute_dtype = "bfloat16"
    halves = rows.of(np.array([7], np.int32)).view(np.uint16).astype(np.uint32) << 16
    np.testing.assert_allclose(halves.view(np.float32)[0], table[7], rtol=2**-8)


def test_rows_of_a_packed_table_are_read_alone(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compressed-tensors packs it; values are those of the dense twin."""
    source = make_checkpoint(tmp_path / "model", 4, **WINDOWED["gemma4"])
    packed, twin = write_packed(source, tmp_path / "packed", tmp_path / "twin", None)
    shapes, read = [], PackQuantized.read
    monkeypatch.setattr(PackQuantized, "read", lambda layout, part: shapes.append(part.shape) or read(layout, part))
    ids = np.array([[3, -1, 319], [3, 77, 320]], np.int32)
    found = []
    for folder in (packed, twin):
        with Checkpoint.open(folder) as checkpoint:
            config = decoder_config(checkpoint.config)
            rows = TokenRows(NumpyBackend(config), config, checkpoint, 1)
        found.append(rows.of(ids))  # once it is closed
    np.testing.assert_array_equal(*found)
    assert found[0][0, 0].any() and shapes == [(6, 128)]


def test_a_table_whose_rows_are_packed_together_is_refused(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Zero points of eight rows in a word."""
    source = make_checkpoint(tmp_path / "model", 4, **WINDOWED["gemma4"])
    packed, _ = write_packed(source, tmp_path / "packed", tmp_path / "twin", None)
    tensors, name = load_file(packed / "model.safetensors"), "model.embed_tokens_per_layer.weight"
    zeros = np.zeros((80, 1), np.int32)
    save_file(tensors | {f"{name}_zero_point": zeros}, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["config_groups"]["rows"]["weights"]["symmetric"] = False
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"'.*per_layer.weight_zero_point' holds the shape \[80, 1\], expected 320"
    ):
        build_engine_directory(packed, tmp_path / "engines", PLAIN, [], "bfloat16")


def test_a_table_that_does_not_fit_is_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", 4, **WINDOWED["gemma4"])
    tensors = load_file(path / "model.safetensors")
    name = "model.embed_tokens_per_layer.weight"
    save_file(tensors | {name: tensors[name][:, :-32]}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed_tokens_per_layer.*(\n.*)*\[320, 128\]"):
        build_engine_directory(path, tmp_path / "engines", LIMITS, [], "bfloat16")
    save_file({key: value for key, value in tensors.items() if key != name}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"missing: {name}"):
        build_engine_directory(path, tmp_path / "engines", LIMITS, [], "bfloat16")
    with Checkpoint.open(path) as checkpoint, pytest.raises(CheckpointError, match="has no tensor"):
        config = decoder_config(checkpoint.config)
        TokenRows(NumpyBackend(config), config, checkpoint, 1)
