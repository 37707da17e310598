"""Settings: the package's defaults, under the user's YAML file, under the command line."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import typer

from edgellm.commands import options
from edgellm.commands.console import progress_display
from edgellm.commands.descriptions import named_directories
from edgellm.commands.table import options_of
from edgellm.engines.formats.small_files import SETTINGS_BYTES, read_text
from edgellm.engines.formats.strict_formats import parse_yaml
from edgellm.errors import RequestError, SettingsError, did_you_mean
from edgellm.kernels.gpu import choose_gpu
from edgellm.kernels.user_paths import printable, user_folder, user_path
from edgellm.sampling_params import SamplingParams, checked_value
from edgellm.snapshots.staging import is_snapshot_path

_ASKED_FOR_ONE_BY_ONE = ("logprobs", "structure", "logit_bias", "allowed_token_ids", "bad_words")
#: How answers are drawn and when they end.
SAMPLING_KEYS = tuple(item.name for item in fields(SamplingParams) if item.name not in _ASKED_FOR_ONE_BY_ONE)


class _Shared(
    options.ModelOption,
    options.ComputingOptions,
    options.PromptOptions,
    options.SystemCacheOptions,
    options.AdapterOptions,
    options.ChatOutputOptions,
    options.HostMemoryOptions,
):
    """Options that are settings, too."""


@dataclass(frozen=True)
class Settings:
    """All settings; `configs/defaults.yaml` says what each means. `sampling` holds only what a file sets.

    Paths are already resolved against the folder of their file where they were relative: `model` (unless it is a name
    on the hub), `chat_template` and the directories of `adapters`. `build` holds "revision" and how the directory of
    such a name is built (`edgellm.hub.directories.BUILD_OPTIONS`). `drafting` holds fields of `DraftingConfig`, "draft"
    (True: there must be a draft, False: none is used) and "preset".
    """

    model: Path | None = None
    backend: str = "auto"
    executor: str = "auto"
    gpu: int | None = None
    gpus: int = 1
    kv_cache: str | None = None
    system: str | None = None
    chat_template: Path | None = None
    system_cache: str | None = None
    adapter: str | None = None
    adapters: dict[str, Path] = field(default_factory=dict)
    history: bool = True
    stats: bool | None = None
    preemption_mib: int = 256
    states_mib: int = 256
    sampling: dict[str, Any] = field(default_factory=dict)
    drafting: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)

    @property
    def computing(self) -> dict[str, Any]:
        """What computes, as arguments of `LLM` and `AsyncLLM`."""
        return {name: getattr(self, name) for name in ("backend", "executor", "gpu", "gpus", "kv_cache")}


_KEYS = tuple(item.name for item in fields(Settings))


def load_settings(path: str | Path | None = None) -> Settings:
    """The settings of the file `path` or, without one, of the user's own where there is one, over the defaults. Raises
    SettingsError that names file and key."""
    found = user_folder("XDG_CONFIG_HOME", ".config") / "config.yaml" if path is None else user_path(path)
    if path is None and not found.exists():
        return Settings()
    text = read_text(found, SETTINGS_BYTES, SettingsError, "the settings file", takes_pipes=True)
    origin = printable(found)
    values = parse_yaml(text, f"the settings file {origin}", SettingsError)
    if not isinstance(values, (dict, type(None))):
        raise SettingsError(f"the settings file {origin} holds a {type(values).__name__}: expected keys and values")
    for key in values or {}:
        _require_setting(key, origin)
    return Settings(**{key: _checked(key, value, origin, found.parent) for key, value in (values or {}).items()})


def _require_setting(key: Any, origin: str) -> None:
    """Raise SettingsError for a key that is no setting, which says to which section one of that name belongs."""
    if key in _KEYS:
        return
    from edgellm.drafting.config import DRAFTING_KEYS
    from edgellm.hub.directories import BUILD_OPTIONS

    named = (("sampling", SAMPLING_KEYS), ("drafting", DRAFTING_KEYS), ("build", ("revision", *BUILD_OPTIONS)))
    within = {name: section for section, names in named for name in names}
    if section := within.get(key):
        raise SettingsError(f"{origin} has {key} outside its section: expected it as in {section}: {{{key}: ...}}")
    raise SettingsError(f"{origin} has the unknown key {str(key)!r}{did_you_mean(str(key), _KEYS, within)}")


def _known(key: Any, known: tuple[str, ...], origin: str) -> str:
    if key not in known:
        raise SettingsError(f"{origin} has the unknown key {str(key)!r}{did_you_mean(str(key), known)}")
    return key


def _checked(key: str, value: Any, origin: str, folder: Path) -> Any:
    """The value of a key in a file, which is called `origin` and lies in `folder`. Raises SettingsError."""
    if key in ("build", "sampling", "drafting", "adapters"):
        if not isinstance(value, (dict, type(None))):
            expected = "names and directories" if key == "adapters" else "keys and values"
            raise SettingsError(f"{origin}: {key} is {value!r}: expected {expected}")
        try:
            return _section(key, value or {}, f"{key} in {origin}", folder)
        except RequestError as error:
            raise SettingsError(f"{key} in {origin}: {error}") from error
    described, takes_null = options_of(_Shared)[key], getattr(Settings, key) is None
    if value is None and takes_null:
        return None
    if not described.allows(value):
        expected = described.in_words(value) + (", or null" if takes_null else "")
        raise SettingsError(f"{origin}: {key} is {value!r}: expected {expected}")
    if key == "system_cache" and is_snapshot_path(value) and (folder / user_path(value)).exists():
        return str(folder / user_path(value))
    if described.type is not Path:
        return value
    if key == "model":
        from edgellm.hub.names import HubName

        if HubName.of(value, folder=folder) is not None:
            return Path(value)
    return folder / user_path(value)


def _section(section: str, values: dict[Any, Any], place: str, folder: Path) -> dict[str, Any]:
    """The values of a key that have keys themselves. Raises RequestError, SettingsError."""
    if section == "sampling":
        return {_known(key, SAMPLING_KEYS, place): checked_value(key, value) for key, value in values.items()}
    if section == "drafting":
        from edgellm.drafting.config import checked_drafting  # it takes longer to load than all else here

        return checked_drafting(values, folder)
    if section == "adapters":
        for name, directory in values.items():
            if not all(isinstance(text, str) and text.strip() and "\0" not in text for text in (name, directory)):
                expected = "expected a name and a directory, without a null character"
                raise RequestError(f"{name!r} is {directory!r}: {expected}")
        return {name: folder / user_path(directory) for name, directory in values.items()}
    from edgellm.hub.directories import BUILD_OPTIONS, checked_options

    own = {_known(key, ("revision", *BUILD_OPTIONS), place): value for key, value in values.items()}
    revision = own.pop("revision", None)
    if not isinstance(revision, (str, type(None))):
        raise RequestError(f"revision is {revision!r}: expected the name of a branch or tag, or a commit, as text")
    return checked_options(own) | ({} if revision is None else {"revision": revision})


def chosen_settings(given: Any) -> Settings:
    """The settings file with a command's options on top; what contradicts itself is a usage error. A `model` that is a
    name on the hub becomes its directory, which is made where it is not there."""
    settings = load_settings(given.config)
    chosen: dict[str, Any] = {key: getattr(given, key, None) for key in _KEYS}
    chosen["model"] = given.chosen_model()
    if isinstance(given, options.PromptOptions):
        chosen["system"] = given.system_prompt()
    if isinstance(given, options.LoraOption):
        chosen["adapters"] = settings.adapters | named_directories(given.lora or ())
    if isinstance(given, options.DraftingOptions):
        chosen["drafting"] = given.applied_to(settings.drafting)
    if isinstance(given, options.SamplingOptions):
        chosen["sampling"] = settings.sampling | given.given(options.SamplingOptions)
    for key in ("adapter", "system_cache"):
        if getattr(given, f"no_{key}", False):
            if chosen[key] is not None:
                flag = key.replace("_", "-")
                raise typer.BadParameter(f"--{flag} is given, and so is --no-{flag}: expected only one of them")
            settings = replace(settings, **{key: None})  # type: ignore[arg-type]
    settings = replace(settings, **{key: value for key, value in chosen.items() if value is not None})
    choose_gpu(None if settings.backend == "numpy" else settings.gpu)
    return _with_directory(settings, given) if isinstance(given, options.NamedModelOptions) else settings


def _with_directory(settings: Settings, given: options.NamedModelOptions) -> Settings:
    """The settings with the directory of a model that has a name on the hub; a usage error for its options without."""
    revision = given.revision or settings.build.get("revision")
    own = given.build_arguments()
    if settings.model is not None:
        from edgellm.engines.checkpoints.weight_files import is_gguf_file
        from edgellm.hub.names import HubName

        is_name = HubName.of(settings.model, revision) is not None
        if is_name or is_gguf_file(settings.model):
            from edgellm.hub.directories import local_directory

            revision = revision if is_name else given.revision
            build = {key: value for key, value in settings.build.items() if key != "revision"} | own
            adapters = settings.adapters.values()
            with progress_display() as display:
                path = local_directory(settings.model, revision, given.update, build, display, adapters)
            return replace(settings, model=path)
    named = [*own, *(["revision"] if given.revision else []), *(["update"] if given.update else [])]
    if named:
        flag = "draft-checkpoint" if named[0] == "draft" else named[0].replace("_", "-")
        model = settings.model or "the shipped model"
        what = "it is for a model that is named as on the hub, ORG/NAME, or in GGUF"
        raise typer.BadParameter(f"{what}: {model} is opened as it was built", param_hint=f"--{flag}")
    return settings
