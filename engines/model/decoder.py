"""The program of decoder-only transformers: Llama's layers, and what other families change in them by parameters."""

from __future__ import annotations

from dataclasses import replace

from edgellm.engines.model.config import HEADS, RECURRENT_KINDS, DecoderConfig, WeightSpec
from edgellm.engines.model.layer_weights import LayerWeights
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program, kept_states, single_weight, state_inputs, token_inputs
from edgellm.engines.model.row_steps import SOUND_ROWS, TOKEN_ROWS
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import LAST_SEEN, Add, Input, Keep, Linear, NormLinear, Scale, Step
from edgellm.kernels.quantization.packed_weight import WeightFormat

#: Columns of a packed head of 4 bits that may share a scale, best first: fewer are better, and take more memory.
HEAD_GROUPS = (128, 64, 32)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

#: By `DecoderConfig.naming`, what begins the names of tensors beside the decoder's: of a draft head.
_UNREAD = dict.fromkeys(("qwen3_5", "nemotron_h"), ("mtp.",))


def decoder_program(config: DecoderConfig, shape: EngineShape) -> Program:
    """One step of a decoder.

    Its outputs are `logits` [B, selected, V] float32 and, with `feature_layers`, `hidden_states` [B, T, n H]. Behind
    the last attention, or what else mixes tokens, only the rows that get logits go on, unless features of all are taken
    behind it.
    """
    hidden, layers, taps = config.hidden_size, config.num_layers, config.feature_layers
    selects, last = shape.selected < shape.tokens, config.last_mixer
    selects_late = selects and (max(*taps, config.deepstack_layers, 0) > last or config.layer_embedding_size > 0)
    inputs = token_inputs(shape, hidden, config.rotary_columns)
    if config.is_recurrent:
        inputs |= state_inputs(shape)
    ahead = looks_ahead(config, shape)
    if ahead:
        inputs[LAST_SEEN] = ((shape.batch, shape.tokens), "int32")
    steps: list[Step] = []
    value = "inputs_embeds"
    if config.adds_sound:
        inputs[SOUND_ROWS] = ((shape.batch, shape.tokens, hidden), "compute")
        steps.append(Add("hidden", value, SOUND_ROWS))
        value = "hidden"
    if config.embedding_scale != 1.0:
        steps.append(Scale("hidden", value, config.embedding_scale))
        value = "hidden"
    if config.layer_embedding_size:
        inputs[TOKEN_ROWS] = ((shape.batch, shape.tokens, config.token_row_size), "compute")
        projected, own = LayerWeights(config, "model.", "model.").token_inputs(value)
        steps.append(projected)
    for index in range(layers):
        selecting = selects and not selects_late and index == last
        keep, windows = _tap(taps, index, raw=True), shape.window_rows > 0
        steps += decoder_layer(config, index, value, selecting, keep, windows, ahead)
        if config.layer_embedding_size and index == 0:
            steps.insert(-3, own)  # as late as they may come: before what the MLP gives, which the gate's layer adds
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
    return shape.phase == "prefill" and 0 < config.image_tokens <= (1 << 32 if config.images_vary else shape.tokens)


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
        return layer.mlp(index, value, normed, "selected" if value == "selected" else "hidden", keep)
    if kind in RECURRENT_KINDS:
        steps, output = getattr(layer, kind)(index, normed)
        return steps + layer.residual(value, selects, keep, steps[-1].output, output, index)
    # What attention gives is added by a launch of its own where it is normed: features are then taken before it.
    early, late = (keep, None) if config.post_norms else (None, keep)
    steps = layer.attention(index, (normed,), keep=early, windows=windows, ahead=ahead)
    return steps + layer.residual(value, selects, late, index=index)


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


def token_table(config: DecoderConfig) -> list[WeightSpec]:
    """The table with the embeddings of each layer, a row for each token, of which no engine knows; none without."""
    size = config.token_row_size
    return [single_weight("model.embed_tokens_per_layer.weight", config.vocab_size, size)] if size else []


def unread_tensors(config: DecoderConfig) -> tuple[str, ...]:
    """What begins the names of tensors that a checkpoint may have beside the decoder's: also keys and values of layers
    that attend to others' rows, and the `token_table`."""
    layers = range(config.num_layers - config.shared_rows, config.num_layers)
    needless = (f"model.layers.{index}.self_attn.{part}_" for index in layers for part in ("k", "v"))
    return *_UNREAD.get(config.naming, ()), *needless, *(spec.name for spec in token_table(config))


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
