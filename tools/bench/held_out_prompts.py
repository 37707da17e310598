"""Writes the shipped model's held-out prompts as JSON lines for `edgellm bench --prompts`.

Usage: python -m tools.bench.held_out_prompts OUTPUT [--count 3] [--seed 77002]

They are evaluation items of tools/demo_model, whose phrasings training never saw. The task of a prompt is "command"
where the right answer is an action, else "answer".
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from tools.demo_model.evaluate import SOURCES, evaluation_items

Messages = list[dict[str, Any]]


def held_out_conversations(count: int) -> list[Messages]:
    """Conversations that training never saw, all skills in turn."""
    per_skill = math.ceil(count / len(SOURCES))
    items = evaluation_items(11, per_skill)
    ordered = [items[skill * per_skill + index] for index in range(per_skill) for skill in range(len(SOURCES))]
    return [item["messages"] for item in ordered[:count]]


def shown(conversations: list[Messages], scenes: list[Path]) -> list[Messages]:
    """The conversations, each with one of the pictures in front of its question, in turn."""
    found = []
    for index, messages in enumerate(conversations):
        *before, question = as_they_are(messages)
        picture = {"type": "image", "image": str(scenes[index % len(scenes)])}
        content = [picture, {"type": "text", "text": question["content"]}]
        found.append([*before, {"role": question["role"], "content": content}])
    return found


def as_they_are(messages: Messages) -> Messages:
    """Messages to ask a model that adds no system prompt of its own: an empty one where they have none."""
    return messages if messages[0]["role"] == "system" else [{"role": "system", "content": ""}, *messages]


def main() -> None:
    """Write `--count` conversations of each skill."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=3, help="prompts of each skill")
    parser.add_argument("--seed", type=int, default=77002)
    arguments = parser.parse_args()
    lines = [
        json.dumps(
            {"messages": item["messages"], "task": "command" if '{"action"' in item["accepted"][0] else "answer"}
        )
        for item in evaluation_items(arguments.seed, arguments.count)
    ]
    arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
