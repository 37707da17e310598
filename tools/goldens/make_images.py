"""Makes the golden files of `tests/goldens/images` with the image processors of transformers.

    python tools/goldens/make_images.py tests/goldens/images

Needs transformers 5 (torch and torchvision are not needed) and Pillow: the processors are those of the "pil" backend,
which resize with Pillow, not torchvision's. NAME.json is a processor's preprocessor_config.json. `expected.json` holds
for each pair of a processor and an image the grid, the SHA-256 of all rows as float32, and the releases;
`expected.safetensors` every fifth value of the row in the middle. Images come from `tests/helpers/synthetic_images.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import transformers
from safetensors.numpy import save_file
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
from golden_files import pack
from synthetic_images import synthetic_image

_HALF = [0.5, 0.5, 0.5]
_QWEN_SIZES = ((480, 640), (37, 61), (1, 1), (5, 900), (700, 9), (84, 112), (1200, 1900))
_FIXED_SIZES = ((480, 640), (37, 61), (1, 1), (224, 224), (301, 100))

#: Name -> (processor, what its file says, patch size of the encoder, sizes of images).
CASES: dict[str, tuple[type, dict[str, Any], int, tuple[tuple[int, int], ...]]] = {
    "qwen2_5_vl": (
        Qwen2VLImageProcessorPil,
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2},
        14,
        _QWEN_SIZES,
    ),
    "qwen2_5_vl_small": (
        Qwen2VLImageProcessorPil,
        {"size": {"shortest_edge": 28 * 28 * 6, "longest_edge": 28 * 28 * 20}},
        14,
        ((480, 640), (37, 61), (1, 1), (30, 600)),
    ),
    "qwen3_vl": (
        Qwen2VLImageProcessorPil,
        {
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "image_mean": _HALF,
            "image_std": _HALF,
        },
        16,
        _QWEN_SIZES,
    ),
    "clip": (CLIPImageProcessorPil, {}, 32, _FIXED_SIZES),
    "clip_336": (
        CLIPImageProcessorPil,
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        14,
        ((480, 640), (37, 61)),
    ),
    "clip_black_border": (
        CLIPImageProcessorPil,
        {"size": {"shortest_edge": 29}, "crop_size": {"height": 48, "width": 48}},
        16,
        ((480, 640), (33, 31), (61, 20)),
    ),
    "siglip": (SiglipImageProcessorPil, {}, 16, _FIXED_SIZES),
    "siglip_remainder": (
        SiglipImageProcessorPil,
        {"size": {"height": 50, "width": 50}, "resample": 2, "do_normalize": False},
        14,
        ((480, 640), (37, 61)),
    ),
    "gemma3": (
        Gemma3ImageProcessorPil,
        {"size": {"height": 896, "width": 896}, "image_mean": _HALF, "image_std": _HALF, "image_seq_length": 256},
        14,
        ((480, 640), (37, 61)),
    ),
    "llava_padded": (
        LlavaImageProcessorPil,
        {"do_pad": True, "size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        14,
        ((480, 640), (61, 37), (50, 50)),
    ),
    "pixtral": (
        PixtralImageProcessorPil,
        {"size": {"longest_edge": 1540}, "patch_size": 14},
        14,
        ((480, 640), (37, 61), (1, 1), (1200, 1900)),
    ),
    "pixtral_small": (PixtralImageProcessorPil, {"size": {"longest_edge": 100}}, 16, ((101, 99), (9, 900))),
}
#: Patches in height and width of a token, which this processor takes from the whole model's.
_MERGED = 2


def rows_of(processor: Any, pixels: np.ndarray, patch_size: int) -> tuple[np.ndarray, list[int]]:
    """What the processor makes of an image, as rows [N, E] float32 of a patch embedding, and their grid."""
    picture, merge = PIL.Image.fromarray(pixels), 1
    if isinstance(processor, PixtralImageProcessorPil):
        merge, side = _MERGED, _MERGED * patch_size
        values = processor(images=picture, return_tensors="np", patch_size={"height": side, "width": side})
    else:
        values = processor(images=picture, return_tensors="np")
    if "image_grid_thw" in values:
        return np.ascontiguousarray(values["pixel_values"], np.float32), values["image_grid_thw"][0].tolist()
    image = values["pixel_values"][0].astype(np.float32)
    rows, columns = image.shape[1] // patch_size, image.shape[2] // patch_size
    image = image[:, : rows * patch_size, : columns * patch_size]
    blocks = image.reshape(3, rows // merge, merge, patch_size, columns // merge, merge, patch_size)
    patches = blocks.transpose(1, 4, 2, 5, 0, 3, 6)
    return np.ascontiguousarray(patches).reshape(rows * columns, -1), [1, rows, columns]


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    expected, tensors = {}, {}
    for name, (processor_class, settings, patch_size, sizes) in CASES.items():
        processor = processor_class(**settings)
        fields = {"image_processor_type": processor_class.__name__.removesuffix("Pil"), **settings}
        (directory / f"{name}.json").write_text(json.dumps(fields, separators=(",", ":")) + "\n")
        images = []
        for height, width in sizes:
            rows, grid = rows_of(processor, synthetic_image(height, width), patch_size)
            sha256 = hashlib.sha256(rows.tobytes()).hexdigest()
            images.append({"size": [height, width], "grid": grid, "sha256": sha256})
            tensors[f"{name}.{height}x{width}"] = rows[len(rows) // 2, ::5].copy()
        expected[name] = {"patch_size": patch_size, "images": images}
    versions = {"transformers": transformers.__version__, "pillow": PIL.__version__, "numpy": np.__version__}
    (directory / "expected.json").write_text(
        json.dumps({"versions": versions, "cases": expected}, separators=(",", ":")) + "\n"
    )
    save_file(tensors, directory / "expected.safetensors", metadata=versions)
    pack(directory / "expected.safetensors")


if __name__ == "__main__":
    main()
