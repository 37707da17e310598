"""Settings from YAML files: packaged defaults, under the user's file, under the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from edgellm.engines.directories.small_files import SETTINGS_BYTES, read_text
from edgellm.engines.directories.strict_formats import parse_yaml
from edgellm.engines.model.limits import KV_CACHES
from edgellm.errors import RequestError, SettingsError, did_you_mean
from edgellm.kernels.user_paths import printable, user_folder, user_path
from edgellm.sampling_params import SamplingParams, checked_value
from edgellm.snapshots.staging import is_snapshot_path

BACKENDS = ("auto", "numpy", "tensorrt")
_ASKED_FOR_ONE_BY_ONE = ("logprobs", "structure", "logit_bias", "allowed_token_ids", "bad_words")
#: How answers are drawn and when they end.
SAMPLING_KEYS = tuple(item.name for item in fields(SamplingParams) if item.name not in _ASKED_FOR_ONE_BY_ONE)
DEFAULTS = "defaults.yaml"
#: MiB of the host for rows of answers that give way: the default, and the most that is taken.
PREEMPTION_MIB, MOST_PREEMPTION_MIB = 256, 1 << 20
#: The same for recurrent states at places of texts.
STATES_MIB, MOST_STATES_MIB = 256, 1 << 20
_PATHS = ("model", "chat_template", "system_cache")


@dataclass(frozen=True)
class Settings:
    """All settings; `configs/defaults.yaml` says what each means. `sampling` holds only what a file sets.

    Paths are already resolved against the folder of their file where they were relative: `model`, `chat_template` and
    the directories of `adapters`. `drafting` holds fields of `DraftingConfig`, "draft" (True: there must be a draft,
    False: none is used) and "preset".
    """

    model: Path | None = None
    backend: str = "auto"
    kv_cache: str | None = None
    system: str | None = None
    chat_template: Path | None = None
    system_cache: str | None = None
    adapter: str | None = None
    adapters: dict[str, Path] = field(default_factory=dict)
    history: bool = True
    stats: bool | None = None
    preemption_mib: int = PREEMPTION_MIB
    states_mib: int = STATES_MIB
    sampling: dict[str, Any] = field(default_factory=dict)
    drafting: dict[str, Any] = field(default_factory=dict)


def load_settings(path: str | Path | None = None) -> Settings:
    """The packaged defaults, overridden by `path` or, without one, by the user's own file where there is one.

    Raises SettingsError that names file and key.
    """
    values = _checked(_packaged_defaults(), DEFAULTS, Path())
    user_file = user_path(path) if path is not None else _user_file()
    if user_file is not None:
        own = _checked(_read(user_file), printable(user_file), user_file.parent)
        for section in ("sampling", "drafting", "adapters"):
            own[section] = values.get(section, {}) | own.get(section, {})
        values |= own
    return Settings(**values)


def _user_file() -> Path | None:
    named = os.environ.get("EDGELLM_CONFIG")
    if named:
        return user_path(named)
    path = user_folder("XDG_CONFIG_HOME", ".config") / "config.yaml"
    return path if path.exists() else None


def _packaged_defaults() -> Any:
    return parse_yaml((resources.files("edgellm.configs") / DEFAULTS).read_text("utf-8"), DEFAULTS, SettingsError)


def _read(path: Path) -> Any:
    text = read_text(path, SETTINGS_BYTES, SettingsError, "the settings file", takes_pipes=True)
    return parse_yaml(text, f"the settings file {printable(path)}", SettingsError)


def _checked(values: Any, origin: str, folder: Path) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"the settings file {origin} holds a {type(values).__name__}: expected keys and values")
    known = tuple(item.name for item in fields(Settings))
    return {key: _checked_setting(_known(key, known, origin), value, origin, folder) for key, value in values.items()}


def _known(key: Any, known: tuple[str, ...], origin: str) -> str:
    if key not in known:
        raise SettingsError(f"{origin} has the unknown key {str(key)!r}{did_you_mean(str(key), known)}")
    return key


def _checked_setting(key: str, value: Any, origin: str, folder: Path) -> Any:
    if isinstance(value, str) and key in _PATHS and "\0" in value:
        raise _wrong(origin, key, value, "a path, which has a null character nowhere")
    if key == "sampling":
        return _checked_sampling({} if value is None else value, origin)
    if key == "drafting":
        return _checked_drafting({} if value is None else value, origin, folder)
    if key == "adapters":
        return _checked_adapters({} if value is None else value, origin, folder)
    if key in ("model", "chat_template"):
        if value is not None and not (isinstance(value, str) and value):
            raise _wrong(origin, key, value, "a path, or null")
        return None if value is None else folder / user_path(value)
    if key == "backend" and value not in BACKENDS:
        raise _wrong(origin, key, value, f"one of {', '.join(BACKENDS)}")
    if key == "kv_cache" and value not in (None, *KV_CACHES):
        raise _wrong(origin, key, value, f"one of {', '.join(KV_CACHES)}, or null")
    if key in ("system_cache", "adapter") and value is not None and not (isinstance(value, str) and value):
        expected = "a file or the name of a snapshot" if key == "system_cache" else "the name of an adapter"
        raise _wrong(origin, key, value, f"{expected}, or null")
    if key == "system_cache" and value is not None and is_snapshot_path(value) and (folder / user_path(value)).exists():
        return str(folder / user_path(value))
    if key == "system" and not isinstance(value, (str, type(None))):
        raise _wrong(origin, key, value, "text, or null")
    if key == "history" and not isinstance(value, bool):
        raise _wrong(origin, key, value, "true or false")
    if key == "preemption_mib" and (type(value) is not int or not 0 <= value <= MOST_PREEMPTION_MIB):
        raise _wrong(origin, key, value, f"a whole number of MiB from 0 to {MOST_PREEMPTION_MIB}")
    if key == "states_mib" and (type(value) is not int or not 0 <= value <= MOST_STATES_MIB):
        raise _wrong(origin, key, value, f"a whole number of MiB from 0 to {MOST_STATES_MIB}")
    if key == "stats" and not isinstance(value, (bool, type(None))):
        raise _wrong(origin, key, value, "true, false or null")
    return value


def _checked_sampling(values: Any, origin: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise _wrong(origin, "sampling", values, "keys and values")
    try:
        return {key: checked_value(_known(key, SAMPLING_KEYS, f"sampling in {origin}"), values[key]) for key in values}
    except RequestError as error:
        raise SettingsError(f"sampling in {origin}: {error}") from error


def _checked_drafting(values: Any, origin: str, folder: Path) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise _wrong(origin, "drafting", values, "keys and values")
    from edgellm.drafting.config import checked_drafting  # it takes longer to load than all else here

    try:
        return checked_drafting(values, folder)
    except RequestError as error:
        raise SettingsError(f"drafting in {origin}: {error}") from error


def _checked_adapters(values: Any, origin: str, folder: Path) -> dict[str, Path]:
    if not isinstance(values, dict):
        raise _wrong(origin, "adapters", values, "names and directories")
    for name, directory in values.items():
        if not all(isinstance(text, str) and text and "\0" not in text for text in (name, directory)):
            raise SettingsError(
                f"adapters in {origin}: {name!r} is {directory!r}: expected a name and a directory, without a null "
                "character"
            )
    return {name: folder / user_path(directory) for name, directory in values.items()}


def _wrong(origin: str, key: str, value: Any, expected: str) -> SettingsError:
    return SettingsError(f"{origin}: {key} is {value!r}: expected {expected}")
