"""Rows made beside the vision engine equal those that Pillow and NumPy make, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fixed_shape_backend import FixedShapeBackend, host_view
from golden_vision import golden_directory
from synthetic_images import synthetic_image
from vision_configs import llava_vision, qwen_vision

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.errors import ImageError
from edgellm.multimodal import vision_runner
from edgellm.multimodal.image_processor import ImageProcessor, open_image_processor
from edgellm.multimodal.prepared_image import PreparedImage
from edgellm.multimodal.video import VideoProcessor
from edgellm.multimodal.vision_runner import DevicePatches

QWEN = {"image_processor_type": "Qwen2VLImageProcessor"}
CLIP = {"image_processor_type": "CLIPImageProcessor"}
LLAVA = {"image_processor_type": "LlavaImageProcessor", "do_pad": True}
SIGLIP = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 50, "width": 50}, "resample": 2}
BORDER = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 20},
    "crop_size": {"height": 32, "width": 32},
}
CASES = {
    "qwen": (QWEN, qwen_vision(), ((480, 640), (37, 61), (1, 1), (5, 900), (300, 90), (84, 112))),
    "clip": (CLIP, llava_vision(224, 32), ((300, 400), (61, 37), (224, 224))),
    "siglip with a remainder": (SIGLIP, llava_vision(50, 14), ((40, 90), (90, 40))),
    "padding": (LLAVA, llava_vision(224, 32), ((30, 40),)),
    "border": (BORDER, llava_vision(32, 16), ((30, 40),)),
}
ON_THE_HOST = ("padding", "border")


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> FixedShapeBackend:
    return FixedShapeBackend(golden_directory("qwen2_5_vl", tmp_path_factory.mktemp("vision") / "engines"))


def _processor(case: str, folder: Path) -> ImageProcessor:
    fields, vision, _ = CASES[case]
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    return open_image_processor(folder, vision)


def _written(patches: DevicePatches, backend: FixedShapeBackend, image: PreparedImage) -> np.ndarray:
    target = backend.empty((image.layout.patches, image.layout.patch_elements), "compute")
    patches.write(image, target)
    return np.array(host_view(target))


def test_a_videos_rows_equal_those_of_the_host(backend: FixedShapeBackend, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN | {"min_pixels": 3136, "max_pixels": 100_000}))
    processor, patches = VideoProcessor.open(tmp_path, qwen_vision(), 4096), DevicePatches(backend)
    frames = [np.roll(synthetic_image(60, 90), 7 * place, axis=1) for place in range(5)]
    parts = processor.prepare([(place / 2, frame) for place, frame in enumerate(frames)]).tiles
    for part in parts:  # of the first the size becomes known
        expected = np.array(part.patches)
        found = _written(patches, backend, part)
        np.testing.assert_array_equal(found, expected.astype(found.dtype))
        by_frame = expected.reshape(len(expected), 3, 2, -1)
        assert (by_frame[:, :, 0] != by_frame[:, :, 1]).any() == (part is not parts[-1])
    assert any(patches._tables._kept.values())


@pytest.mark.parametrize("case", CASES)
def test_rows_equal_those_of_the_host(case: str, backend: FixedShapeBackend, tmp_path: Path) -> None:
    processor, patches = _processor(case, tmp_path), DevicePatches(backend)
    for height, width in CASES[case][2]:
        first, second = (processor.prepare(synthetic_image(height, width)[::step]) for step in (1, -1))
        for image in (first, second):
            found = _written(patches, backend, image)
            on_the_host = image is first or case in ON_THE_HOST
            assert ("patches" in vars(image)) == on_the_host  # else Pillow resized nothing
            np.testing.assert_array_equal(found, image.patches)


def test_large_images_and_a_host_that_computes_itself_use_pillow(
    backend: FixedShapeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = _processor("qwen", tmp_path)
    monkeypatch.setattr(vision_runner.image_layout, "MAXIMUM_PIXELS", 40 * 60 - 1)
    patches = DevicePatches(backend)
    for _ in range(2):
        image = processor.prepare(synthetic_image(40, 60))
        np.testing.assert_array_equal(_written(patches, backend, image), image.patches)
        assert "patches" in vars(image)

    host = open_backend("numpy", golden_directory("qwen2_5_vl", tmp_path / "engines"))
    small = processor.prepare(synthetic_image(30, 60))
    target = host.empty((small.layout.patches, small.layout.patch_elements), "compute")
    DevicePatches(host).write(small, target)
    np.testing.assert_array_equal(target, small.patches)


def test_sizes_that_come_and_go_keep_few_tables(backend: FixedShapeBackend, tmp_path: Path) -> None:
    processor, patches = _processor("qwen", tmp_path), DevicePatches(backend)
    for width in (30, 30, 40, 40, 50, 50, 60, 60, 70, 70, 30, 30):
        image = processor.prepare(synthetic_image(30, width))
        np.testing.assert_array_equal(_written(patches, backend, image), image.patches)
    assert len(patches._tables) == 4


def test_rows_of_another_model_are_refused(backend: FixedShapeBackend, tmp_path: Path) -> None:
    image = _processor("qwen", tmp_path).prepare(synthetic_image(40, 60))
    target = backend.empty((image.layout.patches, 32), "compute")
    with pytest.raises(ImageError, match=r"was prepared as \[24, 1176\], the vision encoder takes \[24, 32\]"):
        DevicePatches(backend).write(image, target)
