"""What the programs of vision encoders share: named weights, the towers of CLIP and SigLIP, MLPs, projections."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgellm.engines.model.audio import AudioConfig
from edgellm.engines.model.encoder_steps import EncoderAttention, Prepend
from edgellm.engines.model.named_weights import NamedWeights
from edgellm.engines.model.steps import Add, Input, Linear, LinearResidual, Norm, Normed, NormLinear, Step
from edgellm.engines.model.vision import VisionConfig

TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."
#: What a layer that gives queries, keys and values is made of.
QKV = ("q_proj", "k_proj", "v_proj")


class TowerWeights(NamedWeights):
    """Makes the weights and norms of one part of a checkpoint."""

    def __init__(self, prefix: str, source: str, epsilon: float = 0.0) -> None:
        super().__init__(prefix, source)
        self._epsilon = epsilon

    def rms_norm(self, name: str, size: int, offset: float = 0.0) -> Norm:
        """A norm by a weight [H] and an offset."""
        return Norm(self.weight(f"{name}.weight", size), self._epsilon, offset=offset)

    def layer_norm(self, name: str, size: int) -> Norm:
        """A norm by a weight and a bias [H]."""
        return Norm(self.weight(f"{name}.weight", size), self._epsilon, self.weight(f"{name}.bias", size))

    def convolution(self, name: str, rows: int, kernel: tuple[int, ...], bias: bool) -> Linear:
        """A convolution whose stride is its kernel: one linear layer over flattened patches, [N, product of kernel]."""
        weight = self.weight(f"{name}.weight", rows, math.prod(kernel), part=(rows, *kernel))
        return Linear(f"{self._prefix}{name}", weight, self.weight(f"{name}.bias", rows) if bias else None)

    def mlp(self, names: str, config: VisionConfig | AudioConfig) -> tuple[Linear, Linear]:
        """The two linear layers of an MLP without a gate, called `names` with their numbers in it."""
        hidden, inner = config.hidden_size, config.intermediate_size
        return self.linear(names.format(1), inner, hidden), self.linear(names.format(2), hidden, inner)


def used_layers(config: VisionConfig) -> int:
    """How many layers are computed: those behind the last hidden state that is taken are not."""
    return max(config.feature_layers)


def tower_steps(config: VisionConfig, tower: TowerWeights) -> list[Step]:
    """CLIP or SigLIP, from "patches" to "hidden_0" and the outputs of layers, "hidden_1" and on. Every image has the
    same number of patches, in reading order: nothing is padded."""
    hidden, rows = config.hidden_size, config.tower_rows
    patch = (config.in_channels, config.patch_size, config.patch_size)
    embedding = tower.convolution("embeddings.patch_embedding", hidden, patch, bias=not config.class_token)
    steps: list[Step] = [NormLinear("hidden_0", (Input("patches"),), embedding)]
    if config.class_token:
        steps.append(Prepend("hidden_0", "hidden_0", tower.weight("embeddings.class_embedding", hidden)))
    steps.append(Add("hidden_0", "hidden_0", tower.weight("embeddings.position_embedding.weight", rows, hidden)))
    if config.class_token:
        norm = tower.layer_norm("pre_layrnorm", hidden)  # spelt so in every published checkpoint
        steps.append(Normed("hidden_0", "hidden_0", norm))
    return [*steps, *layer_steps(config, tower, rows)]


def layer_steps(
    config: VisionConfig, tower: TowerWeights, rows: int, mask: str | None = None, layers: range | None = None
) -> list[Step]:
    """Those `layers` of CLIP and SigLIP (None: all) on so many rows, of which those that `mask` names are seen."""
    steps = list[Step]()
    for index in range(used_layers(config)) if layers is None else layers:
        layer, value, result = f"encoder.layers.{index}.", f"hidden_{index}", f"hidden_{index + 1}"
        steps += self_attention_steps(config, tower, layer, value, result, (1, rows), mask)
        second = tower.layer_norm(f"{layer}layer_norm2", config.hidden_size)
        steps += mlp_steps(result, second, *tower.mlp(f"{layer}mlp.fc{{}}", config), config.activation)
    return steps


def self_attention_steps(
    config: VisionConfig,
    tower: TowerWeights,
    layer: str,
    value: str,
    result: str,
    windows: tuple[int, int],
    mask: str | None = None,
) -> list[Step]:
    """Attention of CLIP and SigLIP, within windows, whose weights are those of a `layer`."""
    hidden = config.hidden_size
    qkv = tower.linear(f"{layer}self_attn.qkv_proj", dict.fromkeys(QKV, hidden), hidden)
    output = tower.linear(f"{layer}self_attn.out_proj", hidden, hidden)
    attention = EncoderAttention("context", "qkv", config.num_heads, config.head_dim, windows, mask)
    return attention_steps(value, tower.layer_norm(f"{layer}layer_norm1", hidden), qkv, attention, output, result)


def attention_steps(
    value: str, norm: Norm, qkv: Linear, attention: EncoderAttention, output: Linear, result: str = ""
) -> list[Step]:
    """Attention on the residual stream `value`, which becomes `result` (nothing: stays under its name)."""
    joined = NormLinear(attention.value, (Input(value, (norm,)),), qkv)
    return [joined, attention, LinearResidual(result or value, attention.output, output, value)]


def mlp_steps(
    value: str, norm: Norm, first: Linear, second: Linear, activation: str, gated: bool = False
) -> list[Step]:
    """An MLP on the residual stream `value`."""
    return [
        NormLinear("activation", (Input(value, (norm,)),), first, activation, gated=gated),
        LinearResidual(value, "activation", second, value),
    ]


def projection_steps(output: str, values: Sequence[str], linears: tuple[Linear, Linear], activation: str) -> list[Step]:
    """The projection from the `values`, side by side, to the width of the language model."""
    inputs = tuple(Input(value) for value in values)
    return [
        NormLinear("projected", inputs, linears[0], activation),
        NormLinear(output, (Input("projected"),), linears[1]),
    ]
