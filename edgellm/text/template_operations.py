"""Operators, filters and tests of templates, each bounded before it runs.

What is here stands for jinja2's own: with the same results, but nothing that a template asks for takes longer than a
fraction of a second or more memory than `TemplateLimits` allow. Where a container is printed, compared, sorted, hashed
or written as JSON, it is measured first (`Budget.measure`); where text, lists or integers grow, the size of the result
is computed first.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import tests as jinja_tests
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.sandbox import SandboxedEnvironment
from markupsafe import Markup

from edgellm.text.template_budget import current_budget, refuse
from edgellm.text.template_text import as_text, join_texts, percent, printed, replace_text, split_lines, strip_text

Function = Callable[..., Any]

_LARGEST_POWER = 8192  # bits
_LONGEST_NUMBER = 4096  # characters: what is longer is no number for filters
_LONGEST_TITLE = 256 * 1024
_LONGEST_ATTRIBUTE = 1024
_LONGEST_SEPARATOR = 16
_SHORTENED = (str, list, tuple)
_SHORT = 4096  # characters: comparing them takes microseconds
_OPERATORS: dict[str, Function] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
#: jinja2's filters of text: they grow with it alone.
_TEXT_FILTERS = ("capitalize", "lower", "title", "upper")
#: jinja2's filters that walk through all of what they are given.
_DEEP_FILTERS = ("dictsort", "groupby", "max", "min", "sort", "unique")
#: jinja2's filters that take an item at a time, or do nothing that grows.
_SHALLOW_FILTERS = """
    abs count d default first items last length map reject rejectattr reverse safe select selectattr slice
"""
#: Filters whose first argument names attributes.
_OF_ATTRIBUTES = ("rejectattr", "selectattr", "groupby", "sort", "unique", "min", "max")


# Operators


def binary(name: str, left: Any, right: Any, compute: Function) -> Any:
    """`left name right`; `compute` gives it where nothing can become large."""
    budget = current_budget.get()
    budget.check_integer(left)
    budget.check_integer(right)
    if name == "%" and isinstance(left, str):
        return budget.take(percent(left, right))
    if name == "*":
        _check_product(left, right)
    elif name == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * max(right, 1) > _LARGEST_POWER:
            refuse(f"makes an integer of more than {_LARGEST_POWER} bits")
    elif name == "+":
        if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            budget.check_items(len(left) + len(right))
        elif isinstance(left, str) and isinstance(right, str):
            marked = isinstance(left, Markup) or isinstance(right, Markup)
            budget.check_size((len(left) + len(right)) * (6 if marked else 1))
    return budget.take(compute())


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, _SHORTENED):
        left, right = right, left
    if isinstance(left, str) and isinstance(right, int):
        current_budget.get().check_size(len(left) * max(right, 0))
    elif isinstance(left, (list, tuple)) and isinstance(right, int):
        current_budget.get().check_items(len(left) * max(right, 0))


def unary(value: Any, compute: Function) -> Any:
    """`+value` or `-value`."""
    current_budget.get().check_integer(value)
    return compute()


def _comparison(name: str) -> Function:
    operation = _OPERATORS[name]

    def compare(left: Any, right: Any) -> Any:
        if type(left) is str and type(right) is str and len(right) < _SHORT:
            return operation(left, right)
        budget = current_budget.get()
        budget.spend()
        for value in (left, right):
            if isinstance(value, (tuple, list, Mapping)):
                budget.measure(value)
            else:
                budget.check_integer(value)
        return operation(left, right)

    return compare


#: Comparisons by jinja2's names for them.
COMPARISONS = {name: _comparison(name) for name in _OPERATORS}


def compare_chain(value: Any, names: list[str], others: list[Any]) -> Any:
    """`value names[0] others[0] names[1] others[1] ...`, as in `a < b < c`; all are computed before."""
    result = True
    for name, other in zip(names, others, strict=True):
        result = COMPARISONS[name](value, other)
        if not result:
            break
        value = other
    return result


def take_slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """`value[start:stop:step]`."""
    return current_budget.get().take(value[start:stop:step])


def make_dictionary(pairs: Any = (), values: Mapping[str, Any] | None = None) -> dict[Any, Any]:
    """A dictionary of pairs, or of a mapping, and of more values by name."""
    budget = current_budget.get()
    result: dict[Any, Any] = {}
    for pair in pairs.items() if isinstance(pairs, Mapping) else pairs:
        key, value = pair
        if isinstance(key, tuple):
            budget.measure(key)  # or its hash takes for ever
        budget.check_items(len(result) + 1)
        budget.spend(104)
        result[key] = value
    return {**result, **(values or {})}


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


# Filters


def _guarded(function: Function, deep: bool = False, attributes: bool = False) -> Function:
    """A filter of jinja2 that pays for its result; what it walks through all of is measured before."""

    @functools.wraps(function)
    def filter_function(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget.get()
        budget.spend()
        # jinja2 hands some filters the environment or context first.
        place = 1 if hasattr(function, "jinja_pass_arg") else 0
        if deep and len(args) > place:
            args = (*args[:place], _items_of(args[place]), *args[place + 1 :])
            budget.measure(args[place])
        for argument in (*args[place + 1 : place + 2 if attributes else place + 1], kwargs.get("attribute")):
            if isinstance(argument, str) and len(argument) > _LONGEST_ATTRIBUTE:
                refuse(f"names an attribute with more than {_LONGEST_ATTRIBUTE} characters")
        return budget.take(function(*args, **kwargs))

    return filter_function


def _items_of(value: Any) -> Any:
    return value if hasattr(value, "__len__") else current_budget.get().take(iter(value))


def _of_text(function: Function) -> Function:
    def filter_function(value: Any) -> str:
        text = as_text(value)
        if function is JINJA_FILTERS["title"] and len(text) > _LONGEST_TITLE:
            refuse(f"writes a title of more than {_LONGEST_TITLE} characters")
        return current_budget.get().take(function(text))

    return filter_function


def _escape(value: Any) -> Any:
    if hasattr(value, "__html__"):
        return value
    return current_budget.get().take(JINJA_FILTERS["escape"](as_text(value)))


def _batch(value: Any, linecount: int, fill_with: Any = None) -> list[Any]:
    current_budget.get().check_items(linecount)
    return current_budget.get().take(iter(JINJA_FILTERS["batch"](value, linecount, fill_with)))


def _list(value: Any) -> list[Any]:
    if hasattr(value, "__len__"):
        current_budget.get().check_items(len(value))
    return current_budget.get().take(list(value))


def _sum(environment: SandboxedEnvironment) -> Function:
    def filter_function(iterable: Any, attribute: str | None = None, start: Any = 0) -> Any:
        total = start
        for item in iterable:
            found = item if attribute is None else environment.getitem(item, attribute)
            total = binary("+", total, found, functools.partial(operator.add, total, found))
        return total

    return filter_function


def _number(function: Function) -> Function:
    def filter_function(value: Any, default: Any = None, base: Any = 10) -> Any:
        default = (0 if function is JINJA_FILTERS["int"] else 0.0) if default is None else default
        if isinstance(value, str) and len(value) > _LONGEST_NUMBER:
            return default
        extra = (base,) if function is JINJA_FILTERS["int"] else ()
        return current_budget.get().take(function(value, default, *extra))

    return filter_function


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    current_budget.get().check_integer(value)
    if abs(precision) > _LONGEST_SEPARATOR:
        refuse(f"rounds to more than {_LONGEST_SEPARATOR} digits")
    return JINJA_FILTERS["round"](value, precision, method)


def _join(environment: SandboxedEnvironment) -> Function:
    def filter_function(value: Any, d: str = "", attribute: str | int | None = None) -> str:
        items = list(_items_of(value))
        if attribute is not None:
            items = [environment.getitem(item, attribute) for item in items]
        return current_budget.get().take(join_texts(printed(d), [printed(item) for item in items]))

    return filter_function


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    return current_budget.get().take(
        replace_text(printed(text), printed(old), printed(new), -1 if count is None else count)
    )


def _trim(text: Any, chars: str | None = None) -> str:
    return current_budget.get().take(strip_text(as_text(text), chars))


def _center(value: Any, width: int = 80) -> str:
    text = as_text(value)
    current_budget.get().check_size(len(text) + max(width, 0))
    return current_budget.get().take(text.center(width))


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    return current_budget.get().take(percent(as_text(text), kwargs or args))


def _word_count(text: Any) -> int:
    count, budget = 0, current_budget.get()
    for count, _ in enumerate(re.finditer(r"\w+", as_text(text)), 1):
        if count % 4096 == 0:
            budget.spend()
    return count


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    budget = current_budget.get()
    if not isinstance(width, str):
        budget.check_size(max(int(width), 0))
    indention = width if isinstance(width, str) else " " * int(width)
    text = as_text(text)
    marked = isinstance(text, Markup)
    lines = split_lines(str(text) + "\n")
    budget.check_size(len(text) + len(lines) * len(indention))
    indented = "\n".join(
        indention + line if (first if not index else line or blank) else line for index, line in enumerate(lines)
    )
    return budget.take(Markup(indented) if marked else indented)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: nothing escaped for HTML."""
    if any(len(separator) > _LONGEST_SEPARATOR for separator in separators or ()):
        refuse(f"separates JSON by more than {_LONGEST_SEPARATOR} characters")
    if (len(indent) if isinstance(indent, str) else indent or 0) > _LONGEST_SEPARATOR:
        refuse(f"indents JSON by more than {_LONGEST_SEPARATOR} characters")
    current_budget.get().measure(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # With indentation, deep values become far larger than their parts.
    return concatenated(encoder.iterencode(value) if indent is not None else [encoder.encode(value)])


def filters(environment: SandboxedEnvironment) -> dict[str, Function]:
    """All filters that templates may use, by name."""
    found: dict[str, Function] = {name: _guarded(JINJA_FILTERS[name]) for name in _SHALLOW_FILTERS.split()}
    found |= {name: _guarded(JINJA_FILTERS[name], True, name in _OF_ATTRIBUTES) for name in _DEEP_FILTERS}
    found |= {name: _guarded(JINJA_FILTERS[name], attributes=True) for name in ("rejectattr", "selectattr")}
    found |= {name: _of_text(JINJA_FILTERS[name]) for name in _TEXT_FILTERS}
    found |= {name: _number(JINJA_FILTERS[name]) for name in ("float", "int")}
    found |= {"batch": _batch, "center": _center, "e": _escape, "escape": _escape, "format": _format, "indent": _indent}
    found |= {"join": _join(environment), "list": _list, "replace": _replace, "round": _round, "string": as_text}
    found |= {"sum": _sum(environment), "tojson": _tojson, "trim": _trim, "wordcount": _word_count}
    return found


# Tests


def _remainder(value: Any, number: Any) -> Any:
    return binary("%", value, number, lambda: value % number)


def tests() -> dict[str, Function]:
    """All tests that templates may use, by name."""
    found: dict[str, Function] = dict(jinja_tests.TESTS)  # type: ignore[arg-type]
    names = {"eq": ("==", "eq", "equalto"), "ne": ("!=", "ne"), "lt": ("<", "lt", "lessthan"), "lteq": ("<=", "le")}
    names |= {"gt": (">", "gt", "greaterthan"), "gteq": (">=", "ge"), "in": ("in",)}
    found |= {name: COMPARISONS[comparison] for comparison, group in names.items() for name in group}
    found["divisibleby"] = lambda value, num: _remainder(value, num) == 0
    found["odd"] = lambda value: _remainder(value, 2) == 1
    found["even"] = lambda value: _remainder(value, 2) == 0
    found["lower"] = lambda value: as_text(value).islower()
    found["upper"] = lambda value: as_text(value).isupper()
    return found
