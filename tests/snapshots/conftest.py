"""Snapshots made of nothing but numbers, and runners of tiny models to take real ones from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runner_steps import take_step

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.snapshots.binding import LAYOUT, NONE, SnapshotBinding
from edgellm.snapshots.snapshot import DIGEST, FORMAT_VERSION, TOKEN_IDS, Snapshot, SnapshotFacts

BINDING = SnapshotBinding("1" * 64, "2" * 64, NONE, NONE, NONE, "float32", LAYOUT, "numpy", None)
HEADS, SIZE = 2, 8


def _make_snapshot(token_ids: Sequence[int], seed: int = 0, **changes: object) -> Snapshot:
    """A snapshot of one layer with random rows; `changes` are fields of its facts or binding, `states` and `prompt`."""
    random = np.random.default_rng(seed)
    states, prompt = changes.pop("states", {}), changes.pop("prompt", None)
    fields = BINDING.__dataclass_fields__
    binding = replace(BINDING, **{name: value for name, value in changes.items() if name in fields})
    count = len(token_ids)
    facts = SnapshotFacts(FORMAT_VERSION, count, binding, "test", "a model", "2026-01-01T00:00:00+00:00", "0")
    facts = replace(facts, **{name: value for name, value in changes.items() if name not in fields})
    shapes = {f"base.{kind}_cache_0": (HEADS, count, SIZE) for kind in "kv"}
    if binding.has_draft:
        shapes |= {f"draft.{kind}_cache_0": (HEADS, count - 1, SIZE) for kind in "kv"}
    tensors = {name: (binding.dtype, shape) for name, shape in shapes.items()}
    tensors |= {name: ("float32", shape) for name, shape in states.items()}
    snapshot = Snapshot.allocate(facts, tensors, lambda nbytes: np.zeros(nbytes, np.uint8), prompt)
    for name in tensors:
        values = snapshot.tensor(name)
        numbers = (random.standard_normal(values.shape) * 100).astype(np.float32)
        is_bfloat16 = tensors[name][0] == "bfloat16"
        values[...] = bfloat16_bits(numbers) if is_bfloat16 else numbers.astype(values.dtype)
    snapshot.tensor(TOKEN_IDS)[...] = token_ids
    assert not snapshot.tensor(DIGEST).any()
    return snapshot


@pytest.fixture(scope="session")
def make_snapshot() -> Callable[..., Snapshot]:
    """(token ids, seed, **fields of facts and binding, states={name: shape}) to a snapshot in memory."""
    return _make_snapshot


@pytest.fixture(scope="session")
def binding() -> SnapshotBinding:
    """That of `make_snapshot` without changes."""
    return BINDING


@contextmanager
def _open_runner(
    path: Path, draft: bool = False, backend: str = "numpy"
) -> Iterator[tuple[DecodingRunner, EngineDirectory]]:
    directory = EngineDirectory.open(path)
    opened = open_backend(backend, directory)
    try:
        runner = DecodingRunner.open(opened, directory, drafts=draft)
    except BaseException:
        opened.close()
        raise
    try:
        yield runner, directory
    finally:
        runner.close()


@pytest.fixture(scope="session")
def open_slots() -> Callable[..., object]:
    """(engine directory, draft=False, backend="numpy") to a context manager that gives (runner, directory)."""
    return _open_runner


def _answer(
    runner: DecodingRunner,
    prompt: Sequence[int],
    reused: int,
    count: int = 12,
    plan: DraftPlan | None = None,
    slot: int = 0,
) -> list[int]:
    tokens = runner.start(slot, prompt, reused, SamplingValues()).wait().tolist()
    while len(tokens) < count:
        tokens += take_step(runner, slot + 1, plan).wait()[slot]
    runner.stop(slot)
    return tokens[:count]


@pytest.fixture(scope="session")
def answer() -> Callable[..., list[int]]:
    """(runner, prompt, reused rows, count, plan, slot) to the first greedy tokens of the slot."""
    return _answer
