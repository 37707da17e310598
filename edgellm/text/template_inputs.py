"""What a chat template is given beside the messages: the tools that a model may call, and variables by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgellm.errors import RequestError

logger = logging.getLogger("edgellm.text")

#: Variables that every rendering sets itself, and what Python or jinja2 would take for something else.
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "self")
_DEEPEST = 64
_LARGEST = 1 << 63
_TOOL_EXAMPLE = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'


def checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    """A copy of `tools` as chat templates take them, in the form of OpenAI's API; None where there are none.

    A function's object alone ({"name": ..., "parameters": ...}) is put into that form; keys of a tool or function that
    are None are left out. Raises RequestError that names the place ("tools[1].function.name").
    """
    if tools is None:
        return None
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise RequestError(f"tools is a {type(tools).__name__}: expected a list of tools, each {_TOOL_EXAMPLE}")
    return [_checked_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None


def checked_variables(variables: Any) -> dict[str, Any]:
    """A copy of a chat template's own variables, such as {"enable_thinking": False}; raises RequestError that names the
    variable. Values are as JSON has them."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise RequestError(f"template_variables is a {type(variables).__name__}: expected values by name, or None")
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier():
            raise RequestError(f"template_variables has the name {name!r}: expected letters, digits and _")
        if name in RESERVED_VARIABLES:
            raise RequestError(
                f"template_variables has the name {name!r}, which every request sets itself: leave it out"
            )
    return {name: _json_value(value, f"the template variable {name}") for name, value in variables.items()}


def require_tools_shown(tools: Sequence[Mapping[str, Any]] | None, names: frozenset[str], origin: str) -> None:
    """Raise RequestError for tools of which the chat template of `origin`, which reads the variables `names`, would
    tell the model nothing."""
    if tools and "tools" not in names:
        counted = "1 tool" if len(tools) == 1 else f"{len(tools)} tools"
        raise RequestError(
            f"the request has {counted}, but the chat template of {origin} never reads tools, so that the model would "
            "not know of them: leave them out, describe them in the system prompt, or take a model or a template "
            "(--chat-template FILE) that knows tools"
        )


class UnreadVariables:
    """Reports variables that a chat template never reads: a warning is logged, once for each variable."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()

    def report(self, variables: Mapping[str, Any], names: frozenset[str], origin: str) -> None:
        """Of `variables` the chat template of `origin` reads those in `names`."""
        for name in sorted(variables):
            if name not in names and (name, origin) not in self._reported:
                self._reported.add((name, origin))
                logger.warning("the chat template of %s never reads %s: setting it changes nothing", origin, name)


def _checked_tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{place} is a {type(tool).__name__}: expected an object, {_TOOL_EXAMPLE}")
    given = _without_none(_json_value(tool, place))
    kind = given.get("type", "function")
    if kind != "function":
        raise RequestError(f"{place}.type is {kind!r}: expected 'function'")
    if "function" not in given:  # the function's object alone, perhaps with its type beside the name
        function = {key: value for key, value in given.items() if key != "type"}
        return {"type": "function", "function": _checked_function(function, place)}
    function = given["function"]
    if not isinstance(function, dict):
        raise RequestError(f"{place}.function is a {type(function).__name__}: expected an object with a name")
    given["function"] = _checked_function(_without_none(function), f"{place}.function")
    return given if "type" in given else {"type": kind, **given}


def _checked_function(function: dict[str, Any], place: str) -> dict[str, Any]:
    for key, kind, expected in (
        ("name", str, "text"),
        ("description", str, "text"),
        ("parameters", dict, "an object, a JSON schema"),
    ):
        if key in function and not isinstance(function[key], kind):
            raise RequestError(f"{place}.{key} is a {type(function[key]).__name__}: expected {expected}")
    if not function.get("name"):
        raise RequestError(
            f"{place}.name is {'empty' if 'name' in function else 'missing'}: expected a function's name"
        )
    return function


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}


def _json_value(value: Any, place: str, depth: int = 1) -> Any:
    """A copy of a value as JSON has it; raises RequestError that names the place of what JSON has not."""
    if depth > _DEEPEST:
        raise RequestError(f"{place} is nested more than {_DEEPEST} deep")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        if not -_LARGEST <= value < _LARGEST:
            raise RequestError(f"{place} is a whole number of {value.bit_length()} bits: expected at most 64")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RequestError(f"{place} is {value}: expected a finite number")
        return value
    if isinstance(value, (list, tuple)):
        return [_json_value(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        raise RequestError(f"{place} is a {type(value).__name__}: expected a value as JSON has it")
    for key in value:
        if not isinstance(key, str):
            raise RequestError(f"{place} has the key {key!r}: expected text")
    return {key: _json_value(item, f"{place}.{key}", depth + 1) for key, item in value.items()}
