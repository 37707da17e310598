"""The command line: `edgellm COMMAND`. Only the module of the command that is asked for is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from edgellm import __version__
from edgellm.commands.console import BROKEN_PIPE, explaining, show_logs
from edgellm.commands.options import LogOptions
from edgellm.commands.table import PanelCommand, PanelGroup, option, takes_options

#: What the list of commands says of each, by the panel of the list that it stands in.
PANELS = {
    "Talk": {
        "chat": "Talk to a model; from a pipe, every line is a question.",
        "generate": "Answer one prompt; the answer alone goes to standard output.",
        "embed": "Make vectors of texts, or of lines of standard input, with an embedding model.",
        "transcribe": "Write down what is said in a sound, or while somebody speaks.",
        "serve": "Serve a model over HTTP, for clients of OpenAI's, Anthropic's and ollama's APIs.",
    },
    "Prepare": {
        "build": "Make an engine directory of a checkpoint: weights, tokenizer, plans for TensorRT.",
        "quantize": "Make a checkpoint with weights of 4 or 8 bits.",
        "convert": "Make safetensors of pickled PyTorch weights.",
        "cache": "Compute system prompts ahead of time and keep them on disk.",
    },
    "Inspect": {
        "info": "Say what an engine directory is: model, limits, memory, plans.",
        "list": "List the models on this machine: built, cached, downloaded.",
        "remove": "Remove what is in the cache of a model on the hub, or of a GGUF file.",
        "doctor": "Say what was found on this machine, and check that the model computes on it.",
        "bench": "Compare the speed of drafting configurations with decoding without a draft.",
        "eval": "Measure what a change of a model costs: perplexity, distance to a reference, tasks.",
    },
}
#: What does here what commands of these names do in other programs.
_ELSEWHERE = {
    "run": "edgellm chat MODEL talks to a model, edgellm generate answers one prompt",
    "pull": "edgellm chat, generate, serve and bench take a name on the hub, ORG/NAME; edgellm build makes a directory",
    "ps": "edgellm serve runs one model, and its /health says how it is",
    "rm": "edgellm remove ORG/NAME, edgellm cache remove for snapshots of prompts; directories of your own you delete",
    "show": "edgellm info ENGINE_DIR says what a model is",
}


def run(arguments: Sequence[str]) -> None:
    """Run one command line; always leaves by SystemExit. Exit codes: 0 done, 1 an error that EdgeLLM explains, 2 wrong
    usage, 75 the GPU is lost, 130 interrupted, 141 nobody reads the output."""
    _prepare_streams()
    show_logs()
    try:
        with explaining():  # help and version cannot always be written, either
            create_app()(args=list(arguments), prog_name="edgellm")
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # of which typer makes a 1
            sys.exit(BROKEN_PIPE)
        raise


def create_app() -> typer.Typer:
    """The command line; the module of a command is imported when that command is to run or to complete a word."""
    app = typer.Typer(
        cls=_TopLevel,
        name="edgellm",
        help="Run language models on this device.\n\nExample: edgellm chat",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_top_level)
    for panel, commands in PANELS.items():
        for name, summary in commands.items():
            app.command(name, help=summary, rich_help_panel=panel)(lambda: None)  # see `_TopLevel`
    return app


def load_command(name: str) -> TyperCommand | TyperGroup:
    """The command `name` with its options; imports its module."""
    command = getattr(import_module(f"edgellm.commands.{name}"), name)
    if not isinstance(command, typer.Typer):
        app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        app.command(name, cls=PanelCommand)(command)
        command = app
    loaded = typer.main.get_command(command)
    assert isinstance(loaded, (TyperCommand, TyperGroup))
    return loaded


class _TopLevel(PanelGroup):
    """All commands: their summaries stand here, and they themselves are imported one at a time."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in _ELSEWHERE:
            ctx.fail(f"No such command {args[0]!r}: {_ELSEWHERE[args[0]]}.")
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name and command is not None else command, rest


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"edgellm {__version__}")
        raise typer.Exit


class _TopLevelOptions(LogOptions):
    version: bool = option("Print the version.", callback=_print_version, is_eager=True)


@takes_options
def _top_level(given: _TopLevelOptions) -> None:
    """Run language models on this device."""


def _prepare_streams() -> None:
    """Let standard output and error take any character: one they cannot show becomes a question mark. Output that was
    closed before the start goes nowhere: no file that is opened later takes its number."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - to the end
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
