"""Pictures that an encoder sees in parts: tiles of the picture made large, and the whole of it beside them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from PIL import Image

from edgellm.engines.errors import ImageError
from edgellm.engines.families.vision_config import VisionConfig
from edgellm.multimodal.cut_rules import RULES, CutRule
from edgellm.multimodal.image_layout import MAXIMUM_PIXELS, ImageLayout, Normalization, Size
from edgellm.multimodal.prepared_image import PreparedImage, TiledImage, image_digest
from edgellm.multimodal.processor_config import ProcessorConfig
from edgellm.multimodal.vision_layout import in_squares


@dataclass(frozen=True)
class TileLayout(ImageLayout):
    """How a part of a picture becomes rows: the picture is resized to each of `earlier`, then to `resized`; `crop` of
    it begins at `origin`. With `channels_last` a patch has the channels of each pixel side by side; `nested`: the
    patches of a token come square by square of four."""

    earlier: tuple[Size, ...] = ()
    origin: Size = (0, 0)
    channels_last: bool = False
    nested: bool = False

    def used_part(self) -> tuple[slice, slice] | None:
        """None: kernels do not resize twice, nor put channels last."""
        return None

    def rows_of(self, resized: np.ndarray) -> np.ndarray:
        """The rows [N, E] float32 of the part, of the picture as it was resized last."""
        (top, left), (height, width) = self.origin, self.crop or self.resized
        rows = super().rows_of(resized[top : top + height, left : left + width])
        if self.nested:
            rows = in_squares(rows)
        if not self.channels_last:
            return rows
        return np.ascontiguousarray(rows.reshape(len(rows), 3, -1).swapaxes(1, 2)).reshape(rows.shape)


class Canvases:
    """A picture [H, W, 3] uint8 in the sizes that its parts are cut from, each made once."""

    def __init__(self, pixels: np.ndarray, layouts: Iterable[TileLayout]) -> None:
        self._made: dict[tuple[Size, ...], np.ndarray] = {(): pixels}
        if math.prod(pixels.shape[:2]) > MAXIMUM_PIXELS:  # what waits for its turn is not kept as large as it came
            for layout in layouts:
                self.of(layout)
            del self._made[()]

    def of(self, layout: TileLayout) -> np.ndarray:
        """What a part is cut from."""
        return self._resized((*layout.earlier, layout.resized), layout.resample)

    def _resized(self, sizes: tuple[Size, ...], resample: int) -> np.ndarray:
        found = self._made.get(sizes)
        if found is None:
            image = Image.fromarray(self._resized(sizes[:-1], resample))
            height, width = sizes[-1]
            found = self._made[sizes] = np.asarray(image.resize((width, height), resample))
        return found


@dataclass(frozen=True, eq=False)
class Tile(PreparedImage):
    """A part of a picture, cut from its `canvases`."""

    layout: TileLayout
    canvases: Canvases

    @cached_property
    def patches(self) -> np.ndarray:
        return self.layout.rows_of(self.canvases.of(self.layout))


@dataclass(frozen=True)
class TilingProcessor:
    """Cuts pictures by a family's rule; `merge_size` x `merge_size` patches become a token. `max_patches` are the most
    rows that a part can have; they come in blocks of a token where there is no square that all parts have."""

    rule: CutRule
    resample: int
    normalization: Normalization
    patch_size: int
    merge_size: int
    is_square: bool
    channels_last: bool
    max_patches: int
    nested: bool

    @classmethod
    def open(cls, config: ProcessorConfig, vision: VisionConfig, max_patches: int | None) -> TilingProcessor:
        """The processor of a configuration; see `open_image_processor`."""
        if config.kind.cut != vision.family:
            config.refuse("image_processor_type", f"that of {vision.family}")
        largest = vision.image_side**2 or max_patches or 1 << 31
        rule = RULES[config.kind.cut].open(config, vision, largest)
        sizes = vision.patch_size, vision.spatial_merge_size
        switches = bool(vision.image_size), config.kind.channels_last
        nested = vision.merging_layer is not None
        return cls(rule, config.resample(), config.normalization(), *sizes, *switches, largest, nested)

    def prepare(self, pixels: np.ndarray) -> TiledImage:
        """Prepare an image [H, W, 3] uint8 RGB. Raises ImageError for one of which a part is too large."""
        (rows, columns), sizes, whole, whole_first = self.rule.cut(*pixels.shape[:2])
        height, width = (sizes[-1][0] // rows, sizes[-1][1] // columns) if sizes else (0, 0)
        tiles = [
            self._layout(sizes, (row * height, column * width), (height, width))
            for row in range(rows)
            for column in range(columns)
        ]
        shown = [] if whole is None else [self._layout(whole, (0, 0), None)]
        layouts = [*shown, *tiles] if whole_first else [*tiles, *shown]
        if max(layout.patches for layout in layouts) > self.max_patches:
            raise ImageError(
                f"an image of {pixels.shape[1]} x {pixels.shape[0]} pixels is too long for its width: the vision "
                f"engines take {self.max_patches} patches. Crop it, or build with a larger --max-image-patches"
            )
        digest, canvases = image_digest(pixels, layouts[-1]), Canvases(pixels, layouts)
        parts = tuple(self._tile(layout, pixels.shape[:2], canvases, digest) for layout in layouts)
        return TiledImage(parts, math.prod(pixels.shape[:2]), (rows, columns))

    def _layout(self, sizes: tuple[Size, ...], origin: Size, crop: Size | None) -> TileLayout:
        merge = 1 if self.is_square else self.merge_size
        layout = TileLayout(sizes[-1], self.resample, self.normalization, self.patch_size, merge, crop=crop)
        layout = replace(layout, channels_last=self.channels_last, nested=self.nested)
        return replace(layout, earlier=sizes[:-1], origin=origin)

    def _tile(self, layout: TileLayout, size: tuple[int, ...], canvases: Canvases, digest: str) -> Tile:
        own = hashlib.sha256(f"{digest} {layout!r}".encode()).hexdigest()
        return Tile(None, (size[0], size[1]), layout, layout.patches // self.merge_size**2, own, canvases)
