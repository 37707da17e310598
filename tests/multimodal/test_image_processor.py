"""Preprocessing against the published processors, and what processors refuse."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from golden_files import golden_folder
from published_families import GEMMA_3_4B
from safetensors.numpy import load_file
from synthetic_images import synthetic_image
from vision_configs import llava_vision, qwen_vision

from edgellm.engines.errors import CheckpointError, ImageError, UnsupportedModelError
from edgellm.engines.families.vision_config import read_vision_config
from edgellm.engines.model.vision import VisionConfig
from edgellm.multimodal.image_processor import ImageProcessor, open_image_processor

GOLDENS = golden_folder("images")
_FILE = json.loads((GOLDENS / "expected.json").read_text())
EXPECTED = _FILE["cases"]
#: Releases of Pillow differ in which axis they resize first, and so where hard edges overshoot and are cut off.
SAME_PILLOW = PIL.__version__.split(".")[0] == _FILE["versions"]["pillow"].split(".")[0]
ONE_OF_255 = 1.01 / 255 / 0.26
CASES = [(name, image) for name, case in EXPECTED.items() for image in case["images"]]


def _directory(folder: Path, fields: dict[str, Any] | None, file: str = "preprocessor_config.json") -> Path:
    if fields is not None:
        (folder / file).write_text(json.dumps(fields))
    return folder


def _vision_of(name: str) -> VisionConfig:
    """An encoder that takes what the processor of a golden file gives."""
    patch, (_, rows, _) = EXPECTED[name]["patch_size"], EXPECTED[name]["images"][0]["grid"]
    if name.startswith("qwen"):
        return qwen_vision(patch)
    if name == "gemma3":
        return read_vision_config(GEMMA_3_4B)
    if name.startswith("pixtral"):
        return replace(qwen_vision(patch), family="mistral3", temporal_patch_size=1)
    image_size = {"siglip_remainder": 50}.get(name, rows * patch)
    return llava_vision(image_size, patch)


def _processor(name: str, folder: Path, **options: Any) -> ImageProcessor:
    shutil.copy(GOLDENS / f"{name}.json", folder / "preprocessor_config.json")
    return open_image_processor(folder, _vision_of(name), **options)


@pytest.mark.parametrize(("name", "image"), CASES, ids=[f"{name}-{image['size']}" for name, image in CASES])
def test_rows_equal_those_of_the_published_processors_bit_for_bit(
    name: str, image: dict[str, Any], tmp_path: Path
) -> None:
    height, width = image["size"]
    prepared = _processor(name, tmp_path).prepare(synthetic_image(height, width))
    assert list(prepared.grid) == image["grid"]
    middle = load_file(GOLDENS / "expected.safetensors")[f"{name}.{height}x{width}"]
    found = prepared.patches[len(prepared.patches) // 2, ::5]
    assert np.abs(found - middle).mean() < ONE_OF_255
    if SAME_PILLOW:
        np.testing.assert_array_equal(found, middle)
        assert hashlib.sha256(prepared.patches.tobytes()).hexdigest() == image["sha256"]


def test_an_image_knows_its_tokens_and_size(tmp_path: Path) -> None:
    prepared = _processor("qwen2_5_vl", tmp_path).prepare(synthetic_image(480, 640))
    assert prepared.size == (480, 640)
    assert prepared.grid == (1, 34, 46)
    assert prepared.tokens == 34 * 46 // 4
    assert prepared.patches.shape == (34 * 46, 3 * 2 * 14 * 14)
    assert prepared.patches is prepared.patches


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"class_token": True, "drops_first_row": True}, 49),
        ({"class_token": True}, 50),
        ({}, 49),
        ({"drops_first_row": True}, 48),
    ],
)
def test_tokens_follow_what_the_encoder_adds_and_drops(changes: dict[str, bool], tokens: int, tmp_path: Path) -> None:
    shutil.copy(GOLDENS / "clip.json", tmp_path / "preprocessor_config.json")
    processor = open_image_processor(tmp_path, llava_vision(224, 32, **changes))
    prepared = processor.prepare(synthetic_image(40, 50))
    assert (prepared.tokens, len(prepared.patches)) == (tokens, 49)


def test_of_a_large_image_the_rows_alone_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where these are smaller."""
    pixels = synthetic_image(480, 640)
    expected = _processor("clip", tmp_path).prepare(pixels)
    monkeypatch.setattr("edgellm.multimodal.prepared_image.MAXIMUM_PIXELS", 480 * 640 - 1)
    assert _processor("qwen2_5_vl", tmp_path).prepare(pixels).pixels is pixels
    found = _processor("clip", tmp_path).prepare(pixels)
    assert found.pixels is None and (found.size, found.digest) == (expected.size, expected.digest)
    np.testing.assert_array_equal(found.patches, expected.patches)


def test_a_limit_of_patches_makes_images_smaller(tmp_path: Path) -> None:
    processor = _processor("qwen2_5_vl", tmp_path, max_patches=200)
    for height, width in ((480, 640), (2000, 300), (10, 10)):
        prepared = processor.prepare(synthetic_image(height, width))
        assert 0 < len(prepared.patches) <= 200


@pytest.mark.parametrize(("limit", "grid"), [(None, (62, 110)), (6820, (62, 110)), (1000, (24, 40)), (4, (2, 2))])
def test_a_longest_edge_shrinks_until_the_patches_are_few_enough(
    limit: int | None, grid: tuple[int, int], tmp_path: Path
) -> None:
    """Of a picture of 1600 x 900: its shape is kept as well as whole tokens allow."""
    prepared = _processor("pixtral", tmp_path, max_patches=limit).prepare(synthetic_image(900, 1600))
    assert prepared.grid[1:] == grid
    assert prepared.runs == (grid[1] // 2,) * (grid[0] // 2) and sum(prepared.runs) == prepared.tokens


def test_a_digest_tells_pixels_sizes_and_settings_apart(tmp_path: Path) -> None:
    pixels = synthetic_image(60, 40)
    processor = _processor("qwen2_5_vl", tmp_path)
    digest = processor.prepare(pixels).digest
    assert digest == processor.prepare(pixels.copy()).digest
    changed = pixels.copy()
    changed[59, 39, 2] ^= 1
    others = [
        processor.prepare(changed),
        processor.prepare(pixels.reshape(40, 60, 3)),
        _processor("qwen2_5_vl", tmp_path, max_patches=16).prepare(pixels),
        _processor("qwen3_vl", tmp_path).prepare(pixels),
    ]
    assert len({digest, *(other.digest for other in others)}) == 5


def test_one_pixel_becomes_the_smallest_image(tmp_path: Path) -> None:
    prepared = _processor("qwen2_5_vl", tmp_path).prepare(np.full((1, 1, 3), 200, np.uint8))
    assert prepared.grid == (1, 4, 4)
    assert len(np.unique(prepared.patches)) == 3


@pytest.mark.parametrize("name", ["qwen2_5_vl", "clip", "llava_padded"])
def test_a_strip_is_refused_where_its_shape_would_have_to_be_kept(name: str, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"20000 x 3 pixels is too long for its width: at most 200 to 1"):
        _processor(name, tmp_path).prepare(np.zeros((3, 20000, 3), np.uint8))


def test_a_strip_is_squeezed_into_a_square_where_every_image_is(tmp_path: Path) -> None:
    prepared = _processor("siglip", tmp_path).prepare(np.zeros((3, 20000, 3), np.uint8))
    assert prepared.grid == (1, 14, 14)


def test_a_shape_that_cannot_be_made_small_enough_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"cannot be made small enough"):
        _processor("qwen2_5_vl", tmp_path, max_patches=16).prepare(np.zeros((20, 3000, 3), np.uint8))


def test_the_newer_file_is_read_where_the_older_is_missing(tmp_path: Path) -> None:
    fields = json.loads((GOLDENS / "siglip.json").read_text())
    _directory(tmp_path, {"image_processor": fields, "processor_class": "X"}, "processor_config.json")
    assert open_image_processor(tmp_path, llava_vision(224, 16)).prepare(synthetic_image(9, 9)).tokens == 196
    _directory(tmp_path, {"image_processor": [1]}, "processor_config.json")
    with pytest.raises(CheckpointError, match=r"processor_config.json: image_processor is \[1\]"):
        open_image_processor(tmp_path, llava_vision(224, 16))


@pytest.mark.parametrize("kind", ["CLIPImageProcessorFast", "CLIPFeatureExtractor", "LlavaImageProcessorPil"])
def test_older_and_newer_names_and_sizes_are_known(kind: str, tmp_path: Path) -> None:
    key = "feature_extractor_type" if "Feature" in kind else "image_processor_type"
    fields = {key: kind, "size": 64, "crop_size": 64, "image_mean": 0.5, "image_std": [0.5] * 3}
    _directory(tmp_path, fields)
    prepared = open_image_processor(tmp_path, llava_vision(64, 16)).prepare(np.full((9, 30, 3), 255, np.uint8))
    assert prepared.grid == (1, 4, 4)
    assert np.all(prepared.patches == 1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"image_processor_type": "OtherImageProcessor"}, UnsupportedModelError, "image_processor_type is"),
        ({"image_processor_type": None}, UnsupportedModelError, "image_processor_type is null"),
        ({"do_resize": False}, UnsupportedModelError, "do_resize is false"),
        ({"do_rescale": "yes"}, CheckpointError, 'do_rescale is "yes", expected true or false'),
        ({"rescale_factor": 0}, CheckpointError, "rescale_factor is 0, expected a number above 0"),
        ({"image_mean": [0.5]}, CheckpointError, "image_mean is"),
        ({"image_std": [0.5, 0, 0.5]}, CheckpointError, "image_std is"),
        ({"resample": 9}, CheckpointError, "resample is 9"),
        ({"patch_size": 16}, CheckpointError, "patch_size is 16, expected 14, as config.json has it"),
        ({"merge_size": 3}, CheckpointError, "merge_size is 3, expected 2"),
        ({"temporal_patch_size": 0}, CheckpointError, "temporal_patch_size is 0"),
        ({"size": {"height": 28, "width": 28}}, CheckpointError, "expected shortest_edge and longest_edge"),
        ({"size": {"shortest_edge": -1, "longest_edge": 9}}, CheckpointError, "whole numbers above 0"),
        ({"max_pixels": 100, "min_pixels": 50}, CheckpointError, "100 pixels, one token alone has 784"),
    ],
)
def test_what_does_not_suit_is_named(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    fields = {"image_processor_type": "Qwen2VLImageProcessor", **changes}
    with pytest.raises(error, match=r"preprocessor_config\.json") as caught:
        open_image_processor(_directory(tmp_path, fields), qwen_vision())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"crop_size": {"height": 336, "width": 336}}, CheckpointError, "crop_size is"),
        ({"do_center_crop": False}, CheckpointError, "size is"),
        ({"crop_size": "large"}, CheckpointError, "expected height and width"),
        ({"size": {"longest_edge": 224}}, UnsupportedModelError, "height and width, or shortest_edge"),
        ({"do_pad": True}, UnsupportedModelError, "do_pad is true"),
    ],
)
def test_a_square_of_another_size_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    fields = {"image_processor_type": "CLIPImageProcessor", **changes}
    with pytest.raises(error) as caught:
        open_image_processor(_directory(tmp_path, fields), llava_vision(224, 14))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing: it says how images become input"),
        (b"{", "is not valid JSON"),
        (b"[]", r"holds \[\], expected an object"),
        (b"\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_missing_or_malformed_file_is_an_error(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "preprocessor_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_image_processor(tmp_path, qwen_vision())
