"""Reads images from files, bytes, Pillow and cameras into plain RGB pixels."""

from __future__ import annotations

import io
import threading
import warnings
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from edgellm.engines.errors import ImageError
from edgellm.kernels.errors import shown
from edgellm.multimodal.image_layout import MAXIMUM_PIXELS
from edgellm.multimodal.sources import bytes_of

ImageSource = str | Path | bytes | Image.Image | np.ndarray
Channels = Literal["RGB", "BGR"]

#: What is read from files and bytes. Formats that run other programs (EPS) or describe drawings are left out.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")
#: What an image may have before anything of it is decoded: pixels, frames of an animation.
SOURCE_PIXELS, SOURCE_FRAMES = 64_000_000, 1000

#: While it is decoded and turned, an image takes several times its pixels.
_one_large_image = threading.Lock()


def read_image(source: ImageSource, *, channels: Channels = "RGB") -> np.ndarray:
    """The pixels of an image, [H, W, 3] uint8 RGB, C-contiguous, in memory of their own.

    `source` is a path, the bytes of a file (PNG, JPEG, WebP, GIF, BMP, TIFF, PPM, AVIF where Pillow has it), a Pillow
    image, or an array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] of uint8, of uint16 (0..65535), or of floats (0..1).
    `channels` is the order of an array's colours: "RGB", or "BGR" as OpenCV's cameras give it (with alpha: RGBA, BGRA).

    Photographs are turned upright by their EXIF orientation. Transparent pixels are laid over white. 16 bits a channel
    are scaled to 8. Of an animation or a file of several pages the first frame is taken.

    Raises ImageError for what is not an image, is damaged, or has more than it may, which is checked before decoding.
    """
    if not isinstance(channels, str) or channels not in ("RGB", "BGR"):
        raise ImageError(f"channels is {shown(channels)}: expected 'RGB' or 'BGR', the order of the array's colours")
    if isinstance(source, np.ndarray):
        return _from_array(np.asarray(source), channels)  # a matrix has two dimensions whatever is asked of it
    if isinstance(source, Image.Image):
        return _from_pillow(source, "the Pillow image")
    if (found := bytes_of(source, "image")) is not None:
        return _from_bytes(*found)
    raise ImageError(
        f"an image is a {type(source).__name__}: expected a path, the bytes of a file, a Pillow image or a NumPy array"
    )


def _from_bytes(data: bytes, what: str) -> np.ndarray:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # pixels are counted right after
            image = Image.open(io.BytesIO(data), formats=readable_formats())
    except Image.DecompressionBombError as error:
        raise ImageError(f"{what} is too large: the most is {SOURCE_PIXELS} pixels. Scale it down first") from error
    except Exception as error:  # whatever hostile bytes make a decoder raise
        names = ", ".join(readable_formats())
        raise ImageError(f"{what} is not an image, or its beginning is damaged: expected one of {names}") from error
    with image:
        return _from_pillow(image, what)


def _from_pillow(image: Image.Image, what: str) -> np.ndarray:
    _check_pixels(image.height, image.width, what)
    try:
        frames = getattr(image, "n_frames", 1)
    except Exception as error:
        raise ImageError(f"{what} is damaged: its frames cannot be counted ({error})") from error
    if frames > SOURCE_FRAMES:
        raise ImageError(f"{what} has {frames} frames: the most is {SOURCE_FRAMES}. Save the frame that matters")
    try:
        with _one_large_image if image.height * image.width > MAXIMUM_PIXELS else nullcontext():
            image.load()
            return _rgb(ImageOps.exif_transpose(image), what)
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(f"{what} is damaged or incomplete: {error}. Save or send it again") from error


def _rgb(image: Image.Image, what: str) -> np.ndarray:
    if image.mode in _SIXTEEN_BIT_MODES:
        values = np.asarray(image)
        if values.size and (values.min() < 0 or values.max() > 65535):
            raise ImageError(
                f"{what} has values from {values.min()} to {values.max()}: expected 16 bits, 0 to 65535. Scale it first"
            )
        return _three_channels(_eight_bits(values.astype(np.uint16), what)[..., None])
    if image.mode == "F":
        return _three_channels(_eight_bits(np.asarray(image), what)[..., None])
    if image.has_transparency_data or image.mode in ("La", "RGBa"):
        return _over_white(np.asarray(image.convert("RGBA")))
    return np.array(image.convert("RGB"))


def _from_array(array: np.ndarray, channels: Channels) -> np.ndarray:
    what = f"the array {list(array.shape)} of {array.dtype}"
    shape = array.shape if array.ndim == 3 else (*array.shape, 1)
    if len(shape) != 3 or shape[2] not in (1, 3, 4):
        hint = ": the channels come last, transpose(1, 2, 0)" if array.ndim == 3 and shape[0] in (1, 3, 4) else ""
        raise ImageError(f"{what} is not one image: expected [H, W], or [H, W, C] with 1, 3 or 4 channels{hint}")
    _check_pixels(shape[0], shape[1], what)
    pixels = _eight_bits(array.reshape(shape), what)
    if channels == "BGR" and shape[2] >= 3:
        # Taken at once they take ten times as long.
        pixels = np.stack([pixels[..., each] for each in (2, 1, 0, *range(3, shape[2]))], axis=2)
    return _over_white(pixels) if shape[2] == 4 else _three_channels(pixels)


def _eight_bits(values: np.ndarray, what: str) -> np.ndarray:
    """Values of uint8, uint16 (0..65535) or floats (0..1) as uint8, rounded to the nearest."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.newbyteorder("=") == np.uint16:
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if values.dtype.kind != "f":
        raise ImageError(f"{what}: expected uint8, uint16, or floats from 0 to 1. Convert it first, with astype")
    smallest, largest = float(values.min()), float(values.max())
    if not (smallest >= 0 and largest <= 1):  # false for NaN, too
        found = "NaN" if np.isnan(smallest) or np.isnan(largest) else f"values from {smallest:g} to {largest:g}"
        raise ImageError(f"{what} has {found}: expected 0 to 1. Divide by the largest possible value, or clip it")
    return np.rint(values.astype(np.float32) * 255).astype(np.uint8)


def _three_channels(pixels: np.ndarray) -> np.ndarray:
    """A copy, so that the next frame in a camera's buffer does not change this one."""
    return np.array(np.broadcast_to(pixels, (*pixels.shape[:2], 3)), order="C")


def _over_white(pixels: np.ndarray) -> np.ndarray:
    """Colours [H, W, 4] with alpha laid over white, rounded to the nearest."""
    alpha = pixels[..., 3:].astype(np.uint32)
    mixed = pixels[..., :3] * alpha + 255 * (255 - alpha)
    return ((mixed + 127) // 255).astype(np.uint8, order="C")


def _check_pixels(height: int, width: int, what: str) -> None:
    if not height * width:
        raise ImageError(f"{what} is empty: expected at least one pixel")
    if height * width > SOURCE_PIXELS:
        raise ImageError(
            f"{what} has {width} x {height} = {width * height} pixels: the most is {SOURCE_PIXELS}. Scale it down first"
        )


@lru_cache(maxsize=1)
def readable_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow reads."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)
