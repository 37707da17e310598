"""Engine directories in the user's cache of names on the hub and of GGUF files, made where one is opened."""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.engines.building.gguf_folder import NO_ENCODER, encoder_beside, read_metadata, several_encoders
from edgellm.engines.checkpoints.weight_files import is_gguf_file
from edgellm.engines.directories.description import ModelSource
from edgellm.engines.directories.engine_directory import EngineDirectory, file_folder
from edgellm.engines.errors import EngineDirectoryError
from edgellm.engines.formats.digests import hash_bytes
from edgellm.engines.formats.staged_directory import is_taken
from edgellm.engines.gguf.encoders import takes_images
from edgellm.engines.lora.adapter import adapter_rank
from edgellm.engines.model.config import MTP
from edgellm.engines.model.limits import LARGEST_LORA_RANK, LARGEST_LORA_SLOTS
from edgellm.errors import RequestError, did_you_mean, require
from edgellm.hub.downloads import Download, Progress, fetch, repository_folder
from edgellm.hub.names import HubName, first_part

if TYPE_CHECKING:
    from edgellm.engines.building.plans import BuildReport

logger = logging.getLogger("edgellm.hub")

_LIMITS = (
    *("max_batch", "prefill_chunk", "kv_capacity", "draft_top_k", "draft_steps", "verify_tree_size"),
    *("max_lora_rank", "lora_slots"),
)
#: What is handed on to a build as it is.
_KINDS = ("head", "embedding", "dtype", "draft_weights")
#: Arguments of a build that may be given where a name is opened; those that are no limits are texts.
BUILD_OPTIONS = (*_LIMITS, "kv_cache", *_KINDS, "draft", "tokenizer", "mmproj")
LOCK_NAME = ".lock"
#: How often a lock is tried whose folder others remove.
_TRIES = 100
_LONGEST_NAME = 160


def local_directory(
    model: str | Path,
    revision: str | None = None,
    update: bool = False,
    build: Mapping[str, Any] | None = None,
    progress: Progress = lambda stage, done, total: None,
    adapters: Iterable[str | Path] = (),
) -> Path:
    """The engine directory of a model: the path that it is or, of a GGUF file and of a name ORG/NAME or
    ORG/NAME:FILE.gguf on the hub, one in the user's cache, which is made where it is not there as the model is now.
    `build` are arguments of the build by name, of `BUILD_OPTIONS`, which a directory is of as of its commit; it takes
    the LoRA `adapters` in these directories. The hub is asked for what is not there, and with `update`. Raises
    HubError, RequestError for arguments that are wrong or, of a path, given at all, AdapterError, and what a build
    raises."""
    require(isinstance(revision, (str, type(None))), "revision", revision, "a branch, a tag or a commit, or None")
    require(isinstance(update, bool), "update", update, "True or False")
    options, name = checked_options({} if build is None else build), HubName.of(model, revision)
    is_file = name is None and is_gguf_file(Path(model))
    if is_file and (first := Path(first_part(str(model)))).exists():
        model = first  # of a model in several files there is one directory, whichever of them is named
    if name is None:
        _require_name(model, revision, update, () if is_file else options)
        if not is_file:
            return Path(model)
    if ranks := [adapter_rank(path) for path in adapters]:  # each adapter has a place of its own
        slots = min(LARGEST_LORA_SLOTS, len(ranks))
        options = {"max_lora_rank": min(LARGEST_LORA_RANK, max(ranks)), "lora_slots": slots} | options
    beside, named = _fetched(options, update, progress)
    folder = file_folder() if name is None else repository_folder(name.repository)
    with locked(folder):
        if name is None:
            place = os.path.realpath(model)  # by which a file is known
            source, origin, parts = Path(model), None, [f"{Path(place).stem}-{hash_bytes(os.fsencode(place))[:12]}"]
        else:
            download = fetch(name, update, progress)
            source, origin = download.path, download.source(name.revision)
            parts = [download.commit[:12], *filter(None, [download.gguf])]
        if "mmproj" not in options:
            encoder = encoder_beside(source) if name is None else _hub_encoder(download, progress)
            if encoder is not None:
                named["mmproj"], beside["mmproj"] = encoder.name, str(encoder.absolute())
        target = folder / _directory_name(parts, options | named)
        if not _is_usable(target):
            _build(str(model), source, target, options | beside, origin, progress)
    return target


def checkpoint_of(
    model: str | Path, revision: str | None, update: bool, progress: Progress, finds_encoder: bool = False
) -> tuple[Path, ModelSource | None]:
    """Where a checkpoint or a GGUF file lies, and its source (None: of a path); a name on the hub is downloaded, with
    the vision encoder beside a GGUF file where it `finds_encoder`. Raises as `local_directory`."""
    name = HubName.of(model, revision)
    if name is None:
        _require_name(model, revision, update)
        return Path(model), None
    with locked(repository_folder(name.repository)):
        download = fetch(name, update, progress)
        if finds_encoder:
            _hub_encoder(download, progress)
    return download.path, download.source(name.revision)


def _require_name(model: str | Path, revision: str | None, update: bool, options: Iterable[str] = ()) -> None:
    """Raise RequestError where something is given for a path that is for names alone."""
    if given := [*(["revision"] if revision else []), *(["update"] if update else []), *options]:
        raise RequestError(
            f"{', '.join(given)}: given for {model}, which is a path and is opened as it is. Expected a name as on the "
            "hub, ORG/NAME, or leave that out"
        )


def checked_options(build: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a build by name, of `BUILD_OPTIONS`, without those that are None. Raises RequestError."""
    require(isinstance(build, Mapping), "build", build, "arguments of a build by name, as in {'kv_capacity': 8192}")
    for option, value in build.items():
        if option not in BUILD_OPTIONS:
            raise RequestError(f"build has {option!r}{did_you_mean(str(option), BUILD_OPTIONS)}")
        is_number = isinstance(value, int) and not isinstance(value, bool)
        fits = value is None or (is_number if option in _LIMITS else isinstance(value, str))
        require(fits, f"build: {option}", value, "a whole number" if option in _LIMITS else "text")
    options = {option: value for option, value in build.items() if value is not None}
    if "tokenizer" in options:
        options["tokenizer"] = str(Path(options["tokenizer"]).absolute())
    return options


def _fetched(options: Mapping[str, Any], update: bool, progress: Progress) -> tuple[dict[str, str], dict[str, str]]:
    """What goes with a model, its draft and its vision encoder, as paths for the build, and as they name the directory;
    neither where there is none, or what is given is no file's name."""
    paths, named = dict[str, str](), dict[str, str]()
    for key, word in (("draft", MTP), ("mmproj", NO_ENCODER)):
        given = options.get(key)
        if given is not None and given != word:
            path, origin = checkpoint_of(given, None, update and HubName.of(given) is not None, progress)
            paths[key] = str(path.absolute())
            named[key] = paths[key] if origin is None else f"{given}@{origin.commit[:12]}"
    return paths, named


def _hub_encoder(download: Download, progress: Progress) -> Path | None:
    """The vision encoder beside a model in GGUF on the hub, downloaded; None where there is none, or the model is not
    known to take images. Raises BuildError where there are several, and as `fetch`."""
    if not (download.gguf and download.encoders) or not takes_images(read_metadata(download.path)):
        return None
    names = [HubName(download.repository, file, download.commit) for file in download.encoders]
    if len(names) > 1:
        raise several_encoders(download.path, [str(name) for name in names])
    return fetch(names[0], False, progress).path


def _directory_name(parts: Iterable[str], options: Mapping[str, Any]) -> str:
    """As in "0123456789ab,kv_capacity=8192"; what a name cannot hold is in a digest behind it."""
    whole = ",".join([*parts, *(f"{key}={options[key]}" for key in sorted(options))])
    name = re.sub(r"[^\w.,=@+-]", "-", whole, flags=re.ASCII)[:_LONGEST_NAME]
    return name if name == whole else f"{name}-{hash_bytes(whole.encode())[:8]}"


def _is_usable(target: Path) -> bool:
    try:
        EngineDirectory.open(target)
    except EngineDirectoryError:
        return False
    return True


def _build(
    model: str, source: Path, target: Path, options: Mapping[str, Any], origin: ModelSource | None, progress: Progress
) -> None:
    from edgellm.built import read_built  # what opening need not load
    from edgellm.engines.building.builder import build_engine_directory
    from edgellm.engines.building.gguf_folder import checkpoint_folder, draft_folder
    from edgellm.tool_calls.formats import checkpoint_format

    def check(path: Path, report: BuildReport) -> None:
        for note in read_built(path):  # of what cannot be used
            logger.warning("%s: %s", model, note)

    asked = {option: value for option, value in options.items() if option in (*_LIMITS, "kv_cache")}
    tokenizer = Path(options["tokenizer"]) if "tokenizer" in options else None
    with (
        checkpoint_folder(source, tokenizer, options.get("mmproj")) as folder,
        draft_folder(options.get("draft")) as draft,
    ):
        report = build_engine_directory(
            folder,
            target,
            limits=asked,
            weights="link",
            force=True,
            progress=progress,
            tool_format=checkpoint_format(folder, None),
            check=check,
            origin=origin,
            draft=draft,
            **{option: options[option] for option in _KINDS if option in options},
        )
    for note in report.notes:
        logger.info("%s: %s", model, note)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone with a repository's folder, among processes; where it cannot be written nobody changes it. It is removed
    where nothing was made in it, as of a name that is none."""
    descriptor, lock = _lock(folder), folder / LOCK_NAME
    if descriptor < 0:
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # where there are no locks, others may work in it
            if [*folder.iterdir()] == [lock] and not lock.stat().st_size:
                lock.unlink()
                folder.rmdir()
        os.close(descriptor)


def _lock(folder: Path) -> int:
    """The open lock of a folder, which this process has; -1 where there is none to be had."""
    for _ in range(_TRIES):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # another process removed the folder meanwhile
            continue
        except OSError:
            return -1
        if is_taken(descriptor):
            logger.warning("Another process prepares a model in %s: waiting for it", folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), (folder / LOCK_NAME).stat()):
                return descriptor
        os.close(descriptor)  # of a folder that was removed while this process waited
    return -1
