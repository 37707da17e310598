"""What a decoder-only language model and an EAGLE head look like, whatever their families call it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from edgellm.engines.formats.strict_formats import ADDED_LATER, bounded, one_of

if TYPE_CHECKING:
    from edgellm.kernels.experts.contract import Activation, Routing

#: Far deeper than any published model. Every layer is described one by one, so a damaged number must not get there.
LARGEST_DEPTH = 1024
#: Experts of a layer, each described by itself; published models have up to 512.
LARGEST_EXPERTS = 4096
#: Patches in height and in width that become one token; published models have 2.
LARGEST_MERGE = 64
#: Tokens of an image that has a fixed number of them; published models have 256.
LARGEST_IMAGE_TOKENS = 1 << 16

#: What a model's head may be: as it was published, or packed when the engine directory was built.
HEADS = ("as-published", "int8", "int4")
#: What is asked for a draft's linear layers and its own head: "auto" is int8 beside packed layers.
DRAFT_WEIGHTS = ("auto", *HEADS)
#: What mixes the tokens of a layer, as `DecoderConfig.layer_kinds` has it; of the last kind nothing does.
LAYER_KINDS = ("attention", "window", "convolution", "delta", "mamba", "mlp")
#: Those of them whose state follows from the whole text before, and cannot be cut.
RECURRENT_KINDS = ("convolution", "delta", "mamba")
#: How many tokens a short convolution may reach over, its own included; published models have 3, 4 and 7.
CONV_WIDTHS = (2, 8)
#: What a layer of the gated delta rule projects: queries, keys and values; the gate of its norm; the gates b and a.
DELTA_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
#: What checkpoints call the parts of a layer, as `DecoderConfig.naming` has it.
NAMINGS = (
    *("llama", "lfm2", "qwen3_5", "starcoder2", "granitemoe", "granitemoehybrid", "gpt_oss", "hunyuan"),
    *("nemotron_h", "nemotron_h_mtp", "gemma4"),
)
#: Beside the scaling of a rotary embedding: queries at positions from `original_max_position_embeddings` on are
#: multiplied by 1 + this log(1 + how many times their position holds that length).
FAR_SCALING = "llama_4_scaling_beta"
#: What becomes of the hidden states of a text: logits, or the last token's the text's embedding.
POOLINGS = ("none", "last")
#: The activations of an MLP, as `DecoderConfig.hidden_act` has them.
MLP_ACTIVATIONS = ("silu", "gelu_tanh", "relu_squared")
#: What becomes of what a mixture's router gives, as `Mixture.scores` has it.
EXPERT_SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts, which stands for the MLP of all layers but the `dense_layers`.

    Of `experts`, MLPs with a gate of `size` rows each, a token goes through those `chosen` that score the highest, of
    equal ones those of lower ids. `scores` is one of `EXPERT_SCORES`: softmax over all of what the router gives, or
    sigmoid of each. With a `correction` a number of each expert is added for the choice alone. What the chosen give is
    added times their scores, which are `normalized` (divided by their sum + `epsilon`; softmax over all so becomes
    softmax over the chosen) and multiplied by `scale`. With a `shared_size` each token goes through a further MLP of so
    many rows, too, times the sigmoid of a gate of its own, if it has a `shared_gate`.

    `biases`: router and experts have them. With a `limit` experts are gpt-oss's: rows of gate and up alternate, gates
    are at most the limit, ups within it both ways, and they give (up + 1) gate sigmoid(1.702 gate). Experts that are
    not `gated`, the one of all tokens among them, give down(relu(up)^2). With a `latent_size` those that are chosen
    take and give rows of that width, to which a layer leads and from which another leads back.

    Experts `beside_mlp` do not stand for it, but beside it, and their gates are of the tanh-GELU (Gemma 4): a norm of
    its own is before each of both, and before the router, whose shares are times a number of each expert, too; what
    each gives is normed, and their sum is what the layer norms and adds.
    """

    experts: int = field(metadata=bounded(LARGEST_EXPERTS))
    chosen: int = field(metadata=bounded(LARGEST_EXPERTS))
    size: int
    scores: str = field(default="softmax", metadata=one_of(EXPERT_SCORES, True))
    correction: bool = field(default=False, metadata=ADDED_LATER)
    normalized: bool = field(default=True, metadata=ADDED_LATER)
    epsilon: float = field(default=0.0, metadata=ADDED_LATER)
    scale: float = field(default=1.0, metadata=ADDED_LATER)
    dense_layers: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    shared_size: int = field(default=0, metadata=ADDED_LATER)
    biases: bool = field(default=False, metadata=ADDED_LATER)
    limit: float = field(default=0.0, metadata=ADDED_LATER)
    shared_gate: bool = field(default=True, metadata=ADDED_LATER)
    gated: bool = field(default=True, metadata=ADDED_LATER)
    latent_size: int = field(default=0, metadata=ADDED_LATER)
    beside_mlp: bool = field(default=False, metadata=ADDED_LATER, repr=False)  # the step `Experts` shows it

    @property
    def routing(self) -> Routing:
        """How experts are chosen, as kernels take it."""
        from edgellm.kernels.experts.contract import Routing  # NumPy, which the command line does without

        how = self.scores == "sigmoid", self.normalized, self.epsilon, self.scale
        return Routing(self.experts, self.chosen, *how)

    @property
    def activation(self) -> Activation:
        """What an expert makes of its first layer's sums, as kernels take it."""
        from edgellm.kernels.experts.contract import Activation  # as above

        kind = "alternating" if self.limit else "gated" if self.gated else "squared"
        return Activation(kind, self.limit, "gelu_tanh" if self.beside_mlp else "silu")


class MediaKind(NamedTuple):
    """A kind of media among the tokens of prompts; its `name` is that of its encoder, too.

    `token_id` stands for each of its tokens. With `tokens` every span of the kind has so many (up to so many where
    they vary), and each of them sees all of the span; 0: a token sees those before it alone.
    """

    name: str
    token_id: int
    tokens: int = 0
    varies: bool = False


@dataclass(frozen=True)
class DecoderConfig:
    """Dimensions and switches of a decoder, read from a checkpoint's `config.json` by its family.

    `dtype` is the checkpoint's own ("float16", "bfloat16" or "float32"). `rope_scaling` is the published dictionary
    (None: unscaled); `rotary_dim` is the part of `head_dim` that is rotated. `feature_layers` names the layers whose
    input is output as `hidden_states` (none: no such output), `num_layers` standing for the last hidden state after the
    final norm; drafting sets it, and `pooling`, one of `POOLINGS`: an embedding model puts that last state out.

    A model that takes images has an `image_token_id`, which stands for each token of an image; `spatial_merge_size`
    patches in height and width make one. With M-RoPE `mrope_section` says how many of the rotary_dim / 2 frequencies
    follow the position in time, height and width: one section after the other, or `mrope_interleaved`. To the outputs
    of the first `deepstack_layers` layers features of the images are added. With `image_tokens` every image has so
    many, and each of them sees those behind it, too (Gemma 3); 0: a token of an image sees those before it alone. Where
    `images_vary` (Gemma 4) these are the most, and they see each other in layers with a window alone; tokens of media
    have the row of `padding_id` among the embeddings of each layer. With
    `prefix_attention` (PaliGemma) each token of a prompt sees all of the prompt, which shows an image. The
    `audio_token_id` stands for each token of speech in a model that takes it. Where it `adds_sound` (Voxtral Realtime)
    a row of sound is added to the embedding of each token, whatever that is, of the prompt and of the answer.

    `hidden_act` is the activation of the MLP, one of `MLP_ACTIVATIONS`: that of its gate or, without a `gated_mlp`, of
    what goes through its first layer. `norm_offset` is added to the weights of all norms (Gemma: 1); with `layer_norms`
    they are layer norms, with a bias, and `rms_norm_eps` is theirs. Embeddings are multiplied by `embedding_scale`,
    what attention and MLP add to the residual stream by `residual_scale`, scores of attention by `attention_scale`
    (None: head_dim ** -0.5), logits by `logits_scale`. Where a `scores_cap` or a `logits_cap` is above 0, these become
    cap tanh(x / cap) then (Gemma 2). `nope_layers` have no rotary embedding. With `fused_projections`
    the checkpoint holds q, k and v as one tensor `qkv_proj`, gate and up as `gate_up_proj`. Layers of the kind "window"
    look back on `sliding_window` tokens alone, their own included; `local_rope_theta` is the base of their rotary
    embedding, unscaled, where it is one of its own (Gemma 3). With `post_norms` what attention and MLP give is normed
    before it is added; without `pre_norms` what they take is not normed (OLMo-2). Norms of query and key (`qk_norm`)
    are of each head or, with `joint_qk_norm`, of all heads together; with `norms_behind_rotation` those of each head
    stand behind the rotary embedding. With `rotates_neighbours` elements 2j and 2j + 1 of a head are rotated together,
    else j and the one half of the rotated part further on. A packed `head`, one of `HEADS`, is a weight of its own;
    with `embeds_by_head` tokens are looked up there.

    `layer_kinds` says of each layer what mixes its tokens, one of `LAYER_KINDS` (none: all attend to all): attention,
    attention within `sliding_window`, a short convolution of `conv_width` (with `conv_bias`), or the gated delta rule
    behind such a convolution, whose `delta_heads` are the numbers of key and value heads and their sizes, or the state
    space of Mamba-2 behind one, whose groups and heads, the sizes of its state and of its heads, they are;
    `delta_products` has the number of the linear layer that each of `DELTA_PROJECTIONS` is multiplied in (none: all in
    one), counted as they come up: a checkpoint may pack some otherwise than others. With `attention_gate` each query
    head of the q projection is followed by a gate for what it attends to. `naming` is what the checkpoint calls the
    parts of a layer, one of `NAMINGS`. A `mixture` of experts stands for the MLPs, or beside them. With `lone_parts` a
    layer is one part behind its one norm: what mixes its tokens or, of the kind "mlp", an MLP or a mixture
    (Nemotron-H). With `attention_sinks` a number of each head takes part in the softmax of its scores as a key without
    a value.

    Layers that attend to all have the `full_heads`, numbers of key-value heads and of elements of a head, where these
    are others than in a window. The last `shared_rows` layers have no KV rows: each attends to those of the last layer
    of its kind before them, and its MLP has `shared_intermediate_size` rows, where that is another. With `value_norms`
    value heads are divided by the root of the mean of their squares, with `values_are_keys` layers that attend to all
    project them as keys, before these are normed; with `layer_scalars` what a layer gives is multiplied by a number of
    its own. Of a `layer_embedding_size` above 0 each token has so many elements for each layer, embeddings of its own,
    by which a further residual block of the layer is gated (Gemma 4).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int = field(metadata=bounded(LARGEST_DEPTH))
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    dtype: str
    tie_word_embeddings: bool
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    feature_layers: tuple[int, ...] = ()
    image_token_id: int | None = field(default=None, metadata=ADDED_LATER)
    spatial_merge_size: int = field(default=1, metadata=bounded(LARGEST_MERGE, True))
    mrope_section: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    mrope_interleaved: bool = field(default=False, metadata=ADDED_LATER)
    deepstack_layers: int = field(default=0, metadata=bounded(LARGEST_DEPTH, True))
    hidden_act: str = field(default="silu", metadata=one_of(MLP_ACTIVATIONS, True))
    norm_offset: float = field(default=0.0, metadata=ADDED_LATER)
    embedding_scale: float = field(default=1.0, metadata=ADDED_LATER)
    residual_scale: float = field(default=1.0, metadata=ADDED_LATER)
    attention_scale: float | None = field(default=None, metadata=ADDED_LATER)
    logits_scale: float = field(default=1.0, metadata=ADDED_LATER)
    nope_layers: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    fused_projections: bool = field(default=False, metadata=ADDED_LATER)
    sliding_window: int | None = field(default=None, metadata=ADDED_LATER)
    head: str = field(default=HEADS[0], metadata=one_of(HEADS, True))
    embeds_by_head: bool = field(default=False, metadata=ADDED_LATER)
    layer_kinds: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    conv_width: int = field(default=0, metadata=ADDED_LATER)
    conv_bias: bool = field(default=False, metadata=ADDED_LATER)
    delta_heads: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    attention_gate: bool = field(default=False, metadata=ADDED_LATER)
    naming: str = field(default="llama", metadata=one_of(NAMINGS, True))
    local_rope_theta: float | None = field(default=None, metadata=ADDED_LATER)
    post_norms: bool = field(default=False, metadata=ADDED_LATER)
    delta_products: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    image_tokens: int = field(default=0, metadata=bounded(LARGEST_IMAGE_TOKENS, True))
    prefix_attention: bool = field(default=False, metadata=ADDED_LATER)
    pre_norms: bool = field(default=True, metadata=ADDED_LATER)
    joint_qk_norm: bool = field(default=False, metadata=ADDED_LATER)
    layer_norms: bool = field(default=False, metadata=ADDED_LATER)
    gated_mlp: bool = field(default=True, metadata=ADDED_LATER)
    pooling: str = field(default=POOLINGS[0], metadata=one_of(POOLINGS, True))
    mixture: Mixture | None = field(default=None, metadata=ADDED_LATER)
    attention_sinks: bool = field(default=False, metadata=ADDED_LATER)
    rotates_neighbours: bool = field(default=False, metadata=ADDED_LATER)
    norms_behind_rotation: bool = field(default=False, metadata=ADDED_LATER)
    scores_cap: float = field(default=0.0, metadata=ADDED_LATER)
    logits_cap: float = field(default=0.0, metadata=ADDED_LATER)
    full_heads: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    shared_rows: int = field(default=0, metadata=bounded(LARGEST_DEPTH, True))
    shared_intermediate_size: int = field(default=0, metadata=ADDED_LATER)
    value_norms: bool = field(default=False, metadata=ADDED_LATER)
    values_are_keys: bool = field(default=False, metadata=ADDED_LATER)
    layer_scalars: bool = field(default=False, metadata=ADDED_LATER)
    layer_embedding_size: int = field(default=0, metadata=ADDED_LATER)
    audio_token_id: int | None = field(default=None, metadata=ADDED_LATER)
    video_token_id: int | None = field(default=None, metadata=ADDED_LATER)
    lone_parts: bool = field(default=False, metadata=ADDED_LATER)
    images_vary: bool = field(default=False, metadata=ADDED_LATER)
    padding_id: int = field(default=0, metadata=ADDED_LATER)
    adds_sound: bool = field(default=False, metadata=ADDED_LATER)

    @property
    def is_embedding(self) -> bool:
        """Whether texts become vectors, and none is continued."""
        return self.pooling != POOLINGS[0]

    @property
    def media(self) -> dict[str, MediaKind]:
        """The kinds of media that its prompts can have, by their names."""
        kinds = {} if self.image_token_id is None else {"image": self.image_kind(self.image_token_id)}
        others = {"video": self.video_token_id, "audio": self.audio_token_id}
        return kinds | {name: MediaKind(name, token) for name, token in others.items() if token is not None}

    def image_kind(self, token_id: int) -> MediaKind:
        """What images are to this model where a vision encoder says that `token_id` stands for them."""
        return MediaKind("image", token_id, 0 if self.prefix_attention else self.image_tokens, self.images_vary)

    @property
    def has_whole_media(self) -> bool:
        """Whether there are spans each token of which sees all of the span, or prompts of this kind."""
        return self.prefix_attention or any(kind.tokens for kind in self.media.values())

    @property
    def window(self) -> int | None:
        """How many tokens the layers look back on that do not look back on all; None without such layers."""
        return self.sliding_window if "window" in self.layer_kinds else None

    @property
    def exceeds_float16(self) -> bool:
        """Whether values go beyond float16's range: where both what a layer takes and what it gives are normed, nothing
        that is computed depends on how large the residual stream and what is added to it grow."""
        return self.pre_norms and self.post_norms

    @property
    def scales_far_queries(self) -> bool:
        """Whether queries are rotated by columns of their own, which scale them at far positions."""
        return bool((self.rope_scaling or {}).get(FAR_SCALING))

    @property
    def rotary_columns(self) -> int:
        """Width of a token's rotary row: that of all layers, then that of the layers with a base of their own, or of
        queries that are scaled."""
        return self.rotary_dim + self.local_rotary_dim + (self.rotary_dim if self.scales_far_queries else 0)

    @property
    def local_rotary_dim(self) -> int:
        """What is rotated of a head in layers with a rotary base of their own; 0 where none has one."""
        return 0 if self.local_rope_theta is None else self.head_dim if self.full_heads else self.rotary_dim

    @property
    def layers_differ(self) -> bool:
        """Whether layers share rows, or have heads, embeddings or factors of their own."""
        return bool(self.full_heads or self.shared_rows or self.layer_embedding_size or self.layer_scalars)

    @property
    def token_row_size(self) -> int:
        """Elements of the embeddings that a token has for all layers together; 0 without such."""
        return self.num_layers * self.layer_embedding_size

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or of all value heads) together."""
        return self.num_kv_heads * self.head_dim

    @property
    def delta_channels(self) -> int:
        """Width of the delta rule's queries, keys and values, or of Mamba-2's x, B and C, which are convolved."""
        key_heads, value_heads, key_size, value_size = self.delta_heads
        return 2 * key_heads * key_size + value_heads * value_size

    @property
    def is_recurrent(self) -> bool:
        """Whether there are layers whose state is more than KV rows."""
        return any(kind in RECURRENT_KINDS for kind in self.layer_kinds)

    def mixture_of(self, index: int) -> Mixture | None:
        """The mixture of experts of a layer; None where it has an MLP alone."""
        return None if self.mixture is None or index in self.mixture.dense_layers else self.mixture

    @property
    def last_mixer(self) -> int:
        """The last layer that mixes tokens."""
        return max(index for index in range(self.num_layers) if self.layer_kind(index) != "mlp")

    def layer_kind(self, index: int) -> str:
        """What mixes the tokens of a layer, one of `LAYER_KINDS`."""
        return self.layer_kinds[index] if self.layer_kinds else LAYER_KINDS[0]

    def kv_heads(self, index: int) -> tuple[int, int]:
        """Key-value heads of a layer, and elements of each of its heads."""
        heads, size = self.full_heads if self.full_heads and self.layer_kind(index) == "attention" else (0, 0)
        return heads or self.num_kv_heads, size or self.head_dim

    def rows_layer(self, index: int) -> int:
        """The layer whose KV rows a layer attends to: itself, or the last of its kind that has rows."""
        first = self.num_layers - self.shared_rows
        if index < first:
            return index
        return next(own for own in reversed(range(first)) if self.layer_kind(own) == self.layer_kind(index))

    def inner_size(self, index: int) -> int:
        """Rows of a layer's MLP, of its gate or its ups alone."""
        is_shared = index >= self.num_layers - self.shared_rows
        return (self.shared_intermediate_size if is_shared else 0) or self.intermediate_size


@dataclass(frozen=True)
class WeightSpec:
    """One weight as an engine takes it: a buffer that one or several checkpoint tensors fill, one behind the other.

    `shape` is the whole; `parts` are (checkpoint tensor name, shape), joined along the first axis. `dtype` is "compute"
    or "float32", which it then has on every backend. With `experts` its rows are those of so many experts of a mixture,
    one behind the other, of which a step reads a few. With a `kernel` the columns of a tensor are those of a
    convolution, for each channel so many neighbours; in the buffer each neighbour's channels stand side by side.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...] = field(repr=False)
    dtype: str = field(default="compute", repr=False)
    experts: int = field(default=0, repr=False)
    kernel: int = field(default=1, repr=False)


#: The head for multi-token prediction that ships inside a checkpoint, as `DraftConfig.generation` has it.
MTP = "mtp"
#: Drafts of a block of tokens in one pass, as `DraftConfig.generation` has it.
DFLASH = "dflash"
#: EAGLE-1 and EAGLE-2 have one kind of head; EAGLE-3.1 is EAGLE-3 with normed features.
GENERATIONS = ("1", "3", "3.1", MTP, DFLASH)
#: How the features are normed before `fc`: not at all, each by its own norm, or all of them by one.
FEATURE_NORMS = ("none", "each", "whole")
#: Names of the head's own tables, as the engines take them.
DRAFT_EMBEDDING, DRAFT_HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class DraftBlock:
    """The block that a `DFLASH` draft fills in one pass: `size` tokens, the sequence's last one and behind it the
    token `mask_token_id` in each place that is to be guessed.

    Each token of a block sees the whole block or, where it is `causal` (JetSpec), those before it and itself.
    """

    size: int
    mask_token_id: int
    causal: bool = False


@dataclass(frozen=True)
class DraftConfig:
    """Dimensions and switches of a draft head, read from its `config.json` and the names of its tensors.

    `generation` is one of `GENERATIONS`; the weights of an `MTP` head are in its base's own files, and a head with a
    mapping has those rows of the base's head that the mapping names. `decoder` describes the head's one decoder layer;
    its `hidden_size` H and `vocab_size` are the base's too. `draft_vocab_size` is the number of logits; `has_mapping`
    says whether `d2t` maps them to the base's ids (else they are the same). `feature_layers` are the layers of the base
    whose input is a feature (see `DecoderConfig.feature_layers`), in the order in which they are concatenated;
    `feature_norm` is one of `FEATURE_NORMS`. `layer_prefix` begins the names of the layer's tensors in the checkpoint
    ("midlayer.", or "layers.0."; with "model." before it where the checkpoint has that). Without `has_embedding` the
    base's table `base_embedding` embeds tokens, without `has_head` the base's `base_head` gives the logits.
    `norm_before_residual`: the residual stream is the normed feature. `feed_back_normed`: a propose step takes the
    hidden state after the final norm, not the one before it. `image_embeddings`: at an image's tokens it takes the
    base's image rows as embeddings, else the embedding of the image token.

    A `DFLASH` draft has a `block`, and a `decoder` of several layers, the first of which `layer_prefix` names. Its rows
    are keys and values of the base's features, each at its own position, so that a text needs no pass of the draft.
    """

    generation: str = field(metadata=one_of(GENERATIONS))
    decoder: DecoderConfig
    draft_vocab_size: int
    has_mapping: bool
    feature_layers: tuple[int, ...]
    feature_norm: str = field(metadata=one_of(FEATURE_NORMS))
    layer_prefix: str
    has_embedding: bool
    has_head: bool
    base_embedding: str
    base_head: str
    fc_bias: bool
    norm_before_residual: bool
    feed_back_normed: bool
    image_embeddings: bool = field(default=True, metadata=ADDED_LATER)
    block: DraftBlock | None = field(default=None, metadata=ADDED_LATER)

    @property
    def hidden_size(self) -> int:
        """H: width of embeddings and of the hidden state that a propose step takes."""
        return self.decoder.hidden_size

    @property
    def feature_size(self) -> int:
        """F: width of the base's features, concatenated."""
        return len(self.feature_layers) * self.hidden_size

    @property
    def head_name(self) -> str:
        """The weight that gives logits: among the head's own weights if `has_head`, else among the base's."""
        return DRAFT_HEAD if self.has_head else self.base_head

    @property
    def checkpoint_prefix(self) -> str:
        """What begins the names of all tensors but head and mapping: "model.", "mtp." or nothing."""
        return self.layer_prefix.removesuffix("midlayer.").removesuffix("layers.0.")
