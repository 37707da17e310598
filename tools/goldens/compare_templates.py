"""Compares what EdgeLLM and `transformers` make of conversations, for every chat template in a folder.

    python tools/goldens/compare_templates.py FOLDER [--show NAME] [--all]

FOLDER is searched for `*.jinja` files and for the templates in `tokenizer_config.json` files. Every template renders
the same conversations with both: plain, with a system prompt, of many turns, with tools and calls of them, with content
that is null or a list of parts, with reasoning, and with thinking switched off. It needs `transformers`, which the
package itself does not.

Where the two differ, the reason is told apart by rendering once more with `transformers`:

- parts joined: the template takes text alone, `transformers` fails or prints the list; here the parts become lines
- one part: the template takes lists alone and leaves text out; here text becomes a part
- empty content: `transformers` leaves null content out and the template fails; here it is empty text
- None: the template tests for null content, which `transformers` leaves out; here it is handed on
- only transformers fails: on a generator that a filter made, for one, where here it made a list
- unexplained: anything else, a defect of one of the two
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from edgellm.errors import EdgeLLMError
from edgellm.text.messages import checked_messages
from edgellm.text.template import ChatTemplate

Messages = list[dict[str, Any]]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_object",
            "description": "Says where an object is.",
            "parameters": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "description": "What to look for."},
                    "limit": {"type": "integer", "description": "How many at most."},
                },
                "required": ["name"],
            },
        },
    }
]
ASKED = {"role": "user", "content": "Where is the red cup?"}
PARTS = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "the red cup?"}]
ANSWERED = {"role": "assistant", "content": "On the table."}
AGAIN = {"role": "user", "content": " And the plate? "}
SYSTEM = {"role": "system", "content": "You are a robot in a kitchen."}


def called(content: Any, arguments: Any) -> Messages:
    """A conversation with a call of a tool; `...` stands for no content at all."""
    call = {"id": "call00001", "type": "function", "function": {"name": "find_object", "arguments": arguments}}
    calling = {"role": "assistant", "content": content, "tool_calls": [call]}
    if content is ...:
        del calling["content"]
    result = {"role": "tool", "name": "find_object", "tool_call_id": "call00001", "content": '{"place": "table"}'}
    return [ASKED, calling, result]


AS_OBJECT, AS_TEXT = {"name": "red cup", "limit": 2}, '{"name": "red cup", "limit": 2}'
CONVERSATIONS: dict[str, tuple[Messages, dict[str, Any]]] = {
    "plain": ([ASKED], {}),
    "system": ([SYSTEM, ASKED], {}),
    "turns": ([SYSTEM, ASKED, ANSWERED, AGAIN, ANSWERED, ASKED], {}),
    "tools": ([SYSTEM, ASKED], {"tools": TOOLS}),
    "call": (called("", AS_OBJECT), {"tools": TOOLS}),
    "call, arguments as text": (called("", AS_TEXT), {"tools": TOOLS}),
    "call, null content": (called(None, AS_OBJECT), {"tools": TOOLS}),
    "call, null content, arguments as text": (called(None, AS_TEXT), {"tools": TOOLS}),
    "call, no content": (called(..., AS_OBJECT), {"tools": TOOLS}),
    "parts": ([{"role": "user", "content": PARTS}], {}),
    "one part": ([{"role": "user", "content": [{"type": "text", "text": " Where is the red cup? "}]}], {}),
    "parts of the system": ([{"role": "system", "content": PARTS}, ASKED], {}),
    "parts of an answer": ([ASKED, {"role": "assistant", "content": PARTS}, AGAIN], {}),
    "reasoning_content": ([ASKED, {**ANSWERED, "reasoning_content": "I see it."}, AGAIN], {}),
    "reasoning": ([ASKED, {**ANSWERED, "reasoning": "I see it."}, AGAIN], {}),
    "thinking": ([ASKED, {**ANSWERED, "thinking": "I see it."}, AGAIN], {}),
    "reasoning and a call": (
        [{**each, "reasoning": "I see it."} if "tool_calls" in each else each for each in called("", AS_OBJECT)],
        {"tools": TOOLS},
    ),
    "no thinking": ([ASKED], {"enable_thinking": False, "thinking": False}),
    "a client's dump": ([ASKED, {**ANSWERED, "tool_calls": None, "name": None}, AGAIN], {}),
}


def main() -> int:
    """Compare; the exit code is 1 where a difference has no reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--show", default="", metavar="NAME", help="print both texts of templates so named")
    parser.add_argument("--all", action="store_true", help="print explained differences too")
    options = parser.parse_args()
    reasons: Counter[str] = Counter()
    templates = 0
    for name, sources in templates_in(options.folder):
        templates += 1
        for conversation, (messages, variables) in CONVERSATIONS.items():
            reason, ours, theirs = compared(sources, messages, variables)
            reasons[reason] += 1
            shown = bool(options.show) and options.show in name
            if shown or reason == "unexplained" or (options.all and not reason.startswith("same")):
                print(f"{name}: {conversation}: {reason}")
                if shown or reason == "unexplained":
                    print(f"  edgellm      {ours[-600:]!r}\n  transformers {theirs[-600:]!r}")
    print(f"{templates} templates, {len(CONVERSATIONS)} conversations each:")
    for reason, count in reasons.most_common():
        print(f"{count:6}  {reason}")
    return 1 if reasons["unexplained"] else 0


def templates_in(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The templates below a folder by the name of their file, each with those that its configuration names."""
    for path in sorted(folder.rglob("*.jinja")):
        yield str(path.relative_to(folder)), {"default": path.read_text(encoding="utf-8")}
    for path in sorted(folder.rglob("tokenizer_config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        found = ChatTemplate.from_directory(path.parent, {"chat_template": config.get("chat_template")})
        if found is not None:
            yield str(path.relative_to(folder)), found.sources


def compared(sources: dict[str, str], messages: Messages, variables: dict[str, Any]) -> tuple[str, str, str]:
    """Why the two texts differ ("same", "same refusal" where they do not), and both; of a failure what it says."""
    ours, our_failure = of_edgellm(sources, messages, variables)
    source = chosen(sources, variables)
    theirs, their_failure = of_transformers(source, messages, variables)
    texts = (our_failure or ours, their_failure or theirs)
    if our_failure and their_failure:
        return "same: both refuse", *texts
    if not our_failure and ours == theirs and not their_failure:
        return "same", *texts
    changes = {"parts joined": joined, "one part": parted, "empty content": emptied}
    for reason, change in changes.items():
        if not our_failure and (ours, "") == of_transformers(source, change(messages), variables):
            return reason, *texts
    if any(message.get("content") is None for message in messages) and ours == with_none(source, messages, variables):
        return "None", *texts
    return ("only transformers fails" if their_failure and not our_failure else "unexplained"), *texts


def chosen(sources: dict[str, str], variables: dict[str, Any]) -> str:
    """The template that `transformers` takes of several."""
    return sources.get("tool_use", sources.get("default", "")) if "tools" in variables else sources.get("default", "")


def of_edgellm(sources: dict[str, str], messages: Messages, variables: dict[str, Any]) -> tuple[str, str]:
    """The text, or what the refusal says."""
    try:
        template = ChatTemplate(sources, "this file")
        fitted = template.fitted(checked_messages(messages), "tools" in variables)
        return template.render({"messages": fitted, **variables}, TOKENS), ""
    except EdgeLLMError as error:
        return "", f"!{error}"


def of_transformers(source: str, messages: Messages, variables: dict[str, Any]) -> tuple[str, str]:
    """The text, or what the failure says; as `apply_chat_template` calls it, keys with None left out."""
    kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
    values = {**TOKENS, **variables, "add_generation_prompt": True}
    try:
        return render_jinja_template([kept], chat_template=source, **values)[0][0], ""
    except Exception as error:  # templates fail as programs do
        return "", f"!{type(error).__name__}: {error}"


def with_none(source: str, messages: Messages, variables: dict[str, Any]) -> str:
    """What the template writes where null content stays, as earlier releases of `transformers` had it."""
    given = [{"content": None, **message} for message in messages]
    values = {"tools": None, "documents": None, "messages": given, "add_generation_prompt": True, **TOKENS, **variables}
    try:
        return _compile_jinja_template(source).render(**values)
    except Exception:  # templates fail as programs do
        return ""


def joined(messages: Messages) -> Messages:
    """The messages with lists of parts as lines of one text."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def emptied(messages: Messages) -> Messages:
    """The messages with empty text in place of null content."""
    return [message if message.get("content") is not None else {**message, "content": ""} for message in messages]


def parted(messages: Messages) -> Messages:
    """The messages with text as a part, and null content as an empty one."""
    return [
        message
        if isinstance(message.get("content"), list)
        else {**message, "content": [{"type": "text", "text": message.get("content") or ""}]}
        for message in messages
    ]


if __name__ == "__main__":
    sys.exit(main())
