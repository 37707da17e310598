"""What `edgellm cache build` does: prompts computed one after the other, each kept under a name of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgellm.commands.cache_prompts import CachePrompt, read_snapshot_file, snapshot_files
from edgellm.commands.console import mebibytes, progress_display
from edgellm.errors import EdgeLLMError, RequestError
from edgellm.kernels.user_paths import printable
from edgellm.snapshots.file import require_snapshot_file, write_snapshot
from edgellm.snapshots.folder import SnapshotFolder
from edgellm.snapshots.staging import delete_file
from edgellm.snapshots.system_prompt import Tools

if TYPE_CHECKING:
    from edgellm.commands.settings import Settings
    from edgellm.snapshots.snapshot import Snapshot

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
    place = SnapshotFolder(folder, disk_budget)
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
                require_snapshot_file(path)
        if output and output in outputs:
            problems.append(f"{printable(item.output)} is the output of two prompts: give one of them another")
        outputs.add(output)
    if problems:
        raise RequestError("\n".join(problems))
    return replaced


def _keep(
    snapshot: Snapshot, item: CachePrompt, folder: SnapshotFolder, replaced: Sequence[Path], replaces: bool
) -> tuple[Path, Sequence[Path]]:
    """Write a snapshot in the place of the files that are `replaced`; returns its file, and which ones went to keep
    within the disk budget. Raises RequestError where the very prompt is kept under another name, which this would take
    from it, and SnapshotError where its file is something else."""
    if item.output is not None:
        write_snapshot(item.output, snapshot)
        for old in replaced:
            if os.path.realpath(old) != os.path.realpath(item.output):
                delete_file(old)
        return item.output, ()
    path = folder.path_of(snapshot)
    if os.path.lexists(path):
        require_snapshot_file(path)
        label = read_snapshot_file(path).label
        if label not in (None, item.label) and not replaces:
            raise RequestError(
                f"this prompt is kept already, under the name {label!r}: {printable(path)}. Use that one, or give it "
                f"the name {item.label!r} with --replace"
            )
    return path, folder.save(snapshot, replaced)[1]
