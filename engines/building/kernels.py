"""Kernels of an engine directory for targets that need not be here: compiled side by side, and kept with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from edgellm.engines.backends.device_layouts import gpu_layouts
from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.building.needed_kernels import WeightLayouts, needed_modules
from edgellm.engines.building.plans import BuildReport, BuiltKernels
from edgellm.engines.building.targets import Target
from edgellm.engines.checkpoints.weights import counted
from edgellm.engines.directories.description import DESCRIPTION_NAME, edgellm_version, write_description
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.directories.kernel_folders import KERNELS_FOLDER, with_kernels
from edgellm.engines.errors import BuildError, EngineError, explained
from edgellm.engines.formats.digests import hash_file
from edgellm.engines.formats.staged_directory import StagedDirectory
from edgellm.engines.model.limits import KV_CACHES, EngineShape
from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.compilations import compile_all
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.kept import MANIFEST_NAME, KeptModule, Manifest, folder_name, write_cubin
from edgellm.kernels.nvrtc import find_nvrtc

#: More than the cubins of a target take: those of the shipped model for four boards 25 MB.
KERNEL_BYTES = 64 << 20
#: `progress(done, total)`, modules of all targets; and the same of a stage by name.
Progress = Callable[[int, int], None]
Stages = Callable[[str, int, int], None]


def check_compiler(targets: Sequence[Target], release: tuple[int, int] | None = None) -> tuple[int, int]:
    """The release of the compiler that is taken for the targets: of CUDA's `release`, or the newest. Raises
    MissingDependencyError without it, and BuildError for a target that it cannot compile for."""
    nvrtc = find_nvrtc(release)
    known = nvrtc.architectures()
    for target in targets:
        if target.capability not in known:
            found = ".".join(map(str, nvrtc.release))
            raise BuildError(
                f"--target is {target.capability}: NVRTC {found} compiles for {', '.join(known)}. Take the compiler of "
                "another release of CUDA, as in --cuda 13.0"
            )
    return nvrtc.release


def add_kernels(
    directory: EngineDirectory,
    targets: Sequence[Target],
    release: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> list[BuiltKernels]:
    """Compile all kernels that a directory can ask for on the targets, with the compiler of a CUDA release (None: the
    newest), and keep them there; those of the same target and release are replaced, once the new ones are complete.

    Raises BuildError, CheckpointError, MissingDependencyError.
    """
    release = check_compiler(targets, release)
    try:
        weights = WeightLayouts(directory.models, directory.checkpoints, directory.dtype)
    except EngineError as error:
        raise BuildError(str(error)) from error
    needed = [needed_for(directory, weights, target) for target in targets]
    advance, built = counted(sum(map(len, needed)), progress), list[BuiltKernels]()
    advance(0)
    for target, sources in zip(targets, needed, strict=True):
        started = time.perf_counter()
        with explained(f"The kernels for {target.capability} cannot be kept in {directory.path}", BuildError):
            manifest = _write(directory.path, target, release, sources, advance)
        built.append(BuiltKernels(manifest, time.perf_counter() - started))
    return built


def compile_kernels(
    targets: Sequence[Target], cuda: tuple[int, int] | None, path: Path, report: BuildReport, progress: Stages
) -> None:
    """Compile the kernels of the directory at `path` and note them in the report, with what TensorRT would do there."""
    if not targets:
        return
    started, directory = time.perf_counter(), EngineDirectory.read(path)
    report.kernels += add_kernels(directory, targets, cuda, partial(progress, "kernels"))
    report.seconds["kernels"] = time.perf_counter() - started
    packed, _ = gpu_layouts(directory.models, directory.checkpoints, directory.dtype)
    for target in targets:
        capability = target.capability
        shapes = planned_shapes(directory.models, directory.limits, directory.dtype, capability, False, packed)
        if shapes and capability not in report.targets:
            report.notes.append(
                f"No plans were built for {capability}, where TensorRT runs {_phases(shapes)}: that GPU makes them on "
                "first use, with its own TensorRT."
            )


def _phases(shapes: Sequence[EngineShape]) -> str:
    """What shapes are of, as in "base prefill of 128 and 512 tokens"."""
    tokens: dict[str, list[int]] = {}
    for shape in shapes:
        found = tokens.setdefault(f"{shape.model} {shape.phase}", [])
        found += [shape.tokens] if shape.tokens not in found else []
    return "; ".join(f"{name} of {' and '.join(map(str, sizes))} tokens" for name, sizes in tokens.items())


def needed_for(directory: EngineDirectory, weights: WeightLayouts, target: Target) -> list[ModuleSource]:
    """The modules for all GPUs of a target, with KV rows of either kind: which one is chosen when it is opened."""
    found: dict[ModuleSource, None] = {}
    for gpu in target.gpus:
        for kind in KV_CACHES:
            limits = replace(directory.limits, kv_cache=kind)
            found |= dict.fromkeys(needed_modules(directory.models, limits, directory.dtype, weights, gpu))
    return list(found)


def _write(
    path: Path,
    target: Target,
    release: tuple[int, int],
    sources: Sequence[ModuleSource],
    advance: Callable[[int], None],
) -> Manifest:
    """Compile into a folder that gets its name when it is whole, and describe it. A folder that it replaces is not
    described meanwhile, so that whatever goes wrong the directory is as described."""
    name, description = folder_name(target.capability, release), path / DESCRIPTION_NAME
    with StagedDirectory(path / KERNELS_FOLDER / name) as staged:
        modules: list[KeptModule] = []
        for source, module in compile_all(sources, target.capability, release):
            modules.append(write_cubin(staged.path, source, target.capability, module))
            advance(1)
        ordered = tuple(sorted(modules, key=lambda module: module.file))
        manifest = Manifest(target.capability, release, target.multiprocessors, edgellm_version(), ordered)
        write_atomically(staged.path / MANIFEST_NAME, manifest.data())
        digest = hash_file(staged.path / MANIFEST_NAME)
        others = {folder: own for folder, own in EngineDirectory.read(path).kernels.items() if folder != name}
        write_description(path, with_kernels(description, others))
        staged.commit(replace=True)
    write_description(path, with_kernels(description, others | {name: digest}))
    return manifest
