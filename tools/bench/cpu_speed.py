"""Speed without a GPU: the shipped model on the NumPy backend.

    python tools/bench/cpu_speed.py [--output RESULTS.json]

Tokens per second of the decoding loop (median of five answers of 200 tokens), and seconds from the start of an
`edgellm generate` process to the first byte of its answer (median of five; warm file cache, modules compiled as an
installed package's are).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from provenance import provenance, report

from edgellm import LLM, SamplingParams

QUESTION = "Tell me about the things on your table."
NO_SYSTEM_PROMPT = {"role": "system", "content": ""}


def tokens_per_second(tokens: int = 200) -> float:
    """Median over five greedy answers that ignore the end of the turn."""
    speeds = []
    with LLM(backend="numpy") as model:
        for index in range(5):
            messages = [NO_SYSTEM_PROMPT, {"role": "user", "content": f"{QUESTION} {index}"}]
            response = model.chat(messages, SamplingParams(max_tokens=tokens, ignore_eos=True))
            speeds.append(response.timings.tokens_per_second(response.usage.completion_tokens))
    return statistics.median(speeds)


def first_token_seconds() -> float:
    """Median over five processes, after one that compiles the modules."""
    command = [sys.executable, "-m", "edgellm", "generate", QUESTION, "--backend", "numpy", "--max-tokens", "32"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    spans = []
    with tempfile.TemporaryDirectory() as compiled:
        for _ in range(6):
            started = time.perf_counter()
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, env=environment | {"PYTHONPYCACHEPREFIX": compiled}
            )
            process.stdout.read(1)
            spans.append(time.perf_counter() - started)
            process.stdout.read()
            if process.wait():
                raise SystemExit("edgellm generate failed")
    return statistics.median(spans[1:])


def main() -> None:
    """Measure and print as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = {**provenance(), "tokens_per_second": tokens_per_second(), "first_token_seconds": first_token_seconds()}
    report(results, arguments.output)


if __name__ == "__main__":
    main()
