"""From a checkpoint to an engine directory: all of it or nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgellm.engines.backends.device_layouts import gpu_layouts, packed_memory
from edgellm.engines.backends.executors import SHARED_MEMORY, planned_shapes, shared_limit_of
from edgellm.engines.backends.plan_files import Platform, network_digest, write_plan
from edgellm.engines.building import checks
from edgellm.engines.building.draft_weights import with_packed_draft
from edgellm.engines.building.inputs import (
    BuildInputs,
    read_adapters,
    read_decoder_config,
    read_inputs,
    read_vision_config,
    transfer_weights,
    with_packed_head,
    write_made_files,
)
from edgellm.engines.building.kernels import KERNEL_BYTES, check_compiler, compile_kernels
from edgellm.engines.building.needed_kernels import planned_engines
from edgellm.engines.building.planning import Progress, build_into, choose_plans, finished, shapes_of
from edgellm.engines.building.plans import BuildReport, PlanBytes, peak_memory
from edgellm.engines.building.shipped_draft import DRAFT_VOCABULARY, choose_draft, lost_mtp
from edgellm.engines.building.targets import Target
from edgellm.engines.checkpoints.weights import counted
from edgellm.engines.directories.description import ModelSource, write_description
from edgellm.engines.directories.engine_directory import ATTENTION_SETTINGS, DTYPES
from edgellm.engines.errors import BuildError, CheckpointError, EdgeLLMError, explained
from edgellm.engines.formats.digests import copy_published, remember_digest
from edgellm.engines.formats.staged_directory import StagedDirectory, check_space
from edgellm.engines.formats.strict_formats import JSONObject
from edgellm.engines.model.config import DRAFT_WEIGHTS, HEADS, MTP
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import plan_memory
from edgellm.engines.quantization.config import folder_quantization


@dataclass(frozen=True)
class BuildSettings:
    """What is asked of a build beside limits and targets; BuildError for a setting that there is not.

    `dtype` is by default the checkpoint's own (float16 where that is float32); `weights` is "copy" or "link". `draft`
    is the checkpoint of an EAGLE head, or "mtp" for the head that ships in the checkpoint itself, which is taken
    unasked, too, unless limits have no draft; it proposes the ids in the file `draft_vocabulary` (None: those that are
    said most). `adapters` are the directories of LoRA adapters by name; limits must have room for them. `vision` is the
    directory of a vision encoder that was published apart; one in the checkpoint itself is left out where limits have
    no vision engines. `head` is one of `HEADS`, `draft_weights` of `DRAFT_WEIGHTS`. `embedding` is one of `EMBEDDINGS`:
    where tokens are looked up of a model whose embedding table was its head. `tool_format` names the format of the
    model's calls, `origin` is recorded: where the checkpoint comes from. With `force` an existing engine directory is
    replaced, once the new one is complete. `check` gets the directory before it has its name, and the report; what it
    raises fails the build, in an error that names the checkpoint's files.

    Each target gets the plans of the shapes that the hand-written kernels do not run there, with `all_plans` all. For
    `kernels`, targets too, the hand-written kernels are compiled, by the compiler of CUDA's release `cuda` (None: the
    newest); where they are named, and no targets, there are no plans.
    """

    dtype: str | None = None
    attention: str = "auto"
    weights: str = checks.WEIGHT_MODES[0]
    force: bool = False
    beyond_trained_context: bool = False
    progress: Progress = lambda stage, done, total: None
    draft: str | Path | None = None
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    vision: str | Path | None = None
    all_plans: bool = False
    head: str = HEADS[0]
    embedding: str = checks.EMBEDDINGS[0]
    tool_format: str | None = None
    draft_vocabulary: str | Path | None = None
    draft_weights: str = DRAFT_WEIGHTS[0]
    check: Callable[[Path, BuildReport], None] | None = None
    kernels: Sequence[Target] = ()
    cuda: tuple[int, int] | None = None
    origin: ModelSource | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                option, expected = f"--{name.replace('_', '-')}", ", ".join(filter(None, choices))
                raise BuildError(f"{option} is {getattr(self, name)!r}: expected one of {expected}")


#: What settings may be, where these are few.
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "dtype": (None, *DTYPES),
    "attention": ATTENTION_SETTINGS,
    "weights": checks.WEIGHT_MODES,
    "head": HEADS,
    "embedding": checks.EMBEDDINGS,
    "draft_weights": DRAFT_WEIGHTS,
}


def build_engine_directory(
    checkpoint_path: str | Path,
    engine_dir: str | Path,
    limits: EngineLimits | Mapping[str, Any] | None = None,
    targets: Sequence[str] | None = None,
    dtype: str | None = None,
    **settings: Any,
) -> BuildReport:
    """Build an engine directory as `BuildSettings` say; whatever goes wrong, Ctrl-C included, nothing is left behind.

    `limits` default to what fits the model; a mapping has those of `AskedLimits` that are asked for by name, with
    "has_draft" False to leave out the head that ships in the checkpoint; `targets` to this machine's GPU. Raises
    AdapterError, BuildError, CheckpointError, UnsupportedModelError, MissingDependencyError.
    """
    started, asked = time.perf_counter(), BuildSettings(dtype, **settings)
    asked.progress("check", 0, 1)
    source, target = Path(checkpoint_path), Path(engine_dir)
    checks.check_places(source, target, asked.force)
    platforms, note = ((), "") if asked.kernels and not targets else checks.choose_platforms(targets)
    if asked.kernels:
        asked = replace(asked, cuda=check_compiler(asked.kernels, asked.cuda))
    inputs, limits, dtype = read_build(source, limits, asked)
    failing = f"{target} was not built, and nothing was left behind"
    with explained(failing, BuildError, names_file=True), StagedDirectory(target) as staged:
        packing = time.perf_counter()
        draft_progress = partial(asked.progress, "draft")
        inputs = with_packed_draft(inputs, asked.draft_weights, dtype, staged.path, draft_progress)
        packing = time.perf_counter() - packing
        planned = partial(_planned_bytes, inputs, asked.head, limits, dtype)
        embeds = checks.leaves_out_embedding(inputs.config, asked.head, asked.embedding, planned)
        inputs = with_packed_head(inputs, asked.head, embeds, dtype)
        packed, refusal = gpu_layouts(inputs.models, inputs.checkpoints, dtype)
        if refusal is not None and (platforms or asked.kernels):
            if targets or asked.kernels:
                raise BuildError(f"{refusal}. Without --target it is built for the NumPy backend alone")
            platforms, note = (), f"No plans are built: {refusal}."
        limits = replace(limits, packed=any(".layers." in name for name in packed.get("base", ())))
        if note and refusal is None and not platforms:
            shaped, unlike = (inputs.models, limits, dtype), {shared_limit_of(each): each for each in SHARED_MEMORY}
            if not any(planned_shapes(*shaped, each, asked.all_plans, packed) for each in unlike.values()):
                note = ""  # kernels run every step, on each GPU that they are for
        report = _begun(target, inputs, dtype, limits, asked.weights, note)
        plans = choose_plans(report, inputs.models, platforms, asked.all_plans, packed)
        copied = inputs.head_bytes + (inputs.weight_bytes if asked.weights == "copy" else 0)
        needed = copied + checks.plan_bytes_bound(inputs.config, shapes_of(plans), inputs.vision)
        needed += len(asked.kernels) * KERNEL_BYTES
        or_else = ", or take --weights link" if asked.weights == "copy" else ""
        check_space(target.parent, needed, BuildError, "the engine directory", or_else)
        report.seconds |= {"draft": packing, "check": time.perf_counter() - started - packing}
        asked.progress("check", 1, 1)
        _make(staged, inputs, report, plans, asked)
    return finished(report, started)


def read_build(
    source: Path, limits: EngineLimits | Mapping[str, Any] | None, asked: BuildSettings
) -> tuple[BuildInputs, EngineLimits, str]:
    """What is built of a checkpoint and the parts that it gets, limits and dtype; the latter are chosen where they are
    None, or asked for by name. All were found to suit each other. A vision encoder in the checkpoint itself is left out
    where the limits have no room for one."""
    config = read_decoder_config(source)
    loras = read_adapters(asked.adapters, config)
    ranks = [adapter.rank for adapter in loras.values()]
    vision, encoder = None if asked.vision is None else Path(asked.vision), None
    if vision is not None and _has_vision_part(source):
        raise BuildError(f"{source} has a vision encoder of its own: leave out {vision}")
    known = limits if isinstance(limits, EngineLimits) else None
    wanted: dict[str, Any] = {} if limits is None or isinstance(limits, EngineLimits) else dict(limits)
    takes_images = wanted.get("max_image_patches") != 0 if known is None else bool(known.image_rows)
    if vision is not None or takes_images:
        encoder = read_vision_config(source, vision, config)
    leaves_out = asked.draft is None and wanted.get("has_draft") is False
    drafted = None if leaves_out else choose_draft(source, config, asked.draft, known)
    vocabulary = None if asked.draft_vocabulary is None else Path(asked.draft_vocabulary)
    inputs = read_inputs(source, drafted, config, loras, encoder, vision, vocabulary)
    block = 0 if inputs.draft is None or inputs.draft.block is None else inputs.draft.block.size
    wanted |= {"has_draft": drafted is not None, "is_mtp": drafted == MTP, "draft_block": block}
    wanted |= {"adapter_ranks": ranks, "vision": encoder, "beyond_trained_context": asked.beyond_trained_context}
    chosen = known or checks.choose_limits(config, **wanted, is_packed=folder_quantization(source) is not None)
    audio_rows = 0 if inputs.audio is None else inputs.audio.run_rows
    chosen = replace(checks.with_window_rows(config, chosen), draft_block=block, audio_rows=audio_rows)
    checks.check_limits(config, chosen, asked.beyond_trained_context, drafted is not None, ranks)
    checks.check_image_rows(encoder, vision is not None, chosen)
    dtype = asked.dtype
    if dtype is None:  # float32 would need twice the memory for nothing that one can see
        narrow = "bfloat16" if config.post_norms else "float16"
        dtype = narrow if config.dtype == "float32" else config.dtype
    if config.exceeds_float16 and dtype == "float16":
        raise BuildError(
            f"values of {config.family} go beyond the range of float16: take --dtype bfloat16, as it was published"
        )
    return inputs, chosen, dtype


def _has_vision_part(source: Path) -> bool:
    return isinstance(JSONObject.read(source / "config.json", CheckpointError).values.get("vision_config"), dict)


def _begun(target: Path, inputs: BuildInputs, dtype: str, limits: EngineLimits, weights: str, note: str) -> BuildReport:
    """The report of a build of which nothing is done, with what a user should know, a `note` among it."""
    config, draft, source = inputs.config, inputs.draft, inputs.sources["base"]
    made = inputs.head_bytes + inputs.draft_bytes
    report = BuildReport(target, config, dtype, limits, draft, inputs.vision, weights, inputs.weight_bytes, made)
    report.notes += [note] if note else []
    if config.image_token_id is None and _has_vision_part(source):
        report.notes.append("The vision encoder of this model is not supported: it is served without images.")
    lost = None if draft is not None else lost_mtp(source, config)
    report.notes += [f"{lost}. It drafts with nothing."] if lost else []
    is_shipped = draft is not None and draft.generation == MTP
    if is_shipped and inputs.vocabulary is None and config.vocab_size > DRAFT_VOCABULARY:
        report.notes.append("The draft reads the model's whole head, which is packed as published.")
    return report


def _make(
    staged: StagedDirectory,
    inputs: BuildInputs,
    report: BuildReport,
    plans: Mapping[Platform, Sequence[EngineShape]],
    asked: BuildSettings,
) -> None:
    """Write the directory under another name, let it be checked, then move it to its place."""
    target, progress, attention = report.path, asked.progress, asked.attention
    advance = counted(inputs.weight_bytes, partial(progress, "weights"))
    started = time.perf_counter()
    for name in inputs.weights:
        (staged.path / name).parent.mkdir(parents=True, exist_ok=True)
    published = {name: copy_published(path, staged.path / name) for name, path in inputs.published.items()}

    def keep(platform: Platform, plan: PlanBytes) -> None:
        network = network_digest(inputs.models[plan.shape.model], plan.shape, report.dtype, attention)
        write_plan(staged.path / "plans", plan.data, plan.shape, platform, network, report.dtype, attention)

    stop, is_link = threading.Event(), report.weights == "link"
    with ThreadPoolExecutor(1, "edgellm-weights") as pool:  # while plans are built
        transfer = pool.submit(transfer_weights, inputs.weights, staged.path, is_link, advance, stop)
        known = inputs.models, attention, report, progress, keep
        try:
            build_into(plans, *known, lambda: transfer.done() and transfer.exception() is not None)
            report.seconds["plans"] = time.perf_counter() - started
            made = write_made_files(inputs, staged.path, partial(progress, "head"))
            weights, report.seconds["weights"] = transfer.result()
            digests = weights | made
        finally:
            stop.set()
    progress("finish", 0, 1)
    described = report.dtype, attention, report.limits, published | digests, asked.tool_format, asked.origin
    write_description(staged.path, inputs.description(*described))
    compile_kernels(asked.kernels, asked.cuda, staged.path, report, progress)
    report.published_bytes = sum(digest.size for digest in published.values())
    report.peak_host_bytes = peak_memory() + report.workers_peak_bytes
    if asked.check is not None:
        for name, digest in digests.items():
            remember_digest(staged.path / name, digest)
        try:
            asked.check(staged.path, report)
        except EdgeLLMError as error:
            raise BuildError(f"{target} was not built: {_by_source(str(error), inputs, staged.path)}") from error
    staged.commit(asked.force)
    for name, digest in digests.items():
        remember_digest(target / name, digest, staged.path / name)
    progress("finish", 1, 1)


def _by_source(text: str, inputs: BuildInputs, staged: Path) -> str:
    """A message with the names of the checkpoint's files for those of their copies."""
    sources = {**inputs.published, **inputs.weights}
    for name, source in sorted(sources.items(), key=lambda item: len(item[0]), reverse=True):
        text = text.replace(str(staged / name), str(source))
    if inputs.packed_draft is not None:
        text = text.replace(str(inputs.packed_draft), str(inputs.sources["draft"]))
    return text.replace(str(staged), str(inputs.sources["base"]))


def _planned_bytes(inputs: BuildInputs, head: str, limits: EngineLimits, dtype: str) -> int:
    config = replace(inputs.config, head=head)
    models = inputs.models | {"base": config}
    packed, _ = gpu_layouts(models, inputs.checkpoints, dtype)
    known = packed_memory(models, packed, dtype) | planned_engines(models, limits, dtype, packed)
    return plan_memory(config, limits, decoder_weights(config), dtype, known, draft=inputs.draft).total
