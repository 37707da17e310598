"""How families cut pictures that their encoders see in parts: a rule each, and its name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from edgellm.engines.families.vision_config import VisionConfig
from edgellm.multimodal.image_layout import Size
from edgellm.multimodal.processor_config import ProcessorConfig

#: What no edge is made longer than by Idefics3's processor, whatever its file says.
_LONGEST_EDGE = 4096


class Cut(NamedTuple):
    """How a picture is cut: into `grid` (rows, columns) tiles, once it was resized to each of `sizes`; and the whole of
    it, resized to each of `whole`, comes behind them, or `whole_first`. (0, 0): it has no tiles; None: the whole is not
    shown."""

    grid: tuple[int, int] = (0, 0)
    sizes: tuple[Size, ...] = ()
    whole: tuple[Size, ...] | None = None
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
            return Cut(whole=(first, (self.side, self.side)))
        longer = math.ceil(max(first) / self.side) * self.side
        rows, columns = (max(1, math.ceil(edge / self.side)) for edge in _with_longer_edge(longer, *first))
        second = rows * self.side, columns * self.side
        if rows * columns == 1:
            return Cut(whole=(first, second))
        return Cut((rows, columns), (first, second), (first, second, (self.side, self.side)))

    def _shown(self, height: int, width: int) -> Size:
        """As `get_resize_output_image_size` of the published processor: the shorter edge is made even."""
        rows, columns = _with_longer_edge(self.longest, height, width)
        rows, columns = (rows + rows % 2, columns) if width >= height else (rows, columns + columns % 2)
        if max(rows, columns) > _LONGEST_EDGE:
            rows, columns = _with_longer_edge(_LONGEST_EDGE, max(1, rows), max(1, columns))
        return max(1, rows), max(1, columns)


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
            return Cut(whole=(square,))
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
            return Cut(whole=(whole,))
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
        return Cut(whole=((rows * self.unit, columns * self.unit),))


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
            return Cut(whole=(self._shown(height, width, True),))
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


@dataclass(frozen=True)
class PanAndScanRule:
    """Gemma 3's, where its file asks for that: beside the whole of a picture whose longer edge is `ratio` times the
    other or more stand two to `most` crops of it, one behind the other along that edge, of `least` pixels a side or
    more. Each is resized for itself."""

    least: int
    most: int
    ratio: float

    @classmethod
    def open(cls, config: ProcessorConfig, vision: VisionConfig) -> PanAndScanRule | None:
        """The rule of a `preprocessor_config.json`; None: pictures are shown as a whole alone."""
        if not config.values.get("do_pan_and_scan"):
            return None
        if vision.family != "gemma3" or not config.switch("do_pan_and_scan"):
            config.unsupported("do_pan_and_scan", "false: the model is not made for crops")
        least, most = (config.count(f"pan_and_scan_{name}") for name in ("min_crop_size", "max_num_crops"))
        return cls(least, most, config.positive("pan_and_scan_min_ratio_to_activate"))

    def crops(self, height: int, width: int) -> list[tuple[slice, slice]]:
        """Rows and columns of each crop; none: the whole alone is shown."""
        longer, shorter = max(height, width), min(height, width)
        count = min(self.most, max(2, min(longer // self.least, math.floor(longer / shorter + 0.5))))
        length = -(-longer // count)
        if longer / shorter < self.ratio or min(length, shorter) < self.least:
            return []
        parts = [slice(first, first + length) for first in range(0, longer, length)]
        return [(slice(height), part) if width >= height else (part, slice(width)) for part in parts]


def _nearest(edge: float, unit: int) -> int:
    """The multiple of a unit that is the nearest to an edge, at least one."""
    return max(round(edge / unit) * unit, unit)


CutRule = LongestEdgeRule | NearestShapeRule | TokenRule | BudgetRule | SliceRule
#: The rule of each family whose pictures are cut.
RULES: dict[str, type[CutRule]] = {
    "smolvlm": LongestEdgeRule,
    "internvl": NearestShapeRule,
    "lfm2_vl": TokenRule,
    "gemma4": BudgetRule,
    "minicpmv4_6": SliceRule,
}
