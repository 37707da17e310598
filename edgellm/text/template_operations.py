"""Operators, methods of text, filters and tests of templates, each bounded before it runs.

What is here stands for Python's and jinja2's own: with the same results, but nothing that a template asks for takes
longer than a fraction of a second or more memory than `TemplateLimits` allow. Where a container is printed, compared,
sorted, hashed or written as JSON, it is measured first (`Budget.measure`); where text, lists or integers grow, the size
of the result is computed first.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import pass_environment
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.filters import make_attrgetter
from jinja2.sandbox import SandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.tests import TESTS as JINJA_TESTS
from markupsafe import Markup

from edgellm.text.template_budget import LimitExceeded, check, current_budget

Function = Callable[..., Any]

_LARGEST_POWER = 8192  # bits
_LONGEST_NUMBER = 4096  # characters
_LONGEST_SEARCH = 2**27  # the product of both lengths: 0.2 s
_LONGEST_FORMAT = 64 * 1024
_LONGEST_TITLE = 256 * 1024
_LONGEST_NAME = 1024
_LONGEST_SEPARATOR = 16
_WIDEST_FIELD = 2048  # characters, of a number with three digits for the width or the precision
_ESCAPED = 6  # what is put into marked text becomes so much longer at most
_SHORT = 4096  # characters: comparing them takes microseconds
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def as_text(value: Any) -> str:
    """`value` as text; what is text, marked as safe or not, stays as it is."""
    return value if isinstance(value, str) else printed(value)


def printed(value: Any) -> str:
    if type(value) is str:
        return value
    current_budget.get().measure(value)
    return current_budget.get().take(str(value))


def concatenated(pieces: Any) -> str:
    """What a block, macro or `~` has made of several pieces of text."""
    budget, size = current_budget.get(), 0
    found: list[str] = []
    for piece in pieces:
        size += len(piece)
        budget.check_size(size)
        budget.spend(8)
        found.append(piece)
    return budget.take("".join(found))


# Operators


def binary(name: str, left: Any, right: Any, compute: Function) -> Any:
    """`left name right`, which `compute` gives where nothing can become large."""
    budget = current_budget.get()
    budget.check_integer(left)
    budget.check_integer(right)
    if name == "%" and isinstance(left, str):
        return budget.take(percent(left, right))
    if name == "**" and isinstance(left, int) and isinstance(right, int):
        check(left.bit_length() * right, _LARGEST_POWER, "makes an integer of more than {} bits")
    elif name == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str) and isinstance(times, int):
                budget.check_size(len(value) * times)
            elif isinstance(value, (list, tuple)) and isinstance(times, int):
                budget.check_items(len(value) * times)
    return budget.take(compute(left, right))


_COMPARISONS: dict[str, Function] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


def compare(value: Any, names: Sequence[str], others: Sequence[Any]) -> Any:
    """`value names[0] others[0] names[1] others[1] ...`, as in `a < b < c`, by jinja2's names, of computed values."""
    result = True
    for name, other in zip(names, others, strict=True):
        if not (type(value) is str and type(other) is str and len(other) < _SHORT):
            current_budget.get().spend()
            for each in (value, other):
                if not isinstance(each, str):
                    current_budget.get().measure(each)
        result = _COMPARISONS[name](value, other)
        if not result:
            break
        value = other
    return result


def make_dictionary(pairs: Any = (), /, **values: Any) -> dict[Any, Any]:
    """A dictionary of pairs, or of a mapping, and of more values by name."""
    budget = current_budget.get()
    result: dict[Any, Any] = {}
    for key, value in pairs.items() if isinstance(pairs, Mapping) else pairs:
        if isinstance(key, tuple):
            budget.measure(key)  # or its hash takes for ever
        budget.check_items(len(result) + 1)
        budget.spend(104)
        result[key] = value
    return {**result, **values}


# Methods of text


def _split(text: str, name: str, sep: Any = None, maxsplit: int = -1) -> list[str]:
    # One part more than there may be shows that there are too many, before the list of them is made.
    most = current_budget.get().limits.items
    return getattr(text, name)(sep, maxsplit if 0 <= maxsplit <= most else most)


#: Methods that templates may call: in time that grows with the text and the arguments, which Python (3.10 and later)
#: takes to look for a text from the left, they give what is at most three times as long, or as `_GROWTHS` say.
TEXT_METHODS = """
    capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii
    isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip
    partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith
    strip swapcase title upper zfill
"""
#: Those whose time can grow with the product of the lengths of the text and of what it is searched for.
_SEARCHES = ("rfind", "rindex", "rpartition", "rsplit", "lstrip", "rstrip", "strip")
#: By how many characters others make a text longer.
_GROWTHS: dict[str, Function] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), lambda text, width, *fill: width),
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "join": lambda text, items: len(text) * len(items) + sum(len(each) for each in items if isinstance(each, str)),
    "replace": lambda text, old, new, count=-1: len(new) * min(text.count(old), count if count >= 0 else len(text) + 1),
}


def call_method(text: str, name: str, /, *args: Any, **values: Any) -> Any:
    """`text.name(*args, **values)` for one of `TEXT_METHODS` but `format` (see `format_text`)."""
    budget = current_budget.get()
    if name == "join":
        args = tuple(budget.take(iter(each)) for each in args)
    for argument in (*args, *values.values()):
        budget.measure(argument)
        if name in _SEARCHES and isinstance(argument, str):
            what = "searches from the right, or strips, texts whose lengths have a product above {}"
            check(len(argument) * len(text), _LONGEST_SEARCH, what)
    if name in _GROWTHS:
        growth = _GROWTHS[name](text, *args, **values)
        budget.check_size(len(text) + growth * (_ESCAPED if isinstance(text, Markup) else 1))
    elif name == "splitlines":
        budget.check_items(sum(map(text.count, _LINE_ENDS)))
    elif name in ("split", "rsplit"):
        return _split(text, name, *args, **values)
    return getattr(text, name)(*args, **values)


#: Python's own reading of a field, but of a key with parentheses: there the type is the first of them.
_PERCENT_FIELD = re.compile(
    r"%(?:\([^()]*\))?[#0\- +]*(?P<width>\*|[0-9]*)(?:\.(?P<precision>\*|[0-9]*))?[hlL]?(?P<type>.|$)", re.S
)
_TOO_WIDE = "formats with the field {!r}: widths have at most three digits, and keys no parentheses"


def percent(text: str, values: Any) -> str:
    """`text % values`."""
    budget = current_budget.get()
    check(len(text), _LONGEST_FORMAT, "formats with a text of more than {} characters")
    fields = list(_PERCENT_FIELD.finditer(text))
    for field in fields:
        widths = field["width"], field["precision"] or ""
        if "*" in widths or max(map(len, widths)) > 3 or field["type"] == "(":
            raise LimitExceeded(_TOO_WIDE.format(field[0][:40]))
    times = len(fields) if isinstance(values, dict) else 1  # a value may be used several times by its key
    budget.check_size(len(text) + _WIDEST_FIELD * len(fields) + times * budget.measure(values))
    return text % values


class _BoundedFields(SandboxedFormatter):
    """`str.format`, the whole and every field of which are bounded."""

    size = 0

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        found = super().get_field(field_name, args, kwargs)
        self.size += _WIDEST_FIELD + current_budget.get().measure(found[0])
        current_budget.get().check_size(self.size)
        return found

    def format_field(self, value: Any, format_spec: str) -> str:
        if re.search(r"\d{4}", format_spec):
            raise LimitExceeded(_TOO_WIDE.format(format_spec[:40]))
        return super().format_field(value, format_spec)


class _BoundedEscapingFields(_BoundedFields, SandboxedEscapeFormatter):
    """The same for marked text, which escapes what is put in."""


def format_text(environment: SandboxedEnvironment, text: str, args: Any, values: Any) -> str:
    """`text.format(*args, **values)`."""
    check(len(text), _LONGEST_FORMAT, "formats with a text of more than {} characters")
    if isinstance(text, Markup):
        return Markup(_BoundedEscapingFields(environment, escape=Markup.escape).vformat(text, args, values))
    return _BoundedFields(environment).vformat(text, args, values)


def date_of_today(form: str) -> str:
    """`strftime_now`: the time that it is, in the form of `strftime`."""
    check(len(form), _LONGEST_NAME, "formats a date with more than {} characters")
    if re.search(r"%[^%a-zA-Z]*\d{4}", form):
        raise LimitExceeded("formats a date with a width above 999")
    return datetime.now().strftime(form)


# Filters

#: jinja2's filters that take an item at a time, or do nothing that grows.
_SHALLOW = """
    abs batch count d default first items last length map reject rejectattr reverse round safe select
    selectattr slice
"""
#: jinja2's filters that walk through all of what they are given.
_DEEP = "capitalize center dictsort e escape groupby indent lower max min sort string title unique upper"
#: Those whose first argument names an attribute, a filter or a test. No text given to a deep one is long, either.
_BY_NAME = ("map", "rejectattr", "selectattr")
#: What is checked of the arguments of a filter before it runs, beside those.
_CHECKS: dict[str, Function] = {
    "batch": lambda value, linecount, fill_with=None: current_budget.get().check_items(linecount),
    "center": lambda value, width=80: current_budget.get().check_size(width),
    "indent": lambda text, width=4, first=False, blank=False: _check_indent(as_text(text), width),
    "round": lambda value, precision=0, method="common": check(
        abs(precision), _LONGEST_SEPARATOR, "rounds to more than {} digits"
    ),
    "title": lambda text: check(len(as_text(text)), _LONGEST_TITLE, "writes a title of more than {} characters"),
}


def _check_indent(text: str, width: int | str) -> None:
    lines = 1 + sum(map(text.count, _LINE_ENDS))
    current_budget.get().check_items(lines)
    current_budget.get().check_size(len(text) + lines * (len(width) if isinstance(width, str) else width))


def _guarded(name: str) -> Function:
    """A filter of jinja2 that pays for its result; what it walks through all of is measured before."""
    function, is_deep = JINJA_FILTERS[name], name in _DEEP.split()
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja2 hands some the environment or context before

    @functools.wraps(function)
    def guarded(*args: Any, **named: Any) -> Any:
        budget = current_budget.get()
        budget.spend()
        value, *others = args[first:]
        if is_deep:
            value = budget.take(value) if isinstance(value, Iterator) else value
            budget.measure(value)
        for argument in (*(others if is_deep else others[: name in _BY_NAME]), named.get("attribute")):
            if isinstance(argument, str):
                check(len(argument), _LONGEST_NAME, "names an attribute with more than {} characters")
        if name in _CHECKS:
            _CHECKS[name](value, *others, **named)
        return budget.take(function(*args[:first], value, *others, **named))

    return guarded


def _number(name: str, value: Any, default: Any, *base: int) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST_NUMBER:  # which is no number
        return default
    return current_budget.get().take(JINJA_FILTERS[name](value, default, *base))


@pass_environment
def _sum(environment: SandboxedEnvironment, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    items = map(make_attrgetter(environment, attribute), iterable)
    return functools.reduce(lambda total, item: binary("+", total, item, operator.add), items, start)


@pass_environment
def _join(environment: SandboxedEnvironment, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = map(make_attrgetter(environment, attribute), current_budget.get().take(iter(value)))
    return current_budget.get().take(call_method(printed(d), "join", map(printed, items)))


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    most = -1 if count is None else count
    return current_budget.get().take(call_method(printed(text), "replace", printed(old), printed(new), most))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: nothing escaped for HTML."""
    indentation = len(indent) if isinstance(indent, str) else indent or 0
    for size in (indentation, *map(len, separators or ())):
        check(size, _LONGEST_SEPARATOR, "indents or separates JSON by more than {} characters")
    current_budget.get().measure(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # With indentation, deep values become far larger than their parts.
    return concatenated(encoder.iterencode(value) if indent is not None else [encoder.encode(value)])


#: All filters that templates may use, by name.
FILTERS: dict[str, Function] = {name: _guarded(name) for name in f"{_SHALLOW} {_DEEP}".split()} | {
    "format": lambda text, *args, **values: current_budget.get().take(percent(as_text(text), values or args)),
    "float": lambda value, default=0.0: _number("float", value, default),
    "int": lambda value, default=0, base=10: _number("int", value, default, base),
    "join": _join,
    "list": lambda value: current_budget.get().take(iter(value)),
    "replace": _replace,
    "sum": _sum,
    "tojson": _tojson,
    "trim": lambda text, chars=None: current_budget.get().take(call_method(as_text(text), "strip", chars)),
    "wordcount": lambda text: sum(1 for _ in re.finditer(r"\w+", as_text(text))),
}


# Tests


def _remainder(value: Any, number: Any) -> Any:
    return binary("%", value, number, operator.mod)


def _comparison(name: str) -> Function:
    return lambda value, other: compare(value, (name,), (other,))


_COMPARED = {function: name for name, function in _COMPARISONS.items()}
#: All tests that templates may use, by name.
TESTS: dict[str, Function] = {
    **JINJA_TESTS,  # type: ignore[dict-item]
    **{name: _comparison(_COMPARED[test]) for name, test in JINJA_TESTS.items() if test in _COMPARED},
    "in": _comparison("in"),
    "divisibleby": lambda value, num: _remainder(value, num) == 0,
    "odd": lambda value: _remainder(value, 2) == 1,
    "even": lambda value: _remainder(value, 2) == 0,
    "lower": lambda value: as_text(value).islower(),
    "upper": lambda value: as_text(value).isupper(),
}
