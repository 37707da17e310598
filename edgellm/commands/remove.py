"""`edgellm remove`: what was made of a model for its name on the hub, or of a GGUF file."""

from __future__ import annotations

from pathlib import Path

import typer

from edgellm.commands.console import mebibytes, write_note
from edgellm.commands.options import LogOptions
from edgellm.commands.table import argument, option, takes_options
from edgellm.errors import HubError
from edgellm.hub.inventory import Removal, built_directories, remove_of_files
from edgellm.hub.inventory import remove as remove_model
from edgellm.hub.names import HubName, first_part
from edgellm.kernels.user_paths import printable, resolved, user_path


class RemoveOptions(LogOptions):
    name: str | None = argument("ORG/NAME, ORG/NAME:FILE.gguf, or FILE.gguf, as edgellm list shows it.")
    revision: str | None = option("Only what is there of a branch, a tag or a commit, or the beginning of one.")
    gone: bool = option("What was made of GGUF files that are gone.")


@takes_options
def remove(given: RemoveOptions) -> None:
    """Remove what a model left in the cache that was opened by its name on the hub, and what was downloaded; or what
    was made of a GGUF file, which itself stays.

    What was in the hub's cache before stays, and what a directory links to that edgellm build made.

    Example: edgellm remove Qwen/Qwen3-0.6B --revision 0123456789ab
    """
    if (given.name is None) is not given.gone or (given.gone and given.revision):
        raise typer.BadParameter("expected one of a name, with or without --revision, and --gone alone")
    if given.gone:
        removals = {str(file): removal for file, removal in remove_of_files(None).items()}
        if not removals:
            typer.echo("No file is gone of which there is something in the cache")
    else:
        removals = _named(given.name or "", given.revision)
    for name, removal in removals.items():
        typer.echo(f"{printable(name)}: {mebibytes(removal.size)} removed")
    if left := [path for removal in removals.values() for path in removal.left]:
        write_note("Left where it is:" + "".join(f"\n  {printable(path)}" for path in left))


def _named(text: str, revision: str | None) -> dict[str, Removal]:
    """What was removed of a file or a name. Raises HubError."""
    path = user_path(text)
    file = Path(first_part(str(resolved(path))))
    if revision is None and path.name.endswith(".gguf") and (of_file := remove_of_files(file)):
        return {str(file): removal for file, removal in of_file.items()}
    name = HubName.parse(text)
    if name is None or resolved(path) in built_directories():
        raise HubError(
            f"{text} is no name on the hub, ORG/NAME, nor a GGUF file of which there is something in the cache: "
            "directories of your own are not removed here, delete them"
        )
    return {str(name): remove_model(name, revision)}
