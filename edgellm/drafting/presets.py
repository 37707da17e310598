"""How much to draft where nothing else is asked for: presets per device, and what a request changes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from edgellm.drafting.config import NAMED_CHOICES, DraftingConfig, load_choices
from edgellm.engines.backends.gpu import current_compute_capability
from edgellm.engines.model.config import EngineLimits
from edgellm.errors import RequestError, did_you_mean
from edgellm.kernels.user_paths import user_path

PRESETS = "drafting.yaml"
#: What a preset sets, and engines limit.
SIZES = ("draft_top_k", "draft_steps", "verify_tree_size")
#: What settings may hold: whether to draft, the preset, and the fields of DraftingConfig.
DRAFTING_KEYS = ("draft", "preset", *(item.name for item in fields(DraftingConfig)))
_ANY_LIMITS = EngineLimits(draft_top_k=64, draft_steps=32, verify_tree_size=64)


@cache
def load_presets() -> dict[str, dict[str, Any]]:
    """The presets of `configs/drafting.yaml` by name."""
    return yaml.safe_load((resources.files("edgellm.configs") / PRESETS).read_text(encoding="utf-8"))


def present_preset(backend: str) -> str | None:
    """The name of this machine's preset for "numpy" or "tensorrt"; None for a GPU that no preset names."""
    if backend == "numpy":
        return "cpu"
    capability = current_compute_capability()
    named = (name for name, values in load_presets().items() if capability in values["compute_capabilities"])
    return next(named, None)


def preset_values(limits: EngineLimits, backend: str, preset: str | None = None) -> dict[str, Any]:
    """The drafting settings of `preset` (None: of this machine), as far as engines of `limits` can serve them.

    Raises RequestError for a preset that does not exist.
    """
    presets = load_presets()
    if preset is not None and preset not in presets:
        raise RequestError(f"there is no drafting preset {preset!r}: expected one of {', '.join(presets)}")
    name = preset or present_preset(backend)
    most = {size: getattr(limits, size) for size in SIZES}
    if name is None:
        return most | {"adaptive": True}
    values = {size: min(presets[name][size], most[size]) for size in SIZES}
    if backend != "numpy" and values["draft_top_k"] > 1:  # plans of this width are what there is, besides chains
        values["draft_top_k"] = limits.draft_top_k
    return values | {"adaptive": presets[name]["adaptive"]}


def drafting_config(
    limits: EngineLimits, backend: str, asked: Mapping[str, Any] | None = None, preset: str | None = None
) -> DraftingConfig:
    """The drafting of engines with a draft: `asked` (fields of DraftingConfig) on top of the preset.

    Choices make it a static tree, which has its own sizes; `sampled` makes it a chain. A posterior threshold alone sets
    the posterior alpha to its square root, as published. Raises RequestError.
    """
    asked = dict(asked or {})
    values = preset_values(limits, backend, preset)
    if asked.get("sampled") or asked.get("acceptance") == "typical":
        values["adaptive"] = False  # what is drafted shows in the tokens then, and a seed should give the same ones
    threshold = asked.get("posterior_threshold")
    if isinstance(threshold, float) and 0.0 < threshold <= 1.0:
        asked.setdefault("posterior_alpha", math.sqrt(threshold))
    if asked.get("choices") is not None or asked.get("kind") == "choices":
        given = [size for size in SIZES if size in asked]
        if given:
            raise RequestError(f"{given[0]} is given beside choices: a tree of choices has its own sizes")
        return DraftingConfig(**{"adaptive": values["adaptive"], **asked, "kind": "choices"})
    if asked.get("sampled") and "kind" not in asked:
        asked["kind"] = "chain"
    if "verify_tree_size" in asked and values["draft_top_k"] == 1:
        values["draft_top_k"] = limits.draft_top_k  # a chain has no size: this asks for a tree
    config = DraftingConfig(**values | asked)
    if config.draft_top_k == 1 and "verify_tree_size" not in asked:  # nor is a longer one cut to a preset's
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
    _refuse_contradictions(checked)
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


def _refuse_contradictions(values: Mapping[str, Any]) -> None:
    others = [key for key in values if key not in ("draft", "preset")]
    if values.get("draft") is False and others:
        raise RequestError(f"{others[0]} is given, but draft is false: expected only one of them")
    given = [key for key in ("posterior_threshold", "posterior_alpha") if key in values]
    if given and values.get("acceptance") != "typical":
        raise RequestError(f"{given[0]} is given, but acceptance is exact: it is of use to typical acceptance only")


def default_drafting(limits: EngineLimits, backend: str) -> DraftingConfig | None:
    """What is drafted where nothing is asked for: this machine's preset, or nothing without a draft."""
    return drafting_config(limits, backend) if limits.has_draft else None
