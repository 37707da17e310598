"""What `edgellm cache build` does: prompts computed one after the other, each kept under a name of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgellm.commands.cache_prompts import CachePrompt, read_snapshot_file, snapshot_files
from edgellm.commands.console import MEBIBYTE, ProgressDisplay, ended_by_signals
from edgellm.errors import EdgeLLMError, RequestError
from edgellm.kernels.user_paths import printable
from edgellm.snapshots.file import require_snapshot_file, write_snapshot
from edgellm.snapshots.staging import delete_file
from edgellm.snapshots.store import SnapshotStore
from edgellm.snapshots.system_prompt import Tools

if TYPE_CHECKING:
    from edgellm.commands.settings import Settings
    from edgellm.llm import LLM
    from edgellm.snapshots.snapshot import Snapshot

_STEPS = 2
_ADVICE = "Choose another name, or replace what is there with --replace"


@dataclass(frozen=True)
class Building:
    """How prompts are computed and where they are kept: the store with its folder, whether names that are in use are
    replaced, and what the chat template gets with the prompts (None: nothing)."""

    store: SnapshotStore
    replaces: bool = False
    tools: Tools | None = None
    template_variables: Mapping[str, Any] | None = None


def build_snapshots(
    settings: Settings,
    wanted: Sequence[CachePrompt],
    folder: Path,
    disk_budget: int,
    replaces: bool = False,
    tools: Tools | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> None:
    """Compute and keep all prompts that are `wanted`, rendered with these tools and variables of the chat template.

    A name or a file that is in use is refused before anything is computed, unless this `replaces` it. Raises
    EdgeLLMError; the snapshots before the one that failed are then there all the same.
    """
    from edgellm.commands.models import open_model  # what a name in use need not load

    replaced = _replaced_files(wanted, folder, replaces)
    building = Building(SnapshotStore(0, folder, disk_budget), replaces, tools, template_variables)
    display = ProgressDisplay()
    adapters = [item.adapter for item in wanted if item.adapter is not None]
    lines: list[str] = []
    try:
        with ended_by_signals(), open_model(settings, adapters) as llm, display:
            for item in wanted:
                try:
                    lines += _build_one(llm, building, item, display, replaced[item.label])
                except EdgeLLMError as error:
                    if len(wanted) == 1:
                        raise
                    raise RequestError(f"{printable(item.label)}: {error}") from error
    finally:  # where one fails, those before it are there all the same
        for line in lines:
            typer.echo(line)


def _replaced_files(wanted: Sequence[CachePrompt], folder: Path, replaces: bool) -> dict[str, list[Path]]:
    """For every prompt's name the files in the folder that have it, to go once the new one is there.

    Raises RequestError for names and files that are in use and not to be replaced, or wanted twice, and SnapshotError
    for an output file that is no snapshot.
    """
    stored: dict[str, list[Path]] = {}
    for found in snapshot_files(folder):
        if found.label is not None:
            stored.setdefault(found.label, []).append(found.path)
    replaced, problems, outputs = {}, [], set()
    for item in wanted:
        is_beside = item.output is not None and os.path.realpath(item.output.parent) != os.path.realpath(folder)
        replaced[item.label] = [] if is_beside else stored.get(item.label, [])
        if replaced[item.label] and not replaces:
            problems.append(
                f"the name {item.label!r} is in use: {', '.join(map(printable, replaced[item.label]))}. {_ADVICE}"
            )
        elif item.output is not None and os.path.lexists(item.output) and not replaces:
            problems.append(f"the file {printable(item.output)} is there already. {_ADVICE}")
        for path in [*replaced[item.label], *([] if item.output is None else [item.output])]:
            if replaces and os.path.lexists(path):
                require_snapshot_file(path)
        if item.output is not None and os.path.realpath(item.output) in outputs:
            problems.append(f"{printable(item.output)} is the output of two prompts: give one of them another")
        outputs.add(item.output and os.path.realpath(item.output))
    if problems:
        raise RequestError("\n".join(problems))
    return replaced


def _build_one(
    llm: LLM, building: Building, item: CachePrompt, display: ProgressDisplay, replaced: Sequence[Path]
) -> Iterator[str]:
    """Compute a prompt and keep it in the place of the files that are `replaced`; says what was done."""
    started = time.perf_counter()
    removed: list[Path] = []
    display(printable(item.label), 0, _STEPS)
    snapshot: Snapshot = llm.call(
        lambda runtime: runtime.system_prompt_snapshot(
            item.text, item.adapter, item.label, building.tools, building.template_variables
        )
    ).result()
    display(printable(item.label), 1, _STEPS)
    if item.output is None:
        path = building.store.path_of(snapshot)
        _check_place(path, item, building.replaces)
        _, removed = building.store.save(snapshot, replaced)
    else:
        path = item.output
        write_snapshot(path, snapshot)
        for old in replaced:
            if os.path.realpath(old) != os.path.realpath(path):
                delete_file(old)
    display(printable(item.label), _STEPS, _STEPS)
    adapted = "" if item.adapter is None else f" for the adapter {item.adapter}"
    yield (
        f"{printable(path)}: {item.label!r}{adapted}, {snapshot.facts.tokens:,} tokens, "
        f"{snapshot.nbytes / MEBIBYTE:,.1f} MiB, read back and verified, {time.perf_counter() - started:.1f} s"
    )
    yield from (f"{printable(old)}: replaced" for old in replaced if not old.exists())
    yield from (f"{printable(gone)}: removed to keep within the disk budget" for gone in removed)


def _check_place(path: Path, item: CachePrompt, replaces: bool) -> None:
    """Raise RequestError where the very prompt is kept under another name, which this would take from it, and
    SnapshotError where its file is something else."""
    if not os.path.lexists(path):
        return
    require_snapshot_file(path)
    label = read_snapshot_file(path).label
    if label not in (None, item.label) and not replaces:
        raise RequestError(
            f"this prompt is kept already, under the name {label!r}: {printable(path)}. Use that one, or give it the "
            f"name {item.label!r} with --replace"
        )
