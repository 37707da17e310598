"""Times what a step of Gemma 4 waits for on the host: its tokens read, their embeddings of all layers gathered in a
mapped file, and brought to the GPU (`TokenRows.follow`), for steps of one and of four sequences and trees of 60 nodes.

    python tools/bench/token_rows_speed.py [--host] [--elements 8960] [--repeats 400]

By itself of E2B, 35 layers of 256 elements of 16 bits; E4B has 42 x 256 = 10752. The file is 2.3 GB or more below the
temporary folder, and is removed. `--host`: the gathering alone, without a GPU. Tokens are drawn anew each time: a
part of the pages is new; "again" are the same tokens, in memory.
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

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.runners.token_rows import TokenRows

VOCABULARY, NAME = 1 << 17, "model.embed_tokens_per_layer.weight"
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
        ids = random.integers(0, VOCABULARY, (repeats, *shape)).astype(np.int32)
        gather = [median_microseconds(lambda number, ids=ids: rows.of(ids[number]), repeats) for _ in range(2)]
        line = f"{name:16} gathered {gather[0]:7.1f} us, again {gather[1]:7.1f}"
        if gpu is not None:
            tokens, target = gpu.zeros(shape, "int32"), gpu.zeros((*shape, rows.size), "float16")
            gpu.upload(tokens, ids[0])

            def whole(number: int, tokens: Any = tokens, target: Any = target) -> None:
                rows.follow(target, tokens)
                gpu.stream.synchronize()

            line += f", read, gathered and brought {median_microseconds(whole, repeats):7.1f}"
        print(line, flush=True)


def main() -> None:
    """Write the table, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--elements", type=int, default=35 * 256)
    parser.add_argument("--repeats", type=int, default=400)
    options = parser.parse_args()
    from gpu_device import cuda_device

    with tempfile.TemporaryDirectory() as folder, nullcontext() if options.host else cuda_device() as gpu:
        path = Path(folder)
        (path / "config.json").write_text("{}")
        table = np.random.default_rng(0).integers(0, 1 << 14, (VOCABULARY, options.elements), np.uint16)
        save_file({NAME: table.view(np.float16)}, path / "model.safetensors")
        config: Any = SimpleNamespace(token_row_size=options.elements, vocab_size=VOCABULARY)
        backend: Any = SimpleNamespace(compute_dtype="float16") if gpu is None else gpu
        with Checkpoint.open(path) as checkpoint:
            if gpu is not None:
                gpu.compute_dtype = "float16"
            rows = TokenRows(backend, config, checkpoint)
            measure(rows, gpu, options.repeats)


if __name__ == "__main__":
    main()
