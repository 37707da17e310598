"""Renders conversations with gpt-oss's published chat template by `transformers`, as a golden for our rendering of it.

    python tools/goldens/make_harmony.py TEMPLATE tests/goldens/published/harmony.json

TEMPLATE is the file `chat_template.jinja` of openai/gpt-oss-120b (Apache-2.0), which the golden has with it, unchanged.
Conversations have reasoning, tools, calls and their results; of each rendering a digest is kept, with DATE for the day.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
from pathlib import Path
from typing import Any

import transformers
from golden_folders import pack
from transformers.utils.chat_template_utils import render_jinja_template

_SYSTEMS = ([], [{"role": "system", "content": "Be brief."}], [{"role": "developer", "content": "Du hilfst.\nImmer."}])
_LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Says what is there.",
    "parameters": {
        "type": "object",
        "properties": {
            "at": {"type": "string", "description": "A thing.", "enum": ["cup", "plate"]},
            "often": {"type": "integer", "default": 2},
            "where": {"type": ["string", "null"]},
            "all": {"type": "array", "items": {"type": "string"}},
            "box": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        },
        "required": ["at"],
    },
}
_STOP = {"name": "stop", "description": "Ends it.", "parameters": {"type": "object", "properties": {}}}
_TOOLS = (None, [_STOP], [_LOOK, _STOP])
_USER = {"role": "user", "content": "Where is the cup? \n✓"}
_CALL = {
    "role": "assistant",
    "thinking": "I look.",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "cup", "all": ["a", "ü"]}}}],
}
_RESULT = {"role": "tool", "content": '{"place": "table <1>"}'}
_SAID = {"role": "assistant", "thinking": "It is there.", "content": "On the table."}
_HISTORIES: tuple[list[dict[str, Any]], ...] = (
    [_USER],
    [_USER, _SAID, _USER],
    [_USER, _CALL, _RESULT],
    [_USER, _CALL, _RESULT, _CALL, _RESULT],
    [_USER, _CALL, _RESULT, _SAID, _USER],
    [_USER, {"role": "assistant", "content": "Look:", "tool_calls": _CALL["tool_calls"]}, _RESULT],
)
_VARIABLES: tuple[dict[str, Any], ...] = (
    {},
    {"reasoning_effort": "low"},
    {"reasoning_effort": "high", "model_identity": "You are a robot."},
    {"builtin_tools": ["browser", "python"]},
)
_COUNT = 30


def conversations() -> list[dict[str, Any]]:
    """Thirty of all combinations, and one that ends with an answer."""
    every = list(itertools.product(_HISTORIES, _SYSTEMS, _TOOLS, _VARIABLES))
    chosen = [every[place * len(every) // _COUNT + place % 5] for place in range(_COUNT)]
    found = [
        {"messages": [*system, *history], "variables": variables | _offered(tools)}
        for history, system, tools, variables in chosen
    ]
    return [*found, {"messages": [_USER, _SAID], "variables": {"add_generation_prompt": False}}]


def _offered(tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {} if tools is None else {"tools": [{"type": "function", "function": each} for each in tools]}


def main() -> None:
    """Write the golden."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("template", type=Path)
    parser.add_argument("golden", type=Path)
    arguments = parser.parse_args()
    template, found = arguments.template.read_text(encoding="utf-8"), []
    for each in conversations():
        variables = {"add_generation_prompt": True, **each["variables"]}
        text = render_jinja_template([each["messages"]], chat_template=template, **variables)[0][0]
        text = text.replace(time.strftime("%Y-%m-%d"), "DATE")
        found.append(each | {"sha256": hashlib.sha256(text.encode()).hexdigest()[:16]})
    golden = {
        "source": "openai/gpt-oss-120b: chat_template.jinja, Apache-2.0",
        "transformers": transformers.__version__,
        "template": template,
        "conversations": found,
    }
    arguments.golden.write_text(json.dumps(golden, separators=(",", ":")), encoding="utf-8")
    pack(arguments.golden)


if __name__ == "__main__":
    main()
