"""`edgellm cache`: system prompts computed ahead of time, kept on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from edgellm.commands import options
from edgellm.commands.build import MEBIBYTE
from edgellm.commands.cache_building import build_snapshots
from edgellm.commands.cache_prompts import (
    SnapshotOnDisk,
    adapter_directories,
    chosen_folder,
    find_snapshot,
    read_cache_prompts,
    snapshot_files,
)
from edgellm.commands.console import write_error, write_note
from edgellm.commands.convert import size_in_bytes
from edgellm.commands.option_groups import DraftingOptions, with_option_groups
from edgellm.errors import SnapshotError
from edgellm.kernels.user_paths import printable
from edgellm.snapshots.system_prompt import PromptRecord

cache = typer.Typer(
    name="cache", help="Compute system prompts ahead of time and keep them on disk.\n\nExample: edgellm cache list"
)

Folder = Annotated[
    Path | None, typer.Option("--folder", help="Where snapshots lie [default: in the user's cache directory].")
]
Names = Annotated[
    list[str] | None,
    typer.Argument(help="Snapshots: the prompt's name, or what the file's name begins with, or a path."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@cache.command("build")
@with_option_groups
def build(
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The system prompt.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the system prompt from a file.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="YAML", help="Several: a list of name, prompt or file, and perhaps lora and output."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What to call it [default: its first words].")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write this file instead of one in the folder.")
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(
            "--lora",
            metavar="NAME",
            help="For answers with this LoRA adapter, one of the engine directory's, or NAME=DIR [default: none].",
        ),
    ] = None,
    model: options.Model = None,
    draft: Annotated[
        bool | None,
        typer.Option("--draft/--no-draft", help="For use with the model's draft, or without.", show_default=False),
    ] = None,
    chat_template: options.ChatTemplateFile = None,
    tooling: options.ToolOptions,
    folder: Folder = None,
    replaces: Annotated[
        bool, typer.Option("--replace", help="Take the place of a snapshot that has the name already, or the file.")
    ] = False,
    disk_budget: Annotated[
        str | None,
        typer.Option(help="Most that the folder may take; the least recently used go first [default: 8GiB]."),
    ] = None,
    computing: options.ComputingOptions,
    config: options.Config = None,
    debug: options.Debug = False,
) -> None:
    """Compute a system prompt (--prompt, --file, --prompts or standard input) and keep its KV cache on disk.

    Example: edgellm cache build --file system.txt --name robot
    """
    wanted = read_cache_prompts(prompt, file, prompts, name, output, lora)
    settings = options.chosen_settings(
        config,
        model=model,
        computing=computing,
        prompt=options.PromptOptions(chat_template=chat_template),
        sampling=options.SamplingOptions(),
        drafting=DraftingOptions(draft="" if draft else None, no_draft=draft is False),
    )
    # What a settings file says of answers does not choose what is computed here.
    settings = replace(
        settings, system_cache=None, adapter=None, adapters=settings.adapters | adapter_directories(wanted)
    )
    from edgellm.snapshots.store import DISK_BUDGET

    budget = DISK_BUDGET if disk_budget is None else size_in_bytes(disk_budget, "--disk-budget")
    build_snapshots(settings, wanted, chosen_folder(folder), budget, replaces, *options.template_inputs(tooling))


@cache.command("list")
def list_snapshots(folder: Folder = None, as_json: Json = False, debug: options.Debug = False) -> None:
    """List the snapshots in the folder, and files there that cannot be used.

    Example: edgellm cache list --json
    """
    found = list(snapshot_files(chosen_folder(folder)))
    if as_json:
        typer.echo(json.dumps([item.values() for item in found], indent=2))
        return
    typer.echo(f"{printable(chosen_folder(folder))}: {_counted(found)}")
    for item in found:
        typer.echo(f"  {printable(item.path.stem[:8])}  {item.line()}")


@cache.command("show")
def show(name: Names = None, folder: Folder = None, as_json: Json = False, debug: options.Debug = False) -> None:
    """Say everything that a snapshot says of itself.

    Example: edgellm cache show robot
    """
    found = [find_snapshot(text, chosen_folder(folder)) for text in _required(name)]
    if as_json:
        typer.echo(json.dumps([item.values() for item in found], indent=2))
        return
    for item in found:
        if item.error is not None:
            raise item.error
        typer.echo(printable(item.path))
        for key, value in _rows(item):
            typer.echo(f"  {key:<16}{printable(value)}")


@cache.command("verify")
def verify(
    name: Names = None,
    everything: Annotated[bool, typer.Option("--all", help="Every snapshot in the folder.")] = False,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="Also check that it was made for this engine directory.")
    ] = None,
    folder: Folder = None,
    debug: options.Debug = False,
) -> None:
    """Read snapshots whole and compare them with their SHA-256; exit with 1 where one cannot be used.

    Example: edgellm cache verify --all --model robot-engines
    """
    failed = False
    for item in _chosen(name, everything, chosen_folder(folder)):
        try:
            _verify(item, model)
            typer.echo(f"{printable(item.path)}: whole{'' if model is None else f', and made for {model}'}")
        except SnapshotError as error:
            failed = True
            typer.echo(f"{printable(item.path)}: {error.reason}: {printable(error)}")
    if failed:
        raise typer.Exit(1)


@cache.command("remove")
def remove(
    name: Names = None,
    everything: Annotated[bool, typer.Option("--all", help="Every snapshot in the folder.")] = False,
    folder: Folder = None,
    debug: options.Debug = False,
) -> None:
    """Delete snapshots, damaged ones too; with --all, what is no snapshot stays, and is named.

    Of several names none is deleted where one means something else than a snapshot.

    Example: edgellm cache remove robot
    """
    from edgellm.snapshots.file import require_snapshot_file
    from edgellm.snapshots.staging import delete_file

    chosen: list[Path] = []
    refused: list[SnapshotError] = []
    for path in dict.fromkeys(item.path for item in _chosen(name, everything, chosen_folder(folder))):
        try:
            require_snapshot_file(path)
            chosen.append(path)
        except SnapshotError as error:
            refused.append(error)
    if not refused or everything:
        for path in chosen:
            delete_file(path)
            typer.echo(f"{printable(path)}: removed")
    for reason in refused:
        write_error(reason)
    if refused:
        write_note("What is named was left where it is." if everything else "Nothing was removed.")
        raise typer.Exit(1)


def _verify(item: SnapshotOnDisk, model: Path | None) -> None:
    from edgellm.engines.directories.engine_directory import EngineDirectory
    from edgellm.snapshots.binding import snapshot_binding
    from edgellm.snapshots.file import check_binding, verify_snapshot

    snapshot = item.opened()
    verify_snapshot(item.path, snapshot)
    if model is not None:
        found = snapshot.facts.binding
        directory = EngineDirectory.open(model).with_kv_cache(found.kv_cache)
        dtype = "float32" if found.backend == "numpy" else directory.dtype
        expected = snapshot_binding(directory, found.backend, dtype, found.has_draft, found.adapter)
        check_binding(item.path, snapshot, replace(expected, images=found.images))


def _chosen(names: list[str] | None, everything: bool, folder: Path) -> Iterable[SnapshotOnDisk]:
    if everything and names:
        raise typer.BadParameter("give names or --all, not both", param_hint="--all")
    return list(snapshot_files(folder)) if everything else [find_snapshot(name, folder) for name in _required(names)]


def _required(names: list[str] | None) -> list[str]:
    if not names:
        raise typer.BadParameter("missing: edgellm cache list shows them", param_hint="NAMES")
    return names


def _rows(item: SnapshotOnDisk) -> Iterator[tuple[str, str]]:
    snapshot = item.opened()
    facts = snapshot.facts
    first = ", ".join(map(str, snapshot.token_ids[:12].tolist()))
    yield "name", facts.label
    yield "tokens", f"{facts.tokens:,}: {first}{', ...' if facts.tokens > 12 else ''}"
    if snapshot.prompt is not None:
        yield from _prompt_rows(snapshot.prompt)
    yield "size", f"{snapshot.nbytes / MEBIBYTE:,.1f} MiB in {len(snapshot.rows)} tensors of rows"
    yield "model", facts.model
    yield "created", f"{facts.created}, EdgeLLM {facts.created_with}, format {facts.format_version}"
    for key, value in asdict(facts.binding).items():
        yield key.replace("_", " "), "any" if value is None else str(value)


def _prompt_rows(prompt: PromptRecord) -> Iterator[tuple[str, str]]:
    parts = [prompt.content] if isinstance(prompt.content, str) else prompt.content
    shown = [part if isinstance(part, str) else part.get("text", f"[image {part.get('digest')}]") for part in parts]
    yield "prompt", " ".join(shown)
    if prompt.tools is not None:
        yield "tools", json.dumps(prompt.tools, ensure_ascii=False)
    if prompt.template_variables is not None:
        yield "template", json.dumps(prompt.template_variables, ensure_ascii=False)


def _counted(found: list[SnapshotOnDisk]) -> str:
    usable = [item.snapshot for item in found if item.snapshot is not None]
    size = sum(snapshot.nbytes for snapshot in usable) / MEBIBYTE
    words = f"{len(usable)} snapshot{'' if len(usable) == 1 else 's'}, {size:,.1f} MiB"
    return words if len(usable) == len(found) else f"{words}, and {len(found) - len(usable)} that cannot be used"
