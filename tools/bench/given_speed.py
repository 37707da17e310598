"""Drafts without a model against plain decoding, in turns: what was said before, and tokens that a schema forces.

    python -m tools.bench.given_speed [--model ENGINE_DIR] [--backend numpy] [--repeats 5] [--prompts 12] [--known]
                                      [--kinds edit action chat schema] [--output RESULTS.json]

The prompts are those of suffix_replay.py: `edit`, a text said again with a word replaced, a line left out and one
added, which is an answer that decoding is made to draw (known_answers.py), since the shipped model edits no texts;
`action`, the 20th of 20 similar commands behind 19 earlier requests of the process; `chat`, held-out prompts whose
answers are no actions. `schema`: the shipped model's JSON adapter, plain and unconstrained, against its actions' schema
with forced tokens and kind suffix. With `--known` actions and chat draw the accepted answers, too, so that a model of
random weights and other shapes may be measured.

Answers have at most 160 tokens. Every prompt is answered in both ways, another one first each time. A speed is the
tokens behind the first of all answers over the seconds for them; the ratio is the median over the repetitions. Each
repetition begins without earlier answers. How many answers are equal is told, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edgellm import LLM, DraftingConfig, SamplingParams
from edgellm.requests import Response
from tools.bench.held_out_prompts import as_they_are
from tools.bench.known_answers import KnownAnswers
from tools.bench.provenance import provenance, report
from tools.bench.suffix_replay import Replayed, Replays
from tools.demo_model.evaluate import evaluation_items
from tools.demo_model.styles import styled_items

KINDS = ("edit", "action", "chat", "schema")
MAX_TOKENS = 160
_OBJECT = {"type": "string", "maxLength": 40}
_WAYS = {"type": "string", "enum": ["left", "right", "forward", "back", "backward"]}
_PLACES = [f"{row} {column}" for row in ("front", "middle", "back") for column in ("left", "centre", "center", "right")]
_FIELDS: dict[str, dict[str, Any]] = {
    **{name: {"object": _OBJECT} for name in ("pick", "give", "look", "point", "go", "release")},
    "place": {
        "object": _OBJECT,
        "relation": {"type": "string", "enum": ["left of", "right of", "in front of", "behind", "on", "in", "next to"]},
        "target": _OBJECT,
    },
    "move": {"object": _OBJECT, "position": {"type": "string", "enum": [*_PLACES, "centre", "center"]}},
    "push": {"object": _OBJECT, "direction": _WAYS},
    "turn": {"direction": _WAYS, "degrees": {"type": "integer", "minimum": 0, "maximum": 360}},
    "wait": {"seconds": {"type": "integer", "minimum": 0, "maximum": 600}},
    "stop": {},
    "home": {},
    "say": {"text": {"type": "string", "maxLength": 300}},
    "ask": {"text": {"type": "string", "maxLength": 300}},
}
#: What the JSON adapter answers.
SCHEMA = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"action": {"const": name}, **more},
            "required": ["action", *more],
            "additionalProperties": False,
        }
        for name, more in _FIELDS.items()
    ]
}


class Asked(NamedTuple):
    """A prompt, the `answer` that is drawn (None: the model's own), and the requests that were answered before."""

    prompt: list[int]
    answer: list[int] | None = None
    earlier: Sequence[Replayed] = ()


def with_known_answers(llm: LLM) -> KnownAnswers:
    """Of a model, once: captured graphs read where they are expected. Then all is captured, as in a process that has
    run for a while."""

    def prepare(runtime: Any) -> KnownAnswers:
        known = KnownAnswers(runtime._runner)
        runtime.capture_decoding_cuda_graph()
        return known

    return llm.call(prepare).result()


class Way:
    """A model, opened in one way, and how it is asked."""

    def __init__(self, llm: LLM, known: KnownAnswers, adapter: str | None = None, schema: Any = None) -> None:
        self.llm, self._known, self._adapter = llm, known, adapter
        self._params = SamplingParams(max_tokens=MAX_TOKENS, structure=schema)

    def answered(self, asked: Asked) -> Response:
        """One answer."""
        self._remember(asked.earlier)
        self.llm.call(lambda runtime: self._known.expect([(len(asked.prompt), asked.answer)])).result()
        params = self._params
        if asked.answer is not None:
            params = SamplingParams(max_tokens=len(asked.answer), ignore_eos=True)
        return self.llm.generate(asked.prompt, params, adapter=self._adapter)

    def forget(self) -> None:
        """Forget earlier answers."""
        index = self.llm._runtime._drafters.index
        if index is not None:
            self.llm.call(lambda runtime: index.clear()).result()

    def _remember(self, earlier: Sequence[Replayed]) -> None:
        index = self.llm._runtime._drafters.index
        if index is None or not earlier:
            return

        def remember(runtime: Any) -> None:
            index.clear()
            for one in earlier:
                said = index.open(one.prompt)
                index.extend(said, one.answer)
                index.close(said)

        self.llm.call(remember).result()


def prompts(kind: str, count: int, capacity: int, known: bool) -> list[Asked]:
    """At most `count` prompts of a kind that fit into the context."""
    replays = Replays(77002)
    if kind == "schema":
        items = styled_items(evaluation_items(77002, 3), "json")
        random.Random(77002).shuffle(items)
        return [Asked(replays.tokenizer.encode_chat(as_they_are(item["messages"]))) for item in items[:count]]
    if kind == "edit":
        found = [Asked(one.prompt, one.answer) for (one,) in replays.edits()]
    elif kind == "action":
        found = [Asked(g[-1].prompt, g[-1].answer if known else None, g[:-1]) for g in replays.actions(False)]
    else:
        found = [Asked(one.prompt, one.answer if known else None) for one in replays.chats()[0]]
    room = [capacity - len(one.prompt) for one in found]
    fitting = [
        one._replace(answer=None if one.answer is None else one.answer[:MAX_TOKENS])
        for one, left in zip(found, room, strict=True)
        if left > MAX_TOKENS
    ]
    random.Random(5).shuffle(fitting)
    return fitting[:count]


def compared(plain: Way, drafted: Way, asked: list[Asked], repeats: int) -> dict[str, Any]:
    """Speeds of both ways, and what drafting did."""
    ways = {"plain": plain, "drafted": drafted}
    plain.answered(asked[0]), drafted.answered(asked[0])
    spent: dict[str, list[float]] = {name: [] for name in ways}
    rounds = steps = tokens = equal = 0
    for number in range(repeats):
        drafted.forget()
        seconds, said = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
        for place, one in enumerate(asked):
            found = {}
            for name in sorted(ways, reverse=bool((number + place) % 2)):
                found[name] = ways[name].answered(one)
                seconds[name] += found[name].timings.decode_seconds
                said[name] += len(found[name].token_ids) - 1
            drafting = found["drafted"].drafting
            equal += found["plain"].token_ids == found["drafted"].token_ids
            rounds, steps = rounds + drafting.rounds, steps + drafting.plain_steps
            tokens += sum(drafting.tokens.values())
        for name in ways:
            spent[name].append(said[name] / seconds[name])
    ratios = [mine / theirs for mine, theirs in zip(spent["drafted"], spent["plain"], strict=True)]
    return {
        "prompts": len(asked),
        "answers_equal": f"{equal} of {repeats * len(asked)}",
        "plain_tokens_per_second": round(statistics.median(spent["plain"]), 1),
        "drafted_tokens_per_second": round(statistics.median(spent["drafted"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "tokens_a_round": round(tokens / rounds, 2) if rounds else None,
        "rounds": rounds,
        "plain_steps": steps,
    }


def main() -> None:
    """Measure and print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="engine directory [default: the shipped model]")
    parser.add_argument("--backend", choices=("numpy", "tensorrt"), default="numpy")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=12, help="most prompts of a kind")
    parser.add_argument("--known", action="store_true", help="draw accepted answers, as a model of random weights must")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"provenance": provenance(), "backend": arguments.backend}
    opened: Callable[[DraftingConfig | None], LLM] = lambda drafting: LLM(  # noqa: E731
        arguments.model, backend=arguments.backend, drafting=drafting
    )
    with opened(None) as plain, opened(DraftingConfig(kind="suffix")) as drafted:
        known = with_known_answers(plain), with_known_answers(drafted)
        for kind in arguments.kinds:
            asked = prompts(kind, arguments.prompts, plain.context_length, arguments.known)
            adapter, schema = ("json", SCHEMA) if kind == "schema" else (None, None)
            ways = Way(plain, known[0], adapter), Way(drafted, known[1], adapter, schema)
            results[kind] = compared(*ways, asked, arguments.repeats)
            results[kind]["chosen"] = drafted.drafting_report.reason
            print(kind, results[kind], flush=True)
    report(results, arguments.output)


if __name__ == "__main__":
    main()
