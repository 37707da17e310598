"""The table of options: an attribute of a class each, written once for the command line, help and settings files.

    backend: str | None = option("What computes.", choices=BACKENDS)

says that `--backend` takes one of `BACKENDS`, and so does the key `backend` of a settings file where there is such a
key. A command takes a class of `Options` that inherits the groups which it shares with others.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from edgellm.commands.console import explaining
from edgellm.engines.formats.small_files import decoded
from edgellm.errors import RequestError, did_you_mean, shown
from edgellm.kernels.user_paths import user_path

#: Numbers as the command line takes them; Python's own reading takes 1_0, nan and digits of other scripts, too.
_NUMBERS = {int: r"[-+]?[0-9]{1,30}", float: r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"}


@dataclass(frozen=True)
class Option:
    """An option or, without `flags`, an argument; None stands for what was not given.

    Numbers are at least `least` and at most `most`; text is one of `choices` where there are any, and neither empty nor
    with a null character unless it `is_free`; `check` raises RequestError for what else is wrong with a value of that
    name. `expected` says in errors what is right; what `may_be_path` has any bytes. `details` are for typer.
    """

    help: str
    flags: Sequence[str] | None
    default: Any
    details: dict[str, Any]
    name: str = ""
    type: type = str
    annotation: Any = None
    least: float | None = None
    most: float | None = None
    choices: Sequence[str] = ()
    check: Callable[[str, Any], object] | None = None
    is_free: bool = False
    expected: str = ""
    may_be_path: bool = False

    def in_words(self, value: Any) -> str:
        """What is expected, where this value was found."""
        kind = {bool: "true or false", Path: "a path", int: "a whole number", float: "a number"}.get(self.type, "text")
        least = f" from {self.least:.10g}" if self.least is not None else ""
        most = f" to {self.most:.10g}" if self.most is not None else " on" if least else ""
        words = self.expected or (f"one of {', '.join(self.choices)}" if self.choices else kind + least + most)
        return f"{words}, without a null character" if isinstance(value, str) and "\0" in value else words

    def allows(self, value: Any) -> bool:
        """Whether this may be the value, also where a settings file has it."""
        if self.type is bool:
            return isinstance(value, bool)
        if self.type in (int, float):
            is_number = type(value) in (int, self.type) and math.isfinite(value)
            return is_number and (self.least is None or self.least <= value) and (self.most or math.inf) >= value
        if not isinstance(value, str) or (self.choices and value not in self.choices):
            return False
        return self.is_free or ("\0" not in value and value.strip() != "")

    def read(self, given: Any) -> Any:
        """The value that is written so on the command line; typer.BadParameter for none. Defaults stay as they are."""
        if not isinstance(given, str):
            return given
        pattern = _NUMBERS.get(self.type)
        value = self.type(given) if pattern and re.fullmatch(pattern, given) else given
        try:
            if self.check is not None:
                self.check(self.name, value)
        except RequestError as error:
            raise typer.BadParameter(str(error)) from error
        if not self.allows(value):
            hint = did_you_mean(given, tuple(self.choices)) if self.choices else f": expected {self.in_words(given)}"
            raise typer.BadParameter(f"{shown(given)}{hint}")
        return user_path(value) if self.type is Path else value

    def require_text(self, value: Any) -> None:
        """Raise RequestError for a text with bytes that are none: Python hands them on from the command line."""
        for text in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(text, str) and not self.may_be_path:
                name = self.flags[0] if self.flags else f"the {self.name}"
                decoded(text.encode("utf-8", "surrogateescape"), name, RequestError)

    @property
    def parameter(self) -> inspect.Parameter:
        """A parameter of a function, as typer makes an option of."""
        details = {"help": self.help, **self.details}
        if self.type is not bool:
            details = {"parser": self.read, "min": self.least, "max": self.most, **details}
        if self.choices:
            details.setdefault("autocompletion", lambda: list(self.choices))
        if self.choices or (self.type is Path and self.flags):
            details.setdefault("metavar", "|".join(self.choices) or "<path>")
        found = typer.Option(*self.flags, **details) if self.flags else typer.Argument(**details)
        default = inspect.Parameter.empty if self.default is ... else self.default
        annotation: Any = Annotated[self.annotation, found]  # type: ignore[name-defined]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option(help: str, *flags: str, default: Any = None, **details: Any) -> Any:
    """An option, by default --NAME or, of bool | None, --NAME/--no-NAME; one of bool is false unless it is given.
    `details` are fields of `Option`, or what typer takes. `options_of` gives it its name, its type and its panel."""
    own = {key: details.pop(key) for key in Option.__dataclass_fields__.keys() & details.keys()}
    return Option(help, flags, default, details, **own)


def argument(help: str, default: Any = None, **details: Any) -> Any:
    """An argument; by `default` ... it is required."""
    return replace(option(help, default=default, **details), flags=None)


class Options:
    """The values of options that stand together, those of the bases too; its own stand in the `panel` of the help."""

    panel: str | None = None

    def __init_subclass__(cls, panel: str | None = None) -> None:
        cls.panel = panel

    def __init__(self, **given: Any) -> None:
        """Values by name; what is not given has its default."""
        cls: type = type(self)
        for name, described in options_of(cls).items():
            setattr(self, name, given.get(name, described.default))

    def given(self, group: type) -> dict[str, Any]:
        """What was given of the options of a group, which is one of the bases, by name."""
        values = {name: getattr(self, name) for name in options_of(group)}
        return {name: value for name, value in values.items() if value not in (None, [])}

    def arguments_of(self, function: Callable[..., Any], **others: Any) -> dict[str, Any]:
        """Arguments of a function by name: the options that are its parameters, too, but for `others`."""
        cls: type = type(self)
        shared = options_of(cls).keys() & inspect.signature(function).parameters.keys()
        return {name: getattr(self, name) for name in shared} | others


@functools.cache
def options_of(cls: type) -> dict[str, Option]:
    """The options of a class by name: its own, then those of its bases in the order in which they are written."""
    hints = get_type_hints(cls)
    found: dict[str, Option] = {}
    for base in cls.__mro__:
        for name, written in vars(base).items():
            if isinstance(written, Option) and name not in found:
                found[name] = _option(name, written, hints[name], vars(base)["panel"])
    return found


def _option(name: str, written: Option, annotation: Any, panel: str | None) -> Option:
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    kind = get_args(kinds[0])[0] if get_origin(kinds[0]) is list else kinds[0]
    flags = written.flags
    if flags == ():
        flag = name.replace("_", "-")
        flags = (f"--{flag}/--no-{flag}" if annotation == (bool | None) else f"--{flag}",)
    default = False if annotation is bool and written.default is None else written.default
    details = {"rich_help_panel": panel, "show_default": kind is not bool, **written.details}
    return replace(written, flags=flags, default=default, details=details, name=name, type=kind, annotation=annotation)


def takes_options(function: Callable[[Any], None]) -> Callable[..., Any]:
    """A command, made of a function that takes `Options`; it explains its errors."""
    (taken,) = inspect.signature(function, eval_str=True).parameters.values()
    parameters = [each.parameter for each in options_of(taken.annotation).values()]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        with explaining():
            for name, described in options_of(taken.annotation).items():
                described.require_text(values[name])
            function(taken.annotation(**values))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


#: The kinds of `DraftingConfig`, which takes longer to load than all else here.
DRAFT_KINDS = ("tree", "chain", "choices", "suffix")
OPTIONAL_KIND = f"[{'|'.join(DRAFT_KINDS)}]"


class PanelCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses as typer does, but `--draft` of `DraftingOptions` takes a kind alone, or stands alone."""
        if any(parameter.metavar == OPTIONAL_KIND for parameter in self.params):
            ends = args.index("--") if "--" in args else len(args)
            for place in reversed(range(ends)):
                if args[place] == "--draft" and (place + 1 >= ends or args[place + 1] not in DRAFT_KINDS):
                    args = [*args[:place], "--draft=", *args[place + 1 :]]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_panels(_option_rows(self, ctx), formatter)


class PanelGroup(TyperGroup):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None) or "Commands"
                rows.append((panel, (name, command.get_short_help_str(limit=200))))
        _write_panels([*rows, *_option_rows(self, ctx)], formatter)


def _option_rows(command: Any, context: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """(panel, (names, help)) of all arguments and options that are shown."""
    for parameter in command.get_params(context):
        if (record := parameter.get_help_record(context)) is not None:
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            yield getattr(parameter, "rich_help_panel", None) or default, record


def _write_panels(rows: Any, formatter: Any) -> None:
    """Write rows by their panels, which stand in the order of their first rows."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for panel, row in rows:
        panels.setdefault(panel, []).append(row)
    try:
        "╭─╮│╰╯".encode(getattr(sys.stdout, "encoding", None) or "ascii")
        framed = True
        formatter.write_paragraph()
    except (UnicodeEncodeError, LookupError):
        framed = False
    for title, records in panels.items():
        if not framed:
            with formatter.section(title):
                formatter.write_dl(records)
            continue
        inside = type(formatter)(width=formatter.width - 4, max_width=100)
        inside.write_dl(records)
        width = formatter.width
        formatter.write(f"╭─ {title} {'─' * (width - len(title) - 5)}╮\n")
        for text in inside.getvalue().splitlines():
            formatter.write(f"│ {text.ljust(width - 4)} │\n")
        formatter.write(f"╰{'─' * (width - 2)}╯\n")
