"""Which hidden states of the base an EAGLE-3 head takes.

Two conventions name them by layers. "output": the ids name layers whose output is taken (SpecForge, and SGLang, which
adds 1). "entered": they name layers whose input is taken, which is the output of the layer before (vLLM's speculators,
and the default of every implementation: 2, N // 2 and N - 3 of N layers).
"""

from __future__ import annotations

from typing import Any

from edgellm.engines.families.fields import ConfigFields, is_integer, shown

#: Our own key beside the ids, which says which convention they follow.
CONVENTION_KEY = "eagle_aux_hidden_state_convention"
_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
_CONVENTIONS = ("entered", "output")


def feature_layers(
    config: dict[str, Any], eagle_config: dict[str, Any], is_speculators: bool, num_layers: int, fields: ConfigFields
) -> tuple[int, ...]:
    """The layers of a base of `num_layers` layers whose inputs are the head's features, ascending.

    `config` is `config.json`, `eagle_config` what it has under that name. Problems are noted in `fields`.
    """
    default = (2, num_layers // 2, num_layers - 3)
    named = [values[_IDS_KEY] for values in (config, eagle_config) if values.get(_IDS_KEY) is not None]
    if not named:
        if len(set(default)) < len(default) or min(default) < 1:
            fields.wrong.append(
                f"{_IDS_KEY} is missing: a base of {num_layers} layers has no usual ones, expected at least 7 layers"
            )
        return default
    ids = named[0]
    if not isinstance(ids, list) or not ids or not all(is_integer(value) for value in ids):
        fields.wrong.append(f"{_IDS_KEY} is {shown(ids)}, expected a list of layers")
        return default
    if any(other != ids for other in named):
        fields.wrong.append(f"{_IDS_KEY} is {shown(named[0])} in one place and {shown(named[1])} in another")
    convention = _convention(config, eagle_config, is_speculators, ids, default, fields)
    layers = tuple(value + 1 if convention == "output" else value for value in ids)
    if list(layers) != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] < num_layers:
        fields.wrong.append(
            f"{_IDS_KEY} is {shown(ids)}, by the convention {convention!r} the layers entered are {list(layers)}; "
            f"expected distinct ones from 1 to {num_layers - 1}, ascending"
        )
    return layers


def _convention(
    config: dict[str, Any],
    eagle_config: dict[str, Any],
    is_speculators: bool,
    ids: list[int],
    default: tuple[int, ...],
    fields: ConfigFields,
) -> str:
    """By our own key, by speculators' format, or because the ids are the usual layers by one convention alone."""
    declared = config.get(CONVENTION_KEY, eagle_config.get(CONVENTION_KEY))
    if declared is not None:
        if declared not in _CONVENTIONS:
            fields.wrong.append(f"{CONVENTION_KEY} is {shown(declared)}, expected one of {', '.join(_CONVENTIONS)}")
            return "entered"
        return declared
    if is_speculators or tuple(ids) == default:
        return "entered"
    if tuple(value + 1 for value in ids) == default:
        return "output"
    fields.wrong.append(
        f"{_IDS_KEY} is {shown(ids)}, and nothing says whether these layers are entered or left: add "
        f'"{CONVENTION_KEY}": "output" (SpecForge, SGLang) or "entered" (vLLM) to config.json'
    )
    return "entered"
