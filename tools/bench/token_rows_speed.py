"""Times what a step of Gemma 4 waits for on the host, and the step itself with E2B's shapes and weights of 4 bits.

    python tools/bench/token_rows_speed.py [--host] [--packed q6_k] [--elements 8960] [--repeats 200]

The first table: tokens read, their embeddings of all layers gathered in a mapped file, and brought to the GPU
(`TokenRows`), for steps of one and of four sequences, trees of 60 nodes and chunks. By itself rows are E2B's, 35 layers
of 256 elements of 16 bits; E4B has 42 x 256 = 10752. The file is 0.6 GB or more below the temporary folder, and is
removed. Tokens are drawn anew each time; "again" are the same tokens. `--host`: the gathering alone, without a GPU.
`--packed`: rows in blocks of a type of GGUF files, which are dequantized to bfloat16 as they are gathered.
Behind it what each kernel takes of a decode step behind 128 tokens, and the loop of such steps, which waits for its
rows in each, beside the time of a step's bytes (see `gpu_speed.py loops`, which takes `--shapes gemma4-e2b`, too).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save_file

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests" / "helpers")]
from gguf_writing import random_blocks, write_gguf

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.quantization.gguf_blocks import PACKED_TYPES
from edgellm.engines.runners.token_rows import TokenRows

VOCABULARY, NAME = 1 << 15, "model.embed_tokens_per_layer.weight"
SIZES = {"one sequence": (1, 1), "four sequences": (4, 1), "a tree of 60": (1, 60), "a chunk of 512": (1, 512)}


def median_microseconds(run: Callable[[int], object], repeats: int) -> float:
    """Of single calls, each with its number."""
    found = []
    for number in range(repeats):
        before = time.perf_counter()
        run(number)
        found.append(time.perf_counter() - before)
    return 1e6 * float(np.median(found))


def measure(rows: TokenRows, gpu: Any, repeats: int) -> None:
    """Print a line for each size."""
    random = np.random.default_rng(1)
    for name, shape in SIZES.items():
        count = max(20, repeats // shape[1])
        ids = random.integers(0, VOCABULARY, (count, *shape)).astype(np.int32)
        gather = [median_microseconds(lambda number, ids=ids: rows.of(ids[number]), count) for _ in range(2)]
        line = f"{name:16} gathered {gather[0]:7.1f} us, again {gather[1]:7.1f}"
        if gpu is not None:
            tokens = gpu.zeros(shape, "int32")
            gpu.upload(tokens, ids[0])
            (stage,) = rows.stages(tokens).values()

            def whole(number: int, stage: Callable[[], None] = stage) -> None:
                stage()
                gpu.stream.synchronize()

            line += f", read, gathered and brought {median_microseconds(whole, count):7.1f}"
        print(line, flush=True)


def measure_step() -> None:
    """Print the time of a step of E2B's shapes beside that of its bytes."""
    from gpu_speed import measure_loop

    with tempfile.TemporaryDirectory() as folder:
        found = measure_loop(Path(folder), "gemma4-e2b", 128, "compute", "int4", kinds=True)
    step, least = found["loop_ms"], found["bytes_ms"]
    read = (found["weight_bytes"] + found["state_bytes"]) / 1e9
    print(f"gemma4-e2b int4: a step {step:.3f} ms, its {read:.3f} GB {least:.3f} ms: {step / least:.2f} times these")


def main() -> None:
    """Write the table, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--packed", choices=PACKED_TYPES)
    parser.add_argument("--elements", type=int, default=35 * 256)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    from gpu_device import cuda_device

    with tempfile.TemporaryDirectory() as folder, nullcontext() if options.host else cuda_device() as gpu:
        path = Path(folder)
        (path / "config.json").write_text("{}")
        random, shape = np.random.default_rng(0), (VOCABULARY, options.elements)
        if options.packed:
            table, metadata = random_blocks(options.packed, shape, random), {"general.architecture": "gemma4"}
            write_gguf(
                path / "model.gguf", metadata | {"gemma4.block_count": 35}, {"per_layer_token_embd.weight": table}
            )
        else:
            values = random.integers(0, 1 << 14, shape, np.uint16).view(np.float16)
            save_file({NAME: values}, path / "model.safetensors")
        config: Any = SimpleNamespace(token_row_size=options.elements, vocab_size=VOCABULARY, media={}, padding_id=0)
        zeros, dtype = np.zeros if gpu is None else gpu.zeros, "bfloat16" if options.packed else "float16"
        place = "float16" if gpu is None else dtype
        backend: Any = SimpleNamespace(compute_dtype=dtype, zeros=lambda shape, _: zeros(shape, place))
        if gpu is not None:
            backend.upload, backend.read = gpu.upload, gpu.read
        with Checkpoint.open(path) as checkpoint:
            rows = TokenRows(backend, config, checkpoint, 512)
            measure(rows, gpu, options.repeats)
    if not options.host:
        measure_step()


if __name__ == "__main__":
    main()
