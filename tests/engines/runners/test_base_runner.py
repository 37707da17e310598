"""The runner on the NumPy backend: prefill, decode, slots, sampling state, limits, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rounded_arithmetic import Distance, open_rounded_runner

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import DeviceMemoryError, EngineError
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.memory_plan import MemoryPlan, plan_memory
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.comparison import greedy_tokens, open_runner, teacher_forced_logits
from edgellm.engines.runners.sampling_state import SamplingValues

PROMPT = [(7 * index + 3) % 250 for index in range(40)]


@pytest.fixture(scope="module")
def directory(tiny_engines: Path) -> EngineDirectory:
    return EngineDirectory.open(tiny_engines)


@pytest.fixture
def runner(directory: EngineDirectory) -> Iterator[BaseEngineRunner]:
    with open_runner("numpy", directory) as opened:
        yield opened


def test_decode_equals_prefill_of_the_longer_prompt(runner: BaseEngineRunner) -> None:
    answer = greedy_tokens(runner, PROMPT, 12)
    stepwise = teacher_forced_logits(runner, PROMPT, answer)
    for count in range(len(answer)):
        runner.start(0, PROMPT + answer[:count], 0, SamplingValues()).wait()
        np.testing.assert_allclose(runner.logits(0), stepwise[count], atol=1e-4)


def test_rounded_arithmetic_has_the_distance_of_its_dtype(directory: EngineDirectory, runner: BaseEngineRunner) -> None:
    """What comparisons on a GPU take their bounds from is the rounding of products and sums, not of weights alone."""
    assert directory.dtype == "float16"
    answer = greedy_tokens(runner, PROMPT, 12)
    expected = teacher_forced_logits(runner, PROMPT, answer)
    with open_rounded_runner(directory) as rounded:
        distance = Distance.between(teacher_forced_logits(rounded, PROMPT, answer), expected)
    assert 1e-4 < distance.typical < 1e-2


@pytest.mark.parametrize("reused", [1, 15, 16, 17, 39])
def test_a_reused_prefix_changes_nothing(runner: BaseEngineRunner, reused: int) -> None:
    runner.start(0, PROMPT, 0, SamplingValues()).wait()
    whole = runner.logits(0)
    runner.start(0, PROMPT[:reused] + [5, 6, 7], reused, SamplingValues()).wait()
    runner.start(0, PROMPT, reused, SamplingValues()).wait()
    np.testing.assert_allclose(runner.logits(0), whole, atol=1e-4)


def test_a_stopped_slot_is_idle_and_the_other_goes_on(runner: BaseEngineRunner) -> None:
    expected = greedy_tokens(runner, PROMPT[:9], 6)
    runner.start(0, PROMPT, 0, SamplingValues()).wait()
    tokens = [int(runner.start(1, PROMPT[:9], 0, SamplingValues()).wait()[0])]
    runner.stop(0)
    for _ in range(5):
        idle, token = runner.decode(2).wait()
        assert idle == -1
        tokens.append(int(token))
    assert tokens == expected


def test_tokens_may_be_read_a_ring_later(runner: BaseEngineRunner) -> None:
    """Eight steps unread, of slots that started at different times."""
    expected = [greedy_tokens(runner, prompt, 12) for prompt in (PROMPT, PROMPT[:9])]
    runner.start(0, PROMPT, 0, SamplingValues()).wait()
    first = [runner.decode(1).wait()[0] for _ in range(3)]
    runner.start(1, PROMPT[:9], 0, SamplingValues()).wait()
    unread = [runner.decode(2) for _ in range(8)]
    rows = np.array([readback.wait() for readback in unread])
    assert [*first, *rows[:, 0]] == expected[0][1:]
    assert rows[:, 1].tolist() == expected[1][1:9]


def test_penalties_see_the_prompt_and_the_generated_tokens(runner: BaseEngineRunner) -> None:
    plain = greedy_tokens(runner, PROMPT, 20)
    values = SamplingValues(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=50.0)
    tokens = [int(runner.start(0, PROMPT, 0, values).wait()[0])]
    tokens += [int(runner.decode(1).wait()[0]) for _ in range(19)]
    assert len(set(tokens)) == len(tokens)
    assert not set(tokens) & set(PROMPT)
    assert len(set(plain)) < len(plain) or set(plain) & set(PROMPT)


def test_a_prompt_that_does_not_fit_is_refused_and_the_runner_goes_on(runner: BaseEngineRunner) -> None:
    expected = greedy_tokens(runner, PROMPT, 4)
    for prompt in ([], [1] * 96, [320], [-1], [1 << 31]):
        with pytest.raises(EngineError):
            runner.start(0, prompt, 0, SamplingValues())
    with pytest.raises(EngineError, match="at least the last one"):
        runner.start(0, PROMPT, len(PROMPT), SamplingValues())
    assert greedy_tokens(runner, PROMPT, 4) == expected


def test_decoding_ends_with_an_error_where_the_cache_is_full(runner: BaseEngineRunner) -> None:
    runner.start(0, [1] * 95, 0, SamplingValues()).wait()
    with pytest.raises(EngineError, match="full"):
        for _ in range(runner.limits.kv_rows):
            runner.decode(1)


def test_not_enough_memory_is_refused_with_the_plan(directory: EngineDirectory) -> None:
    limits = EngineLimits(max_batch=8, prefill_chunk=2048, kv_capacity=1 << 30)
    huge = replace(directory.config, max_position_embeddings=1 << 30)
    with pytest.raises(DeviceMemoryError, match=r"(?s)KV caches.*MiB.*--kv-capacity") as caught:
        BaseEngineRunner(NumpyBackend(huge), huge, limits, directory.checkpoint())
    assert "free" in str(caught.value)


def test_the_memory_plan_counts_what_is_allocated(runner: BaseEngineRunner) -> None:
    plan = runner.memory_plan
    assert plan.items["weights"] == sum(weight.nbytes for weight in runner.weights.values())
    assert plan.items["KV caches"] == sum(cache.nbytes for cache in runner.states.tensors.values())
    sampling = runner.sampling
    assert plan.items["logits and sampling"] == sum(
        array.nbytes for array in (runner._logits, sampling._processed, sampling.token_counts)
    )
    masks = sampling.masks
    assert plan.items["token masks"] == sum(
        array.nbytes for array in (masks.host_masks, masks.host_rows, masks.masks, masks.rows)
    )
    assert plan.items["token biases"] == sampling._bias.nbytes
    assert isinstance(plan, MemoryPlan)
    assert plan.total == sum(plan.items.values())


def test_the_memory_plan_of_a_published_size() -> None:
    """Llama-3.2-1B in fp16: 1,235,814,400 parameters; 16 layers of 8 heads of 64 are 32 KiB of KV a token."""
    from edgellm.engines.model.config import DecoderConfig
    from edgellm.engines.model.decoder import decoder_weights

    config = DecoderConfig(
        "llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 5e5, 64, "float16", tie_word_embeddings=True
    )
    limits = EngineLimits(max_batch=1, prefill_chunk=512, kv_capacity=1024)
    plan = plan_memory(config, limits, decoder_weights(config), "float16")
    assert plan.items["weights"] == 2 * 1_235_814_400
    assert plan.items["KV caches"] == 32 * 1024 * limits.kv_rows
    assert plan.items["token masks"] == 2 * 32 * (128256 // 8 + 4)
    drafting = replace(limits, max_batch=2, draft_top_k=10, draft_steps=6, verify_tree_size=60)
    assert drafting.has_draft and drafting.verify_sizes[-1] >= 60
    masks = plan_memory(config, drafting, decoder_weights(config), "float16").items["token masks"]
    assert masks == 2 * 2 * drafting.verify_sizes[-1] * (128256 // 8 + 4)


def test_a_failure_at_the_end_leaves_nothing_open(directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def fail() -> None:
        raise EngineError("an illegal memory access was encountered")

    with pytest.raises(EngineError, match="illegal memory access"), open_runner("numpy", directory) as runner:
        monkeypatch.setattr(runner.backend, "synchronize", fail)
        monkeypatch.setattr(runner.backend, "close", lambda: log.append("closed"))
    assert log == ["closed"]
    assert not (runner.states.tensors or runner.weights or runner.engines.loaded)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (1, (16,)),
        (17, (128,)),
        (130, (512,)),
        (600, (512, 128)),
        (640, (512, 128)),
        (641, (512, 512)),
        (1600, (512, 512, 512, 128)),
        (1904, (2048,)),
    ],
)
def test_a_prompt_is_cut_into_the_cheapest_chunks(count: int, sizes: tuple[int, ...]) -> None:
    limits = EngineLimits(prefill_chunk=2048)
    assert limits.cheapest_chunks(count) == sizes
    assert sum(sizes[:-1]) < count <= sum(sizes)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(16, (16,)), (17, (32,)), (33, (64,)), (65, (128,)), (130, (512,)), (560, (512, 64)), (600, (512, 128))],
)
def test_with_packed_weights_short_rests_are_not_worth_dequantizing(count: int, sizes: tuple[int, ...]) -> None:
    assert EngineLimits(prefill_chunk=2048, packed=True).cheapest_chunks(count) == sizes


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [16, 112, 512, 2048])
def test_caches_have_room_for_the_padding_of_every_prompt(chunk: int, packed: bool) -> None:
    limits = EngineLimits(prefill_chunk=chunk, kv_capacity=4096, packed=packed)
    padding = max(sum(limits.cheapest_chunks(count)) - count for count in range(1, chunk))
    assert limits.kv_capacity + padding < limits.kv_rows <= limits.kv_capacity + padding + 1
