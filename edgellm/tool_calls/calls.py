"""Calls of tools as programs see them, and checks of the tools that a request offers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from edgellm.engines.formats.strict_formats import parsed_json
from edgellm.errors import RequestError, did_you_mean, require, shown
from edgellm.structure.schema import enforced_schema
from edgellm.structure.steps import Steps

#: Tools of one request; OpenAI's API takes as many.
MOST_TOOLS = 128
#: What `tool_choice` may be beside a tool's name.
CHOICES = ("auto", "none", "required")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class ToolCall:
    """A call that an answer makes: of the tool `name`, with `arguments` as JSON text. `id` is for the result's message.

    It is not `complete` where the answer ended, or went astray, within it: `arguments` are then as far as they came.
    """

    id: str
    name: str
    arguments: str
    complete: bool = True

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments by name (see `parsed_json`); None where the call is not complete."""
        return parsed_json(self.arguments) if self.complete else None

    def as_message(self) -> dict[str, Any]:
        """The call as an assistant's message has it among its "tool_calls"."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call in a streamed answer, of the call number `index` from 0 on: the first has `id` and `name`,
    those that follow have more text of its `arguments` alone."""

    index: int
    id: str | None
    name: str | None
    arguments: str


def joined_deltas(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Deltas of a stream with those of one call as one, in order."""
    found: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        found.setdefault(delta.index, []).append(delta)
    return tuple(
        ToolCallDelta(index, pieces[0].id, pieces[0].name, "".join(each.arguments for each in pieces))
        for index, pieces in found.items()
    )


def all_deltas(calls: Iterable[ToolCall]) -> tuple[ToolCallDelta, ...]:
    """Calls as a stream has them that comes in one piece."""
    return tuple(ToolCallDelta(index, call.id, call.name, call.arguments) for index, call in enumerate(calls))


def shown_calls(deltas: Iterable[ToolCallDelta], calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """What the first deltas of an answer have shown of its `calls`."""
    shown = joined_deltas(deltas)
    return tuple(
        ToolCall(call.id, call.name, delta.arguments, call.complete and delta.arguments == call.arguments)
        for delta, call in zip(shown, calls, strict=False)
    )


@dataclass(frozen=True)
class ToolChoice:
    """What a request wants of its tools: `mode` is one of `CHOICES`; `schemas` are the enforced schemas of arguments by
    the names of the tools that may be called; with `parallel` there may be several calls in one answer."""

    mode: str
    schemas: Mapping[str, Any]
    parallel: bool


def checked_choice(tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: Any = None) -> ToolChoice | None:
    """What a request wants of `tools` (see `edgellm.text.messages.checked_tools`); None where it has none.

    `choice` is None ("auto"), one of `CHOICES`, a tool's name, or the object of OpenAI's API that names one. Raises
    RequestError that names the place.
    """
    require(isinstance(parallel, (bool, type(None))), "parallel_tool_calls", parallel, "true or false")
    name = _named_tool(choice)
    if not tools:
        if name is not None or choice == "required":
            raise RequestError(f"tool_choice is {shown(choice)}, but the request has no tools: leave it out")
        return None
    places: dict[str, int] = {}
    if len(tools) > MOST_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries: expected at most {MOST_TOOLS}")
    for place, tool in enumerate(tools):
        found = tool["function"]["name"]
        what = f"tools[{place}].function.name is {shown(found)}"
        if not _NAME.fullmatch(found):
            raise RequestError(f"{what}: expected 1 to 64 letters, digits, _ and -")
        if found in places:
            raise RequestError(f"{what}, as that of tools[{places[found]}]: expected a name of its own")
        places[found] = place
    if name is not None and name not in places:
        hint = did_you_mean(name, [*CHOICES, *sorted(places)])
        raise RequestError(f"tool_choice names the tool {shown(name)}, which the request has not{hint}")
    mode = choice or "auto" if name is None else "required"
    schemas: dict[str, Any] = {}
    if mode != "none":
        steps = Steps("what the tools' parameters say")
        for found, place in places.items():
            schemas[found] = _arguments_schema(tools[place]["function"], f"tools[{place}].function", steps)
    wanted = schemas if name is None else {name: schemas[name]}
    return ToolChoice(mode, wanted, name is None and parallel is not False)


def _named_tool(choice: Any) -> str | None:
    """The name of the tool that a choice names; None where it is None or one of `CHOICES`."""
    match choice:
        case None:
            return None
        case str():
            return None if choice in CHOICES else choice
        case {"type": "function", "function": {"name": str(name), **others}, **more} if not others and not more:
            return name
    expected = f"{', '.join(map(repr, CHOICES))}, a tool's name, or {{'type': 'function', 'function': {{'name': ...}}}}"
    raise RequestError(f"tool_choice is {shown(choice)}: expected {expected}")


def _arguments_schema(function: Mapping[str, Any], place: str, steps: Steps) -> Any:
    is_strict = function.get("strict", True)
    require(isinstance(is_strict, bool), f"{place}.strict", is_strict, "true or false")
    kind = function.get("parameters", {}).get("type", "object")
    if kind != "object":
        raise RequestError(f"{place}.parameters has the type {shown(kind)}: expected 'object', arguments by name")
    if not is_strict:
        return {"type": "object"}
    try:
        schema, taken = _enforced(json.dumps(function.get("parameters")))
        steps.take(taken)
    except RequestError as error:
        raise RequestError(f"{place}.parameters: {error}; or set the function's strict to false") from error
    return schema


@lru_cache(maxsize=512)
def _enforced(parameters: str) -> tuple[Any, int]:
    """The schema of a function's arguments, which nobody changes, and the steps that its walks took."""
    schema = json.loads(parameters) or {"properties": {}, "additionalProperties": False}
    steps = Steps("the JSON schema")
    return enforced_schema({"type": "object", **schema}, steps), steps.taken
