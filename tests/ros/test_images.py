"""Messages with images become the pixels that they show, or are refused by name."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image as Pillow
from ros_double import CompressedImage, Image
from synthetic_images import synthetic_image

from edgellm.errors import ImageError
from edgellm.multimodal.image_input import read_image
from edgellm.ros.answering import image_of

PIXELS = synthetic_image(5, 7)
#: Values in the order of the encoding's name.
VALUES = {
    "rgb8": PIXELS,
    "bgr8": PIXELS[..., ::-1],
    "rgba8": np.dstack([PIXELS, np.full((5, 7), 255, np.uint8)]),
    "bgra8": np.dstack([PIXELS[..., ::-1], np.full((5, 7), 255, np.uint8)]),
    "mono8": PIXELS[..., :1],
    "rgb16": PIXELS.astype(np.uint16) * 257,
    "bgr16": PIXELS[..., ::-1].astype(np.uint16) * 257,
    "mono16": PIXELS[..., :1].astype(np.uint16) * 257,
}


@pytest.mark.parametrize("encoding", VALUES)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("is_bigendian", [0, 1])
def test_an_image(encoding: str, padding: int, is_bigendian: int) -> None:
    values = VALUES[encoding]
    values = values.astype(values.dtype.newbyteorder(">" if is_bigendian else "<"))
    rows = [np.ascontiguousarray(row).tobytes() + b"\xaa" * padding for row in values]
    message = Image(
        height=5, width=7, encoding=encoding, step=len(rows[0]), data=b"".join(rows), is_bigendian=is_bigendian
    )
    expected = PIXELS if values.shape[2] > 1 else np.repeat(PIXELS[..., :1], 3, 2)
    np.testing.assert_array_equal(read_image(image_of(message)), expected)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file(kind: str) -> None:
    file = io.BytesIO()
    Pillow.fromarray(PIXELS).save(file, kind)
    found = read_image(image_of(CompressedImage(format="rgb8; compressed", data=file.getvalue())))
    np.testing.assert_array_equal(found, np.asarray(Pillow.open(file).convert("RGB")))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Image(height=1, width=1, encoding="yuv422_yuy2", step=2, data=b"ab"), "encoding 'yuv422_yuy2': expected one"),
        (Image(height=2, width=2, encoding="rgb8", step=5, data=bytes(10)), "rows of 5 bytes.*at least 6 bytes"),
        (Image(height=2, width=2, encoding="rgb8", step=6, data=bytes(11)), "11 in all"),
        (Image(encoding="rgb8"), "0 x 0 pixels"),
        (CompressedImage(format="16UC1; compressedDepth png", data=bytes(12) + b"\x89PNG"), "neither JPEG nor PNG"),
    ],
)
def test_what_is_refused(message: Image | CompressedImage, said: str) -> None:
    with pytest.raises(ImageError, match=said):
        image_of(message)
