"""A library that has the calls of NCCL, and gathers in the host's memory: compiled where there is a C compiler. And
whether NCCL itself is there, with GPUs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from edgellm.engines.backends.rank_memory import BY_NCCL
from edgellm.errors import MissingDependencyError
from edgellm.kernels.gpu import visible_gpus
from edgellm.kernels.ranks.nccl import NcclLibrary

_SOURCE = """
#include <stdio.h>
#include <string.h>
static struct part { const char* from; char* to; size_t bytes; int root; } parts[8][64];
static int given[8], grouped, destroyed, aborted, failed_rank = -1;
static char said[64];
int ncclGetVersion(int* version) { *version = VERSION; return 0; }
const char* ncclGetErrorString(int result) { return result == 3 ? "internal error" : "invalid usage"; }
const char* ncclGetLastError(void* comm) { return said; }
int ncclCommInitAll(void** comms, int count, const int* devices) {
    if (count > 1 && devices[0] == devices[1]) { sprintf(said, "GPU %d twice", devices[0]); return 5; }
    for (int rank = 0; rank < count; ++rank) comms[rank] = (void*)(size_t)(rank + 1);
    return 0;
}
int ncclCommGetAsyncError(void* comm, int* found) { *found = (size_t)comm == failed_rank + 1 ? 3 : 0; return 0; }
int ncclCommAbort(void* comm) { ++aborted; return 0; }
int ncclCommDestroy(void* comm) { ++destroyed; return 0; }
int ncclGroupStart(void) { grouped = 1; memset(given, 0, sizeof given); return 0; }
int ncclGroupEnd(void) {
    for (int rank = 0; rank < 8; ++rank)
        for (int each = 0; each < given[rank]; ++each) {
            struct part own = parts[rank][each];
            for (int other = 0; other < 8 && (own.root < 0 || own.root == rank); ++other)
                if (each < given[other])
                    memmove(parts[other][each].to + (own.root < 0 ? rank * own.bytes : 0), own.from, own.bytes);
        }
    return grouped = 0;
}
static int enqueue(void* comm, int type, struct part own) {
    int rank = (int)(size_t)comm - 1;
    if (!grouped || type != 1) return 5;
    parts[rank][given[rank]++] = own;
    return 0;
}
int ncclAllGather(const void* from, void* to, size_t bytes, int type, void* comm, void* stream) {
    return enqueue(comm, type, (struct part){from, to, bytes, -1});
}
int ncclBroadcast(const void* from, void* to, size_t bytes, int type, int root, void* comm, void* stream) {
    return enqueue(comm, type, (struct part){from, to, bytes, root});
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


def ask_for_nccl(patch: pytest.MonkeyPatch) -> None:
    """Ranks add by NCCL from now on; skips the test where it, or a second GPU, is not there."""
    if len(visible_gpus()) < 2:
        pytest.skip("there is one GPU")
    try:
        NcclLibrary()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    patch.setenv(BY_NCCL, "1")
