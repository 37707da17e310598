"""`adapter_config.json` of PEFT, with all that is wrong with it.

Rank, scale and targets follow the rules of PEFT's `LoraConfig`: `target_modules` names the ends of module names, or is
a regular expression for whole names; the first of `rank_pattern` and of `alpha_pattern` that matches a module's name or
its end replaces `r` and `lora_alpha`; the scale is alpha / r, with `use_rslora` alpha / sqrt(r) (Kalajdzievski 2023).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edgellm.engines.errors import AdapterError
from edgellm.engines.formats.strict_formats import JSONObject, is_whole
from edgellm.engines.lora.patterns import PatternMatcher, name_starts, patterns_problems

CONFIG_NAME = "adapter_config.json"

_SETTINGS: dict[str, Any] = json.loads(Path(__file__).with_name("settings.json").read_text("utf-8"))
#: Features that change what is computed and are not implemented: what each is, where its value is not empty.
_UNSUPPORTED: dict[str, str] = _SETTINGS["unsupported"]
#: Keys that say how the adapter was trained or saved, or that are read below.
_KNOWN: list[str] = _SETTINGS["known"]
#: Initializations that move part of the base weights into the adapter, which then fits no other base.
_MUTATING = re.compile(r"(pissa.*|olora|loftq|corda|lora_ga)")
_OUTSIDE = ("lm_head", "embed_tokens")
_LARGEST_NUMBER = 1e30
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})


@dataclass(frozen=True)
class LoraConfig:
    """An adapter's targets, ranks and scales. `problems` are what forbids its use, in words."""

    rank: int
    alpha: float
    rank_stabilized: bool
    targets: frozenset[str] | str
    excluded: frozenset[str] | str
    layers: frozenset[int] | None
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    problems: tuple[str, ...]
    _matcher: PatternMatcher = field(default_factory=PatternMatcher, repr=False, compare=False)

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        """Parse the file in `folder`; AdapterError where it is missing or not a JSON object."""
        advice = "Expected an adapter as PEFT's save_pretrained writes it"
        return _parse(JSONObject.read(folder / CONFIG_NAME, AdapterError, advice).values)

    def rank_of(self, module: str) -> int:
        """The rank of the pair for a module. This, `scale_of` and `adapts` raise AdapterError for patterns that take
        too many steps."""
        return self._matching(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of the pair is multiplied by."""
        rank = self.rank_of(module)
        alpha = self._matching(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def adapts(self, module: str) -> bool:
        """Whether the adapter must have a pair for a module, such as `model.layers.0.self_attn.q_proj`.

        Modules are named as in training, here as for ranks and scales: in a multimodal model, the language model's
        often begin with `model.language_model.`.
        """
        if self.excluded and self._selects(self.excluded, module):
            return False
        if isinstance(self.targets, str):
            return self.targets == "all-linear" or self._selects(self.targets, module)
        if module in self.targets:
            return True
        return self._selects(self.targets, module) and (self.layers is None or _layer_of(module) in self.layers)

    def excluding(self, prefixes: Iterable[str]) -> str:
        """The value of `exclude_modules` that also excludes all modules below `prefixes`, which end with a dot."""
        if isinstance(self.excluded, str):
            present = [f"({self.excluded})"] if self.excluded else []
        else:
            names = map(re.escape, sorted(self.excluded))
            present = [pattern for name in names for pattern in (name, rf".*\.{name}")]
        return "|".join([*present, *(f"{re.escape(prefix)}.*" for prefix in sorted(prefixes))])

    def _selects(self, selection: frozenset[str] | str, module: str) -> bool:
        if isinstance(selection, str):
            return self._matcher.matches(selection, module, [0])
        return any(module[start:] in selection for start in name_starts(module))

    def _matching(self, patterns: dict[str, Any], module: str, default: Any) -> Any:
        starts = name_starts(module)
        found = (value for pattern, value in patterns.items() if self._matcher.matches(pattern, module, starts))
        return next(found, default)


def _parse(values: dict[str, Any]) -> LoraConfig:
    problems = _unsupported_settings(values)

    def take(key: str, default: Any, expected: str, is_valid: Callable[[Any], bool]) -> Any:
        value = values.get(key, default)
        if is_valid(value):
            return value
        problems.append(f"{key!r} is {value!r:.60}, expected {expected}")
        return default

    is_rank = partial(is_whole, least=1)
    rank = take("r", 8, "a whole number of at least 1", is_rank)
    alpha = take("lora_alpha", 8, "a number", _is_number)
    stabilized = take("use_rslora", False, "true or false", lambda value: value in (None, True, False))
    targets = take("target_modules", [], "a list of names, or a regular expression", _is_selection) or []
    excluded = take("exclude_modules", None, "a list of names, or a regular expression", _is_selection) or []
    layers = take("layers_to_transform", None, "a list of layer numbers", _is_layers)
    ranks = take("rank_pattern", {}, "ranks by pattern", lambda value: _is_pattern_map(value, is_rank)) or {}
    alphas = take("alpha_pattern", {}, "numbers by pattern", lambda value: _is_pattern_map(value, _is_number)) or {}
    if not targets:
        problems.append("'target_modules' is empty: the adapter would change nothing")
    for name in () if isinstance(targets, str) else sorted(targets):
        if name.rsplit(".", 1)[-1] in _OUTSIDE:
            problems.append(f"'target_modules' has {name!r}: adapters of embedding and head are not supported")
    patterns = [text for text in (targets, excluded) if isinstance(text, str)] + [*ranks, *alphas]
    refused = patterns_problems(patterns)
    if refused:  # none of them is to be matched
        targets, excluded, ranks, alphas = [], [], {}, {}
    return LoraConfig(
        rank,
        float(alpha),
        bool(stabilized),
        targets if isinstance(targets, str) else frozenset(targets),
        excluded if isinstance(excluded, str) else frozenset(excluded),
        frozenset([layers] if isinstance(layers, int) else layers) if layers not in (None, []) else None,
        dict(ranks),
        {key: float(value) for key, value in alphas.items()},
        tuple(problems + refused),
    )


def _unsupported_settings(values: dict[str, Any]) -> list[str]:
    """What asks for more than LoRA of linear layers."""
    problems = []
    if values.get("peft_type") != "LORA":
        found = values.get("peft_type")
        problems.append(f"'peft_type' is {found!r:.60}, expected 'LORA': other kinds are not supported")
    for key, meaning in _UNSUPPORTED.items():
        if values.get(key) not in _EMPTY:
            problems.append(f"{key!r} is {values[key]!r:.60}: {meaning} is not supported")
    for key in sorted(set(values).difference(_KNOWN, _UNSUPPORTED)):
        if values[key] not in _EMPTY:
            problems.append(f"{key!r:.60} is {values[key]!r:.60}: this setting is not known, so it is not supported")
    if values.get("bias", "none") not in ("none", "all", "lora_only"):  # whether any were trained, the tensors say
        problems.append(f"'bias' is {values['bias']!r:.60}, expected 'none', 'all' or 'lora_only'")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and _MUTATING.fullmatch(start.lower()):
        problems.append(
            f"'init_lora_weights' is {start!r:.60}, which changes the base weights: save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion, which makes it fit the original base"
        )
    if values.get("layers_pattern") not in (*_EMPTY, "layers", ["layers"]):
        problems.append(f"'layers_pattern' is {values['layers_pattern']!r:.60}, expected 'layers'")
    return problems


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_LARGEST_NUMBER < value < _LARGEST_NUMBER


def _is_selection(value: Any) -> bool:
    are_names = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
    return value is None or isinstance(value, str) or are_names


def _is_layers(value: Any) -> bool:
    values = value if isinstance(value, list) else [0 if value is None else value]
    return all(type(layer) is int and layer >= 0 for layer in values)


def _is_pattern_map(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return value is None or (isinstance(value, dict) and all(map(is_valid, value.values())))


def _layer_of(module: str) -> int:
    match = re.match(r".*?\.[^.]*\.(\d+)\.", module)
    return int(match[1]) if match else -1
