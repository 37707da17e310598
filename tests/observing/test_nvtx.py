"""NVTX ranges reach a profiler: a small one of our own, which the library loads as it loads NVIDIA's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgellm import tracing as nvtx_ranges
from edgellm.engines.speculation.draft_plan import ACCEPTANCE, BASE_VERIFY, DRAFT_ACCEPT, DRAFT_PROPOSAL
from edgellm.errors import MissingDependencyError
from edgellm.tracing import LAUNCH, PREFILL, ROUND, TOKENS, WAIT, NvtxRanges

#: Takes the place of the library's functions for pushing (9) and popping (11) a range, and writes down each call.
PROFILER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void (*function)(void);
typedef const void* (*get_table)(uint32_t);
struct callbacks {
    size_t size;
    int (*module_functions)(int module, function*** table, unsigned* count);
};

static FILE* log_file;
static int depth;

static int push(const char* name) {
    fprintf(log_file, "%d %s\n", depth, name);
    fflush(log_file);
    return depth++;
}

static int pop(void) { return --depth; }

int InitializeInjectionNvtx2(get_table table) {
    const struct callbacks* callbacks = table(1);
    function** functions;
    unsigned count;
    log_file = fopen(getenv("RANGES"), "w");
    if (log_file == NULL || !callbacks->module_functions(1, &functions, &count) || count <= 11) return 0;
    *functions[9] = (function)push;
    *functions[11] = (function)pop;
    return 1;
}
"""


def test_ranges_of_a_drafted_answer_are_nested(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler for a profiler of our own")
    if not Path(nvtx_ranges.library_candidates()[0]).is_absolute():
        pytest.skip("the NVTX library is neither in a wheel (nvidia-nvtx) nor in a CUDA toolkit")
    source, library, ranges = tmp_path / "profiler.c", tmp_path / "profiler.so", tmp_path / "ranges.txt"
    source.write_text(PROFILER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    answered = subprocess.run(
        [sys.executable, "-m", "edgellm", "chat", "--draft", "--no-adaptive", "--nvtx", "--max-tokens", "12"],
        input="What is on the table?\n",
        env=os.environ | {"NVTX_INJECTION64_PATH": str(library), "RANGES": str(ranges)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answered.stdout
    found = [line.split(" edgellm: ") for line in ranges.read_text().splitlines()]
    depths: dict[str, set[str]] = {}
    for depth, name in found:
        depths.setdefault(name, set()).add(depth)
    assert depths[LAUNCH] == depths[WAIT] == depths[TOKENS] == {"0"}
    assert depths[PREFILL] == depths[ROUND] == {"1"}, "what is enqueued is enqueued by a launch"
    names = [name for _, name in found]
    first = names.index(ROUND)
    assert names[first : first + 5] == [ROUND, DRAFT_ACCEPT, DRAFT_PROPOSAL, BASE_VERIFY, ACCEPTANCE]
    assert found[first + 1][0] == found[first + 4][0] == "2"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx_ranges, "library_candidates", lambda: ["libnothing-of-the-kind.so.1"])
    with pytest.raises(MissingDependencyError, match=r"none loads \(libnothing-of-the-kind\.so\.1: .*nvidia-nvtx"):
        NvtxRanges()
