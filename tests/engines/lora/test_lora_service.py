"""Adapters in a served model: chosen per request, in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm import LLM, SamplingParams
from edgellm.errors import AdapterError
from edgellm.requests import Request

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def test_requests_with_different_adapters_run_together(tiny_lora_engines: Path) -> None:
    names = ("wide", None, "mlp", "attention")
    pairs = [([7 * seed + index for index in range(20)], name) for seed in range(4) for name in names]
    with LLM(tiny_lora_engines, backend="numpy") as llm:
        expected = [llm.generate(prompt, PARAMS, name).token_ids for prompt, name in pairs]
    with LLM(tiny_lora_engines, backend="numpy") as served:
        for order in (pairs, pairs[::-1]):
            found = served.handle([Request(prompt=prompt, params=PARAMS, adapter=name) for prompt, name in order])
            by_pair = {(tuple(prompt), name): response for (prompt, name), response in zip(order, found, strict=True)}
            assert [by_pair[tuple(prompt), name].token_ids for prompt, name in pairs] == expected
        assert set(served.adapters) == {"attention", "mlp", "wide"}
        with pytest.raises(AdapterError, match="no adapter 'none'"):
            served.generate("x", adapter="none")
        assert served.call(lambda runtime: runtime._runner.base.adapts(slice(0, 3))).result() is False
