"""The plans of an engine directory: which it gets, built and noted; and plans and kernels that are added later."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from edgellm.engines.backends.device_layouts import PackedLayouts, gpu_layouts
from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.plan_files import Platform, directory_network, find_plan, store_plan
from edgellm.engines.building.checks import choose_platforms, plan_bytes_bound
from edgellm.engines.building.kernels import compile_kernels
from edgellm.engines.building.plans import BuildReport, BuiltPlan, PlanBytes, build_plans, peak_memory
from edgellm.engines.building.targets import Target
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError
from edgellm.engines.families.programs import ModelConfig
from edgellm.engines.formats.staged_directory import check_space
from edgellm.engines.model.limits import EngineShape

#: `progress(stage, done, total)`, called from two threads: stages are "check", "weights" (bytes), "plans" (how many),
#: "draft" and "head" (rows), "kernels" (how many) and "finish".
Progress = Callable[[str, int, int], None]


def choose_plans(
    report: BuildReport,
    models: Mapping[str, ModelConfig],
    platforms: Sequence[Platform],
    all_plans: bool,
    packed: PackedLayouts,
) -> dict[Platform, list[EngineShape]]:
    """What each platform gets plans for."""
    report.targets = [platform.compute_capability for platform in platforms]
    limits, dtype = report.limits, report.dtype
    return {
        each: planned_shapes(models, limits, dtype, each.compute_capability, all_plans, packed) for each in platforms
    }


def shapes_of(plans: Mapping[Platform, Sequence[EngineShape]]) -> list[EngineShape]:
    return [shape for shapes in plans.values() for shape in shapes]


def build_into(
    plans: Mapping[Platform, Sequence[EngineShape]],
    models: Mapping[str, ModelConfig],
    attention: str,
    report: BuildReport,
    progress: Progress,
    keep: Callable[[Platform, PlanBytes], None],
    is_in_vain: Callable[[], bool] = lambda: False,
) -> None:
    """Build plans, let each be kept, and note it in the report, which may have some already."""
    count = len(report.plans) + len(shapes_of(plans))
    for platform, shapes in plans.items():
        target = platform.compute_capability
        with closing(build_plans(models, shapes, report.dtype, attention, target, is_in_vain)) as built:
            for plan in built:
                keep(platform, plan)
                report.plans.append(BuiltPlan(platform, plan.shape, len(plan.data), plan.seconds))
                report.workers_peak_bytes = max(report.workers_peak_bytes, plan.workers_peak_bytes)
                progress("plans", len(report.plans), count)


def finished(report: BuildReport, started: float) -> BuildReport:
    """The report with the memory that was taken, and the seconds since `started`."""
    report.peak_host_bytes = report.peak_host_bytes or peak_memory() + report.workers_peak_bytes
    report.total_seconds = time.perf_counter() - started - report.token_seconds
    return report


def refresh_plans(
    engine_dir: str | Path,
    targets: Sequence[str] | None = None,
    progress: Progress | None = None,
    all_plans: bool = False,
) -> BuildReport:
    """Build the plans that an engine directory lacks, or whose own are refused, for `targets` or this machine's GPU:
    those of the shapes that the hand-written kernels do not run there, with `all_plans` all.

    They are written into the directory, or into the user's cache where it cannot be written. Raises BuildError,
    EngineDirectoryError, MissingDependencyError.
    """
    started, progress = time.perf_counter(), progress or (lambda stage, done, total: None)
    directory = EngineDirectory.open(engine_dir)
    platforms, note = choose_platforms(targets)
    if not platforms:
        raise BuildError(f"There is no target to build plans for. {note}")
    packed, refusal = gpu_layouts(directory.models, directory.checkpoints, directory.dtype)
    if refusal is not None:
        raise BuildError(refusal)
    report = _report_of(directory)
    plans = choose_plans(report, directory.models, platforms, all_plans, packed)
    needed = shapes_of(plans)
    plan_bytes = plan_bytes_bound(directory.config, needed, report.vision)
    check_space(directory.path, plan_bytes, BuildError, "the engine directory")
    networks = {shape: directory_network(directory, shape) for shape in set(needed)}
    missing: dict[Platform, list[EngineShape]] = {platform: [] for platform in plans}
    for platform, shapes in plans.items():
        for shape in shapes:
            found, _ = find_plan(directory, shape, platform, networks[shape])
            if found is None:
                missing[platform].append(shape)
            else:
                report.plans.append(BuiltPlan(platform, shape, len(found), 0.0))
    progress("plans", len(report.plans), len(needed))

    def keep(platform: Platform, plan: PlanBytes) -> None:
        if store_plan(directory, plan.shape, platform, networks[plan.shape], plan.data) is None:
            raise BuildError(f"{plan.shape.name} was built, but no place for it can be written")

    build_into(missing, directory.models, directory.attention, report, progress, keep)
    report.seconds["plans"] = time.perf_counter() - started
    return finished(report, started)


def _report_of(directory: EngineDirectory) -> BuildReport:
    """The report of a directory that was built before, to which nothing was added yet."""
    draft = None if directory.draft is None else directory.draft.config
    vision = None if directory.vision is None else directory.vision.config
    return BuildReport(directory.path, directory.config, directory.dtype, directory.limits, draft, vision)


def add_targets(
    engine_dir: str | Path,
    kernels: Sequence[Target],
    targets: Sequence[str] = (),
    cuda: tuple[int, int] | None = None,
    progress: Progress | None = None,
    all_plans: bool = False,
) -> BuildReport:
    """Compile the kernels of an engine directory for more targets, or anew; those named in `targets` get the plans that
    they lack, too. See `build_engine_directory`, and `refresh_plans`. Raises what these raise."""
    started, progress = time.perf_counter(), progress or (lambda stage, done, total: None)
    if targets:
        report = refresh_plans(engine_dir, targets, progress, all_plans)
    else:
        report = _report_of(EngineDirectory.open(engine_dir))
    compile_kernels(kernels, cuda, Path(engine_dir), report, progress)
    return finished(report, started)
