"""`AudioEncoder`: the encoder of speech."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

import numpy as np

from edgellm.engines.backends.base import Backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import at_place
from edgellm.engines.families.audio_encoders import audio_inputs, audio_memory
from edgellm.engines.families.programs import model_program, model_weights
from edgellm.engines.model.encoder_steps import KEPT_ROWS
from edgellm.engines.model.limits import EngineShape, audio_shape
from edgellm.engines.recently_used import RecentlyUsed
from edgellm.engines.runners.captured_steps import CapturedSteps, LoadedEngines
from edgellm.engines.runners.encoder_host import SPARE, EncoderHost
from edgellm.engines.runners.media import MediaEmbeddings
from edgellm.errors import AudioError
from edgellm.kernels.arrays import ITEM_SIZES, Array, leading
from edgellm.metrics import Metrics
from edgellm.multimodal.audio_input import heard
from edgellm.multimodal.log_mel import PreparedAudio, Sound, read_mel_config
from edgellm.multimodal.sound_features import SoundFeatures
from edgellm.multimodal.sources import source_of_url
from edgellm.text.messages import MediaReference


class AudioEncoder:
    """The encoder of speech of a model: prepares sounds and encodes them, window by window of its attention.

    Rows of windows that were heard before are kept by the digests of their samples: of a sound that has grown, the
    last window alone is encoded anew. Each is a span of the prompt, whose KV rows are reused as those of a text are.
    Where windows see more of those before than a run has (Voxtral Realtime), keys and values of the last ones are kept
    of as many sounds as are answered at once, by the same digests: what goes on with none of them begins anew.
    Opening one checks all of its files. Raises EngineDirectoryError, CheckpointError, UnsupportedModelError.
    """

    def __init__(self, backend: Backend | None, directory: EngineDirectory, metrics: Metrics) -> None:
        """Without a `backend` it is checked alone."""
        assert directory.audio is not None  # for which an encoder is opened
        self.kind, self.config = directory.config.media["audio"], directory.audio
        self._directory, self._metrics = directory, metrics
        self.mel = read_mel_config(directory.path, self.config)
        chunks = -(-directory.limits.kv_capacity // self.config.rows(self.config.chunk_frames))
        samples = chunks * self.config.chunk_frames * self.mel.hop
        self._most_seconds = (samples - sum(self.mel.silence)) / self.mel.rate
        #: Elements of a window's rows: those of the open one take as much memory, which the next ones are lent.
        self._window_size = self.config.rows(self.config.window_frames) * self.config.out_hidden_size
        self._weights: dict[str, Array] = {}
        self._features: SoundFeatures | None = None
        #: Inputs and outputs of engines, by their shape: of one where these are fixed; what was brought to them last.
        self._arrays: dict[EngineShape, dict[str, Array]] = {}
        self._present: dict[str, np.ndarray] = {}
        #: Keys and values of sounds, and the digests of windows that may go on with them; those used last stand last.
        self._kept: list[dict[str, Array]] = [{}] * (directory.limits.max_batch if self.config.kept_rows else 1)
        self._ends: dict[int, Sequence[str]] = dict.fromkeys(range(len(self._kept)), ())
        #: What it takes in bytes, by name.
        self.memory: Mapping[str, int] = {}
        if backend is not None:
            self._backend = backend
            self._whole = audio_shape(directory.limits.audio_rows)
            self._engines = LoadedEngines(backend, [self._whole])
            self._steps = CapturedSteps(backend)
            each, spare = self._window_size * ITEM_SIZES[backend.compute_dtype], SPARE * self.config.run_windows
            self._host = EncoderHost(backend, spare)
            self._has_one_shape = backend.fixed_shapes or self.config.kept_rows > 0
            at_once, limits = backend.computes_at_once, directory.limits
            self.memory = memory = audio_memory(self.config, backend.compute_dtype, at_once, limits)
            self._cache = RecentlyUsed[str, MediaEmbeddings](memory["audio embeddings"] - spare * each, lambda _: each)

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        with closing(self._directory.checkpoint()) as checkpoint:
            self._weights = self._backend.load_weights(checkpoint, model_weights(self.config), progress)
        self._features = SoundFeatures(self._backend, self.mel, self.config)
        if self.config.kept_rows:
            shape, dtype = model_program(self.config, self._whole).inputs[KEPT_ROWS]
            self._kept = [{KEPT_ROWS: self._backend.zeros(shape, dtype)} for _ in self._kept]
        silence = Sound(self.mel.rate, np.zeros(self.config.window_frames * self.mel.hop, np.float32))
        piece = silence.prepared(self.mel, self.config)
        for place in self._ends if self._backend.fixed_shapes else ():
            for _ in range(2):  # the second run is captured, before one waits for it
                self._encoded(piece, 0, self._measuring.digests(piece)[:1], place)

    def prepare(self, reference: MediaReference) -> PreparedAudio:
        with at_place(reference.name, AudioError):
            source = source_of_url(str(reference.source), "audio") if reference.is_url else reference.source
            sound = source if isinstance(source, Sound) else Sound(*reversed(heard(source, self._most_seconds)))
            return sound.prepared(self.mel, self.config)

    def written(self, piece: PreparedAudio, number: int) -> list[int]:
        before, behind = self.config.around
        count = piece.tokens if self.config.prompt_tokens is None else self.config.prompt_tokens
        return [*before, *[self.kind.token_id] * count, *behind]

    def encode(self, pieces: Sequence[PreparedAudio]) -> list[MediaEmbeddings]:
        """The rows of each window of each piece; those that are not known are computed, and nothing waits for that."""
        seconds, found, reused = self._host.seconds, list[MediaEmbeddings](), 0
        self._host.count()  # the work of those before is done by now
        for piece in pieces:
            digests = self._measuring.digests(piece)
            known = [self._cache.find(digest) for digest in digests]
            reused += None not in known
            keeps = self.config.kept_rows > 0
            place = self._begun(known, digests) if keeps and None in known else 0
            lead = 0 if keeps else self.config.lead_windows
            for first, last in _unknown(known, lead, self.config.run_windows):
                with self._host.counted():
                    known[first:last] = self._encoded(piece, first, digests[first:last], place)
                self._ends[place] = [*self._ends[place][-self.config.run_windows :], *digests[first:last]]
            for each in known:
                assert each is not None
                found.append(each)
                self._cache.keep(each.digest, each)
        counts = {"sounds": len(pieces), "audio_tokens": sum(piece.tokens for piece in pieces)}
        self._metrics.staged("speech", **counts, seconds=self._host.seconds - seconds, reused_sounds=reused)
        return found

    def close(self) -> None:
        self._cache.clear()
        self._steps.clear()
        self._engines.clear()
        self._arrays.clear()
        self._kept.clear()
        self._weights, self._present, self._features = {}, {}, None
        self._host = EncoderHost(self._backend)

    @property
    def _measuring(self) -> SoundFeatures:
        assert self._features is not None  # it was loaded
        return self._features

    def _begun(self, known: list[MediaEmbeddings | None], digests: Sequence[str]) -> int:
        """The place of what is kept before the first window that is not known, or of what was used least lately, to
        begin anew; none behind is taken for known."""
        first = known.index(None)
        found = [place for place, ends in self._ends.items() if first and digests[first - 1] in ends]
        place, first = (found[0], first) if found else (next(iter(self._ends)), 0)
        ends = self._ends.pop(place)
        self._ends[place] = ends[: ends.index(digests[first - 1]) + 1] if first else []  # the latest
        known[first:] = [None] * (len(known) - first)
        return place

    def _encoded(self, piece: PreparedAudio, first: int, digests: Sequence[str], place: int) -> list[MediaEmbeddings]:
        """The rows of a piece's windows from the `first` on, as many as `digests`, each in memory of its own; the run
        has those that these see, or goes on with what is kept at a `place`."""
        config, backend, last = self.config, self._backend, first + len(digests)
        lead = max(0, first - config.lead_windows)
        frames = sum(piece.frames[lead:last])
        shape = self._whole if self._has_one_shape else audio_shape(config.chunk_rows(frames))
        if shape not in self._arrays:
            self._arrays.clear()  # where shapes are many, memory of one is soon made
            self._present = {}
            program = model_program(config, shape)
            edge = {name: kind for name, kind in program.inputs.items() if name != KEPT_ROWS}
            self._arrays[shape] = backend.zeros_side_by_side(edge | program.outputs)
        arrays = self._arrays[shape]
        bindings = lambda: {**self._weights, **arrays, **self._kept[place]}  # noqa: E731
        engine = self._engines.bound(shape, slice(place, place + 1), bindings, keep=self._has_one_shape)
        self._measuring.write(piece, lead, last, arrays["features"])
        for name, values in audio_inputs(config, shape, frames, first * config.window_rows).items():
            if values is not self._present.get(name):  # those that are always the same are the same array
                self._host.upload(name, arrays[name], values)
                self._present[name] = values
        self._steps.run((shape, place), {"speech": engine.enqueue})
        again = 0 if config.kept_rows else first - lead
        row, width = config.rows(again * config.window_frames), config.out_hidden_size
        found, flat = list[MediaEmbeddings](), arrays["audio_embeddings"].reshape(-1)
        for count, digest in zip(map(config.rows, piece.frames[first:last]), digests, strict=True):
            rows = self._host.empty((count, width), self._window_size)
            backend.copy(rows, leading(flat[row * width :], (count, width)))
            found.append(MediaEmbeddings(rows, (), digest))
            row += count
        return found


def _unknown(known: Sequence[MediaEmbeddings | None], lead: int, most: int) -> Iterator[tuple[int, int]]:
    """First and behind the last of windows side by side that are not known, as many as fit in runs of `lead + most`
    beside the `lead` windows before the first, of those that there are."""
    first = 0
    while first < len(known):
        last = first + 1
        if known[first] is None:
            while last < min(max(first, lead) + most, len(known)) and known[last] is None:
                last += 1
            yield first, last
        first = last
