"""What answers of a given form cost, and what forced tokens give: the shipped model's JSON adapter, greedily.

    python tools/bench/json_answers_speed.py [--backend numpy] [--repeats 5] [--output RESULTS.json]

The ways of answering take turns. "masks alone" is a regular expression that allows every answer: each step has a
mask, nothing is forced, and the tokens are those without a structure. Milliseconds are of a token behind the first,
the median of `--repeats` runs over all questions, then the fastest run and the slowest; `ratio` is the median of each
run's time over that of the run without a structure beside it. `masks` are those of the answers' own places in the
schema, computed anew, in microseconds; before the first one the tokenizer is read for grammars, and the schema is
compiled, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from operator import truediv
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance, report

from edgellm import LLM, SamplingParams, Structure
from edgellm.engines.speculation.constraints import mask_words
from edgellm.structure.answers import RuleMaker

QUESTIONS = (
    "Put the red cup in the bowl, please.",
    "Give me the banana.",
    "Place the green apple left of the white bowl.",
    "Pick up the wooden spoon.",
    "Wave at me, please.",
    "Point at the blue cup.",
)
THINGS = ["red cup", "blue cup", "white bowl", "yellow banana", "green apple", "wooden spoon"]
SCHEMA = {
    "type": "object",
    "properties": {
        "action": {"enum": ["pick", "place", "give", "point", "wave", "say"]},
        "object": {"enum": THINGS},
        "relation": {"enum": ["in", "on", "left of", "right of", "next to"]},
        "target": {"enum": THINGS},
        "text": {"type": "string", "maxLength": 80},
    },
    "required": ["action"],
    "additionalProperties": False,
}
WAYS = {
    "no structure": (None, False),
    "masks alone": (Structure(regex="(?s:.*)"), False),
    "the schema, forced tokens as drafts": (Structure(json=SCHEMA), False),
    "no structure, drafted": (None, True),
    "masks alone, drafted": (Structure(regex="(?s:.*)"), True),
    "the schema, drafted": (Structure(json=SCHEMA), True),
}


def times(model: LLM, repeats: int) -> dict[str, Any]:
    """Milliseconds a token of each way, with the tokens of its answers."""
    drafting = model.drafting
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    tokens: dict[str, list[tuple[int, ...]]] = {}
    for _ in range(repeats + 1):  # the first is not counted
        for way, (structure, drafted) in WAYS.items():
            model.use_drafting(drafting if drafted else None)
            params = SamplingParams(max_tokens=100, structure=structure)
            answers = [model.chat(ask(each), params, adapter="json") for each in QUESTIONS]
            tokens[way] = [answer.token_ids for answer in answers]
            spent = sum(answer.timings.decode_seconds for answer in answers)
            seconds[way].append(spent / sum(len(answer.token_ids) - 1 for answer in answers))
    return {
        way: {
            "milliseconds": [round(1e3 * pick(spans[1:]), 3) for pick in (statistics.median, min, max)],
            "ratio": round(statistics.median(map(truediv, spans[1:], seconds["no structure"][1:])), 3),
            "tokens": sum(map(len, tokens[way])),
            "same tokens as without structure": tokens[way] == tokens["no structure"],
        }
        for way, spans in seconds.items()
    }


def ask(question: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "user", "content": question}]


def masks(model: LLM) -> dict[str, Any]:
    """What masks of the schema take at the places of the model's own answers."""
    config = model.directory.config
    params = SamplingParams(structure=SCHEMA)
    row, spans, forced = np.empty(mask_words(config.vocab_size), np.uint32), [], 0
    ready: list[float] = []
    compiled: list[float] = []
    for question in QUESTIONS:
        answer = model.chat(ask(question), params, adapter="json")
        maker = RuleMaker(model.tokenizer, config.vocab_size, model.directory.config.eos_token_ids)
        began = time.perf_counter()
        maker.vocabulary()
        ready.append(1e3 * (time.perf_counter() - began))
        rules = maker.rules(params, [0])
        compiled.append(1e3 * (time.perf_counter() - began) - ready[-1])
        assert rules is not None
        for token in answer.token_ids:
            forced += bool(rules.constraint.forced(16))
            began = time.perf_counter()
            rules.constraint.fill_mask(row)
            spans.append(1e6 * (time.perf_counter() - began))
            assert rules.constraint.try_advance(token)
    quantiles = {f"p{q}": round(float(np.percentile(spans, q)), 1) for q in (50, 90, 99)}
    first = {"tokenizer": round(statistics.median(ready), 1), "schema": round(statistics.median(compiled), 1)}
    return {**quantiles, "places": len(spans), "of them forced": forced, "milliseconds before": first}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with LLM(backend=options.backend) as model:
        found = {**provenance(), "vocabulary": model.directory.config.vocab_size, "repeats": options.repeats}
        found.update(times=times(model, options.repeats), masks=masks(model))
    report(found, options.output)


if __name__ == "__main__":
    main()
