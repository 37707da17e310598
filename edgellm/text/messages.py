"""Messages, tools and variables before a chat template sees them: checked, with what they show."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgellm.errors import RequestError, require_kind, shown

#: The first of Unicode's two supplementary private use areas: no standard gives its characters a meaning.
DISGUISES = range(0xF0000, 0xFFFFE)
#: Messages with these roles say how the model should behave.
SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
#: What a message may say of how its answer was found: the first that there is, is all that templates are given.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
EXTRA_KEYS = ("name", "tool_calls", "tool_call_id", *REASONING_KEYS)


def checked_messages(messages: Sequence[dict[str, Any]], media: Collection[str] = ()) -> list[dict[str, Any]]:
    """A copy of `messages` as chat templates take them, or `RequestError` that names the message.

    A `content` is text, or a list of parts: {"type": "text", "text": ...}, and {"type": "image"} for each image where
    that is among the kinds of `media` that a model takes; that of an assistant's message may be empty, or None beside
    tool calls. Keys whose value is None, and unknown ones with an empty list, are left out, as clients of OpenAI's API
    send them. `reasoning_content` and `thinking`, the two names under which templates look for it, both hold what is
    given under one of `REASONING_KEYS`.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    require_kind(is_list, "messages", messages, "a list of messages")
    if not messages:
        raise RequestError("there are no messages: expected at least one")
    return [_checked_message(message, number, media) for number, message in enumerate(messages, 1)]


def _checked_message(message: Any, number: int, media: Collection[str]) -> dict[str, Any]:
    what = f"message {number}"
    require_kind(isinstance(message, dict), what, message, "an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{what} has the role {shown(role)}: expected one of {', '.join(ROLES)}")
    given = {key: value for key, value in message.items() if value is not None}
    unknown = sorted(shown(key) for key in given if key not in ("role", "content", *EXTRA_KEYS) and given[key] != [])
    if unknown:
        raise RequestError(
            f"{what} has the unknown key {unknown[0]}: expected role, content, or one of {', '.join(EXTRA_KEYS)}"
        )
    content = _checked_content(message, number, media)
    if role == "user" and not any(text.strip() for text in shown_texts(content)):
        raise RequestError(f"{what} (user) is empty: write something for the model to answer")
    extras = {key: given[key] for key in EXTRA_KEYS if key in given}
    if "tool_calls" in extras:
        extras["tool_calls"] = _checked_calls(extras["tool_calls"], f"tool_calls of {what}")
    if (reasoning := next((given[key] for key in REASONING_KEYS if key in given), None)) is not None:
        extras = {"thinking": reasoning, **extras, "reasoning_content": reasoning}
    return {"role": role, "content": content, **extras}


def _checked_calls(calls: Any, what: str) -> list[dict[str, Any]]:
    """A copy of a message's calls, whose values must be as JSON has them."""
    copied = JSONCopy(what).of(calls, what)
    require_kind(isinstance(copied, list), what, calls, f"a list of calls, each {_CALL_EXAMPLE}")
    for place, call in enumerate(copied):
        require_kind(isinstance(call, dict), f"{what}, [{place}],", call, _CALL_EXAMPLE)
    return copied


def shown_texts(content: Any) -> list[str]:
    """The texts of a checked message's content; the name of its kind stands for a piece of media."""
    return [content] if isinstance(content, str) else [part.get("text", part["type"]) for part in content or ()]


def _checked_content(message: dict[str, Any], number: int, media: Collection[str]) -> str | list[dict[str, Any]] | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return None
    if not isinstance(content, list):
        found = "no content" if content is None else f"content of type {type(content).__name__}"
        raise RequestError(f"message {number} ({message['role']}) has {found}: expected text, or a list of parts")
    parts = []
    for place, part in enumerate(content, 1):
        what = part_name(number, place, message)
        kind = media_kind(part)
        if kind is None:
            parts.append({"type": "text", "text": text_of_part(part, what)})
        elif kind not in media:
            raise RequestError(
                f"{what} is of type {part['type']!r}, but this model has no {ENCODER_NAMES[kind]}: send text only, "
                "or open a model that has one"
            )
        else:
            media_of_part(part, kind, what)
            parts.append({"type": kind})
    return parts


#: The kinds of media that parts of messages show, by the parts' types.
MEDIA_PARTS = dict.fromkeys(("image", "image_url", "input_image"), "image")
MEDIA_PARTS |= dict.fromkeys(("audio", "audio_url", "input_audio"), "audio")
MEDIA_PARTS |= dict.fromkeys(("video", "video_url"), "video")
#: The kinds of what requests have beside a prompt, by the names of their fields.
KINDS = {"images": "image", "audio": "audio", "video": "video"}
#: By kind, how a part is written that shows it.
_EXAMPLES = {
    "image": '{"type": "image_url", "image_url": {"url": "data:image/png;base64,... or a path"}} and '
    '{"type": "image", "image": a path, bytes, a Pillow image or an array}',
    "audio": '{"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}} and '
    '{"type": "audio", "audio": a path, bytes, or (samples, rate)}',
    "video": '{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,... or a path"}} and '
    '{"type": "video", "video": a path, bytes, or a list of frames with their times, (seconds, image)}',
}
#: By kind, what a model has that takes it, as errors name it.
ENCODER_NAMES = {"image": "vision model", "audio": "encoder of speech", "video": "encoder of videos"}
_TEXT_EXAMPLE = '{"type": "text", "text": "..."}'


@dataclass(frozen=True, eq=False)
class MediaReference:
    """A piece of a `kind` of media that a request shows: its `source`, as `read_image`, `heard` or
    `VideoProcessor.prepare` takes it, or text: a URL or a path (`is_url`).

    `channels` is the order of an array's colours, "RGB" or "BGR"; `name` says in errors which piece it is.
    """

    source: Any
    is_url: bool
    channels: Literal["RGB", "BGR"]
    name: str
    kind: str = "image"


def text_of_part(part: Any, what: str) -> str:
    """The text of a text part; RequestError names anything else."""
    if media_kind(part) is None:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return part["text"]
    raise RequestError(f"{what} is not a text part: expected {_TEXT_EXAMPLE}")


def media_kind(part: Any) -> str | None:
    """The kind of media that a part of a message shows; None for text, and for what is no part."""
    kind = part.get("type") if isinstance(part, dict) else None
    return MEDIA_PARTS.get(kind) if isinstance(kind, str) else None


def is_image(part: Any) -> bool:
    return media_kind(part) == "image"


def show_media(messages: Sequence[Any], *kinds: str) -> bool:
    """Whether any of some messages, well-formed or not, shows media of these kinds; without any, of any."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    shown = {media_kind(part) for content in contents if isinstance(content, list) for part in content} - {None}
    return bool(shown.intersection(kinds) if kinds else shown)


def media_of_part(part: dict[str, Any], kind: str, what: str) -> MediaReference:
    """What a part of that kind shows; RequestError where it has nothing, or several."""
    keys = (kind, "path", "url", f"{kind}_url", *(["input_audio"] if kind == "audio" else []))
    given = [key for key in keys if part.get(key) is not None]
    if len(given) != 1:
        raise RequestError(
            f"{what} is of type {part['type']!r} and has {f'several {kind}s' if given else f'no {kind}'}: expected one "
            f"of {_EXAMPLES[kind]}"
        )
    key, is_url = given[0], given[0] in keys[1:4]
    source = part[key]
    if key == "input_audio":
        data = source.get("data") if isinstance(source, dict) else None
        require_kind(isinstance(data, str), f"{what}: input_audio", source, "an object with base64 as data")
        return MediaReference(f"data:audio/x;base64,{data}", True, "RGB", what, kind)
    if key == f"{kind}_url" and isinstance(source, dict):
        source = source.get("url")
    is_known = not is_url or isinstance(source, str) or hasattr(source, "__fspath__")
    require_kind(is_known, f"{what}: {key}", source, "a data: URL, a file: URL or a path")
    return MediaReference(source, is_url or isinstance(source, str), part.get("channels", "RGB"), what, kind)


def media_of_messages(messages: Sequence[dict[str, Any]]) -> list[MediaReference]:
    """What a conversation that was checked (`checked_messages`) shows, in order."""
    return [
        media_of_part(part, kind, part_name(index, number, message))
        for index, message in enumerate(messages, 1)
        if isinstance(message.get("content"), list)
        for number, part in enumerate(message["content"], 1)
        if (kind := media_kind(part)) is not None
    ]


def media_of_prompt(kind: str, pieces: Sequence[Any]) -> list[MediaReference]:
    """The pieces of a kind of a prompt: each as `read_image` or `heard` takes it, a URL, or a part of a message."""
    found = []
    for number, piece in enumerate(pieces, 1):
        name = f"{kind} {number}"
        reference = MediaReference(piece, isinstance(piece, str), "RGB", name, kind)
        found.append(media_of_part(piece, kind, name) if media_kind(piece) == kind else reference)
    return found


def part_name(message_number: int, part_number: int, message: dict[str, Any]) -> str:
    """How errors name a part of a message; numbers begin with 1."""
    return f"part {part_number} of message {message_number} ({message.get('role')})"


#: Variables that every rendering sets itself, and what Python or jinja2 would take for something else.
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "self")
_CALL_EXAMPLE = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
_TOOL_EXAMPLE = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'


def checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    """A copy of `tools` as chat templates take them, in the form of OpenAI's API; None where there are none.

    A function's object alone ({"name": ..., "parameters": ...}) is put into that form; keys of a tool or function that
    are None are left out. Raises RequestError that names the place ("tools[1].function.name").
    """
    if tools is None:
        return None
    is_list = isinstance(tools, Sequence) and not isinstance(tools, (str, bytes))
    require_kind(is_list, "tools", tools, f"a list of tools, each {_TOOL_EXAMPLE}")
    copy = JSONCopy("tools")
    return [_checked_tool(tool, f"tools[{index}]", copy) for index, tool in enumerate(tools)] or None


def checked_variables(variables: Any) -> dict[str, Any]:
    """A copy of a chat template's own variables, values as JSON has them; raises RequestError that names the
    variable."""
    if variables is None:
        return {}
    require_kind(isinstance(variables, Mapping), "template_variables", variables, "values by name, or None")
    for name in variables:
        what = f"template_variables has the name {name!r}"
        if not isinstance(name, str) or not name.isidentifier():
            raise RequestError(f"{what}: expected letters, digits and _")
        if name in RESERVED_VARIABLES:
            raise RequestError(f"{what}, which every request sets itself: leave it out")
    copy = JSONCopy("template_variables")
    return {name: copy.of(value, f"the template variable {name}") for name, value in variables.items()}


def require_tools_shown(tools: Sequence[Mapping[str, Any]] | None, names: frozenset[str], origin: str) -> None:
    """RequestError for tools of which the chat template of `origin`, which reads the variables `names`, tells
    nothing."""
    if tools and "tools" not in names:
        raise RequestError(
            f"tools are given, but the chat template of {origin} never reads them, so that the model would not know of "
            "them: leave them out, describe them in the system prompt, or take a model or a template "
            "(--chat-template FILE) that knows tools"
        )


def _checked_tool(tool: Any, place: str, copy: JSONCopy) -> dict[str, Any]:
    require_kind(isinstance(tool, Mapping), place, tool, f"an object, {_TOOL_EXAMPLE}, or a function")
    given = _without_none(copy.of(tool, place))
    kind = given.get("type", "function")
    if kind != "function":
        raise RequestError(f"{place}.type is {kind!r}: expected 'function'")
    if "function" not in given:  # the function's object alone, perhaps with its type next to the name
        function = {key: value for key, value in given.items() if key != "type"}
        return {"type": "function", "function": _checked_function(function, place)}
    function = given["function"]
    require_kind(isinstance(function, dict), f"{place}.function", function, "an object with a name")
    given["function"] = _checked_function(_without_none(function), f"{place}.function")
    return given if "type" in given else {"type": kind, **given}


def _checked_function(function: dict[str, Any], place: str) -> dict[str, Any]:
    for key, kind, expected in (
        ("name", str, "text"),
        ("description", str, "text"),
        ("parameters", dict, "an object, a JSON schema"),
    ):
        if key in function:
            require_kind(isinstance(function[key], kind), f"{place}.{key}", function[key], expected)
    if not function.get("name"):
        found = "empty" if "name" in function else "missing"
        raise RequestError(f"{place}.name is {found}: expected a function's name")
    return function


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}


class JSONCopy:
    """Copies values that must be as JSON has them, up to a number of them in all and of levels within one another."""

    def __init__(self, what: str, most: int = 100_000, deepest: int = 64, largest: float = 1 << 63) -> None:
        """`what` names all that is copied, in the error for too many values: a list that stands in many places counts
        as often. `largest` bounds whole numbers."""
        self._what, self._most, self._deepest, self._largest, self._count = what, most, deepest, largest, 0

    def of(self, value: Any, place: str, depth: int = 1) -> Any:
        """A copy; raises RequestError that names the place of what JSON has not."""
        self._count += 1
        if self._count > self._most:
            raise RequestError(f"{self._what} has more than {self._most:,} values")
        if depth > self._deepest:
            raise RequestError(f"{place} is nested more than {self._deepest} deep, or holds itself")
        if isinstance(value, str):
            check_encodable(value, place)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            if not -self._largest <= value < self._largest:
                raise RequestError(f"{place} is a whole number of {value.bit_length()} bits: expected 63 and a sign")
            return value
        if isinstance(value, float):
            if not math.isfinite(value):
                raise RequestError(f"{place} is {value}: expected a finite number")
            return value
        if isinstance(value, (list, tuple)):
            return [self.of(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
        require_kind(isinstance(value, Mapping), place, value, "a value as JSON has it")
        for key in value:
            if not isinstance(key, str):
                raise RequestError(f"{place} has the key {key!r}: expected text")
            check_encodable(key, f"a key of {place}")
        return {key: self.of(item, f"{place}.{key}", depth + 1) for key, item in value.items()}


def check_encodable(text: str, what: str) -> None:
    """Raise `RequestError` where `text` is none, or holds half of a surrogate pair, which is no character."""
    require_kind(isinstance(text, str), what, text, "text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} has an invalid character (half of a surrogate pair, U+{ord(text[error.start]):04X}) at position "
            f"{error.start}: remove it"
        ) from error


def unsplit_parts(content: Any, pattern: re.Pattern[str]) -> Any:
    """A message's content; where neighbouring text parts would together make a special token's text, they are one part.
    Templates write the parts of a message one after the other, where each by itself shows no such text."""
    if not isinstance(content, list):
        return content
    found: list[dict[str, Any]] = []
    for is_text, run in itertools.groupby(content, lambda part: part["type"] == "text"):
        parts = list(run)
        if is_text:
            text = "".join(part["text"] for part in parts)
            ends = set(itertools.accumulate(len(part["text"]) for part in parts))
            if any(match.start() < end < match.end() for match in pattern.finditer(text) for end in ends):
                parts = [{"type": "text", "text": text}]
        found += parts
    return found


def strings_in(value: Any) -> list[str]:
    """All strings in nested lists and dictionaries, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [string for pair in value.items() for item in pair for string in strings_in(item)]
    if isinstance(value, (list, tuple)):
        return [string for item in value for string in strings_in(item)]
    return []


def free_marks(texts: Iterable[str]) -> Iterator[str]:
    """The characters of `DISGUISES` that occur in none of the texts, the last ones first."""
    used = set().union(*texts)
    return (mark for mark in map(chr, reversed(DISGUISES)) if mark not in used)
