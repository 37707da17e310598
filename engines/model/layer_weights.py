"""Makes the weights and steps of a decoder's layer: Llama's, and what other families change in it by parameters."""

from __future__ import annotations

from dataclasses import replace

from edgellm.engines.model.config import DELTA_PROJECTIONS, DecoderConfig, Mixture, WeightSpec
from edgellm.engines.model.named_weights import PUBLISHED, NamedWeights
from edgellm.engines.model.recurrent_steps import GatedDelta, GatedNorm, SelectiveScan, ShortConvolution
from edgellm.engines.model.row_steps import TOKEN_ROWS, TokenInputs
from edgellm.engines.model.states import DeltaMatrix, SpaceMatrix
from edgellm.engines.model.steps import (
    AddResidual,
    Attention,
    Experts,
    Input,
    Keep,
    Linear,
    LinearResidual,
    Norm,
    NormLinear,
    NormParts,
    Step,
)

#: What the embeddings of a step's tokens, and their own of each layer, let through in each layer's block of these.
TOKEN_INPUTS = "token_inputs"
#: Of the weights of convolutions and decays: they are small, and a decay counts once for each token behind it.
_SMALL = "float32"


class LayerWeights(NamedWeights):
    """Makes the weights and steps of a decoder's layer."""

    def __init__(self, config: DecoderConfig, prefix: str, source: str) -> None:
        super().__init__(prefix, source, PUBLISHED[config.naming])
        self._config = config

    def norm(self, name: str, size: int | None = None, offset: float | None = None) -> Norm:
        """The model's kind of norm, by default of the hidden size, and with the model's own offset."""
        config, width = self._config, size or self._config.hidden_size
        weight = self.weight(f"{name}.weight", width)
        bias = self.weight(f"{name}.bias", width) if config.layer_norms else None
        return Norm(weight, config.rms_norm_eps, bias, config.norm_offset if offset is None else offset)

    def input(self, value: str, norm: str) -> Input:
        """What attention or an MLP takes: `value` behind the norm of that name, where the model norms before layers."""
        return Input(value, (self.norm(norm),) if self._config.pre_norms else ())

    def attention(
        self,
        index: int,
        inputs: tuple[Input, ...],
        masks_all: bool = False,
        keep: Keep | None = None,
        windows: bool = False,
        ahead: bool = False,
    ) -> list[Step]:
        """The steps from the `inputs` of the q, k and v projections to the value "context"; see `Attention`,
        `NormLinear`. `windows`: the context is longer than those that layers look back on; `ahead`: tokens look
        ahead."""
        config, in_window = self._config, self._config.layer_kind(index) == "window"
        (kv_heads, size), scale, rows_layer = config.kv_heads(index), config.attention_scale, config.rows_layer(index)
        query_size, kv_size = config.num_heads * size, kv_heads * size
        queries = query_size * (2 if config.attention_gate else 1)
        of_values = "k_proj" if config.values_are_keys and not in_window else "v_proj"
        parts = [("q_proj", queries), ("k_proj", kv_size), (of_values, kv_size)]
        if config.fused_projections:
            parts = [("qkv_proj", queries + 2 * kv_size)]
        ending = self.value_ending(index)
        value = f"qkv{ending}"
        widths = (query_size, kv_size) if config.joint_qk_norm else (size, size)
        names = ("self_attn.q_norm", "self_attn.k_norm") if config.qk_norm else ()
        prefix = f"model.layers.{rows_layer}."
        owners = self, self if rows_layer == index else LayerWeights(config, prefix, prefix)
        norms = tuple(owner.norm(name, width) for owner, name, width in zip(owners, names, widths, strict=False))
        behind: list[Step] = [NormParts(value, value, norms)] if norms and config.joint_qk_norm else []
        q_norm, k_norm = norms if norms and not behind else (None, None)
        if rows_layer != index:  # keys and values are there from that layer, and are written once more, as they are
            linear = self.linear("self_attn.q_proj", queries, len(inputs) * config.hidden_size, config.attention_bias)
            before: list[Step] = [NormLinear(value, inputs, linear, keep=keep, into=value)]
        else:
            qkv = self.linear("self_attn.qkv_proj", parts, len(inputs) * config.hidden_size, config.attention_bias)
            before = [NormLinear(value, inputs, qkv, keep=keep)]
        is_local = in_window and config.local_rope_theta is not None
        attention = Attention(
            f"context{ending}",
            value,
            rows_layer,
            (config.num_heads, kv_heads, size),
            size**-0.5 if scale is None else scale,
            0 if index in config.nope_layers else config.local_rotary_dim if is_local else config.rotary_dim,
            q_norm,
            k_norm,
            masks_all,
            config.attention_gate,
            config.sliding_window if in_window and windows else None,
            config.rotary_dim if is_local else 0,
            ahead and (in_window or not config.images_vary),
            self.weight("self_attn.sinks", config.num_heads) if config.attention_sinks else None,
            config.rotary_dim if config.scales_far_queries and index not in config.nope_layers else 0,
            config.rotates_neighbours,
            config.norms_behind_rotation,
            config.scores_cap,
            config.value_norms,
        )
        return [*before, *behind, attention]

    def value_ending(self, index: int) -> str:
        """What ends the names of values that layers of one kind have: of another they may be of another width, and
        those of the last layer with rows are taken by the layers that share these."""
        config = self._config
        return "_full" if config.layers_differ and config.layer_kind(index) == "attention" else ""

    def key_value_rows(self, index: int, taken: Input, keep: Keep | None) -> list[Step]:
        """The steps that write keys and values of what is `taken` into the layer's rows; nothing attends."""
        config, heads, size = self._config, self._config.num_kv_heads, self._config.head_dim
        parts = {"k_proj": config.kv_size, "v_proj": config.kv_size}
        linear = self.linear("self_attn.kv_proj", parts, config.hidden_size, config.attention_bias)
        k_norm = self.norm("self_attn.k_norm", size) if config.qk_norm else None
        rows = Attention("written", "kv", index, (0, heads, size), 1.0, config.rotary_dim, None, k_norm)
        return [NormLinear("kv", (taken,), linear, keep=keep), rows]

    def convolution(self, index: int, normed: Input) -> tuple[list[Step], Linear]:
        """LFM2's gated short convolution, to "convolved", and what that goes through."""
        hidden, width, bias = self._config.hidden_size, self._config.conv_width, self._config.conv_bias
        project = self.linear("conv.in_proj", 3 * hidden, hidden, bias)
        weight = self.weight("conv.conv.weight", hidden, width, dtype=_SMALL, part=(hidden, 1, width))
        offset = self.weight("conv.conv.bias", hidden, dtype=_SMALL) if bias else None
        convolve = ShortConvolution("convolved", "projected", index, hidden, width, weight, offset, gated=True)
        output = self.linear("conv.out_proj", hidden, hidden, bias)
        return [NormLinear("projected", (normed,), project), convolve], output

    def delta(self, index: int, normed: Input) -> tuple[list[Step], Linear]:
        """Qwen3.5's gated delta net, to "recalled", and what that goes through. One linear layer projects queries, keys
        and values, the gate z of the norm, and the gates b and a of the rule, or several, as `delta_products` says."""
        config, channels, width = self._config, self._config.delta_channels, self._config.conv_width
        key_heads, heads, key_size, size = config.delta_heads
        projected, places = self._delta_projections(normed, (channels, heads * size, heads, heads))
        (values, _), gate, (gates, first), _ = places
        weight = self.weight("linear_attn.conv1d.weight", channels, width, dtype=_SMALL, part=(channels, 1, width))
        rows, _ = DeltaMatrix(index, (key_heads, heads), (key_size, size)).kept_names
        steps = [
            *projected,
            ShortConvolution(rows, values, index, channels, width, weight, activation="silu"),
            GatedDelta(
                "delta",
                rows,
                gates,
                index,
                (key_heads, heads),
                (key_size, size),
                first,
                self.weight("linear_attn.A_log", heads, dtype=_SMALL),
                self.weight("linear_attn.dt_bias", heads, dtype=_SMALL),
            ),
            GatedNorm("recalled", "delta", *gate, heads, self.norm("linear_attn.norm", size, 0.0)),
        ]
        return steps, self.linear("linear_attn.out_proj", config.hidden_size, heads * size, False)

    def mamba(self, index: int, normed: Input) -> tuple[list[Step], Linear]:
        """Mamba-2's mixer, to "recalled", and what that goes through. One linear layer projects the gate z of the norm,
        x, B and C, which are convolved, and the step sizes."""
        config, channels, width = self._config, self._config.delta_channels, self._config.conv_width
        groups, heads, state_size, size = config.delta_heads
        inner, hidden = heads * size, config.hidden_size
        rows, _ = SpaceMatrix(index, (groups, heads), (state_size, size)).kept_names
        weight = self.weight("mamba.conv1d.weight", channels, width, dtype=_SMALL, part=(channels, 1, width))
        bias = self.weight("mamba.conv1d.bias", channels, dtype=_SMALL) if config.conv_bias else None
        a_log, dt_bias, skip = (self.weight(f"mamba.{name}", heads, dtype=_SMALL) for name in ("A_log", "dt_bias", "D"))
        scan = (groups, heads), (state_size, size), inner + channels, a_log, dt_bias, skip
        steps = [
            NormLinear("projected", (normed,), self.linear("mamba.in_proj", inner + channels + heads, hidden, False)),
            ShortConvolution(rows, "projected", index, channels, width, weight, bias, "silu", first=inner),
            SelectiveScan("scanned", rows, "projected", index, *scan),
            GatedNorm("recalled", "scanned", "projected", 0, groups, self.norm("mamba.norm", inner, 0.0), True),
        ]
        return steps, self.linear("mamba.out_proj", hidden, inner, False)

    def _delta_projections(self, normed: Input, widths: tuple[int, ...]) -> tuple[list[Step], list[tuple[str, int]]]:
        """The linear layers of `DELTA_PROJECTIONS`, and of each projection the value and the column where it begins."""
        parts: dict[str, dict[str, int]] = {}
        places = []
        products = self._config.delta_products or (0,) * len(widths)
        for name, width, number in zip(DELTA_PROJECTIONS, widths, products, strict=True):
            value = f"projected_{number}" if number else "projected"
            own = parts.setdefault(value, {})
            places.append((value, sum(own.values())))
            own[name] = width
        steps: list[Step] = []
        for value, own in parts.items():
            kinds = "in" if len(parts) == 1 else "".join(name.removeprefix("in_proj_") for name in own)
            linear = self.linear(f"linear_attn.{kinds}_proj", own, self._config.hidden_size, False)
            steps.append(NormLinear(value, (normed,), linear))
        return steps, places

    def experts(
        self, mixture: Mixture, normed: Input, residual: str | None, result: str, keep: Keep | None = None
    ) -> Experts:
        """The mixture of experts of `normed` rows, added to the `residual`, as `result`."""
        hidden, count, inner = self._config.hidden_size, mixture.experts, mixture.size
        width, latent = mixture.latent_size or hidden, tuple[Linear, ...]()
        if mixture.latent_size:
            into, back = (f"mlp.fc{number}_latent_proj" for number in (1, 2))
            latent = self.linear(into, width, hidden, False), self.linear(back, hidden, width, False)
        gates = ("gate_up",) if mixture.limit else ("gate", "up") if mixture.gated else ("up",)
        rows = inner * mixture.activation.sums // len(gates)
        first = "gate_up_proj" if mixture.gated else "up_proj"
        gate_up = {f"{expert}.{part}_proj": rows for expert in range(count) for part in gates}
        down = {f"{expert}.down_proj": width for expert in range(count)}
        correction = self.weight("mlp.expert_bias", count, dtype=_SMALL) if mixture.correction else None
        shared: tuple[Linear, ...] = ()
        if mixture.shared_size:
            name, size = "mlp.shared_expert", mixture.shared_size
            shared = (
                self._up(name, size, mixture.gated, False),
                self.linear(f"{name}.down_proj", hidden, size, False),
                *((self.linear(f"{name}_gate", 1, hidden, False),) if mixture.shared_gate else ()),
            )
        beside = mixture.beside_mlp
        return Experts(
            result,
            normed,
            residual,
            mixture,
            self.linear("mlp.gate", count, hidden, mixture.biases),
            self.linear_of_experts(f"mlp.experts.{first}", gate_up, width, count, mixture.biases),
            self.linear_of_experts("mlp.experts.down_proj", down, inner, count, mixture.biases),
            correction,
            self._config.residual_scale,
            shared,
            keep,
            latent,
            scored=Input(normed.value, (self.norm("mlp.gate_scale"),)) if beside else None,
            scales=self.weight("mlp.expert_scales", count, dtype=_SMALL) if beside else None,
        )

    def residual(
        self,
        residual: str,
        selects: bool,
        keep: Keep | None = None,
        mixed: str | None = None,
        output: Linear | None = None,
        index: int = 0,
    ) -> list[Step]:
        """The steps from the value `mixed`, which goes through `output` (both attention's own where None), and the
        `residual` through the MLP of layer `index`, if it has one, to "hidden", or with `selects` to "selected"."""
        config = self._config
        if output is None or mixed is None:
            width, mixed = config.num_heads * config.kv_heads(index)[1], f"context{self.value_ending(index)}"
            output = self.linear("self_attn.o_proj", config.hidden_size, width, config.attention_output_bias)
        result, before, of_attention = "selected" if selects else "hidden", "post_attention_layernorm", None
        if config.post_norms:
            of_attention, before = self.norm(before), "pre_feedforward_layernorm"
        attended = LinearResidual(result, mixed, output, residual, config.residual_scale, keep, selects, of_attention)
        if config.lone_parts:
            return [attended]
        return [attended, *self.mlp(index, result, self.input(result, before), result)]

    def mlp(self, index: int, residual: str, normed: Input, result: str, keep: Keep | None = None) -> list[Step]:
        """The MLP of `normed` rows in layer `index`, its mixture of experts or both, added to the `residual`, which
        `keep` gets, and the block of the tokens' own embeddings, as `result`."""
        config, mixture, inner = self._config, self._config.mixture_of(index), self._config.inner_size(index)
        if mixture is not None and not mixture.beside_mlp:
            return [self.experts(mixture, normed, residual, result, keep)]
        activation = "selected_activation" if result == "selected" else "activation"
        activation += "_wide" if inner != config.intermediate_size else ""
        up = self._up("mlp", inner, config.gated_mlp, config.mlp_bias)
        down = self.linear("mlp.down_proj", config.hidden_size, inner, config.mlp_bias)
        norm = self.norm("post_feedforward_layernorm") if config.post_norms else None
        factor = self.weight("layer_scalar", 1, dtype=_SMALL) if config.layer_scalars else None
        of_tokens = self._token_block(index, result, factor) if config.layer_embedding_size else []
        own, scale = None if of_tokens else factor, config.residual_scale
        steps: list[Step] = [NormLinear(activation, (normed,), up, config.hidden_act, config.gated_mlp)]
        if mixture is None:
            steps.append(LinearResidual(result, activation, down, residual, scale, keep, norm=norm, factor=own))
        else:
            sums, given = f"{result}_experts", Input(normed.value, (self.norm("pre_feedforward_layernorm_2"),))
            of_mlp, of_experts = (self.norm(f"post_feedforward_layernorm_{number}") for number in (1, 2))
            steps += [
                self.experts(mixture, given, None, sums),
                NormParts(sums, sums, (of_experts,)),
                LinearResidual(sums, activation, down, sums, norm=of_mlp),
                AddResidual(result, sums, residual, keep, norm=norm, factor=own),
            ]
        return steps + of_tokens

    def _up(self, name: str, size: int, gated: bool, bias: bool) -> Linear:
        """The first layer of an MLP of so many rows, with gates before them where it has such."""
        first, parts = f"{name}.gate_up_proj", {"gate_proj": size, "up_proj": size}
        if not gated:
            first, parts = f"{name}.up_proj", {"up_proj": size}
        elif self._config.fused_projections or first in PUBLISHED[self._config.naming]:
            parts = {"gate_up_proj": 2 * size}
        return self.linear(first, parts, self._config.hidden_size, bias)

    def token_inputs(self, embeddings: str) -> list[Step]:
        """The steps from the `embeddings` of a step's tokens to what they let through in each layer's block."""
        config, hidden, size = self._config, self._config.hidden_size, self._config.layer_embedding_size
        # What is projected is multiplied by H ** -0.5 before its norm: as an epsilon that is H times larger does.
        norm = replace(self.norm("per_layer_projection_norm", size), epsilon=config.rms_norm_eps * hidden)
        projection = self.linear("per_layer_model_projection", config.token_row_size, hidden, False)
        return [
            NormLinear(TOKEN_INPUTS, (Input(embeddings),), projection),
            TokenInputs(TOKEN_INPUTS, TOKEN_INPUTS, TOKEN_ROWS, norm, size**0.5),
        ]

    def _token_block(self, index: int, result: str, factor: WeightSpec | None) -> list[Step]:
        """The steps of a layer's block that its tokens' own embeddings gate, added to the value `result`."""
        hidden, size = self._config.hidden_size, self._config.layer_embedding_size
        gate = self.linear("per_layer_input_gate", size, hidden, False)
        projection = self.linear("per_layer_projection", hidden, size, False)
        after, activation, first = self.norm("post_per_layer_input_norm"), self._config.hidden_act, index * size
        return [
            NormLinear("gated_rows", (Input(result),), gate, activation, through=TOKEN_INPUTS, first=first),
            LinearResidual(result, "gated_rows", projection, result, norm=after, factor=factor),
        ]
