"""Calls kept by grammars: of a whole answer where a call is required, and from where one begins where it is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.engines.speculation.constraints import TokenConstraint, packed_mask
from edgellm.errors import ConstraintError, RequestError
from edgellm.structure.description import json_options
from edgellm.tools.calls import ToolChoice
from edgellm.tools.formats import ToolFormat
from edgellm.tools.values import json_text, kinds_of, named_values, referred

if TYPE_CHECKING:
    from edgellm.structure.grammar import GrammarVocabulary

#: A call without a mark begins within so many bytes of an answer, or not at all.
_OPENING_BYTES = 256
#: So many $refs that lead to $refs are followed.
_MOST_REFERENCES = 20


def call_constraint(
    tool_format: ToolFormat,
    choice: ToolChoice,
    vocabulary: GrammarVocabulary,
    mark_ids: dict[str, int],
) -> TokenConstraint:
    """The rules of an answer that calls one of the tools, or may; `mark_ids` are those of the format's marks that are
    one token. Raises RequestError for tools that cannot be enforced on this model."""
    special_ids = {mark: token for mark, token in mark_ids.items() if vocabulary.is_special(token)}
    grammar = call_grammar(tool_format, choice, special_ids)
    compiled = vocabulary.constraint_for(grammar, "the tools")
    if choice.mode == "required":
        return compiled
    names = "|".join(map(re.escape, choice.names))
    before = rf"\s*(?:{re.escape(tool_format.begin)})?\s*"
    openings = {
        "{": rf'{before}(\{{\s*"name"\s*:\s*"(?:{names})"\s*,\s*"parameters"\s*:\s*)',
        "[": rf"{before}(\[(?:{names})\()",
    }
    opening = openings.get(tool_format.bare)
    marked = opening is None  # else the mark is not always there, and no part of the grammar
    return FromCall(
        lambda: vocabulary.constraint_for(grammar, "the tools"),
        vocabulary,
        tool_format.begin.encode() if marked else b"",
        special_ids.get(tool_format.begin) if marked else None,
        None if opening is None else re.compile(opening.encode()),
    )


def call_grammar(tool_format: ToolFormat, choice: ToolChoice, special_ids: dict[str, int]) -> str:
    """The grammar of an answer's calls, in llguidance's form of Lark."""

    def mark(text: str) -> str:
        return f"<[{special_ids[text]}]>" if text in special_ids else _text(text)

    rules, alternatives = [], []
    for number, (name, schema) in enumerate(choice.schemas().items()):
        alternatives.append(f"call_{number}")
        if tool_format.body == "tags":
            rules += _tagged_rules(number, name, schema)
        elif tool_format.body == "python":
            rules += _python_rules(number, name, schema)
        else:
            before, behind = f'{{"name": {json.dumps(name)}, "{tool_format.key}": ', "}"
            named = tool_format.body == "named"
            head = f"{_text(name)} {mark('[ARGS]')}" if named else _text(before)
            rules += [f"call_{number}: {head} args_{number}{'' if named else ' ' + _text(behind)}"]
            rules += [f"args_{number}: {_json_rule(schema)}"]
    rules.append(f"call: {' | '.join(alternatives)}")
    line_end = ' "\\n"' if tool_format.end and tool_format.body in ("object", "tags") else ""
    begin = f"{mark(tool_format.begin)}{line_end} " if tool_format.begin and tool_format.bare != "{" else ""
    end = f"{line_end} {mark(tool_format.end)}" if tool_format.end else ""
    if tool_format.bare == "[":
        begin = end = ""
    more = f" ({_text(tool_format.separator)} call)*" if choice.parallel else ""
    if tool_format.body in ("list", "python"):
        start = f'{begin}"[" call{more} "]"{end}'
    else:
        one = f"{begin}call{end}"
        separator = f"{_text(tool_format.separator)} " if tool_format.separator else ""
        start = f"{one} ({separator}{one})*" if choice.parallel else one
    return "\n".join(["%llguidance {}", f"start: {start}", *rules])


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_rule(schema: Any) -> str:
    return f"%json {json.dumps({'x-guidance': json_options(), **schema})}"


def _parts(schema: dict[str, Any]) -> tuple[list[tuple[str, Any, bool]], dict[str, Any]]:
    """Each argument's name, schema and whether it is required, and the definitions that the schemas refer to.

    Raises RequestError for what cannot be said of arguments that are written one by one.
    """
    others = set(schema) - {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    properties, required = schema.get("properties", {}), schema.get("required", ())
    unknown = [name for name in required if name not in properties]
    if others or unknown or (not properties and schema.get("additionalProperties") is not False):
        found = f"has {sorted(others)[0]} beside properties" if others else "leaves arguments open"
        found = f"requires {unknown[0]!r}, which is not among the properties" if unknown else found
        raise RequestError(
            f"a tool's schema {found}, which cannot be enforced in the format of this model, that writes arguments "
            "one by one: name all of them in properties, set the function's strict to false, or ask with tool_choice "
            "'none'"
        )
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [(name, each, name in required) for name, each in properties.items()], definitions


def _is_open(schema: dict[str, Any]) -> bool:
    """Whether arguments may have any names and values."""
    return set(schema) <= {"type", "additionalProperties"} and schema.get("additionalProperties", True) is True


def _listed(number: int, parts: list[tuple[str, Any, bool]], separator: str) -> list[str]:
    """Rules of arguments in order, of which some may be left out, with a separator between those that are there."""
    rules = []
    for place in range(len(parts)):  # from_N_M: arguments from M on; more_N_M: with a separator before each
        last = place + 1 == len(parts)
        tail = "" if last else f" more_{number}_{place + 1}"
        first = f"arg_{number}_{place}{tail}"
        more = f"{_text(separator)} {first}" if separator else first
        if not parts[place][2]:
            first += ' | ""' if last else f" | from_{number}_{place + 1}"
            more += ' | ""' if last else f" |{tail}"
        rules += [f"from_{number}_{place}: {first}", f"more_{number}_{place}: {more}"]
    return rules or [f'from_{number}_0: ""']


def _python_rules(number: int, name: str, schema: dict[str, Any]) -> list[str]:
    call = f'call_{number}: {_text(name + "(")} from_{number}_0 ")"'
    if _is_open(schema):
        some = f'any_{number}: /[a-zA-Z_][a-zA-Z0-9_]*/ "=" value_{number}'
        rules = [f'from_{number}_0: (any_{number} (", " any_{number})*)?', some, f"value_{number}: {_json_rule({})}"]
        return [call, *rules]
    parts, definitions = _parts(schema)
    rules = [call, *_listed(number, parts, ", ")]
    for place, (key, each, _) in enumerate(parts):
        if not re.fullmatch(r"[^\W\d]\w*", key):
            raise RequestError(
                f"the tool {name} has the argument {key!r}, which the format of this model cannot write: expected a "
                "name of letters, digits and _"
            )
        words = {"boolean": '"True" | "False"', "null": '"None"'}
        own = words.get(each["type"]) if isinstance(each, dict) and set(each) == {"type"} else None
        if own is None:
            own = _json_rule({**each, **definitions} if isinstance(each, dict) else {})
        value = f"value_{number}_{place}"
        rules += [f"arg_{number}_{place}: {_text(key + '=')} {value}", f"{value}: {own}"]
    return rules


_TAG_END = "\n</parameter>\n"
#: How templates write these as text, and JSON does.
_WORDS = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}


def _tagged_rules(number: int, name: str, schema: dict[str, Any]) -> list[str]:
    call = f'call_{number}: {_text(f"<function={name}>" + chr(10))} from_{number}_0 "</function>"'
    if _is_open(schema):
        some = f"from_{number}_0: (/<parameter=[^<>\\n]+>\\n/ TEXT_{number})*"
        return [call, some, _tagged_text(f"TEXT_{number}", {})]
    parts, definitions = _parts(schema)
    rules = [call, *_listed(number, parts, "")]
    for place, (key, each, _) in enumerate(parts):
        value = f"value_{number}_{place}"
        rules += _tagged_value(value, f"the tool {name} has the argument {key!r}", each, schema, definitions)
        rules += [f"arg_{number}_{place}: {_text(f'<parameter={key}>' + chr(10))} {value}"]
    return rules


def _tagged_value(value: str, what: str, schema: Any, root: dict[str, Any], definitions: dict[str, Any]) -> list[str]:
    """Rules of the value of one argument with the tag that ends it. RequestError, which begins with `what`, where the
    schema says more of its text than can be kept, or text could be taken for something else that is not allowed."""
    alternatives, rules, written = _alternatives(schema, root), [], []
    is_text = any("string" in kinds_of(each, root) for each in alternatives)
    for place, each in enumerate(alternatives):
        kinds, named, is_plain = kinds_of(each, root), named_values(each), set(each) == {"type"}
        if named is not None and set(each) <= {"type", "enum", "const"}:
            valid = [one for one in named if kinds_of({"const": one}, root) & kinds]
            written += [f"{_text(text)} {_text(_TAG_END)}" for one in valid for text in _spelled(one)]
        elif not each or (kinds == {"string"} and set(each) <= {"type", "minLength", "maxLength"}):
            rules.append(_tagged_text(f"{value.upper()}_{place}", each))
            written.append(f"{value.upper()}_{place}")
        elif "string" in kinds or (is_text and not is_plain):
            found = "text of a form" if "string" in kinds else "text, or something of a form,"
            raise RequestError(
                f"{what} with {found} which cannot be enforced in the format of this model: leave pattern, format and "
                "alternatives with bounds out, or use an enum"
            )
        elif is_plain and each["type"] in _WORDS:
            written += [f"{_text(word)} {_text(_TAG_END)}" for word in _WORDS[each["type"]]]
        else:
            rules.append(f"json_{value}_{place}: {_json_rule({**each, **definitions})}")
            written.append(f"json_{value}_{place} {_text(_TAG_END)}")
    if not written:
        raise RequestError(f"{what} which nothing can be: expected a schema that some value fulfils")
    return [f"{value}: {' | '.join(written)}", *rules]


def _tagged_text(name: str, schema: dict[str, Any]) -> str:
    """The terminal of any text of a length, with the tag that ends it, which may not be within it."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    length = "*" if not least and most == "" else f"{{{least},{most}}}"
    return rf"{name}: /(?s:.{length})\n<\/parameter>\n/ & ~/(?s:.*)<\/parameter>(?s:.*)<\/parameter>(?s:.*)/"


def _alternatives(schema: Any, root: dict[str, Any], level: int = 0) -> list[dict[str, Any]]:
    """The schemas of which a value fulfils one: those of $ref, anyOf and oneOf that stand alone, and one for each type
    of a list. A schema that allows everything is an empty one."""
    if not isinstance(schema, dict):
        return [{}]
    if set(schema) == {"$ref"} and level < _MOST_REFERENCES:
        return _alternatives(referred(schema["$ref"], root), root, level + 1)
    for keyword in ("anyOf", "oneOf"):
        if set(schema) == {keyword}:
            return [found for each in schema[keyword] for found in _alternatives(each, root, level + 1)]
    if isinstance(schema.get("type"), list) and named_values(schema) is None:
        return [
            {key: kept for key, kept in schema.items() if kind == "string" or key not in ("minLength", "maxLength")}
            | {"type": kind}
            for kind in schema["type"]
        ]
    return [schema]


def _spelled(value: Any) -> tuple[str, ...]:
    """How a value may be written between tags."""
    if value is None or isinstance(value, bool):
        return ("null", "None") if value is None else (json.dumps(value), str(value))
    return (value if isinstance(value, str) else json_text(value),)


class FromCall:
    """Rules that begin where an answer begins a call: see `edgellm.engines.speculation.constraints.TokenConstraint`.

    Until then each token is allowed. The tokens that began the call, or what of them belongs to it, are the first that
    the rules consume; where they do not take them, the call is no concern of theirs.
    """

    def __init__(
        self,
        make_rules: Callable[[], TokenConstraint],
        vocabulary: GrammarVocabulary,
        mark: bytes,
        mark_id: int | None,
        opening: re.Pattern[bytes] | None,
    ) -> None:
        """A call begins with `mark` anywhere (the token `mark_id` where that is a special one; b"" for none), or at the
        answer's beginning with the first group of `opening`."""
        self._make, self._vocabulary, self._mark, self._mark_id = make_rules, vocabulary, mark, mark_id
        self._opening = opening
        self._text = bytearray()
        self._ends: list[int] = []  # of the text, behind each free token
        self._rules: TokenConstraint | None = None
        self._ruled = 0  # tokens that the rules have consumed, without those that began the call

    def fill_mask(self, row: np.ndarray) -> None:
        """See `TokenConstraint`."""
        if self._rules is None:
            row.view(np.uint32)[:] = packed_mask(np.ones(self._vocabulary.size, np.bool_))
        else:
            self._rules.fill_mask(row)

    def try_advance(self, token: int) -> bool:
        """See `TokenConstraint`."""
        if self._rules is not None:
            consumed = self._rules.try_advance(token)
            self._ruled += consumed
            return consumed
        if not 0 <= token < self._vocabulary.size:
            return False
        begin = len(self._text)
        self._text += self._vocabulary.bytes_of(token)
        self._ends.append(len(self._text))
        self._rules = self._begun(token, begin)
        return True

    def rollback(self, count: int) -> None:
        """See `TokenConstraint`."""
        ruled = min(count, self._ruled)
        if ruled and self._rules is not None:
            self._rules.rollback(ruled)
            self._ruled -= ruled
        if count > ruled:
            self._rules = None
            del self._ends[len(self._ends) - (count - ruled) :]
            del self._text[self._ends[-1] if self._ends else 0 :]

    def forced(self, most: int) -> list[int]:
        """See `TokenConstraint`."""
        return [] if self._rules is None else self._rules.forced(most)

    def is_free(self) -> bool:
        """See `TokenConstraint`."""
        return self._rules is None

    def is_complete(self) -> bool:
        """See `TokenConstraint`."""
        return self._rules is None or self._rules.is_complete()

    def is_stopped(self) -> bool:
        """See `TokenConstraint`."""
        return self._rules is not None and self._rules.is_stopped()

    def _begun(self, token: int, begin: int) -> TokenConstraint | None:
        """The rules, where a call begins with this token, whose text is that from `begin` on."""
        if self._mark_id is not None:
            first = [token] if token == self._mark_id else None
        else:
            start = self._text.find(self._mark, max(0, begin - len(self._mark) + 1)) if self._mark else -1
            first = None if start < 0 else self._vocabulary.spelled(bytes(self._text[start:]))
        if first is None and self._opening is not None and begin < _OPENING_BYTES:
            found = self._opening.match(self._text)
            first = None if found is None else self._vocabulary.spelled(bytes(self._text[found.start(1) :]))
        return None if first is None else _following(self._make(), first)


def _following(rules: TokenConstraint, tokens: Sequence[int]) -> TokenConstraint | None:
    """Rules behind tokens; None where they do not allow them."""
    try:
        return rules if all(map(rules.try_advance, tokens)) else None
    except ConstraintError:
        return None
