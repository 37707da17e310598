"""Calls kept by grammars: of a whole answer where a call is required, and from where one begins where it is not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.engines.speculation.constraints import TokenConstraint
from edgellm.errors import ConstraintError, RequestError
from edgellm.structure.description import Structure, json_options
from edgellm.structure.reasoning import LateRules
from edgellm.structure.schema_keywords import kind_of, named_values, whole_text
from edgellm.structure.steps import Steps
from edgellm.tool_calls.calls import ToolChoice
from edgellm.tool_calls.formats import ARGUMENT_END, ToolFormat
from edgellm.tool_calls.values import all_kinds, json_text, referred, spelled

if TYPE_CHECKING:
    from edgellm.structure.grammar import GrammarVocabulary

#: Of the JSON schemas in the grammar of a request's tools.
MOST_GRAMMAR_BYTES = 2**20
#: A call without a mark begins within so many bytes of an answer, or not at all.
_OPENING_BYTES = 256


def call_constraint(
    tool_format: ToolFormat,
    choice: ToolChoice,
    vocabulary: GrammarVocabulary,
    mark_ids: dict[str, int],
    structure: Structure | None = None,
) -> TokenConstraint:
    """The rules of an answer that calls one of the tools, or may; `mark_ids` are those of the format's marks that are
    one token. An answer that need not call has the `structure` where it does not. Raises RequestError for tools that
    cannot be enforced on this model."""
    special_ids = {mark: token for mark, token in mark_ids.items() if vocabulary.tokenizer.is_special_token(token)}
    grammar = call_grammar(tool_format, choice, special_ids, may_lack_mark=choice.mode == "auto" and structure is None)
    compiled = vocabulary.constraint_for(grammar, "the tools")
    if choice.mode == "required":
        return compiled
    if structure is not None:
        text = vocabulary.constraint_for(structure.grammar_text, structure.name)
        openings = " | ".join(literal(opening, special_ids) for opening in tool_format.openings(choice.schemas))
        begun = f"%llguidance {{}}\nstart: ({openings}) /(?s:.+)/?"
        return CallsOrText(compiled, text, vocabulary.constraint_for(begun, "the tools"))
    names = "|".join(map(re.escape, choice.schemas))
    mark = re.escape(tool_format.begin)
    tags = f"|<function=(?:{names})>" if tool_format.body == "tags" else ""
    before = rf"\A\s*(?:{mark})?\s*"
    # A mark that is not always there is no part of the grammar.
    openings_by_bare = {
        "{": rf'{before}(\{{\s*"name"\s*:\s*"(?:{names})"\s*,\s*"parameters"\s*:\s*)',
        "[": rf"{before}(\[(?:{names})\()",
        "": f"({mark if tool_format.begin not in special_ids else '(?!)'}{tags})",
    }
    mark_id = None if tool_format.bare else special_ids.get(tool_format.begin)
    opening = re.compile(openings_by_bare[tool_format.bare].encode())
    return FromCall(vocabulary, grammar, opening, mark_id)


def call_grammar(
    tool_format: ToolFormat, choice: ToolChoice, special_ids: Mapping[str, int], may_lack_mark: bool = False
) -> str:
    """The grammar of an answer's calls, in llguidance's form of Lark; tags may stand without the mark before them."""
    rules, alternatives, size = [], [], Steps("the grammar of the tools", MOST_GRAMMAR_BYTES)
    for number, (name, schema) in enumerate(choice.schemas.items()):
        head, tail = (literal(text, special_ids) for text in tool_format.around(name))
        alternatives.append(f"call_{number}")
        rules.append(f"call_{number}: {head} args_{number} {tail}")
        if tool_format.body in ("tags", "python"):
            rules += _argument_rules(tool_format, number, name, schema, size)
        else:
            rules.append(f"args_{number}: {json_rule(schema, {}, size)}")
    rules.append(f"call: {' | '.join(alternatives)}")
    before, begin, separator, end, behind = (literal(text, special_ids) for text in tool_format.frame)
    if may_lack_mark and tool_format.body == "tags":
        begin = f"({begin})?"
    one = f"{begin} call {end}"
    more = f"({separator} {one})*" if choice.parallel else ""
    return "\n".join(["%llguidance {}", f"start: {before} {one} {more} {behind}", *rules])


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


def _parts(schema: dict[str, Any]) -> list[tuple[str, Any, bool]]:
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


def _listed(number: int, parts: list[tuple[str, Any, bool]], separator: str) -> list[str]:
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


def _argument_rules(tool_format: ToolFormat, number: int, name: str, schema: dict[str, Any], size: Steps) -> list[str]:
    """Rules of arguments that are written one by one. Raises RequestError for what they cannot say."""
    is_python = tool_format.body == "python"
    if _is_open(schema) and is_python:
        some = f'any_{number}: /[a-zA-Z_][a-zA-Z0-9_]*/ "=" value_{number}'
        value = f"value_{number}: {json_rule({}, {}, size)}"
        return [f'args_{number}: (any_{number} (", " any_{number})*)?', some, value]
    if _is_open(schema):
        some = f"args_{number}: (/<parameter={_TAG_NAME[0]}>\\n/ TEXT_{number})*"
        return [some, _tagged_text(f"TEXT_{number}", {})]
    parts = _parts(schema)
    rules = [f"args_{number}: from_{number}_0", *_listed(number, parts, '", "' if is_python else "")]
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

    alternatives, rules, written = _alternatives(schema, root), [], []
    all_of_them = all_kinds(alternatives, root)
    is_text = any("string" in kinds for kinds in all_of_them)
    for place, (each, kinds) in enumerate(zip(alternatives, all_of_them, strict=True)):
        is_plain = set(each) == {"type"}
        named = _FEW.get(each["type"]) if is_plain else named_values(each)
        if named is not None and set(each) <= {"type", "enum", "const"}:
            valid = [one for one in named if kind_of(one) in kinds]
            written += [f"{json_text(text)} {json_text(_TAG_END)}" for one in valid for text in spelled(one)]
        elif not each or (kinds == {"string"} and _text_forms(each) is not None):
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
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    forms = [f"(?s:.{{{least},{most}}})", *(_text_forms(schema) or ())]
    terms = " & ".join(rf"/{form}\n<\/parameter>\n/" for form in forms)
    ends = r"<\/parameter>(?s:.*)<\/parameter>|<parameter=|<\/function>\s*<\/tool_call>"
    return f"{name}: {terms} & ~/(?s:.*)({ends})(?s:.*)/"


def _text_forms(schema: dict[str, Any]) -> list[str] | None:
    """The expressions of the texts that a schema's patterns allow; None where tags cannot keep all that it says."""
    others = schema.get("allOf", ())
    patterns = [part["pattern"] for part in (schema, *others) if "pattern" in part]
    forms = [form for each in patterns if (form := whole_text(each)) is not None]
    is_plain = set(schema) <= {"type", "allOf", *_OF_TEXT} and all(set(each) == {"pattern"} for each in others)
    return forms if is_plain and len(forms) == len(patterns) else None


def _alternatives(schema: Any, root: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of which a value fulfils one: those of $ref, anyOf and oneOf that stand alone, each once, and one for
    each type of a list. A schema that allows everything is an empty one."""
    found: list[dict[str, Any]] = []
    waiting, seen = [schema], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if not isinstance(each, dict):
            found.append({})
        elif set(each) == {"$ref"}:
            waiting.append(referred(each["$ref"], root))
        elif set(each) in ({"anyOf"}, {"oneOf"}):
            waiting += reversed(next(iter(each.values())))
        elif isinstance(each.get("type"), list) and named_values(each) is None:
            for kind in each["type"]:
                found.append({key: kept for key, kept in each.items() if kind == "string" or key not in _OF_TEXT})
                found[-1]["type"] = kind
        else:
            found.append(each)
    return found


class RulesOfCall(LateRules):
    """Rules that begin where an answer begins a call, with the tokens that began it, or what of them belongs to it;
    where the rules do not take these, the call is no concern of theirs."""

    _may_never_begin = True

    def __init__(self, vocabulary: GrammarVocabulary, grammar: str) -> None:
        super().__init__(vocabulary.size)
        self._vocabulary, self._grammar, self._tokenizer = vocabulary, grammar, vocabulary.tokenizer

    def _began(self, token: int) -> Sequence[int] | None:
        """The first tokens of a call, where one begins with this token, the latest of the free ones."""
        raise NotImplementedError

    def _advance_freely(self, token: int) -> bool:
        is_known = super()._advance_freely(token)
        first = self._began(token) if is_known else None
        if first is not None:
            rules = self._vocabulary.constraint_for(self._grammar, "the tools")
            with suppress(ConstraintError):
                self._rules = rules if all(map(rules.try_advance, first)) else None
        return is_known

    def rollback(self, count: int) -> None:
        before = len(self._free)
        super().rollback(count)
        if len(self._free) < before:
            self._rules = None


class FromCall(RulesOfCall):
    """Rules that begin with the first group of `opening`, and with the token `mark_id`."""

    def __init__(
        self, vocabulary: GrammarVocabulary, grammar: str, opening: re.Pattern[bytes], mark_id: int | None
    ) -> None:
        super().__init__(vocabulary, grammar)
        self._opening, self._mark_id = opening, mark_id
        self._text = bytearray()  # of the free tokens

    def _began(self, token: int) -> Sequence[int] | None:
        begin = len(self._text)
        self._text += self._tokenizer.decode_bytes([token])
        if token == self._mark_id:
            return [token]
        found = self._opening.finditer(self._text, max(0, begin - _OPENING_BYTES))
        start = next((each.start(1) for each in found if each.end() > begin), None)
        return None if start is None else self._tokenizer.tokenize_bytes(bytes(self._text[start:]))

    def rollback(self, count: int) -> None:
        taken_back = self._free[len(self._free) - max(0, count - self._ruled) :]
        super().rollback(count)
        del self._text[len(self._text) - len(self._tokenizer.decode_bytes(taken_back)) :]


class CallsOrText(TokenConstraint):
    """Rules of an answer that is calls, or text of a structure; what begins as a call does is one."""

    def __init__(self, calls: TokenConstraint, text: TokenConstraint, opening: TokenConstraint) -> None:
        """`opening` takes each text that begins as a call does, and is complete from there on."""
        self._rules = (calls, text, opening)
        self._taken = [0, 0, 0]  # tokens, by each of them: it is followed while it has taken all
        self._count = 0

    def _followed(self, number: int) -> bool:
        return self._taken[number] == self._count

    @property
    def _answers(self) -> list[TokenConstraint]:
        """What may still be followed: the calls, the text, or both."""
        return [self._rules[number] for number in (0, 1) if self._followed(number)]

    def fill_mask(self, row: np.ndarray) -> None:
        first, *second = self._answers
        first.fill_mask(row)
        if second:
            text, opening = np.empty_like(row), np.empty_like(row)
            second[0].fill_mask(text)
            self._rules[2].fill_mask(opening)
            words = row.view(np.uint32)
            words |= text.view(np.uint32) & ~opening.view(np.uint32)

    def try_advance(self, token: int) -> bool:
        calls, text, opening = self._rules
        is_open = self._followed(0) and self._followed(1)
        took = [
            self._followed(0) and calls.try_advance(token),
            self._followed(1) and text.try_advance(token),
            is_open and opening.try_advance(token),
        ]
        if took[1] and took[2] and opening.is_complete():
            text.rollback(1)
            took[1] = False
        if not any(took[:2]):
            if took[2]:
                opening.rollback(1)
            return False
        self._count += 1
        self._taken = [self._count if each else taken for each, taken in zip(took, self._taken, strict=True)]
        return True

    def rollback(self, count: int) -> None:
        self._count -= count
        for number, rules in enumerate(self._rules):
            if self._taken[number] > self._count:
                rules.rollback(self._taken[number] - self._count)
                self._taken[number] = self._count

    def forced(self, most: int) -> list[int]:
        answers = self._answers
        return answers[0].forced(most) if len(answers) == 1 else []

    def is_free(self) -> bool:
        """Each token is allowed by the one or the other."""
        return False

    def is_complete(self) -> bool:
        return any(each.is_complete() for each in self._answers)

    def is_stopped(self) -> bool:
        return all(each.is_stopped() for each in self._answers)
