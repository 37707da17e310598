"""A process that builds plans: TensorRT's builder lets only one plan at a time be built in a process.

It reads one request a line from standard input (JSON) and answers each on standard output with a line of JSON and the
bytes of the plan.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import IO, BinaryIO

from edgellm.engines.model.config import DecoderConfig, EngineShape
from edgellm.engines.model.descriptions import ModelConfig, describing_modules, import_describing_modules
from edgellm.engines.model.draft_config import DraftConfig
from edgellm.engines.errors import BuildError, EdgeLLMError
from edgellm.engines.directories.strict_json import JSONObject, plain_values
from edgellm.engines.backends.tensorrt_operations import build_plan
from edgellm.engines.model.vision import VisionConfig


def request_line(config: ModelConfig, shape: EngineShape, dtype: str, attention: str, target: str) -> bytes:
    """What the process reads for one plan."""
    values = {"config": plain_values(config), "shape": plain_values(shape), "dtype": dtype, "attention": attention}
    return json.dumps(values | {"target": target, "modules": describing_modules()}).encode() + b"\n"


def read_answer(stream: IO[bytes]) -> tuple[bytes, float, int]:
    """The plan, the seconds that it took and the process's peak memory in bytes.

    Raises BuildError with the reason that the process gives, and EOFError where it has ended.
    """
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    answer = json.loads(line)
    if "error" in answer:
        raise BuildError(answer["error"])
    plan = stream.read(answer["size"])
    if len(plan) != answer["size"]:
        raise EOFError
    return plan, answer["seconds"], answer["peak_bytes"]


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        started = time.perf_counter()
        try:
            plan = _build(line)
        except EdgeLLMError as error:
            answers.write(json.dumps({"error": str(error)}).encode() + b"\n")
        else:
            seconds = time.perf_counter() - started
            header = {"size": len(plan), "seconds": seconds, "peak_bytes": peak_memory()}
            answers.write(json.dumps(header).encode() + b"\n")
            answers.write(plan)
        answers.flush()


def _build(line: bytes) -> bytes:
    request = JSONObject.parse(line, "the request", BuildError)
    shape, values = request.object("shape").dataclass(EngineShape), request.object("config")
    config: ModelConfig
    import_describing_modules(request.values["modules"])
    if shape.model == "draft":
        config = values.dataclass(DraftConfig, decoder=DecoderConfig)
    elif shape.model == "vision":
        config = values.dataclass(VisionConfig)
    else:
        config = values.dataclass(DecoderConfig)
    return build_plan(config, shape, *(request.get(key, "str") for key in ("dtype", "attention", "target")))


def main() -> None:
    """Serve on standard input and output; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
