"""Tables of the rotary position embedding (Su et al. 2021), with every scaling that the families are published with.

A scaling changes the inverse frequencies, and some scale cosine and sine by an attention factor:

- linear: positions divided by a factor (Chen et al. 2023).
- dynamic: a larger base once the context is longer than the trained one (NTK-aware scaling, as published with
  "dynamic" in `config.json`).
- yarn: low frequencies interpolated, high ones left, a ramp between (Peng et al. 2023).
- longrope: a factor for each frequency, one set for short and one for long contexts (Ding et al. 2024).
- llama3: low frequencies divided by a factor, high ones left, blended between (Llama 3.1's `config.json`).
- proportional: the highest frequencies alone, a share of all; pairs of the others are not turned (Gemma 4).

`dynamic` and `longrope` follow the length of a text as it grows; keys that are cached already cannot be rotated anew,
so here one length, the context a table is made for, decides for all its positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.strict_formats import is_number
from edgellm.engines.model.config import FAR_SCALING, DecoderConfig

#: Far beyond any published parameter; what is computed from them stays finite.
_LARGEST = 1e12
LARGEST_THETA = 1e18
TRAINED_LENGTH = "original_max_position_embeddings"


def rotary_table(config: DecoderConfig, positions: int, context: int | None = None) -> np.ndarray:
    """Cosine half then sine half for positions 0..positions-1: float32 [positions, rotary_columns]. Behind the columns
    of all layers stand those of the layers with a base of their own, or of queries that are scaled at far positions
    (Llama 4's, `FAR_SCALING`), where there are such.

    Column j and column j + rotary_dim/2 belong to inverse frequency j; the attention factor is multiplied in. `context`
    is the longest text in tokens, by default `positions`: up to `max_position_embeddings` dynamic scaling leaves the
    base as it is, beyond that it takes the base for `context`; up to `original_max_position_embeddings` longrope takes
    its short factors, beyond that the long ones. Computed in float64. Raises CheckpointError for a scaling that is
    unknown or incomplete.
    """
    frequencies, attention_factor = inverse_frequencies(config, positions if context is None else context)
    parts = [(frequencies, attention_factor)]
    if config.local_rope_theta is not None:
        parts.append((_unscaled(config.local_rope_theta, config.local_rotary_dim), 1.0))
    table, first = np.empty((positions, config.rotary_columns), np.float32), 0
    for frequencies, attention_factor in parts:
        angles, half = np.arange(positions, dtype=np.float64)[:, None] * frequencies, len(frequencies)
        table[:, first : first + half] = np.cos(angles) * attention_factor
        table[:, first + half : first + 2 * half] = np.sin(angles) * attention_factor
        first += 2 * half
    if config.scales_far_queries:
        scaling = config.rope_scaling or {}
        times = np.arange(positions) // scaling[TRAINED_LENGTH]
        far = 1 + scaling[FAR_SCALING] * np.log1p(times)
        table[:, first:] = table[:, :first] * far[:, None]
    return table


def context_bounds(config: DecoderConfig) -> dict[str, int]:
    """What of a model is not computed: up to how many tokens of context it changes nothing, by the field's name."""
    bounds = {}
    if config.sliding_window is not None and not config.layer_kinds:  # as earlier releases wrote it, of some layers
        bounds["sliding_window"] = config.sliding_window
    return bounds


def mrope_axes(config: DecoderConfig) -> np.ndarray:
    """Which of a token's three positions (0 time, 1 height, 2 width) each column of its rotary row follows: int32
    [rotary_dim].

    `mrope_section` frequencies each, one section after the other (Qwen2.5-VL); or interleaved: height takes every third
    frequency from 1 on, width every third from 2 on, until they have theirs, time the rest (Qwen3-VL).
    """
    _, height, width = config.mrope_section
    axes = np.zeros(config.rotary_dim // 2, np.int32)
    if config.mrope_interleaved:
        axes[1 : 3 * height : 3] = 1
        axes[2 : 3 * width : 3] = 2
    else:
        axes[-height - width :] = 1
        axes[-width:] = 2
    return np.tile(axes, 2)


def inverse_frequencies(config: DecoderConfig, context: int) -> tuple[np.ndarray, float]:
    """The angles in radians per position, float64 [rotary_dim / 2], and the factor for cosine and sine."""
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not 1 < config.rope_theta <= LARGEST_THETA:
        raise CheckpointError(f"rope_theta is {config.rope_theta}, expected a number above 1 up to {LARGEST_THETA:g}")
    if kind == "default":
        return _unscaled(config.rope_theta, config.rotary_dim), 1.0
    if kind not in tuple(SCALINGS):
        raise CheckpointError(f"the rotary scaling is {kind!r}, expected default, {', '.join(SCALINGS)}")
    if problems := scaling_problems(scaling, config.rotary_dim):
        raise CheckpointError(f"the rotary scaling {kind!r} cannot be used: {'; '.join(problems)}")
    return SCALINGS[kind](config, scaling, context)


def scaling_problems(scaling: dict[str, Any], rotary_dim: int) -> list[str]:
    """What is missing from, or wrong with, the parameters of a known scaling (its kind under `rope_type`)."""
    kind, problems = scaling.get("rope_type") or scaling.get("type"), []
    for key, (bound, minimum, is_needed) in _PARAMETERS.get(kind, {}).items():
        value = scaling.get(key)
        if value is None:
            if is_needed:
                problems.append(f"{key} is missing")
        elif not is_number(value) or not minimum <= value <= _LARGEST or (value == minimum and bound == "above"):
            problems.append(f"{key} is {value!r}, expected a number {bound} {minimum} up to {_LARGEST:g}")
    if kind == "dynamic" and rotary_dim <= 2:
        problems.append(f"dynamic scaling needs more than 2 rotated elements, there are {rotary_dim}")
    if kind == "yarn" and not isinstance(scaling.get("truncate", True), bool):
        problems.append(f"truncate is {scaling['truncate']!r}, expected true or false")
    if kind == "llama3" and not problems and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        problems.append(f"high_freq_factor {high} is not above low_freq_factor {low}")
    if kind == "longrope":
        problems += [text for key in ("short_factor", "long_factor") if (text := _factors(scaling, key, rotary_dim))]
    return problems


_FACTOR, _TRAINED = {"factor": ("from", 1, True)}, {TRAINED_LENGTH: ("above", 1, True)}
_STRETCHED = {"factor": ("above", 0, False), "attention_factor": ("from", 0, False), **_TRAINED}
_OF_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", FAR_SCALING)
#: The parameters of each kind that are numbers: what these are at least, and whether they must be there.
_PARAMETERS: dict[Any, dict[str, tuple[str, int, bool]]] = {
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "yarn": _STRETCHED | dict.fromkeys(_OF_YARN, ("from", 0, False)),
    "longrope": _STRETCHED,
    "llama3": _FACTOR | _TRAINED | dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("above", 0, True)),
    "proportional": dict.fromkeys(("factor", "partial_rotary_factor"), ("above", 0, False)),
}


def _factors(scaling: dict[str, Any], key: str, rotary_dim: int) -> str:
    values = scaling.get(key)
    if isinstance(values, (list, tuple)) and len(values) == rotary_dim // 2:
        if all(is_number(value) and 0 < value <= _LARGEST for value in values):
            return ""
        return f"{key} holds a value that is not a number above 0"
    found = f"has {len(values)} values" if isinstance(values, (list, tuple)) else f"is {values!r}"
    return f"{key} {found}, expected a list of {rotary_dim // 2} numbers"


def _unscaled(base: float, rotary_dim: int) -> np.ndarray:
    return base ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def _linear(config: DecoderConfig, scaling: dict[str, Any], context: int) -> tuple[np.ndarray, float]:
    return _unscaled(config.rope_theta, config.rotary_dim) / scaling["factor"], 1.0


def _dynamic(config: DecoderConfig, scaling: dict[str, Any], context: int) -> tuple[np.ndarray, float]:
    factor, dim = scaling["factor"], config.rotary_dim
    stretch = max(context, config.max_position_embeddings) / config.max_position_embeddings
    base = config.rope_theta * (factor * stretch - (factor - 1)) ** (dim / (dim - 2))
    return _unscaled(base, dim), 1.0


def _yarn(config: DecoderConfig, scaling: dict[str, Any], context: int) -> tuple[np.ndarray, float]:
    dim, trained = config.rotary_dim, scaling[TRAINED_LENGTH]
    factor = scaling.get("factor") or config.max_position_embeddings / trained

    def rotations_to_index(rotations: float) -> float:
        """The (fractional) frequency that turns so often within the trained length."""
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = rotations_to_index(scaling.get("beta_fast") or 32)
    high = rotations_to_index(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # the ramp becomes a step
    interpolated = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / width, 0, 1)
    frequencies = _unscaled(config.rope_theta, dim)
    frequencies = frequencies * (1 - interpolated) + frequencies / factor * interpolated
    return frequencies, _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    given, mscale, mscale_all_dim = (scaling.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    return temperature(mscale) / temperature(mscale_all_dim) if mscale and mscale_all_dim else temperature(1)


def _longrope(config: DecoderConfig, scaling: dict[str, Any], context: int) -> tuple[np.ndarray, float]:
    trained = scaling[TRAINED_LENGTH]
    factors = np.asarray(scaling["long_factor" if context > trained else "short_factor"], np.float64)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        factor = scaling.get("factor") or config.max_position_embeddings / trained
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return _unscaled(config.rope_theta, config.rotary_dim) / factors, float(attention_factor)


def _llama3(config: DecoderConfig, scaling: dict[str, Any], context: int) -> tuple[np.ndarray, float]:
    frequencies, factor = _unscaled(config.rope_theta, config.rotary_dim), scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling[TRAINED_LENGTH] * frequencies / (2 * math.pi)  # rotations within the trained length
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor), 1.0


def _proportional(config: DecoderConfig, scaling: dict[str, Any], context: int) -> tuple[np.ndarray, float]:
    frequencies = _unscaled(config.rope_theta, config.rotary_dim)
    frequencies[int(scaling.get("partial_rotary_factor", 1) * config.rotary_dim // 2) :] = 0
    return frequencies / (scaling.get("factor") or 1), 1.0


#: The scalings by their published names; each takes the configuration, the scaling and the context.
SCALINGS: dict[str, Callable[[DecoderConfig, dict[str, Any], int], tuple[np.ndarray, float]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
