"""Conversations that are drafted from what was said before, whatever that costs, and how the same is said plainly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_families import keeping_near

from edgellm import Request, SamplingParams, SpecDecodeRuntime
from edgellm.drafting import learner, own_plans
from edgellm.drafting.config import DraftingConfig

TREE = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False)
CHAIN = DraftingConfig(kind="chain", draft_top_k=1, draft_steps=3, adaptive=False)
MODES = {"plain": None, "tree": TREE, "chain": CHAIN, "suffix": DraftingConfig(kind="suffix")}
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, repetition_penalty=1.1, seed=3, max_tokens=10, ignore_eos=True)

Answer = tuple[int, ...]
#: Answers a prompt, with the given params or greedily.
Cold = Callable[..., Answer]


def ask_freely(patch: pytest.MonkeyPatch) -> None:
    """What was said before is asked however long its index takes on this machine."""
    patch.setattr(own_plans.Search, "is_due", lambda self, step, is_fresh=True: step >= self.begins)


@contextmanager
def drafting_freely(
    engines: Path, drafting: DraftingConfig | None, patch: pytest.MonkeyPatch
) -> Iterator[SpecDecodeRuntime]:
    """A runtime that drafts from whatever was said before, also where it does not pay."""
    patch.setattr(learner, "GAIN", 0.0)
    patch.setattr(own_plans, "MOST_REST", 0)
    ask_freely(patch)
    with SpecDecodeRuntime(engines, drafting=drafting, backend="numpy") as opened:
        yield keeping_near(opened)


@pytest.fixture(params=list(MODES))
def runtime(
    request: pytest.FixtureRequest, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SpecDecodeRuntime]:
    """`drafting_freely` in each mode, with the `engines` of the test's file."""
    with drafting_freely(engines, MODES[request.param], monkeypatch) as opened:
        yield opened


def text_request(prompt: list[int], params: SamplingParams) -> Request:
    """Token ids as they are."""
    return Request(prompt, None, params)


@contextmanager
def answering_cold(engines: Path, asked: Callable[[Any, SamplingParams], Request] = text_request) -> Iterator[Cold]:
    """Gives what answers prompts plainly, each as if it were the first; `asked` makes a request of a prompt."""
    answered: dict[tuple[tuple[Any, ...], SamplingParams], Answer] = {}
    with SpecDecodeRuntime(engines, backend="numpy", state_budget=0) as opened:

        def answer(prompt: Sequence[Any], params: SamplingParams = GREEDY) -> Answer:
            key = (tuple(prompt), params)
            if key not in answered:
                opened._forget_contents()
                response = opened.handle_request(asked(prompt, params))
                assert response.usage.reused_tokens == 0
                answered[key] = tuple(response.token_ids)
            return answered[key]

        yield answer


@pytest.fixture
def cold(engines: Path) -> Iterator[Cold]:
    """`answering_cold` with the `engines` of the test's file."""
    with answering_cold(engines) as answer:
        yield answer


def assert_same_in_every_order(
    runtime: SpecDecodeRuntime,
    cold: Cold,
    prompts: Sequence[Any],
    one_in: int,
    asked: Callable[[Any, SamplingParams], Request] = text_request,
) -> None:
    """Four prompts, with answers of several lengths, greedy and drawn, are answered as `cold` does in whatever order
    they are asked together; of the orders one in so many."""
    params = [GREEDY, replace(SAMPLED, max_tokens=17), replace(GREEDY, max_tokens=3), SAMPLED]
    pairs = list(zip(prompts, params, strict=True))
    expected, requests = [cold(*pair) for pair in pairs], [asked(*pair) for pair in pairs]
    for order in list(itertools.permutations(range(4)))[::one_in]:
        responses = runtime.handle_request([requests[place] for place in order])
        assert [tuple(response.token_ids) for response in responses] == [expected[place] for place in order]


def capturing_before(runtime: SpecDecodeRuntime, prompts: Iterable[Any]) -> Iterator[Any]:
    """The prompts; before each, some steps are captured behind what the slots hold."""
    for number, prompt in enumerate(prompts):
        captured = [runtime.idle() for _ in range(2)]
        assert number > 2 or all(captured), "everything was captured before"
        yield prompt


def tokens_reused(
    runtime: SpecDecodeRuntime,
    cold: Cold,
    prompts: Iterable[Any],
    asked: Callable[[Any, SamplingParams], Request] = text_request,
) -> int:
    """How many tokens of prompts, asked one after the other, were there already. They are answered as `cold` does, one
    in three drawn; kept states stay within their memory."""
    total = 0
    for number, prompt in enumerate(prompts):
        params = replace(SAMPLED, seed=number) if number % 3 == 0 else GREEDY
        response = runtime.handle_request(asked(prompt, params))
        assert tuple(response.token_ids) == cold(prompt, params), number
        total += response.usage.reused_tokens
        if runtime._states is not None:
            assert runtime._states.nbytes <= runtime._states.most * runtime._states.size
    return total


def giving_way(runtime: SpecDecodeRuntime, requests: Sequence[Request], rounds: int) -> tuple[bool, list[Answer]]:
    """The answers to requests, of which the first gives way to the others after so many rounds and goes on behind them;
    before them, whether it was kept meanwhile."""
    loop = runtime.loop()
    first, *others = map(runtime.prepare, requests)
    loop.admit(first)
    for _ in range(rounds):
        list(loop.advance())
    list(loop.settle())
    loop.give_way(first)
    was_kept = first.kept is not None
    for sequence in others:
        loop.admit(sequence)
    while any(not sequence.finished for sequence in others):
        list(loop.advance())
    loop.admit(first)
    while not first.finished:
        list(loop.advance())
    loop.abandon()
    return was_kept, [tuple(sequence.answer.token_ids) for sequence in (first, *others)]
