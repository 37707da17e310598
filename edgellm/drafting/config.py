"""How to draft: `DraftingConfig`, and the presets and settings it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from edgellm.configs import installed
from edgellm.engines.formats.small_files import SETTINGS_BYTES, read_text
from edgellm.engines.formats.strict_formats import parse_yaml
from edgellm.engines.model.limits import DRAFT_RANGES, EngineLimits
from edgellm.engines.speculation.draft_plan import (
    ACCEPTANCES,
    KINDS,
    DraftPlan,
    chain,
    checked_choices,
    choices_plan,
    tree,
)
from edgellm.errors import EdgeLLMError, EngineError, RequestError, did_you_mean, shown
from edgellm.kernels.gpu import current_compute_capability
from edgellm.kernels.user_paths import printable, user_path
from edgellm.sampling_params import as_float

#: Trees of choices that come with the package, as `configs/NAME.yaml`; the first is the default.
NAMED_CHOICES = ("mc_sim_7b_63", "eagle_25")
SUFFIX = "suffix"
#: The kinds that need no draft model.
WITHOUT_MODEL = (SUFFIX,)


@dataclass(frozen=True)
class DraftingConfig:
    """How to draft; wrong values raise `RequestError` that names field, value and what is expected.

    `kind` "tree" is the dynamic tree of EAGLE-2 and 3: `draft_top_k` children and nodes a level, `draft_steps` levels,
    the `verify_tree_size` best nodes verified, the root included. "chain" drafts `draft_steps` tokens one after
    another; with `sampled`, where the request samples, they are drawn from the draft's own distribution (lossless, but
    then other tokens than those of plain decoding with the same seed). "choices" is a static tree: a name of
    `NAMED_CHOICES` (None: the first), or a list of paths of ranks. "suffix" needs no draft model: what followed the
    last tokens where they were said before, in the prompt, the answer or earlier answers of the process, is verified
    where that should be faster than a plain step; sizes and `adaptive` do not apply to it. `suffix_decoding` does so
    beside a draft model, in turns: what should give most tokens a second.

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
    suffix_decoding: bool = False

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, (*KINDS, *WITHOUT_MODEL))
        _one_of("acceptance", self.acceptance, ACCEPTANCES)
        for name, (least, most) in DRAFT_RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
                raise RequestError(f"{name} is {shown(value)}: expected a whole number from {least} to {most}")
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < as_float(value) <= 1:
                raise RequestError(f"{name} is {shown(value)}: expected a number above 0 and up to 1")
        for name in ("sampled", "adaptive", "suffix_decoding"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {shown(getattr(self, name))}: expected true or false")
        if self.sampled and self.kind != "chain":
            raise RequestError(f"sampled is true for kind {self.kind!r}: only a chain can be sampled")
        if self.sampled and self.acceptance == "typical":
            raise RequestError("a sampled chain has its own exact test: leave out sampled, or acceptance typical")
        if self.proposes_given and (self.sampled or self.acceptance == "typical"):
            asked = "suffix_decoding is true" if self.needs_draft_model else f"kind is {self.kind!r}"
            other = "sampled" if self.sampled else "acceptance typical"
            raise RequestError(
                f"{asked} beside {other}: measured time chooses between the drafts, and with {other} a seed would give "
                "other tokens from run to run. Leave one of them out"
            )
        if self.choices is not None:
            if self.kind != "choices":
                raise RequestError(f"choices are given for kind {self.kind!r}: they are of use to kind 'choices' only")
            if isinstance(self.choices, str):
                _one_of("choices", self.choices, NAMED_CHOICES)
            else:
                try:
                    object.__setattr__(self, "choices", checked_choices(self.choices))
                except EdgeLLMError as error:
                    raise RequestError(str(error)) from error

    @classmethod
    def largest(cls, limits: EngineLimits, **others: Any) -> DraftingConfig:
        """The dynamic tree that engines of these limits were built for."""
        return cls(limits.draft_top_k, limits.draft_steps, limits.verify_tree_size, **others)

    @property
    def needs_draft_model(self) -> bool:
        """Whether a draft model proposes."""
        return self.kind not in WITHOUT_MODEL

    @property
    def proposes_given(self) -> bool:
        """Whether the host proposes, beside what rules force."""
        return not self.needs_draft_model or self.suffix_decoding

    @property
    def gives_plain_tokens(self) -> bool:
        """Whether a seed gives the tokens of plain decoding, whatever is drafted."""
        return not self.sampled and self.acceptance == "exact"

    def plan(self, limits: EngineLimits) -> DraftPlan:
        """The plan of a draft model's round with room; raises EngineError if engines of these limits cannot serve
        it."""
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


def named_choices(name: str) -> list[list[int]]:
    """The tree of choices `name` that comes with the package."""
    _one_of("choices", name, NAMED_CHOICES)
    return installed(name)


def load_choices(path: str | Path) -> tuple[tuple[int, ...], ...]:
    """A tree of choices from a JSON or YAML file: a list of paths. Raises RequestError that names file and choice."""
    text = read_text(Path(path), SETTINGS_BYTES, RequestError, "the choices file", takes_pipes=True)
    place = f"the choices file {printable(path)}"
    try:
        return checked_choices(parse_yaml(text, place, RequestError))
    except EngineError as error:
        raise RequestError(f"{place}: {error}") from error


def _one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise RequestError(f"{name} is {shown(value)}: expected one of {', '.join(choices)}")


#: What a preset sets, and engines limit.
SIZES = ("draft_top_k", "draft_steps", "verify_tree_size")
#: What settings may hold: whether to draft, the preset, and the fields of DraftingConfig.
DRAFTING_KEYS = ("draft", "preset", *(item.name for item in fields(DraftingConfig)))
_ANY_LIMITS = EngineLimits(draft_top_k=64, draft_steps=32, verify_tree_size=64)


@cache
def load_presets() -> dict[str, dict[str, Any]]:
    """The presets of `configs/drafting.yaml` by name."""
    return installed("drafting")


def present_preset(backend: str, gpu: int | None = None) -> str | None:
    """The name of this machine's preset for "numpy" or "tensorrt", of the GPU of an index (None: see `find_gpu`); None
    for a GPU that no preset names."""
    if backend == "numpy":
        return "cpu"
    capability = current_compute_capability(gpu)
    named = (name for name, values in load_presets().items() if capability in values["compute_capabilities"])
    return next(named, None)


def preset_values(
    limits: EngineLimits, backend: str, preset: str | None = None, gpu: int | None = None
) -> dict[str, Any]:
    """The drafting settings of `preset` (None: the `present_preset`), as far as engines of `limits` can serve them.

    Raises RequestError for a preset that does not exist.
    """
    presets = load_presets()
    if preset is not None and preset not in presets:
        raise RequestError(f"there is no drafting preset {preset!r}: expected one of {', '.join(presets)}")
    name = preset or present_preset(backend, gpu)
    most = {size: getattr(limits, size) for size in SIZES}
    if name is None:
        return most | {"adaptive": True}
    values = {size: min(presets[name][size], most[size]) for size in SIZES}
    if backend != "numpy" and values["draft_top_k"] > 1:  # plans of this width are what there is, besides chains
        values["draft_top_k"] = limits.draft_top_k
    return values | {"adaptive": presets[name]["adaptive"]}


def drafting_config(
    limits: EngineLimits,
    backend: str,
    chosen: Mapping[str, Any] | None = None,
    preset: str | None = None,
    gpu: int | None = None,
) -> DraftingConfig:
    """The drafting of engines: `chosen` (fields of DraftingConfig) on top of the preset. Where there is no draft
    model, `suffix_decoding` is all that is left.

    Choices make it a static tree, which has its own sizes; `sampled` makes it a chain. A posterior threshold alone sets
    the posterior alpha to its square root, as published. Raises RequestError.
    """
    chosen = dict(chosen or {})
    if chosen.get("suffix_decoding") and not limits.has_draft:
        return DraftingConfig(kind=SUFFIX)
    if chosen.get("kind") in WITHOUT_MODEL:
        given = [name for name in ("choices", *SIZES) if name in chosen]
        if given:
            raise RequestError(f"{given[0]} is given beside kind {chosen['kind']}, which sizes its drafts itself")
        return DraftingConfig(**chosen)
    if "kind" in chosen:
        _one_of("kind", chosen["kind"], (*KINDS, *WITHOUT_MODEL))
    if not limits.has_draft:
        raise RequestError("the engine directory has no draft model: build one with it (edgellm build --draft)")
    values = preset_values(limits, backend, preset, gpu)
    if chosen.get("sampled") or chosen.get("acceptance") == "typical":
        values["adaptive"] = False  # what is drafted shows in the tokens then, and a seed should give the same ones
    threshold = chosen.get("posterior_threshold")
    if isinstance(threshold, float) and 0.0 < threshold <= 1.0:
        chosen.setdefault("posterior_alpha", math.sqrt(threshold))
    if chosen.get("choices") is not None or chosen.get("kind") == "choices":
        given = [size for size in SIZES if size in chosen]
        if given:
            raise RequestError(f"{given[0]} is given beside choices: a tree of choices has its own sizes")
        return DraftingConfig(**{"adaptive": values["adaptive"], **chosen, "kind": "choices"})
    if chosen.get("sampled") and "kind" not in chosen:
        chosen["kind"] = "chain"
    if "verify_tree_size" in chosen and values["draft_top_k"] == 1:
        values["draft_top_k"] = limits.draft_top_k  # a chain has no size: this asks for a tree
    config = DraftingConfig(**values | chosen)
    if config.draft_top_k == 1 and "verify_tree_size" not in chosen:  # nor is a longer one cut to a preset's
        return replace(config, verify_tree_size=max(config.verify_tree_size, config.draft_steps + 1))
    return config


def checked_drafting(values: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """Drafting settings as they stand in a file or come from options; raises RequestError that names the wrong one.

    Keys are those of DraftingConfig, "draft" and "preset"; None leaves a setting open. `choices` that are no name of
    `NAMED_CHOICES` but text are a file, relative to `folder`, and are read.
    """
    checked = {}
    for key, value in values.items():
        if key not in DRAFTING_KEYS:
            raise RequestError(f"there is no drafting setting {str(key)!r}{did_you_mean(str(key), DRAFTING_KEYS)}")
        if value is None:
            continue
        if key == "draft" and not isinstance(value, bool):
            raise RequestError(f"draft is {value!r}: expected true, false or null")
        if key == "preset" and not (isinstance(value, str) and value in load_presets()):
            raise RequestError(f"preset is {value!r}: expected one of {', '.join(load_presets())}, or null")
        is_file = key == "choices" and isinstance(value, str) and value not in NAMED_CHOICES
        checked[key] = load_choices(folder / user_path(value)) if is_file else value
    config = {key: value for key, value in checked.items() if key not in ("draft", "preset")}
    drafting_config(_ANY_LIMITS, "numpy", config)
    others = [key for key in checked if key not in ("draft", "preset")]
    if checked.get("draft") is False and others:
        raise RequestError(f"{others[0]} is given, but draft is false: expected only one of them")
    given = [key for key in ("posterior_threshold", "posterior_alpha") if key in checked]
    if given and checked.get("acceptance") != "typical":
        raise RequestError(f"{given[0]} is given, but acceptance is exact: it is of use to typical acceptance only")
    return checked


def merged_drafting(settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Drafting settings with what the command line asks for on top: what contradicts an option gives way.

    `options` holds no None. Raises RequestError where the options contradict each other.
    """
    kept = dict(settings)
    lossy = {"acceptance": "typical"} if kept.get("acceptance") == "typical" else {}
    checked = {key: value for key, value in checked_drafting(lossy | dict(options)).items() if key in options}
    if checked:
        kept.pop("draft", None)
    if checked.get("draft") is False:
        return checked
    if checked.get("kind") in WITHOUT_MODEL:
        kept = {key: value for key, value in kept.items() if key in ("preset", "adaptive")}
    elif "kind" in checked:
        kept = {key: value for key, value in kept.items() if key not in ("choices", "sampled")}
    elif kept.get("kind") in WITHOUT_MODEL and set(checked) - {"draft", "adaptive", "suffix_decoding"}:
        del kept["kind"]  # the others are said of a draft model
    if "choices" in checked:
        kept = {key: value for key, value in kept.items() if key not in ("kind", "sampled", *SIZES)}
    if any(size in checked for size in SIZES):
        kept.pop("choices", None)
        if kept.get("kind") == "choices":
            del kept["kind"]
    if checked.get("acceptance") == "typical":
        kept.pop("sampled", None)
    if checked.get("acceptance") == "exact":
        kept = {key: value for key, value in kept.items() if not key.startswith("posterior_")}
    merged = kept | checked
    checked_drafting(merged)
    return merged


def default_drafting(limits: EngineLimits, backend: str, gpu: int | None = None) -> DraftingConfig | None:
    """What is drafted where nothing is asked for: the `present_preset`, or nothing without a draft."""
    return drafting_config(limits, backend, gpu=gpu) if limits.has_draft else None
