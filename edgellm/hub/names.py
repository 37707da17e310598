"""Names of models on the hub, and which files of a repository one stands for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from edgellm.engines.checkpoints.weight_files import HUB_NAME, INDEX_FILE, PICKLE_ENDINGS, SINGLE_FILE
from edgellm.engines.directories.engine_directory import PUBLISHED_FILES
from edgellm.engines.directories.engine_parts import is_template_name
from edgellm.errors import HubError
from edgellm.kernels.gpu import find_gpu
from edgellm.kernels.user_paths import printable

#: What a model may take of a device's memory: the rest is for KV rows, buffers and other programs.
_SHARE = 0.8
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NAME = re.compile(rf"(?P<repository>{HUB_NAME})(:(?P<file>\w[\w./+ -]*))?", re.ASCII)
#: An address as browsers show it, or without its scheme; a path has one slash of two.
_ADDRESS = re.compile(r"(?P<scheme>https?:/{1,2})?(?P<host>[\w.-]+(:\d+)?)/+(?P<rest>[^?#]*)([?#].*)?", re.ASCII)
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
#: What stands before a revision in an address.
_BEFORE_REVISIONS = ("tree", "blob", "resolve", "raw", "commit")


@dataclass(frozen=True)
class HubName:
    """A `repository` ORG/NAME at a `revision` (branch, tag, commit), and the GGUF `file` or what `stands_for` it, or
    ""."""

    repository: str
    file: str = ""
    revision: str = "main"

    @classmethod
    def of(cls, model: str | Path, revision: str | None = None, folder: Path | None = None) -> HubName | None:
        """The name that a text is; None for a path: for what exists, below `folder` (None: the present one) where it is
        relative, and for what may be one, as ORG is a folder there and no revision is named. Raises HubError as
        `parse`."""
        path = (folder or Path()) / model
        if os.path.lexists(path):
            return None
        name = cls.parse(model)
        if name is None:
            return None
        may_be_path = revision is None and _behind_host(str(model)) is None
        is_beside = may_be_path and os.path.lexists((folder or Path()) / name.repository.split("/")[0])
        return None if is_beside else replace(name, revision=revision or name.revision)

    @classmethod
    def parse(cls, text: str | Path) -> HubName | None:
        """The name that a text is if nothing of it is here, or an address of the hub; None where it is of another form.
        HubError, which says what to write, for an address of something else than a model or a GGUF file."""
        if (behind := _behind_host(str(text))) is not None:
            repository, verb, revision, file = _parts(behind)
            name = cls.parse(repository)
            is_file, is_whole = file.endswith(".gguf") and verb != "tree", not file and verb in ("", "tree", "commit")
            if name is None or not (is_file or is_whole) or (file and name.file):
                own = "ORG/NAME" if name is None else name.repository
                raise HubError(f"{text} is no address of a model, or of a GGUF file. Write {own}, or {own}:FILE.gguf")
            return replace(name, file=first_part(file) or name.file, revision=revision or "main")
        match = _NAME.fullmatch(str(text))
        if match is None or ".." in str(text).split("/") or "--" in match["repository"]:
            return None
        file = match["file"] or ""
        return cls(match["repository"], "" if file == "latest" else file)

    def __str__(self) -> str:
        return f"{self.repository}:{self.file}" if self.file else self.repository


def first_part(file: str) -> str:
    """The name of the first of the files that a split model has; another name as it is."""
    return _PART.sub(r"\1-00001-of-\3.gguf", file)


def _behind_host(text: str) -> str | None:
    """What an address of the hub, or of what HF_ENDPOINT puts in its place, says behind the host; None for any other
    text. Raises HubError for an address elsewhere."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return None
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc
    if match["host"] in (*_HOSTS, endpoint):
        return match["rest"].strip("/")
    if match["scheme"]:
        raise HubError(f"{text} is no address of the hub (HF_ENDPOINT names another one). Write ORG/NAME, or a path")
    return None


def _parts(address: str) -> tuple[str, str, str, str]:
    """ORG/NAME, what stands before a revision, the revision, and the file or folder, each "" where there is none."""
    org, name, verb, revision, *file = [*map(unquote, address.split("/")), "", "", ""]
    path = "/".join(filter(None, file))
    known = verb in _BEFORE_REVISIONS and revision and ".." not in file
    return (f"{org}/{name}", verb, revision, path) if known or not verb else ("", "", "", "")


def stands_for(file: str, model: str) -> bool:
    """Whether a name, or a tag as in Q4_K_M, stands for a GGUF file. As llama.cpp has it the tag is in the name, in
    whatever case, before "-" or ".", or it is that of a folder; but F16 is not in BF16."""
    return file == model or re.search(rf"(^|[._/-]){re.escape(file)}[./-]", model, re.IGNORECASE) is not None


def chosen_files(name: HubName, sizes: Mapping[str, int], shards: Callable[[], Sequence[str]]) -> list[str]:
    """Which of a repository's files, whose `sizes` are in bytes, the name stands for: weights in safetensors with
    what is published beside them, or one model, or a vision encoder that is named, in GGUF. `shards` gives the files
    that the index of several names. Raises HubError where there is no such model, or where there are several to
    choose from."""
    if not name.file and (SINGLE_FILE in sizes or INDEX_FILE in sizes):
        weights = [SINGLE_FILE] if SINGLE_FILE in sizes else [INDEX_FILE, *shards()]
        _require_all(name, weights, sizes)
        return [*filter(lambda file: file in PUBLISHED_FILES or is_template_name(file), sorted(sizes)), *weights]
    if name.file in sizes and _is_encoder(name.file):
        return [name.file]
    models = _gguf_models(sizes)
    if name.file:
        tagged = (model for model in sorted(models) if stands_for(name.file, model))
        first = name.file if name.file in models else next(tagged, None)
        if first is None:
            found = _listed(models, sizes) if models else " It has no GGUF file"
            raise HubError(f"{name.repository} has no model {printable(name.file)}.{found}")
        chosen = first
    elif len(models) == 1:
        (chosen,) = models
    elif models:
        example = min(models, key=lambda model: _bytes(models[model], sizes))
        raise HubError(
            f"{name.repository} has {len(models)} GGUF files: name one, as in {name.repository}:{example}."
            f"{_listed(models, sizes)}"
        )
    else:
        raise _no_model(name, sizes)
    _require_all(name, models[chosen], sizes)
    return models[chosen]


def _require_all(name: HubName, files: Sequence[str], sizes: Mapping[str, int]) -> None:
    if missing := [file for file in files if file not in sizes]:
        raise HubError(
            f"{name.repository} at {name.revision} lacks {len(missing)} of the {len(files)} files of its weights: "
            f"{', '.join(map(printable, missing[:5]))}. Take another --revision, or ask its owners"
        )


def _gguf_models(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The files of each model in GGUF by the first one's name, without encoders (mmproj) and matrices (imatrix)."""
    models: dict[str, list[str]] = {}
    for file in sizes:
        part = _PART.fullmatch(file)
        *folders, last = file.split("/")
        is_later = part is not None and int(part[2]) != 1
        is_other = _is_encoder(file) or "imatrix" in last.lower()
        if not file.endswith(".gguf") or is_other or is_later or {"", ".", ".."} & {*folders}:
            continue
        count = int(part[3]) if part else 0
        models[file] = [f"{part[1]}-{n + 1:05d}-of-{part[3]}.gguf" for n in range(count)] if part else [file]
    return models


def _is_encoder(file: str) -> bool:
    return file.endswith(".gguf") and "mmproj" in file.rpartition("/")[2]


def encoders_beside(model: str, files: Iterable[str]) -> tuple[str, ...]:
    """The vision encoders in GGUF in the folder of a model's file, by their names."""
    folder = model.rpartition("/")[0]
    return tuple(sorted(file for file in files if _is_encoder(file) and file.rpartition("/")[0] == folder))


def _bytes(files: Sequence[str], sizes: Mapping[str, int]) -> int:
    return sum(sizes.get(file, 0) for file in files)


def _listed(models: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> str:
    """Lines for models in GGUF, the smallest first: size, and whether the memory here holds it."""
    gpu = find_gpu()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if gpu is None else gpu.total_memory
    where = f"{'this machine' if gpu is None else gpu.name} ({memory / 2**30:.1f} GiB)"
    text = f" Beside the memory of {where}:"
    for model, files in sorted(models.items(), key=lambda item: _bytes(item[1], sizes)):
        size = _bytes(files, sizes)
        fits = "fits" if size <= _SHARE * memory else "does not fit"
        text += f"\n  {size / 2**20:>10,.1f} MiB  {fits:<12}  {printable(model)}"
    return text


def _no_model(name: HubName, sizes: Mapping[str, int]) -> HubError:
    pickled = [file for file in sizes if file.endswith(PICKLE_ENDINGS)]
    others = [file for file in sizes if file.endswith(".safetensors")]
    start = f"{name.repository} has neither {SINGLE_FILE} nor {INDEX_FILE} nor a GGUF file"
    if pickled and not others:
        return HubError(
            f"{start}, only pickled weights ({', '.join(map(printable, pickled[:3]))}), which are not downloaded. hf "
            f"download {name.repository} --local-dir DIR brings them, edgellm convert DIR NEW_DIR makes safetensors of "
            "them without running what they say"
        )
    found = f"it has {', '.join(map(printable, others[:5]))}" if others else "and no other weights"
    return HubError(f"{start}; {found}. Name the repository of a model in the layout of transformers, or in GGUF")
