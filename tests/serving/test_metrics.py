"""Metrics: what is counted, and the text form."""

from __future__ import annotations

import math
import re

import pytest

from edgellm import DraftingConfig, SamplingParams
from edgellm.llm import LLM
from edgellm.metrics import Histogram, Metrics
from edgellm.requests import Response, Timings, Usage

LINE = re.compile(r'edgellm_[a-z_]+(\{[a-z_]+="[^"\\\n]*"\})? (\+Inf|[0-9.e+-]+)')


def test_quantiles_are_bucket_bounds() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    assert histogram.quantile(0.5) is None
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.add(value)
    assert [histogram.quantile(share) for share in (0.25, 0.5, 0.75, 1.0)] == [1.0, 1.0, 2.0, 4.0]
    histogram.add(9.0)
    assert histogram.quantile(1.0) == math.inf
    assert (histogram.count, histogram.total) == (5, 15.0)


def test_counts_of_a_served_model(served: LLM) -> None:
    for _ in range(2):
        served.generate([1, 2, 3, 4], SamplingParams(max_tokens=5, ignore_eos=True))
    snapshot = served.metrics()
    assert snapshot["requests"] == {"accepted": 2, "refused": 0, "failed": 0, "finished": {"length": 2}}
    assert snapshot["prefill"].items() >= {"prompt_tokens": 8, "reused_tokens": 3}.items()
    assert snapshot["vanilla_generation"].items() >= {"requests": 2, "tokens": 10}.items()
    assert snapshot["eagle_generation"]["requests"] == 0
    assert snapshot["step_gap_seconds"]["count"] == 8
    assert snapshot["time_to_first_token_seconds"]["count"] == 2
    assert snapshot["rounds"] == 10
    assert (snapshot["steps"], snapshot["tokens"]) == (10, 10)


def test_the_text_form(served: LLM) -> None:
    served.generate([1, 2, 3, 4], SamplingParams(max_tokens=5, ignore_eos=True))
    text = served.metrics_text()
    assert text.endswith("\n")
    families: dict[str, str] = {}
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in families
            families[name] = kind
        elif not line.startswith("# HELP "):
            assert LINE.fullmatch(line), line
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
            family = next(iter(re.split(r"[{ ]", name)))
            assert family in families or re.sub("_(bucket|sum|count)$", "", family) in families
    assert values['edgellm_requests_ended_total{outcome="length"}'] == 1
    assert values["edgellm_requests_running"] == 0
    assert families["edgellm_step_gap_seconds"] == "histogram"
    buckets = [values[name] for name in values if name.startswith("edgellm_step_gap_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == values["edgellm_step_gap_seconds_count"] == 4
    assert values["edgellm_step_gap_seconds_sum"] == pytest.approx(served.metrics()["step_gap_seconds"]["sum"])


def test_what_drafting_gains_is_counted_for_each_adapter() -> None:
    """On the shipped model: the parts add up, and the text form has them as labels."""
    silent = {"role": "system", "content": ""}
    questions = [[silent, {"role": "user", "content": text}] for text in ("Hello!", "Wave.", "What is your name?")]
    with LLM(backend="numpy", drafting=DraftingConfig(draft_top_k=1, draft_steps=5)) as llm:
        for question, adapter in zip(questions, ("json", None, "json"), strict=True):
            llm.chat(question, adapter=adapter)
        answer = llm.chat(questions[0], adapter="pirate")
        snapshot, text = llm.metrics(), llm.metrics_text()
    under = snapshot["adapters"]
    assert {name: counts["requests"] for name, counts in under.items()} == {"json": 2, "pirate": 1}
    assert under["pirate"]["rounds"] == answer.drafting.rounds
    assert under["pirate"]["accepted_tokens"] == answer.drafting.accepted_tokens
    assert under["json"]["drafted_tokens"] > under["json"]["accepted_tokens"] > 0
    everything = snapshot["eagle_generation"]
    assert snapshot["tokens"] == everything["tokens"] > snapshot["steps"] >= everything["rounds"]
    assert everything["requests"] == 4
    assert everything["rounds"] > under["json"]["rounds"] + under["pirate"]["rounds"]
    assert f'edgellm_adapter_accepted_tokens_total{{adapter="json"}} {under["json"]["accepted_tokens"]}\n' in text


def test_labels_are_escaped() -> None:
    metrics = Metrics()
    response = Response("", (1,), "length", Usage(1, 0, 1), Timings(0.0, 0.0, 0.0, 0.0))
    metrics.ended(response, 'a "b"\\\n')
    assert 'edgellm_adapter_requests_total{adapter="a \\"b\\"\\\\\\n"} 1\n' in metrics.prometheus()
