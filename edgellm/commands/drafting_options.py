"""Options of drafting, and what they add up to with the settings files."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar

import typer

from edgellm.commands.option_groups import DRAFTING
from edgellm.commands.settings import Settings
from edgellm.errors import RequestError


@dataclass(frozen=True)
class DraftingOptions:
    """What was given on the command line; None is an option that was not."""

    PANEL: ClassVar[str] = DRAFTING

    draft: Annotated[
        bool | None,
        typer.Option(
            "--draft/--no-draft",
            help="Draft with the model's EAGLE head, or decode without [default: where it has one].",
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
        return {name: value for name, value in asdict(self).items() if value is not None}

    def applied_to(self, settings: Settings) -> dict[str, Any]:
        """The drafting settings with these options on top; a contradiction is a usage error that names an option."""
        given = self.given()
        if not given:
            return settings.drafting
        given.setdefault("draft", True)  # who says how to draft wants a draft
        from edgellm.drafting.presets import merged_drafting

        try:
            return merged_drafting(settings.drafting, given)
        except RequestError as error:
            raise typer.BadParameter(_with_option_names(str(error))) from error


def _with_option_names(message: str) -> str:
    """An error about settings, in the words of the command line."""
    names = "|".join(item.name for item in fields(DraftingOptions) if item.name != "draft")
    message = message.replace("but draft is false", "and so is --no-draft")
    return re.sub(rf"\b({names}) is\b", lambda match: f"--{match[1].replace('_', '-')} is", message)
