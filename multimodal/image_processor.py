"""Images as a vision encoder takes them, preprocessed as published processors do it: whole, or in parts, tiles of the
picture made large and the whole of it beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from edgellm.engines.errors import CheckpointError, ImageError
from edgellm.engines.families.vision_config import VisionConfig
from edgellm.engines.formats.digests import hash_bytes
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.multimodal.cut_rules import RULES, CutRule, PanAndScanRule
from edgellm.multimodal.image_layout import MAXIMUM_PIXELS, Colour, ImageLayout, Normalization, Size
from edgellm.multimodal.prepared_image import PreparedImage, TiledImage, image_digest
from edgellm.multimodal.processor_config import ProcessorConfig, read_processor_config
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
        own = hash_bytes(f"{digest} {layout!r}".encode())
        return Tile(None, (size[0], size[1]), layout, layout.patches // self.merge_size**2, own, canvases)


#: As the published processors of Qwen's models refuse it; also keeps what lies between two resizes small.
MAXIMUM_ASPECT_RATIO = 200


@dataclass(frozen=True)
class SmartResizeProcessor:
    """Qwen2-VL's kind, which Qwen2.5-VL and Qwen3-VL have too, and Pixtral's: any size, rounded to whole tokens.

    Images have `min_pixels` to `max_pixels` after resizing; `merge_size` x `merge_size` patches become one token. With
    a `longest_edge` (Pixtral) they are made smaller until they fit this, and their tokens come in rows.
    """

    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    resample: int
    normalization: Normalization
    longest_edge: int | None = None

    @classmethod
    def open(cls, config: ProcessorConfig, vision: VisionConfig, max_patches: int | None) -> SmartResizeProcessor:
        """The processor of a configuration; see `open_image_processor`."""
        if config.kind.longest_edge:
            return cls._within_edge(config, vision, max_patches)
        sizes = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
        sizes["temporal_patch_size"] = vision.temporal_patch_size
        config.agree(**sizes)
        smallest, largest = config.pair("size", "shortest_edge", "longest_edge") or config.refuse(
            "size", "shortest_edge and longest_edge, in pixels of the whole image"
        )
        smallest = config.count("min_pixels") if "min_pixels" in config.values else smallest
        largest = config.count("max_pixels") if "max_pixels" in config.values else largest
        if max_patches is not None:
            largest = min(largest, max_patches * sizes["patch_size"] ** 2)
        token_pixels = (sizes["patch_size"] * sizes["merge_size"]) ** 2
        if largest < token_pixels:
            raise CheckpointError(
                f"{config.path}: images may have {largest} pixels, one token alone has {token_pixels}: allow larger "
                "images"
            )
        return cls(
            min(smallest, largest), largest, **sizes, resample=config.resample(), normalization=config.normalization()
        )

    @classmethod
    def _within_edge(
        cls, config: ProcessorConfig, vision: VisionConfig, max_patches: int | None
    ) -> SmartResizeProcessor:
        """Pixtral's. Patches and tokens are the encoder's: the published processor passes over those of its file."""
        edge = config.edge("size", "longest_edge") or config.unsupported("size", "longest_edge")
        if config.switch("do_center_crop"):
            config.unsupported("do_center_crop", "false: an image is shown as a whole")
        side = vision.patch_size * vision.spatial_merge_size
        largest = (-(-edge // side) * side) ** 2
        largest = largest if max_patches is None else min(largest, max_patches * vision.patch_size**2)
        how = config.resample(), config.normalization(), edge
        return cls(0, largest, vision.patch_size, vision.spatial_merge_size, 1, *how)

    def prepare(self, pixels: np.ndarray) -> PreparedImage:
        """Prepare an image [H, W, 3] uint8 RGB. Raises ImageError for one that is too long for its width."""
        resized = self.resized_size(pixels.shape[0], pixels.shape[1])
        sizes = self.patch_size, self.merge_size, self.temporal_patch_size
        layout = ImageLayout(resized, self.resample, self.normalization, *sizes)
        _, rows, columns = (each // self.merge_size for each in layout.grid)
        return PreparedImage.of(pixels, layout, rows * columns, (columns,) * rows if self.longest_edge else ())

    def resized_size(self, height: int, width: int) -> Size:
        """Height and width after resizing: multiples of a token's side, as near to the image's shape as can be.

        The rule of `smart_resize` in the published processor, except that growth stops at `max_pixels`. Raises
        ImageError.
        """
        check_aspect_ratio(height, width)
        side = self.patch_size * self.merge_size
        if self.longest_edge is not None:
            return self._resized_within(min(self.longest_edge, max(height, width)), side, height, width)
        resized = round(height / side) * side, round(width / side) * side
        if math.prod(resized) < self.min_pixels:
            growth = math.sqrt(self.min_pixels / (height * width))
            resized = math.ceil(height * growth / side) * side, math.ceil(width * growth / side) * side
        if math.prod(resized) > self.max_pixels:
            shrinking = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(edge / shrinking / side)) for edge in (height, width))
            resized = rows * side, columns * side
        if math.prod(resized) > self.max_pixels:
            raise ImageError(
                f"an image of {width} x {height} pixels cannot be made small enough for this model: "
                f"{resized[1]} x {resized[0]} is the least for its shape, {self.max_pixels} pixels are the most. "
                "Crop it, or cut it into several images"
            )
        return resized

    def _resized_within(self, edge: int, side: int, height: int, width: int) -> Size:
        """The size of an image whose longer edge becomes at most `edge`, rounded up to whole tokens: the rule of
        `get_resize_output_image_size` in the published processor, except that edges shrink on for `max_pixels`."""
        for longest in range(edge, 0, -side):
            ratio = max(height / longest, width / longest)
            rows, columns = (-(-max(1, math.floor(each / ratio)) // side) for each in (height, width))
            if rows * columns * side**2 <= self.max_pixels:
                return rows * side, columns * side
        return side, side


@dataclass(frozen=True)
class FixedSizeProcessor:
    """CLIP's, SigLIP's and LLaVA's kind: every image becomes one square of the same size, one token for each patch.

    `resized` is what an image is resized to, a number the length of its shortest edge; `crop` the middle then taken;
    `square_colour` fills an image up to a square before. `tokens` of an image include what the encoder adds or drops.
    Where there are `crops` of an image, each becomes such a square, too.
    """

    resized: Size | int
    crop: Size | None
    square_colour: Colour | None
    patch_size: int
    tokens: int
    resample: int
    normalization: Normalization
    crops: PanAndScanRule | None

    @classmethod
    def open(cls, config: ProcessorConfig, vision: VisionConfig) -> FixedSizeProcessor:
        """The processor of a configuration; see `open_image_processor`."""
        resized = config.pair("size", "height", "width") or config.edge("size", "shortest_edge")
        crop = None
        if config.switch("do_center_crop"):
            length = config.count("crop_size") if is_integer(config.values["crop_size"]) else 0
            crop = (length, length) if length else config.pair("crop_size", "height", "width")
            crop = crop or config.refuse("crop_size", "height and width")
        normalization = config.normalization()
        colour = None
        if config.switch("do_pad"):
            if not config.kind.pads_to_square:
                config.unsupported("do_pad", "false, or a LlavaImageProcessor's padding to a square")
            red, green, blue = normalization.mean or (0, 0, 0)
            colour = int(red * 255), int(green * 255), int(blue * 255)
        if resized is None:
            config.unsupported("size", "height and width, or shortest_edge")
        side = vision.image_size
        whole = (resized, resized) if isinstance(resized, int) and colour is not None else resized
        if side is None or (crop or whole) != (side, side):
            config.refuse(
                "crop_size" if crop else "size",
                f"images of {side} x {side} pixels, as config.json has it of the vision encoder",
            )
        tokens = vision.token_count((1, vision.image_side, vision.image_side))
        key = config.kind.tokens_key
        if key and config.values.get(key, tokens) != tokens:
            config.refuse(key, f"{tokens}, as config.json has it")
        how = config.resample(), normalization, PanAndScanRule.open(config, vision)
        return cls(resized, crop, colour, vision.patch_size, tokens, *how)

    def prepare(self, pixels: np.ndarray) -> PreparedImage | TiledImage:
        """Prepare an image [H, W, 3] uint8 RGB. Raises ImageError for one that is too long for its width."""
        crops = [] if self.crops is None else self.crops.crops(*pixels.shape[:2])
        if not crops:
            return self._square(pixels)
        shown = [pixels, *(np.ascontiguousarray(pixels[crop]) for crop in crops)]
        return TiledImage(tuple(map(self._square, shown)), sum(each.size for each in shown) // 3, (len(crops), 1))

    def _square(self, pixels: np.ndarray) -> PreparedImage:
        height, width = pixels.shape[:2]
        if self.square_colour is not None:
            check_aspect_ratio(height, width)
            height = width = max(height, width)
        resized = self.resized
        if isinstance(resized, int):
            check_aspect_ratio(height, width)
            shorter = min(height, width)
            resized = int(resized * height / shorter), int(resized * width / shorter)
        layout = ImageLayout(resized, self.resample, self.normalization, self.patch_size)
        layout = replace(layout, crop=self.crop, square_colour=self.square_colour)
        return PreparedImage.of(pixels, layout, self.tokens)


#: How one model wants its images.
ImageProcessor = SmartResizeProcessor | FixedSizeProcessor | TilingProcessor


def open_image_processor(directory: Path, vision: VisionConfig, max_patches: int | None = None) -> ImageProcessor:
    """The processor that `directory`/preprocessor_config.json describes, for a vision encoder.

    Where `max_patches` is given, images of models that take any size are made no larger than that. Raises
    CheckpointError for a file that is missing, malformed or does not suit `vision`, UnsupportedModelError for a kind of
    preprocessing that is not implemented.
    """
    config = read_processor_config(directory)
    if config.kind.cut or vision.family in RULES:
        return TilingProcessor.open(config, vision, max_patches)
    if config.kind.keeps_shape:
        return SmartResizeProcessor.open(config, vision, max_patches)
    return FixedSizeProcessor.open(config, vision)


def check_aspect_ratio(height: int, width: int) -> None:
    """Raise ImageError for an image that is too long for its width."""
    longer, shorter = max(height, width), min(height, width)
    if longer > MAXIMUM_ASPECT_RATIO * shorter:
        raise ImageError(
            f"an image of {width} x {height} pixels is too long for its width: at most {MAXIMUM_ASPECT_RATIO} to 1 is "
            "what this model takes. Crop it, or cut it into several images"
        )
