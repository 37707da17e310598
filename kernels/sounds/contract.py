"""The contract of the sound kernels: `NumpySounds` defines what they compute, `CudaSounds` computes it.

Features of sounds for encoders of speech, in parts of R frames at most, which are measured alone: P parts of a call,
each with W samples, and S places (slots) that hold logarithms of parts; B mel bands, Z samples of a frame, K
frequencies of its transform, T tiles of a part. A frame's logarithms have the same bits wherever it is measured.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Protocol

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.contracts import MAXIMUM_ROWS, limited

#: So many frames of a part, a tile, have one maximum.
TILE = 16
#: A frame's transform has so many frequencies at most.
MOST_FREQUENCIES = 512


class MelTables(NamedTuple):
    """How frames are measured: every `hop` samples one begins, the `window` weighs its samples, `transform` places have
    the cosines and sines `waves`[:, n, k] of 2 pi n k / transform up to their middle, and band b has the `filters`[b]
    from the frequency `ranges`[b, 0] to before `ranges`[b, 1]. Bands of `magnitudes` are at least `least` by a sum,
    those of powers by a maximum. Tables are float32 on a GPU, and float64 for the twin, which needs no waves.
    """

    window: Annotated[OwnArray, "Z any"]
    waves: Annotated[OwnArray, "2KK float32"]
    filters: Annotated[OwnArray, "BK any"]
    ranges: Annotated[OwnArray, "B2 int32"]
    transform: int
    hop: int
    least: float
    magnitudes: bool


class Placing(NamedTuple):
    """The first `frames` of parts side by side stand in groups of `chunk`, band after band in each, zeros behind them.
    Where `scaled`, logarithms are at least `floor`, plus 4, by 4."""

    frames: int
    chunk: int
    floor: float
    scaled: bool


def part_samples(frames: int, hop: int, size: int) -> int:
    """Samples of so many frames."""
    return (frames - 1) * hop + size


def _check_measure(sizes: dict[str, Any]) -> str | None:
    frequencies, size, transform, hop = sizes["K"], sizes["Z"], sizes["tables.transform"], sizes["tables.hop"]
    if frequencies != transform // 2 + 1 or frequencies > MOST_FREQUENCIES or not 0 < hop <= size <= transform:
        found = f"transforms of {transform}, K = {frequencies}, Z = {size}, hop {hop}"
        return f"{found}: expected at most {MOST_FREQUENCIES} frequencies, hop <= Z <= transform"
    samples, tiles = part_samples(sizes["R"], hop, size), -(-sizes["R"] // TILE)
    if (sizes["W"], sizes["T"]) != (samples, tiles):
        return f"W = {sizes['W']} samples, T = {sizes['T']} tiles; expected {samples}, {tiles} for R = {sizes['R']}"
    return f"P = {sizes['P']} parts; expected at most {MAXIMUM_ROWS}" if sizes["P"] > MAXIMUM_ROWS else None


def _check_placing(sizes: dict[str, Any]) -> str | None:
    frames, chunk, room = sizes["placing.frames"], sizes["placing.chunk"], sizes["N"] // sizes["B"]
    if chunk < 1 or sizes["N"] % (sizes["B"] * chunk) or not 0 <= frames <= min(room, sizes["P"] * sizes["R"]):
        return f"{frames} frames in chunks of {chunk}, room for {room}, P = {sizes['P']} parts of R = {sizes['R']}"
    return None


class SoundKernels(Protocol):
    """One implementation of all."""

    @limited(_check_measure)
    def measure_sounds(
        self,
        samples: Annotated[OwnArray, "PW float32"],
        counts: Annotated[OwnArray, "P int32"],
        slots: Annotated[OwnArray, "P int32"],
        tables: MelTables,
        logarithms: Annotated[OwnArray, "SRB float32"],
        maxima: Annotated[OwnArray, "PT float32"],
    ) -> None:
        """Measure the first counts[p] frames of each part, into the slot slots[p] of `logarithms`: to base 10 of
        powers, natural ones of magnitudes. `maxima` get the largest of each tile of frames, -inf where it has none.

        The twin sums in float64, a GPU in float32: an amplitude is off by up to 1e-6 of the loudest in its frame.
        """

    @limited(_check_placing)
    def place_features(
        self,
        logarithms: Annotated[OwnArray, "SRB float32"],
        slots: Annotated[OwnArray, "P int32"],
        placing: Placing,
        features: Annotated[OwnArray, "N float32"],
    ) -> None:
        """`features` of the parts in these slots, each of R frames but for the last."""
