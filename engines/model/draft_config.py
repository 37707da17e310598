"""What an EAGLE draft model looks like, whatever layout it was published in."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgellm.engines.directories.strict_formats import ADDED_LATER
from edgellm.engines.model.config import DecoderConfig

#: EAGLE-1 and EAGLE-2 have one kind of head; EAGLE-3.1 is EAGLE-3 with normed features.
GENERATIONS = ("1", "3", "3.1")
#: How the features are normed before `fc`: not at all, each by its own norm, or all of them by one.
FEATURE_NORMS = ("none", "each", "whole")
#: Names of the head's own tables, as the engines take them.
DRAFT_EMBEDDING, DRAFT_HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class DraftConfig:
    """Dimensions and switches of a draft head, read from its `config.json` and the names of its tensors.

    `generation` is one of `GENERATIONS`. `decoder` describes the head's one decoder layer; its `hidden_size` H and
    `vocab_size` are the base's too. `draft_vocab_size` is the number of logits; `has_mapping` says whether `d2t` maps
    them to the base's ids (else they are the same). `feature_layers` are the layers of the base whose input is a
    feature (see `DecoderConfig.feature_layers`), in the order in which they are concatenated; `feature_norm` is one of
    `FEATURE_NORMS`. `layer_prefix` begins the names of the layer's tensors in the checkpoint ("midlayer.", or
    "layers.0."; with "model." before it where the checkpoint has that). Without `has_embedding` the base's table
    `base_embedding` embeds tokens, without `has_head` the base's `base_head` gives the logits. `norm_before_residual`:
    the residual stream is the normed feature. `feed_back_normed`: a propose step takes the hidden state after the
    final norm, not the one before it. `image_embeddings`: at an image's tokens it takes the base's image rows as
    embeddings, else the embedding of the image token.
    """

    generation: str
    decoder: DecoderConfig
    draft_vocab_size: int
    has_mapping: bool
    feature_layers: tuple[int, ...]
    feature_norm: str
    layer_prefix: str
    has_embedding: bool
    has_head: bool
    base_embedding: str
    base_head: str
    fc_bias: bool
    norm_before_residual: bool
    feed_back_normed: bool
    image_embeddings: bool = field(default=True, metadata=ADDED_LATER)

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
        """What begins the names of all tensors but head and mapping: "model." or nothing."""
        return "model." if self.layer_prefix.startswith("model.") else ""
