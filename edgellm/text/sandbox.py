"""A jinja2 environment in which a hostile template can neither reach anything nor use more than it is given.

jinja2's immutable sandbox keeps private attributes and mutating methods away, but lets a template run for ever or
make a string of any size. Here every loop iteration, call, filter and operator spends from a budget of work and looks
at the clock, and every value that a template makes has a bounded size, counted as if printed. So each single step is
short, and the clock is looked at between steps. What could make a large value or a long computation in one step is
checked beforehand (`replace`, `join`, `%`, `*`, `**`, ...) or not offered: the filters and methods are those on the
lists below.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, SecurityError
from jinja2.utils import Namespace

_STRING_METHODS = """
    capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind
    rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
"""
STRING_METHODS = frozenset(_STRING_METHODS.split())
OTHER_METHODS = {dict: frozenset(("get", "items", "keys", "values")), list: frozenset(("count", "index"))}
_FILTERS = """
    abs capitalize count d default dictsort e escape first float groupby int items last length list lower map max min
    reject rejectattr reverse safe select selectattr sort string title unique upper wordcount
"""
FILTERS = tuple(_FILTERS.split())
LONGEST_STRIP_SET = 256  # stripping takes the product of both lengths
LARGEST_EXPONENT = 1024
LONGEST_SEPARATOR = 16
WIDE_FIELD = re.compile(r"\d{4,}|\*")


def _check_replace(text: Any, old: Any, new: Any, *_: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        occurrences = text.count(old)
        current_budget.get().check_size(len(text) + occurrences * len(new))


def _check_join(separator: Any, items: Any) -> None:
    if isinstance(separator, str) and hasattr(items, "__len__"):
        current_budget.get().check_size(len(separator) * len(items))


def _check_strip(characters: Any = None) -> None:
    if isinstance(characters, str) and len(characters) > LONGEST_STRIP_SET:
        raise LimitExceeded(f"strips a set of more than {LONGEST_STRIP_SET} characters")


def _check_field(specification: str) -> None:
    if WIDE_FIELD.search(specification):
        raise LimitExceeded(f"formats with the field {specification[:40]!r}: widths have at most three digits")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    budget = current_budget.get()
    sized = (str, list, tuple)
    if operator == "*":
        if isinstance(left, int) and isinstance(right, sized):
            left, right = right, left
        if isinstance(left, sized) and isinstance(right, int):
            budget.check_size(len(left) * max(right, 0))
        elif isinstance(left, int) and isinstance(right, int):
            budget.check_size((left.bit_length() + right.bit_length()) // 3)
    elif operator == "**":
        if max(abs(left), abs(right)) > LARGEST_EXPONENT:
            raise LimitExceeded(f"raises to a power with numbers above {LARGEST_EXPONENT}")
    elif operator == "%" and isinstance(left, str):
        for field in re.findall(r"%[^%a-zA-Z]*", left):
            _check_field(field)


class _BoundedFormatter(SandboxedFormatter):
    """`str.format` whose fields cannot be made wide."""

    def format_field(self, value: Any, format_spec: str) -> str:
        _check_field(format_spec)
        return super().format_field(value, format_spec)


class _Namespace(Namespace):
    """jinja2's namespace, which prints as nothing of what it holds: it is the one value that can be changed later."""

    def __repr__(self) -> str:
        return "namespace"


class GenerationExtension(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own protocol)

    def parse(self, parser: Any) -> list[nodes.Node]:
        """Replace the block by its content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, as `transformers` sets it up, with limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationExtension])
        self.optimized = False  # nothing is computed at compile time that could be left for the rendering
        self.concat = _concat  # type: ignore[method-assign]
        self.filters = {name: _guarded(self.filters[name]) for name in FILTERS}
        self.filters |= {"tojson": _guarded(_tojson), "indent": _guarded(_indent), "format": _guarded(_format)}
        self.filters |= {"_concat": _concat_values, "_value": lambda value: current_budget.get().take(value)}
        self.filters["join"], self.filters["replace"] = _guarded(_join(self)), _guarded(_replace)
        self.filters["trim"] = _guarded(_trim)
        kept = {name: self.globals[name] for name in ("range", "dict", "joiner", "cycler")}
        self.globals.clear()
        self.globals.update(kept, namespace=_Namespace, raise_exception=_raise_exception, strftime_now=_strftime_now)

    def charge(self) -> bool:
        """Pay for one step; called by every loop iteration."""
        current_budget.get().spend(1)
        return True

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _with_charges(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Only the methods on the lists above, of text, containers and numbers."""
        if isinstance(obj, str):
            return attr in STRING_METHODS
        for kind, methods in OTHER_METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        if isinstance(obj, (int, float, bytes, tuple, range)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Fail at once rather than when the value is used."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute or item; `format` of text is a bounded one."""
        return self._bounded_format(obj, attribute) or super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item or attribute; `format` of text is a bounded one."""
        return self._bounded_format(obj, argument) or super().getitem(obj, argument)

    def _bounded_format(self, obj: Any, attribute: Any) -> Callable[..., str] | None:
        if not isinstance(obj, str) or attribute != "format":
            return None
        return lambda *args, **kwargs: _BoundedFormatter(self).vformat(obj, args, kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result is checked, before it is made where it could be large."""
        _check_operands(operator, left, right)
        return current_budget.get().take(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call whose result is checked, before it is made where it could be large."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if function == self.charge:
            return self.charge()
        if isinstance(owner, str):
            if name == "replace":
                _check_replace(owner, *args)
            elif name == "join":
                args = tuple(current_budget.get().take(argument) for argument in args)
                _check_join(owner, *args)
            elif name in ("strip", "lstrip", "rstrip"):
                _check_strip(*args)
        current_budget.get().spend(1)
        return current_budget.get().take(super().call(context, function, *args, **kwargs))


def _with_charges(tree: nodes.Template) -> nodes.Template:
    """Let loops pay for each iteration, `~` and container literals for what they make."""
    for loop in list(tree.find_all(nodes.For)):
        charge = nodes.Call(nodes.EnvironmentAttribute("charge"), [], [], None, None, lineno=loop.lineno)
        loop.body.insert(0, nodes.ExprStmt(charge, lineno=loop.lineno))
        if loop.test is not None:
            loop.test = nodes.And(charge, loop.test, lineno=loop.lineno)
    return _ValueTransformer().visit(tree)


class _ValueTransformer(jinja2.visitor.NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_concat", [], [], None, None, lineno=node.lineno)

    def _visit_literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # the target of an assignment
            return node
        return nodes.Filter(node, "_value", [], [], None, None, lineno=node.lineno)

    visit_List = visit_Tuple = visit_Dict = _visit_literal


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for its result."""

    @functools.wraps(function)
    def filter_function(*args: Any, **kwargs: Any) -> Any:
        current_budget.get().spend(1)
        return current_budget.get().take(function(*args, **kwargs))

    return filter_function


def _concat(pieces: Any) -> str:
    """Joins what a block, macro or the template itself has written."""
    budget, found, size = current_budget.get(), [], 0
    for piece in pieces:
        size += len(piece)
        budget.check_size(size)
        found.append(piece)
    budget.spend(size)
    return "".join(found)


def _concat_values(values: list[Any]) -> str:
    return _concat(str(value) for value in values)


def _join(environment: TemplateEnvironment) -> Callable[..., Any]:
    def join(value: Any, d: str = "", attribute: str | None = None) -> str:
        items = current_budget.get().take(list(value))
        if attribute is not None:
            items = [environment.getitem(item, attribute) for item in items]
        _check_join(d, items)
        return _concat(
            piece for index, item in enumerate(items) for piece in ((d, str(item)) if index else (str(item),))
        )

    return join


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    _check_replace(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _trim(text: Any, chars: str | None = None) -> str:
    _check_strip(chars)
    return str(text).strip(chars)


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    text = str(text)
    _check_operands("%", text, None)
    return text % (kwargs or args)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    indention = width if isinstance(width, str) else " " * min(int(width), 100)
    text = str(text)
    lines = text.splitlines()
    current_budget.get().check_size(len(text) + len(lines) * len(indention))
    return "\n".join(
        indention + line if (line or blank) and (first or index) else line for index, line in enumerate(lines)
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: nothing escaped for HTML."""
    if any(len(separator) > LONGEST_SEPARATOR for separator in separators or ()):
        raise LimitExceeded(f"separates JSON by more than {LONGEST_SEPARATOR} characters")
    indent = indent if indent is None else min(int(indent), LONGEST_SEPARATOR)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # With indentation, deep values become far larger than their parts.
    return encoder.encode(value) if indent is None else _concat(encoder.iterencode(value))


def _raise_exception(message: Any) -> None:
    raise TemplateRaised(str(message))


def _strftime_now(form: str) -> str:
    for field in re.findall(r"%[^%a-zA-Z]*", form):
        _check_field(field)
    return datetime.now().strftime(form)


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may use. Sizes are in characters; `total_size` is the sum of all values that are made."""

    source_size: int = 256 * 1024
    output_size: int = 4 * 1024 * 1024
    value_size: int = 4 * 1024 * 1024
    total_size: int = 256 * 1024 * 1024
    seconds: float = 5.0


class LimitExceeded(Exception):
    """A template used more than its limits allow; the message completes "the template ..."."""


class TemplateRaised(Exception):
    """A template called `raise_exception`."""


class Budget:
    """What is left of the limits during one rendering."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self._left = limits.total_size
        self._deadline = time.monotonic() + limits.seconds

    def spend(self, amount: int) -> None:
        """Take `amount` characters or steps; raises `LimitExceeded` when nothing is left or time is up."""
        self._left -= amount
        if self._left < 0:
            raise LimitExceeded(f"makes more than {self.limits.total_size} characters of values")
        if time.monotonic() > self._deadline:
            raise LimitExceeded(f"runs longer than {self.limits.seconds:g} seconds")

    def check_size(self, size: int) -> None:
        """Raise `LimitExceeded` where one value of `size` characters is too large."""
        if size > self.limits.value_size:
            raise LimitExceeded(f"makes a value of more than {self.limits.value_size} characters")

    def take(self, value: Any) -> Any:
        """Pay for a value that was made, and return it; what comes item by item becomes a list."""
        if isinstance(value, Iterator):
            items, size = [], 0
            for item in value:
                size += self._size(item, self.limits.value_size - size)
                items.append(item)
                self.spend(1)
            return items
        self.spend(self._size(value, self.limits.value_size) + 1)
        return value

    def _size(self, value: Any, allowed: int) -> int:
        """The size of `value` as if printed, shared parts counted as often as they occur."""
        size, waiting, seen = 0, [value], 0
        while waiting:
            item = waiting.pop()
            seen += 1
            if seen % 4096 == 0:
                self.spend(4096)
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, int):
                size += item.bit_length() // 3
            elif isinstance(item, Mapping):
                waiting.extend(item)
                waiting.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
                waiting.extend(item)
            size += 1
            if size > allowed + 1:
                self.check_size(self.limits.value_size + 1)
        return size


current_budget: ContextVar[Budget] = ContextVar("template_budget")


def run_with_budget(limits: TemplateLimits, function: Callable[[], Any]) -> Any:
    """Call `function` while everything that templates do is paid from one new budget."""
    token = current_budget.set(Budget(limits))
    try:
        return function()
    finally:
        current_budget.reset(token)
