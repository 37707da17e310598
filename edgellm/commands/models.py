"""Opens the model that the settings name, with its own defaults for a conversation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.commands.console import status_line, write_note
from edgellm.commands.settings import Settings
from edgellm.errors import AdapterError, RequestError, SettingsError, did_you_mean
from edgellm.kernels.gpu import find_gpu
from edgellm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from edgellm.drafting.config import DraftingConfig
    from edgellm.engines.directories.engine_directory import EngineDirectory
    from edgellm.llm import LLM
    from edgellm.snapshots.system_prompt import Tools
    from edgellm.text.template import ChatTemplate

PROGRESS_AFTER_SECONDS = 0.7
#: How people know the model that comes with the package.
SHIPPED_NAME = "the shipped model"


def open_model(
    settings: Settings,
    adapters: Sequence[str] = (),
    every_adapter: bool = False,
    tools: Tools | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> LLM:
    """Open the model as the settings say, its progress shown on a terminal where it takes a while. The file of a
    snapshot of the system prompt, which `with_cached_prompt` puts into the settings, is used for conversations with
    these `tools` and `template_variables`. The model has the LoRA adapters where the settings or `adapters` name one,
    or `every_adapter` is wanted. Raises AdapterError for an adapter that there is none of, SnapshotError for a snapshot
    of the system prompt that does not fit."""
    llm = open_model_with(settings, chosen_drafting(settings), chosen_adapters(settings, adapters, every_adapter))
    if settings.system_cache is None:
        return llm
    from edgellm.snapshots.contents import common_beginning
    from edgellm.snapshots.system_prompt import system_prompt_ids

    try:
        cached = llm.load_snapshot(settings.system_cache, [settings.adapter])
        ids = system_prompt_ids(llm.tokenizer, system_prompt(llm, settings), tools, template_variables)
    except BaseException:
        llm.close()
        raise
    common = common_beginning(cached.token_ids, ids)
    if common < len(ids):  # of another system prompt, or of one that the chat template renders otherwise now
        write_note(
            f"{cached.path} is of another system prompt: it has {common} of the {len(ids)} tokens that come before a "
            "question."
        )
    return llm


def chosen_adapters(
    settings: Settings, adapters: Sequence[str] = (), every_adapter: bool = False
) -> dict[str, Path] | None:
    """Directories of the LoRA adapters to load beside those of the engine directory; None: load none at all. Raises
    AdapterError for one of the settings' or `adapters` that there is none of."""
    directory = described_directory(settings)
    names = list({**directory.adapters, **settings.adapters})
    wanted = [*adapters, *([] if settings.adapter is None else [settings.adapter])]
    for name in wanted:
        if name not in names:
            hint = did_you_mean(name, names) if names else f": {directory.path} has none. Load one with --lora NAME=DIR"
            raise AdapterError(f"there is no LoRA adapter {name!r}{hint}")
    return settings.adapters if wanted or settings.adapters or (every_adapter and names) else None


def with_cached_prompt(
    settings: Settings, given: Any, tools: Tools | None, template_variables: Mapping[str, Any]
) -> tuple[Settings, Tools | None, Mapping[str, Any]]:
    """See `edgellm.commands.cache_prompts.with_cached_prompt`, which is loaded where the settings name a snapshot;
    `given` are the options of a command with a system prompt and its snapshot."""
    if settings.system_cache is None:
        return settings, tools, template_variables
    from edgellm.commands import cache_prompts

    before_settings_file = given.system_cache is not None and not given.has_system_prompt
    return cache_prompts.with_cached_prompt(settings, before_settings_file, tools, template_variables)


def open_model_with(
    settings: Settings, drafting: DraftingConfig | None, adapters: Mapping[str, Path] | None = None
) -> LLM:
    """Opens as `open_model` does, but drafting in this way (None: no draft is loaded), with these directories of
    adapters beside the engine directory's (None: with no adapter at all), and without a snapshot."""
    from edgellm.llm import LLM  # what a wrong option needs not load

    template = chosen_template(settings)
    try:
        llm = LLM(settings.model, **settings.computing, drafting=drafting, adapters=adapters, progress=_loading())
    finally:
        status_line.show("")
    llm.tokenizer.chat_template = template or llm.tokenizer.chat_template
    return llm


def chosen_template(settings: Settings) -> ChatTemplate | None:
    """The chat template of the settings; None for the model's own."""
    from edgellm.text.template import ChatTemplate

    return None if settings.chat_template is None else ChatTemplate.from_file(settings.chat_template)


def chosen_drafting(settings: Settings) -> DraftingConfig | None:
    """How to draft with the model of the settings; None for plain decoding. Says so where it changes answers. Raises
    RequestError where drafting is asked for and there is no draft model, or its engines cannot serve it."""
    if settings.drafting.get("draft") is False:
        return None
    from edgellm.drafting.config import WITHOUT_MODEL, drafting_config

    directory = described_directory(settings)
    chosen = {key: value for key, value in settings.drafting.items() if key not in ("draft", "preset")}
    needs_model = chosen.get("kind") not in WITHOUT_MODEL and not chosen.get("suffix_decoding")
    if directory.draft is None and needs_model:
        if settings.drafting.get("draft") is True:
            raise RequestError(
                f"drafting is asked for, but {directory.path} has no draft model: build one with it (edgellm build "
                "CHECKPOINT ENGINE_DIR --draft DRAFT_CHECKPOINT), draft without one (--draft suffix), or leave the "
                "options of drafting out"
            )
        return None
    found = drafting_config(directory.limits, backend_name(settings), chosen, settings.drafting.get("preset"))
    if found is not None and found.acceptance == "typical":
        write_note("Typical acceptance is lossy: answers may be others than without a draft.")
    return found


def described_directory(settings: Settings) -> EngineDirectory:
    """What the model's `edgellm.json` says; the files are not checked."""
    from edgellm.engines.directories.engine_directory import EngineDirectory
    from edgellm.hub.directories import local_directory
    from edgellm.opened_model import SHIPPED_MODEL

    return EngineDirectory.read(local_directory(settings.model or SHIPPED_MODEL))


def backend_name(settings: Settings) -> str:
    """The backend that the settings come to on this machine: "numpy" or "tensorrt"."""
    if settings.backend != "auto":
        return settings.backend
    return "numpy" if find_gpu() is None else "tensorrt"


def model_name(llm: LLM) -> str:
    from edgellm.opened_model import SHIPPED_MODEL

    is_shipped = llm.directory.path.resolve() == SHIPPED_MODEL.resolve()
    return SHIPPED_NAME if is_shipped else llm.directory.name


def system_prompt(llm: LLM, settings: Settings, with_images: bool = False) -> str | None:
    """The system prompt of the settings, else the model's own (`with_images` that for images), or None."""
    if settings.system is not None:
        return settings.system or None
    return (llm.default_image_system_prompt if with_images else llm.default_system_prompt) or None


def sampling_params(settings: Settings, defaults: SamplingParams | None = None) -> SamplingParams:
    """The sampling that the settings ask for, on top of `defaults` (None: those of `SamplingParams`)."""
    try:
        return replace(defaults or SamplingParams(), **settings.sampling)
    except RequestError as error:  # a combination that no single key shows
        raise SettingsError(str(error)) from error


def _loading() -> Callable[[int, int], None]:
    """Shows a percentage on the terminal's last line, once loading takes longer than one notices."""
    started = time.monotonic()

    def show(done: int, total: int) -> None:
        if time.monotonic() - started > PROGRESS_AFTER_SECONDS and total:
            status_line.show(f"loading the model: {100 * done // total} %")

    return show
