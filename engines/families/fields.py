"""Reads the fields of a `config.json` without trust, and gathers everything that is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.formats.strict_formats import LARGEST_SIZE, as_json, is_integer, is_number, is_whole
from edgellm.engines.model.config import FAR_SCALING, LARGEST_DEPTH
from edgellm.engines.model.rotary import LARGEST_THETA, SCALINGS, TRAINED_LENGTH, scaling_problems

#: What to do about a config.json that says what cannot be.
TAKE_PUBLISHED = "Take config.json as it was published with the weights."
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
#: Fields that change what the model computes, with the values that change nothing; null and absence change nothing.
_NEUTRAL_VALUES: dict[str, list[Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
_FEATURES = dict.fromkeys(_EXPERTS, "mixture of experts") | {"attention_chunk_size": "chunked attention"}
_DTYPES = ("float16", "bfloat16", "float32")
_LAYER_TYPES = {"full_attention": "attention", "sliding_attention": "window"}


def every_layer(layer: int) -> bool:
    """Which layers look back on a window where all do."""
    return True


def windowed_but_every(interval: int) -> Callable[[int], bool]:
    """Which layers look back on a window where the last of each `interval` attends to all."""
    return lambda layer: (layer + 1) % interval > 0


class ConfigFields:
    """The fields of one `config.json`; a field that is missing or wrong is noted, and read as zero or None.

    `wrong` are faults of the file, `unsupported` features that are not implemented; `raise_problems` reports all of
    both at once. A field that a family has read or ignores is not among those that `refuse_unsupported` refuses.
    """

    def __init__(
        self, config: dict[str, Any], generation_config: dict[str, Any] | None, family: str, dtype: str | None = None
    ) -> None:
        self.values = config
        self.tensors_dtype = dtype
        self.generation_values = generation_config or {}
        self.family = family
        self.wrong: list[str] = []
        self.unsupported: list[str] = []
        self._known: set[str] = set()

    def ignore(self, *keys: str) -> None:
        """Whatever these fields hold, the family computes the same."""
        self._known.update(keys)

    def size(self, key: str, default: int | None = None, largest: int = LARGEST_SIZE) -> int:
        """A whole number from 1 to `largest`; `default` stands for absence and null, else the field is required."""
        return self._whole_number(key, default, "a whole number", 1, largest) or 0

    def count(self, key: str, default: int | None, largest: int) -> int:
        """A whole number from 0 to `largest`; `default` stands for absence and null, else the field is required."""
        return self._whole_number(key, default, "a whole number", 0, largest) or 0

    def token_id(self, key: str, default: int | None = None, smallest: int = 0, largest: int = LARGEST_SIZE) -> int:
        """The id of one token; `default` stands for absence and null, else the field is required."""
        return self._whole_number(key, default, "a token id", smallest, largest) or smallest

    def _whole_number(self, key: str, default: int | None, words: str, smallest: int, largest: int) -> int | None:
        expected = f"{words} from {smallest} to {largest}"
        return self._checked(key, default, lambda value: is_integer(value) and smallest <= value <= largest, expected)

    def positive(self, key: str, default: float | None = None, largest: float = 1) -> float:
        """A number above 0 and up to `largest`; `default` stands for absence and null, else the field is required."""
        expected = f"a number above 0 and up to {largest:g}"
        value = self._checked(key, default, lambda value: is_number(value) and 0 < value <= largest, expected)
        return float(value or 1)

    def switch(self, key: str, default: bool = False) -> bool:
        """true or false; `default` stands for absence and null."""
        return bool(self._checked(key, default, lambda value: isinstance(value, bool), "true or false"))

    def square(self, key: str) -> int:
        """A size that is the square of a whole number."""
        size = self.size(key)
        if round(size**0.5) ** 2 != size:
            self.expect(key, size, "the square of a whole number")
        return size

    def section(self, key: str) -> dict[str, Any]:
        """The object under a key; an empty one where there is none."""
        value = self.values.get(key)
        return value if isinstance(value, dict) else {}

    def only(self, **supported: Any) -> None:
        """Refuse other values of these fields than those that are supported, which absent and null ones have."""
        for key, value in supported.items():
            if self.values.get(key) not in (None, value):
                self.refuse(key, self.values[key], f"supported is {value}")

    @property
    def image_key(self) -> str:
        """Under which name the file has the token of images."""
        return "image_token_index" if self.values.get("image_token_index") is not None else "image_token_id"

    def _checked(self, key: str, default: Any, is_valid: Callable[[Any], bool], expected: str) -> Any:
        """The field's value; None stands for one that is not valid, which is noted."""
        self._known.add(key)
        value = self.values.get(key)
        value = default if value is None else value
        if is_valid(value):
            return value
        if key in self.values:
            self.expect(key, self.values[key], expected)
        else:
            self.wrong.append(f"{key} is missing, expected {expected}")
        return None

    def word(self, key: str, words: Mapping[str | None, str]) -> str:
        """What the field's word stands for, by `words`; None is absence and null. Other words are not supported."""
        value = self.values.get(key)
        if (value is None or isinstance(value, str)) and value in words:
            return words[value]
        self.refuse(key, value, f"supported is {' or '.join(filter(None, words))}")
        return ""

    def windows(self, layers: int, usual: Callable[[int], bool] | None = None) -> tuple[int | None, tuple[str, ...]]:
        """How many tokens layers look back on, their own included (None: on all), and the kind of each layer, one of
        `LAYER_KINDS` (none where all attend to all, or which do not is not known).

        `use_sliding_window` can switch the window off. `layer_types` says which layers have one; `usual` says it of
        each layer where the file does not, and of `every_layer` alone whatever the file says. It is None of a family
        that knows no windows.
        """
        switch = self.values.get("use_sliding_window")
        window = None
        if self.values.get("sliding_window") is not None and (switch is None or self.switch("use_sliding_window")):
            window = self.size("sliding_window")
        types, (full, windowed) = self.values.get("layer_types"), _LAYER_TYPES
        looks_back = window is not None and usual is not None and usual
        default = [windowed if looks_back and looks_back(layer) else full for layer in range(layers)]
        kinds = self.layer_kinds(_LAYER_TYPES, default)
        if "window" in kinds and window is None:
            self.wrong.append(f"layer_types has {windowed}, but there is no sliding_window in use")
        if usual is None:
            return window, ()
        if usual is every_layer and window is not None and "attention" in kinds:
            self.refuse("layer_types", types, f"supported is {windowed} in every layer")
        return (window, kinds) if window is not None and "window" in kinds else (None, ())

    def layer_kinds(self, kinds: Mapping[str, str], default: Sequence[str]) -> tuple[str, ...]:
        """What `layer_types` says of each layer, in the words that `kinds` has for its own; `default` are those of a
        file without it. The field is then read."""
        given = self.values.get("layer_types")
        self.values = {key: value for key, value in self.values.items() if key != "layer_types"}
        types, count = list(default) if given is None else given, layer_count(self)
        if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
            self.expect("layer_types", types, f"a list of {' and '.join(kinds)}")
            return ()
        if unknown := ", ".join(sorted(set(types) - set(kinds))):
            self.unsupported.append(f"layer_types has {unknown}, supported are {' and '.join(kinds)}")
        elif count and len(types) != count:
            self.wrong.append(f"layer_types has {len(types)} layers, but num_hidden_layers is {count}")
        return tuple(kinds.get(each, "") for each in types)

    def dtype(self, usual: str | None = None) -> str:
        """The checkpoint's dtype, from `dtype` or its older name `torch_dtype`, else `usual` or that of the tensors."""
        key = "dtype" if self.values.get("dtype") is not None else "torch_dtype"
        value = self.values.get(key)
        if isinstance(value, str):
            value = value.removeprefix("torch.")
        if value in (None, "auto"):
            fallback = usual or self.tensors_dtype
            if fallback in _DTYPES:
                return fallback
            self.wrong.append(f"dtype (torch_dtype) is missing, expected one of {', '.join(_DTYPES)}")
        elif value in _DTYPES:
            return value
        else:
            self.refuse(key, value, f"supported are {', '.join(_DTYPES)}")
        return ""

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids, from `generation_config.json` if it has them, else from `config.json`;
        those beyond the vocabulary, which no model says, are left out beside others."""
        place, value = "generation_config.json: ", self.generation_values.get(key)
        if value is None:
            place, value = "", self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(map(is_whole, ids)):
            self.expect(f"{place}{key}", value, f"a token id or a list of them, from 0 to {LARGEST_SIZE}")
            return ()
        within = [item for item in ids if item < vocab_size or vocab_size <= 0]
        if ids and not within:
            expected = f"vocab_size is {vocab_size}: name the ids that end answers in generation_config.json"
            self.wrong.append(f"{place}{key} is {as_json(value)}, but {expected}")
        return tuple(dict.fromkeys(within))

    def refuse_unsupported(self) -> None:
        """Note every feature that changes the computation and is not implemented."""
        for key, neutral in _NEUTRAL_VALUES.items():
            value = self.values.get(key)
            if value is not None and value not in neutral and key not in self._known:
                feature = f" ({_FEATURES[key]})" if key in _FEATURES else ""
                self.unsupported.append(f"{key} is {as_json(value)}{feature}, which is not supported")

    def refuse_unknown(self, names: re.Pattern[str]) -> None:
        """Note each field with such a name that is set, and that nobody reads or ignores."""
        for key, value in self.values.items():
            if value and names.match(key) and key not in self._known and key not in _NEUTRAL_VALUES:
                self.refuse(key, value, "which is not known of this family")

    def take_rotary(self, name: str) -> Any:
        """A parameter of the rotary embedding, which is then no longer there for `read_rope`; None where it is not."""
        key = _rope_key(self)
        parameters = self.values.get(key)
        if not isinstance(parameters, dict) or name not in parameters:
            return None
        self.values = self.values | {key: {other: value for other, value in parameters.items() if other != name}}
        return parameters[name]

    def take_rope_of_windows(self, key: str) -> float:
        """The base of the rotary embedding of layers with a window: `key` has it, or `rope_parameters` where that has
        the parameters of both kinds of layers, and is then that of the others, as `read_rope` wants it."""
        parameters, theta = self.values.get("rope_parameters"), self.values.get(key)
        if isinstance(parameters, dict) and any(isinstance(value, dict) for value in parameters.values()):
            own = parameters.get("sliding_attention") or {}
            self.values = self.values | {"rope_parameters": parameters.get("full_attention") or {}}
            name = "rope_parameters: sliding_attention"
            if not isinstance(own, dict) or own.get("rope_type", "default") != "default":
                self.refuse(name, own, "supported is the rope_type default")
                return DEFAULT_THETA
            theta, key = own.get("rope_theta", theta), f"{name}: rope_theta"
        return read_theta(self, key, DEFAULT_THETA if theta is None else theta, DEFAULT_THETA)

    def raise_problems(self) -> None:
        """Raise one error that lists everything found: UnsupportedModelError if a feature is among it."""
        found = f"config.json ({self.family}): {counted(self.unsupported + self.wrong)}"
        if self.unsupported:
            raise UnsupportedModelError(f"{found}\nChoose another model, or a variant without these features.")
        if self.wrong:
            raise CheckpointError(f"{found}\n{TAKE_PUBLISHED}")

    def expect(self, key: str, value: Any, expected: str) -> None:
        """Note a wrong value."""
        self.wrong.append(f"{key} is {as_json(value)}, expected {expected}")

    def refuse(self, key: str, value: Any, supported: str) -> None:
        """Note a value that asks for what is not implemented; `supported` says what is."""
        self.unsupported.append(f"{key} is {as_json(value)}, {supported}")


def counted(problems: Sequence[str]) -> str:
    """How many problems there are, and a line for each."""
    count = f"{len(problems)} problem" + "s" * (len(problems) > 1)
    return f"{count}:\n" + "\n".join(f"  {problem}" for problem in problems)


def first_prefix(prefixes: Sequence[str], names: Iterable[str]) -> str:
    """The first prefix that begins a name, else the first of all."""
    return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)), prefixes[0])


def layer_count(fields: ConfigFields) -> int:
    """`num_hidden_layers`, or 0 where that is wrong, which is noted where it is read."""
    layers = fields.values.get("num_hidden_layers")
    return layers if is_integer(layers) and 0 <= layers <= LARGEST_DEPTH else 0


#: The base of the original rotary embedding; Llama's first releases do not write it down.
DEFAULT_THETA = 10000.0


def read_mrope(
    fields: ConfigFields, rotary_dim: int, default: tuple[int, ...], interleaved: bool
) -> tuple[tuple[int, ...], bool]:
    """How many frequencies follow the position in time, height and width, and whether these are interleaved.

    `default` stands where the file names no sections, `interleaved` is the family's way. Problems are noted in
    `fields`, whose scaling is then without what is read here, as `read_rope` wants it.
    """
    key = _rope_key(fields)
    section, declared = fields.take_rotary("mrope_section"), fields.take_rotary("mrope_interleaved")
    parameters = fields.values.get(key)
    if isinstance(parameters, dict):  # the kind "mrope": the positions alone, with no scaling
        fields.values = fields.values | {key: {name: value for name, value in parameters.items() if value != "mrope"}}
    section = list(default) if section is None else section
    if not isinstance(section, list) or len(section) != 3 or not all(is_integer(size) and size > 0 for size in section):
        fields.expect(f"{key}: mrope_section", section, "three whole numbers above 0")
        return (), interleaved
    if sum(section) != rotary_dim // 2:
        fields.expect(f"{key}: mrope_section", section, f"a sum of {rotary_dim // 2}")
    if declared not in (None, interleaved):
        fields.refuse(f"{key}: mrope_interleaved", declared, f"supported is {as_json(interleaved)}")
    return tuple(section), interleaved


def read_rope(
    fields: ConfigFields, rotary_dim: int, max_position_embeddings: int
) -> tuple[float, dict[str, Any] | None]:
    """The base, and the scaling with its kind under `rope_type` (None: unscaled); problems are noted in `fields`."""
    key = _rope_key(fields)
    parameters = fields.values.get(key)
    if parameters is not None and not isinstance(parameters, dict):
        fields.expect(key, parameters, "an object or null")
        parameters = None
    scaling = {name: value for name, value in (parameters or {}).items() if value is not None}
    thetas = (scaling.pop("rope_theta", None), fields.values.get("rope_theta"), DEFAULT_THETA)
    theta = read_theta(fields, "rope_theta", next(theta for theta in thetas if theta is not None), 0.0)
    if nested := [name for name, value in scaling.items() if isinstance(value, dict)]:
        fields.unsupported.append(f"{key} differs between layers ({', '.join(nested)}), which is not supported")
        return theta, None
    return theta, _scaling(fields, key, scaling, rotary_dim, max_position_embeddings)


def read_theta(fields: ConfigFields, key: str, theta: Any, fallback: float) -> float:
    """A base of the rotary embedding as a file has it; `fallback` stands for what is wrong, which is noted."""
    if is_number(theta) and 1 < theta <= LARGEST_THETA:
        return float(theta)
    fields.expect(key, theta, f"a number above 1 up to {LARGEST_THETA:g}")
    return fallback


def _rope_key(fields: ConfigFields) -> str:
    return "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"


def _scaling(
    fields: ConfigFields, key: str, scaling: dict[str, Any], rotary_dim: int, max_position_embeddings: int
) -> dict[str, Any] | None:
    kinds = scaling.pop("rope_type", None), scaling.pop("type", None)
    kind = kinds[0] or kinds[1] or "default"
    if "mrope_section" in scaling:
        fields.unsupported.append(f"{key}: mrope_section (positions in several dimensions) is not supported")
    partial = 1 if kind == "proportional" else scaling.pop("partial_rotary_factor", 1)
    if partial != 1:
        fields.refuse(f"{key}: partial_rotary_factor", partial, "which is not supported")
    if not isinstance(kind, str) or kind not in ("default", *SCALINGS):
        fields.refuse(f"{key}: rope_type", kind, f"supported are default, {', '.join(SCALINGS)}")
        return None
    if FAR_SCALING in scaling and kind != "yarn":
        fields.unsupported.append(f"{key}: {FAR_SCALING} is supported with the rope_type yarn alone, found {kind}")
    if kind == "default":
        return None
    scaling = {"rope_type": kind, **scaling}
    if kind in ("llama3", "yarn", "longrope"):
        length = fields.values.get(TRAINED_LENGTH)  # Phi-3 writes it outside, and there it takes precedence
        if length is None:
            length = scaling.get(TRAINED_LENGTH, max_position_embeddings)
        scaling[TRAINED_LENGTH] = int(length) if is_number(length) and length == int(length) else length
    if rotary_dim and max_position_embeddings:
        fields.wrong += [f"{key}: {problem}" for problem in scaling_problems(scaling, rotary_dim)]
    return scaling
