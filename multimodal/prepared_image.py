"""An image on its way to a vision encoder."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from edgellm.engines.formats.digests import hash_bytes
from edgellm.multimodal.image_layout import MAXIMUM_PIXELS, ImageLayout, Size


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """An image, and what is made of it for a vision encoder.

    `pixels` [H, W, 3] uint8 are the image as decoded, of `size` (height, width), or the frames [F, H, W, 3] of a part
    of a video; None where its rows were made at once. `layout` says how they become rows. The image stands for `tokens`
    tokens of the language model, of which so many follow each other as `runs` says, where the prompt has others behind
    each row; none: all do. `given_digest` is the `digest`, where it is known.
    """

    pixels: np.ndarray | None
    size: Size
    layout: ImageLayout
    tokens: int
    given_digest: str | None
    runs: tuple[int, ...] = field(default=(), kw_only=True)
    kind: ClassVar[str] = "image"

    @classmethod
    def of(cls, pixels: np.ndarray, layout: ImageLayout, tokens: int, runs: tuple[int, ...] = ()) -> PreparedImage:
        """Prepare an image [H, W, 3] uint8. One that no device resizes becomes its rows now, where these are smaller:
        it may wait for its turn for long."""
        size = pixels.shape[0], pixels.shape[1]
        if math.prod(size) <= MAXIMUM_PIXELS or 4 * layout.patches * layout.patch_elements >= pixels.nbytes:
            return cls(pixels, size, layout, tokens, None, runs=runs)
        image = cls(None, size, layout, tokens, image_digest(pixels, layout), runs=runs)
        image.__dict__["patches"] = layout.apply(pixels)
        return image

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the pixels and the layout: equal digests mean equal rows. Computed when first asked for."""
        return self.given_digest or image_digest(self.pixels, self.layout)

    @cached_property
    def sample(self) -> int:
        """What takes less to know than the digest: where it differs, so does that."""
        if self.given_digest is not None or self.pixels is None:
            return hash(self.digest)
        return hash((self.size, self.layout, self.pixels.reshape(-1)[:: 1 + self.pixels.size // 4096].tobytes()))

    @property
    def tiles(self) -> tuple[PreparedImage, ...]:
        """Itself: it is shown in one part."""
        return (self,)

    @property
    def parts(self) -> tuple[int, int, tuple[int, ...]]:
        """Rows and columns of what texts stand around in a prompt, its `runs`, and the tokens of each."""
        return len(self.runs), 1, self.runs or (self.tokens,)

    @property
    def held_pixels(self) -> int:
        """How many pixels it was decoded to."""
        return math.prod(self.size) if self.pixels is None else self.pixels.size // 3

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches in time, height and width."""
        return self.layout.grid

    @cached_property
    def patches(self) -> np.ndarray:
        """[N, E] float32: the encoder's rows, in its order. Computed when first asked for, then kept: an image whose
        embeddings are known by its digest need never be resized."""
        assert self.pixels is not None
        return self.layout.apply(self.pixels)


@dataclass(frozen=True, eq=False)
class PreparedParts:
    """What an encoder sees in several parts, its `tiles`, which were decoded to so many pixels (`held_pixels`)."""

    tiles: tuple[PreparedImage, ...]
    held_pixels: int

    @property
    def tokens(self) -> int:
        """Those of all parts."""
        return sum(tile.tokens for tile in self.tiles)

    @property
    def digest(self) -> str:
        """The SHA-256 of its parts' digests."""
        return hash_bytes(f"{[tile.digest for tile in self.tiles]}".encode())


@dataclass(frozen=True, eq=False)
class TiledImage(PreparedParts):
    """A picture in parts: `tiles` row by row, `grid` (rows, columns) of them, and behind or before these the whole, if
    shown."""

    grid: tuple[int, int]
    kind: ClassVar[str] = "image"

    @property
    def parts(self) -> tuple[int, int, tuple[int, ...]]:
        """See `PreparedImage.parts`."""
        return *self.grid, tuple(tile.tokens for tile in self.tiles)


def image_digest(pixels: Any, layout: ImageLayout) -> str:
    """SHA-256 of the pixels [H, W, 3] or [F, H, W, 3] uint8, their size, and how they become rows."""
    digest = hashlib.sha256(f"{pixels.shape} {layout!r}\n".encode())
    digest.update(np.ascontiguousarray(pixels))
    return digest.hexdigest()
