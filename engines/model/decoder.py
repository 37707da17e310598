"""The program of decoder-only transformers: Llama's layers, and what other families change in them by parameters."""

from __future__ import annotations

from dataclasses import replace

from edgellm.engines.model.config import DELTA_PROJECTIONS, HEADS, RECURRENT_KINDS, DecoderConfig, Mixture, WeightSpec
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.named_weights import PUBLISHED, NamedWeights
from edgellm.engines.model.program import Program, kept_states, single_weight, state_inputs, token_inputs
from edgellm.engines.model.recurrent_steps import GatedDelta, GatedNorm, SelectiveScan, ShortConvolution
from edgellm.engines.model.states import DeltaMatrix, Edge, SpaceMatrix
from edgellm.engines.model.steps import (
    LAST_SEEN,
    Add,
    Attention,
    Experts,
    Input,
    Keep,
    Linear,
    LinearResidual,
    Norm,
    NormLinear,
    NormParts,
    Scale,
    Step,
)
from edgellm.kernels.quantization.packed_weight import WeightFormat

#: Columns of a packed head of 4 bits that may share a scale, best first: fewer are better, and take more memory.
HEAD_GROUPS = (128, 64, 32)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

#: By `DecoderConfig.naming`, what begins the names of tensors beside the decoder's: of a draft head.
_UNREAD = dict.fromkeys(("qwen3_5", "nemotron_h"), ("mtp.",))
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
        queries = config.query_size * (2 if config.attention_gate else 1)
        parts = {"q_proj": queries, "k_proj": config.kv_size, "v_proj": config.kv_size}
        if config.fused_projections:
            parts = {"qkv_proj": sum(parts.values())}
        qkv = self.linear("self_attn.qkv_proj", parts, len(inputs) * config.hidden_size, config.attention_bias)
        size, scale = config.head_dim, config.attention_scale
        widths = (config.query_size, config.kv_size) if config.joint_qk_norm else (size, size)
        names = ("self_attn.q_norm", "self_attn.k_norm") if config.qk_norm else ()
        norms = tuple(self.norm(name, width) for name, width in zip(names, widths, strict=False))
        of_all: list[Step] = [NormParts("qkv", "qkv", norms)] if norms and config.joint_qk_norm else []
        q_norm, k_norm = norms if norms and not of_all else (None, None)
        attention = Attention(
            "context",
            "qkv",
            index,
            (config.num_heads, config.num_kv_heads, size),
            size**-0.5 if scale is None else scale,
            0 if index in config.nope_layers else config.rotary_dim,
            q_norm,
            k_norm,
            masks_all,
            config.attention_gate,
            config.sliding_window if in_window and windows else None,
            config.rotary_dim if in_window and config.local_rope_theta is not None else 0,
            ahead,
            self.weight("self_attn.sinks", config.num_heads) if config.attention_sinks else None,
            config.rotary_dim if config.scales_far_queries and index not in config.nope_layers else 0,
            config.rotates_neighbours,
            config.norms_behind_rotation,
            config.scores_cap,
        )
        return [NormLinear("qkv", inputs, qkv, keep=keep), *of_all, attention]

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

    def experts(self, mixture: Mixture, normed: Input, residual: str, result: str, keep: Keep | None) -> Experts:
        """The mixture of experts of `normed` rows, added to the `residual`, as `result`."""
        hidden, count, inner = self._config.hidden_size, mixture.experts, mixture.size
        gates = ("gate_up",) if mixture.limit else ("gate", "up") if mixture.gated else ("up",)
        rows = inner * mixture.activation.sums // len(gates)
        first = "gate_up_proj" if mixture.gated else "up_proj"
        gate_up = {f"{expert}.{part}_proj": rows for expert in range(count) for part in gates}
        down = {f"{expert}.down_proj": hidden for expert in range(count)}
        correction = self.weight("mlp.expert_bias", count, dtype=_SMALL) if mixture.correction else None
        shared: tuple[Linear, ...] = ()
        if mixture.shared_size:
            name, size = "mlp.shared_expert", mixture.shared_size
            shared = (
                self._up(name, size, mixture.gated, False),
                self.linear(f"{name}.down_proj", hidden, size, False),
                *((self.linear(f"{name}_gate", 1, hidden, False),) if mixture.shared_gate else ()),
            )
        return Experts(
            result,
            normed,
            residual,
            mixture,
            self.linear("mlp.gate", count, hidden, mixture.biases),
            self.linear_of_experts(f"mlp.experts.{first}", gate_up, hidden, count, mixture.biases),
            self.linear_of_experts("mlp.experts.down_proj", down, inner, count, mixture.biases),
            correction,
            self._config.residual_scale,
            shared,
            keep,
        )

    def residual(
        self,
        residual: str,
        selects: bool,
        keep: Keep | None = None,
        mixed: str = "context",
        output: Linear | None = None,
        mixture: Mixture | None = None,
    ) -> list[Step]:
        """The steps from the value `mixed`, which goes through `output` (attention's own), and the `residual` through
        the MLP, or its `mixture` of experts, if the layer has one, to "hidden", or with `selects` to "selected"."""
        config = self._config
        if output is None:
            output = self.linear(
                "self_attn.o_proj", config.hidden_size, config.query_size, config.attention_output_bias
            )
        result, before, of_attention = "selected" if selects else "hidden", "post_attention_layernorm", None
        if config.post_norms:
            of_attention, before = self.norm(before), "pre_feedforward_layernorm"
        attended = LinearResidual(result, mixed, output, residual, config.residual_scale, keep, selects, of_attention)
        if config.lone_parts:
            return [attended]
        return [attended, *self.mlp(result, self.input(result, before), mixture)]

    def mlp(
        self, residual: str, normed: Input, mixture: Mixture | None, keep: Keep | None = None, result: str | None = None
    ) -> list[Step]:
        """The MLP of `normed` rows, or its `mixture` of experts, added to the `residual`, as `result` or in its place.
        `keep`: of the residual."""
        config, result = self._config, result or residual
        if mixture is not None:
            return [self.experts(mixture, normed, residual, result, keep)]
        activation = "selected_activation" if result == "selected" else "activation"
        up = self._up("mlp", config.intermediate_size, config.gated_mlp, config.mlp_bias)
        down = self.linear("mlp.down_proj", config.hidden_size, config.intermediate_size, config.mlp_bias)
        of_mlp = self.norm("post_feedforward_layernorm") if config.post_norms else None
        return [
            NormLinear(activation, (normed,), up, config.hidden_act, config.gated_mlp),
            LinearResidual(result, activation, down, residual, config.residual_scale, keep, norm=of_mlp),
        ]

    def _up(self, name: str, size: int, gated: bool, bias: bool) -> Linear:
        """The first layer of an MLP of so many rows, with gates before them where it has such."""
        first, parts = f"{name}.gate_up_proj", {"gate_proj": size, "up_proj": size}
        if not gated:
            first, parts = f"{name}.up_proj", {"up_proj": size}
        elif self._config.fused_projections or first in PUBLISHED[self._config.naming]:
            parts = {"gate_up_proj": 2 * size}
        return self.linear(first, parts, self._config.hidden_size, bias)


def decoder_program(config: DecoderConfig, shape: EngineShape) -> Program:
    """One step of a decoder.

    Its outputs are `logits` [B, selected, V] float32 and, with `feature_layers`, `hidden_states` [B, T, n H]. Behind
    the last attention, or what else mixes tokens, only the rows that get logits go on, unless features of all are taken
    behind it.
    """
    hidden, layers, taps = config.hidden_size, config.num_layers, config.feature_layers
    selects, last = shape.selected < shape.tokens, config.last_mixer
    selects_late = selects and max(*taps, config.deepstack_layers, 0) > last
    inputs = token_inputs(shape, hidden, config.rotary_columns)
    if config.is_recurrent:
        inputs |= state_inputs(shape)
    ahead = looks_ahead(config, shape)
    if ahead:
        inputs[LAST_SEEN] = ((shape.batch, shape.tokens), "int32")
    steps: list[Step] = []
    value = "inputs_embeds"
    if config.embedding_scale != 1.0:
        steps.append(Scale("hidden", value, config.embedding_scale))
        value = "hidden"
    for index in range(layers):
        selecting = selects and not selects_late and index == last
        keep, windows = _tap(taps, index, raw=True), shape.window_rows > 0
        steps += decoder_layer(config, index, value, selecting, keep, windows, ahead)
        value = steps[-1].output
        if shape.phase == "prefill" and index < config.deepstack_layers:
            name = f"deepstack_features_{index}"
            inputs[name] = ((shape.batch, shape.tokens, hidden), "compute")
            steps.append(Add("hidden", "hidden", name))
    final = LayerWeights(config, "model.", "model.").norm("norm")
    name = head_weight_name(config)
    head = Linear(name.removesuffix(".weight"), single_weight(name, config.vocab_size, hidden))
    keep = _tap(taps, layers)
    normed = Input(value, (final,))
    scale, cap = config.logits_scale, config.logits_cap
    steps.append(NormLinear("logits", (normed,), head, scale=scale, keep=keep, selects=selects_late, cap=cap))
    outputs: Edge = {"logits": ((shape.batch, shape.selected, config.vocab_size), "float32")}
    if taps:
        outputs["hidden_states"] = ((shape.batch, shape.tokens, len(taps) * hidden), "compute")
    outputs |= kept_states(steps, shape)
    return Program(shape, inputs, tuple(steps), outputs, wide_residual=True)


def looks_ahead(config: DecoderConfig, shape: EngineShape) -> bool:
    """Whether tokens of a step may see others behind them: those of an image, which is in a chunk of a prompt as a
    whole, so in none that is shorter."""
    return shape.phase == "prefill" and 0 < config.image_tokens <= shape.tokens


def decoder_layer(
    config: DecoderConfig,
    index: int,
    value: str,
    selects: bool = False,
    keep: Keep | None = None,
    windows: bool = False,
    ahead: bool = False,
) -> list[Step]:
    """The steps of one layer, from the residual stream `value` to "hidden", or with `selects`, or behind a layer with
    it, to "selected"; `windows` and `ahead` as in `LayerWeights.attention`."""
    layer, kind = LayerWeights(config, f"model.layers.{index}.", f"model.layers.{index}."), config.layer_kind(index)
    normed = layer.input(value, "input_layernorm")
    if kind == "mlp":
        result = "selected" if value == "selected" else "hidden"
        return layer.mlp(value, normed, config.mixture_of(index), keep, result)
    if kind in RECURRENT_KINDS:
        steps, output = getattr(layer, kind)(index, normed)
        return steps + layer.residual(value, selects, keep, steps[-1].output, output, config.mixture_of(index))
    # What attention gives is added by a launch of its own where it is normed: features are then taken before it.
    early, late = (keep, None) if config.post_norms else (None, keep)
    steps = layer.attention(index, (normed,), keep=early, windows=windows, ahead=ahead)
    return steps + layer.residual(value, selects, late, mixture=config.mixture_of(index))


def _tap(taps: tuple[int, ...], layer: int, raw: bool = False) -> Keep | None:
    """Where what enters `layer` (or leaves the final norm) belongs in `hidden_states`, if anywhere."""
    return Keep("hidden_states", taps.index(layer), raw) if layer in taps else None


def head_weight_name(config: DecoderConfig) -> str:
    """The weight that turns hidden states into logits: the embedding table itself where the two are tied, unless the
    head is packed."""
    return EMBEDDING if config.tie_word_embeddings and config.head == HEADS[0] else HEAD


def embedding_name(config: DecoderConfig) -> str:
    """The weight whose rows embed tokens."""
    return HEAD if config.embeds_by_head else EMBEDDING


def decoder_weights(config: DecoderConfig) -> list[WeightSpec]:
    """Every weight of the decoder: the embedding, then those of its program in order of use."""
    table = single_weight(embedding_name(config), config.vocab_size, config.hidden_size)
    program = decoder_program(config, EngineShape("decode", 1, 1, 1, 1))
    return list(({table.name: table} | program.weights).values())


def unread_tensors(config: DecoderConfig) -> tuple[str, ...]:
    """What begins the names of tensors that a checkpoint may have beside the decoder's."""
    return _UNREAD.get(config.naming, ())


def head_format(head: str, columns: int, dtype: str) -> WeightFormat | None:
    """The format of a head, or of a draft's weights, that is one of `HEADS`, with rows of so many columns, of a model
    that computes in `dtype`.

    int8: a scale for each row; int4: for each 128, 64 or 32 columns, the most that divide a row. None for one as
    published. Raises ValueError where none of these divides.
    """
    if head == HEADS[0]:
        return None
    if head == "int8":
        return WeightFormat("int8", None, False, dtype)
    group = next((size for size in HEAD_GROUPS if columns % size == 0), None)
    if group is None:
        raise ValueError(f"rows of {columns} columns are no whole groups of {', '.join(map(str, HEAD_GROUPS))}")
    return WeightFormat("int4", group, False, dtype)


def as_published(config: DecoderConfig) -> DecoderConfig:
    """The same without a packed head."""
    return replace(config, head=HEADS[0], embeds_by_head=False)
