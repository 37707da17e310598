"""Vision encoders of every family against transformers (1e-4), through the runner and on fixed shapes too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fixed_shape_backend import FixedShapeBackend, host_view
from golden_files import largest_difference
from golden_vision import GOLDENS, NAMES, golden_directory, golden_images, open_vision, relative_difference

from edgellm.engines.backends.base import Backend
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import iterate_weight_parts, load_numpy_weights
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.vision_config import read_vision
from edgellm.engines.families.vision_encoders import vision_weights

TOLERANCE = 1e-4


def numpy_backend(directory: EngineDirectory) -> Backend:
    return open_backend("numpy", directory)


@pytest.mark.parametrize("make_backend", [numpy_backend, FixedShapeBackend], ids=["free shapes", "fixed shapes"])
@pytest.mark.parametrize("name", NAMES)
def test_embeddings_are_those_of_transformers(name: str, make_backend, tmp_path: Path) -> None:
    directory = golden_directory(name, tmp_path / "engines")
    images = golden_images(name)
    runner = open_vision(make_backend(directory), directory)
    found = runner.encode(images)
    assert len(found) == len(images)
    for image, embeddings in zip(images, found, strict=True):
        assert embeddings.rows.shape == image.embeddings.shape == (image.tokens, directory.config.hidden_size)
        assert (embeddings.digest, embeddings.grid) == (image.digest, image.grid)
        pairs = [(embeddings.rows, image.embeddings), *zip(embeddings.deepstack, image.deepstack, strict=True)]
        for rows, expected in pairs:
            values = rows if isinstance(rows, np.ndarray) else host_view(rows)
            assert relative_difference(values, expected) <= TOLERANCE
            assert largest_difference(values, expected) <= TOLERANCE
    runner.close()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava_clip"])
def test_goldens_cover_odd_sizes_and_several_images(name: str) -> None:
    images = golden_images(name)
    assert len(images) >= 3
    if name != "llava_clip":
        assert {image.grid for image in images} >= {(1, 6, 10), (1, 2, 2), (1, 14, 6)}
        assert any(grid % 4 for image in images for grid in image.grid[1:])  # windows that are cut off


def test_a_convolution_over_blocks_of_rows_has_the_columns_of_each_neighbour_side_by_side() -> None:
    """On NumPy and as it goes to a device, piece by piece."""
    with Checkpoint.open(GOLDENS / "mistral3_earlier_layer") as checkpoint:
        config = read_vision(checkpoint)
        (spec,) = (each for each in vision_weights(config) if each.kernel > 1)
        assert spec.kernel == 9
        published = checkpoint.raw(spec.parts[0][0])
        expected = np.concatenate([published[:, neighbour::9] for neighbour in range(9)], axis=1)
        np.testing.assert_array_equal(load_numpy_weights(checkpoint, [spec])[spec.name], expected.astype(np.float32))
        pieces = iterate_weight_parts(checkpoint, [spec], "float16")
        found = np.concatenate([values for _, _, values in pieces]).view(np.float16)
        np.testing.assert_array_equal(found.reshape(spec.shape), expected)
