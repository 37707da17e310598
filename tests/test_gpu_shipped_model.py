"""The shipped model on a GPU against the NumPy backend: logits, greedy answers, determinism, graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import LOGIT_TOLERANCES, greedy_tokens, open_runner, teacher_forced_logits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.llm import LLM
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.sampling_params import SamplingParams
from tools.bench.draw_comparison import first_difference, spacing

pytestmark = pytest.mark.gpu

SYSTEM = (SHIPPED_MODEL / "system_prompt.txt").read_text() if (SHIPPED_MODEL / "system_prompt.txt").exists() else ""
QUESTIONS = [
    "Hello!",
    "What is your name?",
    "Where are you?",
    "How full is your battery?",
    "What objects are on the table?",
    "How many objects are there?",
    "Where is the red cup?",
    "What colour is the ball?",
    "Is there a banana?",
    "Pick up the cup.",
    "Put the ball next to the cup.",
    "Wave at me, please.",
    "Can you fly to the moon?",
    "Push the block to the left.",
    "Tell me a joke.",
    "What do you like?",
    "Thank you!",
    "who made you",
    "Do you like music?",
    "Goodbye.",
]
ANSWER_TOKENS = 48


def until_end(tokens: list[int], directory: EngineDirectory) -> list[int]:
    """The tokens up to the first that ends the answer, that one included: the model means nothing by what follows."""
    ends = [index for index, token in enumerate(tokens) if token in directory.config.eos_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    target = tmp_path_factory.mktemp("engines") / request.param
    limits = EngineLimits(max_batch=1, prefill_chunk=128, kv_capacity=1024)
    build_engine_directory(SHIPPED_MODEL, target, limits, None, dtype=request.param)
    return EngineDirectory.open(target)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from edgellm.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(SHIPPED_MODEL)
    system = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    return [tokenizer.encode_chat([*system, {"role": "user", "content": question}]) for question in QUESTIONS]


def assert_differs_only_by_rounding(
    directory: EngineDirectory, answers: list[list[int]], found: list[list[int]], logits: list[np.ndarray]
) -> None:
    """What was `found` parts from the greedy `answers` rarely, and only where the two likeliest tokens are close.

    `logits` are those that led to the answers, [tokens, V] each.
    """
    different = 0
    for question, answer, other, led in zip(QUESTIONS, answers, found, logits, strict=True):
        first = first_difference(answer, other)
        if first is None:
            continue
        different += 1
        second, top = np.sort(led[first])[-2:]
        allowed = 4 * spacing(top, directory.dtype)
        print(f"{question!r} differs first at token {first}: top-2 gap {top - second:.4g}, allowed {allowed:.4g}")
        assert top - second < allowed
    print(f"{directory.dtype}: {different} of {len(QUESTIONS)} greedy answers differ")
    assert different <= 0.1 * len(QUESTIONS)


def test_logits_and_greedy_answers_agree_with_numpy(directory: EngineDirectory, prompts: list[list[int]]) -> None:
    with open_runner("numpy", directory) as runner:
        answers = [until_end(greedy_tokens(runner, prompt, ANSWER_TOKENS), directory) for prompt in prompts]
        expected = [teacher_forced_logits(runner, *pair) for pair in zip(prompts, answers, strict=True)]
    with open_runner("tensorrt", directory) as runner:
        found = [teacher_forced_logits(runner, *pair) for pair in zip(prompts, answers, strict=True)]
        greedy = [greedy_tokens(runner, *pair) for pair in zip(prompts, map(len, answers), strict=True)]
    largest = max(np.abs(logits).max() for logits in expected)
    difference = max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))
    print(f"\n{directory.dtype}: max |difference of logits| is {difference / largest:.3%} of max |logit| {largest:.2f}")
    assert difference <= LOGIT_TOLERANCES[directory.dtype] * largest
    assert_differs_only_by_rounding(directory, answers, greedy, expected)


def test_the_captured_step_equals_the_uncaptured_one(
    directory: EngineDirectory, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_runner("tensorrt", directory) as runner:
        captured = [greedy_tokens(runner, prompt, 16) for prompt in prompts[:4]]
        assert runner.steps.captures
    with open_runner("tensorrt", directory) as runner:
        monkeypatch.setattr(runner.backend, "capture", lambda step, name: step)
        assert [greedy_tokens(runner, prompt, 16) for prompt in prompts[:4]] == captured


def test_chunked_prefill_equals_another_cut(directory: EngineDirectory, prompts: list[list[int]]) -> None:
    """A prompt in one chunk of 128, and row by row through chunks of 16, leads to nearly the same logits."""
    prompt = (prompts[4] * 3)[:120]
    with open_runner("tensorrt", directory) as runner:
        runner.start(0, prompt, 0, SamplingValues()).wait()
        whole = runner.logits(0)
        for end in (40, 56, 100):
            runner.start(0, prompt[:end], 0, SamplingValues()).wait()
        runner.start(0, prompt, 99, SamplingValues()).wait()
        pieces = runner.logits(0)
    assert np.abs(whole - pieces).max() <= 2 * LOGIT_TOLERANCES[directory.dtype] * np.abs(whole).max()


@pytest.mark.parametrize("kept", [1, 10, 40], ids=lambda kept: f"the last {kept} are computed")
def test_answers_with_reused_rows_are_those_without(
    directory: EngineDirectory, prompts: list[list[int]], kept: int
) -> None:
    """A short rest of a prompt is prefilled by other kernels than the whole: rounding alone may decide otherwise."""
    with open_runner("tensorrt", directory) as runner:
        answers, again, logits = [], [], []
        for prompt in prompts:
            answer = until_end(greedy_tokens(runner, prompt, ANSWER_TOKENS), directory)
            answers.append(answer)
            logits.append(teacher_forced_logits(runner, prompt, answer))
            # The rows that the answer wrote behind the prompt are not among those that are reused.
            first = runner.start(0, prompt, len(prompt) - min(kept, len(prompt)), SamplingValues()).wait()
            tokens = [int(first[0])]
            while len(tokens) < len(answer):
                tokens.append(int(runner.decode(1).wait()[0]))
            runner.stop(0)
            again.append(tokens)
    assert_differs_only_by_rounding(directory, answers, again, logits)


def test_sampling_with_a_seed_repeats(directory: EngineDirectory) -> None:
    params = SamplingParams(
        temperature=3.0, top_k=40, top_p=0.99, min_p=0.001, repetition_penalty=1.1, seed=7, max_tokens=40
    )
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "Tell me about your day."}]
    with LLM(directory.path, backend="tensorrt") as model:
        # The first prompt is prefilled as a whole, of later ones the last token alone, by other kernels: rounding may
        # decide between their answers. Seeds repeat under the same conditions.
        model.chat(messages, params)
        first, second = (model.chat(messages, params) for _ in range(2))
        greedy = model.chat(messages, SamplingParams(max_tokens=40))
    assert first.token_ids == second.token_ids
    assert second.usage.reused_tokens == second.usage.prompt_tokens - 1
    assert first.token_ids != greedy.token_ids


def test_capture_failure_costs_one_warning_and_no_function(
    directory: EngineDirectory, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that cannot be captured (one is being captured already) still decodes the same tokens."""
    with open_runner("tensorrt", directory) as runner:
        expected = greedy_tokens(runner, prompts[0], 8)
    with open_runner("tensorrt", directory) as runner:

        def fail(step: object) -> None:
            raise RuntimeError("capture is not possible")

        runner.backend._capture = fail
        assert greedy_tokens(runner, prompts[0], 8) == expected
    assert sum("capture" in record.message for record in caplog.records) == 1


def test_a_damaged_plan_is_refused_and_built_again(
    directory: EngineDirectory, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Where TensorRT runs prompts: kernels need no plan."""
    assert not list(Path(directory.path).glob("plans/*/base.*.engine"))
    with open_runner("tensorrt", directory, executor="tensorrt") as runner:
        assert len(greedy_tokens(runner, prompts[0], 4)) == 4
    plans = sorted(Path(directory.path).glob("plans/*/base.prefill-*.engine"))
    assert plans, "opening on this GPU made no plans"
    damaged = bytearray(plans[0].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    plans[0].write_bytes(damaged)
    with open_runner("tensorrt", directory, executor="tensorrt") as runner:
        assert len(greedy_tokens(runner, prompts[0], 4)) == 4
    assert any("SHA-256" in record.message for record in caplog.records)
    assert plans[0].read_bytes() != bytes(damaged)


def test_a_command_frees_what_it_made_where_it_was_made() -> None:
    """pycuda warns of what another thread than the one that made it lets go of."""
    command = [sys.executable, "-W", "always", "-m", "edgellm", "generate", "Where is the red cup?"]
    done = subprocess.run([*command, "--backend", "tensorrt"], capture_output=True, text=True, check=True)
    assert "front left" in done.stdout
    assert "could not be cleaned up" not in done.stderr
