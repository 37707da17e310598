"""Options that several commands have in common: written once as a dataclass, given to a command as one value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def with_option_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose parameters of dataclass types are options by options, as typer needs to see them.

    Every field of such a dataclass is annotated as a typer option (`Annotated[...]`) and has a default. The options
    stand in the help where the parameter stands in the function.
    """
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    # Not get_type_hints: in Python 3.10 it hides the annotation of a parameter with the default None in an Optional.
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        group = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            groups[name] = group
            parameters += _options(group)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{item.name: values.pop(item.name) for item in fields(group)})
        return function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _options(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    found = []
    for item in fields(group):
        if item.default is MISSING:
            raise TypeError(f"{group.__name__}.{item.name} has no default: an option may be left out")
        found.append(
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name]
            )
        )
    return found
