"""Speed of a stream: from a frame, and from another question about it, to the first token. Qwen3-VL-2B's shapes.

    python tools/bench/stream_speed.py [--work DIRECTORY] [--output RESULTS.json] [--layers N] [--backend NAME]

Random weights, int4 in groups of 128 (the vision encoder in fp16), frames of 640 x 480 pixels: 300 tokens each. The
prompt is an instruction, the image and a question, as `LLM.watch` writes them. Times are medians in milliseconds:
`frame_ms` is what a caller waits for the first token about a new frame, `question_ms` about one that was seen,
`fixed_ms` about a new frame where the question stands in front of it; `alone_ms` is the encoder and the prefill behind
the instruction by themselves, without preparing, queue and threads. `repeated_ms` is a frame whose rows are taken
since it differs by too little.

`frame_parts_ms` and `question_parts_ms` say where the time goes. Of the host: `prepare`, then `encode` and `prefill`,
both to enqueue it, and `wait` for the token; `around` is what a caller waits for besides: queue, threads, text. Of the
device's clock: `encode_device` and `prefill_device`, each from when the host begins with it. `device_ms` is what the
device takes where the host is ahead of it: of several encoders, and prefills, one behind the other, each one's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse
from provenance import provenance, report
from random_checkpoint import QWEN_2_5_VL_PREPROCESSOR, SHAPES, write_checkpoint
from vision_speed import frames

from edgellm.engines.backends.base import Backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.llm import LLM
from edgellm.requests import Request
from edgellm.runtime import SpecDecodeRuntime
from edgellm.snapshots.contents import common_beginning
from edgellm.text.messages import KINDS, media_of_prompt

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
#: So many encoders, or prefills, are enqueued one behind the other.
BEHIND = 6
PARTS = ("prepare", "encode", "prefill", "wait", "encode_device", "prefill_device")


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


def parts(runtime: SpecDecodeRuntime) -> dict[str, Any]:
    """Milliseconds of each of `PARTS` of frames and of questions about one; `alone_ms` of frames, and `device_ms`."""
    runner, media, before = runtime._open_runner(), runtime._media, list[int]()
    assert media is not None
    backend, device, seen = runner.backend, dict[str, float](), frames(COUNT + BEHIND)
    spans: dict[str, list[list[float]]] = {"frame": [], "question": []}
    asked: list[tuple[str, Any, str]] = [("frame", frame, QUESTIONS[0]) for frame in seen[:COUNT]]
    last = runtime.prepare_image(seen[COUNT - 1], "RGB")  # once, as a watch does
    asked += [("question", last, QUESTIONS[number % len(QUESTIONS)]) for number in range(COUNT)]
    for kind, frame, question in asked:
        shown = [{"type": "image", "image": frame}, {"type": "text", "text": question}]
        request = Request(messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": shown}])
        host = [time.perf_counter()]
        sequence = runtime.prepare(request)
        host.append(time.perf_counter())
        ids, events = [*sequence.prompt_ids], [backend.timestamp()]
        embeddings = media.encode(ids, sequence.prepared_media)
        host.append(time.perf_counter())
        events.append(backend.timestamp())
        first = next(place for place, token in enumerate(ids) if token in runtime.media_tokens)
        reused = min(common_beginning(before, ids), first if kind == "frame" else len(ids) - 1)
        start = partial(runner.start, 0, ids, reused, SamplingValues(), embeddings)
        token = start()
        host.append(time.perf_counter())
        events.append(backend.timestamp())
        token.wait()
        host.append(time.perf_counter())
        moments = [event.seconds() for event in events]
        spans[kind].append([1000 * (end - begin) for each in (host, moments) for begin, end in pairwise(each)])
        before = ids
        if len(spans[kind]) == COUNT:
            device[f"prefill of a {kind}"] = one_behind_the_other(backend, [start] * BEHIND)
        runner.stop(0)
    assert sum(token in runtime.media_tokens for token in ids) == IMAGE_TOKENS
    prepared = [media.prepare(media_of_prompt(KINDS["images"], [frame])) for frame in seen[COUNT:]]
    device["encoder"] = one_behind_the_other(backend, [partial(media.encode, ids, each) for each in prepared])
    runtime._forget_contents()
    medians = {kind: map(statistics.median, zip(*found[FIRST:], strict=True)) for kind, found in spans.items()}
    alone = statistics.median(sum(each[1:4]) for each in spans["frame"][FIRST:])
    named = {f"{kind}_parts_ms": dict(zip(PARTS, found, strict=True)) for kind, found in medians.items()}
    return {"alone_ms": alone, "device_ms": device, **named}


def one_behind_the_other(backend: Backend, steps: Sequence[Callable[[], object]]) -> float:
    """Milliseconds of the device's clock of each of some steps, which the host enqueues without waiting."""
    steps[0]()  # the host is ahead from here on
    begin = backend.timestamp()
    for step in steps[1:]:
        step()
    return 1000 * (backend.timestamp().seconds() - begin.seconds()) / (len(steps) - 1)


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
        results |= llm.call(parts).result()
        measured = {
            "frame_ms": first_tokens(llm),
            "fixed_ms": first_tokens(llm, fixed=True),
            "question_ms": of_questions(llm),
            "repeated_ms": first_tokens(llm, least_difference=100.0),
        }
    results |= {name: round(statistics.median(spans[FIRST:]), 3) for name, spans in measured.items()}
    for kind in ("frame", "question"):
        of_kind = results[f"{kind}_parts_ms"]
        of_kind["around"] = results[f"{kind}_ms"] - sum(of_kind[name] for name in PARTS[:4])
    for of_kind in (results["device_ms"], results["frame_parts_ms"], results["question_parts_ms"]):
        of_kind.update({name: round(spent, 3) for name, spent in of_kind.items()})
    results["alone_ms"] = round(results["alone_ms"], 3)
    results["frame_by_alone"] = round(results["frame_ms"] / results["alone_ms"], 3)
    report(results, arguments.output)


if __name__ == "__main__":
    main()
