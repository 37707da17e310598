"""Compiles the CUDA sources with NVRTC, which needs neither a GPU nor a host compiler, and keeps the result.

`cuda.bindings.nvrtc` is imported only when something is to be compiled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.cache_directory import user_cache_directory
from edgellm.kernels.errors import KernelError, MissingDependencyError

logger = logging.getLogger("edgellm.kernels")

#: Bytes of one `FilterRow` of cuda/filter_workspace.cuh, which asserts it.
FILTER_ROW_BYTES = 45_088

_SOURCES = Path(__file__).parent / "cuda"
_DIGEST_BYTES = hashlib.sha256().digest_size
# Without fused multiply-add and with IEEE division, arithmetic gives NumPy's bits: see portable_math.
_OPTIONS = (
    "--std=c++17",
    "--fmad=false",
    "--prec-div=true",
    "--ftz=false",
    f"--define-macro=FILTER_ROW_BYTES={FILTER_ROW_BYTES}",
)


def compile_kernels(architecture: str) -> bytes:
    """Compile all kernels for `architecture` ("sm_90") and return the cubin, or PTX ("compute_80").

    Raises MissingDependencyError without NVRTC or CUDA's headers, KernelError with the compiler's log if it refuses.
    """
    nvrtc = _load_nvrtc()
    version = _version(nvrtc)
    headers = find_headers(version[0])
    sources = _sources()
    program_text = "".join(f'#include "{name}"\n' for name in sources if name.endswith(".cu"))
    options = [option.encode() for option in (*_options(architecture, version), *(f"-I{folder}" for folder in headers))]
    status, program = nvrtc.nvrtcCreateProgram(
        program_text.encode(),
        b"edgellm_kernels.cu",
        len(sources),
        list(sources.values()),
        [name.encode() for name in sources],
    )
    _check(nvrtc, status, "creating a program")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise _compilation_failure(nvrtc, program, architecture)
        kind = "PTX" if architecture.startswith("compute_") else "CUBIN"
        status, size = getattr(nvrtc, f"nvrtcGet{kind}Size")(program)
        _check(nvrtc, status, "reading the size of the compiled kernels")
        cubin = bytes(size)
        (status,) = getattr(nvrtc, f"nvrtcGet{kind}")(program, cubin)
        _check(nvrtc, status, "reading the compiled kernels")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin


def cached_kernels(architecture: str) -> bytes:
    """The cubin for `architecture`, from the user's cache directory or compiled now and kept there.

    A file that does not match its digest is compiled anew; where that cannot be written, every start compiles
    anew, which takes 30 s of processor time. Raises what `compile_kernels` raises.
    """
    path = user_cache_directory() / "kernels" / f"{architecture}-{_cache_key(architecture)}.cubin"
    cubin = _read_verified(path)
    if cubin is None:
        logger.warning("The CUDA kernels are compiled for %s now, which takes up to a minute, once", architecture)
        cubin = compile_kernels(architecture)
        _keep(path, hashlib.sha256(cubin).digest() + cubin)
    return cubin


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of NVRTC; raises MissingDependencyError without it."""
    return _version(_load_nvrtc())


def find_headers(major_version: int | None = None) -> list[Path]:
    """Folders for the compiler's include path: the first place that has `cuda_fp16.h`, with its companions.

    Searched are the wheels nvidia-cuda-runtime and nvidia-cuda-cccl in all their layouts, those of CUDA's
    `major_version` first, then $CUDA_HOME, $CUDA_PATH and /usr/local/cuda. Raises MissingDependencyError.
    """
    for folders in (_wheel_headers(major_version), *(_toolkit_headers(root) for root in _toolkit_roots())):
        if any((folder / "cuda_fp16.h").is_file() for folder in folders):
            return folders
    raise MissingDependencyError(
        "CUDA's headers (cuda_fp16.h) were found neither in the wheel nvidia-cuda-runtime nor below $CUDA_HOME, "
        "$CUDA_PATH or /usr/local/cuda. Install them with: pip install nvidia-cuda-runtime nvidia-cuda-cccl"
    )


def _wheel_headers(major_version: int | None) -> list[Path]:
    """Header folders of NVIDIA's wheels: nvidia/cu13/include since CUDA 13, nvidia/cuda_runtime/include before."""
    specification = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in specification.submodule_search_locations or ()] if specification else []
    folders: list[Path] = []
    for pattern in (f"cu{major_version or '[0-9]*'}", "cuda_runtime", "cuda_cccl", "cuda_nvcc", "cuda_crt"):
        for root in roots:
            for include in sorted(root.glob(f"{pattern}/include")):
                folders += [folder for folder in (include, include / "cccl") if folder.is_dir()]
    return folders


def _toolkit_roots() -> list[Path]:
    variables = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return [Path(root) for root in variables if root]


def _toolkit_headers(root: Path) -> list[Path]:
    candidates = (root / "include", root / "include" / "cccl", *sorted(root.glob("targets/*/include")))
    return [folder for folder in candidates if folder.is_dir()]


def _load_nvrtc() -> Any:
    advice = "Install it with: pip install 'cuda-bindings>=12.9' nvidia-cuda-nvrtc"
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MissingDependencyError(f"NVRTC's Python bindings do not load ({error}). {advice}") from error
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise various types for a library that is not there
        raise MissingDependencyError(f"The library NVRTC does not load ({error}). {advice}") from error
    return nvrtc


def _version(nvrtc: Any) -> tuple[int, int]:
    status, major, minor = nvrtc.nvrtcVersion()
    _check(nvrtc, status, "asking for its version")
    return major, minor


def _check(nvrtc: Any, status: Any, action: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC failed while {action}: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")


def _compilation_failure(nvrtc: Any, program: Any, architecture: str) -> KernelError | MissingDependencyError:
    """The error with NVRTC's log or, if the architecture is the reason, with what this NVRTC can compile for."""
    version = ".".join(map(str, _version(nvrtc)))
    status, numbers = nvrtc.nvrtcGetSupportedArchs()
    known = [f"sm_{number}" for number in numbers] if status == nvrtc.nvrtcResult.NVRTC_SUCCESS else []
    if known and architecture.replace("compute_", "sm_") not in known:
        return KernelError(
            f"NVRTC {version} cannot compile for {architecture}, only for {', '.join(known)}. "
            "Install the release of nvidia-cuda-nvrtc that fits your GPU and driver."
        )
    log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.rstrip(bytes(1)).decode(errors="replace")
    if '"nv/target"' in text:
        return MissingDependencyError(
            "CUDA's headers were found without nv/target, which they include. "
            "Install it with: pip install nvidia-cuda-cccl"
        )
    return KernelError(f"NVRTC {version} refused the kernels for {architecture}:\n{text}")


def _options(architecture: str, version: tuple[int, int]) -> tuple[str, ...]:
    """Options for NVRTC of that version. From 13.0 on it can take all cores; the code does not depend on how many."""
    all_cores = ("--split-compile=0",) if version >= (13, 0) else ()
    return (f"--gpu-architecture={architecture}", *_OPTIONS, *all_cores)


def _sources() -> dict[str, bytes]:
    """All CUDA sources by file name, in a fixed order."""
    return {path.name: path.read_bytes() for path in sorted(_SOURCES.glob("*.cu*"))}


def _cache_key(architecture: str) -> str:
    """SHA-256 over everything that decides the result: sources, options with the architecture, the compiler."""
    digest, version = hashlib.sha256(), _version(_load_nvrtc())
    for part in (repr(version), repr(_options(architecture, version)), repr(_sources())):
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def _read_verified(path: Path) -> bytes | None:
    """A kept cubin behind its digest, or None where there is none that matches."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(cubin).digest() != digest:
        logger.warning("%s is damaged; compiling the kernels again", path)
        return None
    return cubin


def _keep(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        logger.info("compiled kernels are not kept: %s", error)
