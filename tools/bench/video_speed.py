"""What encoding a video of 60 seconds at 2 frames a second costs, and the same frames as images.

    python tools/bench/video_speed.py [--family qwen2_5_vl] [--backend numpy] [--side 128] [--repeats 3]
    python tools/bench/video_speed.py --family qwen2.5-vl-3b --backend tensorrt --side 224

The golden models of `tests/goldens/video`, tiny, or the encoder of Qwen2.5-VL 3B, with random weights; bounds on pixels
are lifted, so that frames have the same size either way. Rows are those that go into the encoder, seconds those of the
encoder by the backend's clock and of this process's processors (all threads), host preparation included; the least of
the repeats.
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

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from golden_files import golden_folder
from random_checkpoint import QWEN_2_5_VL_3B, QWEN_2_5_VL_PREPROCESSOR, write_checkpoint
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
PUBLISHED = "qwen2.5-vl-3b"


def encoded(runner: VisionEngineRunner, parts: list[PreparedImage]) -> tuple[float, float]:
    """Seconds of the encoder and the processors that encoding the parts takes, none of which is known."""
    runner.encode(parts[:1])
    runner.samples.clear()
    runner.host.count()
    encoder, processors = runner.host.seconds, time.process_time()
    runner.encode(parts)
    runner.host.count()  # which waits
    return runner.host.seconds - encoder, time.process_time() - processors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen2_5_vl")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--side", type=int, default=128, help="pixels of a frame in height and width")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        path, source, patch = Path(work) / "engines", Path(work) / "checkpoint", 14
        if given.family == PUBLISHED:
            config = QWEN_2_5_VL_3B | {"num_hidden_layers": 1, "video_token_id": 151656}
            write_checkpoint(source, config, preprocessor=QWEN_2_5_VL_PREPROCESSOR)
        else:
            source, patch = golden_folder("video") / given.family, 4
        patches = (given.side // patch) ** 2
        build_engine_directory(source, path, EngineLimits(1, 16, 64, image_rows=(patches,)), [])
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
        backend, found = open_backend(given.backend, directory), dict[str, Any]()
        runner = VisionEngineRunner(backend, directory)
        runner.cache.most = 0
        backend.check_memory(MemoryPlan({**runner.memory, "engine scratch": backend.scratch_bytes()}))
        runner.load()
        for name, prepare in cases.items():
            times = [encoded(runner, parts := prepare()) for _ in range(given.repeats)]
            rows, tokens = (
                sum(each) for each in zip(*((part.layout.patches, part.tokens) for part in parts), strict=True)
            )
            encoder, processors = map(min, zip(*times, strict=True))
            found[name] = {
                "rows": rows,
                "tokens": tokens,
                "encoder_s": round(encoder, 4),
                "processor_s": round(processors, 3),
            }
        runner.close()
        found["ratio"] = {key: round(found["video"][key] / found["images"][key], 3) for key in found["video"]}
    print(json.dumps({"family": given.family, "backend": given.backend, "side": given.side, **found}, indent=1))


if __name__ == "__main__":
    main()
