"""A library that has the calls of NCCL, and gathers in the host's memory: compiled where there is a C compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = """
#include <stdio.h>
#include <string.h>

struct part { const void* from; void* to; size_t bytes; };
static struct part parts[8];
static int given, grouped, destroyed, aborted, failed_rank = -1;
static char said[64];

int ncclGetVersion(int* version) { *version = VERSION; return 0; }
const char* ncclGetErrorString(int result) { return result == 3 ? "internal error" : "invalid usage"; }
const char* ncclGetLastError(void* comm) { return said; }
int ncclCommInitAll(void** comms, int count, const int* devices) {
    for (int rank = 0; rank < count; ++rank) {
        for (int other = 0; other < rank; ++other)
            if (devices[rank] == devices[other]) { sprintf(said, "GPU %d twice", devices[rank]); return 5; }
        comms[rank] = (void*)(size_t)(rank + 1);
    }
    return 0;
}
int ncclCommGetAsyncError(void* comm, int* found) { *found = (size_t)comm == failed_rank + 1 ? 3 : 0; return 0; }
int ncclCommAbort(void* comm) { ++aborted; return 0; }
int ncclCommDestroy(void* comm) { ++destroyed; return 0; }
int ncclGroupStart(void) { grouped = 1; given = 0; return 0; }
int ncclGroupEnd(void) {
    for (int other = 0; other < given; ++other)
        for (int rank = 0; rank < given; ++rank)
            memmove((char*)parts[other].to + rank * parts[rank].bytes, parts[rank].from, parts[rank].bytes);
    grouped = 0;
    return 0;
}
int ncclAllGather(const void* from, void* to, size_t count, int type, void* comm, void* stream) {
    struct part own = {from, to, count * 4};
    if (!grouped || type != 7) return 5;
    parts[(size_t)comm - 1] = own, ++given;
    return 0;
}
int decoy_aborted(void) { return aborted; }
int decoy_destroyed(void) { return destroyed; }
void decoy_fail(int rank) { failed_rank = rank; strcpy(said, "a link is down"); }
"""


def build_decoy(folder: Path, version: int = 23005, *without: str) -> Path:
    """`libnccl.so.2` of a version in a folder, without these calls; skips the test where nothing compiles it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder.mkdir(parents=True)
    (folder / "decoy.c").write_text(_SOURCE)
    hidden = [f"-D{name}=hidden_{name}" for name in without]
    flags = ["-shared", "-fPIC", "-w", f"-DVERSION={version}", *hidden]
    subprocess.run([compiler, *flags, "decoy.c", "-o", "libnccl.so.2"], cwd=folder, check=True)
    return folder / "libnccl.so.2"
