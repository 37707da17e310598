"""The description of EAGLE draft heads: EAGLE-1 and 2 (Li et al. 2024), EAGLE-3 (Li et al. 2025) and 3.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.model.config import DRAFT_EMBEDDING, DRAFT_HEAD, DraftConfig, EngineShape, WeightSpec
from edgellm.engines.model.decoder import LayerDescription, layer_weights, single_weight
from edgellm.engines.model.operations import Operations, Tensor

Buffer = TypeVar("Buffer")

_LAYER = "layers.0."
MAPPING = "d2t"


def draft_weights(config: DraftConfig) -> list[WeightSpec]:
    """Every weight of the head's own, in order of use, named as EAGLE's `layers.0` layout names them."""
    hidden, prefix, layer = config.hidden_size, config.checkpoint_prefix, config.layer_prefix
    is_first = config.generation == "1"
    specs = []

    def add(name: str, *shape: int, source: str = prefix) -> None:
        specs.append(single_weight(name, *shape, source=f"{source}{name}"))

    if config.has_embedding:
        add(DRAFT_EMBEDDING, config.decoder.vocab_size, hidden)
    if config.feature_norm == "each":
        for index in range(len(config.feature_layers)):
            add(f"fc_norm.{index}.weight", hidden)
    elif config.feature_norm == "whole":
        add("input_norm.weight", config.feature_size)
    add("fc.weight", hidden, 2 * hidden if is_first else config.feature_size)
    if config.fc_bias:
        add("fc.bias", hidden)
    if not is_first:
        for name in ("input_layernorm.weight", "hidden_norm.weight"):
            specs.append(single_weight(f"{_LAYER}{name}", hidden, source=f"{layer}{name}"))
    specs += layer_weights(config.decoder, _LAYER, layer, hidden if is_first else 2 * hidden)
    if not is_first:
        add("norm.weight", hidden)
    if config.has_head:
        add(DRAFT_HEAD, config.draft_vocab_size, hidden, source="")
    return specs


def draft_engine_weights(
    config: DraftConfig, phase: str, own: Mapping[str, Buffer], base: Mapping[str, Buffer]
) -> dict[str, Buffer]:
    """What the draft's engines of a phase are bound to: the head's `own` weights without the embedding, and the
    `base`'s head where it has none. Of the phases `propose` only the first generation's has use for `fc`."""
    unused: tuple[str, ...] = (DRAFT_EMBEDDING,)
    if phase == "propose" and config.generation != "1":
        unused += ("fc.", "fc_norm.", "input_norm.")
    weights = {name: weight for name, weight in own.items() if not name.startswith(unused)}
    if not config.has_head:
        weights[config.base_head] = base[config.base_head]
    return weights


def load_draft_to_target(checkpoint: Checkpoint, config: DraftConfig) -> np.ndarray:
    """The base's token id of each draft id, int32 [draft_vocab_size]: `d2t` holds what must be added to the draft id.

    Raises CheckpointError where `d2t` is missing or not of a whole-number type.
    """
    own = np.arange(config.draft_vocab_size, dtype=np.int64)
    return (own + checkpoint.integers(MAPPING) if config.has_mapping else own).astype(np.int32)


class DraftDescription(LayerDescription[Tensor]):
    """Describes a draft head to an interpreter of operations, for one engine shape.

    Phases `prefill` and `accept` take the base's features, `propose` what the head itself put out before.
    """

    def __init__(self, operations: Operations[Tensor], config: DraftConfig, shape: EngineShape) -> None:
        base_head = WeightSpec(config.base_head, (config.decoder.vocab_size, config.hidden_size), ())
        super().__init__(operations, config.decoder, shape, [base_head, *draft_weights(config)])
        self.config = config

    def describe(self) -> None:
        """Declare the inputs of an engine, compute, and declare `logits`, `hidden_states` and the caches."""
        ops, config, shape = self.operations, self.config, self.shape
        embeds = ops.input("inputs_embeds", (shape.batch, shape.tokens, config.hidden_size), "compute")
        positions = self.position_inputs()
        if config.generation == "1":  # its features are normed already, and it predicts the next of them
            normed = hidden = self.selected_rows(self._first_generation(embeds, positions))
        else:
            hidden = self.selected_rows(self._third_generation(embeds, positions))
            normed = self.norm(hidden, "norm.weight")
        ops.output("hidden_states", normed if config.feed_back_normed else hidden)
        ops.output("logits", ops.to_float32(ops.linear(normed, self.weight(config.head_name))))

    def _feature_input(self) -> Tensor:
        proposing, config, shape = self.shape.phase == "propose", self.config, self.shape
        name = "hidden_states_from_draft" if proposing else "hidden_states_input"
        width = config.hidden_size if proposing else config.feature_size
        return self.operations.input(name, (shape.batch, shape.tokens, width), "compute")

    def _fc(self, x: Tensor) -> Tensor:
        return self.operations.linear(x, self.weight("fc.weight"), self.bias("fc.bias"))

    def _first_generation(self, embeds: Tensor, positions: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """fc([embedding | feature]) at every step, and a layer whose attention takes it as it is."""
        ops = self.operations
        hidden = self._fc(ops.concatenate([embeds, self._feature_input()], axis=2))
        hidden = ops.add(hidden, self.attention(0, _LAYER, hidden, positions))
        return self._with_mlp(hidden)

    def _third_generation(self, embeds: Tensor, positions: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """fc on the base's features only, and an attention that takes [normed embedding | normed feature]."""
        ops, config = self.operations, self.config
        feature = self._feature_input()
        if self.shape.phase != "propose":
            feature = self._fc(self._normed_features(feature))
        normed = self.norm(feature, f"{_LAYER}hidden_norm.weight")
        embeds = self.norm(embeds, f"{_LAYER}input_layernorm.weight")
        context = self.attention(0, _LAYER, ops.concatenate([embeds, normed], axis=2), positions)
        return self._with_mlp(ops.add(normed if config.norm_before_residual else feature, context))

    def _normed_features(self, features: Tensor) -> Tensor:
        ops, config = self.operations, self.config
        if config.feature_norm == "none":
            return features
        if config.feature_norm == "whole":
            return self.norm(features, "input_norm.weight")
        count = len(config.feature_layers)
        if count == 1:
            return self.norm(features, "fc_norm.0.weight")
        parts = ops.split(features, (config.hidden_size,) * count, axis=2)
        normed = [self.norm(part, f"fc_norm.{index}.weight") for index, part in enumerate(parts)]
        return ops.concatenate(normed, axis=2)

    def _with_mlp(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden, f"{_LAYER}post_attention_layernorm.weight")
        return self.operations.add(hidden, self.mlp(_LAYER, normed))
