"""Log-probabilities of tokens: those of the model's own distribution, drafted or not, sampled or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fixed_shape_backend import FixedShapeBackend

from edgellm import LLM, Request, SamplingParams, SpecDecodeRuntime
from edgellm.decoding.loop import token_logprobs
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.comparison import open_runner, teacher_forced_logits
from edgellm.requests import Response, TokenLogprobs

PROMPT = [7, 8, 9, 10, 11]
ASKED = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "top_k": 40, "seed": 3},
    "penalized": {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 3},
    "greedy, penalized": {"frequency_penalty": 0.7},
}
DRAFTINGS = {
    "plain": None,
    "tree": DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12),
    "sampled chain": DraftingConfig(draft_top_k=1, draft_steps=3, verify_tree_size=4, kind="chain", sampled=True),
}


def test_the_definition() -> None:
    logits = np.array([[0.0, 2.0, 2.0, -1.0], [1.0, 1.0, 1.0, 1.0]], np.float32)
    first, second = token_logprobs(logits, [3, 2], 2)
    total = np.log(np.exp([0.0, 2.0, 2.0, -1.0]).sum())
    assert (first.token_id, first.top) == (3, ((1, pytest.approx(2 - total)), (2, pytest.approx(2 - total))))
    assert first.logprob == pytest.approx(-1 - total)
    assert second == TokenLogprobs(2, pytest.approx(-np.log(4)), ((0, second.logprob), (1, second.logprob)))
    assert token_logprobs(logits[:1], [1], 0)[0].top == ()
    assert len(token_logprobs(logits[:1], [1], 20)[0].top) == 4
    assert token_logprobs(np.array([[3e4, -3e4]], np.float32), [1], 1)[0].logprob == -6e4
    masked = np.array([[-np.inf, 1.0, -np.inf, 1.0]], np.float32)
    (found,) = token_logprobs(masked, [3], 3)
    assert [token for token, _ in found.top] == [1, 3]
    assert [found.logprob, *(value for _, value in found.top)] == pytest.approx([np.log(0.5)] * 3)


@pytest.fixture(scope="module")
def reference(serving_engines: Path) -> Iterator[Callable[[tuple[int, ...]], np.ndarray]]:
    """The logits that led to each token of an answer, computed token by token."""
    with open_runner("numpy", EngineDirectory.open(serving_engines)) as runner:
        yield lambda tokens: teacher_forced_logits(runner, PROMPT, list(tokens))


def check(response: Response, logits: np.ndarray, top: int) -> None:
    expected = token_logprobs(logits[: len(response.token_ids)], response.token_ids, top)
    assert [each.token_id for each in response.logprobs] == list(response.token_ids)
    for found, wanted in zip(response.logprobs, expected, strict=True):
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
        assert [value for _, value in found.top] == pytest.approx([value for _, value in wanted.top], abs=1e-4)


@pytest.fixture(scope="module", params=["numpy", "captured"])
def open_model(request: pytest.FixtureRequest, serving_engines: Path) -> Callable[..., SpecDecodeRuntime]:
    def open_runtime(drafting: DraftingConfig | None) -> SpecDecodeRuntime:
        with pytest.MonkeyPatch.context() as patch:
            if request.param == "captured":
                patch.setattr(
                    "edgellm.opened_model.open_backend", lambda _, directory, *others: FixedShapeBackend(directory)
                )
            return SpecDecodeRuntime(serving_engines, drafting=drafting, backend="numpy")

    return open_runtime


@pytest.mark.parametrize("drafting", DRAFTINGS.values(), ids=DRAFTINGS)
def test_they_are_the_models_own(
    open_model: Callable[..., SpecDecodeRuntime],
    drafting: DraftingConfig | None,
    reference: Callable[[tuple[int, ...]], np.ndarray],
) -> None:
    with open_model(drafting) as runtime:
        for name, values in ASKED.items():
            asked = Request(PROMPT, None, SamplingParams(max_tokens=11, ignore_eos=True, logprobs=5, **values))
            response = runtime.handle_request(asked)
            check(response, reference(response.token_ids), 5)
            assert drafting is None or (response.drafting.rounds > 0) == ("penalized" not in name)
            without = Request(PROMPT, None, SamplingParams(max_tokens=11, ignore_eos=True, **values))
            assert runtime.handle_request(without).logprobs is None
            if drafting is None or not drafting.sampled:
                assert runtime.handle_request(without).token_ids == response.token_ids


@pytest.mark.parametrize("drafting", DRAFTINGS.values(), ids=DRAFTINGS)
def test_in_a_batch_of_others(
    open_model: Callable[..., SpecDecodeRuntime],
    drafting: DraftingConfig | None,
    reference: Callable[[tuple[int, ...]], np.ndarray],
) -> None:
    requests = [
        Request(PROMPT, None, SamplingParams(max_tokens=9, ignore_eos=True, logprobs=top, **values))
        for top, values in ((3, ASKED["greedy"]), (None, ASKED["sampled"]), (0, ASKED["sampled"]))
    ]
    with open_model(drafting) as runtime:
        first, second, third = runtime.handle_request(requests)
    check(first, reference(first.token_ids), 3)
    check(third, reference(third.token_ids), 0)
    assert second.logprobs is None


def test_chunks_have_them(serving_engines: Path) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2)
    with LLM(serving_engines, backend="numpy", drafting=DRAFTINGS["tree"]) as llm:
        generation = llm.stream(PROMPT, params)
        chunks = list(generation)
        assert tuple(each for chunk in chunks for each in chunk.logprobs) == generation.result().logprobs
        assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
        assert not any(chunk.logprobs for chunk in llm.stream(PROMPT, SamplingParams(max_tokens=3)))


def test_the_command_line(serving_engines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from edgellm.commands.app import run

    arguments = ["generate", "--raw", "abc", "-m", str(serving_engines), "--backend", "numpy", "--max-tokens", "4"]
    with pytest.raises(SystemExit):
        run([*arguments, "--logprobs", "2", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert [each["token_id"] for each in answer["logprobs"]] == answer["token_ids"]
    assert all(each["logprob"] <= 0 and len(each["top"]) == 2 for each in answer["logprobs"])
    with pytest.raises(SystemExit):
        run([*arguments, "--logprobs", "1"])
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == len(answer["token_ids"]) and captured.out.strip() == answer["text"].strip()
