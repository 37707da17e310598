"""Whole multimodal models, from patches to logits, against transformers: vision encoder, places, language model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden_images import FOLDER, NAMES, TOLERANCE, WHOLE_IMAGES, GoldenModel, assert_close
from golden_vision import GoldenImage, golden_directory, open_vision

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.prompt_images import place_images
from edgellm.engines.runners.sampling_state import SamplingValues


def prepared_images(golden: GoldenModel) -> list[GoldenImage]:
    """The patches of each image, as a processor would have made them."""
    pixels, images, first = golden.expected["pixel_values"].astype(np.float32), [], 0
    for index, grid in enumerate(golden.expected["grids"].tolist()):
        if pixels.ndim == 4:  # whole pictures: rows and columns of patches, each channel by channel
            _, channels, height, width = pixels.shape
            rows, columns = grid[1:]
            cut = pixels[index].reshape(channels, rows, height // rows, columns, width // columns)
            patches = cut.transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
        else:
            count = int(np.prod(grid))
            patches = pixels[first : first + count]
            first += count
        tokens = golden.expected[f"image{index}.rows"].shape[0]
        images.append(GoldenImage(np.ascontiguousarray(patches), tuple(grid), tokens, f"image {index}", patches, ()))
    return images


@pytest.mark.parametrize("name", [*NAMES, *WHOLE_IMAGES])
def test_patches_become_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    golden = GoldenModel(name)
    directory = golden_directory(name, tmp_path / "engines", goldens=FOLDER)
    backend = open_backend("numpy", directory)
    vision = open_vision(backend, directory)
    with directory.checkpoint() as checkpoint:
        runner = BaseEngineRunner(backend, directory.config, directory.limits, checkpoint, vision_memory=vision.memory)
    embeddings = vision.encode(prepared_images(golden))
    for found, image in zip(embeddings, golden.images, strict=True):
        np.testing.assert_allclose(found.rows, image.rows, atol=TOLERANCE)
    images = place_images(golden.token_ids, embeddings, directory.vision.config.image_token_id, directory.config)
    runner.start(0, golden.token_ids, 0, SamplingValues(), images).wait()
    assert_close(runner.logits(0), golden.expected["logits"][-1])
    golden.assert_continued(runner)
    vision.close()
    runner.close()
