"""The golden vision encoders of `tests/goldens/vision`, made by `tools/goldens/make_vision.py` with transformers."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from golden_files import golden_folder, largest_difference
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models

from edgellm.engines.building.checks import choose_image_rows
from edgellm.engines.building.inputs import read_decoder_config, read_vision_config
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.vision_config import read_vision
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.memory_plan import MemoryPlan
from edgellm.engines.model.vision import VisionConfig
from edgellm.multimodal.image_layout import ImageLayout, Normalization
from edgellm.multimodal.vision_runner import VisionEngineRunner
from tools.demo_model.describe import describe_in_place

GOLDENS = golden_folder("vision")
NAMES = sorted(path.name for path in GOLDENS.iterdir())
#: Room for the largest image of the goldens, windows padded; a smaller engine beside it.
_ROWS = (64, 256)


_MADE_ON_THE_HOST = ImageLayout((1, 1), 3, Normalization(None, None, None), patch_size=1, square_colour=(0, 0, 0))


@dataclass(frozen=True, eq=False)
class GoldenImage:
    """Patches that a processor might have made, and what transformers makes of them."""

    patches: np.ndarray
    grid: tuple[int, int, int]
    tokens: int
    digest: str
    embeddings: np.ndarray
    deepstack: tuple[np.ndarray, ...]
    #: There are no pixels to make the patches from: as for images that kernels do not prepare, they are uploaded.
    layout: ImageLayout = _MADE_ON_THE_HOST
    size: tuple[int, int] = (1, 1)
    runs: tuple[int, ...] = ()

    @property
    def sample(self) -> int:
        """See `PreparedImage.sample`."""
        return hash(self.digest)


def golden_images(name: str) -> list[GoldenImage]:
    """The images of a golden model."""
    expected = load_file(GOLDENS / name / "expected.safetensors")
    images = []
    while f"grid_{len(images)}" in expected:
        index = len(images)
        deepstack = []
        while f"deepstack_{len(deepstack)}_{index}" in expected:
            deepstack.append(expected[f"deepstack_{len(deepstack)}_{index}"])
        embeddings = expected[f"embeddings_{index}"]
        grid = tuple(expected[f"grid_{index}"].tolist())
        patches = expected[f"patches_{index}"].astype(np.float32)
        images.append(GoldenImage(patches, grid, len(embeddings), f"image {index}", embeddings, tuple(deepstack)))
    assert images
    return images


def golden_checkpoint(name: str, place: Path, goldens: Path = GOLDENS) -> Path:
    """A copy of a golden model with what a build needs besides."""
    shutil.copytree(goldens / name, place, ignore=shutil.ignore_patterns("expected.safetensors"))
    vision = json.loads((place / "config.json").read_text())["vision_config"]
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": vision.get("patch_size")}
    if vision.get("model_type") == "pixtral":
        processor["image_processor_type"] = "PixtralImageProcessor"
    processor |= {"merge_size": vision.get("spatial_merge_size"), "temporal_patch_size": 2}
    (place / "preprocessor_config.json").write_text(json.dumps(processor))
    Tokenizer(models.WordLevel({f"token {index}": index for index in range(80)}, "token 0")).save(
        str(place / "tokenizer.json")
    )
    return place


def golden_directory(
    name: str, place: Path, dtype: str = "float32", attention: str = "auto", goldens: Path = GOLDENS
) -> EngineDirectory:
    """An engine directory of a golden model, with engines for its images."""
    golden_checkpoint(name, place, goldens)
    config = read_decoder_config(place)
    vision = read_vision_config(place, None, config)
    step = math.lcm(vision.window_patches, vision.merge_patches)
    rows = choose_image_rows(vision) if vision.image_side else tuple(-(-size // step) * step for size in _ROWS)
    return describe_in_place(place, EngineLimits(1, 16, 64, image_rows=rows), dtype, attention)


def open_vision(backend, directory: EngineDirectory, keeps: bool = True) -> VisionEngineRunner:
    """A vision runner that is alone on its backend, and perhaps keeps no embeddings."""
    runner = VisionEngineRunner(backend, directory)
    runner.cache.most *= keeps
    backend.check_memory(MemoryPlan({**runner.memory, "engine scratch": backend.scratch_bytes()}))
    runner.load()
    return runner


def golden_config(name: str) -> VisionConfig:
    """The configuration of a golden model's vision encoder."""
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        config = read_vision(checkpoint)
    assert config is not None
    return config


def relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference to what is expected, as part of the largest value."""
    return largest_difference(found, expected) / float(np.abs(found).max())
