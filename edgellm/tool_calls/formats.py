"""The formats in which models write calls, and which of them a chat template teaches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgellm.errors import RequestError, shown
from edgellm.text.template import ChatTemplate
from edgellm.text.template_trials import TOOL
from edgellm.text.tokenizer import Tokenizer, read_json_object
from edgellm.tool_calls.values import TEXT_MARK, json_text, keyed_text

#: How the inside of a call is written: an object with name and arguments, name and arguments behind each other, a call
#: as Python writes it, tags, names and values between braces (`keyed_text`), or a message of gpt-oss
#: (`edgellm.tool_calls.harmony`).
Body = Literal["object", "list", "named", "python", "tags", "keyed", "harmony"]
#: What calls as tags are made of.
FUNCTION_TAG, ARGUMENT_TAG, ARGUMENT_END, FUNCTION_END = "<function=", "<parameter=", "</parameter>", "</function>"


@dataclass(frozen=True)
class ToolFormat:
    """A format: a call is in the text between `begin` and `end`, several stand behind each other with `separator`.

    `bare` is what a call begins with that has no mark of its own before it: only at the beginning of an answer.
    `key` names the arguments of an object; `list` formats have all calls of an answer between one pair of marks.
    """

    name: str
    body: Body
    begin: str
    end: str = ""
    separator: str = "\n"
    bare: str = ""
    key: str = "arguments"
    #: How the call look(at="cup") looks in a conversation.
    seen: str = ""
    #: A token that only models of this format have: it tells of the format where a template writes no calls.
    token: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """What a tokenizer may have special tokens for."""
        return tuple(filter(None, (self.begin, self.end, {"named": "[ARGS]", "keyed": TEXT_MARK}.get(self.body, ""))))

    @property
    def frame(self) -> tuple[str, str, str, str, str]:
        """What stands before all calls, before each, between two, behind each, and behind all."""
        line_end = "\n" if self.end and self.body in ("object", "tags") else ""
        begin, end = ("", "") if self.bare else (f"{self.begin}{line_end}", f"{line_end}{self.end}")
        if self.body in ("list", "python"):
            return f"{begin}[", "", self.separator, "", f"]{end}"
        return "", begin, self.separator, end, ""

    def around(self, name: str) -> tuple[str, str]:
        """What stands before the arguments of a call of the tool of that name, and behind them."""
        if self.body == "python":
            return f"{name}(", ")"
        if self.body == "tags":
            return f"{FUNCTION_TAG}{name}>\n", FUNCTION_END
        if self.body == "keyed":
            return f"call:{name}{{", "}"
        if self.body == "harmony":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "<|call|>"
        return (f"{name}[ARGS]", "") if self.body == "named" else (f'{{"name": {json_text(name)}, "{self.key}": ', "}")

    def around_argument(self, name: str) -> tuple[str, str]:
        """The same of an argument's value, where arguments are written one by one."""
        return (f"{name}=", "") if self.body == "python" else (f"{ARGUMENT_TAG}{name}>\n", f"\n{ARGUMENT_END}\n")

    def openings(self, names: Iterable[str]) -> tuple[str, ...]:
        """What enforced calls of the tools of these names begin with."""
        if not self.bare:
            return (self.begin,)
        return tuple("".join((*self.frame[:2], self.around(name)[0])) for name in names)

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, each a name and arguments, as an answer has them; "" for none."""
        before, begin, separator, end, behind = self.frame
        texts = []
        for name, arguments in calls:
            head, tail = self.around(name)
            texts.append(f"{begin}{head}{self._arguments(arguments)}{tail}{end}")
        return f"{before}{separator.join(texts)}{behind}" if texts else ""

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if self.body == "keyed":
            return keyed_text(arguments)[1:-1]
        if self.body not in ("python", "tags"):
            return json_text(arguments)
        texts = []
        for name, value in arguments.items():
            if self.body == "tags":
                text = value if isinstance(value, str) else json_text(value)
            else:
                text = str(value) if value is None or isinstance(value, bool) else json_text(value)
            texts.append(text.join(self.around_argument(name)))
        return (", " if self.body == "python" else "").join(texts)


_OBJECT = r'\{\s*"name":\s*"look",\s*"%s":\s*\{\s*"at":\s*"cup"\s*\}'
_ARGUMENTS, _PARAMETERS = _OBJECT % "arguments", _OBJECT % "parameters"
_TAGS = r"<function=look>\s*<parameter=at>\s*cup\s*</parameter>"
#: Some templates write text without quotes (`"%s" | format`), or with another letter for them (`"%sr"`).
_PYTHON = r"\[look\(at=([\"']cup[\"']|cupr?)\)\]"
_LLAMA_4 = rf"<\|python_start\|>\s*{_PYTHON}"
#: Some of its templates write no earlier calls: of these some tell of tools between marks of their own.
_LFM2 = rf"<\|tool_call_start\|>\s*{_PYTHON}|<\|tool_list_start\|>"
_GEMMA_4 = r'<\|tool_call>call:look\{at:<\|"\|>cup<\|"\|>\}'
_HARMONY = r'to=functions\.look<\|channel\|>commentary json<\|message\|>\{\s*"at":\s*"cup"'
_LFM2_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")
_IN_ORDER = (
    ToolFormat("mistral", "list", "[TOOL_CALLS]", separator=", ", seen=rf"\[TOOL_CALLS\]\s*\[{_ARGUMENTS}"),
    ToolFormat("nemotron", "list", "<TOOLCALL>", "</TOOLCALL>", ", ", seen=rf"<TOOLCALL>\s*\[{_ARGUMENTS}"),
    ToolFormat("mistral_args", "named", "[TOOL_CALLS]", separator="", seen=r"\[TOOL_CALLS\]look(\[\w+\]\w*)*\{"),
    ToolFormat("qwen3_coder", "tags", "<tool_call>", "</tool_call>", seen=rf"<tool_call>\s*{_TAGS}"),
    ToolFormat("hermes", "object", "<tool_call>", "</tool_call>", seen=rf"<tool_call>\s*{_ARGUMENTS}"),
    ToolFormat("gemma4", "keyed", "<|tool_call>", "<tool_call|>", separator="", seen=_GEMMA_4),
    ToolFormat("lfm2", "python", *_LFM2_MARKS, ", ", seen=_LFM2, token=_LFM2_MARKS[0]),
    ToolFormat("llama4_pythonic", "python", "<|python_start|>", "<|python_end|>", ", ", "[", seen=_LLAMA_4),
    ToolFormat("pythonic", "python", "", "", ", ", "[", seen=_PYTHON),
    ToolFormat("llama3_json", "object", "<|python_tag|>", "", "; ", "{", "parameters", seen=_PARAMETERS),
)
#: By name; the first whose call a template shows is its format.
FORMATS = {each.name: each for each in _IN_ORDER}
#: Read and enforced by tokens: see `edgellm.tool_calls.harmony`.
HARMONY = ToolFormat("harmony", "harmony", "", separator="", seen=_HARMONY)


def tool_format(name: str) -> ToolFormat:
    """The format of a name; RequestError for one that is not known."""
    if name == HARMONY.name:
        return HARMONY
    if name not in FORMATS:
        known = ", ".join([*FORMATS, HARMONY.name])
        raise RequestError(f"the tool format {shown(name)} is unknown: expected one of {known}")
    return FORMATS[name]


def checkpoint_format(folder: Path, named: str | None) -> str | None:
    """The name of a checkpoint's format: the one that is `named`, else the one that its chat template teaches; None
    where there is none. RequestError for a name that is not known, EngineDirectoryError for files that are wrong."""
    if named is not None:
        return tool_format(named).name
    template = ChatTemplate.from_directory(folder, read_json_object(folder / "tokenizer_config.json"))
    if template is None:
        return None
    found = taught_format(template, lambda token: Tokenizer.from_directory(folder).token_to_id(token) is not None)
    return None if found is None else found.name


def taught_format(template: ChatTemplate, has_token: Callable[[str], bool] = lambda token: False) -> ToolFormat | None:
    """The format in which a chat template writes the calls of earlier answers, which is what its model was taught; None
    where it writes them in a form that is not known. Of a template that tells of tools and writes no calls, the
    vocabulary decides: `has_token` says whether a token is there."""
    trials = template.trials(with_tools=True)
    texts = [text for text in trials.calls if text is not None]
    for each in (*FORMATS.values(), HARMONY):
        if any(re.search(each.seen, text) for text in texts):
            return each
    if not any(TOOL["function"]["description"] in text for text in texts) or trials.writes_calls(with_tools=True):
        return None
    return next((each for each in FORMATS.values() if each.token and has_token(each.token)), None)
