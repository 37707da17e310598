"""The drafting configurations that a benchmark compares, as they are written on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm.drafting.presets import SIZES, checked_drafting, drafting_config
from edgellm.errors import EdgeLLMError, RequestError

if TYPE_CHECKING:
    from edgellm.drafting.config import DraftingConfig
    from edgellm.engines.model.config import EngineLimits

PLAIN_NAME = "plain"
EXPECTED = (
    "expected plain, chain:STEPS, tree:TOP_K/STEPS/SIZE, choices:NAME or FILE, or adaptive[:TOP_K/STEPS/SIZE]; "
    "behind a chain there may be :sampled, behind all but plain :typical"
)


@dataclass(frozen=True)
class BenchConfiguration:
    """A name for tables, and what it means; None decodes without a draft.

    `is_lossless` is False where other tokens than those of plain decoding are to be expected.
    """

    name: str
    drafting: DraftingConfig | None

    @property
    def is_lossless(self) -> bool:
        """Whether it must give the tokens of plain decoding."""
        return self.drafting is None or not (self.drafting.sampled or self.drafting.acceptance == "typical")


def parse_configurations(
    text: str | None, limits: EngineLimits, backend: str, settings: Mapping[str, Any]
) -> list[BenchConfiguration]:
    """What a comma-separated list names, or what suits the engines; plain decoding, the yardstick, is always the first.

    `settings` are drafting settings that hold for all unless a configuration says otherwise. Raises RequestError for
    one that is malformed or that the engines cannot serve.
    """
    if text is None:
        names = default_configurations(limits)
    else:
        names = [name.strip() for name in text.split(",") if name.strip()]
        names = [PLAIN_NAME, *(name for name in dict.fromkeys(names) if name != PLAIN_NAME)]
    return [_parse(name, limits, backend, settings) for name in names]


def default_configurations(limits: EngineLimits) -> list[str]:
    """Plain decoding; with a draft also chains, the largest tree, and what the controller picks."""
    if not limits.has_draft:
        return [PLAIN_NAME]
    lengths = sorted({min(steps, limits.draft_steps) for steps in (2, 3, 5)})
    tree = "/".join(str(getattr(limits, size)) for size in SIZES)
    return [PLAIN_NAME, *(f"chain:{steps}" for steps in lengths), f"tree:{tree}", "adaptive"]


def _parse(name: str, limits: EngineLimits, backend: str, settings: Mapping[str, Any]) -> BenchConfiguration:
    if name == PLAIN_NAME:
        return BenchConfiguration(name, None)
    if not limits.has_draft:
        raise RequestError(f"the configuration {name!r} drafts, but the engine directory has no draft model")
    common = {key: value for key, value in settings.items() if key not in ("draft", "kind", "choices", *SIZES)}
    preset = common.pop("preset", None)
    asked = common | _asked(name)
    if asked.get("acceptance") != "typical":
        asked = {key: value for key, value in asked.items() if not key.startswith("posterior_")}
    try:
        checked = checked_drafting(asked)
        config = drafting_config(limits, backend, checked, preset)
        config.plan(limits)
    except EdgeLLMError as error:
        raise RequestError(f"the configuration {name!r}: {error}") from error
    return BenchConfiguration(name, config)


def _asked(name: str) -> dict[str, Any]:
    """The drafting settings that a configuration's name stands for."""
    kind, *rest = name.split(":")
    asked: dict[str, Any] = {"adaptive": kind == "adaptive"}
    while rest and rest[-1] in ("sampled", "typical"):
        asked |= {"sampled": True} if rest[-1] == "sampled" else {"acceptance": "typical"}
        rest.pop()
    if kind == "choices" and rest:
        return asked | {"choices": ":".join(rest)}
    sizes = [part for given in rest for part in given.split("/")]
    if not all(part.isdecimal() for part in sizes) or len(rest) > 1:
        raise RequestError(f"the configuration {name!r} is unknown: {EXPECTED}")
    if kind == "chain" and len(sizes) == 1:
        return asked | {"kind": "chain", "draft_steps": int(sizes[0])}
    if (kind == "tree" and len(sizes) == 3) or (kind == "adaptive" and len(sizes) in (0, 3)):
        if kind == "tree":
            asked["kind"] = kind
        return asked | dict(zip(SIZES, map(int, sizes), strict=False))
    raise RequestError(f"the configuration {name!r} is unknown: {EXPECTED}")
