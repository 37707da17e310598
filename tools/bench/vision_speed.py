"""Speed of an image's way to the first token: Qwen2.5-VL-3B's shapes, random weights, frames of 640 x 480 pixels.

    python tools/bench/vision_speed.py [--work DIRECTORY] [--output RESULTS.json] [--layers N] [--backend NAME]

Every frame is another one, as from a camera; times are wall time of a host that waits after each part, medians of the
frames after the first few. `digest` names the content, behind the encoder's launch; `patches` are resizing, normalizing
and ordering, `vision` is the rest of the vision runner's work, `prefill` takes the prompt with the image in it and ends
with the first token. Where transformers and PyTorch with CUDA are there, the same encoder is timed with them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import measured_as, parse
from provenance import provenance, report
from random_checkpoint import QWEN_2_5_VL_3B, QWEN_2_5_VL_PREPROCESSOR, write_checkpoint

from edgellm.engines.backends.base import Backend
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.memory_plan import MemoryPlan
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.media import place_media
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.kernels.arrays import leading
from edgellm.multimodal.image_processor import ImageProcessor, open_image_processor
from edgellm.multimodal.prepared_image import PreparedImage
from edgellm.multimodal.vision_runner import VisionEngineRunner

WIDTH, HEIGHT = 640, 480
#: A frame of 1,564 patches takes 1,920 rows of the encoder, windows padded; the larger engine is not used.
LIMITS = EngineLimits(max_batch=1, prefill_chunk=512, kv_capacity=1024, image_rows=(2048, 2240))
TEXT_TOKENS = 24
FRAMES, FIRST = 20, 3


def frames(count: int) -> list[np.ndarray]:
    """Noise over a gradient, [480, 640, 3] uint8 each."""
    random = np.random.default_rng(0)
    gradient = np.linspace(0, 200, WIDTH, dtype=np.uint8)[None, :, None]
    return [gradient + random.integers(0, 50, (HEIGHT, WIDTH, 3), np.uint8) for _ in range(count)]


def timed(backend: Backend, action: Callable[[], Any]) -> tuple[Any, float]:
    """What an action gives, and the milliseconds until the device has done it."""
    started = time.perf_counter()
    result = action()
    backend.synchronize()
    return result, (time.perf_counter() - started) * 1000


def prompt_ids(directory: EngineDirectory, tokens: int) -> list[int]:
    """An image between its markers, and some text."""
    vision = directory.vision.config
    image = [vision.vision_start_token_id, *[vision.image_token_id] * tokens, vision.vision_end_token_id]
    return [*range(8), *image, *range(100, 100 + TEXT_TOKENS)]


def measure(directory: EngineDirectory, backend_name: str) -> dict[str, Any]:
    """Times in milliseconds of each part, of the whole, and of a frame that was seen before."""
    backend = open_backend(backend_name, directory)
    vision = VisionEngineRunner(backend, directory)
    with directory.checkpoint() as files:
        base = BaseEngineRunner(backend, directory.config, directory.limits, files, vision_memory=vision.memory)
    vision.load()
    processor = open_processor(directory)
    parts: dict[str, list[float]] = {name: [] for name in ("digest", "patches", "vision", "prefill", "first_token")}
    for frame in frames(FRAMES):
        started = time.perf_counter()
        image = processor.prepare(frame)
        (embeddings,), encoding = timed(backend, lambda image=image: vision.encode([image]))
        ids = prompt_ids(directory, image.tokens)
        images = place_media(ids, {directory.config.media["image"]: [embeddings]}, directory.config)
        before = time.perf_counter()
        base.start(0, ids, 0, SamplingValues(), images).wait()
        parts["prefill"].append((time.perf_counter() - before) * 1000)
        parts["first_token"].append((time.perf_counter() - started) * 1000)
        parts["digest"].append(timed(backend, lambda frame=frame: processor.prepare(frame).digest)[1])
        patches = patch_milliseconds(vision, processor.prepare(frame))
        parts["patches"].append(patches)
        parts["vision"].append(encoding - patches)
        base.stop(0)
    results: dict[str, Any] = {f"{name}_ms": statistics.median(values[FIRST:]) for name, values in parts.items()}
    results["preprocessing_share"] = (results["digest_ms"] + results["patches_ms"]) / results["first_token_ms"]
    encoded = vision.encoded
    _, results["repeated_frame_ms"] = timed(backend, lambda: vision.encode([processor.prepare(frame)]))
    results["vision_passes_of_a_repeated_frame"] = vision.encoded - encoded
    results["image_tokens"], results["patches"] = image.tokens, len(image.patches)
    results["host_patches_ms"] = timed(backend, lambda: processor.prepare(frame).patches)[1]
    results["memory_mib"] = {name: size / 2**20 for name, size in base.memory_plan.items.items()}
    vision.close()
    base.close()
    return results


def open_processor(directory: EngineDirectory) -> ImageProcessor:
    """The directory's image processor, for images that its engines take."""
    config = directory.vision.config
    return open_image_processor(directory.path, config, config.patches_within(directory.limits.image_rows[-1]))


def patch_milliseconds(vision: VisionEngineRunner, image: PreparedImage) -> float:
    """Writing an image's rows into the encoder's memory."""
    rows = leading(vision._buffers["patches"], (image.grid[1] * image.grid[2], vision.config.patch_elements))
    return timed(vision.backend, lambda: vision._device_patches.write(image, rows))[1]


def measure_attention(directory: EngineDirectory, kind: str) -> float:
    """Milliseconds of `encode` with another kind of attention than the directory's, on TensorRT."""
    directory = replace(directory, attention=kind)
    backend = open_backend("tensorrt", directory)
    vision = VisionEngineRunner(backend, directory)
    backend.check_memory(MemoryPlan({**vision.memory, "engine scratch": backend.scratch_bytes()}))
    vision.load()
    processor, spans = open_processor(directory), []
    for frame in frames(FRAMES):
        image = processor.prepare(frame)
        spans.append(timed(backend, lambda image=image: vision.encode([image]))[1])
    vision.close()
    backend.close()
    return statistics.median(spans[FIRST:])


def measure_transformers(layers: int) -> float | None:
    """Milliseconds of the encoder in transformers, fp16 and eager but for fused attention; None where it is missing."""
    try:
        import torch
        from transformers import Qwen2_5_VLConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    config = Qwen2_5_VLConfig(vision_config={**QWEN_2_5_VL_3B["vision_config"], "depth": layers}).vision_config
    config._attn_implementation = "sdpa"
    model = Qwen2_5_VisionTransformerPretrainedModel(config).to("cuda", torch.float16).eval()
    patches = torch.randn(34 * 46, 1176, device="cuda", dtype=torch.float16)
    grid, spans = torch.tensor([[1, 34, 46]], device="cuda"), []
    with torch.inference_mode():
        for _ in range(FRAMES):
            torch.cuda.synchronize()
            started = time.perf_counter()
            model(patches, grid)
            torch.cuda.synchronize()
            spans.append((time.perf_counter() - started) * 1000)
    return statistics.median(spans[FIRST:])


def main() -> None:
    """Make what is missing, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-bench")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--layers", type=int, help="of both models, for a rehearsal")
    parser.add_argument("--backend", default="tensorrt", choices=("tensorrt", "numpy"))
    arguments = parse(parser)
    config = dict(QWEN_2_5_VL_3B)
    if arguments.layers is not None:
        full = [index for index in (0, 7) if index < arguments.layers]
        vision = {**config["vision_config"], "depth": arguments.layers, "fullatt_block_indexes": full}
        config |= {"num_hidden_layers": arguments.layers, "vision_config": vision}
    name = f"qwen2_5_vl_{config['num_hidden_layers']}"
    checkpoint, engines = arguments.work / name, arguments.work / f"{name}_engines"
    started = time.perf_counter()
    if not (checkpoint / "model.safetensors").exists():
        write_checkpoint(checkpoint, config, preprocessor=QWEN_2_5_VL_PREPROCESSOR)
    results: dict[str, Any] = {**provenance(), "checkpoint_seconds": time.perf_counter() - started}
    started = time.perf_counter()
    targets = None if arguments.backend == "tensorrt" else []
    build_engine_directory(checkpoint, engines, LIMITS, targets, weights="link", force=True)
    results["build_seconds"] = time.perf_counter() - started
    directory = EngineDirectory.open(engines)
    results |= measure(directory, arguments.backend)
    print(json.dumps(results, indent=2), flush=True)
    if arguments.backend == "tensorrt":
        results["encode_native_attention_ms"] = measure_attention(directory, "native")
        results["encode_composed_attention_ms"] = measure_attention(directory, "composed")
    if measured_as() is None:  # which would take the whole GPU
        results["transformers_encode_ms"] = measure_transformers(config["vision_config"]["depth"])
    report(results, arguments.output)


if __name__ == "__main__":
    main()
