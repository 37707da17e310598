"""Downloads from the hub into its own cache, verified, and the record of them: later starts ask nobody.

`huggingface_hub` asks and downloads, with its cache (`HF_HOME`), token, endpoint (`HF_ENDPOINT`) and offline mode
(`HF_HUB_OFFLINE`); it is loaded where something is asked for or missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.engines.checkpoints.weight_files import INDEX_FILE, read_index
from edgellm.engines.checkpoints.weights import counted
from edgellm.engines.directories.description import ModelSource
from edgellm.engines.errors import explained
from edgellm.engines.formats.digests import current_digest
from edgellm.engines.formats.small_files import ordinary_bytes
from edgellm.engines.formats.staged_directory import check_space
from edgellm.errors import EdgeLLMError, HubError
from edgellm.hub.names import HubName, chosen_files, encoders_beside
from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.compilations import usable_cores
from edgellm.kernels.user_paths import user_cache_directory

if TYPE_CHECKING:
    from huggingface_hub import HfApi

#: `progress(stage, done, total)`, as of a build; the stages here are "asking the hub", and "download", in bytes.
Progress = Callable[[str, int, int], None]
RECORD_NAME = "downloads.json"
_RECORD_BYTES = 16 << 20
#: Git's digest of a file, or the SHA-256 of a large one: by it the hub's cache names what a file holds.
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class HubFile:
    """A file of a commit: bytes, digest (SHA-256 in 64 hexadecimal digits, or git's SHA-1 in 40; "": unknown), and what
    of it was not in the hub's cache before: its name there (`link`), its content (`blob`)."""

    size: int
    digest: str
    link: bool = False
    blob: bool = False


@dataclass(frozen=True)
class Download:
    """Files of a `repository` at a `commit`, by name, which a `file` (a GGUF file that was named, or "") stands for;
    `storage` is the repository's folder in the hub's cache. `encoders` are the vision encoders in GGUF beside it."""

    repository: str
    commit: str
    file: str
    storage: Path
    files: Mapping[str, HubFile]
    encoders: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the files lie under their names: links to their contents."""
        return self.storage / "snapshots" / self.commit

    @property
    def path(self) -> Path:
        """The checkpoint: a directory, or the (first) file in GGUF."""
        return self.folder / self.gguf if self.gguf else self.folder

    @property
    def gguf(self) -> str:
        """The name of the (first) file in GGUF, or ""."""
        return next((file for file in sorted(self.files) if file.endswith(".gguf")), "")

    def blob(self, file: str) -> Path:
        return self.storage / "blobs" / self.files[file].digest

    def missing(self) -> dict[str, HubFile]:
        """The files that are not there in their length."""
        return {name: file for name, file in self.files.items() if _size(self.folder / name) != file.size}

    def source(self, revision: str) -> ModelSource:
        """What an engine directory made of it records."""
        return ModelSource(self.repository, revision, self.commit, self.gguf)


@dataclass(frozen=True)
class Record:
    """What is known of a repository here: the commits of revisions that were asked for, and the downloads."""

    revisions: Mapping[str, str]
    downloads: tuple[Download, ...]

    @classmethod
    def read(cls, folder: Path) -> Record:
        """The record in a folder; one that is not there, or cannot be read, knows nothing."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            values = json.loads(ordinary_bytes(folder / RECORD_NAME, _RECORD_BYTES))
            downloads = []
            for each in values["downloads"]:
                files = {str(name): HubFile(**file) for name, file in each["files"].items()}
                place = each["repository"], each["commit"], each["file"], Path(each["storage"])
                downloads.append(Download(*place, files, tuple(map(str, each.get("encoders", ())))))
            return cls({str(key): str(value) for key, value in values["revisions"].items()}, tuple(downloads))
        return cls({}, ())

    def write(self, folder: Path) -> None:
        """Write the record into a folder, which is made. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        downloads = [{**asdict(each), "storage": str(each.storage)} for each in self.downloads]
        values = {"revisions": dict(self.revisions), "downloads": downloads}
        write_atomically(folder / RECORD_NAME, (json.dumps(values, indent=1) + "\n").encode())

    def find(self, commit: str | None, file: str) -> Download | None:
        """What a file of a commit stands for, where it was downloaded."""
        return next((each for each in self.downloads if (each.commit, each.file) == (commit, file)), None)


def repository_folder(repository: str) -> Path:
    """Where the record of a repository lies, and the directories made of it, in the user's cache."""
    return user_cache_directory() / "models" / repository.replace("/", "--")


def fetch(name: HubName, update: bool = False, progress: Progress = lambda stage, done, total: None) -> Download:
    """The files of a name, downloaded where they are missing, each as its digest says. The hub is asked for the commit
    of a revision once, and again with `update`. Raises HubError, and CheckpointError for an index of weights that is
    wrong."""
    folder = repository_folder(name.repository)
    record = Record.read(folder)
    commit = None if update else record.revisions.get(name.revision)
    found = record.find(commit, name.file)
    if found is not None and not found.missing():
        return found
    from huggingface_hub import HfApi

    api = HfApi(library_name="edgellm")
    with _explained(name, api):
        if found is None:
            found = _asked(name, commit or name.revision, api, progress)
        known = record.find(found.commit, found.file)
        found = _with_what_is_missing(found if known is None else known)
        others = tuple(each for each in record.downloads if (each.commit, each.file) != (found.commit, found.file))
        record = Record({**record.revisions, name.revision: found.commit}, (*others, found))
        with explained(f"{folder} cannot be written", HubError, ". Take another EDGELLM_CACHE_DIR"):
            record.write(folder)  # what is left of an interrupted one is known, too
        _download(found, api, progress)
        _note_revision(found, name.revision)
    return found


def _note_revision(download: Download, revision: str) -> None:
    """Note a revision's commit where programs look for it in the hub's cache that ask nobody."""
    refs = download.storage / "refs"
    ref = refs / revision
    if revision != download.commit and ref.is_relative_to(refs) and ".." not in ref.parts:
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ref, download.commit.encode())


def _asked(name: HubName, revision: str, api: HfApi, progress: Progress) -> Download:
    """The files that the name stands for at a revision, as the hub says now or, offline, as its cache has them."""
    from huggingface_hub import constants

    storage = Path(constants.HF_HUB_CACHE).absolute() / f"models--{name.repository.replace('/', '--')}"
    if constants.is_offline_mode():
        commit, files = _in_cache(name, revision, storage)
    else:
        progress("asking the hub", 0, 1)  # which takes half a minute where nobody answers
        info = api.model_info(name.repository, revision=revision, files_metadata=True)
        progress("asking the hub", 1, 1)
        listed = {each.rfilename: each for each in info.siblings or ()}
        files = {
            file: HubFile(each.size or 0, each.lfs.sha256 if each.lfs else each.blob_id or "")
            for file, each in listed.items()
        }
        commit = info.sha or ""
        if not all(map(_DIGEST.fullmatch, (commit, *(file.digest for file in files.values())))):
            raise HubError(f"what {api.endpoint} says of {name.repository} is no commit with digests: it is no hub")
    whole = _with_what_is_missing(Download(name.repository, commit, name.file, storage, files))

    def shards() -> list[str]:
        index = replace(whole, files={INDEX_FILE: whole.files[INDEX_FILE]})
        _download(index, api, lambda stage, done, total: None)
        return sorted(set(read_index(index.folder / INDEX_FILE).get("weight_map", "dict").values()))

    chosen = chosen_files(name, {file: each.size for file, each in files.items()}, shards)
    own = {file: whole.files[file] for file in chosen}
    return replace(whole, files=own, encoders=encoders_beside(chosen[0], files))


def _in_cache(name: HubName, revision: str, storage: Path) -> tuple[str, dict[str, HubFile]]:
    """The commit of a revision and the files of it that the hub's cache has."""
    commit = revision
    with suppress(OSError):
        commit = (storage / "refs" / revision).read_text(encoding="ascii").strip()
    folder = storage / "snapshots" / commit
    if not folder.is_dir():
        raise HubError(
            f"{name.repository} at {revision} is not in the hub's cache ({storage}), and HF_HUB_OFFLINE forbids to "
            "ask: unset it, or copy the cache from where the model was downloaded"
        )
    files = {}
    for path in folder.rglob("*"):
        if path.is_file():
            digest = path.resolve().name
            known = digest if _DIGEST.fullmatch(digest) else ""
            files[path.relative_to(folder).as_posix()] = HubFile(path.stat().st_size, known)
    return commit, files


def _with_what_is_missing(download: Download) -> Download:
    """The download with what of each file is not there yet, which is then made here."""
    files = {}
    for name, file in download.files.items():
        link, blob = not (download.folder / name).exists(), not download.blob(name).exists()
        files[name] = replace(file, link=file.link or link, blob=file.blob or blob)
    return replace(download, files=files)


def _download(download: Download, api: HfApi, progress: Progress) -> None:
    """Download what is missing, and compare every file with its size and digest."""
    from huggingface_hub import constants

    missing = download.missing()
    if missing and constants.is_offline_mode():
        raise HubError(
            f"{download.repository} lacks {', '.join(sorted(missing)[:5])} in the hub's cache ({download.folder}), and "
            "HF_HUB_OFFLINE forbids to ask: unset it"
        )
    for name in missing:  # one of another length is no file of this commit, and would be taken for it
        if download.files[name].link and (download.folder / name).exists():
            _remove(download, name)
    total = sum(file.size for name, file in missing.items() if not download.blob(name).exists())
    check_space(download.storage, total, HubError, f"{download.repository} in the hub's cache", " (HF_HOME)")
    advance = counted(total, partial(progress, "download"))
    for name in missing:
        api.hf_hub_download(download.repository, name, revision=download.commit, tqdm_class=_bar(advance))
    with ThreadPoolExecutor(min(usable_cores(), 4)) as pool:  # the hub's digests are of whole files
        list(pool.map(lambda item: _check(download, *item), download.files.items()))
    if missing:
        advance(total)


def _bar(advance: Callable[[int], None]) -> type[Any]:
    """A class of progress bars that show nothing and tell how many bytes came."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            advance(int(n or 0))

        def update_transfer(self, n: float) -> None:
            """Bytes on the network, which may be fewer than those of the file."""

    return Bar


def _check(download: Download, name: str, file: HubFile) -> None:
    """Raise HubError for a file that is not as the hub said; one that was downloaded is removed."""
    path = download.folder / name
    size = _size(path)
    found = "" if size != file.size else _digest(path, file.digest)
    if size == file.size and found == file.digest:
        return
    if file.link and file.blob:
        _remove(download, name)
        advice = "It was removed: try again, and if it comes again, tell the repository's owners"
    else:
        advice = f"It was in the hub's cache before: remove {path.resolve()} and {path}, and try again"
    was = f"{size:,} bytes" if size != file.size else f"the digest {found[:16]}..."
    expected = f"{file.size:,}" if size != file.size else f"{file.digest[:16]}..."
    raise HubError(f"{name} of {download.repository} has {was}, the hub said {expected}. {advice}")


def _digest(path: Path, expected: str) -> str:
    """The digest of a file, of the kind of the expected one: "" of none."""
    if len(expected) == 64:
        return current_digest(path, section=0).sha256
    if not expected:
        return ""
    from huggingface_hub.utils.sha import git_hash

    return git_hash(path.read_bytes())  # of a small file: of a large one the hub knows the SHA-256


def _remove(download: Download, name: str) -> None:
    (download.folder / name).unlink(missing_ok=True)
    download.blob(name).unlink(missing_ok=True)


def _size(path: Path) -> int:
    """Bytes of a file; -1 where there is none."""
    with suppress(OSError):
        return path.stat().st_size if path.is_file() else -1
    return -1


@contextmanager
def _explained(name: HubName, api: HfApi) -> Iterator[None]:
    """Raise what goes wrong with the hub as HubError, which says what to do."""
    from huggingface_hub import errors

    page = f"{api.endpoint}/{name.repository}"
    try:
        yield
    except EdgeLLMError:
        raise
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name.repository} is gated: its owners let in who has accepted their terms. Accept them at {page}, then "
            "log in with that account (hf auth login), or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{name.repository} is neither a path here nor, for you, a repository at {api.endpoint}: check the "
            "name. For a private one log in (hf auth login), or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{name.repository} has no revision {name.revision}: --revision takes a branch, a tag or a commit of {page}"
        ) from error
    except Exception as error:  # of whichever library carries it over the network
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 401:
            advice = "The token is refused (401): log in anew (hf auth login), or set another HF_TOKEN"
        else:
            advice = (
                "Try again: files that are whole are not downloaded twice. With HF_HUB_OFFLINE=1 what is in the hub's "
                "cache is taken"
            )
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
        reason = next(iter(str(cause).strip().splitlines()), "").rstrip(".") or type(cause).__name__
        raise HubError(f"{name.repository} was not loaded from {api.endpoint}: {reason}. {advice}") from error
