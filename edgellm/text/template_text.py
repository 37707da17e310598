"""What templates may do with text: methods and formatting, each bounded before it runs.

A method is offered where its time and its result are bounded by the size of its arguments, or where that can be
checked beforehand. Python (3.10 and later) looks for a text from the left in time that grows with the sum of both
sizes, but from the right in time that can grow with their product.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2.sandbox import SandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from edgellm.text.template_budget import current_budget, refuse

#: Methods whose time grows with the text alone, and whose result is at most three times as long.
_PLAIN = """
    capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isprintable isspace istitle isupper lower partition removeprefix removesuffix startswith swapcase title
    upper
"""
_SEARCHES = ("rfind", "rindex", "rpartition")
_STRIPS = ("lstrip", "rstrip", "strip")
_LONGEST_SEARCH = 2**27  # the product of both lengths: 0.2 s
_LONGEST_STRIP_SET = 256
_LONGEST_FORMAT = 64 * 1024
_LONGEST_DATE = 1024
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_PERCENT_FIELD = re.compile(
    r"%(?P<key>\([^()]*\))?(?P<shape>[#0\- +]*(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?)[hlL]?(?P<type>.|$)", re.S
)
_FORMAT_FIELD = re.compile(r"(?:.?[<>=^])?[+\- ]?z?#?0?\d{0,3}[,_]?(?:\.\d{0,3})?[a-zA-Z%]?", re.S)
_DATE_FIELD = re.compile(r"%[^%a-zA-Z]*")

Method = Callable[..., Any]


def as_text(value: Any) -> str:
    """`value` as text; what is text, marked as safe or not, stays as it is."""
    return value if isinstance(value, str) else printed(value)


def printed(value: Any) -> str:
    """`value` as a template prints it."""
    if type(value) is str:
        return value
    current_budget.get().measure(value)
    return current_budget.get().take(str(value))


def _check_search(text: str, wanted: Any) -> None:
    """Raise `LimitExceeded` where looking for `wanted` from the right of `text` can take long."""
    if isinstance(wanted, str) and len(wanted) * len(text) > _LONGEST_SEARCH:
        refuse(f"looks for a text of {len(wanted)} characters from the right of one of {len(text)}")


def _plain(name: str) -> Method:
    def method(text: str, *args: Any) -> Any:
        for argument in args:
            current_budget.get().measure(argument)
        return getattr(text, name)(*args)

    return method


def _search(name: str) -> Method:
    def method(text: str, wanted: Any, *places: Any) -> Any:
        _check_search(text, wanted)
        return getattr(text, name)(wanted, *places)

    return method


def strip_text(text: str, characters: Any = None, name: str = "strip") -> str:
    """`text.strip(characters)`, or another of the three."""
    if isinstance(characters, str) and len(characters) > _LONGEST_STRIP_SET:
        refuse(f"strips a set of more than {_LONGEST_STRIP_SET} characters")
    return getattr(text, name)(characters)


def _strip(name: str) -> Method:
    return lambda text, characters=None: strip_text(text, characters, name)


def _split(name: str) -> Method:
    def method(text: str, sep: Any = None, maxsplit: int = -1) -> list[str]:
        budget = current_budget.get()
        if name == "rsplit":
            _check_search(text, sep)
        # One split more than there may be shows that there are too many, before the list of them is made.
        most = maxsplit if 0 <= maxsplit <= budget.limits.items else budget.limits.items
        parts = getattr(text, name)(sep, most)
        if most != maxsplit:
            budget.check_items(len(parts))
        return parts

    return method


def _splitlines(text: str, keepends: bool = False) -> list[str]:
    return split_lines(text, keepends)


def split_lines(text: str, keepends: bool = False) -> list[str]:
    """`text.splitlines(keepends)`."""
    current_budget.get().check_items(sum(text.count(end) for end in _LINE_ENDS))
    return text.splitlines(keepends)


def replace_text(text: str, old: str, new: str, count: int = -1) -> str:
    """`text.replace(old, new, count)`."""
    found = text.count(old) if count < 0 else min(text.count(old), count)
    growth = 6 if isinstance(text, Markup) else 1  # such text escapes what is put in
    current_budget.get().check_size(len(text) + found * len(new) * growth)
    return text.replace(old, new, count)


def join_texts(separator: str, items: Any) -> str:
    """`separator.join(items)`."""
    budget = current_budget.get()
    texts = items if hasattr(items, "__len__") else budget.take(iter(items))
    budget.check_items(len(texts))
    size = len(separator) * max(len(texts) - 1, 0) + sum(len(item) for item in texts if isinstance(item, str))
    budget.check_size(size * 6 if isinstance(separator, Markup) else size)  # such text escapes what is put in
    return separator.join(texts)


def _width_checked(name: str) -> Method:
    def method(text: str, width: int = 8, *fill: str) -> str:
        tabs = text.count("\t") if name == "expandtabs" else 1
        current_budget.get().check_size(len(text) + tabs * max(int(width), 0))
        return getattr(text, name)(width, *fill)

    return method


def percent(text: str, values: Any) -> str:
    """`text % values`, field by field."""
    budget, marked = current_budget.get(), isinstance(text, Markup)
    if len(text) > _LONGEST_FORMAT:
        refuse(f"formats with a text of more than {_LONGEST_FORMAT} characters")
    waiting = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    size = place = 0
    for field in _PERCENT_FIELD.finditer(text):
        pieces.append(text[place : field.start()])
        place = field.end()
        if field[0] == "%%":
            pieces.append("%")
        else:
            value = _percent_value(field, values, waiting)
            pieces.append((Markup if marked else str)("%" + field["shape"] + field["type"]) % (value,))
        size += len(pieces[-1]) + len(pieces[-2])
        budget.check_size(size)
        budget.spend(128 + 4 * len(pieces[-1]))
    # As Python has it: whatever has items by key may have more of them than are used.
    if not hasattr(values, "__getitem__") or isinstance(values, (tuple, str)):
        for _ in waiting:
            raise TypeError("not all arguments converted during string formatting")
    pieces.append(text[place:])
    return (Markup if marked else str)("".join(pieces))


def _percent_value(field: re.Match[str], values: Any, waiting: Any) -> Any:
    if "*" in (field["width"], field["precision"]) or max(len(field["width"]), len(field["precision"] or "")) > 3:
        refuse(f"formats with the field {field[0][:40]!r}: widths have at most three digits")
    if not field["type"] or (field["key"] and not isinstance(values, dict)):
        raise TypeError("format requires a mapping" if field["key"] else "incomplete format")
    if field["key"]:
        value = values[field["key"][1:-1]]
    else:
        missing = object()
        value = next(waiting, missing)
        if value is missing:
            raise TypeError("not enough arguments for format string")
    current_budget.get().measure(value)
    return value


class _BoundedFields(SandboxedFormatter):
    """`str.format`, the whole and every field of which are bounded."""

    size = 0

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        current_budget.get().spend()
        if len(field_name) > 1024:
            refuse("formats with a field of more than 1024 characters")
        return super().get_field(field_name, args, kwargs)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        current_budget.get().measure(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        budget = current_budget.get()
        if not _FORMAT_FIELD.fullmatch(format_spec):
            refuse(f"formats with the field {format_spec[:40]!r}: widths have at most three digits")
        budget.measure(value)
        text = super().format_field(value, format_spec)
        self.size += len(text)
        budget.check_size(self.size)
        budget.spend(128 + 4 * len(text))
        return text


class _BoundedEscapingFields(_BoundedFields, SandboxedEscapeFormatter):
    """The same for marked text, which escapes what is put in."""


def format_text(environment: SandboxedEnvironment, text: str, args: Any, values: Any) -> str:
    """`text.format(*args, **values)`."""
    if len(text) > _LONGEST_FORMAT:
        refuse(f"formats with a text of more than {_LONGEST_FORMAT} characters")
    if isinstance(text, Markup):
        return Markup(_BoundedEscapingFields(environment, escape=Markup.escape).vformat(text, args, values))
    return _BoundedFields(environment).vformat(text, args, values)


def date_of_today(form: str) -> str:
    """`strftime_now`: the time that it is, in the form of `strftime`."""
    if len(form) > _LONGEST_DATE or any(re.search(r"\d{4}", field) for field in _DATE_FIELD.findall(form)):
        refuse(f"formats a date with more than {_LONGEST_DATE} characters, or a width above 999")
    return datetime.now().strftime(form)


#: Every method of text that templates may call: it takes the text and the arguments. `format` is beside them.
TEXT_METHODS: dict[str, Method] = {
    **{name: _plain(name) for name in _PLAIN.split()},
    **{name: _search(name) for name in _SEARCHES},
    **{name: _strip(name) for name in _STRIPS},
    **{name: _split(name) for name in ("split", "rsplit")},
    **{name: _width_checked(name) for name in ("center", "expandtabs", "ljust", "rjust", "zfill")},
    "join": join_texts,
    "replace": replace_text,
    "splitlines": _splitlines,
}
