"""Help in panels, one a subject, as wide as the terminal.

Typer's own panels need Rich, which takes as long to import as all else that help needs, and at 80 columns it cuts the
names of options.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

from edgellm.commands.options import DRAFT_KINDS, OPTIONAL_KIND


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
