"""Options that `edgellm chat`, `generate` and `bench` share, and what they add up to with the settings files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from edgellm.commands.descriptions import named_directories
from edgellm.commands.option_groups import ADAPTERS, LOGS, MODEL, PROMPT, SAMPLING, TEMPLATE, DraftingOptions
from edgellm.commands.settings import BACKENDS, KV_CACHES, Settings, load_settings
from edgellm.engines.directories.small_files import PROMPT_BYTES, read_text
from edgellm.engines.directories.strict_formats import parse_json
from edgellm.errors import RequestError, did_you_mean
from edgellm.kernels.user_paths import user_path
from edgellm.sampling_params import checked_value
from edgellm.text.messages import checked_tools, checked_variables


def _sampling_option(field: str, *flags: str, **details: Any) -> Any:
    """An option for a field of `SamplingParams`; a wrong value is a usage error that names option and range."""

    def check(value: Any) -> Any:
        if value is None or value == []:  # was not given; typer wants a list where an option may be repeated
            return [] if field == "stop" else None
        try:
            checked = checked_value(field, value)
            return list(checked) if isinstance(checked, tuple) else checked
        except RequestError as error:
            raise typer.BadParameter(str(error)) from error

    return typer.Option(*flags, callback=check, show_default=False, rich_help_panel=SAMPLING, **details)


def one_of(choices: tuple[str, ...]) -> Callable[[str | None], str | None]:
    def check(value: str | None) -> str | None:
        if value is not None and value not in choices:
            raise typer.BadParameter(f"{value!r}{did_you_mean(value, choices)}")
        return value

    return check


def _set_debug(value: bool) -> None:
    if value:
        os.environ["EDGELLM_DEBUG"] = "1"


Temperature = Annotated[
    float | None, _sampling_option("temperature", "--temperature", help="Randomness; 0 takes the likeliest token.")
]
TopK = Annotated[int | None, _sampling_option("top_k", "--top-k", help="Draw from the K likeliest tokens; 0: all.")]
TopP = Annotated[
    float | None, _sampling_option("top_p", "--top-p", help="Draw from the likeliest tokens that reach P together.")
]
MinP = Annotated[
    float | None, _sampling_option("min_p", "--min-p", help="Leave out tokens P times less likely than the likeliest.")
]
RepetitionPenalty = Annotated[
    float | None, _sampling_option("repetition_penalty", "--repetition-penalty", help="Above 1: fewer repetitions.")
]
PresencePenalty = Annotated[
    float | None, _sampling_option("presence_penalty", "--presence-penalty", help="Above 0: more new tokens.")
]
FrequencyPenalty = Annotated[
    float | None, _sampling_option("frequency_penalty", "--frequency-penalty", help="Above 0: fewer frequent tokens.")
]
Seed = Annotated[
    int | None, _sampling_option("seed", "--seed", help="The same seed draws the same tokens [default: a random one].")
]
MaxTokens = Annotated[
    int | None, _sampling_option("max_tokens", "--max-tokens", help="Most tokens of an answer [default: what fits].")
]
Stop = Annotated[
    list[str] | None,
    _sampling_option("stop", "--stop", help="End the answer before this text; may be given several times."),
]
Logprobs = Annotated[
    int | None,
    _sampling_option(
        "logprobs", "--logprobs", metavar="N", help="Show each token's log-probability, and the N likeliest there."
    ),
]
System = Annotated[str | None, typer.Option("--system", help="System prompt [default: the model's own]; '' is none.")]
SystemFile = Annotated[Path | None, typer.Option("--system-file", help="File with the system prompt.")]
SystemCache = Annotated[
    str | None,
    typer.Option(
        "--system-cache",
        metavar="FILE",
        rich_help_panel=PROMPT,
        help="Snapshot that edgellm cache build made: take the system prompt and its KV cache from it. A name as "
        "edgellm cache list shows it, or a file.",
    ),
]
ChatTemplateFile = Annotated[
    Path | None, typer.Option("--chat-template", help="File with a chat template, instead of the model's.")
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        rich_help_panel=MODEL,
        help="YAML settings [default: $EDGELLM_CONFIG, ~/.config/edgellm/config.yaml].",
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=_set_debug,
        is_eager=True,
        rich_help_panel=LOGS,
        help="Show where an error comes from.",
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """The engine directory, as an argument or as the option that all commands share; None is not given."""

    PANEL: ClassVar[str] = MODEL

    engine_directory: Annotated[
        Path | None, typer.Argument(show_default=False, help="Engine directory [default: the shipped model].")
    ] = None
    model: Annotated[Path | None, typer.Option("--model", "-m", help="Engine directory, in place of the argument.")] = (
        None
    )

    def chosen(self) -> Path | None:
        """The directory that was given, in whichever way; typer.BadParameter where there are two."""
        return one_engine_directory(self.engine_directory, self.model)


def one_engine_directory(argument: Path | None, option: Path | None) -> Path | None:
    """The engine directory of a command's argument or of its --model; typer.BadParameter where both are given."""
    if argument is not None and option is not None:
        raise typer.BadParameter(f"{option} is given beside {argument}: give one of them", param_hint="--model")
    return argument if option is None else option


Model = Annotated[
    Path | None,
    typer.Option("--model", "-m", rich_help_panel=MODEL, help="Engine directory [default: the shipped model]."),
]


@dataclass(frozen=True)
class ComputingOptions:
    """What computes, and how KV rows are kept; None is an option that was not given."""

    PANEL: ClassVar[str] = MODEL

    backend: Annotated[
        str | None,
        typer.Option("--backend", metavar="|".join(BACKENDS), callback=one_of(BACKENDS), help="What computes."),
    ] = None
    kv_cache: Annotated[
        str | None,
        typer.Option(
            "--kv-cache",
            metavar="|".join(KV_CACHES),
            callback=one_of(KV_CACHES),
            help="Keep the KV cache in the dtype that is computed in, or in 8 bits, which takes half the memory "
            "[default: as the engine directory was built].",
        ),
    ] = None


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; None is an option that was not given."""

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    seed: Seed = None
    max_tokens: MaxTokens = None
    stop: Stop = None

    def given(self) -> dict[str, Any]:
        """The options that were given, under their names as settings."""
        return {name: value for name, value in asdict(self).items() if value is not None and value != []}


Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        rich_help_panel=PROMPT,
        help="Show an image with the (first) question; may be given several times.",
    ),
]


@dataclass(frozen=True)
class PromptOptions:
    """What stands before the user's words; None is an option that was not given."""

    PANEL: ClassVar[str] = PROMPT

    system: System = None
    system_file: SystemFile = None
    chat_template: ChatTemplateFile = None

    @property
    def has_system_prompt(self) -> bool:
        """Whether a system prompt was given, if only an empty one."""
        return self.system is not None or self.system_file is not None

    def system_prompt(self) -> str | None:
        """The system prompt that was given, in whichever way."""
        if self.system is not None and self.system_file is not None:
            raise typer.BadParameter("give --system or --system-file, not both", param_hint="--system")
        if self.system_file is not None:
            return read_text_file(self.system_file, "--system-file")
        return None if self.system is None else checked_argument(self.system, "--system")


Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="NAME=DIR",
        help="Load a LoRA adapter (a PEFT directory) beside those of the engine directory; may be given several times.",
    ),
]


@dataclass(frozen=True)
class AdapterOptions:
    """LoRA adapters; None or [] is an option that was not given."""

    PANEL: ClassVar[str] = ADAPTERS

    adapter: Annotated[
        str | None, typer.Option("--adapter", metavar="NAME", help="Answer with this LoRA adapter [default: none].")
    ] = None
    lora: Lora = None

    def applied_to(self, settings: Settings) -> dict[str, Any]:
        """The settings of adapters with these options on top, by their names; a wrong one is a usage error."""
        adapter = settings.adapter if self.adapter is None else self.adapter or None
        return {"adapter": adapter, "adapters": settings.adapters | named_directories(self.lora or ())}


@dataclass(frozen=True)
class ToolOptions:
    """What the chat template gets with the messages; None or [] is an option that was not given."""

    PANEL: ClassVar[str] = TEMPLATE

    tools: Annotated[
        Path | None,
        typer.Option(
            "--tools",
            metavar="FILE",
            help="Tell the model of functions that it may call: a JSON list, as OpenAI's API takes it.",
        ),
    ] = None
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="Let the model think before it answers, or not, where its template has that choice (enable_thinking).",
            show_default=False,
        ),
    ] = None
    template_variable: Annotated[
        list[str] | None,
        typer.Option(
            "--template-variable",
            metavar="NAME=VALUE",
            help="Set a variable of the chat template; VALUE is JSON, else text; may be given several times.",
        ),
    ] = None


def template_inputs(options: ToolOptions) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """The tools (None: none) and the template's variables that were given.

    Raises RequestError that names the file and the place in it, and typer.BadParameter for a wrong variable.
    """
    variables: dict[str, Any] = {} if options.thinking is None else {"enable_thinking": options.thinking}
    for text in options.template_variable or ():
        name, equals, value = checked_argument(text, "--template-variable").partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r}: expected NAME=VALUE", param_hint="--template-variable")
        if name in variables:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--template-variable")
        variables[name] = _json_or_text(value)
    try:
        variables = checked_variables(variables)
    except RequestError as error:
        raise typer.BadParameter(str(error), param_hint="--template-variable") from error
    return None if options.tools is None else read_tools(options.tools), variables


def read_tools(path: Path) -> list[dict[str, Any]] | None:
    """The tools of a JSON file, checked (`checked_tools`); raises RequestError that names the file and the place."""
    given = parse_json(read_text_file(path, "--tools"), f"--tools {path}", RequestError)
    try:
        return checked_tools(given)
    except RequestError as error:
        raise RequestError(f"--tools {path}: {error}") from error


def _json_or_text(text: str) -> Any:
    def refuse(name: str) -> Any:  # NaN and Infinity, which JSON has not
        raise ValueError(name)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return text


def chosen_settings(
    config: Path | None,
    *,
    model: Path | None,
    computing: ComputingOptions,
    prompt: PromptOptions,
    sampling: SamplingOptions,
    drafting: DraftingOptions,
    adapters: AdapterOptions | None = None,
    system_cache: str | None = None,
) -> Settings:
    """The settings files with the command line's options on top; None is an option that was not given."""
    settings = load_settings(config)
    given = {
        "model": None if model is None else user_path(model),
        **asdict(computing),
        "chat_template": None if prompt.chat_template is None else user_path(prompt.chat_template),
        "system": prompt.system_prompt(),
        "system_cache": system_cache,
    }
    chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    return replace(
        settings,
        **chosen,
        **(adapters or AdapterOptions()).applied_to(settings),
        sampling=settings.sampling | sampling.given(),
        drafting=drafting.applied_to(settings),
    )


def read_text_file(path: Path, what: str) -> str:
    """The text of a UTF-8 file, or of a pipe, without its last line end; RequestError names `what` and the place."""
    text = read_text(user_path(path), PROMPT_BYTES, RequestError, what, takes_pipes=True)
    return text.removesuffix("\n").removesuffix("\r")


def read_standard_input() -> str:
    """The text of standard input without its last line end; raises RequestError."""
    data = sys.stdin.buffer.read(PROMPT_BYTES + 1)
    if len(data) > PROMPT_BYTES:
        raise RequestError(f"standard input has more than the {PROMPT_BYTES:,} bytes that are read of it")
    return decoded_text(data, "standard input")


def decoded_text(data: bytes, what: str) -> str:
    """UTF-8 `data` without its last line end; raises RequestError that names `what` and the byte offset."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid_utf8(what, error.object[error.start], error.start) from error
    return text.removesuffix("\n").removesuffix("\r")


def invalid_utf8(what: str, byte: int, offset: int) -> RequestError:
    """The error for bytes that are not UTF-8."""
    return RequestError(f"{what} is not UTF-8 text: invalid byte 0x{byte:02x} at byte offset {offset}")


def checked_argument(text: str, what: str) -> str:
    """Text from the command line, whose bytes Python hands on even where they are no text; raises RequestError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        decoded_text(text.encode("utf-8", "surrogateescape"), what)
    return text
