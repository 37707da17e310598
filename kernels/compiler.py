"""Compiles modules of kernels with NVRTC, which needs neither a GPU nor a host compiler, and keeps the result.

A module is compiled when it is first asked for, unless it was kept: with the model (`kept.py`) or in the user's cache
directory. What was kept is found by its source, its options and its architecture, so that it needs no compiler.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.errors import KernelError, MissingDependencyError
from edgellm.kernels.nvrtc import MAJORS, Nvrtc, Refused, find_nvrtc, toolkit_roots, wheel_folders
from edgellm.kernels.user_paths import user_cache_directory

logger = logging.getLogger("edgellm.kernels")

_ROOT = Path(__file__).parent
_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)
_DIGEST_BYTES = hashlib.sha256().digest_size
# Without fused multiply-add and with IEEE division, arithmetic gives NumPy's bits: see portable_math.
_OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--ftz=false", "--generate-line-info")


@dataclass(frozen=True)
class ModuleSource:
    """Kernels that are compiled and loaded together.

    `files` are paths below kernels/, as includes are. `expressions` name the instantiations of templates, as
    "decode::norm<__half>"; kernels that are extern "C" need none. `macros` are names and values, by which a constant of
    Python's reaches the device. `headers` are names and texts of includes that are no files.
    """

    name: str
    files: tuple[str, ...]
    expressions: tuple[str, ...] = ()
    macros: tuple[tuple[str, int | str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()


class CompiledModule(NamedTuple):
    """A cubin (or PTX), the name in it of each expression of the source, and the CUDA release of its compiler."""

    code: bytes
    lowered_names: dict[str, str]
    release: tuple[int, int]


def compile_module(source: ModuleSource, architecture: str, release: tuple[int, int] | None = None) -> CompiledModule:
    """Compile a module for `architecture`: "sm_90" for a cubin, "compute_80" for PTX; with the compiler of a CUDA
    release, by itself the newest that is there.

    Raises MissingDependencyError without NVRTC or CUDA's headers, KernelError with the compiler's log if it refuses.
    """
    nvrtc = find_nvrtc(release)
    folders = (f"-I{folder}" for folder in find_headers(nvrtc.release[0]))
    # From 13.0 on it can take all cores; the code does not depend on how many.
    all_cores = ("--split-compile=0",) if nvrtc.release >= (13, 0) else ()
    text = "".join(f'#include "{name}"\n' for name in source.files)
    options = (*module_options(source, architecture), *all_cores, *folders)
    try:
        found = nvrtc.compile(f"{source.name}.module", text, _texts(source), options, source.expressions)
    except Refused as refusal:
        raise _compilation_failure(nvrtc, source, architecture, str(refusal)) from None
    return CompiledModule(found.code, found.lowered_names, nvrtc.release)


def recalled_module(source: ModuleSource, architecture: str) -> CompiledModule | None:
    """A module for `architecture` that was kept in the user's cache directory; None where it is not there, or does not
    match its digest."""
    content = _read_verified(_cached_path(source, architecture))
    if content is None:
        return None
    facts, _, code = content.partition(b"\n")
    names, release = json.loads(facts)
    return CompiledModule(code, names, tuple(release))


def compiled_now(source: ModuleSource, architecture: str) -> CompiledModule:
    """A module for `architecture`, compiled and kept in the user's cache directory; whoever waits is told.

    Where that cannot be written, every start compiles anew, which takes seconds of processor time. Raises what
    `compile_module` raises.
    """
    stage = f"The CUDA kernels are compiled for {architecture} now, once"
    logger.warning("%s: %s", stage, source.name, extra={"stage": (stage, source.name)})
    module = compile_module(source, architecture)
    content = json.dumps([module.lowered_names, module.release]).encode() + b"\n" + module.code
    path = _cached_path(source, architecture)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, hashlib.sha256(content).digest() + content)
    except OSError as error:
        logger.info("compiled kernels are not kept: %s", error)
    return module


def _cached_path(source: ModuleSource, architecture: str) -> Path:
    name = f"{source.name}-{architecture}-{module_key(source, architecture)}.cubin"
    return user_cache_directory() / "kernels" / name


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of NVRTC; raises MissingDependencyError without it."""
    return find_nvrtc().release


def find_headers(major_version: int | None = None) -> list[Path]:
    """Folders for the compiler's include path: the first place that has `cuda_fp16.h`, with its companions.

    Searched are the wheels nvidia-cuda-runtime and nvidia-cuda-cccl in all their layouts, those of CUDA's
    `major_version` first, then $CUDA_HOME, $CUDA_PATH and /usr/local/cuda. Raises MissingDependencyError.
    """
    for folders in (_wheel_headers(major_version), *(_toolkit_headers(root) for root in toolkit_roots())):
        if any((folder / "cuda_fp16.h").is_file() for folder in folders):
            return folders
    suffix = f"-cu{major_version}" if major_version in MAJORS[1:] else ""
    raise MissingDependencyError(
        "CUDA's headers (cuda_fp16.h) were found neither in the wheel nvidia-cuda-runtime nor below $CUDA_HOME, "
        f"$CUDA_PATH or /usr/local/cuda. Install them with: pip install nvidia-cuda-runtime{suffix} "
        f"nvidia-cuda-cccl{suffix}"
    )


def _wheel_headers(major_version: int | None) -> list[Path]:
    """Header folders of NVIDIA's wheels: nvidia/cu13/include since CUDA 13, nvidia/cuda_runtime/include before."""
    roots = wheel_folders()
    folders: list[Path] = []
    for pattern in (f"cu{major_version or '[0-9]*'}", "cuda_runtime", "cuda_cccl", "cuda_nvcc", "cuda_crt"):
        for root in roots:
            for include in sorted(root.glob(f"{pattern}/include")):
                folders += [folder for folder in (include, include / "cccl") if folder.is_dir()]
    return folders


def _toolkit_headers(root: Path) -> list[Path]:
    candidates = (root / "include", root / "include" / "cccl", *sorted(root.glob("targets/*/include")))
    return [folder for folder in candidates if folder.is_dir()]


def _compilation_failure(
    nvrtc: Nvrtc, source: ModuleSource, architecture: str, log: str
) -> KernelError | MissingDependencyError:
    """The error with NVRTC's log or, if the architecture is the reason, with what this NVRTC can compile for."""
    version, known = ".".join(map(str, nvrtc.release)), nvrtc.architectures()
    if architecture.replace("compute_", "sm_") not in known:
        return KernelError(
            f"NVRTC {version} cannot compile for {architecture}, only for {', '.join(known)}. "
            "Install the release of nvidia-cuda-nvrtc that fits your GPU and driver."
        )
    if '"nv/target"' in log:
        return MissingDependencyError(
            "CUDA's headers were found without nv/target, which they include. "
            "Install it with: pip install nvidia-cuda-cccl"
        )
    return KernelError(f"NVRTC {version} refused the kernels {source.name} for {architecture}:\n{log}")


def module_options(source: ModuleSource, architecture: str) -> tuple[str, ...]:
    """What decides about the code of a module beside its source."""
    macros = (f"--define-macro={name}={value}" for name, value in source.macros)
    return (f"--gpu-architecture={architecture}", *_OPTIONS, *macros)


def _texts(source: ModuleSource) -> dict[str, bytes]:
    """The files of a module and all that they include of the project's own, by path below kernels/."""
    own = {name: text.encode() for name, text in source.headers}
    texts: dict[str, bytes] = {}
    waiting = list(source.files)
    while waiting:
        name = waiting.pop()
        if name not in texts:
            texts[name] = own[name] if name in own else (_ROOT / name).read_bytes()
            waiting += [include.decode() for include in _INCLUDE.findall(texts[name])]
    return dict(sorted(texts.items()))


def module_key(source: ModuleSource, architecture: str) -> str:
    """SHA-256 over what decides the result, but for the compiler's release, which a device need not have: source and
    options with the architecture."""
    digest = hashlib.sha256()
    for part in (module_options(source, architecture), source, _texts(source)):
        digest.update(hashlib.sha256(repr(part).encode()).digest())
    return digest.hexdigest()


def _read_verified(path: Path) -> bytes | None:
    """What was kept behind its digest, or None where there is nothing that matches."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, kept = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(kept).digest() != digest:
        logger.warning("%s is damaged; compiling the kernels again", path)
        return None
    return kept
