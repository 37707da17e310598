"""Whole multimodal models, from patches to logits, against transformers: vision encoder, places, language model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden_images import FOLDER, NAMES, TOLERANCE, WHOLE_IMAGES, GoldenModel, assert_close, prepared_images
from golden_vision import golden_directory, open_vision

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.prompt_images import place_images
from edgellm.engines.runners.sampling_state import SamplingValues


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
