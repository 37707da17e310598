"""Exact match per skill with EdgeLLM itself: the items of evaluate.py, answered greedily by the NumPy backend.

Usage: python -m tools.demo_model.evaluate_runtime [--model ENGINE_DIR] [--count 50] [--seed 7] [--skills NAME ...]
"""

import argparse
import json
import multiprocessing
import time
from collections import defaultdict
from pathlib import Path

from edgellm import LLM, SamplingParams
from tools.demo_model.evaluate import evaluation_items


def answers(model: Path | None, conversations: list[list[dict]]) -> list[str]:
    """The greedy answer to each conversation."""
    with LLM(model, backend="numpy") as llm:
        return [llm.chat(messages, SamplingParams(max_tokens=160)).text for messages in conversations]


def main() -> None:
    """Print exact match per skill, the worst first, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="engine directory (default: the shipped one)")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--skills", nargs="*", help="only these")
    parser.add_argument("--show", type=int, default=2, help="failures to print per skill")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    begin = time.time()
    items = [
        item
        for item in evaluation_items(arguments.seed, arguments.count)
        if not arguments.skills or item["skill"] in arguments.skills
    ]
    workers = multiprocessing.cpu_count()
    parts = [[item["messages"] for item in items[worker::workers]] for worker in range(workers)]
    found: list[str] = [""] * len(items)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for worker, texts in enumerate(pool.starmap(answers, [(arguments.model, part) for part in parts])):
            found[worker::workers] = texts
    scores, failures = defaultdict(list), defaultdict(list)
    for item, text in zip(items, found, strict=True):
        scores[item["skill"]].append(text in item["accepted"])
        if not scores[item["skill"]][-1]:
            failures[item["skill"]].append((item, text))
    table = {skill: round(100 * sum(values) / len(values), 2) for skill, values in scores.items()}
    for skill, value in sorted(table.items(), key=lambda pair: pair[1]):
        print(f"{skill:20} {value:6.2f} %")
        for item, text in failures[skill][: arguments.show]:
            print(f"    {item['messages'][-1]['content']!r}\n      want {item['accepted'][0]!r}\n      got  {text!r}")
    mean = round(100 * sum(map(sum, scores.values())) / len(items), 2)
    print(f"{'all':20} {mean:6.2f} %  ({len(items)} items, {time.time() - begin:.0f} s)")
    if arguments.results:
        result = {
            "seed": arguments.seed,
            "items_per_skill": arguments.count,
            "runtime": "EdgeLLM, NumPy backend, greedy",
            "exact_match_percent": table,
            "all": mean,
        }
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
