"""The encoders of a model by the names of their kinds: pieces of media prepared on any thread, encoded on the engine's.

An encoder is opened with the model or, where nothing is made ready before, with the first piece of its kind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgellm.engines.backends.base import Backend
from edgellm.engines.model.config import DecoderConfig, MediaKind
from edgellm.engines.model.memory_plan import MemoryPlan
from edgellm.errors import MediaError, RequestError, closed_error, number_of
from edgellm.multimodal.sources import NOUNS
from edgellm.text.messages import ENCODER_NAMES, MediaReference

if TYPE_CHECKING:
    from edgellm.engines.runners.media import MediaEmbeddings, PromptMedia


class PreparedMedia(Protocol):
    """A piece of media as an encoder takes it: its kind's name, how many tokens it stands for, the digest of what its
    rows are made of, and how much memory it takes until then, in pixels."""

    @property
    def kind(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def held_pixels(self) -> int: ...


class MediaEncoder(Protocol):
    """What encodes the pieces of one kind. `memory` is what it takes in bytes, by name. It is opened in two steps,
    since memory is checked once: `load` comes after that."""

    @property
    def kind(self) -> MediaKind: ...
    @property
    def memory(self) -> Mapping[str, int]: ...
    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load the weights; `progress` gets bytes done and in all."""

    def prepare(self, reference: MediaReference) -> PreparedMedia:
        """Read and prepare a piece. Any thread may call it; the error for one that cannot be read names it."""

    def written(self, piece: Any, number: int, /) -> Sequence[int]:
        """The ids that stand for a piece, the prompt's `number`th of its kind from 0 on: the kind's token for each row,
        and what is around these."""

    def encode(self, pieces: Sequence[Any], /) -> Sequence[MediaEmbeddings]:
        """The rows of each piece that `prepare` gave, or of each of its parts where it has several; of those that are
        known by their digests without computing."""

    def close(self) -> None:
        """Free all memory."""


class MediaEncoders:
    """The `encoders` of the model in the directory `path`, whose language model has `config`; none for text alone."""

    def __init__(
        self, encoders: Iterable[MediaEncoder], config: DecoderConfig, path: Path, backend: Backend | None = None
    ) -> None:
        """On a `backend` that makes nothing ready before it computes more may be added that open later."""
        #: Those that are open.
        self.by_name = {encoder.kind.name: encoder for encoder in encoders}
        self.kinds = {name: encoder.kind for name, encoder in self.by_name.items()}
        self._config, self._path, self._backend = config, path, backend
        self._later: dict[str, Callable[[], MediaEncoder]] = {}
        self._lock = threading.RLock()  # an encoder may need another one

    def add(self, kind: MediaKind, open_encoder: Callable[[], MediaEncoder]) -> None:
        """Add an encoder, which is opened now or, on a backend that computes at once, with the first piece of its kind.

        What is then wrong with its files, or that they find no memory, is the error of that request, and of each one
        after it.
        """
        self.kinds[kind.name] = kind
        if self._backend is not None and self._backend.computes_at_once:
            self._later[kind.name] = open_encoder
        else:
            self.by_name[kind.name] = open_encoder()

    def encoder(self, name: str) -> MediaEncoder:
        """The encoder of a kind, which is opened now where it was not; any thread may need it first."""
        with self._lock:
            if name not in self.by_name:
                if self._backend is None or name not in self._later:  # a request was being prepared meanwhile
                    raise closed_error()
                encoder = self._later[name]()
                try:
                    self._backend.check_memory(MemoryPlan({**encoder.memory}))
                    encoder.load()
                except BaseException:
                    encoder.close()
                    raise
                self.by_name[name] = encoder
            return self.by_name[name]

    @property
    def memory(self) -> dict[str, int]:
        """What those that are open take in bytes, by name."""
        return {name: size for encoder in self.by_name.values() for name, size in encoder.memory.items()}

    @property
    def token_ids(self) -> frozenset[int]:
        """The ids of the tokens that stand for media."""
        return frozenset(kind.token_id for kind in self.kinds.values())

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load the weights of each, once memory was checked."""
        for encoder in self.by_name.values():
            encoder.load(progress)

    def prepare(self, references: Sequence[MediaReference]) -> list[PreparedMedia]:
        """Read and prepare what a request shows. Any thread may call it; errors name the piece. Raises RequestError for
        a kind that the model does not take."""
        for kind in dict.fromkeys(each.kind for each in references):
            if kind not in self.kinds:
                shown = sum(each.kind == kind for each in references)
                raise RequestError(
                    f"the request shows {number_of(shown, NOUNS[kind])}, but {self._path} has no "
                    f"{ENCODER_NAMES[kind]}: leave them out, or open a directory that has one"
                )
        return [self.encoder(each.kind).prepare(each) for each in references]

    def cropped(self, pieces: Sequence[PreparedMedia]) -> tuple[bool, ...]:
        """Whether each of the images among the pieces has crops beside it, and so more tokens than a whole one."""
        most = self._config.media["image"].tokens if "image" in self._config.media else 0
        return tuple(piece.tokens > most > 0 for piece in pieces if piece.kind == "image")

    def expand(self, prompt_ids: Sequence[int], pieces: Sequence[PreparedMedia]) -> list[int]:
        """The ids of a prompt with those of its pieces in place of each token that stands for a kind, in order.

        Raises MediaError where there are more pieces than markers of their kind, or the reverse, and RequestError for
        none where the model is made for them alone.
        """
        following = {}
        for name, kind in self.kinds.items():
            token, own = kind.token_id, [each for each in pieces if each.kind == name]
            markers = sum(each == token for each in prompt_ids)
            if self._config.adds_sound and markers > 1:
                continue  # the text has been written on
            if markers != len(own):
                noun = NOUNS.get(name, name)
                raise MediaError(
                    f"the prompt has {number_of(markers, f'{noun} marker')} (token {token}) for "
                    f"{number_of(len(own), noun)}: show one {noun} for each marker"
                )
            if own:
                following[token] = map(self.encoder(name).written, own, count())
        if self._config.adds_sound and len(pieces) > 1:
            raise MediaError(f"the prompt has {len(pieces)} sounds, the model in {self._path} hears one at a time")
        if self._config.prefix_attention and not following:
            raise RequestError(
                f"the request shows no image, but {self._path} is a model of prompts that begin with one"
            )
        if not following:
            return list(prompt_ids)
        expanded: list[int] = []
        for token in prompt_ids:
            expanded += next(following[token]) if token in following else [token]
        return expanded

    def encode(self, prompt_ids: Sequence[int], pieces: Sequence[PreparedMedia]) -> PromptMedia:
        """Encode the pieces of an expanded prompt, those that are not known, and give them their places in it."""
        from edgellm.engines.runners.media import place_media

        embeddings = {
            kind: self.encoder(name).encode(own)
            for name, kind in self.kinds.items()
            if (own := [each for each in pieces if each.kind == name])
        }
        return place_media(prompt_ids, embeddings, self._config)

    def close(self) -> None:
        """Free all memory; requests that are being prepared meanwhile still find what prepares them."""
        with self._lock, ExitStack() as each_whatever_fails:
            for encoder in self.by_name.values():
                each_whatever_fails.callback(encoder.close)
            for name in self._later:
                self.by_name.pop(name, None)
            self._later, self._backend = {}, None  # whoever holds this then holds no backend
