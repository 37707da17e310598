"""Compiles modules of kernels with NVRTC, which needs neither a GPU nor a host compiler, and keeps the result.

A module is compiled when it is first asked for: what a model does not need is never compiled. `cuda.bindings.nvrtc` is
imported only when something is to be compiled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.cache_directory import user_cache_directory
from edgellm.kernels.errors import KernelError, MissingDependencyError

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
    """A cubin (or PTX), and the name in it of each expression of the source."""

    code: bytes
    lowered_names: dict[str, str]


def compile_module(source: ModuleSource, architecture: str) -> CompiledModule:
    """Compile a module for `architecture`: "sm_90" for a cubin, "compute_80" for PTX.

    Raises MissingDependencyError without NVRTC or CUDA's headers, KernelError with the compiler's log if it refuses.
    """
    nvrtc = _load_nvrtc()
    version = _version(nvrtc)
    texts = _texts(source)
    folders = (f"-I{folder}" for folder in find_headers(version[0]))
    options = [option.encode() for option in (*_options(source, architecture, version), *folders)]
    status, program = nvrtc.nvrtcCreateProgram(
        "".join(f'#include "{name}"\n' for name in source.files).encode(),
        f"{source.name}.module".encode(),
        len(texts),
        list(texts.values()),
        [name.encode() for name in texts],
    )
    _check(nvrtc, status, "creating a program")
    try:
        for expression in source.expressions:
            (status,) = nvrtc.nvrtcAddNameExpression(program, expression.encode())
            _check(nvrtc, status, f"asking for {expression}")
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise _compilation_failure(nvrtc, program, source, architecture)
        return CompiledModule(_code(nvrtc, program, architecture), _lowered_names(nvrtc, program, source))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _code(nvrtc: Any, program: Any, architecture: str) -> bytes:
    kind = "PTX" if architecture.startswith("compute_") else "CUBIN"
    status, size = getattr(nvrtc, f"nvrtcGet{kind}Size")(program)
    _check(nvrtc, status, "reading the size of the compiled kernels")
    code = bytes(size)
    (status,) = getattr(nvrtc, f"nvrtcGet{kind}")(program, code)
    _check(nvrtc, status, "reading the compiled kernels")
    return code


def _lowered_names(nvrtc: Any, program: Any, source: ModuleSource) -> dict[str, str]:
    names = {}
    for expression in source.expressions:
        status, name = nvrtc.nvrtcGetLoweredName(program, expression.encode())
        _check(nvrtc, status, f"reading the name of {expression}")
        names[expression] = name.decode()
    return names


def cached_module(source: ModuleSource, architecture: str) -> CompiledModule:
    """A module for `architecture`, from the user's cache directory or compiled now and kept there.

    A file that does not match its digest is compiled anew; where that cannot be written, every start compiles
    anew, which takes seconds of processor time. Raises what `compile_module` raises.
    """
    name = f"{source.name}-{architecture}-{_cache_key(source, architecture)}.cubin"
    path = user_cache_directory() / "kernels" / name
    content = _read_verified(path)
    if content is not None:
        names, _, code = content.partition(b"\n")
        return CompiledModule(code, json.loads(names))
    stage = f"The CUDA kernels are compiled for {architecture} now, once"
    logger.warning("%s: %s", stage, source.name, extra={"stage": (stage, source.name)})
    module = compile_module(source, architecture)
    content = json.dumps(module.lowered_names).encode() + b"\n" + module.code
    _keep(path, hashlib.sha256(content).digest() + content)
    return module


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


def _compilation_failure(
    nvrtc: Any, program: Any, source: ModuleSource, architecture: str
) -> KernelError | MissingDependencyError:
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
    return KernelError(f"NVRTC {version} refused the kernels {source.name} for {architecture}:\n{text}")


def _options(source: ModuleSource, architecture: str, version: tuple[int, int]) -> tuple[str, ...]:
    """Options for NVRTC of that version. From 13.0 on it can take all cores; the code does not depend on how many."""
    macros = (f"--define-macro={name}={value}" for name, value in source.macros)
    all_cores = ("--split-compile=0",) if version >= (13, 0) else ()
    return (f"--gpu-architecture={architecture}", *_OPTIONS, *macros, *all_cores)


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


def _cache_key(source: ModuleSource, architecture: str) -> str:
    """SHA-256 over everything that decides the result: source, options with the architecture, the compiler."""
    digest, version = hashlib.sha256(), _version(_load_nvrtc())
    for part in (version, _options(source, architecture, version), source, _texts(source)):
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


def _keep(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        logger.info("compiled kernels are not kept: %s", error)
