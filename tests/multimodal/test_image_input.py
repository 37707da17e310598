"""Images from files, bytes, Pillow and arrays: every mode, every limit, everything that is not an image."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from synthetic_images import synthetic_image

from edgellm.engines.errors import EdgeLLMError, ImageError
from edgellm.multimodal import image_input, sources
from edgellm.multimodal.image_input import read_image

PIXELS = synthetic_image(24, 40)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_of(width: int, height: int, data: bytes) -> bytes:
    """A PNG that claims a size, whatever its data holds."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def test_every_source_gives_the_same_pixels(tmp_path: Path) -> None:
    image = Image.fromarray(PIXELS)
    path = tmp_path / "a picture.png"
    path.write_bytes(encoded(image))
    sources = (path, str(path), path.read_bytes(), bytearray(path.read_bytes()), image, PIXELS)
    for source in sources:
        found = read_image(source)
        assert found.dtype == np.uint8 and found.flags.c_contiguous
        np.testing.assert_array_equal(found, PIXELS)
    np.testing.assert_array_equal(read_image(PIXELS[..., ::-1], channels="BGR"), PIXELS)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG"])
def test_formats_are_read(kind: str) -> None:
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(kind, {})
    found = read_image(encoded(Image.fromarray(PIXELS), kind, **options))
    assert found.shape == PIXELS.shape
    if kind not in ("GIF", "JPEG"):
        np.testing.assert_array_equal(found, PIXELS)


def test_a_camera_may_overwrite_its_buffer() -> None:
    buffer = PIXELS.copy()
    found = read_image(buffer)
    buffer[:] = 0
    np.testing.assert_array_equal(found, PIXELS)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_upright(orientation: int) -> None:
    stored = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }[orientation](PIXELS)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(np.ascontiguousarray(stored)), exif=exif)
    np.testing.assert_array_equal(read_image(data), PIXELS)
    np.testing.assert_array_equal(read_image(Image.open(io.BytesIO(data))), PIXELS)


def test_transparency_is_laid_over_white() -> None:
    alpha = np.full((24, 40, 1), 255, np.uint8)
    alpha[:, :20], alpha[:, 20:30] = 0, 51
    colours = np.concatenate([PIXELS, alpha], axis=2)
    expected = PIXELS.copy()
    expected[:, :20] = 255
    expected[:, 20:30] = np.rint(PIXELS[:, 20:30] * 0.2 + 255 * 0.8)
    image = Image.fromarray(colours)
    for source in (image, encoded(image), encoded(image, "WEBP", lossless=True, exact=True), colours):
        np.testing.assert_array_equal(read_image(source), expected)
    np.testing.assert_array_equal(read_image(colours[..., [2, 1, 0, 3]], channels="BGR"), expected)


def test_palettes_and_their_transparent_colour() -> None:
    indices = (np.arange(24 * 40).reshape(24, 40) % 3).astype(np.uint8)
    image = Image.fromarray(indices)
    image.putpalette([255, 0, 0, 0, 128, 0, 1, 2, 3])
    colours = np.array([[255, 0, 0], [0, 128, 0], [1, 2, 3]], np.uint8)
    np.testing.assert_array_equal(read_image(encoded(image)), colours[indices])
    colours[1] = 255
    np.testing.assert_array_equal(read_image(encoded(image, transparency=1)), colours[indices])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "CMYK", "YCbCr", "HSV", "LAB"])
def test_other_modes_become_rgb(mode: str) -> None:
    grey = Image.new("RGB", (9, 7), (128, 128, 128)).convert("L")
    image = grey.convert("RGB") if mode in ("HSV", "LAB", "YCbCr", "CMYK") else grey
    if mode == "LAB":
        image = Image.frombytes("LAB", (9, 7), bytes([137, 0, 0] * 63))
    elif mode == "1":
        image = Image.new("1", (9, 7), 1)
    else:
        image = image.convert(mode)
    found = read_image(image).astype(int)
    assert found.shape == (7, 9, 3)
    assert np.abs(found - (255 if mode == "1" else 128)).max() <= 3


def test_a_cmyk_photograph_keeps_its_colours() -> None:
    data = encoded(Image.new("RGB", (16, 16), (255, 0, 0)).convert("CMYK"), "JPEG", quality=95)
    assert np.abs(read_image(data).astype(int) - [255, 0, 0]).max() <= 6


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 24 * 40).astype(np.uint16).reshape(24, 40)
    expected = np.repeat(np.rint(values / 257).astype(np.uint8)[..., None], 3, axis=2)
    sources = (values, values.astype(">u2"), values[..., None], np.repeat(values[..., None], 3, axis=2))
    for source in sources:
        np.testing.assert_array_equal(read_image(source), expected)
    for kind in ("PNG", "TIFF"):
        np.testing.assert_array_equal(read_image(encoded(Image.fromarray(values), kind)), expected)
    np.testing.assert_array_equal(read_image(Image.fromarray(values.astype(np.int32))), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_from_0_to_1_are_scaled(dtype: type) -> None:
    values = (PIXELS / 255).astype(dtype)
    assert np.abs(read_image(values).astype(int) - PIXELS).max() == 0
    grey = Image.fromarray(values[..., 0].astype(np.float32))
    np.testing.assert_array_equal(read_image(grey)[..., 1], PIXELS[..., 0])


def test_the_first_frame_of_an_animation_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    colours = ((200, 30, 40), (0, 255, 0), (0, 0, 255), (9, 9, 9))
    frames = [Image.new("RGB", (32, 16), colour) for colour in colours]
    kinds = ["PNG", "WEBP", "TIFF", "GIF"]
    if int(PIL.__version__.split(".")[0]) >= 11:  # older releases write malformed MPO files
        kinds.append("MPO")
    for kind in kinds:
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        assert np.abs(read_image(data).astype(int) - colours[0]).max() <= 9, kind
        monkeypatch.setattr(image_input, "SOURCE_FRAMES", 3)
        with pytest.raises(ImageError, match=r"has 4 frames: the most is 3. Save the frame"):
            read_image(data)
        monkeypatch.undo()


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 20000), (20000, 3)])
def test_extreme_shapes_are_read(height: int, width: int) -> None:
    pixels = synthetic_image(height, width)
    np.testing.assert_array_equal(read_image(encoded(Image.fromarray(pixels))), pixels)


def test_a_decompression_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = png_of(30_000, 30_000, bytes(1 << 20))
    assert len(bomb) < 4096
    with pytest.raises(ImageError, match=r"is too large: the most is 64000000 pixels. Scale it down first$"):
        read_image(bomb)
    smaller = png_of(9_000, 9_000, bytes(1 << 10))  # within Pillow's own limit
    with pytest.raises(ImageError, match=r"9000 x 9000 = 81000000 pixels: the most is 64000000"):
        read_image(smaller)
    monkeypatch.setattr(image_input, "SOURCE_PIXELS", 959)
    with pytest.raises(ImageError, match=r"960 pixels: the most is 959"):
        read_image(PIXELS)
    with pytest.raises(ImageError, match=r"40 x 24 = 960 pixels"):
        read_image(Image.fromarray(PIXELS))


def test_a_file_that_is_too_long_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.png"
    with path.open("wb") as file:
        file.truncate(10**12)  # sparse: reading it would fill the memory
    with pytest.raises(ImageError, match=r"long.png has 1000000000000 bytes: the most is 67108864"):
        read_image(path)
    with path.open("r+b") as file:
        file.truncate(10**8)  # nine minutes of sound in CD quality
    data, _ = sources.bytes_of(path, "audio") or (b"", "")
    assert len(data) == 10**8
    monkeypatch.setitem(sources.SOURCE_BYTES, "image", 99)
    with pytest.raises(ImageError, match="the image has 100 bytes: the most is 99"):
        read_image(bytes(100))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_truncated_file_is_an_error(kind: str) -> None:
    data = encoded(Image.fromarray(synthetic_image(60, 70)), kind)
    for kept in (len(data) // 2, len(data) // 10, 20):
        with pytest.raises(ImageError, match="damaged"):
            read_image(data[:kept])


@pytest.mark.parametrize("data", [b"", b"hello", b"%PDF-1.7", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0 EPSF-3.0\n%%EOF"])
def test_what_is_no_image_is_an_error(data: bytes) -> None:
    with pytest.raises(
        ImageError, match=r"the image is not an image, or its beginning is damaged: expected one of PNG"
    ):
        read_image(data)


def test_a_path_that_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ImageError, match=r"missing\.png cannot be read: No such file"):
        read_image(tmp_path / "missing.png")
    with pytest.raises(ImageError, match="is a folder"):
        read_image(tmp_path)
    with pytest.raises(ImageError, match=r"pipe is not a regular file"):
        read_image(tmp_path / "pipe")
    with pytest.raises(ImageError, match="cannot be read"):
        read_image("a\0b")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((4, 4, 3), np.nan, np.float32), "has NaN: expected 0 to 1"),
        (np.full((4, 4), np.inf), "has values from inf to inf"),
        (np.full((4, 4), 255.0), "has values from 255 to 255: expected 0 to 1. Divide"),
        (np.full((4, 4), -0.1), "has values from -0.1"),
        (np.zeros((4, 4, 2), np.uint8), "expected [H, W], or [H, W, C] with 1, 3 or 4 channels"),
        (np.zeros((4, 4, 5), np.uint8), "with 1, 3 or 4 channels"),
        (np.zeros((3, 8, 8), np.uint8), "the channels come last, transpose(1, 2, 0)"),
        (np.zeros((2, 8, 8, 3), np.uint8), "is not one image"),
        (np.zeros(8, np.uint8), "is not one image"),
        (np.zeros((0, 8, 3), np.uint8), "is empty"),
        (np.zeros((8, 8, 3), np.int64), "expected uint8, uint16, or floats"),
        (np.zeros((8, 8, 3), bool), "expected uint8, uint16, or floats"),
        (np.zeros((8, 8, 3), complex), "expected uint8, uint16, or floats"),
    ],
)
def test_arrays_that_are_no_image_are_errors(array: np.ndarray, message: str) -> None:
    with pytest.raises(ImageError) as caught:
        read_image(array)
    assert message in str(caught.value)
    assert "the array" in str(caught.value)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_any_view_of_an_array_is_an_image_in_memory_of_its_own() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (8, 10, 4), dtype=np.uint8)
    views = (frame[:, ::-1], frame[::2], frame[..., :3], frame[..., ::-1], frame.transpose(1, 0, 2), frame[..., 0])
    for view in (*views, np.asfortranarray(frame)):
        for channels in ("RGB", "BGR"):
            found = read_image(view, channels=channels)
            assert found.flags.c_contiguous and found.shape == (*view.shape[:2], 3)
            np.testing.assert_array_equal(found, read_image(np.ascontiguousarray(view), channels=channels))
    np.testing.assert_array_equal(read_image(np.matrix(frame[..., 0])), read_image(frame[..., 0]))


def test_other_things_are_errors() -> None:
    with pytest.raises(ImageError, match="an image is a list: expected a path"):
        read_image([[0, 1], [2, 3]])
    with pytest.raises(ImageError, match="channels is 'GBR'"):
        read_image(PIXELS, channels="GBR")
    with pytest.raises(ImageError, match="is empty"):
        read_image(Image.new("RGB", (0, 5)))
    with pytest.raises(ImageError, match="from -5 to -5: expected 16 bits"):
        read_image(Image.new("I", (3, 3), -5))


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "TIFF"]), st.data())
def test_damaged_bytes_give_an_image_or_an_error_and_nothing_else(kind: str, data: st.DataObject) -> None:
    damaged = bytearray(encoded(Image.fromarray(PIXELS), kind))
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(image_input, "SOURCE_PIXELS", 10_000)
            found = read_image(bytes(damaged))
    except EdgeLLMError:
        return
    assert found.dtype == np.uint8 and found.shape[2] == 3
