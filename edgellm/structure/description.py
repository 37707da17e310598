"""`Structure`: the form that an answer is to have, and what its text says then."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from edgellm.errors import RequestError, require, shown
from edgellm.structure.schema import enforced_schema
from edgellm.structure.steps import check_path, folded
from edgellm.structure.typed_values import TypeSchemas, has_fields, typed_value
from edgellm.text.messages import check_encodable

#: "spaced" is as `json.dumps` writes: ", " and ": "; "compact" has no whitespace, "free" any.
Whitespace = Literal["spaced", "compact", "free"]
#: Of a regular expression, of a grammar and of all choices.
MOST_BYTES = {"regex": 16 * 1024, "grammar": 128 * 1024, "choice": 128 * 1024}
#: What each kind of structure is called in errors.
_NAMES = {
    "json": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
    "json_object": "a JSON object",
}
#: JSON's escapes but that of any character by number, which would let a key be spelled in two ways.
_ESCAPES = '"\\bfnrt'
#: Also those that no quote or slash ends, so that each character is looked at once.
_LITERALS = re.compile(
    r'"(?:\\.|[^"\\\n])*\\?(?:"|$)|/(?![/*])(?:\\.|[^/\\\n])+\\?(?:/|$)|//[^\n]*', re.DOTALL | re.MULTILINE
)
_NOT_ENFORCED = re.compile(r"%\s*(?:json|llguidance)\b|\[[^\[\]]*\b(?:max_tokens|temperature)\b|<[^<>\s]+>")
#: The beginning of a rule, and the names that it refers to.
_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)\b[^\n:|]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Structure:
    """What an answer has to be, one of these; RequestError for more or none, and for what cannot be enforced.

    `json`: a JSON schema (a dictionary), a class with `model_json_schema()` as pydantic's have, or a dataclass or
    TypedDict whose fields are str, int, float, bool, Literal, Enum, list, dict, unions of these, and such classes.
    Properties come in the schema's order. `json_object`: any JSON object. `regex`: a regular expression of the whole
    answer, in the syntax of Rust's regex crate without look-around. `choice`: one of these texts. `grammar`: a grammar
    in llguidance's form of Lark, with a rule `start`; not with its `%json`, limits in tokens, temperatures or special
    tokens.

    `whitespace` of JSON: "spaced" as `json.dumps` writes it, "compact" without any, "free" wherever JSON allows it.
    """

    json: Any = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    whitespace: Whitespace = "spaced"
    _kind: str = field(init=False, repr=False, default="")
    #: The grammar as llguidance takes it.
    grammar_text: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        require(isinstance(self.json_object, bool), "json_object", self.json_object, "true or false")
        given = [kind for kind in _NAMES if getattr(self, kind) is not None and getattr(self, kind) is not False]
        if self.json is False:
            given.append("json")
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise RequestError(f"a structure has {found}: expected one of {', '.join(_NAMES)}")
        space, known = self.whitespace, get_args(Whitespace)
        require(isinstance(space, str) and space in known, "whitespace", space, f"one of {', '.join(known)}")
        if self.choice is not None:
            are_some = isinstance(self.choice, (list, tuple)) and len(self.choice) > 0
            require(are_some, "choice", self.choice, "a list of at least one text")
            _checked_text("choice", "".join(_checked_text("choice", each) for each in self.choice))
            object.__setattr__(self, "choice", tuple(dict.fromkeys(self.choice)))
        object.__setattr__(self, "_kind", given[0])
        object.__setattr__(self, "grammar_text", self._grammar_text(given[0]))
        from edgellm.structure.grammar import byte_vocabulary  # llguidance is loaded for structured requests alone

        byte_vocabulary().compiled(self.grammar_text, self.name)

    def __hash__(self) -> int:
        return hash(self.grammar_text)

    @property
    def name(self) -> str:
        """What it is, for errors."""
        return _NAMES[self._kind]

    @property
    def is_json(self) -> bool:
        """Whether answers are JSON."""
        return self.json is not None or self.json_object

    def is_complete(self, text: str) -> bool:
        """Whether a text has the whole structure."""
        from edgellm.structure.grammar import matches

        return matches(self.grammar_text, text)

    def parsed(self, text: str) -> Any:
        """What a complete text says: of JSON the value, or an instance of the class that was given; else the text.
        Checks of that class's own may raise. RequestError for a text that is not complete."""
        if not self.is_complete(text):
            raise RequestError(f"the text {shown(text)} is not complete: expected {self.name[4:] or 'JSON'} fulfilled")
        if not self.is_json:
            return text
        value = json.loads(text)
        if has_fields(self.json):
            return typed_value(self.json, value)
        validate = getattr(self.json, "model_validate", None)
        return validate(value) if callable(validate) else value

    def _grammar_text(self, kind: str) -> str:
        from llguidance import LLMatcher

        if kind in ("json", "json_object"):
            schema = json.dumps(enforced_schema({"type": "object"} if kind == "json_object" else schema_of(self.json)))
            try:
                return str(LLMatcher.grammar_from_json_schema(schema, overrides=json_options(self.whitespace)))
            except ValueError as error:
                raise RequestError(f"the JSON schema cannot be enforced ({error}): say it in another way") from error
        if kind == "choice":
            alternatives = " | ".join(json.dumps(each, ensure_ascii=False) for each in self.choice or ())
            return _lark(f"start: {alternatives}")
        text = _checked_text(kind, getattr(self, kind))
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(text))
        bare = _LITERALS.sub('""', text)
        if wrong := _NOT_ENFORCED.search(bare):
            raise RequestError(
                f"the grammar has {wrong[0]!r}, which would not be checked or enforced: leave it out (a JSON schema "
                "goes to json=..., a limit of tokens to max_tokens; special tokens have no text)"
            )
        _check_rules(bare)
        return _lark(text)


def structure_of(value: Any) -> Structure:
    """What a short form means: "json_object", a list of choices, a schema, a class; RequestError for anything else."""
    if isinstance(value, Structure):
        return value
    if isinstance(value, str) and value == "json_object":
        return Structure(json_object=True)
    if isinstance(value, (list, tuple)):
        return Structure(choice=value)
    expected = "Structure(...), a JSON schema, a class, a list of choices, or 'json_object'"
    require(isinstance(value, (Mapping, type)), "structure", value, expected)
    return Structure(json=value)


def structure_of_response_format(value: Any) -> Structure | None:
    """The structure of a `response_format` in the form of OpenAI's API; None for {"type": "text"} and for None.

    Of a "json_schema" only its "schema" counts: what is taken is enforced, "strict" or not. A "json_object" may have a
    schema, too, under one of the names that clients of other servers give it: "schema" or "value".
    """
    if value is None:
        return None
    if isinstance(value, type):  # as OpenAI's own client takes a class
        return Structure(json=value)
    given = dict(value) if isinstance(value, Mapping) else {}
    kind = given.pop("type", None)
    if kind == "text" and not given:
        return None
    if kind == "json_object" and list(given) in ([], ["schema"], ["value"]):
        schema = next(iter(given.values()), None)
        return Structure(json_object=True) if schema is None else Structure(json=schema)
    expected = (
        "{'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'json_schema': {'name': ..., "
        "'schema': ...}}"
    )
    require(kind == "json_schema" and list(given) == ["json_schema"], "response_format", value, expected)
    described = given["json_schema"]
    keys = set(described) if isinstance(described, Mapping) else set()
    is_known = "schema" in keys and keys <= {"name", "description", "schema", "strict"}
    expected = "{'name': ..., 'schema': ..., 'strict': ...}"
    require(is_known, "response_format's json_schema", described, expected)
    return Structure(json=described["schema"])


def schema_of(value: Any) -> Any:
    """The JSON schema of a structure's `json`: of a class, or as it was given; RequestError for what is neither."""
    describe = getattr(value, "model_json_schema", None)
    if callable(describe):
        return describe()
    if has_fields(value):
        schemas = TypeSchemas()
        return {**schemas.of(value, value.__name__), "$defs": schemas.definitions}
    is_schema = isinstance(value, (Mapping, bool)) and not isinstance(value, type)
    expected = "a JSON schema (a dictionary), a dataclass, a TypedDict, or a class with model_json_schema()"
    require(is_schema, "json", value, expected)
    return value


def json_options(whitespace: Whitespace = "spaced") -> Any:
    """How llguidance is to write the JSON of a schema that was walked (`enforced_schema`)."""
    space = " " if whitespace == "spaced" else ""
    return {
        "item_separator": f",{space}",
        "key_separator": f":{space}",
        "whitespace_flexible": whitespace == "free",
        "coerce_one_of": True,  # the walk has found that no value fulfils two alternatives
        "json_allowed_escapes": _ESCAPES,
    }


def _lark(text: str) -> str:
    """A grammar as data: a text that begins with a brace would be taken for a whole description of grammars."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _check_rules(text: str) -> None:
    """RequestError for rules of a grammar, without its literals, that refer to one another on too long a path."""
    _, *parts = _RULE.split(text)
    rules = dict(zip(parts[::2], map(_NAME.findall, parts[1::2]), strict=True))

    def following(rule: str) -> list[str]:
        return [each for each in rules[rule] if each in rules]

    def value(rule: str, known: Callable[[str], int]) -> int:
        links = max((1 + known(each) for each in following(rule)), default=0)
        check_path(links, "the grammar")
        return links

    folded(rules, following, value, 0, str)


def _checked_text(kind: str, value: Any) -> str:
    require(isinstance(value, str) and value != "", kind, value, "text")
    check_encodable(value, kind)
    if (size := len(value.encode())) > MOST_BYTES[kind]:
        raise RequestError(f"{kind} has {size} bytes: at most {MOST_BYTES[kind]} are taken, say less in it")
    return value
