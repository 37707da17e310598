"""Serving on a GPU: steps captured ahead, slots that exchange rows, log-probabilities."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from gpu_device import cuda_device

from edgellm import Request, SamplingParams, SpecDecodeRuntime
from edgellm.decoding.loop import token_logprobs
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import LOGIT_TOLERANCES, open_runner, teacher_forced_logits

pytestmark = pytest.mark.gpu

DRAFTING = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * index + 5 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33, 11))]


@pytest.fixture(scope="module")
def engines(tiny_checkpoint: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its draft, four slots, built for this GPU."""
    target = tmp_path_factory.mktemp("gpu_serving") / "engines"
    limits = EngineLimits(4, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    build_engine_directory(tiny_checkpoint, target, limits, None, dtype="float16", draft=tiny_draft)
    return target


@pytest.fixture(params=["plain", "drafted"])
def open_runtime(engines: Path, request: pytest.FixtureRequest) -> Callable[[], SpecDecodeRuntime]:
    drafting = DRAFTING if request.param == "drafted" else None
    return lambda: SpecDecodeRuntime(engines, drafting=drafting, backend="tensorrt")


@contextmanager
def own_capture(runtime: SpecDecodeRuntime, own: Callable[..., object]) -> Iterator[None]:
    """`own(capture, step, name)` in the place of the backend's `capture(step, name)`."""
    backend = runtime._open_runner().backend
    with patch.object(backend, "capture", partial(own, backend.capture)):
        del backend  # it goes in the thread that closes the runtime
        yield


def test_steps_captured_ahead(open_runtime: Callable[[], SpecDecodeRuntime], caplog: pytest.LogCaptureFixture) -> None:
    requests = [Request(prompt, None, params) for params in (PARAMS, SAMPLED) for prompt in PROMPTS]
    with open_runtime() as lazily:
        expected = [lazily.handle_request(request).token_ids for request in requests]
    with open_runtime() as ahead, caplog.at_level(logging.WARNING):
        assert ahead.capture_decoding_cuda_graph() is True, ahead.uncaptured_stages
        captures: list[str] = []
        with own_capture(ahead, lambda capture, step, name: captures.append(name) or capture(step, name)):
            assert [ahead.handle_request(request).token_ids for request in requests] == expected
            assert len(ahead.handle_request(requests)) == len(requests)
        assert captures == []
    assert not [record for record in caplog.records if "capture" in record.getMessage()]


def test_what_cannot_be_captured_is_named(open_runtime: Callable[[], SpecDecodeRuntime]) -> None:
    with open_runtime() as runtime:
        expected = runtime.handle_request(Request(PROMPTS[0], None, PARAMS)).token_ids
    with patch("edgellm.engines.backends.cuda_device.CudaDevice.capture", lambda device, step, name: step):
        runtime = open_runtime()
    with runtime:
        assert runtime.capture_decoding_cuda_graph() is False
        assert any("plain decode of 4 sequences" in name for name in runtime.uncaptured_stages)
        assert runtime.handle_request(Request(PROMPTS[0], None, PARAMS)).token_ids == expected


def test_slots_exchange_and_copy_rows(open_runtime: Callable[[], SpecDecodeRuntime]) -> None:
    with open_runtime() as runtime:
        runtime.handle_request([Request(prompt, None, PARAMS) for prompt in PROMPTS])
        runner, held = runtime._open_runner(), held_rows(runtime)
        in_use = [runner.base.left[slot] for slot in range(4)]
        assert all(rows >= len(prompt) for rows, prompt in zip(in_use, PROMPTS, strict=True))
        runner.swap_rows(0, 2)
        runner.copy_rows(1, 3)
        now = held_rows(runtime)
        for slot, source in enumerate((2, 1, 0, 1)):
            assert runner.base.left[slot] == in_use[source]
            for found, expected in zip(now[slot], held[source], strict=True):
                np.testing.assert_array_equal(found[:, :, : in_use[source]], expected[:, :, : in_use[source]])


def held_rows(runtime: SpecDecodeRuntime) -> list[list[np.ndarray]]:
    """The KV rows of each slot, of every layer."""
    runner = runtime._open_runner()
    caches = [
        *runner.base.states.tensors.values(),
        *(runner.draft.states.tensors.values() if runtime.has_draft_model else ()),
    ]
    read = runner.backend.read
    return [[read(cache[slot : slot + 1]).wait().copy() for cache in caches] for slot in range(4)]


def test_conversations_find_their_rows(open_runtime: Callable[[], SpecDecodeRuntime]) -> None:
    with open_runtime() as runtime:
        talks = [list(prompt) for prompt in PROMPTS]
        for turn in range(3):
            for index in ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0))[turn]:
                response = runtime.handle_request(Request(talks[index], None, PARAMS))
                assert not turn or response.usage.reused_tokens >= len(talks[index]) - 2 - 5
                talks[index] += [*response.token_ids, 50 + turn]


def test_log_probabilities(engines: Path, open_runtime: Callable[[], SpecDecodeRuntime]) -> None:
    directory = EngineDirectory.open(engines)
    for values in ({}, {"temperature": 0.7, "seed": 3}):
        params = SamplingParams(max_tokens=11, ignore_eos=True, logprobs=5, **values)
        with open_runtime() as runtime:
            response = runtime.handle_request(Request(PROMPTS[0], None, params))
        with open_runner("numpy", directory) as runner:
            logits = teacher_forced_logits(runner, PROMPTS[0], list(response.token_ids))
        expected = token_logprobs(logits, response.token_ids, 5)
        tolerance = 2 * LOGIT_TOLERANCES["float16"] * float(np.abs(logits).max())
        for found, wanted in zip(response.logprobs, expected, strict=True):
            assert found.token_id == wanted.token_id and len(found.top) == 5
            assert found.logprob == pytest.approx(wanted.logprob, abs=tolerance)
            likeliest = ([value for _, value in each.top] for each in (found, wanted))
            np.testing.assert_allclose(*likeliest, atol=tolerance)


@pytest.mark.alone
def test_models_opened_in_turn_leave_no_memory_behind(open_runtime: Callable[[], SpecDecodeRuntime]) -> None:
    """In a context that stays, as it does where PyTorch is in the same process."""

    def lost(device: CudaDevice) -> int:
        free = []
        for _ in range(10):
            with open_runtime() as runtime:
                assert len(runtime.handle_request([Request(prompt, None, PARAMS) for prompt in PROMPTS])) == 4
            free.append(device.free_memory()[0])
        return free[1] - free[-1]

    with cuda_device() as device:
        losses: list[int] = []
        while len(losses) < 3 and (not losses or losses[-1] >= 3 << 20):  # another program may have taken as much
            losses.append(lost(device))
        assert losses[-1] < 3 << 20, losses
