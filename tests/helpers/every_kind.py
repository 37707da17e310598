"""Requests and draftings of every kind, for the shipped model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from edgellm import Request, SamplingParams, SpecDecodeRuntime
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.directories.engine_directory import EngineDirectory

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = replace(PARAMS, temperature=0.9, seed=1, repetition_penalty=1.1, top_p=0.9)
#: How an answer may be drawn: greedily, sampled, biased, under rules that leave a choice, and that force tokens.
ALL_PARAMS = (
    PARAMS,
    SAMPLED,
    replace(PARAMS, logit_bias={7: 2.0}),
    replace(PARAMS, allowed_token_ids=[1, 7]),
    replace(SAMPLED, allowed_token_ids=[1]),
)
TREE = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12)
DRAFTINGS = {
    "plain": None,
    "tree": TREE,
    "chain": DraftingConfig(kind="chain", draft_steps=3),
    "sampled chain": DraftingConfig(kind="chain", draft_steps=2, sampled=True),
    "typical": replace(TREE, acceptance="typical"),
    "choices": DraftingConfig(kind="choices", choices=[[0], [1], [0, 0]]),
    "suffix": DraftingConfig(kind="suffix"),
    "both": replace(TREE, suffix_decoding=True),
    "adaptive": DraftingConfig(10, 6, 60, adaptive=True),
}


def for_sequences(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are opened for so many sequences at a time."""
    own: Callable[..., EngineDirectory] = EngineDirectory.with_kv_cache

    def with_kv_cache(directory: EngineDirectory, kv_cache: str | None) -> EngineDirectory:
        found = own(directory, kv_cache)
        return replace(found, limits=replace(found.limits, max_batch=batch))

    monkeypatch.setattr(EngineDirectory, "with_kv_cache", with_kv_cache)


def answer_all(runtime: SpecDecodeRuntime, batch: int, *more: SamplingParams) -> None:
    """Requests of every kind, alone and several at a time, those of `more` among them."""
    every = (*more, *ALL_PARAMS)
    kinds = [Request([5] * length, None, params) for length in (1, 3, 20, 65, 129, 300) for params in every]
    kinds += [replace(each, adapter="pirate") for each in kinds[: len(every)]]
    image = str(runtime.directory.path / "scenes" / "toys.png")
    shown: list[Any] = [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]
    kinds.append(Request(messages=[{"role": "user", "content": shown}], params=PARAMS))
    for number, request in enumerate(kinds):
        runtime.handle_request(request)
        if batch > 1:
            for response in runtime.handle_request(kinds[number : number + batch]):
                assert not isinstance(response, Exception), response
