"""`edgellm list`: the models on this machine, what they take, and where."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from edgellm.commands.console import mebibytes
from edgellm.commands.options import LogOptions
from edgellm.commands.table import option, takes_options
from edgellm.hub.inventory import models
from edgellm.kernels.user_paths import printable


class ListOptions(LogOptions):
    as_json: bool = option("Print JSON instead of text.", "--json")


@takes_options
def list(given: ListOptions) -> None:
    """List models: engine directories that edgellm build made, those in the cache that a name or a GGUF file was opened
    through, and the files that were downloaded for these, with the bytes that each has of its own.

    Example: edgellm list --json
    """
    found = models()
    if given.as_json:
        typer.echo(json.dumps([asdict(each) | {"path": str(each.path)} for each in found], indent=2))
        return
    for each in found:
        of = f" at {each.commit[:12]}" if each.commit else ""
        if each.file and each.file != each.name:
            of = f" of {printable(each.file)}"
        if each.gone:
            of += ", which is gone" + (" (edgellm remove --gone)" if each.kind == "cached" else "")
        typer.echo(f"{each.kind:<10} {mebibytes(each.size):>13}  {printable(each.name)}{of}  {printable(each.path)}")
    if not found:
        typer.echo("No model was built or downloaded. The shipped one is always there: edgellm chat")
