"""Exact match per skill with EdgeLLM itself: the items of evaluate.py, answered greedily by the NumPy backend.

Usage: python -m tools.demo_model.evaluate_runtime [--model ENGINE_DIR] [--count 50] [--seed 7] [--skills NAME ...]
       [--adapter json|pirate|tools] [--pictures]

With an adapter the right answers are those of its style, and how many answers are in the style is counted, right or
wrong ones. `tools` has items of its own, which offer tools; they are asked with the tool choice "auto". What the draft
head gains is counted in any case.
"""

import argparse
import json
import multiprocessing
import time
from collections import defaultdict
from pathlib import Path

from edgellm import LLM, SamplingParams
from edgellm.errors import ContextError
from tools.bench.held_out_prompts import as_they_are
from tools.demo_model.calls.dialogues import tool_items
from tools.demo_model.evaluate import evaluation_items
from tools.demo_model.styles import FOLLOWS, STYLES, styled_items
from tools.demo_model.vision.items import picture_items
from tools.demo_model.vision.scenes import NOVEL
from tools.demo_model.vocabulary import written_answer

#: An answer, the rounds that were drafted for it, and the tokens of these rounds.
Answered = tuple[str, int, int]


def answers(model: Path | None, adapter: str | None, items: list[dict]) -> list[Answered]:
    """The greedy answer to each item, with an adapter or without; calls as the model writes them. A prompt that
    is longer than the context gets none."""
    found = []
    with LLM(model, backend="numpy") as llm:
        for item in items:
            messages, params = as_they_are(item["messages"]), SamplingParams(max_tokens=160)
            try:
                response = llm.chat(messages, params, adapter=adapter, tools=item.get("tools"))
            except ContextError:
                found.append(("", 0, 0))
                continue
            drafting = response.drafting
            counts = (0, 0) if drafting is None else (drafting.rounds, drafting.accepted_tokens + drafting.rounds)
            calls = [call.as_message() for call in response.tool_calls]
            found.append((written_answer({"content": response.text, "tool_calls": calls}), *counts))
    return found


def answered(model: Path | None, adapter: str | None, items: list[dict], workers: int) -> list[Answered]:
    """The answers to all items, by so many processes."""
    parts = [items[worker::workers] for worker in range(workers)]
    found: list[Answered] = [("", 0, 0)] * len(items)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for worker, texts in enumerate(pool.starmap(answers, [(model, adapter, part) for part in parts])):
            found[worker::workers] = texts
    return found


def scored(items: list[dict], found: list[Answered], show: int) -> tuple[dict[str, float], float]:
    """Exact match in percent per skill and over all; prints them with some failures, the worst first."""
    scores, failures = defaultdict(list), defaultdict(list)
    for item, (text, _, _) in zip(items, found, strict=True):
        scores[item["skill"]].append(text in item["accepted"])
        if not scores[item["skill"]][-1]:
            failures[item["skill"]].append((item, text))
    table = {skill: round(100 * sum(values) / len(values), 2) for skill, values in scores.items()}
    for skill, value in sorted(table.items(), key=lambda pair: pair[1]):
        print(f"{skill:20} {value:6.2f} %")
        for item, text in failures[skill][:show]:
            said = item["messages"][-1]["content"]
            said = said if isinstance(said, str) else said[-1]["text"]
            print(f"    {said!r}\n      want {item['accepted'][0]!r}\n      got  {text!r}")
    return table, round(100 * sum(map(sum, scores.values())) / len(items), 2)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="engine directory (default: the shipped one)")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--skills", nargs="*", help="only these")
    parser.add_argument("--pictures", action="store_true", help="the visual skills instead, about drawn scenes")
    parser.add_argument("--novel", type=float, default=NOVEL, help="share of objects of held-out colour and kind")
    parser.add_argument(
        "--adapter", choices=(*sorted(STYLES), "tools"), help="with this adapter, and answers in its style"
    )
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--show", type=int, default=2, help="failures to print per skill")
    parser.add_argument("--results", type=Path)
    return parser.parse_args()


def main() -> None:
    """Print exact match per skill, the worst first, and write it as JSON."""
    arguments, begin = parse(), time.time()
    if arguments.pictures:
        items = picture_items(arguments.seed, arguments.count, arguments.novel)
    elif arguments.adapter == "tools":
        items = tool_items(arguments.seed, arguments.count)
    else:
        items = evaluation_items(arguments.seed, arguments.count)
    items = [item for item in items if not arguments.skills or item["skill"] in arguments.skills]
    if arguments.adapter in STYLES:
        items = styled_items(items, arguments.adapter)
    found = answered(arguments.model, arguments.adapter, items, arguments.processes)
    table, mean = scored(items, found, arguments.show)
    result = {
        "seed": arguments.seed,
        "items_per_skill": arguments.count,
        "runtime": "EdgeLLM, NumPy backend, greedy",
        "exact_match_percent": table,
        "all": mean,
    }
    if arguments.pictures:
        result["held_out_pairs"] = round(arguments.novel, 3)
    if arguments.adapter:
        result["adapter"] = arguments.adapter
    if arguments.adapter in STYLES:
        follows = FOLLOWS[arguments.adapter]
        result["in_style_percent"] = round(100 * sum(follows(text) for text, _, _ in found) / len(found), 2)
    rounds = sum(count for _, count, _ in found)
    if rounds:
        result["tokens_per_round"] = round(sum(tokens for _, _, tokens in found) / rounds, 2)
    extra = {name: result[name] for name in ("in_style_percent", "tokens_per_round") if name in result}
    print(f"{'all':20} {mean:6.2f} %  ({len(items)} items, {time.time() - begin:.0f} s) {extra or ''}")
    if arguments.results:
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
