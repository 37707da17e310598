"""NVRTC, CUDA's compiler of kernels at run time, by ctypes: so that the libraries of several CUDA releases may lie side
by side, and that nothing of CUDA's Python bindings is needed to compile."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from edgellm.kernels.errors import KernelError, MissingDependencyError
from edgellm.kernels.gpu import find_gpu

#: The major releases of CUDA whose compiler is looked for, the newest first.
MAJORS = (13, 12)


class Compiled(NamedTuple):
    """A cubin (or PTX), and the name in it of each expression that was asked for."""

    code: bytes
    lowered_names: dict[str, str]


class Refused(Exception):
    """NVRTC does not take a source; the text is its log."""


class Nvrtc:
    """One library of NVRTC. `release` is CUDA's, as (13, 0)."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        """`path` is what it was loaded by, for messages. Raises MissingDependencyError for another library."""
        self._library, self.path = library, path
        major, minor = ctypes.c_int(), ctypes.c_int()
        try:
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            self._checked(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "asking for its version")
        except AttributeError as error:
            raise MissingDependencyError(f"{path} is no NVRTC: {error}") from error
        self.release = major.value, minor.value

    def architectures(self) -> list[str]:
        """What it compiles for, as "sm_90"."""
        count = ctypes.c_int()
        self._checked(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "asking for architectures")
        numbers = (ctypes.c_int * count.value)()
        self._checked(self._library.nvrtcGetSupportedArchs(numbers), "asking for architectures")
        return [f"sm_{number}" for number in numbers]

    def compile(
        self, name: str, text: str, headers: Mapping[str, bytes], options: Sequence[str], expressions: Sequence[str]
    ) -> Compiled:
        """Compile `text`, which is called `name` in messages and may include the `headers`, for the architecture that
        the options name: PTX for "compute_80", otherwise a cubin. Raises Refused, or KernelError."""
        library, program = self._library, ctypes.c_void_p()
        created = library.nvrtcCreateProgram(
            ctypes.byref(program),
            text.encode(),
            name.encode(),
            len(headers),
            (ctypes.c_char_p * len(headers))(*headers.values()),
            (ctypes.c_char_p * len(headers))(*(each.encode() for each in headers)),
        )
        self._checked(created, "creating a program")
        try:
            for expression in expressions:
                self._checked(library.nvrtcAddNameExpression(program, expression.encode()), f"asking for {expression}")
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if library.nvrtcCompileProgram(program, len(options), given):
                raise Refused(self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace"))
            kind = "PTX" if any("=compute_" in option for option in options) else "CUBIN"
            lowered = {expression: self._lowered_name(program, expression) for expression in expressions}
            return Compiled(self._read(program, kind), lowered)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _lowered_name(self, program: ctypes.c_void_p, expression: str) -> str:
        name = ctypes.c_char_p()
        status = self._library.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(name))
        self._checked(status, f"reading the name of {expression}")
        assert name.value is not None
        return name.value.decode()

    def _read(self, program: ctypes.c_void_p, kind: str) -> bytes:
        size = ctypes.c_size_t()
        self._checked(getattr(self._library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)), f"reading the {kind}")
        data = ctypes.create_string_buffer(size.value)
        self._checked(getattr(self._library, f"nvrtcGet{kind}")(program, data), f"reading the {kind}")
        return data.raw

    def _checked(self, status: int, action: str) -> None:
        if status:
            raise KernelError(f"NVRTC failed while {action}: {self._library.nvrtcGetErrorString(status).decode()}")


@lru_cache(maxsize=4)
def find_nvrtc(release: tuple[int, int] | None = None) -> Nvrtc:
    """The compiler of a CUDA release, as (12, 6), or of the newest one that the GPU's driver takes, if there is one.

    Searched are NVIDIA's wheels (nvidia-cuda-nvrtc, nvidia-cuda-nvrtc-cu12), then $CUDA_HOME, $CUDA_PATH and
    /usr/local/cuda, then what the system's loader finds. Raises MissingDependencyError, which names what was found.
    """
    found: list[Nvrtc] = []
    reasons: list[str] = []
    for path in _libraries():
        try:
            nvrtc = Nvrtc(_loaded(path), path)
        except (OSError, MissingDependencyError) as error:
            reasons.append(str(error))
            continue
        if release in (None, nvrtc.release):
            return nvrtc
        found.append(nvrtc)
    if found:
        others = ", ".join(f"{_spelled(each.release)} ({each.path})" for each in found)
        assert release is not None
        raise MissingDependencyError(
            f"NVRTC of CUDA {_spelled(release)} was not found, only of {others}. Install it with: pip install "
            f"{_wheel(release)}"
        )
    broken = next((each for each in reasons if "cannot open shared object" not in each), "")
    if release is None and (gpu := find_gpu()) is not None and gpu.driver_cuda[0] < MAJORS[0]:
        release = gpu.driver_cuda
    raise MissingDependencyError(
        f"The library NVRTC was not found{f' ({broken})' if broken else ''}. Install it with: pip install "
        f"{_wheel(release)}"
    )


def wheel_folders() -> list[Path]:
    """Where NVIDIA's wheels are installed: in each place that modules are imported from."""
    folders = (Path(place) / "nvidia" for place in sys.path)
    return [folder for folder in folders if folder.is_dir()]


def toolkit_roots() -> list[Path]:
    """Where CUDA's toolkit may be installed."""
    variables = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return [Path(root) for root in variables if root]


def _libraries() -> list[str]:
    """Paths of what may be NVRTC, the preferred first; at last names that the system's loader may know."""
    gpu = find_gpu()
    majors = sorted(MAJORS, key=lambda major: gpu is not None and major > gpu.driver_cuda[0])
    wheels = {13: "cu13/lib/libnvrtc.so.13", 12: "cuda_nvrtc/lib/libnvrtc.so.12"}
    places = [root / wheels[major] for major in majors for root in wheel_folders()]
    for root in toolkit_roots():
        places += [
            path for folder in ("lib64", "lib", "targets/*/lib") for path in root.glob(f"{folder}/libnvrtc.so.*")
        ]
    files = [str(path) for path in places if re.fullmatch(r"libnvrtc\.so\.\d+", path.name) and path.is_file()]
    return [*files, *(f"libnvrtc.so.{major}" for major in majors)]


def _loaded(path: str) -> ctypes.CDLL:
    """The library at `path`, behind the one with CUDA's own functions: it asks for that by name, which the system's
    loader knows only once it is loaded."""
    for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")) if "/" in path else ():
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(path)


def _wheel(release: tuple[int, int] | None) -> str:
    """What pip installs for a release of CUDA; None: the newest."""
    if release is None:
        return "nvidia-cuda-nvrtc"
    return f"'nvidia-cuda-nvrtc{'' if release[0] >= 13 else f'-cu{release[0]}'}=={_spelled(release)}.*'"


def _spelled(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
