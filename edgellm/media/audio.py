"""`AudioEncoder`: the encoder of speech. It computes on the host, with NumPy in float32, whatever the backend is."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import numpy as np

from edgellm.engines.backends.base import Backend
from edgellm.engines.backends.numpy_backend import NumpyEngine
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.audio_encoders import audio_inputs, audio_program, audio_weights, read_audio
from edgellm.engines.formats.tensors import convert
from edgellm.engines.runners.media import EmbeddingCache, MediaEmbeddings
from edgellm.errors import AudioError, EngineDirectoryError
from edgellm.metrics import Metrics
from edgellm.multimodal.audio_input import read_audio as read_samples
from edgellm.multimodal.log_mel import PreparedAudio, prepare_audio, read_mel_config
from edgellm.multimodal.sources import source_of_url
from edgellm.text.messages import MediaReference

logger = logging.getLogger("edgellm.media")
#: Rows are kept in so many bytes at most: those of a quarter of an hour and more.
_CACHE_BYTES = 64 << 20


class AudioEncoder:
    """The encoder of speech of a model: prepares sounds and encodes them, window by window of its attention.

    Rows of windows that were heard before are kept by the digests of their features: of a sound that has grown, the
    last window alone is encoded anew. Each is a span of the prompt, whose KV rows are reused as those of a text are.
    Opening one checks all of its files. Raises EngineDirectoryError, CheckpointError, UnsupportedModelError.
    """

    def __init__(self, backend: Backend | None, directory: EngineDirectory, metrics: Metrics) -> None:
        """Without a `backend` it is checked alone."""
        self.kind = directory.config.media["audio"]
        self._backend, self._directory, self._metrics = backend, directory, metrics
        with closing(Checkpoint.open(directory.path)) as checkpoint:
            self.config = config = read_audio(checkpoint)
        if config.out_hidden_size != directory.config.hidden_size:
            raise EngineDirectoryError(f"{directory.path}: its encoder of speech is not that of its language model")
        self.mel = read_mel_config(directory.path, config)
        chunks = -(-directory.limits.kv_capacity // config.rows(config.chunk_frames))
        self._most_seconds = chunks * config.chunk_frames * self.mel.hop / self.mel.rate
        self._weights: dict[str, np.ndarray] = {}
        self._cache = EmbeddingCache(_CACHE_BYTES)
        # Of what is between steps, what the first convolution gives and the second one reads is widest.
        weights = 4 * sum(math.prod(spec.shape) for spec in audio_weights(config))
        widest = config.window_frames * config.mel_bins * config.channels * 4
        host = {"audio weights": weights, "audio buffers": widest}
        is_host = backend is None or backend.name == "numpy"
        #: What it takes in bytes, by name: of the memory that the language model is in.
        self.memory: Mapping[str, int] = {"audio embeddings": _CACHE_BYTES} | (host if is_host else {})

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load the weights."""
        with closing(Checkpoint.open(self._directory.path)) as checkpoint:
            self._weights = load_numpy_weights(checkpoint, audio_weights(self.config), progress)
        if "audio weights" not in self.memory:
            logger.warning("speech is encoded on the host with NumPy; the language model computes on the GPU")

    def prepare(self, reference: MediaReference) -> PreparedAudio:
        """Read and prepare a sound. Any thread may call it; AudioError names the piece."""
        try:
            source = source_of_url(str(reference.source), "audio") if reference.is_url else reference.source
            return prepare_audio(read_samples(source, self.mel.rate, self._most_seconds), self.mel, self.config)
        except AudioError as error:
            raise AudioError(f"{reference.name}: {error}") from error

    def written(self, piece: PreparedAudio, number: int) -> list[int]:
        """The ids of a sound in a prompt."""
        return [self.kind.token_id] * piece.tokens

    def encode(self, pieces: Sequence[PreparedAudio]) -> list[MediaEmbeddings]:
        """The rows of each window of each piece; those of windows that are not known are computed."""
        started, found, reused = time.perf_counter(), [], 0
        for piece in pieces:
            known = [self._cache.get(digest) for digest in piece.digests]
            reused += None not in known
            for each, features, digest in zip(known, piece.features, piece.digests, strict=True):
                found.append(each or self._encoded(features, digest))
                self._cache.put(found[-1])
        tokens = sum(piece.tokens for piece in pieces)
        self._metrics.heard(len(pieces), tokens, time.perf_counter() - started, reused)
        return found

    def close(self) -> None:
        """Free all memory."""
        self._cache.clear()
        self._weights = {}

    def _encoded(self, features: np.ndarray, digest: str) -> MediaEmbeddings:
        assert self._backend is not None
        engine = NumpyEngine(audio_program(self.config, features.shape[1]))
        rows = np.empty((1, self.config.rows(features.shape[1]), self.config.out_hidden_size), np.float32)
        engine.bind({**self._weights, **audio_inputs(self.config, features), "audio_embeddings": rows})
        engine.enqueue()
        own, _ = convert(rows[0], "float32", self._backend.compute_dtype)
        array = self._backend.empty(own.shape, "compute")
        self._backend.upload(array, own)
        return MediaEmbeddings(array, (), digest)
