"""`SpecDecodeRuntime` by itself: requests, capture of decoding steps, snapshots, metrics."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fixed_shape_backend import FixedShapeBackend

from edgellm import EdgeLLMError, Request, RequestError, SamplingParams, SpecDecodeRuntime
from edgellm.drafting.config import DraftingConfig
from edgellm.errors import EngineDirectoryError
from edgellm.tracing import Trace

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True)
PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 8], [9] * 20, [10, 11])


def test_a_request_and_a_list_of_them(runtime: SpecDecodeRuntime) -> None:
    alone = [runtime.handle_request(Request(prompt, None, SAMPLED)).token_ids for prompt in PROMPTS]
    together = runtime.handle_request([Request(prompt, None, SAMPLED) for prompt in PROMPTS])
    assert [response.token_ids for response in together] == alone
    assert runtime.handle_request([]) == []


def test_a_failing_request_raises_and_the_runtime_stays_usable(runtime: SpecDecodeRuntime) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        runtime.handle_request(Request([]))
    for token in (5000, 320):  # one below 0 is no request
        with pytest.raises(EdgeLLMError, match=rf"the token id {token}, .* 0\.\.319"):
            runtime.handle_request(Request([319, token]))
    good, bad, late = runtime.handle_request(
        [Request([1, 2], None, PARAMS), Request([5000]), Request([1, 2], None, PARAMS, deadline=1e-9)]
    )
    assert len(good.token_ids) == 12 and isinstance(bad, EdgeLLMError) and late.finish_reason == "deadline"
    with pytest.raises(RequestError, match="has no vision model"):
        runtime.handle_request(Request([1, 2], images=["cup.png"]))
    assert runtime.handle_request(Request([1, 2], None, PARAMS)).token_ids == good.token_ids


@pytest.mark.parametrize("prompt", [b"hello", bytearray(b"hello"), [1, 2.0], [1, "2"], (None,), np.array([0.5])])
def test_prompts_that_are_neither_text_nor_token_ids(prompt: object) -> None:
    with pytest.raises(RequestError, match="the prompt"):
        Request(prompt)


def test_token_ids_of_numpy_are_token_ids(runtime: SpecDecodeRuntime) -> None:
    expected = runtime.handle_request(Request([1, 2], None, PARAMS)).token_ids
    assert runtime.handle_request(Request(np.array([1, 2], np.int32), None, PARAMS)).token_ids == expected


def test_another_thread_is_told_that_it_is_in_use(runtime: SpecDecodeRuntime, tmp_path: Path) -> None:
    expected = runtime.handle_request(Request([1, 2], None, PARAMS)).token_ids
    kept = runtime.generate_and_save_system_prompt_kv_cache("be brief", path=tmp_path / "brief.safetensors")
    refused: list[str] = []

    def use_all() -> None:
        for use in (
            lambda: runtime.handle_request(Request([1, 2], None, PARAMS)),
            lambda: runtime.generate_and_save_system_prompt_kv_cache("be brief"),
            lambda: runtime.load_snapshot(kept.path),
            lambda: runtime.use_drafting(None),
            lambda: runtime.observe(None),
            runtime.capture_decoding_cuda_graph,
        ):
            try:
                use()
            except RequestError as error:
                refused.append(str(error))

    counted, threads = runtime.metrics.round, [threading.Thread(target=use_all)]

    def meanwhile() -> None:
        counted()
        if threads:
            thread = threads.pop()
            thread.start()
            thread.join()

    runtime.metrics.round = meanwhile
    assert runtime.handle_request(Request([1, 2], None, PARAMS)).token_ids == expected
    assert len(refused) == 6 and all("in use by another thread" in message for message in refused)


def test_closing_goes_on_where_a_part_of_it_fails(runtime: SpecDecodeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    runner, close = runtime._runner, runtime._runner.close
    monkeypatch.setattr(runner, "close", lambda: closed.append(close()))
    monkeypatch.setattr(runtime._snapshots, "close", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runtime.close()
    assert closed == [None]
    with pytest.raises(RequestError, match="closed"):
        runtime.handle_request(Request([1, 2], None, PARAMS))
    runtime.close()


def test_what_it_has(runtime: SpecDecodeRuntime, drafting: DraftingConfig | None, serving_engines: Path) -> None:
    assert runtime.has_draft_model is (drafting is not None)
    assert any("draft" in item for item in runtime._open_runner().base.memory_plan.items) is runtime.has_draft_model
    assert not runtime.has_vision_model
    with pytest.raises(EngineDirectoryError, match="has no vision model"):
        SpecDecodeRuntime(serving_engines, serving_engines, backend="numpy")


def test_metrics_of_the_stages(runtime: SpecDecodeRuntime) -> None:
    runtime.handle_request(Request([1, 2, 3, 4], None, PARAMS))
    runtime.handle_request(Request([1, 2, 3, 4, 5], None, PARAMS))
    counts = runtime.metrics.snapshot()
    used, unused = counts["vanilla_generation"], counts["eagle_generation"]
    if runtime.has_draft_model:
        used, unused = unused, used
        assert used["rounds"] > 0
    assert (used["requests"], used["tokens"], unused["requests"]) == (2, 24, 0)
    assert counts["prefill"]["prompt_tokens"] == 9 and counts["prefill"]["reused_tokens"] >= 3
    assert counts["multimodal"]["images"] == 0


def test_a_system_prompt_is_kept_in_memory_and_in_a_file(runtime: SpecDecodeRuntime, tmp_path: Path) -> None:
    kept = runtime.generate_and_save_system_prompt_kv_cache("be kind", path=tmp_path / "kind.safetensors")
    assert kept.path.stat().st_size == kept.nbytes
    runtime.handle_request([Request([90 + index], None, PARAMS) for index in range(4)])
    asked = Request(messages=[{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}])
    assert runtime.handle_request(asked).usage.reused_tokens >= kept.tokens - runtime.has_draft_model


def test_numpy_has_nothing_to_capture(runtime: SpecDecodeRuntime) -> None:
    assert runtime.capture_decoding_cuda_graph() is False
    assert runtime.uncaptured_stages == ("all: the numpy backend computes at once",)


def test_what_was_captured_ahead_is_what_decoding_runs(
    captured: Callable[..., tuple[SpecDecodeRuntime, FixedShapeBackend]],
    runtime: SpecDecodeRuntime,
    drafting: DraftingConfig | None,
) -> None:
    ahead, backend = captured(drafting)
    with ahead:
        requests = [Request(prompt, None, params) for params in (PARAMS, SAMPLED) for prompt in PROMPTS]
        before = ahead.handle_request(requests[:1])
        while ahead.idle():
            pass
        assert ahead.capture_decoding_cuda_graph() is True and ahead.uncaptured_stages == ()
        limits, count = ahead.directory.limits, len(backend.captures)
        assert count >= 2 * len(limits.batches) * len(limits.key_ranges)
        found = ahead.handle_request([*requests, *requests[:1]])
        assert len(backend.captures) == count  # nothing was left to capture
        expected = [response.token_ids for response in runtime.handle_request(requests)]
        assert [response.token_ids for response in found] == [*expected, expected[0]]
        assert before[0].token_ids == expected[0] and found[-1].usage.reused_tokens > 0


def test_what_cannot_be_captured_is_named_and_runs(
    captured: Callable[..., tuple[SpecDecodeRuntime, FixedShapeBackend]],
    runtime: SpecDecodeRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafting = DraftingConfig(draft_top_k=1, draft_steps=3, verify_tree_size=4, kind="chain")
    capture = FixedShapeBackend.capture

    def fail_some(backend: FixedShapeBackend, step: Callable[[], None], name: str) -> Callable[[], None]:
        fails = name.startswith(("draft proposal of the step RoundKey(batch=2", "the step RoundKey(batch=2"))
        return step if fails else capture(backend, step, name)

    monkeypatch.setattr(FixedShapeBackend, "capture", fail_some)
    ahead, _ = captured(drafting)
    with ahead:
        assert ahead.capture_decoding_cuda_graph() is False
        assert ahead.uncaptured_stages
        named = ahead.uncaptured_stages
        names = [re.fullmatch(r"draft proposal, chain ([123]) of 2 sequences.*", each) for each in named]
        assert {name and name[1] for name in names} == {"1", "2", "3"}
        asked = [Request(prompt, None, PARAMS) for prompt in PROMPTS[:2]]
        expected = [response.token_ids for response in runtime.handle_request(asked)]
        assert [response.token_ids for response in ahead.handle_request(asked)] == expected


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("on_captures", [False, True])
def test_closing_frees_the_engines_in_that_thread(
    serving_engines: Path, drafting: DraftingConfig | None, captured: Callable, on_captures: bool, observed: bool
) -> None:
    """Not whenever some thread collects garbage: what another one frees of a GPU's memory stays lost."""
    if on_captures:
        runtime = captured(drafting)[0]
    else:
        runtime = SpecDecodeRuntime(serving_engines, drafting=drafting, backend="numpy")
    if observed:
        runtime.observe(Trace())
    requests = [Request([1, 2, 3], None, SamplingParams(temperature=heat, max_tokens=5)) for heat in (0.0, 0.9)]
    runtime.handle_request(requests)
    for request in requests:
        runtime.handle_request(request)
    gc.collect()
    gc.disable()
    try:
        runner = runtime._open_runner()
        left = [weakref.ref(runner)]
        if not on_captures:  # that test's backend and its kernels hold each other
            left.append(weakref.ref(runner.backend))
        del runner
        runtime.close()
        assert not any(each() for each in left)
    finally:
        gc.enable()
