"""What is not of the type that it should have is refused by name, before anything is computed."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import LLM, EdgeLLMError, Request, RequestError, SamplingParams


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": 5}, "the prompt is a int: expected text, or a list of token ids"),
        ({"prompt": iter([1, 2])}, "the prompt is a list_iterator"),
        ({"prompt": [1, 2**70]}, f"the token id {2**70}: expected 0 to {2**31 - 1}"),
        ({"prompt": np.array([2**40])}, f"the token id {2**40}: expected 0 to {2**31 - 1}"),
        ({"prompt": [1, -1]}, f"the token id -1: expected 0 to {2**31 - 1}"),
        ({"prompt": [True]}, "the prompt has True among its token ids: expected whole numbers"),
        ({"prompt": "x", "params": {"max_tokens": 3}}, "params is a dict: expected SamplingParams"),
        ({"prompt": "x", "adapter": ["json"]}, "adapter is a list: expected a LoRA adapter's name"),
        ({"prompt": "x", "stop_when": asyncio.sleep}, "stop_when is a function: expected a callable"),
        ({"prompt": "x", "images": None}, "images is a NoneType: expected a list of images"),
        ({"prompt": "x", "images": "cup.png"}, "images is a str: expected a list of images"),
    ],
)
def test_requests(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Request(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine_directory": ""}, "engine_directory is '': expected a path"),
        ({"drafting": "fast"}, "drafting is 'fast': expected DraftingConfig(...), \"auto\" or None"),
        ({"adapters": ["json"]}, "adapters is ['json']: expected directories by name"),
        ({"snapshots": "pip.safetensors"}, "snapshots is 'pip.safetensors': expected a list of files"),
        ({"snapshot_budget": -1}, "snapshot_budget is -1: expected a whole number of bytes"),
        ({"snapshot_budget": 1e9}, "snapshot_budget is 1000000000.0: expected a whole number of bytes"),
    ],
)
def test_options_of_a_model(serving_engines: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        LLM(**{"engine_directory": serving_engines, "backend": "numpy", **options})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda llm: llm.use_drafting("fast"), "drafting is 'fast': expected DraftingConfig(...), or None"),
        (lambda llm: llm.cache_system_prompt(None), "the system prompt is a NoneType: expected text, or a list"),
        (lambda llm: llm.submit("hello"), "a request is a str: expected Request(...)"),
        (pickle.dumps, "a model is of the process that opened it, and is not pickled or copied"),
        (copy.deepcopy, "a model is of the process that opened it, and is not pickled or copied"),
        (lambda llm: pickle.dumps(llm.create_session()), "a model is of the process that opened it"),
        (lambda llm: llm.generate("x", deadline="1"), "deadline is '1': expected a finite number of seconds"),
    ],
)
def test_what_is_asked_of_it(served: LLM, ask: Callable[[LLM], object], message: str) -> None:
    with pytest.raises(EdgeLLMError) as caught:
        ask(served)
    assert message in str(caught.value)


def test_a_wrong_request_among_others_has_its_error_for_a_result(served: LLM) -> None:
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    wrong, right = served.handle(["hello", Request("hello", params=short, deadline=np.float32(60))])
    assert isinstance(wrong, RequestError)
    assert right.finish_reason == "length"


def test_numbers_and_lists_of_numpy_are_taken(served: LLM) -> None:
    params = SamplingParams(
        max_tokens=np.int16(2),
        temperature=np.float32(1),
        seed=np.uint64(5),
        ignore_eos=np.bool_(True),
        stop_token_ids=np.array([7]),
        bad_words=[np.array([3, 4])],
        allowed_token_ids=np.arange(3, 20),
    )
    own = SamplingParams(max_tokens=2, temperature=1.0, seed=5, ignore_eos=True)
    assert params == replace(own, stop_token_ids=[7], bad_words=[[3, 4]], allowed_token_ids=range(3, 20))
    answer = served.generate(np.array([5, 6]), params, n=np.int64(2), priority=np.int8(1))
    assert [each.token_ids for each in answer.choices] == [
        each.token_ids for each in served.generate([5, 6], params, n=2, priority=1).choices
    ]
    assert type(Request("x", priority=np.int8(1)).priority) is int
    for wrong in (np.array([True, False]), 1, np.int64(1), "true"):
        with pytest.raises(RequestError, match="ignore_eos is"):
            SamplingParams(ignore_eos=wrong)
