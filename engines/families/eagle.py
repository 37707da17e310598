"""EAGLE draft heads as they are published: by SafeAILab, by SpecForge and SGLang, and by vLLM's speculators.

SafeAILab and SpecForge write the fields of the head's decoder layer at the top level of `config.json`, speculators
below `transformer_layer_config`. What the file leaves open (which biases, which tables of its own) the tensors say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.families.decoders import filled, read_decoder
from edgellm.engines.families.fields import ConfigFields, first_prefix
from edgellm.engines.families.qwen import QWEN3
from edgellm.engines.formats.strict_formats import as_json, is_integer
from edgellm.engines.gguf.architectures import ENTERED_UNLESS_USUAL
from edgellm.engines.model.config import DRAFT_EMBEDDING, DRAFT_HEAD, FAR_SCALING, DecoderConfig, DraftConfig
from edgellm.engines.model.decoder import EMBEDDING, head_weight_name
from edgellm.engines.model.draft_decoder import MAPPING, draft_weights
from edgellm.engines.model.rotary import context_bounds

#: Our own key: false for a head that was trained on the image token's embedding, rather than on the images' rows.
IMAGE_EMBEDDINGS_KEY = "eagle_image_embeddings"
#: Which ids of the base's vocabulary the head has: it follows from `MAPPING`, and must agree with it.
_INVERSE_MAPPING = "t2d"
#: What names the number of a reduced head's logits; the first that is there counts. vLLM's configuration of EAGLE heads
#: writes the second, with the whole vocabulary where a head's own field is another.
_VOCABULARY_KEYS = ("draft_vocab_size", "truncated_vocab_size")
_LAYER_PREFIXES = ("midlayer.", "layers.0.", "model.midlayer.", "model.layers.0.")
#: What a head's decoder layer may be, and which fields its files leave out.
_LAYERS: dict[str | None, dict[str, Any]] = {
    None: {"num_key_value_heads": None},
    "llama": {"num_key_value_heads": None},
    "qwen2": {"num_key_value_heads": None, "use_sliding_window": False},
    "qwen3": {"num_key_value_heads": None, "use_sliding_window": False, "head_dim": QWEN3.defaults["head_dim"]},
}
#: Our own key beside the ids, which says which convention they follow.
CONVENTION_KEY = "eagle_aux_hidden_state_convention"
_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
_CONVENTIONS = ("entered", "output")


class DraftReader:
    """Reads one head; what is wrong with the file lands in `fields`, what does not fit the base in `problems`."""

    #: The layers of its decoder.
    most_layers = 1

    def __init__(self, draft: Checkpoint, base: Checkpoint, base_config: DecoderConfig) -> None:
        self.draft, self.base, self.base_config = draft, base, base_config
        self.top: dict[str, Any] = draft.config
        self.problems: list[str] = []
        layer, eagle = self.top.get("transformer_layer_config"), self.top.get("eagle_config")
        self.is_speculators = "speculators_model_type" in self.top or layer is not None
        self.fields = ConfigFields(layer if isinstance(layer, dict) else self.top, None, "draft", draft.dtype)
        self.eagle: dict[str, Any] = eagle if isinstance(eagle, dict) else {}
        for key, value in (("transformer_layer_config", layer), ("eagle_config", eagle)):
            if value is not None and not isinstance(value, dict):
                self.fields.expect(key, value, "an object")
        self.layer_prefix = first_prefix(_LAYER_PREFIXES, draft.tensors)
        self.prefix = "model." if self.layer_prefix.startswith("model.") else ""

    def read(self) -> DraftConfig | None:
        """The configuration; of use only where no problem was found."""
        is_first = self._is_first_generation()
        decoder = self._decoder()
        self._compare_with_base(decoder)
        norm = "none" if is_first else self._feature_norm()
        feed_back = bool(self._declared("norm_output")) and not is_first
        layers = (self.base_config.num_layers,) if is_first else self.feature_layers()
        if self.fields.wrong or self.fields.unsupported:
            return None
        generation = "1" if is_first else "3.1" if norm != "none" or feed_back else "3"
        return self._config(
            generation,
            decoder,
            feature_layers=layers,
            feature_norm=norm,
            fc_bias=self._has("fc.bias", self._declared("bias"), self.prefix),
            norm_before_residual=bool(self._declared("norm_before_residual")) and not is_first,
            feed_back_normed=feed_back,
            image_embeddings=self._declared(IMAGE_EMBEDDINGS_KEY) is not False,
        )

    def _config(self, generation: str, decoder: DecoderConfig, **own: Any) -> DraftConfig:
        """The configuration, checked, with what follows of the tensors; `own` is what the kind of draft adds."""
        is_first = generation == "1"
        vocab_size = self._draft_vocab_size(decoder.vocab_size, is_first)
        is_reduced = vocab_size != decoder.vocab_size
        return self._checked(
            DraftConfig(
                generation=generation,
                decoder=decoder,
                draft_vocab_size=vocab_size,
                has_mapping=not is_first and (MAPPING in self.draft.tensors or is_reduced),
                layer_prefix=self.layer_prefix,
                has_embedding=f"{self.prefix}{DRAFT_EMBEDDING}" in self.draft.tensors,
                has_head=not is_first and (self.draft.has_weight(DRAFT_HEAD) or is_reduced),
                base_embedding=EMBEDDING,
                base_head=head_weight_name(self.base_config),
                **own,
            )
        )

    def _is_first_generation(self) -> bool:
        """Whether it is, by what `config.json` says; most heads call themselves LlamaForCausalLM, and there the tensors
        say it."""
        kind = self.top.get("speculators_model_type")
        if self.is_speculators:
            if kind != "eagle3":
                self.fields.refuse("speculators_model_type", kind, "supported is eagle3")
            return False
        architectures = self.top.get("architectures")
        name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
        if "eagle" in name.lower():
            return "eagle3" not in name.lower()
        return not any(tensor.endswith("hidden_norm.weight") for tensor in self.draft.tensors)

    def _decoder(self) -> DecoderConfig:
        fields, attention = self.fields, f"{self.layer_prefix}self_attn."
        model_type = fields.values.get("model_type")
        if not isinstance(model_type, str | None) or model_type not in _LAYERS:
            fields.refuse("model_type", model_type, f"supported are {', '.join(filter(None, _LAYERS))}")
            model_type = None
        fields.values = filled(fields.values, _LAYERS[model_type])
        layers = fields.size("num_hidden_layers")
        if layers > self.most_layers:
            fields.refuse("num_hidden_layers", layers, "supported are heads of one layer")
        declared = self._declared("qkv_bias")
        if declared is None:
            declared = self._declared("attention_bias")
        base, scalings = self.base_config, [fields.values.get(key) for key in ("rope_scaling", "rope_parameters")]
        # Whether the head was trained with positions in time, height and width; else rows are its positions.
        has_mrope = any(isinstance(scaling, dict) and "mrope_section" in scaling for scaling in scalings)
        decoder = read_decoder(
            fields,
            mrope=(base.mrope_section, base.mrope_interleaved) if has_mrope else ((), False),
            attention_bias=self._has("q_proj.bias", declared, attention),
            attention_output_bias=self._has("o_proj.bias", None, attention),
            mlp_bias=self._has("gate_proj.bias", self._declared("mlp_bias"), f"{self.layer_prefix}mlp."),
            qk_norm=self._has("q_norm.weight", None, attention),
        )
        windows = () if decoder.sliding_window is None else ("sliding_window",)
        far = (FAR_SCALING,) if decoder.scales_far_queries else ()
        for name in dict.fromkeys((*windows, *far, *context_bounds(decoder))):
            fields.unsupported.append(f"{name} is there, supported are heads without it")
        return decoder

    def _compare_with_base(self, decoder: DecoderConfig) -> None:
        base = self.base_config
        for key, found, wanted in (
            ("hidden_size", decoder.hidden_size, base.hidden_size),
            ("vocab_size", decoder.vocab_size, base.vocab_size),
            ("target_hidden_size", self.top.get("target_hidden_size"), base.hidden_size),
        ):
            if found and found != wanted:
                self.problems.append(f"{key} is {as_json(found)}, the base has {wanted}")

    def _feature_norm(self) -> str:
        each = self._has("fc_norm.0.weight", self._declared("fc_norm"), self.prefix)
        whole = self._has("input_norm.weight", self._declared("norm_before_fc"), self.prefix)
        if each and whole:
            self.fields.wrong.append("both fc_norm and norm_before_fc are set, expected one of them")
        if self._declared("use_aux_hidden_state") is False:
            self.fields.refuse("use_aux_hidden_state", False, "supported are heads that take hidden states")
        return "each" if each else "whole" if whole else "none"

    def _draft_vocab_size(self, vocab_size: int, is_first: bool) -> int:
        """The size that `config.json` says; where it names no reduced vocabulary, the tensors do."""
        if is_first:
            return vocab_size
        named = [(key, self.top[key]) for key in _VOCABULARY_KEYS if self.top.get(key) is not None]
        key, value = named[0] if named else ("", None)
        if not named or (key != _VOCABULARY_KEYS[0] and value == vocab_size):
            key, value = "vocab_size", vocab_size  # of a head that has neither mapping nor head
            for name, dimensions in ((DRAFT_HEAD, 2), (MAPPING, 1)):
                info = self.draft.tensors.get(name)
                if info is not None and len(info.shape) == dimensions:
                    key, value = f"the length of {name}", info.shape[0]
        if not is_integer(value) or not 1 <= value <= vocab_size:
            self.problems.append(f"{key} is {as_json(value)}, expected a whole number from 1 to {vocab_size}")
            return vocab_size
        return value

    def _checked(self, config: DraftConfig) -> DraftConfig:
        """Compare with the tensors, then leave out the tables that equal the base's."""
        integers: dict[str, tuple[int, ...]] = {}
        if config.has_mapping:
            integers[MAPPING] = (config.draft_vocab_size,)
            if _INVERSE_MAPPING in self.draft.tensors:
                integers[_INVERSE_MAPPING] = (config.decoder.vocab_size,)
        specs = draft_weights(config)
        is_first_with_head = config.generation == "1" and DRAFT_HEAD in self.draft.tensors
        shares_head = (config.has_head or is_first_with_head) and self._equals_base(DRAFT_HEAD, config.base_head)
        found = self.draft.problems(specs, integers)
        if is_first_with_head and shares_head:
            found = [problem for problem in found if not problem.startswith(f"unknown: {DRAFT_HEAD} ")]
        self.problems += dict.fromkeys(found)  # a tensor may fill several weights
        if not found and config.has_mapping:
            self.problems += self._mapping_problems(config)
        shares_embedding = config.has_embedding and self._equals_base(f"{self.prefix}{DRAFT_EMBEDDING}", EMBEDDING)
        return replace(
            config,
            has_embedding=config.has_embedding and not shares_embedding,
            has_head=config.has_head and not shares_head,
        )

    def _equals_base(self, name: str, base_name: str) -> bool:
        own, other = self.draft.tensors.get(name), self.base.tensors.get(base_name)
        if own is None or other is None or (own.dtype, own.shape) != (other.dtype, other.shape):
            return False
        return np.array_equal(self.draft.raw_bytes(name), self.base.raw_bytes(base_name))

    def _mapping_problems(self, config: DraftConfig) -> list[str]:
        """What is wrong with the values of `d2t` and `t2d`."""
        vocab_size, offsets = config.decoder.vocab_size, self.draft.integers(MAPPING)
        targets = offsets + np.arange(config.draft_vocab_size)
        outside = np.flatnonzero((targets < 0) | (targets >= vocab_size))
        if outside.size:
            first = outside[0]
            return [
                f"{MAPPING} maps {outside.size} draft ids out of the base's vocabulary of {vocab_size}: the first is "
                f"{first} (offset {offsets[first]}, id {targets[first]})"
            ]
        ids, counts = np.unique(targets, return_counts=True)
        if ids.size < targets.size:
            twice = ids[counts > 1]
            return [f"{MAPPING} maps several draft ids to {_listed(twice)}; each id of the base may be there once"]
        if _INVERSE_MAPPING in self.draft.tensors:
            differing = np.setxor1d(ids, np.flatnonzero(self.draft.integers(_INVERSE_MAPPING)))
            if differing.size:
                return [f"{_INVERSE_MAPPING} disagrees with {MAPPING} on {differing.size} ids, as {_listed(differing)}"]
        return []

    def feature_layers(self) -> tuple[int, ...]:
        """The layers of the base whose inputs are the head's features, ascending."""
        count, fields = self.base_config.num_layers, self.fields
        usual = (2, count // 2, count - 3)
        named = [values[_IDS_KEY] for values in (self.top, self.eagle) if values.get(_IDS_KEY) is not None]
        if not named:
            if len(set(usual)) < len(usual) or min(usual) < 1:
                fields.wrong.append(
                    f"{_IDS_KEY} is missing: a base of {count} layers has no usual ones, expected at least 7 layers"
                )
            return usual
        ids = named[0]
        if not isinstance(ids, list) or not ids or not all(is_integer(value) for value in ids):
            fields.expect(_IDS_KEY, ids, "a list of layers")
            return usual
        if any(other != ids for other in named):
            fields.wrong.append(f"{_IDS_KEY} is {as_json(named[0])} in one place and {as_json(named[1])} in another")
        convention = self._convention(ids, usual)
        layers = tuple(value + 1 if convention == "output" else value for value in ids)
        self.check_entered(layers, f"{_IDS_KEY} is {as_json(ids)}, by the convention {convention!r}")
        return layers

    def check_entered(self, layers: tuple[int, ...], said: str) -> None:
        """Note layers that the base does not have, or that are not ascending; `said` is what names them."""
        count = self.base_config.num_layers
        if list(layers) != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] < count:
            expected = f"expected distinct ones from 1 to {count - 1}, ascending"
            self.fields.wrong.append(f"{said} the layers entered are {list(layers)}; {expected}")

    def _convention(self, ids: list[int], usual: tuple[int, ...]) -> str:
        """The convention by our own key, by speculators' format, or because the ids are the usual layers by one
        convention alone."""
        declared = self.top.get(CONVENTION_KEY, self.eagle.get(CONVENTION_KEY))
        is_usual = tuple(value + 1 for value in ids) == usual
        if declared in _CONVENTIONS:
            return declared
        if declared == ENTERED_UNLESS_USUAL:
            return "output" if is_usual else "entered"
        if declared is not None:
            self.fields.expect(CONVENTION_KEY, declared, f"one of {', '.join(_CONVENTIONS)}")
        elif is_usual and not self.is_speculators:
            return "output"
        elif tuple(ids) != usual and not self.is_speculators:
            self.fields.wrong.append(
                f"{_IDS_KEY} is {as_json(ids)}, and nothing says whether these layers are entered or left: add "
                f'"{CONVENTION_KEY}": "output" (SpecForge, SGLang) or "entered" (vLLM) to config.json'
            )
        return "entered"

    def _declared(self, key: str) -> bool | None:
        for values in (self.top, self.fields.values, self.eagle):
            if (value := values.get(key)) is not None:
                if isinstance(value, bool):
                    return value
                problem = f"{key} is {as_json(value)}, expected true or false"
                if problem not in self.fields.wrong:
                    self.fields.wrong.append(problem)
        return None

    def _has(self, tensor: str, declared: bool | None, prefix: str) -> bool:
        """Whether a tensor belongs to the head: as `config.json` says, else where it is there."""
        return f"{prefix}{tensor}" in self.draft.tensors if declared is None else declared


def _listed(ids: np.ndarray) -> str:
    return ", ".join(str(value) for value in ids[:5]) + (", ..." if len(ids) > 5 else "")
