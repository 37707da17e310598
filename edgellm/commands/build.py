"""`edgellm build`: an engine directory from a checkpoint."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import typer

from edgellm.built import TRIAL_TEXT, read_built
from edgellm.commands.console import ProgressDisplay, mebibytes, progress_display
from edgellm.commands.descriptions import named_directories
from edgellm.commands.info import directory_facts, fact_lines
from edgellm.commands.options import GPUOption, ModelOption, RevisionOptions
from edgellm.commands.table import argument, option, options_of, takes_options
from edgellm.embedding import EmbeddingRequest
from edgellm.engines.backends.cuda_device import gpu_memory
from edgellm.engines.building.builder import BuildSettings, build_engine_directory
from edgellm.engines.building.checks import EMBEDDINGS, AskedLimits, planned_targets
from edgellm.engines.building.gguf_folder import NO_ENCODER, checkpoint_folder, draft_folder
from edgellm.engines.building.planning import add_targets, refresh_plans
from edgellm.engines.building.plans import BuildReport
from edgellm.engines.building.targets import read_targets
from edgellm.engines.checkpoints.weight_files import is_gguf_file
from edgellm.engines.directories.description import DESCRIPTION_NAME
from edgellm.engines.directories.engine_directory import DTYPES, EngineDirectory
from edgellm.engines.families.programs import model_weights
from edgellm.engines.model.config import DRAFT_WEIGHTS, HEADS, MTP
from edgellm.engines.model.memory_plan import available_memory
from edgellm.errors import MissingDependencyError, RequestError
from edgellm.hub.directories import checkpoint_of
from edgellm.hub.inventory import remember_built
from edgellm.kernels.gpu import choose_gpu, find_gpu
from edgellm.requests import Request
from edgellm.sampling_params import SamplingParams
from edgellm.tool_calls.formats import FORMATS, HARMONY, checkpoint_format

_target_option, _plan_option, _limit, _weight_option, _draft_option, _adapter_option, _image_option = (
    partial(option, rich_help_panel=panel)
    for panel in ("Targets", "Plans", "Limits", "Weights", "Draft", "LoRA adapters", "Images")
)


def _read_release(name: str, value: str) -> tuple[int, int]:
    """A release of CUDA as (12, 6); RequestError for another text."""
    match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", value)
    if match is None:
        raise RequestError(f"{name} is {value!r}: expected a release of CUDA such as 12.6")
    return int(match[1]), int(match[2])


class BuildOptions(ModelOption, RevisionOptions, GPUOption):
    checkpoint: Path | None = argument(
        "Hugging Face directory with config.json, tokenizer.json and safetensors, a GGUF file, or a name on the hub: "
        "ORG/NAME or ORG/NAME:FILE.gguf."
    )
    engine_directory: Path | None = argument("The engine directory to make.", metavar="engine_dir")
    model: list[Path] | None = option("The engine directory to make, in place of the argument.", "--model", "-m")
    target: list[str] | None = _target_option(
        "Compile the kernels for this compute capability, on any machine, and build the plans that it needs where "
        "TensorRT can: sm_87 is all its published boards, sm_89:46 a GPU of 46 multiprocessors; may be repeated, or "
        "several behind commas [default: plans for this GPU; its kernels are compiled when the model is opened]."
    )
    cuda: str | None = _target_option(
        "The release of CUDA whose compiler makes kernels, of those that are installed [default: the newest].",
        metavar="RELEASE",
        check=_read_release,
        expected="a release such as 12.6",
    )
    max_batch: int | None = _limit("Sequences at once, 1 to 8 [default: 1].")
    prefill_chunk: int | None = _limit(
        "Prompt tokens computed at once, a multiple of 16 up to 2048 [default: up to 2048; 512 for packed models with "
        "MLPs wider than 8192]."
    )
    kv_capacity: int | None = _limit("Tokens of context, prompt and answer together [default: up to 4096].")
    kv_cache: str = _limit(
        "compute: keep the KV cache in the dtype that engines compute in; int8: in 8 bits, half the memory.",
        default="compute",
    )
    dtype: str | None = _weight_option(
        f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}: what engines compute in [default: the checkpoint's; float16 where "
        "that is float32]."
    )
    attention: str = _plan_option("auto, native (IAttention) or composed.", default="auto")
    weights: str | None = _weight_option(
        "copy the weights, or link to those of the checkpoint [default: copy; of a GGUF file link]."
    )
    tokenizer: Path | None = _weight_option(
        "Folder with the tokenizer of this very model as it is published, in place of a GGUF file's own.", metavar="DIR"
    )
    head: str = _weight_option(
        "Pack the model's head: 8 bits and a scale for each row, or 4 bits in groups of columns.",
        default=HEADS[0],
        choices=HEADS,
    )
    embedding: str = _weight_option(
        "Where tokens are looked up whose table was the head: in the published one, or in the packed head.",
        default=EMBEDDINGS[0],
        choices=EMBEDDINGS,
    )
    force: bool = option("Replace an existing engine directory.")
    beyond_trained_context: bool = _limit("Allow more context than the model was made for.")
    draft: str | None = _draft_option(
        "EAGLE head or DFlash draft of this very model, to build engines for too, or mtp: the head for multi-token "
        "prediction that ships inside CHECKPOINT [default: mtp where there is one].",
        metavar="DRAFT_CHECKPOINT|mtp",
    )
    no_mtp: bool = _draft_option("Leave out the head that ships inside CHECKPOINT: do not draft.")
    draft_vocabulary: Path | None = _draft_option(
        "The ids that the head inside CHECKPOINT proposes, a JSON list or one a line [default: 32,768 of frequent "
        "tokens].",
        metavar="FILE",
    )
    draft_weights: str = _draft_option(
        "Pack the draft's layer and the head that is its own; auto: int8 beside packed layers.",
        default=DRAFT_WEIGHTS[0],
        choices=DRAFT_WEIGHTS,
    )
    draft_top_k: int | None = _draft_option("Widest draft tree, 1 to 64 [default: 10; mtp, DFlash: 4].")
    draft_steps: int | None = _draft_option("Deepest draft tree, 1 to 32 [default: 6; mtp: 3; DFlash: its block].")
    verify_tree_size: int | None = _draft_option(
        "Most nodes verified at once, the root included, 2 to 64 [default: 60; mtp, DFlash: 16]."
    )
    lora: list[str] | None = _adapter_option(
        "LoRA adapter of this very model, as PEFT saves it; may be repeated.", metavar="NAME=DIR"
    )
    max_lora_rank: int | None = _adapter_option("Largest rank that engines take [default: that of the adapters given].")
    lora_slots: int | None = _adapter_option(
        "Adapters in use at once [default: as many as given, at least one a sequence]."
    )
    vision: Path | None = _image_option(
        "Vision encoder of this very model that was published apart.", metavar="VISION_DIR"
    )
    mmproj: str | None = _image_option(
        "Vision encoder of a GGUF file, in GGUF too, or none: texts alone [default: the file mmproj*.gguf beside it "
        "that fits].",
        metavar="FILE|none",
    )
    max_image_patches: int | None = _image_option(
        "Patches of the largest image, where images are of any size; 0: no images at all [default: 4096]."
    )
    tool_format: str | None = option(
        f"How the model calls tools: {', '.join(FORMATS)}, {HARMONY.name} [default: as its chat template shows calls].",
        metavar="FORMAT",
    )
    all_plans: bool = _plan_option(
        "Build the plans of shapes, too, that the hand-written kernels run on the target.", default=False
    )
    try_token: bool | None = option(
        "Compute a token of what was built, or none [default: where the weights take at most a quarter of the free "
        "memory].",
        "--try/--no-try",
    )
    refresh: Path | None = _plan_option(
        "Only build the plans that an engine directory lacks.", "--refresh-plans", metavar="ENGINE_DIR"
    )


@takes_options
def build(given: BuildOptions) -> None:
    """Make an engine directory of a checkpoint: weights, tokenizer, and plans of what TensorRT runs; with --target also
    the kernels, compiled for GPUs that need not be here. An engine directory alone gets more targets.

    Example: edgellm build Qwen3-0.6B robot --target sm_87
    """
    choose_gpu(given.gpu)
    checkpoint, engine_dir, draft = given.checkpoint, given.chosen_model(), given.draft
    targets = read_targets(given.target or [])
    cuda = None if given.cuda is None else _read_release("--cuda", given.cuda)
    planned, kernels = planned_targets(targets), [each for each in targets if each.multiprocessors]
    if cuda is not None and not kernels:
        raise typer.BadParameter("--cuda chooses the compiler of kernels: name their GPUs with --target")
    if given.refresh is not None:
        others = (checkpoint, engine_dir, draft, given.draft_vocabulary, given.vision, given.mmproj, given.revision)
        if given.no_mtp or given.update or given.lora or any(each is not None for each in others):
            raise typer.BadParameter(
                "--refresh-plans ENGINE_DIR takes no CHECKPOINT, --draft, --lora, --vision or other ENGINE_DIR"
            )
        with progress_display() as display:
            report = refresh_plans(given.refresh, [each.capability for each in targets], display, given.all_plans)
    elif checkpoint is not None and engine_dir is None and targets and (checkpoint / DESCRIPTION_NAME).is_file():
        _refuse_other_options(given)
        with progress_display() as display:
            report = add_targets(checkpoint, kernels, planned, cuda, display, given.all_plans)
    else:
        if checkpoint is None or engine_dir is None:
            alone = f"; {checkpoint} is no engine directory" if checkpoint is not None and targets else ""
            raise typer.BadParameter(
                f"expected CHECKPOINT and ENGINE_DIR, ENGINE_DIR with --target, or --refresh-plans ENGINE_DIR{alone}"
            )
        if given.no_mtp and (draft == MTP or given.draft_vocabulary is not None):
            beside = "--draft-vocabulary" if draft != MTP else f"--draft {MTP}"
            raise typer.BadParameter(f"{beside} is given beside --no-mtp: leave one of them out")
        mmproj = given.mmproj
        if given.vision is not None and mmproj not in (None, NO_ENCODER):
            raise typer.BadParameter("--mmproj is given beside --vision: leave one of them out")
        origin, finds_encoder = None, mmproj is None and given.vision is None
        with progress_display() as display:
            checkpoint, origin = checkpoint_of(checkpoint, given.revision, given.update, display, finds_encoder)
            draft = None if draft is None else str(checkpoint_of(draft, None, False, display)[0])
            if mmproj not in (None, NO_ENCODER):
                mmproj = str(checkpoint_of(mmproj, None, False, display)[0])
        if given.vision is not None and is_gguf_file(checkpoint):
            mmproj = NO_ENCODER
        asked = given.arguments_of(AskedLimits) | ({"has_draft": False} if given.no_mtp else {})
        with (
            progress_display() as display,
            checkpoint_folder(checkpoint, given.tokenizer, mmproj) as folder,
            draft_folder(draft) as draft_checkpoint,
        ):
            report = build_engine_directory(
                folder,
                engine_dir,
                limits=asked,
                targets=planned,
                **given.arguments_of(
                    BuildSettings,
                    weights=given.weights or ("copy" if folder == checkpoint else "link"),
                    kernels=kernels,
                    cuda=cuda,
                    progress=display,
                    draft=draft_checkpoint,
                    origin=origin,
                    adapters=named_directories(given.lora or []),
                    tool_format=checkpoint_format(folder, given.tool_format),
                    check=partial(_try, given.try_token, display),
                ),
            )
        remember_built(report.path)
    facts = directory_facts(report.path, verify=False)
    typer.echo("\n".join([*fact_lines(facts), *report_lines(report)]))


def _refuse_other_options(given: BuildOptions) -> None:
    """typer.BadParameter for options of a build where an engine directory gets targets."""
    for name, each in options_of(BuildOptions).items():
        if each.flags and name not in ("target", "cuda", "all_plans") and getattr(given, name) != each.default:
            raise typer.BadParameter(
                f"{each.flags[0]} is given beside ENGINE_DIR and --target, which only add to what was built: leave it "
                "out, or build anew from CHECKPOINT with --force"
            )


def _try(asked: bool | None, display: ProgressDisplay, path: Path, report: BuildReport) -> None:
    """Open what was built, and compute a token of it where that is `asked` for (None: where it fits easily)."""
    started = time.perf_counter()
    report.notes += read_built(path)
    report.seconds["open"] = time.perf_counter() - started
    missing = None
    try:
        if asked or (asked is None and _fits_easily(path)):
            started = time.perf_counter()
            display("first token", 0, 1)
            _compute_token(path)
            display("first token", 1, 1)
            report.token_seconds = time.perf_counter() - started
            return
    except MissingDependencyError as error:
        if asked:
            raise
        missing = str(error)
    if asked is None:
        reason = missing or "its weights take more than a quarter of the free memory"
        report.notes.append(f"No token of it was computed: {reason}. --try computes one all the same.")


def _fits_easily(path: Path) -> bool:
    """Whether the weights of an engine directory take at most a quarter of the memory that is free for them, on the
    GPU where there is one. NumPy computes in float32."""
    directory = EngineDirectory.open(path)
    if find_gpu() is None:
        specs = (spec for config in directory.models.values() for spec in model_weights(config))
        size, free = sum(4 * math.prod(spec.shape) for spec in specs), available_memory() or 0
    else:
        size = sum((path / name).stat().st_size for name in directory.weight_files)
        free, _ = gpu_memory()
    return 4 * size <= free


def _compute_token(path: Path) -> None:
    """Open a model as a start opens it, on the GPU where there is one, and compute a token, or an embedding;
    EdgeLLMError where that fails. What is compiled and built for it is kept where the next start finds it."""
    from edgellm.runtime import SpecDecodeRuntime

    with SpecDecodeRuntime(path, drafting="auto") as runtime:
        prompt = runtime.tokenizer.encode(TRIAL_TEXT)[:8]  # for which any context has room
        if runtime.directory.config.is_embedding:
            runtime.embed(EmbeddingRequest([prompt]), prompt)
            return
        config, images = runtime.directory.config, []
        if config.prefix_attention and config.image_token_id is not None:  # it answers to no text alone
            prompt, images = [config.image_token_id, *prompt], [np.zeros((32, 32, 3), np.uint8)]
        runtime.handle_request(Request(prompt, params=SamplingParams(max_tokens=1, ignore_eos=True), images=images))


def report_lines(report: BuildReport) -> Iterator[str]:
    """What building took: each plan, bytes, seconds and memory, then the notes."""
    for plan in report.plans:
        took = f"{plan.seconds:6.1f} s" if plan.seconds else "   kept "
        yield f"  {plan.platform.compute_capability:<7} {plan.shape.name:<34}{mebibytes(plan.size):>13}  {took}"
    for built in report.kernels:
        count = f"{len(built.manifest.modules)} compiled kernels, CUDA {'.'.join(map(str, built.manifest.release))}"
        size = mebibytes(built.manifest.size)
        yield f"  {built.manifest.architecture:<7} {count:<34}{size:>13}  {built.seconds:6.1f} s"
    is_link = report.weights == "link"
    own = sum(plan.size for plan in report.plans) + report.published_bytes + report.made_bytes
    own += sum(built.manifest.size for built in report.kernels)
    said = "total on disk" if report.weight_bytes else "added on disk"
    total = f"  {said:<42}{mebibytes(own + (0 if is_link else report.weight_bytes)):>13}"
    yield total + (f"    (beside {mebibytes(report.weight_bytes)} of linked weights)" if is_link else "")
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.seconds.items() if seconds >= 0.05)
    yield f"  {'time':<42}{report.total_seconds:9.1f} s" + (f"    ({stages})" if stages else "")
    if report.token_seconds:
        yield f"  {'first token':<42}{report.token_seconds:9.1f} s    (what was compiled for it is kept)"
    yield f"  {'peak host memory':<42}{mebibytes(report.peak_host_bytes):>13}"
    yield from report.notes
