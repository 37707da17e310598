"""Python functions as tools: what a model is told of them, their arguments, and their results."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from edgellm.engines.errors import at_place
from edgellm.errors import RequestError, require, shown
from edgellm.structure.typed_values import TypeSchemas, hints_of, typed_value
from edgellm.tool_calls.calls import ToolCall

#: Of a docstring: where Google's and NumPy's style describe parameters, and how Sphinx's does.
_SECTION = re.compile(r"(?:args|arguments|parameters|other parameters)\s*:?", re.IGNORECASE)
_FIELD = re.compile(r":(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?\**(\w+)\s*:\s*(.*)")
_GOOGLE = re.compile(r"\**(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)")
_NUMPY = re.compile(r"\**(\w+)\s*(?::.*)?()")
_RULE = re.compile(r"-{3,}")


def function_tool(function: Callable[..., Any]) -> dict[str, Any]:
    """A function, or a method, as a tool in the form of OpenAI's API.

    Its parameters' type hints become the schema: str, int, float, bool, None, Literal, Enum, list, dict, unions,
    dataclasses, TypedDicts and pydantic's models; those with a default may be left out. The docstring's first paragraph
    is the description; what it says of parameters, in Google's, NumPy's or Sphinx's style, is theirs. Raises
    RequestError that names the parameter that cannot be described.
    """
    require(inspect.isroutine(function), "a tool", function, "a function with type hints, or an object")
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        raise RequestError(f"the function {function.__name__} has no signature: wrap it in one with hints") from error
    hints, schemas = hints_of(function), TypeSchemas()
    description, described = _described(inspect.getdoc(function) or "", parameters)
    properties = {}
    for name, parameter in parameters.items():
        place = f"the parameter {name} of the function {function.__name__}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise RequestError(f"{place} is {parameter.kind.description}: expected parameters that are given by name")
        if name not in hints:
            raise RequestError(f"{place} has no type hint: expected one, as in {name}: str")
        about = {"description": described[name]} if name in described else {}
        properties[name] = {**schemas.of(hints[name], place), **about}
    schema = {
        "type": "object",
        "properties": properties,
        "required": [name for name, each in parameters.items() if each.default is each.empty],
        "additionalProperties": False,
        **({"$defs": schemas.definitions} if schemas.definitions else {}),
    }
    about = {"description": description} if description else {}
    return {"type": "function", "function": {"name": function.__name__, **about, "parameters": schema}}


def described_tools(tools: Any) -> Any:
    """The tools with `function_tool` of each function among them; RequestError names the place ("tools[1]: ...")."""
    if not functions_among(tools):
        return tools
    described = []
    for index, tool in enumerate(tools):
        with at_place(f"tools[{index}]", RequestError):
            described.append(function_tool(tool) if inspect.isroutine(tool) else tool)
    return described


def functions_among(tools: Any) -> dict[str, Callable[..., Any]]:
    listed = tools if isinstance(tools, Sequence) else ()
    return {tool.__name__: tool for tool in listed if inspect.isroutine(tool)}


def call_arguments(function: Callable[..., Any], call: ToolCall) -> dict[str, Any]:
    """The arguments of a complete call, of the types that the function's hints name."""
    hints = hints_of(function)
    return {name: typed_value(hints.get(name, Any), each) for name, each in (call.parsed or {}).items()}


def result_message(call: ToolCall, result: Any) -> dict[str, Any]:
    """The message of what a call has given: text as it is, all else as JSON. RequestError for what JSON has not."""
    try:
        written = json.dumps(result, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"the function {call.name} returned {shown(result)}: expected text, or a value as JSON has it ({error})"
        ) from error
    content = result if isinstance(result, str) else written
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is none")


def _described(docstring: str, parameters: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """A docstring's first paragraph, and what it says of each of the parameters."""
    lines = docstring.splitlines()
    texts = [line.strip() for line in lines]
    first = takewhile(lambda text: text and not _SECTION.fullmatch(text) and not _FIELD.match(text), texts)
    found = _of_parameters(lines, parameters)
    return " ".join(first), {name: " ".join(words) for name, words in found.items() if words}


def _of_parameters(lines: list[str], parameters: Mapping[str, Any]) -> dict[str, list[str]]:
    """The words of each parameter that is described: behind its name, and on lines that are indented deeper."""
    described: dict[str, list[str]] = {}
    section: re.Pattern[str] | None = None
    words: list[str] | None = None
    indent = 0
    for line, following in zip(lines, [*lines[1:], ""], strict=False):  # where there are no lines, nothing follows
        text, depth = line.strip(), len(line) - len(line.lstrip())
        if _SECTION.fullmatch(text):
            section, words = (_NUMPY if _RULE.fullmatch(following.strip()) else _GOOGLE), None
            continue
        if _RULE.fullmatch(following.strip()) or (section is _GOOGLE and text and depth == 0):
            section, words = None, None
        found = _FIELD.match(text) or (section and section.fullmatch(text))
        if found and found[1] in parameters and (words is None or depth <= indent):
            words, indent = [found[2]] if found[2] else [], depth
            described[found[1]] = words
        elif words is not None and text and depth > indent:
            words.append(text)
        elif text:
            words = None
    return described
