"""Opens the model that the settings name, with its own defaults for a conversation."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from edgellm.commands.console import write_note
from edgellm.errors import EngineDirectoryError, RequestError, SettingsError
from edgellm.sampling_params import SamplingParams, checked_value
from edgellm.settings import Settings

if TYPE_CHECKING:
    from edgellm.drafting import DraftingConfig
    from edgellm.engines.engine_directory import EngineDirectory
    from edgellm.llm import LLM

GENERATION_CONFIG_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
PROGRESS_AFTER_SECONDS = 0.7


def open_model(settings: Settings) -> LLM:
    """Open the model as the settings say, its progress shown on a terminal where it takes a while."""
    drafting = chosen_drafting(settings)
    if drafting is not None and drafting.acceptance == "typical":
        write_note("Typical acceptance is lossy: answers may be others than without a draft.")
    return open_model_with(settings, drafting)


def open_model_with(settings: Settings, drafting: DraftingConfig | None) -> LLM:
    """As `open_model`, but drafting in this way (None: no draft is loaded)."""
    from edgellm.llm import LLM  # what a wrong option needs not load
    from edgellm.text.chat_template import ChatTemplate

    template = None if settings.chat_template is None else ChatTemplate.from_file(settings.chat_template)
    progress = _Progress()
    try:
        llm = LLM(
            settings.model,
            backend=settings.backend,
            drafting=drafting,
            progress=progress if sys.stderr.isatty() else None,
        )
    finally:
        progress.clear()
    if template is not None:
        llm.tokenizer.chat_template = template
    return llm


def chosen_drafting(settings: Settings) -> DraftingConfig | None:
    """How to draft with the model of the settings; None for plain decoding.

    Raises RequestError where drafting is asked for and there is no draft model, or its engines cannot serve it.
    """
    if settings.drafting.get("draft") is False:
        return None
    from edgellm.drafting_presets import drafting_config

    directory = described_directory(settings)
    if directory.draft is None:
        if settings.drafting.get("draft") is True:
            raise RequestError(
                f"drafting is asked for, but {directory.path} has no draft model: build one with it (edgellm build "
                "CHECKPOINT ENGINE_DIR --draft DRAFT_CHECKPOINT), or leave the options of drafting out"
            )
        return None
    asked = {key: value for key, value in settings.drafting.items() if key not in ("draft", "preset")}
    return drafting_config(directory.limits, backend_name(settings), asked, settings.drafting.get("preset"))


def described_directory(settings: Settings) -> EngineDirectory:
    """What the model's `edgellm.json` says; the files are not checked."""
    from edgellm.engines.engine_directory import EngineDirectory
    from edgellm.llm import SHIPPED_MODEL

    return EngineDirectory.read(settings.model or SHIPPED_MODEL)


def backend_name(settings: Settings) -> str:
    """The backend that the settings come to on this machine: "numpy" or "tensorrt"."""
    from edgellm.engines.gpu import find_gpu

    if settings.backend != "auto":
        return settings.backend
    return "numpy" if find_gpu() is None else "tensorrt"


def model_name(llm: LLM) -> str:
    """The engine directory's name, as people know the model."""
    from edgellm.llm import SHIPPED_MODEL

    path = llm.directory.path.resolve()
    return "the shipped model" if path == SHIPPED_MODEL.resolve() else path.name


def system_prompt(llm: LLM, settings: Settings) -> str | None:
    """The system prompt of the settings, else the model's own (`system_prompt.txt`); None where there is none."""
    if settings.system is not None:
        return settings.system or None
    path = llm.directory.path / "system_prompt.txt"
    try:
        return path.read_text(encoding="utf-8").rstrip("\n") or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise EngineDirectoryError(f"{path} cannot be read: {error}") from error


def sampling_params(settings: Settings, defaults: dict[str, Any] | None = None) -> SamplingParams:
    """The sampling that the settings ask for, on top of `defaults`."""
    try:
        return SamplingParams(**{**(defaults or {}), **settings.sampling})
    except RequestError as error:  # a combination that no single key shows
        raise SettingsError(str(error)) from error


def model_sampling_defaults(llm: LLM) -> dict[str, Any]:
    """What the model's `generation_config.json` recommends where it asks for sampling (`do_sample`), else nothing."""
    from edgellm.text.tokenizer import read_json_object

    path = llm.directory.path / "generation_config.json"
    published = read_json_object(path)
    if published.get("do_sample") is not True:
        return {}
    found = {key: published[key] for key in GENERATION_CONFIG_KEYS if published.get(key) is not None}
    try:
        return {"temperature": 1.0} | {key: checked_value(key, value) for key, value in found.items()}
    except RequestError as error:
        raise EngineDirectoryError(f"{path}: {error}") from error


class _Progress:
    """A percentage on the terminal's last line, once loading takes longer than one notices."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._started > PROGRESS_AFTER_SECONDS and total:
            self._shown = True
            print(f"\rloading the model: {100 * done // total} %", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the percentage away."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
