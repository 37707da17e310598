"""From a checkpoint to an engine directory: all of it or nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edgellm.engines.backends.device_layouts import PackedLayouts, model_layouts, packed_memory
from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.plan_files import (
    PlanManifest,
    Platform,
    directory_network,
    find_plan,
    network_digest,
    plan_path,
    store_plan,
    write_plan,
)
from edgellm.engines.backends.planned_engines import planned_engines
from edgellm.engines.building.checks import (
    EMBEDDINGS,
    check_disk_space,
    check_image_rows,
    check_limits,
    check_places,
    check_range,
    check_settings,
    choose_limits,
    choose_platforms,
    leaves_out_embedding,
    plan_bytes_bound,
    with_window_rows,
)
from edgellm.engines.building.inputs import (
    BuildInputs,
    WeightTransfer,
    own_files,
    read_adapters,
    read_decoder_config,
    read_inputs,
    read_vision_config,
    with_packed_heads,
    write_made_files,
)
from edgellm.engines.building.plans import BuildReport, BuiltPlan, build_plans, peak_memory
from edgellm.engines.building.shipped_draft import DRAFT_VOCABULARY, choose_draft, lost_mtp
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weight_files import VOCABULARY_FILE
from edgellm.engines.directories.engine_directory import (
    EngineDirectory,
    adapter_names,
    described_file_names,
    description_bytes,
    write_description,
)
from edgellm.engines.directories.engine_parts import DRAFT_FOLDER, LORA_FOLDER, VISION_FOLDER
from edgellm.engines.errors import BuildError, CheckpointError, EdgeLLMError, EngineError
from edgellm.engines.families.programs import ModelConfig
from edgellm.engines.formats.digests import FileDigest, copy_hashed, current_digest, remember_digest
from edgellm.engines.formats.small_files import size_limit
from edgellm.engines.formats.staged_directory import StagedDirectory
from edgellm.engines.formats.strict_formats import JSONObject
from edgellm.engines.formats.tensors import is_multimodal
from edgellm.engines.lora.adapter import ADAPTER_FILES
from edgellm.engines.model.config import HEADS, MTP, DecoderConfig
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import plan_memory
from edgellm.engines.model.vision import VisionConfig
from edgellm.engines.quantization.config import folder_quantization

#: `progress(stage, done, total)`, called from two threads: stages are "check", "weights" (bytes), "plans" (how many),
#: "head" (rows) and "finish".
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class _Job:
    """A build whose input was found good."""

    target: Path
    inputs: BuildInputs
    dtype: str
    attention: str
    limits: EngineLimits
    plans: Mapping[Platform, Sequence[EngineShape]]
    weights: str
    replace: bool
    tool_format: str | None


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
    draft: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    vision: str | Path | None = None,
    all_plans: bool = False,
    head: str = HEADS[0],
    embedding: str = EMBEDDINGS[0],
    tool_format: str | None = None,
    draft_vocabulary: str | Path | None = None,
    check: Callable[[Path, BuildReport], None] | None = None,
) -> BuildReport:
    """Build an engine directory; whatever goes wrong, Ctrl-C included, nothing is left behind.

    `limits` default to what fits the model, `targets` to this machine's GPU, `dtype` to the checkpoint's own (float16
    where that is float32); `weights` is "copy" or "link". `draft` is the checkpoint of an EAGLE head, or "mtp" for the
    head that ships in the checkpoint itself, which is taken unasked, too, unless `limits` have no draft; it proposes
    the ids in the file `draft_vocabulary` (None: those that are said most). `adapters` are the directories of LoRA
    adapters by name; `limits` must have room for them. `vision` is the directory of a vision encoder that was published
    apart; one in the checkpoint itself is left out where `limits` have no vision engines. `head` is one of `HEADS`; a
    draft's own head becomes the same. `embedding` is one of `EMBEDDINGS`: where tokens are looked up of a model whose
    embedding table was its head. `tool_format` names the format of the model's calls.
    Each target gets the plans of the shapes that the hand-written kernels do not run there, with `all_plans` all. With
    `force` an existing engine directory is replaced, once the new one is complete. `check` gets the directory before it
    has its name, and the report; what it raises fails the build, in an error that names the checkpoint's files.
    Raises AdapterError, BuildError, CheckpointError, UnsupportedModelError, MissingDependencyError.
    """
    started, progress = time.perf_counter(), progress or _no_progress
    progress("check", 0, 1)
    source, target = Path(checkpoint_path), Path(engine_dir)
    check_places(source, target, force)
    config = read_decoder_config(source)
    loras = read_adapters(adapters or {}, config)
    ranks = [adapter.rank for adapter in loras.values()]
    vision = None if vision is None else Path(vision)
    encoder = _read_vision(source, vision, config, limits)
    drafted = choose_draft(source, config, draft, limits)
    limits = _limits(source, config, limits, drafted, ranks, encoder)
    check_limits(config, limits, beyond_trained_context, drafted is not None, ranks)
    check_image_rows(encoder, vision is not None, limits)
    dtype = dtype or _engine_dtype(config)
    check_settings(dtype, attention, weights, head, embedding)
    check_range(config, dtype)
    platforms, note = choose_platforms(targets)
    vocabulary = None if draft_vocabulary is None else Path(draft_vocabulary)
    inputs = read_inputs(source, drafted, config, loras, encoder, vision, vocabulary)
    places = {"base": source, "draft": drafted if isinstance(drafted, Path) else source, "vision": vision or source}
    checkpoints = {model: partial(Checkpoint.open, place) for model, place in places.items()}

    planned = partial(_planned_bytes, inputs, head, limits, dtype, checkpoints)
    embeds = leaves_out_embedding(config, head, embedding, planned)
    inputs = with_packed_heads(inputs, head, embeds, (source, drafted), dtype)
    packed, refusal = _packed_layouts(inputs.models, checkpoints, dtype)
    if refusal is not None and platforms:
        if targets:
            raise BuildError(f"{refusal}. Without --target it is built for the NumPy backend alone")
        platforms, note = (), f"No plans are built: {refusal}."
    limits = replace(limits, packed=any(".layers." in name for name in packed.get("base", ())))
    report = BuildReport(target, inputs.config, dtype, limits, inputs.draft, inputs.weight_bytes, weights=weights)
    report.head_bytes = inputs.head_bytes
    report.adapters, report.vision = dict(inputs.adapter_ranks), encoder
    plans = _choose_plans(report, inputs.models, platforms, all_plans, packed)
    job = _Job(target, inputs, dtype, attention, limits, plans, weights, force, tool_format)
    copied = inputs.weight_bytes if weights == "copy" else 0
    copied += inputs.head_bytes
    check_disk_space(target.absolute().parent, copied + plan_bytes_bound(config, _shapes_of(plans), encoder))
    report.notes += [note] if note else []
    if config.image_token_id is None and _has_vision_part(source):
        report.notes.append("The vision encoder of this model is not supported: it is served without images.")
    lost = None if drafted is not None else lost_mtp(source, config)
    report.notes += [f"{lost}. It drafts with nothing."] if lost else []
    if drafted == MTP and inputs.vocabulary is None and config.vocab_size > DRAFT_VOCABULARY:
        report.notes.append("The draft reads the model's whole head, which is packed as published.")
    report.seconds["check"] = time.perf_counter() - started
    progress("check", 1, 1)
    try:
        _make(job, report, progress, check)
    except OSError as error:
        raise BuildError(
            f"{target} was not built, and nothing was left behind: {error.strerror or error}"
            + (f" ({error.filename})" if error.filename else "")
        ) from error
    return _finished(report, started)


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
    started, progress = time.perf_counter(), progress or _no_progress
    directory = EngineDirectory.open(engine_dir)
    platforms, note = choose_platforms(targets)
    if not platforms:
        raise BuildError(f"There is no target to build plans for. {note}")
    config, dtype, attention = directory.config, directory.dtype, directory.attention
    packed, refusal = _packed_layouts(directory.models, directory.checkpoints, dtype)
    if refusal is not None:
        raise BuildError(refusal)
    draft = None if directory.draft is None else directory.draft.config
    report = BuildReport(directory.path, config, dtype, directory.limits, draft)
    report.vision = None if directory.vision is None else directory.vision.config
    plans = _choose_plans(report, directory.models, platforms, all_plans, packed)
    needed = _shapes_of(plans)
    check_disk_space(directory.path, plan_bytes_bound(config, needed, report.vision))
    networks = {shape: directory_network(directory, shape) for shape in set(needed)}
    for platform, shapes in plans.items():
        missing = []
        for shape in shapes:
            found, _ = find_plan(directory, shape, platform, networks[shape])
            if found is None:
                missing.append(shape)
            else:
                report.plans.append(BuiltPlan(platform, shape, len(found), 0.0))
        progress("plans", len(report.plans), len(needed))
        with closing(build_plans(directory.models, missing, dtype, attention, platform.compute_capability)) as built:
            for plan in built:
                if store_plan(directory, plan.shape, platform, networks[plan.shape], plan.data) is None:
                    raise BuildError(f"{plan.shape.name} was built, but no place for it can be written")
                report.add_plan(platform, plan)
                progress("plans", len(report.plans), len(needed))
    report.seconds["plans"] = time.perf_counter() - started
    return _finished(report, started)


def _packed_layouts(
    models: Mapping[str, ModelConfig], checkpoints: Mapping[str, Callable[[], Checkpoint]], dtype: str
) -> tuple[PackedLayouts, str | None]:
    """`model_layouts`, and why the kernels of GPUs do not take them, if they do not."""
    try:
        return model_layouts(models, checkpoints, dtype), None
    except EngineError as error:
        return {}, str(error)


def _choose_plans(
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


def _shapes_of(plans: Mapping[Platform, Sequence[EngineShape]]) -> list[EngineShape]:
    return [shape for shapes in plans.values() for shape in shapes]


def describe_in_place(
    directory: str | Path,
    limits: EngineLimits | None = None,
    dtype: str | None = None,
    attention: str = "auto",
    beyond_trained_context: bool = False,
    tool_format: str | None = None,
) -> EngineDirectory:
    """Make an engine directory of a checkpoint by writing `edgellm.json` beside its files; an older one is replaced.

    A folder `draft` in it is the checkpoint of an EAGLE head, else a head drafts that ships with the model, where
    `limits` have a draft; a folder `vision` is a vision encoder that was published apart, folders in `lora` are LoRA
    adapters. `tool_format` names the format of the model's calls. Raises AdapterError, CheckpointError,
    UnsupportedModelError, and BuildError for limits out of range or a failure to write.
    """
    directory = Path(directory)
    config = read_decoder_config(directory)
    folder = directory / DRAFT_FOLDER
    has_folder = folder.exists() and {each.name for each in folder.iterdir()} != {VOCABULARY_FILE}
    draft = choose_draft(directory, config, folder if has_folder else None, limits)
    loras = read_adapters({name: directory / LORA_FOLDER / name for name in adapter_names(directory)}, config)
    ranks = [adapter.rank for adapter in loras.values()]
    vision = directory / VISION_FOLDER
    vision_source = vision if vision.exists() else None
    encoder = _read_vision(directory, vision_source, config, limits)
    limits = _limits(directory, config, limits, draft, ranks, encoder)
    check_limits(config, limits, beyond_trained_context, draft is not None, ranks)
    check_image_rows(encoder, vision_source is not None, limits)
    dtype = dtype or _engine_dtype(config)
    check_settings(dtype, attention)
    check_range(config, dtype)
    inputs = read_inputs(directory, draft, config, loras, encoder, vision_source)
    names = described_file_names(directory)
    if vision_source is not None:
        names += [f"{VISION_FOLDER}/{name}" for name in described_file_names(vision)]
    if has_folder:
        names += [f"{DRAFT_FOLDER}/{name}" for name in described_file_names(folder)]
    names += [f"{LORA_FOLDER}/{name}/{file}" for name in loras for file in ADAPTER_FILES]
    files = {name: current_digest(directory / name, trust_memory=False) for name in names}
    try:
        files |= write_made_files(inputs, directory, lambda done, total: None)
        write_description(directory, _description(inputs, dtype, attention, limits, files, tool_format))
    except OSError as error:
        raise BuildError(f"{directory} cannot be written: {error.strerror or error}") from error
    return EngineDirectory.open(directory)


def _description(
    inputs: BuildInputs,
    dtype: str,
    attention: str,
    limits: EngineLimits,
    files: dict[str, FileDigest],
    tool_format: str | None = None,
) -> bytes:
    draft, adapters = inputs.draft_description(files), inputs.adapter_descriptions(files)
    vision = inputs.vision_description(files)
    own = own_files(files)
    return description_bytes(inputs.config, dtype, attention, limits, own, draft, adapters, vision, tool_format)


def _read_vision(
    source: Path, vision: Path | None, config: DecoderConfig, limits: EngineLimits | None
) -> VisionConfig | None:
    """The vision encoder that is to be built; one in the checkpoint itself is not where the limits have no room."""
    if vision is None and limits is not None and not limits.image_rows:
        return None
    if vision is not None and _has_vision_part(source):
        raise BuildError(f"{source} has a vision encoder of its own: leave out {vision}")
    return read_vision_config(source, vision, config)


def _limits(
    source: Path,
    config: DecoderConfig,
    limits: EngineLimits | None,
    draft: str | Path | None,
    ranks: list[int],
    encoder: VisionConfig | None,
) -> EngineLimits:
    """The `limits`, or chosen ones where there are none, with the rows of windows.

    `draft` is what `choose_draft` gave.
    """
    if limits is None:
        limits = choose_limits(
            config,
            has_draft=draft is not None,
            adapter_ranks=ranks,
            vision=encoder,
            is_packed=folder_quantization(source) is not None,
            is_mtp=draft == MTP,
        )
    return with_window_rows(config, limits)


def _has_vision_part(source: Path) -> bool:
    return is_multimodal(JSONObject.read(source / "config.json", CheckpointError).values)


def _make(
    job: _Job, report: BuildReport, progress: Progress, check: Callable[[Path, BuildReport], None] | None
) -> None:
    """Write the directory under another name, let it be checked, then move it to its place."""
    copied, total = 0, job.inputs.weight_bytes

    def advance(count: int) -> None:
        nonlocal copied
        copied += count
        progress("weights", copied, total)

    with StagedDirectory(job.target) as staged:
        started = time.perf_counter()
        for name in (*job.inputs.published, *job.inputs.weights):
            (staged.path / name).parent.mkdir(parents=True, exist_ok=True)
        published = _copy_published(job, staged.path)
        transfer = WeightTransfer(job.inputs.weights, staged.path, job.weights == "link", advance)
        transfer.start()
        try:
            _write_plans(job, staged.path / "plans", report, transfer, progress)
            report.seconds["plans"] = time.perf_counter() - started
            made = write_made_files(job.inputs, staged.path, partial(progress, "head"))
            digests = transfer.result() | made
        finally:
            transfer.cancel()
        report.seconds["weights"] = transfer.seconds
        progress("finish", 0, 1)
        files = {**published, **digests}
        write_description(
            staged.path, _description(job.inputs, job.dtype, job.attention, job.limits, files, job.tool_format)
        )
        report.published_bytes = sum(digest.size for digest in published.values())
        report.peak_host_bytes = peak_memory() + report.workers_peak_bytes
        if check is not None:
            for name, digest in digests.items():
                remember_digest(staged.path / name, digest)
            try:
                check(staged.path, report)
            except EdgeLLMError as error:
                raise BuildError(f"{job.target} was not built: {_by_source(str(error), job, staged.path)}") from error
        staged.commit(job.replace)
    for name, digest in digests.items():
        remember_digest(job.target / name, digest, staged.path / name)
    progress("finish", 1, 1)


def _by_source(text: str, job: _Job, staged: Path) -> str:
    """A message with the names of the checkpoint's files for those of their copies."""
    sources = {**job.inputs.published, **job.inputs.weights}
    for name, source in sorted(sources.items(), key=lambda item: len(item[0]), reverse=True):
        text = text.replace(str(staged / name), str(source))
    return text.replace(str(staged), str(job.inputs.published["config.json"].parent))


def _write_plans(job: _Job, plans: Path, report: BuildReport, transfer: WeightTransfer, progress: Progress) -> None:
    models, count = job.inputs.models, len(_shapes_of(job.plans))
    for platform, shapes in job.plans.items():
        target, has_failed = platform.compute_capability, transfer.has_failed
        with closing(build_plans(models, shapes, job.dtype, job.attention, target, has_failed)) as built:
            for plan in built:
                network = network_digest(models[plan.shape.model], plan.shape, job.dtype, job.attention)
                manifest = PlanManifest.of(plan.data, plan.shape, platform, network, job.dtype, job.attention)
                write_plan(plan_path(plans, plan.shape, platform), plan.data, manifest)
                report.add_plan(platform, plan)
                progress("plans", len(report.plans), count)


def _planned_bytes(
    inputs: BuildInputs,
    head: str,
    limits: EngineLimits,
    dtype: str,
    checkpoints: Mapping[str, Callable[[], Checkpoint]],
) -> int:
    """What a model with a packed head plans on a GPU, its embedding table kept."""
    config = replace(inputs.config, head=head)
    models = inputs.models | {"base": config}
    packed, _ = _packed_layouts(models, checkpoints, dtype)
    known = packed_memory(models, packed, dtype) | planned_engines(models, limits, dtype, packed)
    return plan_memory(config, limits, decoder_weights(config), dtype, known, draft=inputs.draft).total


def _copy_published(job: _Job, destination: Path) -> dict[str, FileDigest]:
    never = threading.Event()
    return {
        name: copy_hashed(path, destination / name, never, limit=size_limit(path.name))
        for name, path in job.inputs.published.items()
    }


def _engine_dtype(config: DecoderConfig) -> str:
    """Engines compute in the checkpoint's dtype; float32 would need twice the memory for nothing that one can see."""
    if config.dtype == "float32":
        return "bfloat16" if config.post_norms else "float16"
    return config.dtype


def _finished(report: BuildReport, started: float) -> BuildReport:
    report.peak_host_bytes = report.peak_host_bytes or peak_memory() + report.workers_peak_bytes
    report.total_seconds = time.perf_counter() - started - report.token_seconds
    return report


def _no_progress(stage: str, done: int, total: int) -> None:
    pass
