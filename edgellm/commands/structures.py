"""The form of answers, as options and as a command of a chat."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgellm.commands.options import read_json_file, sampled
from edgellm.commands.table import Options, option

if TYPE_CHECKING:
    from edgellm.structure.description import Structure


class StructureOptions(Options, panel="Sampling"):
    """What is noted of each token, and the form that the answer must have."""

    logprobs: int | None = sampled("Show each token's log-probability, and the N likeliest there.", metavar="N")
    json_schema: Path | None = option("The answer is JSON of the schema in this file.", metavar="FILE")
    regex: str | None = option("The whole answer matches this regular expression.", metavar="REGEX", is_free=True)
    choice: list[str] | None = option(
        "The answer is one of these texts; may be given several times.", metavar="TEXT", is_free=True
    )

    def structure(self) -> Structure | None:
        """The structure that was given, None without one; RequestError for a wrong one, usage errors for several."""
        given = [name for name in ("json_schema", "regex", "choice") if getattr(self, name) not in (None, [])]
        if len(given) > 1:
            flags = [f"--{name.replace('_', '-')}" for name in given]
            raise typer.BadParameter(f"is given beside {flags[0]}: an answer has one form", param_hint=flags[1])
        if self.json_schema is not None:
            return read_schema(self.json_schema)
        from edgellm.structure.description import Structure  # what plain answers need not load

        if self.regex is not None:
            return Structure(regex=self.regex)
        return Structure(choice=self.choice) if self.choice else None


def read_schema(path: Path) -> Structure:
    """The structure of a file with a JSON schema; raises RequestError that names the file."""
    from edgellm.structure.description import Structure

    return read_json_file(path, "the JSON schema", lambda schema: Structure(json=schema))
