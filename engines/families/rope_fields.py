"""The rotary position embedding of a `config.json`, in its older and its newer layout.

Older: `rope_theta` and `rope_scaling` (its kind under `type` or `rope_type`) at the top level. Newer: all of them in
`rope_parameters`. Both become a base and one dictionary.
"""

from __future__ import annotations

from typing import Any

from edgellm.engines.families.fields import ConfigFields, is_integer, is_number, shown
from edgellm.engines.model.rotary import SCALINGS, scaling_problems

#: The base of the original rotary embedding; Llama's first releases do not write it down.
DEFAULT_THETA = 10000.0
_LENGTH = "original_max_position_embeddings"


def read_mrope(
    fields: ConfigFields, rotary_dim: int, default: tuple[int, ...], interleaved: bool
) -> tuple[tuple[int, ...], bool]:
    """How many frequencies follow the position in time, height and width, and whether these are interleaved.

    `default` stands where the file names no sections, `interleaved` is the family's way. Problems are noted in
    `fields`, whose scaling is then without what is read here, as `read_rope` wants it.
    """
    key = _rope_key(fields)
    parameters = fields.values.get(key)
    scaling = dict(parameters) if isinstance(parameters, dict) else {}
    section, declared = scaling.pop("mrope_section", None), scaling.pop("mrope_interleaved", None)
    for name in ("type", "rope_type"):
        if scaling.get(name) == "mrope":  # the positions alone, with no scaling
            scaling[name] = "default"
    if isinstance(parameters, dict):
        fields.values = fields.values | {key: scaling}
    section = list(default) if section is None else section
    if not isinstance(section, list) or len(section) != 3 or not all(is_integer(size) and size > 0 for size in section):
        fields.wrong.append(f"{key}: mrope_section is {shown(section)}, expected three whole numbers above 0")
        return (), interleaved
    if sum(section) != rotary_dim // 2:
        fields.wrong.append(f"{key}: mrope_section is {shown(section)}, expected a sum of {rotary_dim // 2}")
    if declared not in (None, interleaved):
        fields.unsupported.append(f"{key}: mrope_interleaved is {shown(declared)}, supported is {shown(interleaved)}")
    return tuple(section), interleaved


def read_rope(
    fields: ConfigFields, rotary_dim: int, max_position_embeddings: int
) -> tuple[float, dict[str, Any] | None]:
    """The base, and the scaling with its kind under `rope_type` (None: unscaled); problems are noted in `fields`."""
    key = _rope_key(fields)
    parameters = fields.values.get(key)
    if parameters is not None and not isinstance(parameters, dict):
        fields.wrong.append(f"{key} is {shown(parameters)}, expected an object or null")
        parameters = None
    scaling = {name: value for name, value in (parameters or {}).items() if value is not None}
    theta = scaling.pop("rope_theta", None)
    if theta is None:
        theta = fields.values.get("rope_theta")
    if theta is None:
        theta = DEFAULT_THETA
    if not is_number(theta) or theta <= 1:
        fields.wrong.append(f"rope_theta is {shown(theta)}, expected a number above 1")
        theta = 0.0
    nested = [name for name, value in scaling.items() if isinstance(value, dict)]
    if nested:
        fields.unsupported.append(f"{key} differs between layers ({', '.join(nested)}), which is not supported")
        return float(theta), None
    return float(theta), _scaling(fields, key, scaling, rotary_dim, max_position_embeddings)


def _rope_key(fields: ConfigFields) -> str:
    return "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"


def _scaling(
    fields: ConfigFields, key: str, scaling: dict[str, Any], rotary_dim: int, max_position_embeddings: int
) -> dict[str, Any] | None:
    older_kind = scaling.pop("type", None)
    kind = scaling.pop("rope_type", None) or older_kind or "default"
    if "mrope_section" in scaling:
        fields.unsupported.append(f"{key}: mrope_section (positions in several dimensions) is not supported")
    partial = scaling.pop("partial_rotary_factor", 1)
    if partial != 1:
        fields.unsupported.append(f"{key}: partial_rotary_factor is {shown(partial)}, which is not supported")
    if kind not in ("default", *SCALINGS):
        fields.unsupported.append(f"{key}: rope_type is {shown(kind)}, supported are default, {', '.join(SCALINGS)}")
        return None
    if kind == "default":
        return None
    scaling = {"rope_type": kind, **scaling}
    if kind in ("llama3", "yarn", "longrope"):
        outside = fields.values.get(_LENGTH)
        if outside is not None:  # Phi-3 writes it outside, and there it takes precedence
            scaling[_LENGTH] = outside
        scaling.setdefault(_LENGTH, max_position_embeddings)
        length = scaling[_LENGTH]
        if is_number(length) and not is_integer(length) and length == int(length):
            scaling[_LENGTH] = int(length)
    if rotary_dim and max_position_embeddings:
        fields.wrong += [f"{key}: {problem}" for problem in scaling_problems(scaling, rotary_dim)]
    return scaling
