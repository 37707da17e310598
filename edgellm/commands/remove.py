"""`edgellm remove`: what was made of a model for its name on the hub."""

from __future__ import annotations

import typer

from edgellm.commands.console import mebibytes, write_note
from edgellm.commands.options import LogOptions
from edgellm.commands.table import argument, takes_options
from edgellm.errors import HubError
from edgellm.hub.inventory import built_directories
from edgellm.hub.inventory import remove as remove_model
from edgellm.hub.names import HubName
from edgellm.kernels.user_paths import printable, user_path


class RemoveOptions(LogOptions):
    name: str = argument("ORG/NAME, or ORG/NAME:FILE.gguf, as edgellm list shows it.", default=...)


@takes_options
def remove(given: RemoveOptions) -> None:
    """Remove a model that was opened by its name on the hub: its directories in the cache, and what was downloaded.

    What was in the hub's cache before stays, and what a directory links to that edgellm build made.

    Example: edgellm remove Qwen/Qwen3-0.6B
    """
    name = HubName.parse(given.name)
    if name is None or user_path(given.name).absolute() in built_directories():
        raise HubError(
            f"{given.name} is no name on the hub, ORG/NAME: directories of your own are not removed here, delete them"
        )
    removal = remove_model(name)
    typer.echo(f"{name}: {mebibytes(removal.size)} removed")
    if removal.left:
        write_note("Left where it is:" + "".join(f"\n  {printable(path)}" for path in removal.left))
