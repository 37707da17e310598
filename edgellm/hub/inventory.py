"""What there is of models on this machine, by command or for a name on the hub: listed, found, removed."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgellm.engines.directories.description import DESCRIPTION_NAME
from edgellm.engines.directories.engine_directory import EngineDirectory, file_folder
from edgellm.engines.directories.kernel_folders import KERNELS_FOLDER
from edgellm.errors import EngineDirectoryError, HubError, did_you_mean, shown
from edgellm.hub.directories import LOCK_NAME, local_directory, locked
from edgellm.hub.downloads import RECORD_NAME, Download, Record, repository_folder
from edgellm.hub.names import HubName, stands_for
from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.user_paths import resolved, user_cache_directory

logger = logging.getLogger("edgellm.hub")

_BUILT_NAME, _PLANS_FOLDER = "built.json", "plans"
#: Of plans and compiled kernels, which come to a directory later.
_MADE_ENDINGS = (".engine", ".cubin", ".json")


@dataclass(frozen=True)
class Model:
    """What is on the disk of a model: a directory that was `built` by command, one that is `cached`, or the files that
    were `downloaded`; `size` are its own bytes, without those that it links to or has in common with one before it. The
    GGUF `file` that a directory was made of may be `gone`."""

    kind: str
    name: str
    path: Path
    size: int
    commit: str = ""
    file: str = ""
    gone: bool = False

    @classmethod
    def of(cls, kind: str, name: str, directory: EngineDirectory) -> Model:
        commit, file = directory.source.commit if directory.source else "", gguf_file(directory)
        path, is_gone = directory.path, file is not None and not file.exists()
        return cls(kind, name, path, _own_bytes(path), commit, "" if file is None else str(file), is_gone)


def models() -> list[Model]:
    """All directories that were built on this machine, by command or for a name, and all downloads."""
    built, counted = filter(None, map(_described, built_directories())), set[Path]()
    found = [Model.of("built", directory.name, directory) for directory in built]
    found += [Model.of("cached", str(file), directory) for directory, file in _file_directories()]
    for folder in sorted(path for path in (user_cache_directory() / "models").glob("*") if path.is_dir()):
        for directory in _cached_directories(folder):
            source = directory.source
            assert source is not None
            found.append(Model.of("cached", str(HubName(source.repository, source.file)), directory))
        for download in Record.read(folder).downloads:
            blobs = {path for name in download.files if (path := download.blob(name)).is_file()}
            size = sum(path.stat().st_size for path in blobs - counted)
            counted |= blobs
            name = str(HubName(download.repository, download.gguf))
            known = {(each.name, each.commit) for each in found if each.kind == "downloaded"}
            if blobs and (name, download.commit) not in known:  # a file may have been named, and a tag of it
                found.append(Model("downloaded", name, download.folder, size, download.commit))
    return found


def gguf_file(directory: EngineDirectory) -> Path | None:
    """The (first) GGUF file of one's own that a directory links to, which may be gone; None for another directory."""
    links = (path for file in directory.weight_files if (path := directory.path / file).is_symlink())
    found = next((path.resolve() for path in links if path.name.endswith(".gguf")), None)
    return None if directory.source is not None else found


def _file_directories() -> list[tuple[EngineDirectory, Path]]:
    """The directories in the cache that were made of GGUF files, each with its file."""
    return [(each, gguf_file(each) or each.path) for each in _directories_in(file_folder())]


def existing_directory(model: str | Path) -> Path:
    """The directory of a model that is there, be it a path or a name, of several that of the commit which the name
    opens. Raises HubError where there is none of a name, or there are several."""
    name = HubName.of(model)
    if name is None:
        return local_directory(model)  # of a GGUF file one that is made of it
    folder = repository_folder(name.repository)
    found, commit = _cached_directories(folder, name.file), Record.read(folder).revisions.get(name.revision)
    found = [each for each in found if each.source and each.source.commit == commit] or found
    if len(found) == 1:
        return found[0].path
    if not found:
        makes_one = f"edgellm chat {name} makes one, as do the others that ask it"
        raise HubError(f"there is no directory of {name} yet: {makes_one}")
    listed = "".join(f"\n  {each.path}" for each in found)
    raise HubError(f"there are {len(found)} directories of {name}, of several commits or builds: name one.{listed}")


def remember_built(path: Path) -> None:
    """Note that an engine directory was built there, for `models`, and so that `remove` leaves what it links to; where
    the cache cannot be written it is not. A damaged list stays beside the new one."""
    place = user_cache_directory() / "models" / _BUILT_NAME
    with locked(place.parent), suppress(OSError):  # what builds at the same time is not forgotten
        known, is_damaged = _built_list(place)
        if is_damaged:
            place.replace(place.with_name(f"{_BUILT_NAME}.damaged"))
        texts = map(str, dict.fromkeys([*known, resolved(path)]))
        write_atomically(place, json.dumps(list(texts), indent=1).encode())


def built_directories() -> list[Path]:
    """Where engine directories were built by command, as far as they are still there."""
    return _built_list(user_cache_directory() / "models" / _BUILT_NAME)[0]


def _built_list(place: Path) -> tuple[list[Path], bool]:
    """The directories of `built_directories` that a file names, and whether it is damaged, which is logged."""
    found, damage = dict[Path, None](), ""
    try:
        stored = json.loads(place.read_bytes())
        for each in stored if isinstance(stored, list) else [stored]:
            try:
                found[resolved(Path(each))] = None
            except (TypeError, ValueError):  # ValueError: a null character, or half of a surrogate pair
                damage = f"{shown(each)} is no path"
    except (OSError, ValueError, RecursionError) as error:
        damage = "" if isinstance(error, FileNotFoundError) else str(error)
    if damage:
        logger.warning("%s is damaged (%s): what was built may be missing, the next build keeps it", place, damage)
    return [path for path in found if (path / DESCRIPTION_NAME).is_file()], bool(damage)


@dataclass
class Removal:
    """What was removed, in bytes, and what was `left` because it is not of EdgeLLM's making, or is needed."""

    size: int = 0
    left: list[Path] = field(default_factory=list)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link. Raises OSError."""
        self.size += path.lstat().st_size
        path.unlink()


def remove_of_files(file: Path | None) -> dict[Path, Removal]:
    """Remove the directories in the cache that were made of a GGUF file, or of all that are gone (None): what was
    removed of each file. The file itself stays. Raises OSError."""
    found = dict[Path, Removal]()
    for directory, own in _file_directories():
        if own == file or (file is None and not own.exists()):
            with locked(file_folder()):
                _remove_directory(directory, found.setdefault(own, Removal()))
    return found


def remove(name: HubName, revision: str | None = None) -> Removal:
    """Remove the directories in the cache of a name (of its one file, where it names one) and what was downloaded for
    them: what was in the hub's cache before stays, and what a directory that was built by command links to. Of a
    `revision`, which may be the beginning of a commit, that alone. Raises HubError where there is nothing of it,
    OSError."""
    folder = repository_folder(name.repository)
    record, removal = Record.read(folder), Removal()
    named = ((each, name.file in ("", each.file) or stands_for(name.file, each.gguf)) for each in record.downloads)
    chosen = [each for each, is_named in named if is_named]
    directories = [(each, each.source.commit) for each in _cached_directories(folder, name.file) if each.source]
    if revision is not None:
        wanted = record.revisions.get(revision, revision)
        there = {commit for _, commit in directories} | {each.commit for each in chosen}
        commits = {commit for commit in there if commit.startswith(wanted)}
        if there and len(commits) != 1:
            found = "more than one" if commits else "nothing"
            advice = f"name one of {', '.join(sorted(commits or there))}"
            raise HubError(f"there is {found} of {name} at {revision}: {advice}")
        directories = [(each, commit) for each, commit in directories if commit in commits]
        chosen = [each for each in chosen if each.commit in commits]
    if not chosen and not directories:
        known = sorted({each.name for each in models() if each.kind != "built"})
        hint = did_you_mean(str(name), known) if known else ": nothing was downloaded"
        raise HubError(f"there is nothing of {name}{hint}")
    with locked(folder):
        for directory, _ in directories:
            _remove_directory(directory, removal)
        kept = tuple(_with_blobs_of(chosen, each) for each in record.downloads if each not in chosen)
        _remove_downloads(chosen, kept, removal)
        left = {each.commit for each in kept}
        kept += tuple(each for each in chosen if not {*removal.left}.isdisjoint(map(each.blob, each.files)))
        if kept:
            revisions = {key: commit for key, commit in record.revisions.items() if commit in left}
            replace(record, revisions=revisions, downloads=kept).write(folder)
        elif not _cached_directories(folder):
            (folder / RECORD_NAME).unlink(missing_ok=True)
            (folder / LOCK_NAME).unlink(missing_ok=True)
            removal.left += [path for path in folder.iterdir() if path not in {each.path for each, _ in directories}]
            _remove_empty(folder)
    return removal


def _remove_directory(directory: EngineDirectory, removal: Removal) -> None:
    """Remove the files that an engine directory describes, its plans and kernels, and the folders then empty."""
    known = {DESCRIPTION_NAME, *directory.files}
    known |= {f"{folder}/{file}" for folder, files in directory.part_files.items() for file in files}
    for place, folders, files in os.walk(directory.path, topdown=False):
        for path in (Path(place) / file for file in files):
            relative = path.relative_to(directory.path)
            is_made = relative.parts[0] in (_PLANS_FOLDER, KERNELS_FOLDER) and path.suffix in _MADE_ENDINGS
            if is_made or relative.as_posix() in known:
                removal.unlink(path)
            else:
                removal.left.append(path)
        removal.left += [path for each in folders if (path := Path(place) / each).is_symlink()]
        with suppress(OSError):
            Path(place).rmdir()


def _with_blobs_of(removed: list[Download], kept: Download) -> Download:
    """A download to which contents that came with removed ones, and that it needs too, are left."""
    left = {(each.storage, file.digest) for each in removed for file in each.files.values() if file.blob}
    files = {
        name: replace(file, blob=file.blob or (kept.storage, file.digest) in left) for name, file in kept.files.items()
    }
    return replace(kept, files=files)


def _remove_downloads(chosen: list[Download], kept: tuple[Download, ...], removal: Removal) -> None:
    """Remove the links and contents of downloads in the hub's cache that nothing else needs."""
    stay = {each.folder / file for each in kept for file in each.files}
    for download in chosen:
        for file, found in download.files.items():
            link, blob = download.folder / file, download.blob(file)
            if found.link and link not in stay and link.is_symlink() and link.resolve() == blob.resolve():
                removal.unlink(link)
    needed = {path.resolve() for each in built_directories() for path in each.rglob("*") if path.is_symlink()}
    for download in chosen:
        linked = {path.resolve() for path in (download.storage / "snapshots").rglob("*") if path.is_symlink()}
        for file, found in download.files.items():
            blob = download.blob(file)
            if found.blob and found.digest:  # what downloads left that were killed
                for part in blob.parent.glob(f"{found.digest}*.incomplete"):
                    removal.unlink(part)
            if not found.blob or not blob.is_file() or blob.resolve() in linked:
                continue
            if blob.resolve() in needed:
                removal.left.append(blob)
                continue
            removal.unlink(blob)
            locks = download.storage.parent / ".locks" / download.storage.name
            (locks / f"{blob.name}.lock").unlink(missing_ok=True)
            _remove_empty(locks)
        _remove_empty(download.storage / "snapshots")
        for ref in (path for path in (download.storage / "refs").rglob("*") if path.is_file()):
            if not download.folder.exists() and ref.read_bytes().strip() == download.commit.encode():
                removal.unlink(ref)
        _remove_empty(download.storage)


def _remove_empty(folder: Path) -> None:
    """Remove folders without files, from the innermost on."""
    for place, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            Path(place).rmdir()


def _cached_directories(folder: Path, file: str = "") -> list[EngineDirectory]:
    """The engine directories in a repository's folder that were made for a name, of this GGUF file ("": of any)."""
    found = [(each, each.source) for each in _directories_in(folder)]
    own = [(each, source) for each, source in found if source and repository_folder(source.repository) == folder]
    return [each for each, source in own if not file or stands_for(file, source.file)]


def _directories_in(folder: Path) -> list[EngineDirectory]:
    """The engine directories in a folder, not those that are linked there."""
    found = (_described(path) for path in sorted(folder.glob("*")) if not path.is_symlink())
    return [each for each in found if each is not None]


def _described(path: Path) -> EngineDirectory | None:
    with suppress(EngineDirectoryError):
        return EngineDirectory.read(path) if (path / DESCRIPTION_NAME).is_file() else None
    return None


def _own_bytes(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file() and not each.is_symlink())
