"""Pictures that an encoder sees in parts: tiles of the picture made large, and the whole of it beside them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
from PIL import Image

from edgellm.engines.errors import ImageError
from edgellm.engines.families.vision_config import VisionConfig
from edgellm.multimodal.image_layout import MAXIMUM_PIXELS, ImageLayout, Normalization, Size
from edgellm.multimodal.prepared_image import PreparedImage, image_digest
from edgellm.multimodal.processor_config import ProcessorConfig
from edgellm.multimodal.vision_layout import in_squares

#: What no edge is made longer than by Idefics3's processor, whatever its file says.
_LONGEST_EDGE = 4096


class Cut(NamedTuple):
    """How a picture is cut: into `grid` (rows, columns) tiles, once it was resized to each of `sizes`; and the whole of
    it, resized to each of `whole`, comes behind them, or `whole_first`. (0, 0): it has no tiles; None: the whole is not
    shown."""

    grid: tuple[int, int]
    sizes: tuple[Size, ...]
    whole: tuple[Size, ...] | None
    whole_first: bool = False


@dataclass(frozen=True)
class LongestEdgeRule:
    """Idefics3's and SmolVLM's: the longer edge becomes `longest`, then both become multiples of `side`."""

    side: int
    longest: int
    cuts: bool

    @classmethod
    def open(cls, config: ProcessorConfig, vision: VisionConfig, max_patches: int) -> LongestEdgeRule:
        """The rule of a `preprocessor_config.json`."""
        side = config.single("max_image_size", "longest_edge")
        if side != vision.image_size:
            config.refuse("max_image_size", f"tiles of {vision.image_size} pixels, as config.json has the encoder's")
        return cls(side, config.single("size", "longest_edge"), config.switch("do_image_splitting"))

    def cut(self, height: int, width: int) -> Cut:
        first = self._shown(height, width)
        if not self.cuts:
            return Cut((0, 0), (), (first, (self.side, self.side)))
        rows, columns = self._tiles(*first)
        second = rows * self.side, columns * self.side
        if rows * columns == 1:
            return Cut((0, 0), (), (first, second))
        return Cut((rows, columns), (first, second), (first, second, (self.side, self.side)))

    def _shown(self, height: int, width: int) -> Size:
        """As `get_resize_output_image_size` of the published processor: the shorter edge is made even."""
        rows, columns = _with_longer_edge(self.longest, height, width)
        rows, columns = (rows + rows % 2, columns) if width >= height else (rows, columns + columns % 2)
        if max(rows, columns) > _LONGEST_EDGE:
            rows, columns = _with_longer_edge(_LONGEST_EDGE, max(1, rows), max(1, columns))
        return max(1, rows), max(1, columns)

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        longer = math.ceil(max(height, width) / self.side) * self.side
        rows, columns = (max(1, math.ceil(edge / self.side)) for edge in _with_longer_edge(longer, height, width))
        return rows, columns


def _with_longer_edge(longer: int, height: int, width: int) -> Size:
    """Height and width of the same shape, with the rounding of the published processor."""
    shape = width / height
    return (int(longer / shape), longer) if width >= height else (longer, int(longer * shape))


@dataclass(frozen=True)
class NearestShapeRule:
    """InternVL's: `fewest` to `most` tiles, whose grid is as near to the picture's shape as can be. The whole is a
    tile's square, and a picture of one tile is the whole alone."""

    side: int
    fewest: int
    most: int

    @classmethod
    def open(cls, config: ProcessorConfig, vision: VisionConfig, max_patches: int) -> NearestShapeRule:
        """The rule of a `preprocessor_config.json`; InternVL cuts whatever that says of `crop_to_patches`."""
        side = vision.image_size or 0
        if config.pair("size", "height", "width") != (side, side):
            config.refuse("size", f"tiles of {side} x {side} pixels, as config.json has the encoder's")
        return cls(side, config.count("min_patches"), config.count("max_patches"))

    def cut(self, height: int, width: int) -> Cut:
        grid, square = self.grid(height, width), (self.side, self.side)
        if math.prod(grid) == 1:
            return Cut((0, 0), (), (square,))
        return Cut(grid, ((grid[0] * self.side, grid[1] * self.side),), (square,))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns. Of two grids that are equally near, the larger, while it has not twice the pixels."""
        best, difference = (1, 1), math.inf
        counts = range(1, self.most + 1)
        shapes = [(rows, columns) for columns in counts for rows in counts]
        for rows, columns in sorted(shapes, key=math.prod):
            if not self.fewest <= rows * columns <= self.most:
                continue
            found = abs(width / height - columns / rows)
            if found < difference or (found == difference and height * width > 0.5 * self.side**2 * rows * columns):
                best, difference = (rows, columns), found
        return best


@dataclass(frozen=True)
class TokenRule:
    """LFM2-VL's: a picture is shown as it is, in `least` to `most` tokens of `unit` pixels a side. One that is
    `tolerance` times too large for that is cut by `tiles`; the whole comes behind them if there is a `thumbnail`."""

    unit: int
    least: int
    most: int
    tolerance: float
    tiles: NearestShapeRule | None
    thumbnail: bool

    @classmethod
    def open(cls, config: ProcessorConfig, vision: VisionConfig, max_patches: int) -> TokenRule:
        """The rule of a `preprocessor_config.json`; pictures and tiles are no larger than `max_patches` say."""
        config.agree(encoder_patch_size=vision.patch_size, downsample_factor=vision.spatial_merge_size)
        unit, side = vision.patch_size * vision.spatial_merge_size, config.count("tile_size")
        if side % unit:
            config.refuse("tile_size", f"a multiple of a token's side, {unit} pixels")
        fewest, most = config.count("min_tiles"), config.count("max_tiles")
        cuts = config.switch("do_image_splitting") and most > 1 and (side // vision.patch_size) ** 2 <= max_patches
        if cuts and not 1 < fewest <= most:
            config.refuse("min_tiles", f"2 to max_tiles, {most}")
        tokens = min(config.count("max_image_tokens"), max_patches // vision.merge_patches)
        least = min(config.count("min_image_tokens"), tokens)
        tiles = NearestShapeRule(side, fewest, most) if cuts else None
        return cls(unit, least, tokens, config.positive("max_pixels_tolerance"), tiles, config.switch("use_thumbnail"))

    def cut(self, height: int, width: int) -> Cut:
        unit, whole = self.unit, self._shown(height, width)
        # Half a token is the least that the published processor counts here.
        counted = (max(0.5, round(edge / unit)) for edge in (height, width))
        if self.tiles is None or math.prod(counted) <= self.most * self.tolerance:
            return Cut((0, 0), (), (whole,))
        rows, columns = self.tiles.grid(height, width)
        side = self.tiles.side
        return Cut((rows, columns), ((rows * side, columns * side),), (whole,) if self.thumbnail else None)

    def _shown(self, height: int, width: int) -> Size:
        """As `smart_resize` of the published processor."""
        unit = self.unit
        rows, columns = (max(1, round(edge / unit)) for edge in (height, width))
        if rows * columns > self.most:
            shrinking = math.sqrt(height * width / (self.most * unit**2))
            rows, columns = (max(1, math.floor(edge / shrinking / unit)) for edge in (height, width))
        elif rows * columns < self.least:
            growth = math.sqrt(self.least * unit**2 / (height * width))
            rows, columns = (math.ceil(edge * growth / unit) for edge in (height, width))
        return rows * unit, columns * unit


@dataclass(frozen=True)
class BudgetRule:
    """Gemma 4's: a picture is shown as a whole, as large as `tokens` of `unit` pixels a side allow for its shape."""

    unit: int
    tokens: int

    @classmethod
    def open(cls, config: ProcessorConfig, vision: VisionConfig, max_patches: int) -> BudgetRule:
        """The rule of a `preprocessor_config.json`; pictures are no larger than `max_patches` say."""
        config.agree(patch_size=vision.patch_size, pooling_kernel_size=vision.spatial_merge_size)
        tokens = min(config.count("max_soft_tokens"), max_patches // vision.merge_patches)
        return cls(vision.patch_size * vision.spatial_merge_size, tokens)

    def cut(self, height: int, width: int) -> Cut:
        factor = math.sqrt(self.tokens * self.unit**2 / (height * width))
        rows, columns = (math.floor(factor * edge / self.unit) for edge in (height, width))
        if not rows:  # as `get_aspect_ratio_preserving_size` of the published processor has it for strips
            rows, columns = 1, min(width // height, self.tokens)
        elif not columns:
            rows, columns = min(height // width, self.tokens), 1
        return Cut((0, 0), (), ((rows * self.unit, columns * self.unit),))


@dataclass(frozen=True)
class SliceRule:
    """MiniCPM-V's: the whole has about as many pixels as a square of `side`, in tokens of `unit` pixels a side; beside
    it a larger picture is shown in up to `most` slices of about as many, which keep its shape."""

    unit: int
    side: int
    most: int

    @classmethod
    def open(cls, config: ProcessorConfig, vision: VisionConfig, max_patches: int) -> SliceRule:
        """The rule of a `preprocessor_config.json`."""
        config.agree(patch_size=vision.patch_size)
        if config.values["downsample_mode"] != "16x":
            config.unsupported("downsample_mode", "16x")
        if not config.switch("use_image_id"):
            config.unsupported("use_image_id", "true: images have their numbers")
        most = config.count("max_slice_nums") if config.switch("slice_mode") else 1
        return cls(vision.patch_size * vision.spatial_merge_size, config.count("scale_resolution"), most)

    def cut(self, height: int, width: int) -> Cut:
        grid = self._grid(height, width)
        if math.prod(grid) == 1:
            return Cut((0, 0), (), (self._shown(height, width, True),))
        rows, columns = grid
        tall, wide = self._shown(_nearest(height, rows) / rows, _nearest(width, columns) / columns, True)
        return Cut(grid, ((tall * rows, wide * columns),), (self._shown(height, width, False),), whole_first=True)

    def _shown(self, height: float, width: float, grows: bool) -> Size:
        """As `find_best_resize` of the published processor."""
        if grows or height * width > self.side**2:
            shape = width / height
            height = int(self.side / math.sqrt(shape))
            width = int(height * shape)
        return _nearest(height, self.unit), _nearest(width, self.unit)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """As `get_sliced_grid` of the published processor; (1, 1): no slices."""
        count = min(math.ceil(height * width / self.side**2), self.most)
        best, difference = (1, 1), math.inf
        for slices in (each for each in (count - 1, count, count + 1) if count > 1 and 1 < each <= self.most):
            for rows in (each for each in range(1, slices + 1) if not slices % each):
                columns = slices // rows
                found = abs(math.log(width / height) - math.log(columns / rows))
                if found < difference or (found == difference and rows > best[0]):
                    best, difference = (rows, columns), found
        return best


def _nearest(edge: float, unit: int) -> int:
    """The multiple of a unit that is the nearest to an edge, at least one."""
    return max(round(edge / unit) * unit, unit)


#: The rules by their names in `ProcessorKind.cut`.
CutRule = LongestEdgeRule | NearestShapeRule | TokenRule | BudgetRule | SliceRule
_RULES: dict[str, type[CutRule]] = {
    "longest edge": LongestEdgeRule,
    "nearest shape": NearestShapeRule,
    "tokens": TokenRule,
    "budget": BudgetRule,
    "slices": SliceRule,
}
#: The rule of each family whose pictures are cut.
RULES_OF_FAMILIES = {
    **{"smolvlm": "longest edge", "lfm2_vl": "tokens", "internvl": "nearest shape"},
    **{"gemma4": "budget", "minicpmv4_6": "slices"},
}


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
        """[N, E] float32: the encoder's rows, in its order; computed when first asked for."""
        return self.layout.rows_of(self.canvases.of(self.layout))


@dataclass(frozen=True, eq=False)
class TiledImage:
    """A picture in parts: `tiles` row by row, `grid` (rows, columns) of them, and behind or before these the whole, if
    shown.

    `digest` is the SHA-256 of the pixels and of how they are cut.
    """

    tiles: tuple[Tile, ...]
    grid: tuple[int, int]
    digest: str
    held_pixels: int
    kind: ClassVar[str] = "image"

    @property
    def tokens(self) -> int:
        """Those of all parts."""
        return sum(tile.tokens for tile in self.tiles)


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
        if config.kind.cut != RULES_OF_FAMILIES.get(vision.family, ""):
            config.refuse("image_processor_type", f"that of {vision.family}")
        largest = vision.image_side**2 or max_patches or 1 << 31
        rule = _RULES[config.kind.cut].open(config, vision, largest)
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
        return TiledImage(parts, (rows, columns), digest, math.prod(pixels.shape[:2]))

    def _layout(self, sizes: tuple[Size, ...], origin: Size, crop: Size | None) -> TileLayout:
        merge = 1 if self.is_square else self.merge_size
        layout = TileLayout(sizes[-1], self.resample, self.normalization, self.patch_size, merge, crop=crop)
        layout = replace(layout, channels_last=self.channels_last, nested=self.nested)
        return replace(layout, earlier=sizes[:-1], origin=origin)

    def _tile(self, layout: TileLayout, size: tuple[int, ...], canvases: Canvases, digest: str) -> Tile:
        own = hashlib.sha256(f"{digest} {layout!r}".encode()).hexdigest()
        return Tile(None, (size[0], size[1]), layout, layout.patches // self.merge_size**2, own, canvases)
