"""Drafting: what a request for it looks like, and who picks the plan of each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

import yaml

from edgellm.engines.directories.small_files import SETTINGS_BYTES, read_text
from edgellm.engines.directories.strict_yaml import parse_yaml
from edgellm.engines.model.config import DRAFT_RANGES, EngineLimits
from edgellm.engines.speculation.draft_plan import (
    ACCEPTANCES,
    KINDS,
    DraftPlan,
    chain,
    checked_choices,
    choices_plan,
    tree,
)
from edgellm.errors import EdgeLLMError, EngineError, RequestError, shown
from edgellm.kernels.user_paths import printable
from edgellm.sampling_params import as_float

#: Trees of choices that come with the package, as `configs/NAME.yaml`; the first is the default.
NAMED_CHOICES = ("mc_sim_7b_63", "eagle_25")


@dataclass(frozen=True)
class DraftingConfig:
    """How to draft; wrong values raise `RequestError` that names field, value and what is expected.

    `kind` "tree" is the dynamic tree of EAGLE-2 and 3: `draft_top_k` children and nodes a level, `draft_steps` levels,
    the `verify_tree_size` best nodes verified, the root included. "chain" drafts `draft_steps` tokens one after
    another; with `sampled`, where the request samples, they are drawn from the draft's own distribution (lossless, but
    then other tokens than those of plain decoding with the same seed). "choices" is a static tree: a name of
    `NAMED_CHOICES` (None: the first), or a list of paths of ranks.

    `acceptance` "typical" accepts where p(x) > min(posterior_threshold, posterior_alpha * exp(-entropy)): lossy.
    Sequences of temperature 0 are accepted exactly all the same. `adaptive` lets a controller take smaller plans, or
    none, where that is faster.
    """

    draft_top_k: int = 10
    draft_steps: int = 6
    verify_tree_size: int = 60
    kind: str = "tree"
    choices: str | Sequence[Sequence[int]] | None = None
    sampled: bool = False
    acceptance: str = "exact"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    adaptive: bool = False

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, KINDS)
        _one_of("acceptance", self.acceptance, ACCEPTANCES)
        for name, (least, most) in DRAFT_RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
                raise RequestError(f"{name} is {shown(value)}: expected a whole number from {least} to {most}")
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < as_float(value) <= 1:
                raise RequestError(f"{name} is {shown(value)}: expected a number above 0 and up to 1")
        for name in ("sampled", "adaptive"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {shown(getattr(self, name))}: expected true or false")
        if self.sampled and self.kind != "chain":
            raise RequestError(f"sampled is true for kind {self.kind!r}: only a chain can be sampled")
        if self.sampled and self.acceptance == "typical":
            raise RequestError("a sampled chain has its own exact test: leave out sampled, or acceptance typical")
        if self.choices is not None:
            if self.kind != "choices":
                raise RequestError(f"choices are given for kind {self.kind!r}: they are of use to kind 'choices' only")
            if isinstance(self.choices, str):
                _one_of("choices", self.choices, NAMED_CHOICES)
            else:
                object.__setattr__(self, "choices", _request(checked_choices, self.choices))

    @classmethod
    def largest(cls, limits: EngineLimits, **others: Any) -> DraftingConfig:
        """The dynamic tree that engines of these limits were built for."""
        return cls(limits.draft_top_k, limits.draft_steps, limits.verify_tree_size, **others)

    def plan(self, limits: EngineLimits) -> DraftPlan:
        """The plan of a round with room; raises EngineError if engines of these limits cannot serve it."""
        rule = {
            "acceptance": self.acceptance,
            "posterior_threshold": float(self.posterior_threshold),
            "posterior_alpha": float(self.posterior_alpha),
        }
        if self.kind == "chain":
            plan = chain(self.draft_steps, sampled=self.sampled, **rule)
        elif self.kind == "choices":
            choices = self.choices or NAMED_CHOICES[0]
            plan = choices_plan(named_choices(choices) if isinstance(choices, str) else choices, **rule)
        else:
            plan = tree(self.draft_top_k, self.draft_steps, self.verify_tree_size, **rule)
        plan.check(limits)
        return plan


class PlanChooser(Protocol):
    """Picks the plan of each round. It sees finished rounds only, so that it cannot bias what they emit."""

    #: What it picks of, where there is room.
    plans: Sequence[DraftPlan]

    def next_plan(self, room: int, batch: int) -> DraftPlan | None:
        """The plan for `batch` sequences that may emit at most `room` tokens each; None decodes one token plainly."""

    def record(self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float) -> None:
        """A round (None: a plain step) of `seconds` ended; each running sequence got `emitted` tokens by it."""


class FixedDrafting:
    """Always the same plan, shorter where there is less room."""

    def __init__(self, plan: DraftPlan | None) -> None:
        self.plan = plan
        self.plans: Sequence[DraftPlan] = () if plan is None else (plan,)

    def next_plan(self, room: int, batch: int) -> DraftPlan | None:
        """See `PlanChooser`."""
        return None if self.plan is None else self.plan.fitting(room)

    def record(self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float) -> None:
        """Nothing is learned."""


def named_choices(name: str) -> list[list[int]]:
    """The tree of choices `name` that comes with the package."""
    _one_of("choices", name, NAMED_CHOICES)
    return yaml.safe_load((resources.files("edgellm.configs") / f"{name}.yaml").read_text(encoding="utf-8"))


def load_choices(path: str | Path) -> tuple[tuple[int, ...], ...]:
    """A tree of choices from a JSON or YAML file: a list of paths. Raises RequestError that names file and choice."""
    text = read_text(Path(path), SETTINGS_BYTES, RequestError, "the choices file", takes_pipes=True)
    place = f"the choices file {printable(path)}"
    try:
        return checked_choices(parse_yaml(text, place, RequestError))
    except EngineError as error:
        raise RequestError(f"{place}: {error}") from error


def _request(check: Any, value: Any) -> Any:
    """`check(value)` with its error as the request's."""
    try:
        return check(value)
    except EdgeLLMError as error:
        raise RequestError(str(error)) from error


def _one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise RequestError(f"{name} is {shown(value)}: expected one of {', '.join(choices)}")
