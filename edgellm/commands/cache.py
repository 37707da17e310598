"""`edgellm cache`: system prompts computed ahead of time, kept on disk."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.commands import options
from edgellm.commands.build import MEBIBYTE, ProgressDisplay, ended_by_signals
from edgellm.commands.cache_prompts import CachePrompt, read_cache_prompts
from edgellm.commands.convert import size_in_bytes
from edgellm.commands.draft_options import DraftingOptions
from edgellm.errors import RequestError, SnapshotError

if TYPE_CHECKING:
    from edgellm.llm import LLM
    from edgellm.snapshots.snapshot import Snapshot
    from edgellm.snapshots.store import SnapshotStore

cache = typer.Typer(
    name="cache",
    help="Compute system prompts ahead of time and keep them on disk.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Folder = Annotated[
    Path | None, typer.Option("--folder", help="Where snapshots lie [default: in the user's cache directory].")
]
Names = Annotated[
    list[str] | None, typer.Argument(help="Snapshots: a file, or what its name begins with, or the prompt's name.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_STEPS = 3


@cache.command("build")
def build(
    prompt: Annotated[str | None, typer.Option("--prompt", help="The system prompt.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the system prompt from a file.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="YAML", help="Several: a list of name, prompt or file, and perhaps output."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What to call it [default: its first words].")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write this file instead of one in the folder.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="Engine directory [default: the shipped model].")
    ] = None,
    draft: Annotated[
        bool | None,
        typer.Option("--draft/--no-draft", help="For use with the model's draft, or without.", show_default=False),
    ] = None,
    chat_template: options.ChatTemplateFile = None,
    folder: Folder = None,
    disk_budget: Annotated[
        str | None,
        typer.Option(help="Most that the folder may take; the least recently used go first [default: 8GiB]."),
    ] = None,
    backend: options.Backend = None,
    config: options.Config = None,
    debug: options.Debug = False,
) -> None:
    """Compute a system prompt (--prompt, --file, --prompts or standard input) and keep its KV cache on disk."""
    wanted = read_cache_prompts(prompt, file, prompts, name, output)
    settings = options.chosen_settings(
        config,
        model=model,
        backend=backend,
        prompt=options.PromptOptions(chat_template=chat_template),
        sampling=options.SamplingOptions(),
        drafting=DraftingOptions(draft=draft),
    )
    from edgellm.commands.opening import open_model  # what a wrong option needs not load
    from edgellm.snapshots.store import DISK_BUDGET, SnapshotStore

    budget = DISK_BUDGET if disk_budget is None else size_in_bytes(disk_budget)
    store = SnapshotStore(0, _folder(folder), budget)
    display = ProgressDisplay(sys.stderr)
    with ended_by_signals(), open_model(settings) as llm, display:
        lines = [line for item in wanted for line in _build_one(llm, store, item, display)]
    for line in lines:
        typer.echo(line)


@cache.command("list")
def list_snapshots(folder: Folder = None, as_json: Json = False, debug: options.Debug = False) -> None:
    """List the snapshots in the folder, and files there that cannot be used."""
    found = list(_files(_folder(folder)))
    if as_json:
        typer.echo(json.dumps([item.values() for item in found], indent=2))
        return
    typer.echo(f"{_folder(folder)}: {_counted(found)}")
    for item in found:
        typer.echo(f"  {item.path.stem[:8]}  {item.line()}")


@cache.command("show")
def show(name: Names = None, folder: Folder = None, as_json: Json = False, debug: options.Debug = False) -> None:
    """Say everything that a snapshot says of itself."""
    found = [_resolved(text, _folder(folder)) for text in _required(name)]
    if as_json:
        typer.echo(json.dumps([item.values() for item in found], indent=2))
        return
    for item in found:
        if item.error is not None:
            raise item.error
        typer.echo(str(item.path))
        for key, value in _rows(item):
            typer.echo(f"  {key:<16}{value}")


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
    """Read snapshots whole and compare them with their SHA-256; exit with 1 where one cannot be used."""
    failed = False
    for item in _chosen(name, everything, _folder(folder)):
        try:
            _verify(item, model)
            typer.echo(f"{item.path}: whole{'' if model is None else f', and made for {model}'}")
        except SnapshotError as error:
            failed = True
            typer.echo(f"{item.path}: {error.reason}: {error}")
    if failed:
        raise typer.Exit(1)


@cache.command("remove")
def remove(
    name: Names = None,
    everything: Annotated[bool, typer.Option("--all", help="Every snapshot in the folder.")] = False,
    folder: Folder = None,
    debug: options.Debug = False,
) -> None:
    """Delete snapshots."""
    from edgellm.snapshots.stored_files import delete_file

    for item in _chosen(name, everything, _folder(folder)):
        delete_file(item.path)
        typer.echo(f"{item.path}: removed")


@dataclass(frozen=True)
class SnapshotOnDisk:
    """A file with its snapshot, or with the reason why it holds none that can be used."""

    path: Path
    snapshot: Snapshot | None
    error: SnapshotError | None = None

    @property
    def label(self) -> str | None:
        """The prompt's name, where it can be read."""
        return None if self.snapshot is None else self.snapshot.facts.label

    def values(self) -> dict[str, Any]:
        """All there is to say, as JSON values; sizes in bytes."""
        if self.snapshot is None:
            return {"path": str(self.path), "error": str(self.error), "reason": self.error and self.error.reason}
        return {"path": str(self.path), "bytes": self.snapshot.nbytes, **asdict(self.snapshot.facts)}

    def line(self) -> str:
        """A row of the list."""
        if self.snapshot is None:
            return f"cannot be used: {self.error and self.error.reason}"
        facts = self.snapshot.facts
        drafted = ", draft" if facts.binding.has_draft else ""
        return (
            f"{facts.label:<42}{facts.tokens:>7,} tokens {self.snapshot.nbytes / MEBIBYTE:>9,.1f} MiB  "
            f"{facts.binding.backend} {facts.binding.dtype}{drafted}, {facts.model}"
        )


def _build_one(llm: LLM, store: SnapshotStore, item: CachePrompt, display: ProgressDisplay) -> Iterator[str]:
    from edgellm.decoding import KVContents
    from edgellm.snapshots.slot_snapshots import SlotSnapshots
    from edgellm.snapshots.snapshot_file import write_snapshot
    from edgellm.snapshots.system_prompt import system_prompt_ids

    started = time.perf_counter()
    display(item.label, 0, _STEPS)
    token_ids = system_prompt_ids(llm.tokenizer, item.text)
    display(item.label, 1, _STEPS)
    snapshots = SlotSnapshots(store, llm._open_runner(), llm.directory)
    snapshot = snapshots.compute(0, token_ids, KVContents(), item.label)
    display(item.label, 2, _STEPS)
    removed: list[Path] = []
    if item.output is None:
        path, removed = store.save(snapshot)
    else:
        path = item.output
        write_snapshot(path, snapshot)
    display(item.label, _STEPS, _STEPS)
    yield (
        f"{path}: {item.label!r}, {len(token_ids):,} tokens, {snapshot.nbytes / MEBIBYTE:,.1f} MiB, read back and "
        f"verified, {time.perf_counter() - started:.1f} s"
    )
    yield from (f"{gone}: removed to keep within the disk budget" for gone in removed)


def _verify(item: SnapshotOnDisk, model: Path | None) -> None:
    from edgellm.engines.engine_directory import EngineDirectory
    from edgellm.snapshots.binding import snapshot_binding
    from edgellm.snapshots.snapshot_file import check_binding, verify_snapshot

    if item.snapshot is None:
        raise item.error
    verify_snapshot(item.path, item.snapshot)
    if model is not None:
        found, directory = item.snapshot.facts.binding, EngineDirectory.open(model)
        dtype = "float32" if found.backend == "numpy" else directory.dtype
        expected = snapshot_binding(directory, found.backend, dtype, found.has_draft, found.adapter)
        check_binding(item.path, item.snapshot, expected)


def _files(folder: Path) -> Iterator[SnapshotOnDisk]:
    from edgellm.snapshots.stored_files import SUFFIX

    yield from (_on_disk(path) for path in sorted(folder.glob(f"*{SUFFIX}")))


def _on_disk(path: Path) -> SnapshotOnDisk:
    from edgellm.snapshots.snapshot_file import read_snapshot

    try:
        return SnapshotOnDisk(path, read_snapshot(path))
    except SnapshotError as error:
        return SnapshotOnDisk(path, None, error)


def _chosen(names: list[str] | None, everything: bool, folder: Path) -> Iterable[SnapshotOnDisk]:
    if everything and names:
        raise typer.BadParameter("give names or --all, not both", param_hint="--all")
    return list(_files(folder)) if everything else [_resolved(name, folder) for name in _required(names)]


def _required(names: list[str] | None) -> list[str]:
    if not names:
        raise typer.BadParameter("missing: edgellm cache list shows them", param_hint="NAMES")
    return names


def _resolved(name: str, folder: Path) -> SnapshotOnDisk:
    """The snapshot that a name means; RequestError where that is none or several."""
    path = Path(name).expanduser()
    if path.exists() or path.is_symlink():
        return _on_disk(path)
    found = [item for item in _files(folder) if item.path.name.startswith(name) or item.label == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise RequestError(f"{name!r} may be {', '.join(item.path.stem for item in found)}: write more of one of them")
    raise RequestError(f"there is no snapshot {name!r}, neither a file nor in {folder}: edgellm cache list shows them")


def _rows(item: SnapshotOnDisk) -> Iterator[tuple[str, str]]:
    snapshot = item.snapshot
    facts = snapshot.facts
    first = ", ".join(map(str, snapshot.token_ids[:12].tolist()))
    yield "name", facts.label
    yield "tokens", f"{facts.tokens:,}: {first}{', ...' if facts.tokens > 12 else ''}"
    yield "size", f"{snapshot.nbytes / MEBIBYTE:,.1f} MiB in {len(snapshot.rows)} tensors of rows"
    yield "model", facts.model
    yield "created", f"{facts.created}, EdgeLLM {facts.created_with}, format {facts.format_version}"
    for key, value in asdict(facts.binding).items():
        yield key.replace("_", " "), "any" if value is None else str(value)


def _counted(found: list[SnapshotOnDisk]) -> str:
    usable = [item.snapshot for item in found if item.snapshot is not None]
    size = sum(snapshot.nbytes for snapshot in usable) / MEBIBYTE
    words = f"{len(usable)} snapshot{'' if len(usable) == 1 else 's'}, {size:,.1f} MiB"
    return words if len(usable) == len(found) else f"{words}, and {len(found) - len(usable)} that cannot be used"


def _folder(folder: Path | None) -> Path:
    from edgellm.snapshots.stored_files import snapshot_folder

    return snapshot_folder() if folder is None else folder.expanduser()
