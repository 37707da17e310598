"""Runs samples of the kernels' GPU tests under compute-sanitizer's tools, several processes at a time.

    python tools/bench/sanitize.py [--tools memcheck racecheck initcheck] [--files tests/kernels/... ]
                                   [--tests 12] [--seconds 150] [--processes 8] [--logs FOLDER]

Of each file so many tests are taken, spread evenly over it; those that capture graphs, take times or expect errors are
left out. A line for each pair of tool and file tells how many tests passed and what the tool found, also where the time
ended before they did. Exits with 1 where a tool found something or a test failed. Needs a GPU, compute-sanitizer
of a CUDA toolkit on the path, and pytest.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from as_device import measured_as, parse

TOOLS = ("memcheck", "racecheck", "initcheck")
FILES = (
    "tests/kernels/sampling/test_sampling_gpu.py",
    "tests/kernels/acceptance/test_acceptance_gpu.py",
    "tests/kernels/tree/test_tree_gpu.py",
    "tests/kernels/images/test_image_kernels_gpu.py",
    "tests/kernels/sounds/test_sound_kernels_gpu.py",
    "tests/kernels/decode/test_decode_attention_gpu.py",
    "tests/kernels/decode/test_decode_parameters_gpu.py",
    "tests/kernels/decode/test_tiled_linear_gpu.py",
    "tests/kernels/decode/test_adapters_gpu.py",
    "tests/kernels/prefill/test_prefill_attention_gpu.py",
    "tests/kernels/recurrent/test_recurrent_gpu.py",
    "tests/kernels/encoder/test_encoder_kernels_gpu.py",
    "tests/kernels/experts/test_sorted_experts_gpu.py",
    "tests/engines/backends/test_kernel_engine_gpu.py",
    "tests/engines/backends/test_kernel_trees_gpu.py",
    "tests/engines/backends/test_recurrent_engines_gpu.py",
    "tests/engines/backends/test_encoder_engine_gpu.py",
)
_LEFT_OUT = ("captured", "overlap", "time", "faster", "wrong", "refused", "bound", "large_vocabulary", "many_draws")
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.*)$", re.MULTILINE)
_FINDING = re.compile(r"={9} (?:Error|Warning|Invalid|Uninitialized)")
#: compute-sanitizer's exit code where it found something.
_FOUND = 9


@dataclass(frozen=True)
class Outcome:
    """What came of one file under one tool. `summary` is the tool's last line, empty where the time ended before."""

    tool: str
    file: str
    passed: int
    summary: str
    findings: int
    code: int | None
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Nothing was found, and no test failed, as far as the time reached."""
        return self.passed > 0 and self.findings == 0 and self.code in (0, None)

    def __str__(self) -> str:
        ended = "the time ended" if self.code is None else f"exit code {self.code}"
        state = "clean" if self.is_clean else "NOT CLEAN"
        return (
            f"{self.tool:9} {self.file:44} {state:9} {self.passed:3} tests passed, {ended}, "
            f"{self.summary or 'no summary'}, {self.seconds:.0f} s"
        )


def run(tool: str, file: str, tests: int, seconds: float, logs: Path) -> Outcome:
    """Run a sample of a file's tests under a tool; all output goes to a file of `logs`."""
    command = ["compute-sanitizer", "--report-api-errors", "no", "--error-exitcode", str(_FOUND), "--tool", tool]
    command += [sys.executable, "-m", "pytest", file, "-v", "-m", "gpu", "--sample", str(tests), "--tb=short"]
    name = measured_as()
    command += ["--as", name] if name else []
    command += ["-p", "no:cacheprovider", "-k", " and ".join(f"not {name}" for name in _LEFT_OUT)]
    log = logs / f"{tool}_{Path(file).stem}.txt"
    started, code = time.perf_counter(), None
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and the tests
            process.wait()
    text = log.read_text(errors="replace")
    summary = (_SUMMARY.findall(text) or [""])[-1]
    findings = len(_FINDING.findall(text))
    return Outcome(tool, file, text.count(" PASSED"), summary, findings, code, time.perf_counter() - started)


def main() -> None:
    """Run all pairs and print a line for each as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--files", nargs="+", default=list(FILES))
    parser.add_argument("--tests", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=150.0, help="the most that one process may take")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--logs", type=Path, default=Path("sanitizer-logs"))
    arguments = parse(parser, times=False)
    arguments.logs.mkdir(parents=True, exist_ok=True)

    def one(pair: tuple[str, str]) -> Outcome:
        outcome = run(*pair, arguments.tests, arguments.seconds, arguments.logs)
        print(outcome, flush=True)
        return outcome

    with ThreadPoolExecutor(arguments.processes) as pool:
        outcomes = list(pool.map(one, product(arguments.tools, arguments.files)))
    sys.exit(not all(outcome.is_clean for outcome in outcomes))


if __name__ == "__main__":
    main()
