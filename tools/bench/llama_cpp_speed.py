"""Decode and prompts of GGUF files beside llama.cpp's, in one run: random weights with the shapes of published models.

    python tools/bench/llama_cpp_speed.py FOLDER [--models llama-1b:q4_k_m gpt-oss-20b:mxfp4_moe ...]
                                          [--prompts 512 4000] [--work DIRECTORY]

FOLDER has llama.cpp's `llama-bench` with its libraries (built with CUDA). Of each model a file is written before it is
measured, and removed behind it, as `random_gguf.py` does; llama.cpp reads it, while here weights of the same types and
shapes are made. Milliseconds of a token are wall time, from hardly any tokens on, of 128 (`llama-bench -n 128`); those
of prompts are the GPU's here, and wall time there (`-p`), with flash attention (`-fa 1`). Kernels are compiled before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from provenance import provenance, report
from random_gguf import MIXTURES, write_random_gguf
from random_model import loop_milliseconds, random_prompt, random_runner, shape_directory

from edgellm.device.limits import gpu_milliseconds
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues

_TOKENS, _FIRST = 128, 8
_MODELS = [f"{shape}:{mixture}" for shape in ("llama-1b", "llama-8b") for mixture in ("q4_k_m", "q8_0", "q4_0")]


def ours(work: Path, model: str, prompts: list[int]) -> dict[str, float]:
    """Milliseconds of a token ("token") and of each prompt."""
    shape, mixture = model.split(":")
    limits = EngineLimits(1, 2048, max(prompts) + _TOKENS + 64)
    with random_runner(shape_directory(work, shape, limits, mixture)) as runner:
        spans = [loop_milliseconds(runner, _FIRST, _TOKENS - _FIRST) for _ in range(4)]
        found = {"token": statistics.median(spans[1:])}
        for count in prompts:
            ids = random_prompt(count)
            runner.start(0, ids, 0, SamplingValues()).wait()
            found[str(count)] = gpu_milliseconds(
                runner.backend.stream, lambda ids=ids: runner.start(0, ids, 0, SamplingValues()), 3, series=3
            )
    return found


def theirs(folder: Path, file: Path, prompts: list[int]) -> dict[str, float]:
    """The same of llama-bench."""
    command = [str(folder / "llama-bench"), "-m", str(file), "-p", ",".join(map(str, prompts)), "-n", str(_TOKENS)]
    libraries = ":".join(filter(None, (str(folder.resolve()), os.environ.get("LD_LIBRARY_PATH"))))
    answer = subprocess.run(
        [*command, "-fa", "1", "-ngl", "99", "-b", "2048", "-ub", "2048", "-r", "3", "-o", "json"],
        env=os.environ | {"LD_LIBRARY_PATH": libraries},
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise SystemExit(f"llama-bench failed:\n{answer.stderr[-2000:]}")
    found = dict[str, float]()
    for each in json.loads(answer.stdout):
        if each["n_gen"]:
            found["token"] = 1000 / each["avg_ts"]
        else:
            found[str(each["n_prompt"])] = each["avg_ns"] / 1e6
    return found


def main() -> None:
    """The whole of the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", default=_MODELS, help=f"SHAPE:MIXTURE, of {', '.join(MIXTURES)}")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 4000])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-llama")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    began, results = time.perf_counter(), dict[str, Any](provenance())
    columns = ["token", *map(str, arguments.prompts)]
    print(f"| ms: ours / llama.cpp (ratio) | {' | '.join(columns)} |\n{'|---' * (len(columns) + 1)}|", flush=True)
    for model in arguments.models:
        (shape, mixture), begun = model.split(":"), time.perf_counter()
        file = write_random_gguf(arguments.work / f"{shape}-{mixture}.gguf", shape, mixture=mixture)
        size, seconds = file.stat().st_size / 1e9, time.perf_counter() - begun
        own, other = ours(arguments.work, model, arguments.prompts), theirs(arguments.folder, file, arguments.prompts)
        results[model] = {"ours": own, "llama.cpp": other}
        cells = [f"{own[each]:.3f} / {other[each]:.3f} ({other[each] / own[each]:.2f})" for each in columns]
        print(f"| {model} | {' | '.join(cells)} |", flush=True)
        file.unlink()
        print(f"{model}: {size:.1f} GB written in {seconds:.0f} s", file=sys.stderr, flush=True)
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)
    report(results, arguments.output)


if __name__ == "__main__":
    main()
