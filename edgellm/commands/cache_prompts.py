"""System prompts and their snapshots on the command line: as `edgellm cache build` is given them, and as the other
commands name snapshots on disk, and take the prompt of one."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgellm.commands import options
from edgellm.commands.console import mebibytes
from edgellm.commands.descriptions import named_directories
from edgellm.engines.formats.small_files import SETTINGS_BYTES, read_text
from edgellm.engines.formats.strict_formats import parse_yaml
from edgellm.errors import RequestError, SnapshotError, did_you_mean
from edgellm.kernels.user_paths import printable, user_cache_directory, user_path
from edgellm.snapshots.binding import NONE
from edgellm.snapshots.file import read_snapshot
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.staging import SUFFIX, is_snapshot_path
from edgellm.snapshots.system_prompt import Tools, checked_template_inputs, prompt_label

if TYPE_CHECKING:
    from edgellm.commands.settings import Settings

_KEYS = ("name", "prompt", "file", "lora", "output")


@dataclass(frozen=True)
class CachePrompt:
    """A system prompt with its name, the file for its snapshot (None: one in the folder), the LoRA adapter that it is
    for, and where that lies, if not in the engine directory."""

    label: str
    text: str
    output: Path | None = None
    adapter: str | None = None
    adapter_directory: Path | None = None


def read_cache_prompts(given: Any) -> list[CachePrompt]:
    """What the options of `edgellm cache build` ask for; raises RequestError, and typer.BadParameter for a
    contradiction."""
    prompt, file, prompts = given.prompt, given.file, given.prompts
    ways = {"--prompt": prompt, "--file": file, "--prompts": prompts}
    flags = [flag for flag, value in ways.items() if value is not None]
    if len(flags) > 1:
        raise typer.BadParameter(f"give one of {' and '.join(flags)}", param_hint=flags[-1])
    if prompts is not None:
        if given.name is not None or given.output is not None or given.lora is not None:
            raise typer.BadParameter("--name, --output and --lora are for one prompt: write them into the YAML file")
        return load_cache_prompts(prompts)
    text, place = prompt, "--prompt"
    if prompt is None:
        text, place = options.read_source(file, "with --prompt, --file or --prompts", "--prompt")
    return [_cache_prompt(text, place, given.name, given.output, given.lora, Path())]


def load_cache_prompts(path: Path) -> list[CachePrompt]:
    """The prompts of a YAML file: a list of `name`, `prompt` or `file`, and perhaps `lora` and `output`. Paths are
    relative to the YAML file. Raises RequestError that names file, entry and key."""
    path = user_path(path)
    text = read_text(path, SETTINGS_BYTES, RequestError, "--prompts", takes_pipes=True)
    entries = parse_yaml(text, str(path), RequestError)
    if not isinstance(entries, list) or not entries:
        raise RequestError(f"{path} holds a {type(entries).__name__}: expected a list of prompts, each with a name")
    found = [_from_entry(entry, f"{path}, prompt {number}", path.parent) for number, entry in enumerate(entries, 1)]
    label, times = Counter(entry.label for entry in found).most_common(1)[0]
    if times > 1:
        raise RequestError(f"{path} has the name {label!r} more than once")
    return found


def _from_entry(entry: Any, place: str, folder: Path) -> CachePrompt:
    if not isinstance(entry, dict):
        raise RequestError(f"{place} is a {type(entry).__name__}: expected the keys name, and prompt or file")
    for key, value in entry.items():
        if key not in _KEYS:
            raise RequestError(f"{place} has the unknown key {str(key)!r}{did_you_mean(str(key), _KEYS)}")
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise RequestError(f"{place}: {key} is {value!r}: expected text without null characters")
    if "name" not in entry or ("prompt" in entry) == ("file" in entry):
        raise RequestError(f"{place} has the keys {', '.join(map(str, entry))}: expected name, and prompt or file")
    if "file" in entry:
        text = options.read_text_file(folder / entry["file"], f"{place}:")
    else:
        text = entry["prompt"].removesuffix("\n")  # with which blocks of YAML end
    output = folder / entry["output"] if "output" in entry else None
    try:
        return _cache_prompt(text, place, entry["name"], output, entry.get("lora"), folder)
    except typer.BadParameter as error:
        raise RequestError(f"{place}: {error.message}") from error


def _cache_prompt(
    text: str, place: str, label: str | None, output: Path | None, lora: str | None, folder: Path
) -> CachePrompt:
    if not text.strip():
        raise RequestError(f"{place} is empty: expected a system prompt")
    adapter, directory = lora, None
    if lora is not None and "=" in lora:
        ((adapter, path),) = named_directories([lora]).items()
        directory = folder / path
    output = None if output is None else user_path(output)
    return CachePrompt(label or prompt_label(text), text, output, adapter, directory)


def adapter_directories(prompts: Sequence[CachePrompt]) -> dict[str, Path]:
    """The directories of adapters beside the engine directory's, by name. RequestError where two have one name."""
    found: dict[str, Path] = {}
    for prompt in prompts:
        name, directory = prompt.adapter, prompt.adapter_directory
        if name is not None and directory is not None and (first := found.setdefault(name, directory)) != directory:
            raise RequestError(f"the adapter {name!r} is {first} and {directory}: give one of them another name")
    return found


@dataclass(frozen=True)
class SnapshotOnDisk:
    """A file with its snapshot, or with the reason why it holds none that can be used."""

    path: Path
    found: Snapshot | SnapshotError

    def opened(self) -> Snapshot:
        """The snapshot; raises the SnapshotError that says why it cannot be used."""
        if isinstance(self.found, SnapshotError):
            raise self.found
        return self.found

    @property
    def label(self) -> str | None:
        """The prompt's name, where it can be read."""
        return None if isinstance(self.found, SnapshotError) else self.found.facts.label

    def values(self) -> dict[str, Any]:
        """All there is to say, as JSON values; sizes in bytes."""
        found = self.found
        if isinstance(found, SnapshotError):
            return {"path": str(self.path), "error": str(found), "reason": found.reason}
        prompt = None if found.prompt is None else asdict(found.prompt)
        return {"path": str(self.path), "bytes": found.nbytes, **asdict(found.facts), "prompt": prompt}

    def line(self) -> str:
        if isinstance(self.found, SnapshotError):
            return f"cannot be used: {self.found.reason}"
        facts, binding = self.found.facts, self.found.facts.binding
        drafted = ", draft" if binding.has_draft else ""
        adapted = "" if binding.adapter == NONE else f", adapter {binding.adapter[:8]}"
        size = f"{facts.tokens:>7,} tokens {mebibytes(self.found.nbytes):>13}"
        computed = f"{binding.backend} {binding.dtype}{drafted}{adapted}"
        return f"{printable(facts.label):<42}{size}  {computed}, {printable(facts.model)}"


def snapshot_files(folder: Path) -> list[SnapshotOnDisk]:
    """The snapshots in a folder, those that cannot be used among them."""
    return [read_snapshot_file(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]


def read_snapshot_file(path: Path) -> SnapshotOnDisk:
    """A file as the snapshot that it is, or with the reason why it is none that can be used."""
    try:
        return SnapshotOnDisk(path, read_snapshot(path))
    except SnapshotError as error:
        return SnapshotOnDisk(path, error)


def find_snapshot(name: str, folder: Path) -> SnapshotOnDisk:
    """The snapshot that a name means: the prompt's, or what the name of one file in the folder begins with, or else,
    where it is written as a path, a file anywhere. RequestError where that is none or several."""
    stored = snapshot_files(folder) if name else []
    found = [item for item in stored if item.label == name]
    found = found or [item for item in stored if item.path.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        stems = ", ".join(printable(item.path.stem) for item in found)
        raise RequestError(f"{name!r} may be {stems}: write more of one of them")
    path, shown = user_path(name), "edgellm cache list shows them"
    if not name or not os.path.lexists(path):
        raise RequestError(f"there is no snapshot {name!r}, neither a file nor in {folder}: {shown}")
    if is_snapshot_path(name):
        return read_snapshot_file(path)
    hint = f"the file of that name is written {os.curdir}{os.sep}{name}"
    raise RequestError(f"there is no snapshot {name!r} in {folder} ({hint}): {shown}")


def with_cached_prompt(
    settings: Settings,
    before_settings_file: bool = False,
    tools: Tools | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> tuple[Settings, Tools | None, dict[str, Any]]:
    """The settings with the system prompt that their snapshot keeps, and the tools and template variables of it.
    Another system prompt in the settings must be the same, unless the snapshot was named `before_settings_file`; so
    must `tools`. Given `template_variables` go before the snapshot's. Raises RequestError that names both, or
    SnapshotError for a snapshot that cannot be used."""
    tools, given = checked_template_inputs(tools, template_variables)
    variables = given or {}
    assert settings.system_cache
    found = find_snapshot(settings.system_cache, chosen_folder(None))
    record, name = found.opened().prompt, settings.system_cache
    settings = replace(settings, system_cache=str(found.path.absolute()))
    if record is None:
        return settings, tools, variables
    if record.text is None:
        raise RequestError(
            f"the snapshot {name!r} is of a prompt with images or several parts, which options cannot give: use it in "
            "Python (LLM.load_snapshot)"
        )
    if settings.system not in (None, record.text) and not before_settings_file:
        raise _another(
            name, record.text, "system prompt", settings.system, "--system, --system-file or a settings file"
        )
    if tools is not None and tools != record.tools:
        raise _another(name, record.tools, "tools", tools, "--tools")
    return replace(settings, system=record.text), record.tools, {**(record.template_variables or {}), **variables}


def _another(name: str, cached: Any, what: str, given: Any, origin: str) -> RequestError:
    """The error for a snapshot that was made of something else than what is given beside it."""
    texts = (repr(value) if isinstance(value, str) else json.dumps(value) for value in (cached, given))
    found, wanted = (text if len(text) <= 100 else f"{text[:100]}..." for text in texts)
    return RequestError(
        f"the snapshot {name!r} is of the {what} {found}, but {wanted} is given ({origin}): leave one of them out "
        "(--no-system-cache is no snapshot), or make a snapshot for the other (edgellm cache build)"
    )


def chosen_folder(folder: Path | None) -> Path:
    """The folder that was asked for, else the one in the user's cache directory. Raises RequestError for a file."""
    if folder is None:
        return user_cache_directory() / "snapshots"
    folder = user_path(folder)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"--folder {folder} is a file: expected the folder that holds snapshots")
    return folder
