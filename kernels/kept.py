"""Compiled kernels that are kept with a model, so that a device needs no compiler: folders of cubins and a manifest.

    sm_87-cuda13.0/manifest.json        what each cubin was compiled from and for, and its SHA-256
    sm_87-cuda13.0/walk-0c31....cubin

A folder is of one architecture and one release of the compiler. Nobody gets the bytes of a cubin before their SHA-256
was compared with the manifest; the manifest's own digest is that of whoever has the folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.compiler import CompiledModule, ModuleSource, module_key, module_options, recalled_module
from edgellm.kernels.errors import KernelError, shown
from edgellm.kernels.gpu import GPU
from edgellm.kernels.nvrtc import MAJORS

MANIFEST_NAME, MANIFEST_VERSION = "manifest.json", 1
_FOLDER = re.compile(r"(sm_\d{2,3})-cuda(\d{1,3})\.(\d{1,3})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.cubin")
_SHA256 = re.compile(r"[0-9a-f]{64}")
#: A manifest has half a kilobyte for each cubin; those of the largest engines have a few hundred.
_MANIFEST_BYTES, _CUBIN_BYTES = 16 << 20, 256 << 20


@dataclass(frozen=True)
class KeptModule:
    """What a manifest says of one cubin: the module's name, its `module_key`, the compiler's options, the names in the
    cubin of its expressions, and the file with its SHA-256 and size in bytes."""

    module: str
    source: str
    options: tuple[str, ...]
    names: Mapping[str, str]
    file: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """What is in a folder: cubins for `architecture` of the CUDA `release`, and for which numbers of `multiprocessors`
    they are all that a model needs, as far as EdgeLLM `created_with` knew."""

    architecture: str
    release: tuple[int, int]
    multiprocessors: tuple[int, ...]
    created_with: str
    modules: tuple[KeptModule, ...]

    @property
    def folder(self) -> str:
        """The name of the folder."""
        return folder_name(self.architecture, self.release)

    @property
    def size(self) -> int:
        """Bytes of all cubins."""
        return sum(module.size for module in self.modules)

    def data(self) -> bytes:
        """The content of `manifest.json`."""
        return (json.dumps({"format_version": MANIFEST_VERSION, **asdict(self)}, indent=1) + "\n").encode()


def folder_name(architecture: str, release: tuple[int, int]) -> str:
    """As in "sm_87-cuda13.0"."""
    return f"{architecture}-cuda{release[0]}.{release[1]}"


def architecture_of(folder: str) -> tuple[str, tuple[int, int]] | None:
    """The architecture and the CUDA release of a folder's name, None where it is not one."""
    match = _FOLDER.fullmatch(folder)
    return (match[1], (int(match[2]), int(match[3]))) if match else None


def write_cubin(folder: Path, source: ModuleSource, architecture: str, module: CompiledModule) -> KeptModule:
    """Write a cubin into a folder that exists, and give what the manifest says of it; raises OSError."""
    key = module_key(source, architecture)
    name = f"{re.sub(r'[^A-Za-z0-9_]+', '_', source.name)[:80].strip('_')}-{key[:16]}.cubin"
    write_atomically(folder / name, module.code)
    options, digest = module_options(source, architecture), hashlib.sha256(module.code).hexdigest()
    return KeptModule(source.name, key, options, module.lowered_names, name, digest, len(module.code))


def read_manifest(folder: Path) -> Manifest:
    """Parse the manifest of a folder strictly; raises KernelError that says what is wrong with it."""
    path = folder / MANIFEST_NAME
    try:
        with path.open("rb") as file:
            data = file.read(_MANIFEST_BYTES + 1)
        if len(data) > _MANIFEST_BYTES:
            raise KernelError(f"{path} has more than {_MANIFEST_BYTES:,} bytes")
        return _parsed(json.loads(data), folder.name)
    except OSError as error:
        raise KernelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise KernelError(f"{path} is no manifest of kernels: {error}") from error


def _parsed(values: Any, folder: str) -> Manifest:
    version = values["format_version"]
    if version != MANIFEST_VERSION:
        raise ValueError(f"'format_version' is {shown(version)}, this EdgeLLM reads {MANIFEST_VERSION}")
    of_folder = architecture_of(folder)
    release, counts = tuple(values["release"]), tuple(values["multiprocessors"])
    if of_folder != (values["architecture"], release) or not all(type(count) is int for count in counts):
        raise ValueError(f"it is of {shown(values['architecture'])} and CUDA {shown(list(release))}, not of {folder}")
    modules = tuple(_module(each) for each in values["modules"])
    return Manifest(of_folder[0], of_folder[1], counts, str(values["created_with"]), modules)


def _module(values: Any) -> KeptModule:
    module = KeptModule(**values | {"options": tuple(values["options"])})
    texts = (module.module, module.source, module.file, module.sha256, *module.options, *module.names.values())
    if not all(isinstance(text, str) for text in texts) or type(module.size) is not int:
        raise ValueError(f"a module is described by {shown(values)}")
    if not (_FILE.fullmatch(module.file) and _SHA256.fullmatch(module.sha256) and _SHA256.fullmatch(module.source)):
        raise ValueError(f"a module is in {shown(module.file)} of SHA-256 {shown(module.sha256)}")
    return module


def read_cubin(folder: Path, module: KeptModule) -> bytes:
    """The bytes of a cubin that is as its manifest says; raises KernelError that names what differs."""
    path = folder / module.file
    try:
        with path.open("rb") as file:
            code = file.read(min(module.size, _CUBIN_BYTES) + 1)
    except OSError as error:
        raise KernelError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(code) != module.size:
        found = f"{path.stat().st_size:,}"
        raise KernelError(f"{path} has {found} bytes, expected {module.size:,}: it was cut or replaced")
    found = hashlib.sha256(code).hexdigest()
    if found != module.sha256:
        raise KernelError(f"{path} is damaged: SHA-256 {found[:16]}..., expected {module.sha256[:16]}...")
    return code


class KeptKernels:
    """The compiled kernels of a model for one GPU: of the folders that are kept with it, then of the user's cache."""

    def __init__(self, gpu: GPU, folders: Sequence[Path] = (), command: str = "") -> None:
        """`folders` are those with a manifest, of any architecture; `command` is what makes them anew."""
        self._gpu, self._folders, self._command = gpu, folders, command

    @cached_property
    def manifests(self) -> list[tuple[Path, Manifest]]:
        """Those for the GPU's architecture, the newest release first. Raises KernelError."""
        found = [(folder, read_manifest(folder)) for folder in self._folders if self._is_of_gpu(folder)]
        return sorted(found, key=lambda pair: pair[1].release, reverse=True)

    def _is_of_gpu(self, folder: Path) -> bool:
        named = architecture_of(folder.name)
        return named is not None and named[0] == self._gpu.architecture

    @cached_property
    def gpu(self) -> GPU:
        """The GPU that kernels are chosen for: with as many multiprocessors as it has, or where those of others alone
        are kept with the model, as the largest smaller one of these, or else the smallest. Raises KernelError."""
        counts, own = {count for _, manifest in self._fitting for count in manifest.multiprocessors}, self._gpu
        if own.multiprocessors in counts or not counts:
            return own
        smaller = (count for count in counts if count < own.multiprocessors)
        return replace(own, multiprocessors=max(smaller, default=min(counts)))

    @property
    def better(self) -> str | None:
        """Where kernels of another GPU are taken, the command that compiles this one's own."""
        own = self._gpu.multiprocessors
        return None if self.gpu.multiprocessors == own else f"{self._command}:{own}"

    @property
    def _fitting(self) -> list[tuple[Path, Manifest]]:
        """Those whose release the driver takes."""
        return [(folder, manifest) for folder, manifest in self.manifests if self._takes(manifest.release)]

    @cached_property
    def _modules(self) -> dict[str, tuple[Path, KeptModule, tuple[int, int]]]:
        """Of what the driver takes, where each module is, by its key."""
        found: dict[str, tuple[Path, KeptModule, tuple[int, int]]] = {}
        for folder, manifest in self._fitting:
            found = {each.source: (folder, each, manifest.release) for each in manifest.modules} | found
        return found

    def _takes(self, release: tuple[int, int]) -> bool:
        """Whether the driver loads what a compiler made: that of its own major release of CUDA, or of an older one."""
        return release[0] <= self._gpu.driver_cuda[0]

    def find(self, source: ModuleSource) -> CompiledModule | None:
        """A module, None where it was compiled nowhere. Raises KernelError for a file that is not as described."""
        kept = self._modules.get(module_key(source, self._gpu.architecture))
        if kept is None:
            return recalled_module(source, self._gpu.architecture)
        folder, module, release = kept
        try:
            return CompiledModule(read_cubin(folder, module), dict(module.names), release)
        except KernelError as error:
            raise KernelError(f"{error}. Copy the engine directory anew, or: {self._command}") from error

    def refusal(self, source: ModuleSource) -> str | None:
        """Why a module that is not found is none of those that are kept with the model, and what makes it; None where
        nothing is kept there."""
        if not self._folders:
            return None
        name, gpu = source.name, self._gpu
        takes = ".".join(map(str, gpu.driver_cuda))
        kept, fitting = ([manifest for _, manifest in found] for found in (self.manifests, self._fitting))
        if not kept:
            others = ", ".join(sorted({folder.name.partition("-")[0] for folder in self._folders}))
            reason = f"Kernels are kept with the model for {others}, this GPU is {gpu.architecture}"
        elif not fitting:
            releases = ", ".join(sorted({".".join(map(str, manifest.release)) for manifest in kept}))
            reason = (
                f"The kernels that are kept with the model for {gpu.architecture} were compiled by CUDA {releases}, "
                f"and the driver takes CUDA {takes}"
            )
        elif any(module.module == name for manifest in fitting for module in manifest.modules):
            release = ", ".join(sorted({manifest.created_with for manifest in fitting}))
            reason = (
                f"The kernels that are kept with the model for {gpu.architecture} were compiled by EdgeLLM {release} "
                f"from other sources of {name} than the installed one has"
            )
        else:
            reason = f"The kernels that are kept with the model for {gpu.architecture} lack {name}"
        older = f" --cuda {takes}" if 0 < gpu.driver_cuda[0] < MAJORS[0] else ""
        return f"{reason}. Where there is a compiler: {self._command}{older}"
