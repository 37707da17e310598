"""`SoundFeatures`: measures sounds where their encoder runs, on either backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.engines.backends.base import Backend, Readback, uploaded
from edgellm.engines.model.audio import AudioConfig
from edgellm.kernels.arrays import Array
from edgellm.kernels.sounds.contract import TILE, Placing, part_samples
from edgellm.multimodal.log_mel import MelConfig, Part, PreparedAudio, mel_tables

#: What is quieter than the loudest by more than so much, in powers of ten, counts as that.
_RANGE = np.float32(8)
#: Parts that are measured at once: about a minute.
_BATCH = 64


class SoundFeatures:
    """Log-mel features of sounds in memory of a backend. Those of the latest parts are kept by the digests of their
    samples: of a sound that has grown, what is new alone is measured. The host waits for the device where features are
    measured by the loudest of the whole sound and a part is new. Not thread-safe."""

    def __init__(self, backend: Backend, mel: MelConfig, config: AudioConfig) -> None:
        self._backend, self._mel, self._group = backend, mel, config.group_frames
        #: What counts as the loudest of any sound; None: that of its own.
        self._known = -np.inf if mel.frame else mel.loudest
        tables = mel_tables(mel)
        if not backend.computes_at_once:
            tables = tables._replace(
                window=uploaded(backend, tables.window.astype(np.float32)),
                waves=uploaded(backend, tables.waves),
                filters=uploaded(backend, tables.filters.astype(np.float32)),
                ranges=uploaded(backend, tables.ranges),
            )
        self._tables, self._room = tables, config.kept_parts
        self._logarithms = backend.empty((self._room, mel.part, mel.bins), "float32")
        #: Where the latest parts are, and their loudest, by digest; the oldest first.
        self._kept: dict[str, tuple[int, float]] = {}
        self._free = [*range(self._room)]
        self._samples = backend.host_visible((_BATCH, part_samples(mel.part, mel.hop, mel.size)), "float32")
        self._maxima = backend.host_visible((_BATCH, -(-mel.part // TILE)), "float32")
        #: After which the latest batch was measured.
        self._measuring: Readback | None = None
        self._counts = backend.empty((_BATCH,), "int32")
        self._slots = backend.empty((self._room,), "int32")

    def digests(self, piece: PreparedAudio) -> list[str]:
        """What the rows of each window follow from."""
        return piece.window_digests(self._loudest(piece))

    def write(self, piece: PreparedAudio, first: int, last: int, target: Array) -> None:
        """Set `target`, of the program's shape, to the features of windows side by side, as many as a run has, in order
        with the backend's other work."""
        own, loudest = piece.windows(first, last), self._loudest(piece)
        slots = self._uploaded(self._slots, self._slots_of(own))
        frames = sum(part.count for part in own)
        placing = Placing(frames, self._group, float(np.float32(loudest) - _RANGE), not self._mel.frame)
        self._backend.sound_kernels.place_features(self._logarithms, slots, placing, target.reshape(-1))

    def _loudest(self, piece: PreparedAudio) -> float:
        """Of all parts, the largest logarithm; -inf where features are not measured by it."""
        if self._known is not None:
            return self._known
        unknown = [part for part in piece.parts if part.loudest is None]
        for first in range(0, len(unknown), self._room):
            self._slots_of(unknown[first : first + self._room])
        return max(part.loudest for part in piece.parts if part.loudest is not None)

    def _slots_of(self, parts: Sequence[Part]) -> list[int]:
        """Where the logarithms of parts are, no more than are kept: of those that were not there they are now."""
        new: dict[str, Part] = {}
        for part in parts:
            if part.digest in self._kept:
                self._kept[part.digest] = self._kept.pop(part.digest)  # the latest
            else:
                new[part.digest] = part
        for first in range(0, len(new), _BATCH):
            self._measure([*new.values()][first : first + _BATCH])
        for part in parts:
            part.loudest = self._kept[part.digest][1]
        return [self._kept[part.digest][0] for part in parts]

    def _measure(self, parts: Sequence[Part]) -> None:
        """Measure a batch of parts that were not there, in place of the oldest where there is no room."""
        backend, kept, count = self._backend, self._kept, len(parts)
        if self._measuring is not None:
            self._measuring.wait()  # the samples are read until then
        samples, slots = backend.seen(self._samples), list[int]()
        for place, part in enumerate(parts):
            samples[place, : len(part.samples)] = part.samples
            samples[place, len(part.samples) :] = 0
            slots.append(self._free.pop() if self._free else kept.pop(next(iter(kept)))[0])
        counts = self._uploaded(self._counts, [part.count for part in parts])
        arguments = counts, self._uploaded(self._slots, slots), self._tables, self._logarithms, self._maxima[:count]
        backend.sound_kernels.measure_sounds(self._samples[:count], *arguments)
        self._measuring = backend.read(self._maxima)
        loudest = [-np.inf] * count if self._known is not None else self._measuring.wait().max(axis=1)[:count].tolist()
        for part, slot, most in zip(parts, slots, loudest, strict=True):
            kept[part.digest] = slot, most

    def _uploaded(self, array: Array, values: Sequence[int]) -> Array:
        """The beginning of an array, with these values."""
        self._backend.upload(array[: len(values)], np.array(values, np.int32))
        return array[: len(values)]
