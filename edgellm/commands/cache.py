"""`edgellm cache`: system prompts computed ahead of time, kept on disk."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import typer

from edgellm.commands import cache_prompts, options
from edgellm.commands.cache_prompts import CachePrompt, read_snapshot_file, snapshot_files
from edgellm.commands.console import mebibytes, progress_display, write_error, write_note
from edgellm.commands.settings import Settings, chosen_settings
from edgellm.commands.table import PanelCommand, PanelGroup, argument, option, takes_options
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.errors import EdgeLLMError, RequestError, SnapshotError, number_of
from edgellm.kernels.user_paths import printable
from edgellm.snapshots import file as snapshot_file
from edgellm.snapshots.binding import snapshot_binding
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.staging import delete_file
from edgellm.snapshots.system_prompt import Tools

#: What a size may end with, and the bytes of one.
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

cache = typer.Typer(
    name="cache",
    cls=PanelGroup,
    help="Compute system prompts ahead of time and keep them on disk.\n\nExample: edgellm cache list",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class FolderOptions(options.LogOptions):
    folder: Path | None = option("Where snapshots lie [default: in the user's cache directory].")

    def files(self) -> list[cache_prompts.SnapshotOnDisk]:
        return cache_prompts.snapshot_files(cache_prompts.chosen_folder(self.folder))


class BuildOptions(
    options.ModelOption, options.ChatTemplateOption, options.ToolOptions, FolderOptions, options.ComputingOptions
):
    prompt: str | None = option("The system prompt.", is_free=True)
    file: Path | None = option("Read the system prompt from a file.", "--file", "-f")
    prompts: Path | None = option(
        "Several: a list of name, prompt or file, and perhaps lora and output.", metavar="YAML"
    )
    name: str | None = option("What to call it [default: its first words].")
    output: Path | None = option("Write this file instead of one in the folder.", "--output", "-o")
    lora: str | None = option(
        "For answers with this LoRA adapter, one of the engine directory's, or NAME=DIR [default: none].",
        metavar="NAME",
    )
    draft: bool | None = option("For use with the model's draft, or without.")
    replaces: bool = option(
        "Take the place of a snapshot that has the name already, or the file.", "--replace", default=False
    )
    disk_budget: str | None = option("Most that the folder may take; the least recently used go first [default: 8GiB].")


class ListOptions(FolderOptions):
    as_json: bool = option("Print JSON instead of text.", "--json")


class NameOptions(FolderOptions):
    name: list[str] | None = argument("Snapshots: names, what files' names begin with, or paths.", may_be_path=True)

    def named(self) -> list[cache_prompts.SnapshotOnDisk]:
        """The snapshots that are named; typer.BadParameter for none, RequestError for a name that is not one's."""
        if not self.name:
            raise typer.BadParameter("missing: edgellm cache list shows them", param_hint="NAMES")
        return [cache_prompts.find_snapshot(name, cache_prompts.chosen_folder(self.folder)) for name in self.name]


class ShowOptions(NameOptions, ListOptions):
    """All options of `edgellm cache show`."""


class RemoveOptions(NameOptions):
    everything: bool = option("Every snapshot in the folder.", "--all")

    def chosen(self) -> list[cache_prompts.SnapshotOnDisk]:
        if self.everything and self.name:
            raise typer.BadParameter("give names or --all, not both", param_hint="--all")
        return self.files() if self.everything else self.named()


class VerifyOptions(RemoveOptions, options.ModelOption):
    model: list[Path] | None = option("Also check that it was made for this engine directory.", "--model", "-m")


def size_in_bytes(text: str) -> int:
    """A size such as "5GB" or "4GiB" in bytes; typer.BadParameter for what is none."""
    match = re.fullmatch(r"([0-9]{1,18}) ?([A-Za-z]*)", text.strip(), re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise typer.BadParameter(f"--disk-budget is {text!r}: expected a size such as 500MB, 5GB or 4GiB")
    return int(match[1]) * unit


@cache.command("build", cls=PanelCommand)
@takes_options
def build(given: BuildOptions) -> None:
    """Compute a system prompt (--prompt, --file, --prompts or standard input) and keep its KV cache on disk.

    Example: edgellm cache build --file system.txt --name robot
    """
    wanted = cache_prompts.read_cache_prompts(given)
    settings = chosen_settings(given)
    drafting = options.DraftingOptions(draft="" if given.draft else None, no_draft=given.draft is False)
    drafted = drafting.applied_to(settings.drafting)
    adapters = settings.adapters | cache_prompts.adapter_directories(wanted)
    # What a settings file says of answers does not choose what is computed here.
    settings = replace(settings, system_cache=None, adapter=None, adapters=adapters, drafting=drafted)
    budget = snapshot_file.DISK_BUDGET if given.disk_budget is None else size_in_bytes(given.disk_budget)
    folder = cache_prompts.chosen_folder(given.folder)
    build_snapshots(settings, wanted, folder, budget, given.replaces, *given.template_inputs())


@cache.command("list", cls=PanelCommand)
@takes_options
def list_snapshots(given: ListOptions) -> None:
    """List the snapshots in the folder, and files there that cannot be used.

    Example: edgellm cache list --json
    """
    found = given.files()
    if given.as_json:
        typer.echo(json.dumps([item.values() for item in found], indent=2))
        return
    typer.echo(f"{printable(cache_prompts.chosen_folder(given.folder))}: {_counted(found)}")
    for item in found:
        typer.echo(f"  {printable(item.path.stem[:8])}  {item.line()}")


@cache.command("show", cls=PanelCommand)
@takes_options
def show(given: ShowOptions) -> None:
    """Say everything that a snapshot says of itself.

    Example: edgellm cache show robot
    """
    found = given.named()
    if given.as_json:
        typer.echo(json.dumps([item.values() for item in found], indent=2))
        return
    for item in found:
        rows = [f"  {key:<16}{printable(value)}" for key, value in _rows(item.opened())]
        typer.echo("\n".join([printable(item.path), *rows]))


@cache.command("verify", cls=PanelCommand)
@takes_options
def verify(given: VerifyOptions) -> None:
    """Read snapshots whole and compare them with their SHA-256; exit with 1 where one cannot be used.

    Example: edgellm cache verify --all --model robot-engines
    """
    from edgellm.hub.directories import local_directory

    failed, model = False, given.chosen_model()
    for item in given.chosen():
        try:
            snapshot = item.opened()
            snapshot_file.verify_snapshot(item.path, snapshot)
            if model is not None:
                found = snapshot.facts.binding
                directory = EngineDirectory.open(local_directory(model)).with_kv_cache(found.kv_cache)
                dtype = "float32" if found.backend == "numpy" else directory.dtype
                kind = found.backend, dtype, found.has_draft, found.adapter
                expected = snapshot_binding(directory, *kind, executor=found.executor)
                snapshot_file.check_binding(item.path, snapshot, replace(expected, images=found.images))
            typer.echo(f"{printable(item.path)}: whole{'' if model is None else f', and made for {model}'}")
        except SnapshotError as error:
            failed = True
            typer.echo(f"{printable(item.path)}: {error.reason}: {printable(error)}")
    if failed:
        raise typer.Exit(1)


@cache.command("remove", cls=PanelCommand)
@takes_options
def remove(given: RemoveOptions) -> None:
    """Delete snapshots, damaged ones too; with --all, what is no snapshot stays, and is named.

    Of several names none is deleted where one means something else than a snapshot.

    Example: edgellm cache remove robot
    """
    chosen: list[Path] = []
    refused: list[SnapshotError] = []
    for path in dict.fromkeys(item.path for item in given.chosen()):
        try:
            snapshot_file.require_snapshot_file(path)
            chosen.append(path)
        except SnapshotError as error:
            refused.append(error)
    if not refused or given.everything:
        for path in chosen:
            delete_file(path)
            typer.echo(f"{printable(path)}: removed")
    for reason in refused:
        write_error(reason)
    if refused:
        write_note("What is named was left where it is." if given.everything else "Nothing was removed.")
        raise typer.Exit(1)


def _rows(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    facts = snapshot.facts
    first = ", ".join(map(str, snapshot.token_ids[:12].tolist()))
    yield "name", facts.label
    yield "tokens", f"{facts.tokens:,}: {first}{', ...' if facts.tokens > 12 else ''}"
    if (prompt := snapshot.prompt) is not None:
        parts = [prompt.content] if isinstance(prompt.content, str) else prompt.content
        texts = (part if isinstance(part, str) else part.get("text", f"[image {part.get('digest')}]") for part in parts)
        yield "prompt", " ".join(texts)
        for key, value in (("tools", prompt.tools), ("template", prompt.template_variables)):
            if value is not None:
                yield key, json.dumps(value, ensure_ascii=False)
    yield "size", f"{mebibytes(snapshot.nbytes)} in {len(snapshot.rows)} tensors of rows"
    yield "model", facts.model
    if facts.gpus > 1:
        yield "GPUs", f"{facts.gpus}"
    yield "created", f"{facts.created}, EdgeLLM {facts.created_with}, format {facts.format_version}"
    for key, value in asdict(facts.binding).items():
        yield key.replace("_", " "), "any" if value is None else str(value)


def _counted(found: list[cache_prompts.SnapshotOnDisk]) -> str:
    usable = [item.found.nbytes for item in found if not isinstance(item.found, SnapshotError)]
    words = f"{number_of(len(usable), 'snapshot')}, {mebibytes(sum(usable))}"
    return words if len(usable) == len(found) else f"{words}, and {len(found) - len(usable)} that cannot be used"


_ADVICE = "Choose another name, or replace what is there with --replace"


def build_snapshots(
    settings: Settings,
    wanted: Sequence[CachePrompt],
    folder: Path,
    disk_budget: int,
    replaces: bool = False,
    tools: Tools | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> None:
    """Compute and keep the prompts that are `wanted`, rendered with these tools and variables of the chat template. A
    name or a file that is in use is refused before anything is computed, unless this `replaces` it. Raises
    EdgeLLMError; the snapshots before the one that failed are there all the same."""
    from edgellm.commands.models import open_model  # what a name in use need not load

    replaced = _replaced_files(wanted, folder, replaces)
    place = snapshot_file.SnapshotFolder(folder, disk_budget)
    adapters = [item.adapter for item in wanted if item.adapter is not None]
    lines: list[str] = []
    try:
        with progress_display() as display, open_model(settings, adapters) as llm:
            for item in wanted:
                started, old = time.perf_counter(), replaced[item.label]
                display(printable(item.label), 0, 2)
                try:
                    inputs = item.text, item.adapter, item.label, tools, template_variables
                    snapshot = llm.call(methodcaller("system_prompt_snapshot", *inputs)).result()
                    display(printable(item.label), 1, 2)
                    path, removed = _keep(snapshot, item, place, old, replaces)
                except EdgeLLMError as error:
                    if len(wanted) == 1:
                        raise
                    raise RequestError(f"{printable(item.label)}: {error}") from error
                display(printable(item.label), 2, 2)
                adapted = "" if item.adapter is None else f" for the adapter {item.adapter}"
                lines += [
                    f"{printable(path)}: {item.label!r}{adapted}, {snapshot.facts.tokens:,} tokens, "
                    f"{mebibytes(snapshot.nbytes)}, read back and verified, "
                    f"{time.perf_counter() - started:.1f} s",
                    *(f"{printable(file)}: replaced" for file in old if not file.exists()),
                    *(f"{printable(gone)}: removed to keep within the disk budget" for gone in removed),
                ]
    finally:  # where one fails, those before it are there all the same
        for line in lines:
            typer.echo(line)


def _replaced_files(wanted: Sequence[CachePrompt], folder: Path, replaces: bool) -> dict[str, list[Path]]:
    """The files of every prompt's name in the folder, to go once the new one is there. Raises RequestError for names
    and files that are in use and not to be replaced, or wanted twice, SnapshotError for an output that is no
    snapshot."""
    stored = [(found.label, found.path) for found in snapshot_files(folder)]
    replaced: dict[str, list[Path]] = {}
    problems, outputs = [], set()
    for item in wanted:
        output = item.output and os.path.realpath(item.output)
        is_beside = item.output is not None and os.path.realpath(item.output.parent) != os.path.realpath(folder)
        old = [] if is_beside else [path for label, path in stored if label == item.label]
        replaced[item.label] = old
        if old and not replaces:
            problems.append(f"the name {item.label!r} is in use: {', '.join(map(printable, old))}. {_ADVICE}")
        elif item.output is not None and os.path.lexists(item.output) and not replaces:
            problems.append(f"the file {printable(item.output)} is there already. {_ADVICE}")
        for path in (*old, *([] if item.output is None else [item.output])):
            if replaces and os.path.lexists(path):
                snapshot_file.require_snapshot_file(path)
        if output and output in outputs:
            problems.append(f"{printable(item.output)} is the output of two prompts: give one of them another")
        outputs.add(output)
    if problems:
        raise RequestError("\n".join(problems))
    return replaced


def _keep(
    snapshot: Snapshot,
    item: CachePrompt,
    folder: snapshot_file.SnapshotFolder,
    replaced: Sequence[Path],
    replaces: bool,
) -> tuple[Path, Sequence[Path]]:
    """Write a snapshot in the place of the files that are `replaced`; returns its file, and which ones went to keep
    within the disk budget. Raises RequestError where the very prompt is kept under another name, which this would take
    from it, and SnapshotError where its file is something else."""
    if item.output is not None:
        snapshot_file.write_snapshot(item.output, snapshot)
        for old in replaced:
            if os.path.realpath(old) != os.path.realpath(item.output):
                delete_file(old)
        return item.output, ()
    path = folder.path_of(snapshot)
    if os.path.lexists(path):
        snapshot_file.require_snapshot_file(path)
        label = read_snapshot_file(path).label
        if label not in (None, item.label) and not replaces:
            raise RequestError(
                f"this prompt is kept already, under the name {label!r}: {printable(path)}. Use that one, or give it "
                f"the name {item.label!r} with --replace"
            )
    return path, folder.save(snapshot, replaced)[1]
