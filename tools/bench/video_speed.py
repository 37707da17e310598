"""What encoding a video of 60 seconds at 2 frames a second costs, and the same frames as images.

    python tools/bench/video_speed.py [--family qwen2_5_vl] [--backend numpy] [--side 128] [--repeats 3]

The golden models of `tests/goldens/video`, tiny and with random weights, whose bounds on pixels are lifted, so that
frames have the same size either way. Rows are those that go into the encoder, seconds those of this process's
processors (all threads) and of the wall while it encodes, host preparation included; the least of the repeats.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from golden_files import golden_folder
from synthetic_video import timed

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.memory_plan import MemoryPlan
from edgellm.multimodal.image_processor import SmartResizeProcessor, open_image_processor
from edgellm.multimodal.prepared_image import PreparedImage
from edgellm.multimodal.video import VideoProcessor
from edgellm.multimodal.vision_runner import VisionEngineRunner

SECONDS, RATE = 60, 2


def encoded(backend: Any, directory: EngineDirectory, parts: list[PreparedImage]) -> tuple[float, float]:
    """Seconds of the processors and of the wall that encoding the parts takes, none of which is known."""
    runner = VisionEngineRunner(backend, directory)
    runner.cache.most = 0
    backend.check_memory(MemoryPlan({**runner.memory, "engine scratch": backend.scratch_bytes()}))
    runner.load()
    runner.encode(parts[:1])
    processors, wall = time.process_time(), time.perf_counter()
    runner.encode(parts)
    found = time.process_time() - processors, time.perf_counter() - wall
    runner.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen2_5_vl")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--side", type=int, default=128, help="pixels of a frame in height and width")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    patches = (given.side // 4) ** 2
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "engines"
        limits = EngineLimits(1, 16, 64, image_rows=(patches,))
        build_engine_directory(golden_folder("video") / given.family, path, limits, [])
        directory = EngineDirectory.open(path)
        assert directory.vision is not None
        processor = VideoProcessor.open(path, directory.vision.config, patches)
        images = open_image_processor(path, directory.vision.config, patches)
        assert isinstance(images, SmartResizeProcessor)
        unbounded = {"min_pixels": 1, "max_pixels": 1 << 30}
        processor = replace(processor, frames=replace(processor.frames, **unbounded))
        frames = timed(SECONDS * RATE, given.side, given.side, RATE)
        cases = {
            "video": lambda: list(processor.prepare(frames).tiles),
            "images": lambda: [replace(images, **unbounded).prepare(frame) for _, frame in frames],
        }
        backend, found = open_backend(given.backend, directory), {}
        for name, prepare in cases.items():
            times = [encoded(backend, directory, parts := prepare()) for _ in range(given.repeats)]
            rows, tokens = (
                sum(each) for each in zip(*((part.layout.patches, part.tokens) for part in parts), strict=True)
            )
            processors, wall = map(min, zip(*times, strict=True))
            found[name] = {
                "rows": rows,
                "tokens": tokens,
                "processor_s": round(processors, 3),
                "wall_s": round(wall, 3),
            }
        found["ratio"] = {key: round(found["video"][key] / found["images"][key], 3) for key in found["video"]}
    print(json.dumps({"family": given.family, "backend": given.backend, "side": given.side, **found}, indent=1))


if __name__ == "__main__":
    main()
