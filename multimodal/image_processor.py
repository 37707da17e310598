"""Images as a vision encoder takes them, preprocessed as published processors do it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgellm.engines.errors import CheckpointError, ImageError
from edgellm.engines.families.vision_config import VisionConfig
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.multimodal.cut_rules import RULES, PanAndScanRule
from edgellm.multimodal.image_layout import Colour, ImageLayout, Normalization, Size
from edgellm.multimodal.prepared_image import PreparedImage, TiledImage
from edgellm.multimodal.processor_config import ProcessorConfig, read_processor_config
from edgellm.multimodal.tiles import TilingProcessor

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
