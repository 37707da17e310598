"""From a checkpoint to an engine directory: all of it or nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from edgellm.engines.build_checks import (
    check_disk_space,
    check_limits,
    check_places,
    check_settings,
    check_tokenizer,
    choose_limits,
    choose_platforms,
    plan_bytes_bound,
)
from edgellm.engines.build_report import BuildReport, BuiltPlan
from edgellm.engines.checkpoint import Checkpoint
from edgellm.engines.decoder import decoder_weights
from edgellm.engines.decoder_config import DecoderConfig, EngineLimits
from edgellm.engines.digests import FileDigest, current_digest, remember_digest
from edgellm.engines.engine_directory import (
    PUBLISHED_FILES,
    WEIGHT_INDEX,
    EngineDirectory,
    described_file_names,
    description_bytes,
    write_description,
)
from edgellm.engines.errors import BuildError
from edgellm.engines.families import decoder_config
from edgellm.engines.network_digest import network_digest
from edgellm.engines.plan_building import build_plans
from edgellm.engines.plan_files import (
    PlanManifest,
    Platform,
    directory_network,
    find_plan,
    plan_path,
    store_plan,
    write_plan,
)
from edgellm.engines.plan_worker import peak_memory
from edgellm.engines.staged_directory import StagedDirectory
from edgellm.engines.weight_copy import WeightTransfer, copy_hashed

#: `progress(stage, done, total)`, called from two threads: stages are "check", "weights" (bytes), "plans" (how many)
#: and "finish".
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class _Job:
    """A build whose input was found good."""

    source: Path
    target: Path
    config: DecoderConfig
    dtype: str
    attention: str
    limits: EngineLimits
    platforms: tuple[Platform, ...]
    weight_files: tuple[Path, ...]
    weights: str
    replace: bool

    @property
    def weight_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.weight_files)

    @property
    def plan_count(self) -> int:
        return len(self.platforms) * len(self.limits.engine_shapes())


def read_decoder_config(checkpoint: str | Path) -> DecoderConfig:
    """A checkpoint's dimensions; raises CheckpointError, and UnsupportedModelError for an unknown family."""
    with Checkpoint.open(checkpoint) as opened:
        return decoder_config(opened.config, opened.generation_config, dtype=opened.dtype)


def build_engine_directory(
    checkpoint_path: str | Path,
    engine_dir: str | Path,
    limits: EngineLimits | None = None,
    targets: Sequence[str] | None = None,
    dtype: str | None = None,
    attention: str = "auto",
    weights: str = "copy",
    force: bool = False,
    beyond_trained_context: bool = False,
    progress: Progress | None = None,
) -> BuildReport:
    """Build an engine directory; whatever goes wrong, Ctrl-C included, nothing is left behind.

    `limits` default to what fits the model, `targets` to this machine's GPU, `dtype` to the checkpoint's own (float16
    where that is float32); `weights` is "copy" or "link". With `force` an existing engine directory is replaced, once
    the new one is complete. Raises BuildError, CheckpointError, UnsupportedModelError, MissingDependencyError.
    """
    started, progress = time.perf_counter(), progress or _no_progress
    progress("check", 0, 1)
    source, target = Path(checkpoint_path), Path(engine_dir)
    check_places(source, target, force)
    config = read_decoder_config(source)
    if limits is None:
        limits = choose_limits(config)
    check_limits(config, limits, beyond_trained_context)
    dtype = dtype or _engine_dtype(config)
    check_settings(dtype, attention, weights)
    platforms, note = choose_platforms(targets)
    files = _checked_weight_files(source, config)
    check_tokenizer(source, config.vocab_size)
    job = _Job(source, target, config, dtype, attention, limits, platforms, files, weights, force)
    copied = job.weight_bytes if weights == "copy" else 0
    check_disk_space(target.absolute().parent, copied + plan_bytes_bound(config, job.plan_count))
    report = BuildReport(target, config, dtype, limits, job.weight_bytes, weights=weights)
    report.notes += [note] if note else []
    report.seconds["check"] = time.perf_counter() - started
    progress("check", 1, 1)
    try:
        digests = _make(job, report, progress)
    except OSError as error:
        raise BuildError(
            f"{target} was not built, and nothing was left behind: {error.strerror or error}"
            + (f" ({error.filename})" if error.filename else "")
        ) from error
    for path in files:
        remember_digest(target / path.name, digests[path.name])
    return _finished(report, started)


def refresh_plans(
    engine_dir: str | Path, targets: Sequence[str] | None = None, progress: Progress | None = None
) -> BuildReport:
    """Build the plans that an engine directory lacks, or whose own are refused, for `targets` or this machine's GPU.

    They are written into the directory, or into the user's cache where it cannot be written. Raises BuildError,
    EngineDirectoryError, MissingDependencyError.
    """
    started, progress = time.perf_counter(), progress or _no_progress
    directory = EngineDirectory.open(engine_dir)
    platforms, note = choose_platforms(targets)
    if not platforms:
        raise BuildError(f"There is no target to build plans for. {note}")
    config, dtype, attention = directory.config, directory.dtype, directory.attention
    report = BuildReport(directory.path, config, dtype, directory.limits)
    shapes = directory.limits.engine_shapes()
    total = len(platforms) * len(shapes)
    check_disk_space(directory.path, plan_bytes_bound(config, total))
    networks = {shape: directory_network(directory, shape) for shape in shapes}
    for platform in platforms:
        missing = []
        for shape in shapes:
            plan, _ = find_plan(directory, shape, platform, networks[shape])
            if plan is None:
                missing.append(shape)
            else:
                report.plans.append(BuiltPlan(platform, shape, len(plan), 0.0))
        progress("plans", len(report.plans), total)
        with closing(build_plans(config, missing, dtype, attention, platform.compute_capability)) as built:
            for plan in built:
                if store_plan(directory, plan.shape, platform, networks[plan.shape], plan.data) is None:
                    raise BuildError(f"{plan.shape.name} was built, but no place for it can be written")
                report.add_plan(platform, plan)
                progress("plans", len(report.plans), total)
    report.seconds["plans"] = time.perf_counter() - started
    return _finished(report, started)


def describe_in_place(
    directory: str | Path,
    limits: EngineLimits | None = None,
    dtype: str | None = None,
    attention: str = "auto",
    beyond_trained_context: bool = False,
) -> EngineDirectory:
    """Make an engine directory of a checkpoint by writing `edgellm.json` beside its files; an older one is replaced.

    Raises CheckpointError, UnsupportedModelError, and BuildError for limits out of range or a failure to write.
    """
    directory = Path(directory)
    config = read_decoder_config(directory)
    limits = limits or choose_limits(config)
    check_limits(config, limits, beyond_trained_context)
    dtype = dtype or _engine_dtype(config)
    check_settings(dtype, attention)
    _checked_weight_files(directory, config)
    check_tokenizer(directory, config.vocab_size)
    files = {name: current_digest(directory / name, trust_memory=False) for name in described_file_names(directory)}
    try:
        write_description(directory, description_bytes(config, dtype, attention, limits, files))
    except OSError as error:
        raise BuildError(f"{directory} cannot be written: {error.strerror or error}") from error
    return EngineDirectory.open(directory)


def _make(job: _Job, report: BuildReport, progress: Progress) -> dict[str, FileDigest]:
    """Write the directory beside its place and put it there; the digests of the weights."""
    copied, total = 0, job.weight_bytes

    def advance(count: int) -> None:
        nonlocal copied
        copied += count
        progress("weights", copied, total)

    with StagedDirectory(job.target) as staged:
        started = time.perf_counter()
        published = _copy_published(job, staged.path)
        transfer = WeightTransfer(job.weight_files, staged.path, job.weights == "link", advance)
        transfer.start()
        try:
            _write_plans(job, staged.path / "plans", report, transfer, progress)
            report.seconds["plans"] = time.perf_counter() - started
            digests = transfer.result()
        finally:
            transfer.cancel()
        report.seconds["weights"] = transfer.seconds
        progress("finish", 0, 1)
        files = {**published, **digests}
        write_description(staged.path, description_bytes(job.config, job.dtype, job.attention, job.limits, files))
        staged.commit(job.replace)
    report.published_bytes = sum(digest.size for digest in published.values())
    progress("finish", 1, 1)
    return digests


def _write_plans(job: _Job, plans: Path, report: BuildReport, transfer: WeightTransfer, progress: Progress) -> None:
    shapes = job.limits.engine_shapes()
    for platform in job.platforms:
        target, has_failed = platform.compute_capability, transfer.has_failed
        with closing(build_plans(job.config, shapes, job.dtype, job.attention, target, has_failed)) as built:
            for plan in built:
                network = network_digest(job.config, plan.shape, job.dtype, job.attention)
                manifest = PlanManifest.of(plan.data, plan.shape, platform, network, job.dtype, job.attention)
                write_plan(plan_path(plans, plan.shape, platform), plan.data, manifest)
                report.add_plan(platform, plan)
                progress("plans", len(report.plans), job.plan_count)


def _copy_published(job: _Job, destination: Path) -> dict[str, FileDigest]:
    names = [name for name in PUBLISHED_FILES if (job.source / name).exists()]
    if len(job.weight_files) > 1:
        names.append(WEIGHT_INDEX)
    never = threading.Event()
    return {name: copy_hashed(job.source / name, destination / name, never) for name in names}


def _checked_weight_files(source: Path, config: DecoderConfig) -> tuple[Path, ...]:
    with Checkpoint.open(source) as checkpoint:
        checkpoint.check(decoder_weights(config))
        return tuple(checkpoint.files)


def _engine_dtype(config: DecoderConfig) -> str:
    """Engines compute in the checkpoint's dtype; float32 would need twice the memory for nothing that one can see."""
    return "float16" if config.dtype == "float32" else config.dtype


def _finished(report: BuildReport, started: float) -> BuildReport:
    report.peak_host_bytes = peak_memory() + report.workers_peak_bytes
    report.total_seconds = time.perf_counter() - started
    return report


def _no_progress(stage: str, done: int, total: int) -> None:
    pass
