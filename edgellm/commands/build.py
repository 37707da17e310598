"""`edgellm build`: an engine directory from a checkpoint."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TextIO

import typer

from edgellm.commands.console import ended_by_signals
from edgellm.commands.descriptions import (
    draft_in_words,
    draft_limits_in_words,
    executor_facts,
    executors_in_words,
    kv_cache_in_words,
    lora_limits_in_words,
    named_directories,
    vision_in_words,
    vision_limits_in_words,
)
from edgellm.commands.options import one_engine_directory
from edgellm.engines.building.builder import build_engine_directory, refresh_plans
from edgellm.engines.building.checks import EMBEDDINGS, choose_limits
from edgellm.engines.building.inputs import read_adapters, read_decoder_config, read_vision_config
from edgellm.engines.building.plans import BuildReport
from edgellm.engines.building.shipped_draft import choose_draft
from edgellm.engines.directories.engine_directory import DTYPES
from edgellm.engines.model.config import HEADS, MTP
from edgellm.engines.model.decoder import head_format
from edgellm.engines.quantization.config import folder_quantization
from edgellm.tools.formats import FORMATS, checkpoint_format

MEBIBYTE = 1 << 20
_DTYPES = f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"


def build(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="Hugging Face directory with config.json, tokenizer.json and safetensors.",
        ),
    ] = None,
    engine_dir: Annotated[
        Path | None,
        typer.Argument(
            help="The engine directory to make.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            help="The engine directory to make, in place of the argument.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel="Plans",
            help="Build plans for this compute capability, as in sm_86; may be repeated [default: this GPU].",
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            rich_help_panel="Limits",
            help="Sequences at once, 1 to 8 [default: 1].",
        ),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            rich_help_panel="Limits",
            help="Prompt tokens computed at once, a multiple of 16 up to 2048 [default: up to 2048; 512 for packed "
            "models with MLPs wider than 8192].",
        ),
    ] = None,
    kv_capacity: Annotated[
        int | None,
        typer.Option(
            rich_help_panel="Limits", help="Tokens of context, prompt and answer together [default: up to 4096]."
        ),
    ] = None,
    kv_cache: Annotated[
        str,
        typer.Option(
            rich_help_panel="Limits",
            help="compute: keep the KV cache in the dtype that engines compute in; int8: in 8 bits, half the memory.",
        ),
    ] = "compute",
    dtype: Annotated[
        str | None,
        typer.Option(
            rich_help_panel="Weights",
            help=f"{_DTYPES}: what engines compute in [default: the checkpoint's; float16 where that is float32].",
        ),
    ] = None,
    attention: Annotated[
        str,
        typer.Option(
            rich_help_panel="Plans",
            help="auto, native (IAttention) or composed.",
        ),
    ] = "auto",
    weights: Annotated[
        str,
        typer.Option(
            rich_help_panel="Weights",
            help="copy the weights, or link to those of the checkpoint.",
        ),
    ] = "copy",
    head: Annotated[
        str,
        typer.Option(
            rich_help_panel="Weights",
            metavar="|".join(HEADS),
            help="Pack the head, and a draft's own: 8 bits and a scale for each row, or 4 bits in groups of columns.",
        ),
    ] = HEADS[0],
    embedding: Annotated[
        str,
        typer.Option(
            rich_help_panel="Weights",
            metavar="|".join(EMBEDDINGS),
            help="Where tokens are looked up whose table was the head: in the published one, or in the packed head.",
        ),
    ] = EMBEDDINGS[0],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Replace an existing engine directory.",
        ),
    ] = False,
    beyond_trained_context: Annotated[
        bool,
        typer.Option(
            "--beyond-trained-context", rich_help_panel="Limits", help="Allow more context than the model was made for."
        ),
    ] = False,
    draft: Annotated[
        str | None,
        typer.Option(
            rich_help_panel="Draft",
            metavar="DRAFT_CHECKPOINT|mtp",
            help="EAGLE head of this very model, to build engines for too, or mtp: the head for multi-token prediction "
            "that ships inside CHECKPOINT [default: mtp where there is one].",
        ),
    ] = None,
    no_mtp: Annotated[
        bool,
        typer.Option(
            "--no-mtp", rich_help_panel="Draft", help="Leave out the head that ships inside CHECKPOINT: do not draft."
        ),
    ] = False,
    draft_vocabulary: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel="Draft",
            metavar="FILE",
            help="The ids that the head inside CHECKPOINT proposes, a JSON list or one a line [default: 32,768 of "
            "frequent tokens].",
        ),
    ] = None,
    draft_top_k: Annotated[
        int | None,
        typer.Option(
            rich_help_panel="Draft",
            help="Widest draft tree, 1 to 64 [default: 10; mtp: 4].",
        ),
    ] = None,
    draft_steps: Annotated[
        int | None,
        typer.Option(
            rich_help_panel="Draft",
            help="Deepest draft tree, 1 to 32 [default: 6; mtp: 3].",
        ),
    ] = None,
    verify_tree_size: Annotated[
        int | None,
        typer.Option(
            rich_help_panel="Draft",
            help="Most nodes verified at once, the root included, 2 to 64 [default: 60; mtp: 16].",
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel="LoRA adapters",
            metavar="NAME=DIR",
            help="LoRA adapter of this very model, as PEFT saves it; may be repeated.",
        ),
    ] = None,
    max_lora_rank: Annotated[
        int | None,
        typer.Option(
            rich_help_panel="LoRA adapters",
            help="Largest rank that engines take [default: that of the adapters given].",
        ),
    ] = None,
    lora_slots: Annotated[
        int | None,
        typer.Option(
            rich_help_panel="LoRA adapters",
            help="Adapters in use at once [default: as many as given, at least one a sequence].",
        ),
    ] = None,
    vision: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel="Images",
            metavar="VISION_DIR",
            help="Vision encoder of this very model that was published apart.",
        ),
    ] = None,
    max_image_patches: Annotated[
        int | None,
        typer.Option(
            rich_help_panel="Images",
            help="Patches of the largest image, where images are of any size; 0: no images at all [default: 4096].",
        ),
    ] = None,
    tool_format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help=f"How the model calls tools: {', '.join(FORMATS)} [default: as its chat template shows calls].",
        ),
    ] = None,
    all_plans: Annotated[
        bool,
        typer.Option(
            "--all-plans",
            rich_help_panel="Plans",
            help="Build the plans of shapes, too, that the hand-written kernels run on the target.",
        ),
    ] = False,
    refresh: Annotated[
        Path | None,
        typer.Option(
            "--refresh-plans",
            rich_help_panel="Plans",
            metavar="ENGINE_DIR",
            help="Only build the plans that an engine directory lacks.",
        ),
    ] = None,
) -> None:
    """Make an engine directory of a checkpoint: weights, tokenizer, and TensorRT plans where TensorRT is there.

    Example: edgellm build Qwen3-0.6B robot --kv-capacity 2048
    """
    engine_dir = one_engine_directory(engine_dir, model)
    display = ProgressDisplay(sys.stderr)
    drafts = draft is not None or no_mtp or draft_vocabulary is not None
    if refresh is not None:
        if checkpoint is not None or model is not None or drafts or lora or vision is not None:
            raise typer.BadParameter(
                "--refresh-plans ENGINE_DIR takes no CHECKPOINT, --draft, --lora, --vision or other ENGINE_DIR"
            )
        with ended_by_signals(), display:
            report = refresh_plans(refresh, target, display, all_plans)
    else:
        if checkpoint is None or engine_dir is None:
            raise typer.BadParameter("expected CHECKPOINT and ENGINE_DIR, or --refresh-plans ENGINE_DIR")
        if no_mtp and (draft == MTP or draft_vocabulary is not None):
            given = "--draft-vocabulary" if draft != MTP else f"--draft {MTP}"
            raise typer.BadParameter(f"{given} is given beside --no-mtp: leave one of them out")
        found_format = checkpoint_format(checkpoint, tool_format)
        config, adapters = read_decoder_config(checkpoint), named_directories(lora or [])
        ranks = [adapter.rank for adapter in read_adapters(adapters, config).values()]
        drafted = None if no_mtp and draft is None else choose_draft(checkpoint, config, draft)
        limits = choose_limits(
            config,
            max_batch,
            prefill_chunk,
            kv_capacity,
            beyond_trained_context,
            drafted is not None,
            draft_top_k,
            draft_steps,
            verify_tree_size,
            ranks,
            max_lora_rank,
            lora_slots,
            None if max_image_patches == 0 else read_vision_config(checkpoint, vision, config),
            max_image_patches,
            kv_cache,
            folder_quantization(checkpoint) is not None,
            drafted == MTP,
        )
        with ended_by_signals(), display:
            report = build_engine_directory(
                checkpoint,
                engine_dir,
                limits,
                target,
                dtype,
                attention,
                weights,
                force,
                beyond_trained_context,
                display,
                drafted,
                adapters,
                vision,
                all_plans,
                head,
                embedding,
                found_format,
                draft_vocabulary,
            )
    for line in report_lines(report):
        typer.echo(line)


def report_lines(report: BuildReport) -> Iterator[str]:
    """The table that ends a build."""
    config, limits = report.config, report.limits
    yield f"{report.path}: {config.family}, {report.dtype}, {config.num_layers} layers of {config.hidden_size}"
    yield (
        f"  limits            batch {limits.max_batch}, prefill chunk {limits.prefill_chunk}, "
        f"context {limits.kv_capacity}{kv_cache_in_words(limits.kv_cache)}"
    )
    if report.draft is not None:
        yield f"  draft             {draft_in_words(asdict(report.draft))}"
        yield f"  draft limits      {draft_limits_in_words(asdict(limits))}"
    if report.vision is not None:
        rows = limits.image_rows
        yield f"  vision            {vision_in_words(asdict(report.vision))}"
        yield f"  vision limits     {vision_limits_in_words(report.vision.patches_within(rows[-1]), rows)}"
    for name, rank in report.adapters.items():
        yield f"  adapter           {name}, rank {rank}"
    if limits.has_lora:
        yield f"  adapter limits    {lora_limits_in_words(asdict(limits))}"
    models = {"base": config, "draft": report.draft, "vision": report.vision}
    for target in report.targets:
        executors = executor_facts(models, limits, report.dtype, target)
        yield from (f"  {target:<7} {line}" for line in executors_in_words(executors) if line.startswith("kernels"))
    for plan in report.plans:
        took = f"{plan.seconds:6.1f} s" if plan.seconds else "   kept "
        yield f"  {plan.platform.compute_capability:<7} {plan.shape.name:<34}{_mebibytes(plan.size)}  {took}"
    if report.weight_bytes:
        yield f"  {'weights (linked)' if report.weights == 'link' else 'weights':<42}{_mebibytes(report.weight_bytes)}"
    if report.head_bytes:
        format = head_format(config.head, config.hidden_size, report.dtype)
        looked_up = ", tokens are looked up in it" if config.embeds_by_head else ""
        yield f"  {f'head ({format})':<42}{_mebibytes(report.head_bytes)}{looked_up}"
    plan_bytes = sum(plan.size for plan in report.plans)
    kept = 0 if report.weights == "link" else report.weight_bytes
    yield f"  {'total on disk':<42}{_mebibytes(kept + plan_bytes + report.published_bytes + report.head_bytes)}"
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.seconds.items() if seconds >= 0.05)
    yield f"  {'time':<42}{report.total_seconds:9.1f} s" + (f"    ({stages})" if stages else "")
    yield f"  {'peak host memory':<42}{_mebibytes(report.peak_host_bytes)}"
    yield from report.notes


class ProgressDisplay:
    """A bar on a terminal, a line a stage elsewhere. Called from several threads."""

    _WIDTH = 20

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._lock = threading.Lock()
        self._stages: dict[str, tuple[int, int]] = {}
        self._shown = ""

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._is_terminal:
                self._stream.write(f"\r{' ' * len(self._shown)}\r")
                self._stream.flush()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` of a stage is done."""
        with self._lock:
            is_new = stage not in self._stages
            self._stages[stage] = (done, total)
            if self._is_terminal:
                self._redraw()
            elif done >= total:
                self._print(f"{stage}: done{self._amount(stage)}")
            elif is_new:
                self._print(f"{stage} ...")

    def _redraw(self) -> None:
        running = [stage for stage, (done, total) in self._stages.items() if done < total]
        line = "   ".join(f"{stage} {self._bar(stage)}{self._amount(stage)}" for stage in running)
        line = line[: shutil.get_terminal_size().columns - 1]  # a wrapped line cannot be taken back
        if line != self._shown:
            self._stream.write("\r" + line.ljust(len(self._shown)))
            self._stream.flush()
            self._shown = line

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def _bar(self, stage: str) -> str:
        done, total = self._stages[stage]
        filled = self._WIDTH * done // max(1, total)
        return f"[{'#' * filled}{'.' * (self._WIDTH - filled)}]"

    def _amount(self, stage: str) -> str:
        done, total = self._stages[stage]
        if stage == "weights":
            return f" {done / MEBIBYTE:,.0f} of {total / MEBIBYTE:,.0f} MiB"
        return f" {done} of {total}" if stage in ("plans", "layers") else ""


def _mebibytes(size: int) -> str:
    return f"{size / MEBIBYTE:9,.1f} MiB"
