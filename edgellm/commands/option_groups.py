"""Options that several commands share, as groups, and their help in panels, one a subject, as wide as the terminal.

Typer's own panels need Rich, which takes as long to import as all else that help needs, and at 80 columns it cuts the
names of options.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from edgellm.commands.settings import Settings
from edgellm.errors import RequestError

#: Titles of the panels that several commands share.
PROMPT, SAMPLING, DRAFTING, ADAPTERS, TEMPLATE, MODEL, LOGS, OUTPUT = (
    "Prompt",
    "Sampling",
    "Drafting",
    "LoRA adapters",
    "Tools and template",
    "Model",
    "Logs and errors",
    "Output",
)
#: The kinds of `DraftingConfig`, which takes longer to load than all else here.
DRAFT_KINDS = ("tree", "chain", "choices", "suffix")
_OPTIONAL_KIND = f"[{'|'.join(DRAFT_KINDS)}]"
_ARGUMENTS, _COMMANDS, _OTHERS = "Arguments", "Commands", "Options"
_FRAME = ("╭", "─", "╮", "│", "╰", "╯")
_WIDEST = 100
_SUMMARY = 200


class PanelCommand(TyperCommand):
    """A command whose help shows its options by subject."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does. `--draft` of `DraftingOptions` may stand alone: a word behind it that is no kind is another
        argument."""
        if any(parameter.metavar == _OPTIONAL_KIND for parameter in self.params):
            ends = args.index("--") if "--" in args else len(args)
            for place in reversed(range(ends)):
                if args[place] == "--draft" and (place + 1 >= ends or args[place + 1] not in DRAFT_KINDS):
                    args = [*args[:place], "--draft=", *args[place + 1 :]]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the panels of options."""
        _write_panels(_option_rows(self, ctx), formatter)


class PanelGroup(TyperGroup):
    """Several commands, whose help shows them by subject."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the panels of commands, then those of options."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None) or _COMMANDS
                rows.append((panel, (name, command.get_short_help_str(limit=_SUMMARY))))
        _write_panels([*rows, *_option_rows(self, ctx)], formatter)


def _option_rows(command: Any, context: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """(panel, (names, help)) of all arguments and options that are shown."""
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            default = _ARGUMENTS if parameter.param_type_name == "argument" else _OTHERS
            yield getattr(parameter, "rich_help_panel", None) or default, record


def _write_panels(rows: Any, formatter: Any) -> None:
    """Write rows by their panels, which stand in the order of their first rows."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for panel, row in rows:
        panels.setdefault(panel, []).append(row)
    framed = _can_show("".join(_FRAME))
    if framed:
        formatter.write_paragraph()
    for title, records in panels.items():
        if not framed:
            with formatter.section(title):
                formatter.write_dl(records)
            continue
        inside = type(formatter)(width=formatter.width - 4, max_width=_WIDEST)
        inside.write_dl(records)
        formatter.write("\n".join(_framed(title, inside.getvalue().splitlines(), formatter.width)) + "\n")


def _framed(title: str, lines: Sequence[str], width: int) -> Iterator[str]:
    left_top, line, right_top, side, left_bottom, right_bottom = _FRAME
    yield f"{left_top}{line} {title} {line * (width - len(title) - 5)}{right_top}"
    yield from (f"{side} {text.ljust(width - 4)} {side}" for text in lines)
    yield f"{left_bottom}{line * (width - 2)}{right_bottom}"


def _can_show(characters: str) -> bool:
    try:
        characters.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def with_option_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose parameters of dataclass types are options by options, as typer needs to see them.

    Every field of such a dataclass is annotated as a typer option (`Annotated[...]`) and has a default. The options
    stand in the help where the parameter stands in the function, in the panel that the dataclass's `PANEL` names.
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
        option = hints[item.name].__metadata__[0]
        option.rich_help_panel = option.rich_help_panel or getattr(group, "PANEL", None)
        found.append(
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name]
            )
        )
    return found


@dataclass(frozen=True)
class DraftingOptions:
    """What was given on the command line; None is an option that was not."""

    PANEL: ClassVar[str] = DRAFTING

    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar=_OPTIONAL_KIND,
            help="Draft with the model's EAGLE head, or, with suffix, from what was said before, which every model can "
            "[default: with the head where there is one].",
            show_default=False,
        ),
    ] = None
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Decode without a draft.", show_default=False)] = False
    suffix_decoding: Annotated[
        bool | None,
        typer.Option(
            "--suffix-decoding/--no-suffix-decoding",
            help="Draft from what was said before, too, beside the model's EAGLE head.",
            show_default=False,
        ),
    ] = None
    draft_top_k: Annotated[
        int | None, typer.Option("--draft-top-k", help="Width of a draft tree's levels; 1 is a chain.")
    ] = None
    draft_steps: Annotated[
        int | None, typer.Option("--draft-steps", help="Levels of the draft: tokens of a chain.")
    ] = None
    verify_tree_size: Annotated[
        int | None, typer.Option("--verify-tree-size", help="Nodes verified in a round, the root included.")
    ] = None
    choices: Annotated[
        str | None,
        typer.Option(
            "--choices",
            metavar="FILE",
            help="Draft a static tree: a YAML or JSON list of paths, or the name mc_sim_7b_63 or eagle_25.",
        ),
    ] = None
    acceptance: Annotated[
        str | None,
        typer.Option(
            "--acceptance",
            metavar="exact|typical",
            help="exact gives the tokens of decoding without a draft; typical is lossy: it accepts more, other text.",
        ),
    ] = None
    posterior_threshold: Annotated[
        float | None,
        typer.Option("--posterior-threshold", help="Typical acceptance: accept from this probability on [0.09]."),
    ] = None
    posterior_alpha: Annotated[
        float | None,
        typer.Option("--posterior-alpha", help="Typical acceptance: factor of exp(-entropy) [root of the threshold]."),
    ] = None
    adaptive: Annotated[
        bool | None,
        typer.Option(
            "--adaptive/--no-adaptive",
            help="Let measured speed pick a smaller draft, or none, or always draft the same [default: pick].",
            show_default=False,
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """The options that were given, under their names as settings."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if given.pop("no_draft"):
            given["draft"] = False
        elif "draft" in given:
            kind, given["draft"] = given["draft"], True
            given |= {"kind": kind} if kind else {}
        return given

    def applied_to(self, settings: Settings) -> dict[str, Any]:
        """The drafting settings with these options on top; a contradiction is a usage error that names an option."""
        if self.no_draft and self.draft is not None:
            raise typer.BadParameter("--draft is given, and so is --no-draft: expected only one of them")
        given = self.given()
        if not given:
            return settings.drafting
        given.setdefault("draft", True)  # who says how to draft wants a draft
        from edgellm.drafting.config import merged_drafting

        try:
            return merged_drafting(settings.drafting, given)
        except RequestError as error:
            raise typer.BadParameter(_with_option_names(str(error))) from error


def _with_option_names(message: str) -> str:
    """An error about settings, in the words of the command line."""
    names = "|".join(item.name for item in fields(DraftingOptions) if item.name != "draft")
    message = message.replace("but draft is false", "and so is --no-draft").replace("kind is ", "--draft is ")
    return re.sub(rf"\b({names}) is\b", lambda match: f"--{match[1].replace('_', '-')} is", message)
