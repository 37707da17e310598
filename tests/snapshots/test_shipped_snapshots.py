"""The shipped model answers the same with a snapshot of its system prompt as without, drafting or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from kept_snapshots import save
from runner_steps import take_step

from edgellm.drafting.config import DraftingConfig
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.store import SnapshotStore
from edgellm.snapshots.system_prompt import system_prompt_ids
from edgellm.text.tokenizer import Tokenizer

#: Where the best two logits are closer, rounding may choose; without a snapshot the prompt is computed in other pieces.
SMALLEST_GAP = 1e-4
QUESTIONS = [
    "What is 7 plus 5?",
    "Where is the wooden spoon?",
    "Name three fruits.",
    "Turn left and stop.",
    "hello",
    "Spell 'robot'.",
    "What day comes after Monday?",
    "How many legs has a spider?",
    "Say nothing.",
    "Write a list of two tools.",
]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "draft"])
def slots(
    request: pytest.FixtureRequest, open_slots: Callable[..., object]
) -> Iterator[tuple[DecodingRunner, EngineDirectory]]:
    if request.param and EngineDirectory.read(SHIPPED_MODEL).draft is None:
        pytest.skip("the shipped model has no draft")
    with open_slots(SHIPPED_MODEL, request.param) as opened:
        yield opened


def answered(
    runner: DecodingRunner, prompt: Sequence[int], reused: int, count: int, sampling: SamplingValues
) -> list[int]:
    has_draft = runner.draft.has_model
    plan = DraftingConfig.largest(runner.limits).plan(runner.limits) if has_draft else None
    tokens = runner.start(0, prompt, reused, sampling).wait().tolist()
    while len(tokens) < count:
        tokens += take_step(runner, 1, plan).wait()[0]
    runner.stop(0)
    return tokens[:count]


def prompts(questions: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """The tokens of the system prompt, and of the questions under it."""
    tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
    system = (SHIPPED_MODEL / "system_prompt.txt").read_text(encoding="utf-8").rstrip("\n")
    asked = [
        tokenizer.encode_chat([{"role": "system", "content": system}, {"role": "user", "content": question}])
        for question in questions
    ]
    return system_prompt_ids(tokenizer, system), asked


def gap_at(runner: DecodingRunner, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """How far apart the best two logits are after a prompt and some tokens of its answer."""
    base = runner.base
    base.start(0, [*prompt, *tokens], 0, SamplingValues()).wait()
    logits = sorted(base.logits(0).tolist())
    base.stop(0)
    return logits[-1] - logits[-2]


def compare(slots: tuple[DecodingRunner, EngineDirectory], folder: Path, questions: Sequence[str], count: int) -> int:
    """Ask with and without a snapshot; how many answers differ after a gap too small to tell. Fails at any other."""
    runner, _ = slots
    system, asked = prompts(questions)
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    save(snapshots.store, snapshots.compute(0, system, KVContents(), "system"), folder)
    close = 0
    for number, prompt in enumerate(asked):
        assert prompt[: len(system)] == system
        sampling = SamplingValues(temperature=0.8 * (number % 2), top_k=40, top_p=0.95, seed=number)
        cold = answered(runner, prompt, 0, count, sampling)
        reused = snapshots.restore(0, prompt, KVContents())
        assert reused == len(system) - runner.draft.has_model
        warm = answered(runner, prompt, reused, count, sampling)
        if warm != cold:
            first = next(index for index in range(count) if warm[index] != cold[index])
            assert sampling.temperature == 0 and gap_at(runner, prompt, cold[:first]) < SMALLEST_GAP, questions[number]
            close += 1
    return close


def test_answers_with_a_snapshot_are_those_without(
    slots: tuple[DecodingRunner, EngineDirectory], tmp_path: Path
) -> None:
    assert compare(slots, tmp_path, QUESTIONS[:4], 12) == 0


@pytest.mark.slow
def test_a_hundred_answers_with_a_snapshot_are_those_without(
    slots: tuple[DecodingRunner, EngineDirectory], tmp_path: Path
) -> None:
    questions = [f"{question} And {number} times {number + 3}?" for number in range(10) for question in QUESTIONS]
    close = compare(slots, tmp_path, questions, 24)
    print(f"{len(questions)} answers, {close} after a gap under {SMALLEST_GAP}")
    assert close <= 2


def test_the_shared_tokens_end_where_the_users_words_begin() -> None:
    tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
    system, asked = prompts(["7 apples", "Hello", "\n\nwhat?"])
    assert "wooden spoon" in tokenizer.decode(system)
    assert tokenizer.decode(system, skip_special_tokens=False).endswith("user\n")
    assert all(prompt[: len(system)] == system for prompt in asked[:2])
