"""The command line: `edgellm COMMAND`. Only the module of the command that is asked for is imported."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.commands.console import LogFormat, LogLevel, show_logs, write_error
from edgellm.commands.options import Debug
from edgellm.errors import EdgeLLMError

COMMANDS = ("chat", "generate", "bench", "build", "convert", "info", "doctor", "cache")
FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141
_HELP = {"help_option_names": ["--help", "-h"]}


def run(arguments: Sequence[str]) -> None:
    """Run one command line; always leaves by SystemExit.

    Exit codes: 0 done, 1 an error that EdgeLLM explains, 2 wrong usage, 130 interrupted, 141 nobody reads the output.
    """
    _replace_closed_streams()
    show_logs()
    first = next(iter(arguments), None)  # behind options, whose values may look like commands, all are loaded
    app = create_app((first,) if first in COMMANDS else COMMANDS)
    app(args=list(arguments), prog_name="edgellm")


def create_app(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """The typer application with these commands."""
    app = typer.Typer(
        name="edgellm",
        help="Run language models on this device.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_HELP,
    )
    app.callback()(_top_level)
    for name in commands:
        command = getattr(import_module(f"edgellm.commands.{name}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(_explaining_group(command), name=name)
        else:
            app.command(name)(_explaining(command))
    return app


def _print_version(value: bool) -> None:
    if value:
        from importlib import metadata  # it takes longer than all else here

        print(f"edgellm {metadata.version('edgellm')}")
        raise typer.Exit


def _top_level(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    debug: Debug = False,
) -> None:
    """Run language models on this device."""


def _explaining_group(group: typer.Typer) -> typer.Typer:
    """A group of commands that explain their errors."""
    explaining = typer.Typer(help=group.info.help, no_args_is_help=True, rich_markup_mode=None)
    for command in group.registered_commands:
        if command.callback is not None:
            explaining.command(command.name)(_explaining(command.callback))
    return explaining


def _explaining(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command end with a message and an exit code where it would end with a traceback."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            sys.stdout.flush()
            return result
        except EdgeLLMError as error:
            write_error(error)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _end_output()
            raise typer.Exit(BROKEN_PIPE) from None
        except MemoryError as error:
            failure = EdgeLLMError("there is not enough memory for this on the machine")
            failure.__cause__ = error
            write_error(failure)
            raise typer.Exit(FAILED) from None
        except OSError as error:
            _end_output()
            failure = EdgeLLMError(f"{error.filename or 'the output'} cannot be read or written: {error.strerror}")
            failure.__cause__ = error
            write_error(failure)
            raise typer.Exit(FAILED) from None

    return command


def _end_output() -> None:
    """Write what is still in the buffer, or drop it where that fails: it would again when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replace_closed_streams() -> None:
    """Let output that was closed before the start go nowhere: no file that is opened later takes its number."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - to the end
