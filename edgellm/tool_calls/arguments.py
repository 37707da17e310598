"""Grammars of what tools are called with: JSON of a schema, arguments that a format writes one by one, and those
between braces as Gemma 4 writes them: names without quotes, and text between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edgellm.errors import RequestError
from edgellm.structure.description import json_options
from edgellm.structure.schema_keywords import kind_of, named_values, whole_text
from edgellm.structure.steps import Steps
from edgellm.tool_calls.formats import ARGUMENT_END, ToolFormat
from edgellm.tool_calls.values import TEXT_MARK, all_kinds, json_text, keyed_name, keyed_text, referred, spelled


def literal(text: str, special_ids: Mapping[str, int]) -> str:
    """A text as grammars have it, in which special tokens stand by their ids; "" for none."""
    pieces = re.split(f"({'|'.join(map(re.escape, special_ids))})", text) if special_ids else [text]
    return " ".join(f"<[{special_ids[each]}]>" if each in special_ids else json_text(each) for each in pieces if each)


def json_rule(schema: Any, root: dict[str, Any], size: Steps) -> str:
    """JSON of a schema, with the definitions of the `root` where it refers to some; `size` counts the bytes."""
    text = json.dumps({"x-guidance": json_options(), **schema})
    if "$defs" in root and '"$ref"' in text:
        text = json.dumps({"x-guidance": json_options(), **schema, "$defs": root["$defs"]})
    size.take(len(text))
    return f"%json {text}"


def argument_parts(schema: dict[str, Any]) -> list[tuple[str, Any, bool]]:
    """Each argument's name, schema and whether it is required: of those that are named, none where `properties` is
    empty, as tools without arguments have it. Raises RequestError for what cannot be said of arguments that are written
    one by one."""
    others = set(schema) - {"type", "properties", "required", "additionalProperties", "$defs"}
    properties, required = schema.get("properties", {}), schema.get("required", ())
    unknown = [name for name in required if name not in properties]
    if others or unknown or ("properties" not in schema and schema.get("additionalProperties") is not False):
        found = f"has {sorted(others)[0]} beside properties" if others else "leaves arguments open"
        found = f"requires {unknown[0]!r}, which is not among the properties" if unknown else found
        raise RequestError(
            f"a tool's schema {found}, which cannot be enforced in the format of this model, that writes arguments "
            "one by one: name all of them in properties, set the function's strict to false, or ask with tool_choice "
            "'none'"
        )
    return [(name, each, name in required) for name, each in properties.items()]


def _is_open(schema: dict[str, Any]) -> bool:
    """Whether arguments may have any names and values, where none are named."""
    is_bare = set(schema) <= {"type", "additionalProperties", "properties", "required"}
    named = schema.get("properties") or schema.get("required")
    return is_bare and not named and schema.get("additionalProperties", "properties" not in schema) in (True, {})


def listed(number: int | str, parts: list[tuple[str, Any, bool]], separator: str) -> list[str]:
    """Rules of arguments in order, of which some may be left out, with a separator between those that are there."""
    rules = [f'from_{number}_{len(parts)}: ""', f'more_{number}_{len(parts)}: ""']
    for place, (_, _, is_required) in enumerate(parts):  # from_N_M: those from M on; more_N_M: behind others
        argument, more = f"arg_{number}_{place}", f"more_{number}_{place + 1}"
        without, perhaps = ("", "") if is_required else (f" | from_{number}_{place + 1}", "?")
        rules.append(f"from_{number}_{place}: {argument} {more}{without}")
        rules.append(f"more_{number}_{place}: ({separator} {argument}){perhaps} {more}")
    return rules


#: The names that arguments may have in formats that write them one by one, and how errors say it.
_PYTHON_NAME = r"[^\W\d]\w*", "of letters, digits and _"
_TAG_NAME = r"[^<>\n]+", "without <, > and line ends"


def argument_rules(tool_format: ToolFormat, number: int, name: str, schema: dict[str, Any], size: Steps) -> list[str]:
    """Rules of arguments that are written one by one. Raises RequestError for what they cannot say."""
    is_python = tool_format.body == "python"
    if _is_open(schema) and is_python:
        some = f'any_{number}: /[a-zA-Z_][a-zA-Z0-9_]*/ "=" value_{number}'
        value = f"value_{number}: {json_rule({}, {}, size)}"
        return [f'args_{number}: (any_{number} (", " any_{number})*)?', some, value]
    if _is_open(schema):
        some = f"args_{number}: (/<parameter={_TAG_NAME[0]}>\\n/ TEXT_{number})*"
        return [some, _tagged_text(f"TEXT_{number}", {})]
    parts = argument_parts(schema)
    rules = [f"args_{number}: from_{number}_0", *listed(number, parts, '", "' if is_python else "")]
    for place, (key, each, _) in enumerate(parts):
        value, what = f"value_{number}_{place}", f"the tool {name} has the argument {key!r}"
        rules.append(f"arg_{number}_{place}: {json_text(tool_format.around_argument(key)[0])} {value}")
        form, expected = _PYTHON_NAME if is_python else _TAG_NAME
        if not re.fullmatch(form, key):
            raise RequestError(f"{what}, which the format of this model cannot write: expected a name {expected}")
        if is_python:
            plain = each if isinstance(each, dict) else {}
            own = _PYTHON_WORDS.get(str(plain["type"])) if set(plain) == {"type"} else None
            rules.append(f"{value}: {own or json_rule(plain, schema, size)}")
        else:
            rules += _tagged_value(value, what, each, schema, size)
    return rules


#: What is said of text alone.
_OF_TEXT = ("minLength", "maxLength", "pattern")
_TAG_END = f"\n{ARGUMENT_END}\n"
#: The values of types that have few, and how Python writes them.
_FEW: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
_PYTHON_WORDS = {kind: " | ".join(json_text(str(value)) for value in values) for kind, values in _FEW.items()}


def _tagged_value(value: str, what: str, schema: Any, root: dict[str, Any], size: Steps) -> list[str]:
    """Rules of the value of one argument with the tag that ends it. RequestError, which begins with `what`, where the
    schema says more of its text than can be kept, or text could be taken for something else that is not allowed."""
    from edgellm.structure.grammar import byte_vocabulary

    alternatives, rules, written = alternatives_of(schema, root), [], []
    all_of_them = all_kinds(alternatives, root)
    is_text = any("string" in kinds for kinds in all_of_them)
    for place, (each, kinds) in enumerate(zip(alternatives, all_of_them, strict=True)):
        is_plain = set(each) == {"type"}
        named = _FEW.get(each["type"]) if is_plain else named_values(each)
        if named is not None and set(each) <= {"type", "enum", "const"}:
            valid = [one for one in named if kind_of(one) in kinds]
            written += [f"{json_text(text)} {json_text(_TAG_END)}" for one in valid for text in spelled(one)]
        elif not each or (kinds == {"string"} and text_forms(each) is not None):
            rules.append(_tagged_text(f"{value.upper()}_{place}", each))
            written.append(f"{value.upper()}_{place}")
            if len(each) > 2:  # what is said of a text may leave none
                byte_vocabulary().compiled(f"start: {written[-1]}\n{rules[-1]}", f"{what}, whose text")
        elif "string" in kinds or (is_text and not is_plain):
            found = "text of a form" if "string" in kinds else "text, or something of a form,"
            raise RequestError(
                f"{what} with {found} which cannot be enforced in the format of this model: say it by patterns without "
                "anchors within them, use an enum, or leave alternatives with bounds out"
            )
        else:
            rules.append(f"json_{value}_{place}: {json_rule(each, root, size)}")
            written.append(f"json_{value}_{place} {json_text(_TAG_END)}")
    if not written:
        raise RequestError(f"{what} which nothing can be: expected a schema that some value fulfils")
    return [f"{value}: {' | '.join(written)}", *rules]


def _tagged_text(name: str, schema: dict[str, Any]) -> str:
    """The terminal of text of a length and forms, with the tag that ends it and no other end of a text in it."""
    ends = r"<\/parameter>(?s:.*)<\/parameter>|<parameter=|<\/function>\s*<\/tool_call>"
    terms = text_terms(schema, r"\n<\/parameter>\n")
    return f"{name}: {terms} & ~/(?s:.*)({ends})(?s:.*)/"


def text_terms(schema: dict[str, Any], end: str) -> str:
    """The expressions of text of a length and forms with its `end`, all of which it fulfils."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    forms = [f"(?s:.{{{least},{most}}})", *(text_forms(schema) or ())]
    return " & ".join(f"/{form}{end}/" for form in forms)


def text_forms(schema: dict[str, Any]) -> list[str] | None:
    """The expressions of the texts that a schema's patterns allow; None where tags cannot keep all that it says."""
    others = schema.get("allOf", ())
    patterns = [part["pattern"] for part in (schema, *others) if "pattern" in part]
    forms = [form for each in patterns if (form := whole_text(each)) is not None]
    is_plain = set(schema) <= {"type", "allOf", *_OF_TEXT} and all(set(each) == {"pattern"} for each in others)
    return forms if is_plain and len(forms) == len(patterns) else None


def alternatives_of(schema: Any, root: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of which a value fulfils one: those of $ref, anyOf, oneOf and an allOf of one that stand alone,
    each once, and one for each type of a list. A schema that allows everything is an empty one."""
    found: list[dict[str, Any]] = []
    waiting, seen = [schema], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if not isinstance(each, dict):
            found += [{}] if each else []
        elif set(each) == {"$ref"}:
            waiting.append(referred(each["$ref"], root))
        elif set(each) in ({"anyOf"}, {"oneOf"}) or (set(each) == {"allOf"} and len(each["allOf"]) == 1):
            waiting += reversed(next(iter(each.values())))
        elif isinstance(each.get("type"), list) and named_values(each) is None:
            for kind in each["type"]:
                found.append({key: kept for key, kept in each.items() if kind == "string" or key not in _OF_TEXT})
                found[-1]["type"] = kind
        else:
            found.append(each)
    return found


#: Written as JSON has them.
_SCALARS = frozenset(["integer", "number", "boolean", "null"])
#: What a schema is that allows everything.
_ANYTHING = {"anyOf": [{"type": kind} for kind in ("string", "number", "boolean", "null", "object", "array")]}
#: A name that a schema does not say.
_NAME = "/[a-zA-Z_][a-zA-Z0-9_]*/"


class KeyedRules:
    """The rules of the arguments of one tool."""

    def __init__(
        self, number: int, tool: str, schema: dict[str, Any], special_ids: Mapping[str, int], size: Steps
    ) -> None:
        """`size` counts the bytes. Raises RequestError for what these rules cannot say."""
        self.rules: list[str] = []
        self._number, self._root, self._special_ids, self._size = number, schema, special_ids, size
        self._known: dict[int, tuple[Any, str]] = {}  # schemas, which are kept so that none takes another's id
        self._object(f"args_{number}", schema, f"the tool {tool}", is_whole=True)

    def _add(self, rule: str) -> None:
        self._size.take(len(rule))
        self.rules.append(rule)

    def _object(self, name: str, schema: dict[str, Any], what: str, is_whole: bool = False) -> None:
        """The rule of that name: what stands between the braces of an object, in the order of its names."""
        others = schema.get("additionalProperties", "properties" not in schema)
        is_bare = set(schema) <= {"type", "properties", "required", "additionalProperties", "$defs"}
        if is_bare and others is not False and not schema.get("properties") and not schema.get("required"):
            pair = f'{_NAME} ":" {self._value(others, what)}'
            self._add(f'{name}: ({pair} ("," {pair})*)?')
            return
        parts = sorted(argument_parts(schema), key=lambda part: part[0].lower())
        for rule in (f"{name}: from_{name}_0", *listed(name, parts, '","')):
            self._add(rule)
        for place, (key, each, _) in enumerate(parts):
            head = literal(f"{keyed_name(key)}:", self._special_ids)
            value = self._value(each, f"{what} has the argument {key!r}" if is_whole else what)
            self._add(f"arg_{name}_{place}: {head} {value}")

    def _value(self, schema: Any, what: str) -> str:
        """The name of the rule of a value."""
        schema = _ANYTHING if schema is True or schema == {} else schema
        if id(schema) not in self._known:
            name = f"value_{self._number}_{len(self._known)}"
            self._known[id(schema)] = schema, name
            alternatives = alternatives_of(schema, self._root)
            all_of_them = enumerate(zip(alternatives, all_kinds(alternatives, self._root), strict=True))
            written = [self._alternative(f"{name}_{place}", what, *each) for place, each in all_of_them]
            if not any(written):
                raise RequestError(f"{what} which nothing can be: expected a schema that some value fulfils")
            self._add(f"{name}: {' | '.join(filter(None, written))}")
        return self._known[id(schema)][1]

    def _alternative(self, name: str, what: str, schema: dict[str, Any], kinds: frozenset[str]) -> str:
        """How a value of a schema without alternatives is written; "" for none."""
        named = named_values(schema)
        if named is not None and set(schema) <= {"type", "enum", "const"}:
            return " | ".join(literal(keyed_text(each), self._special_ids) for each in named if kind_of(each) in kinds)
        if not schema:
            return self._value(_ANYTHING, what)
        if kinds == {"string"} and text_forms(schema) is not None:
            return self._text(name.upper(), what, schema)
        if kinds <= _SCALARS:
            self._add(f"{name}: {json_rule(schema, self._root, self._size)}")
            return name
        if kinds == {"object"}:
            self._object(name, schema, what)
            return f'"{{" {name} "}}"'
        if kinds == {"array"} and set(schema) <= {"type", "items", "minItems", "maxItems"}:
            return f'"[" {self._items(schema, what)} "]"'
        raise RequestError(
            f"{what} with a value of a form which cannot be enforced in the format of this model: say it by types, "
            "bounds, patterns without anchors within them, an enum, or properties"
        )

    def _items(self, schema: dict[str, Any], what: str) -> str:
        items, least, most = schema.get("items", True), schema.get("minItems", 0), schema.get("maxItems")
        if items is False or most == 0:
            return ""
        value = self._value(items, what)
        more = "" if most == 1 else f'("," {value}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f"{value} {more}" if least else f"({value} {more})?"

    def _text(self, name: str, what: str, schema: dict[str, Any]) -> str:
        """Text between its marks: where these are no special tokens, the second one belongs to the terminal."""
        from edgellm.structure.grammar import byte_vocabulary

        mark, escaped = literal(TEXT_MARK, self._special_ids), re.escape(TEXT_MARK)
        is_token = TEXT_MARK in self._special_ids
        behind = "*" if is_token else "+"
        self._add(f"{name}: {text_terms(schema, '' if is_token else escaped)} & ~/(?s:.*){escaped}(?s:.{behind})/")
        if len(schema) > 2:  # what is said of a text may leave none
            byte_vocabulary().compiled(f"start: {name}\n{self.rules[-1]}", f"{what}, whose text")
        return f"{mark} {name} {mark if is_token else ''}"
