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

if TYPE_CHECKING:
    from edgellm.structure.grammar import GrammarVocabulary

#: A call without a mark begins within so many bytes of an answer, or not at all.
_OPENING_BYTES = 256


def call_constraint(
    tool_format: ToolFormat,
    choice: ToolChoice,
    vocabulary: GrammarVocabulary,
    special_ids: dict[str, int],
) -> TokenConstraint:
    """The rules of an answer that calls one of the tools, or may; `special_ids` are those of the format's marks that
    are special tokens. Raises RequestError for tools that cannot be enforced on this model."""
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
            "one by one: name all of them in properties, or ask with tool_choice 'none'"
        )
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return [(name, each, name in required) for name, each in properties.items()], definitions


def _kinds(schema: Any) -> set[str]:
    kinds = schema.get("type", ()) if isinstance(schema, dict) else ()
    return {kinds} if isinstance(kinds, str) else set(kinds)


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
    parts, definitions = _parts(schema)
    rules = [f'call_{number}: {_text(name + "(")} from_{number}_0 ")"', *_listed(number, parts, ", ")]
    for place, (key, each, _) in enumerate(parts):
        if not re.fullmatch(r"[^\W\d]\w*", key):
            raise RequestError(
                f"the tool {name} has the argument {key!r}, which the format of this model cannot write: expected a "
                "name of letters, digits and _"
            )
        own = {"boolean": '"True" | "False"', "null": '"None"'}.get("".join(_kinds(each)))
        if own is None or "enum" in each or "const" in each:
            own = _json_rule({**each, **definitions} if isinstance(each, dict) else {})
        value = f"value_{number}_{place}"
        rules += [f"arg_{number}_{place}: {_text(key + '=')} {value}", f"{value}: {own}"]
    return rules


def _tagged_rules(number: int, name: str, schema: dict[str, Any]) -> list[str]:
    parts, definitions = _parts(schema)
    rules = [
        f'call_{number}: {_text(f"<function={name}>" + chr(10))} from_{number}_0 "</function>"',
        *_listed(number, parts, ""),
    ]
    for place, (key, each, _) in enumerate(parts):
        value, closing = f"value_{number}_{place}", "\n</parameter>\n"
        values = each.get("enum", [each["const"]] if "const" in each else None) if isinstance(each, dict) else None
        if values is not None and all(isinstance(value, str) for value in values):
            rules += [f"{value}: ({' | '.join(map(_text, values))}) {_text(closing)}"]
        elif _kinds(each) == {"string"} and set(each) == {"type"}:
            rules += [f"{value}[lazy]: /(?s:.*)\\n<\\/parameter>\\n/"]
        else:
            if _kinds(each) & {"string"} or not _kinds(each):
                raise RequestError(
                    f"the tool {name} has the argument {key!r} with text of a form, which cannot be enforced in the "
                    "format of this model: leave pattern, format and lengths out, or use an enum"
                )
            rules += [f"{value}: json_{value} {_text(closing)}", f"json_{value}: {_json_rule({**each, **definitions})}"]
        rules += [f"arg_{number}_{place}: {_text(f'<parameter={key}>' + chr(10))} {value}"]
    return rules


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
