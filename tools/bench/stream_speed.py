"""Speed of a stream: from a frame, and from another question about it, to the first token. Qwen3-VL-2B's shapes.

    python tools/bench/stream_speed.py [--work DIRECTORY] [--output RESULTS.json] [--layers N] [--backend NAME]

Random weights, int4 in groups of 128 (the vision encoder in fp16), frames of 640 x 480 pixels: 300 tokens each. The
prompt is an instruction, the image and a question, as `LLM.watch` writes them. Times are medians in milliseconds:
`frame_ms` is what a caller waits for the first token about a new frame, `question_ms` about one that was seen,
`fixed_ms` about a new frame where the question stands in front of it; `alone_ms` is the encoder and the prefill behind
the instruction by themselves, without preparing, queue and threads. `repeated_ms` is a frame whose rows are taken
since it differs by too little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse
from provenance import provenance, report
from random_checkpoint import QWEN_2_5_VL_PREPROCESSOR, SHAPES, write_checkpoint
from vision_speed import frames

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.llm import LLM
from edgellm.requests import Request
from edgellm.runtime import SpecDecodeRuntime

QWEN_3_VL_2B = SHAPES["qwen3-1.7b"] | {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "num_key_value_heads": 8,
    "rope_theta": 5000000.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    "vision_start_token_id": 256,
    "vision_end_token_id": 257,
    "image_token_id": 258,
    "vision_config": {
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "in_channels": 3,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
PREPROCESSOR = QWEN_2_5_VL_PREPROCESSOR | {"patch_size": 16}
LIMITS = EngineLimits(max_batch=1, prefill_chunk=512, kv_capacity=1024, image_rows=(1200,))
#: Behind the bytes of the random model's tokenizer.
MARKERS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|>"
    "<|image_pad|><|vision_end|>{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant: "
)
SYSTEM = "You are a robot. Look at the image, and answer in one word."
QUESTIONS = [f"Is there a {thing} on the table?" for thing in ("cup", "ball", "book", "hand", "lamp")]
COUNT, FIRST, IMAGE_TOKENS = 24, 4, 300


def first_tokens(llm: LLM, **options: Any) -> list[float]:
    """Milliseconds from each frame, which comes when the one before is answered, to the end of its answer's token."""
    go, spans = threading.Event(), []

    def stream() -> Iterator[np.ndarray]:
        for frame in frames(COUNT):
            go.wait()
            go.clear()
            yield frame

    go.set()
    for answer in llm.watch(stream(), QUESTIONS[0], system=SYSTEM, max_tokens=1, **options):
        spans.append(answer.age * 1000)
        go.set()
    return spans


def of_questions(llm: LLM) -> list[float]:
    """The same of questions about one frame."""
    watch, spans = llm.watch(frames(1), QUESTIONS[0], system=SYSTEM, max_tokens=1), []
    for number in range(COUNT):
        watch.question = QUESTIONS[number % len(QUESTIONS)]
        answer = next(watch)
        spans.append((answer.ended - answer.asked) * 1000)
    reused = answer.response.usage
    assert reused.reused_tokens > IMAGE_TOKENS, f"the image's rows were not reused: {reused}"
    return spans


def alone(runtime: SpecDecodeRuntime) -> list[float]:
    """Milliseconds of the encoder, and of the prefill behind the instruction, by themselves."""
    runner, spans = runtime._open_runner(), []
    assert runtime._media is not None
    for frame in frames(COUNT):
        parts = [{"type": "image", "image": frame}, {"type": "text", "text": QUESTIONS[0]}]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": parts}]
        sequence = runtime.prepare(Request(messages=messages))
        first = next(place for place, token in enumerate(sequence.prompt_ids) if token in runtime.media_tokens)
        runner.backend.synchronize()
        began = time.perf_counter()
        media = runtime._media.encode(sequence.prompt_ids, sequence.prepared_media)
        reused = first if spans else 0
        runner.start(0, sequence.prompt_ids, reused, SamplingValues(), media).wait()
        spans.append((time.perf_counter() - began) * 1000)
        runner.stop(0)
    runtime._forget_contents()
    assert sum(token in runtime.media_tokens for token in sequence.prompt_ids) == IMAGE_TOKENS
    return spans


def write_model(directory: Path, config: dict[str, Any]) -> None:
    """A checkpoint with a tokenizer that knows an image's tokens, and a template that writes parts as they come."""
    write_checkpoint(directory, config, preprocessor=PREPROCESSOR, packed=WeightFormat("int4", 128, False, "float16"))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def main() -> None:
    """Make what is missing, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-bench")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--layers", type=int, help="of both models, for a rehearsal")
    parser.add_argument("--backend", default="tensorrt", choices=("tensorrt", "numpy"))
    arguments = parse(parser)
    config = dict(QWEN_3_VL_2B)
    if (layers := arguments.layers) is not None:
        vision = {**config["vision_config"], "depth": layers, "deepstack_visual_indexes": [*range(min(layers, 3))]}
        config |= {"num_hidden_layers": max(layers, 3), "vision_config": vision}
    name = f"qwen3_vl_int4_{config['num_hidden_layers']}"
    checkpoint, engines = arguments.work / name, arguments.work / f"{name}_engines"
    began = time.perf_counter()
    if not (checkpoint / "tokenizer_config.json").exists():
        write_model(checkpoint, config)
    build_engine_directory(checkpoint, engines, LIMITS, [], weights="link", force=True)
    results: dict[str, Any] = {**provenance(), "making_seconds": time.perf_counter() - began}
    began = time.perf_counter()
    with LLM(engines, backend=arguments.backend, drafting=None) as llm:
        results["opening_seconds"] = time.perf_counter() - began
        measured = {
            "alone_ms": llm.call(alone).result(),
            "frame_ms": first_tokens(llm),
            "fixed_ms": first_tokens(llm, fixed=True),
            "question_ms": of_questions(llm),
            "repeated_ms": first_tokens(llm, least_difference=100.0),
        }
    results |= {name: round(statistics.median(spans[FIRST:]), 3) for name, spans in measured.items()}
    results["frame_by_alone"] = round(results["frame_ms"] / results["alone_ms"], 3)
    report(results, arguments.output)


if __name__ == "__main__":
    main()
