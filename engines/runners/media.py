"""What is inserted among a prompt's tokens: spans, what stands there instead of embeddings, and at which positions.

Images are one kind of media. What a prompt has of any kind are spans: an id repeated for each token, perhaps with other
tokens among them (ends of rows, marks of slices), the rows that the kind's encoder made for these, the digest of their
content, their positions, and whether each of them sees all of them.

M-RoPE (Wang et al. 2024, Qwen2-VL; Bai et al. 2025, Qwen2.5-VL) gives every token three positions: time, height, width.
Those of text are equal and go on from the largest before it; an image's tokens count its rows and columns.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgellm.engines.errors import EngineError, ImageError
from edgellm.engines.formats.digests import hash_bytes
from edgellm.engines.formats.strict_formats import canonical_json
from edgellm.engines.model.config import DecoderConfig, MediaKind
from edgellm.kernels.arrays import Array

#: A token as the KV rows see it: its id, or for a token of a span the digest of its content and the place in it.
TokenIdentity = int | tuple[str, int]


@dataclass(frozen=True, eq=False)
class MediaEmbeddings:
    """What the language model takes of one image, or of one piece of another kind, as the kind's encoder made it.

    `rows` [M, H] compute stand for its M tokens; `deepstack` are [M, H] compute each, added at these tokens after the
    first layers. `digest` names the content, `grid` are (frames, height, width) in patches; None where the tokens
    follow each other as those of text do. Where other tokens stand among its own, `runs` says how many of these follow
    each other; none: all do. A part of a video which goes on from the one before it, without text between them, stands
    `moment` positions in time behind the video's first; None for what goes on from nothing.
    """

    rows: Array
    deepstack: tuple[Array, ...]
    digest: str
    grid: tuple[int, int, int] | None = None
    runs: tuple[int, ...] = ()
    moment: int | None = None

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return sum(array.nbytes for array in (self.rows, *self.deepstack))


@dataclass(frozen=True, eq=False)
class MediaSpan:
    """At which `places` in a prompt the tokens of one piece, or of a part of it, stand, ascending. It is the prompt's
    `number`th of its kind, counted from 1."""

    kind: MediaKind
    number: int
    places: Sequence[int]
    embeddings: MediaEmbeddings

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self.places)

    @property
    def start(self) -> int:
        """The first of them."""
        return self.places[0]

    @property
    def stop(self) -> int:
        """The first token behind all of them."""
        return self.places[-1] + 1


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """The `spans` of a prompt of N tokens, in their order there; made by `place_media`.

    `positions` [3, N] int32 are the M-RoPE positions of the whole prompt, None for a model without M-RoPE. Each of the
    first `prefix` tokens sees all of these (PaliGemma); `prefix_digest` is that of their ids and what they show. The
    rows of a sound that is `added` (Voxtral Realtime) are added to the embeddings of prompt and answer, from the first,
    in windows of as many rows, but for the last.
    """

    spans: tuple[MediaSpan, ...]
    positions: np.ndarray | None
    prefix: int = 0
    prefix_digest: str = ""
    added: tuple[MediaEmbeddings, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """The digest of each span's content."""
        return tuple(span.embeddings.digest for span in self.spans)

    @property
    def position_delta(self) -> int:
        """Position less row of every token after the prompt."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - self.positions.shape[1]

    @property
    def goes_on(self) -> bool:
        """Whether an answer's tokens stand where the prompt's next ones would: behind a video whose time outlasts the
        text after it they stand behind its last moment."""
        return self.positions is None or self.positions[1:, -1].max() == self.positions.max()

    @property
    def whole(self) -> list[tuple[int, int]]:
        """(first token, tokens) of each span, or of the prefix, whose tokens see all of it."""
        if self.prefix:
            return [(0, self.prefix)]
        return [(span.start, span.tokens) for span in self.spans if span.kind.tokens]

    def within(self, first: int, stop: int) -> list[tuple[MediaSpan, int, int]]:
        """What of the spans stands at the prompt's tokens first..stop - 1: for each that has any there (the span, its
        first row there, rows there)."""
        parts = []
        for span in self.spans:
            row, end = (bisect_left(span.places, place) for place in (first, stop))
            if row < end:
                parts.append((span, row, end - row))
        return parts

    def last_seen(self, first: int, stop: int) -> np.ndarray:
        """Which token is the last that each of first..stop - 1 sees, where a token of a whole span sees all of it: [n]
        int32, in the prompt's numbers."""
        seen = np.arange(first, stop, dtype=np.int32)
        for start, tokens in self.whole:
            begin, end = max(start - first, 0), max(start + tokens - first, 0)
            seen[begin:end] = start + tokens - 1
        return seen

    def inside(self, place: int) -> MediaSpan | None:
        """The whole span that the place lies in, so that a token of it is before and one behind; None for none."""
        return next((span for span in self.spans if span.kind.tokens and span.start < place < span.stop), None)

    def check(self, prompt_ids: np.ndarray) -> None:
        """Raise EngineError unless `prompt_ids` [N] have the tokens of spans where these are, and nowhere else."""
        for kind in dict.fromkeys(span.kind for span in self.spans):
            found = np.flatnonzero(prompt_ids == kind.token_id).tolist()
            spans = [span for span in self.spans if span.kind == kind]
            expected = [place for span in spans for place in span.places]
            if found != expected:
                raise EngineError(
                    f"the prompt has {len(found)} {kind.name} tokens (id {kind.token_id}) and {len(spans)} "
                    f"{kind.name}s with {len(expected)}, or has them elsewhere: place the {kind.name}s for this very "
                    "prompt"
                )
        if self.positions is not None and self.positions.shape != (3, len(prompt_ids)):
            raise EngineError(
                f"the prompt of {len(prompt_ids)} tokens has positions {self.positions.shape}: place its media for "
                "this very prompt"
            )

    def followed_by(self, tokens: int) -> PromptMedia:
        """The media of the prompt with so many tokens of text behind it, which go on with its positions."""
        if self.positions is None or not tokens:
            return self
        following = np.arange(tokens, dtype=np.int32) + (self.positions.shape[1] + self.position_delta)
        return replace(self, positions=np.concatenate([self.positions, np.tile(following, (3, 1))], axis=1))

    def identities(self, token_ids: Sequence[int]) -> list[TokenIdentity]:
        """The tokens of a text that begins with the prompt, as KV rows see them: a span's tokens are told by its
        content, for all spans of a kind have the same token id."""
        if self.added:  # a window's digest tells those before it, too
            size, last = self.added[0].rows.shape[0], len(self.added) - 1
            windows = (self.added[min(place // size, last)] for place in range(len(token_ids)))
            return [(f"{each.digest} {token}", 0) for each, token in zip(windows, token_ids, strict=True)]
        identities: list[TokenIdentity] = list(token_ids)
        if self.prefix:  # what the rows hold depends on all of it
            return [*((self.prefix_digest, index) for index in range(self.prefix)), *identities[self.prefix :]]
        for span in self.spans:
            digest = span.embeddings.digest
            for index, place in enumerate(span.places):
                identities[place] = digest, index
        if not self.goes_on:  # a prompt that has the answer in it has other rows for it
            length = self.positions.shape[1]  # type: ignore[union-attr]
            behind = hash_bytes(canonical_json(["answer", *self.digests]))
            identities[length:] = [(behind, index) for index in range(len(identities) - length)]
        return identities


def place_media(
    prompt_ids: Sequence[int], media: Mapping[MediaKind, Sequence[MediaEmbeddings]], config: DecoderConfig
) -> PromptMedia:
    """Give the tokens of a prompt [N] that stand for media to what each kind has, in order.

    `config` is the language model's. Raises EngineError where tokens and media do not match: other numbers of them, or
    a span's tokens that do not follow one another; and for embeddings that another model's encoder made.
    """
    if config.adds_sound:
        return PromptMedia((), None, added=tuple(next(iter(media.values()))))
    ids = np.asarray(prompt_ids)
    found = [span for kind, embeddings in media.items() for span in _spans_of(ids, kind, embeddings, config)]
    spans = sorted(found, key=lambda span: span.start)
    positions = None
    if config.mrope_section:
        shaped = [(span, span.embeddings.grid) for span in spans if span.embeddings.grid is not None]
        places, grids = [(span.start, span.tokens) for span, _ in shaped], [grid for _, grid in shaped]
        moments = [span.embeddings.moment for span, _ in shaped]
        positions, ahead = mrope_positions(len(prompt_ids), places, grids, config.spatial_merge_size, moments)
        if ahead > 0:
            raise ImageError(
                f"a video reaches {ahead} positions farther in time than the prompt has tokens, which is beyond what "
                "the context holds: show more frames of these seconds, or larger ones"
            )
    if not config.prefix_attention:
        return PromptMedia(tuple(spans), positions)
    shown = canonical_json([ids.tolist(), *(span.embeddings.digest for span in spans)])
    return PromptMedia(tuple(spans), positions, len(ids), hash_bytes(shown))


def _spans_of(
    prompt_ids: np.ndarray, kind: MediaKind, media: Sequence[MediaEmbeddings], config: DecoderConfig
) -> list[MediaSpan]:
    name, counts = kind.name, [each.rows.shape[0] for each in media]
    found = np.flatnonzero(prompt_ids == kind.token_id)
    if len(found) != sum(counts):
        needed = f"{len(counts)} {name}s with {sum(counts)} tokens" if counts else f"no {name}s"
        raise EngineError(
            f"the prompt has {len(found)} {name} tokens (id {kind.token_id}), but there are {needed}: put one {name} "
            f"marker into the prompt for each {name}, where it belongs"
        )
    spans: list[MediaSpan] = []
    place = 0
    for number, (each, count) in enumerate(zip(media, counts, strict=True), 1):
        places, runs = found[place : place + count].tolist(), [count]
        if places[-1] - places[0] >= count:
            runs = np.diff([0, *(np.flatnonzero(np.diff(places) > 1) + 1), count]).tolist()
        if tuple(runs) != (each.runs or (count,)):
            raise EngineError(
                f"the {count} tokens of {name} {number} are interrupted: they follow each other in parts of {runs}, "
                f"expected are {list(each.runs or (count,))}. The prompt has another token among them, or lacks one"
            )
        expected = [(count, config.hidden_size)] * (1 + config.deepstack_layers)
        shapes = [tuple(array.shape) for array in (each.rows, *each.deepstack)]
        if shapes != expected:
            raise EngineError(
                f"the embeddings of {name} {number} have the shapes {shapes}, this language model takes {expected}: "
                "the encoder must be that of the same model"
            )
        if count > kind.tokens > 0 or (count < kind.tokens and not kind.varies):
            raise EngineError(
                f"{name} {number} has {count} tokens, this language model takes {name}s of {kind.tokens}: the encoder "
                "must be that of the same model"
            )
        if kind.tokens and spans and spans[-1].stop == places[0]:
            raise EngineError(
                f"the {name}s {number - 1} and {number} follow each other without a token between them: the model "
                "would take them for one. Put the tokens around them that the model's processor writes"
            )
        spans.append(MediaSpan(kind, number, places, each))
        place += count
    return spans


def before_span(tokens: Sequence[TokenIdentity], place: int) -> int:
    """The `place` in a text, or the beginning of the span that it lies in, so that a token of it is before and one
    behind."""
    token = tokens[place] if place < len(tokens) else 0
    return place - token[1] if isinstance(token, tuple) else place


def mrope_positions(
    tokens: int,
    spans: Sequence[tuple[int, int]],
    grids: Sequence[tuple[int, int, int]],
    merge_size: int,
    moments: Sequence[int | None],
) -> tuple[np.ndarray, int]:
    """M-RoPE positions [3, N] int32 of a prompt of N `tokens`, and the difference of position and row after it.

    `spans` are (first token, tokens) of each image, `grids` its patches in time, height and width; `merge_size` x
    `merge_size` patches make a token. As in transformers' `get_rope_index`, the tokens of an image stand at the next
    position plus their indices in time, height and width, and the text after it goes on after the longer side. Those of
    a part of a video that has one of the `moments` stand where its first part's do, so much later. Raises EngineError
    where a grid does not have as many tokens as its span.
    """
    positions = np.empty((3, tokens), np.int32)
    place = following = begun = 0
    for (start, count), (time, height, width), moment in zip(spans, grids, moments, strict=True):
        merged = time, height // merge_size, width // merge_size
        if math.prod(merged) != count:
            raise EngineError(f"an image of {count} tokens has a grid of {merged} tokens: expected as many")
        positions[:, place:start] = np.arange(following, following + start - place)
        following += start - place
        begun = following if moment is None else begun
        positions[:, start : start + count] = np.indices(merged).reshape(3, -1) + begun
        positions[0, start : start + count] += moment or 0
        following = begun + max(merged[1:])
        place = start + count
    positions[:, place:] = np.arange(following, following + tokens - place)
    return positions, int(positions.max()) + 1 - tokens
