"""The prompts of a benchmark: from text or JSON lines, or the set that comes with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from edgellm.errors import RequestError
from edgellm.kernels.user_paths import user_path
from edgellm.text.messages import checked_messages

DEFAULT_PROMPTS = "bench_prompts.yaml"
NO_TASK = "all"


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation to answer, and the task that it belongs to."""

    messages: tuple[dict[str, Any], ...]
    task: str = NO_TASK


def default_prompts() -> list[BenchPrompt]:
    """The prompts of `configs/bench_prompts.yaml`."""
    entries = yaml.safe_load((resources.files("edgellm.configs") / DEFAULT_PROMPTS).read_text(encoding="utf-8"))
    return [_from_object(entry, DEFAULT_PROMPTS) for entry in entries]


def load_prompts(path: Path) -> list[BenchPrompt]:
    """Read a file of prompts, one a line; empty lines are left out. Raises RequestError that names file and line.

    A line is plain text, or a JSON object with "prompt" (text), "messages" (a conversation) or "turns" (a list of
    texts, of which the first is asked), and, if there is one, "task" or "category".
    """
    try:
        lines = user_path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise RequestError(f"the prompts file {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompts file {path} is not UTF-8: invalid byte at offset {error.start}") from error
    prompts = [_from_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise RequestError(f"the prompts file {path} is empty: expected a prompt on each line")
    return prompts


def _from_line(line: str, place: str) -> BenchPrompt:
    if not line.lstrip().startswith("{"):
        return BenchPrompt(({"role": "user", "content": line.strip()},))
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place} is not valid JSON: {error}") from error
    return _from_object(values, place)


def _from_object(values: dict[str, Any], place: str) -> BenchPrompt:
    task = values.get("task", values.get("category", NO_TASK))
    if not isinstance(task, str) or not task:
        raise RequestError(f"{place}: the task is {task!r}: expected text")
    given = [key for key in ("prompt", "messages", "turns") if key in values]
    if len(given) != 1:
        raise RequestError(f"{place}: expected one of the keys prompt, messages and turns, found {given or 'none'}")
    if "messages" in values:
        try:
            return BenchPrompt(tuple(checked_messages(values["messages"])), task)
        except RequestError as error:
            raise RequestError(f"{place}: {error}") from error
    text = values.get("prompt")
    if "turns" in values:
        turns = values["turns"]
        text = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"{place}: the {given[0]} hold no text to ask")
    return BenchPrompt(({"role": "user", "content": text},), task)
