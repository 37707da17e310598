"""Images as messages of ROS 2 carry them (sensor_msgs), in the form in which `read_image` takes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.errors import ImageError
from edgellm.kernels.errors import shown

#: By the encoding's name (sensor_msgs/image_encodings.hpp): which of a pixel's values are red, green, blue and alpha;
#: and the bits of each.
_ENCODINGS: dict[str, tuple[tuple[int, ...], int]] = {
    "mono8": ((0,), 8),
    "rgb8": ((0, 1, 2), 8),
    "bgr8": ((2, 1, 0), 8),
    "rgba8": ((0, 1, 2, 3), 8),
    "bgra8": ((2, 1, 0, 3), 8),
    "mono16": ((0,), 16),
    "rgb16": ((0, 1, 2), 16),
    "bgr16": ((2, 1, 0), 16),
}
#: What files of JPEG and of PNG begin with.
_FILES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


def image_of(message: Any) -> np.ndarray | bytes:
    """What an Image shows, [H, W, C] uint8 or uint16 with its colours in the order of RGB(A), mostly a view of the
    message's data; or the file, JPEG or PNG, that a CompressedImage has, which is not looked into.

    Raises ImageError for another encoding or format, and for data that are shorter than the rows that they should have.
    """
    if hasattr(message, "format"):
        data = bytes(message.data)
        if not data.startswith(_FILES):
            raise ImageError(
                f"a compressed image of the format {shown(message.format)} holds neither JPEG nor PNG: choose one of "
                "them for image_transport's compressed topic"
            )
        return data
    if message.encoding not in _ENCODINGS:
        raise ImageError(
            f"an image has the encoding {shown(message.encoding)}: expected one of {', '.join(_ENCODINGS)}. Set the "
            "camera's driver to one of them, or convert it, as with image_proc"
        )
    order, bits = _ENCODINGS[message.encoding]
    height, width, step, size = message.height, message.width, message.step, len(message.data)
    row = width * len(order) * bits // 8
    if not row * height or step < row or size < step * height:
        raise ImageError(
            f"an image of {width} x {height} pixels of {message.encoding} has rows of {step} bytes, {size} in all: "
            f"expected rows of at least {row} bytes, and as many of them as it is high"
        )
    rows = np.frombuffer(message.data, np.uint8, step * height).reshape(height, step)[:, :row]
    if bits == 16:
        rows = rows.view(">u2" if message.is_bigendian else "<u2").astype(np.uint16, copy=False)
    pixels = rows.reshape(height, width, len(order))
    if order == (2, 1, 0):
        return pixels[..., ::-1]
    return pixels[..., order] if order != tuple(range(len(order))) else pixels
