"""Options that `edgellm chat`, `generate` and `bench` share, and what they add up to with the settings files."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from edgellm.commands.settings import BACKENDS, Settings, load_settings
from edgellm.commands.words import named_directories
from edgellm.engines.directories.small_files import PROMPT_BYTES, read_text
from edgellm.engines.directories.strict_json import parse_json
from edgellm.errors import RequestError, did_you_mean
from edgellm.kernels.user_paths import user_path
from edgellm.sampling_params import checked_value
from edgellm.text.template_inputs import checked_tools, checked_variables


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

    return typer.Option(*flags, callback=check, show_default=False, **details)


def _check_backend(value: str | None) -> str | None:
    if value is not None and value not in BACKENDS:
        raise typer.BadParameter(f"{value!r}{did_you_mean(value, BACKENDS)}")
    return value


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
        help="Snapshot that edgellm cache build made: take the system prompt and its KV cache from it. A name as "
        "edgellm cache list shows it, or a file.",
    ),
]
Backend = Annotated[
    str | None,
    typer.Option("--backend", metavar="|".join(BACKENDS), callback=_check_backend, help="What computes."),
]
ChatTemplateFile = Annotated[
    Path | None, typer.Option("--chat-template", help="File with a chat template, instead of the model's.")
]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="YAML settings [default: $EDGELLM_CONFIG, ~/.config/edgellm/config.yaml]."),
]
Debug = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, is_eager=True, help="Show where an error comes from.")
]


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
        "--image", metavar="FILE", help="Show an image with the (first) question; may be given several times."
    ),
]


@dataclass(frozen=True)
class PromptOptions:
    """What stands before the user's words; None is an option that was not given."""

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


@dataclass(frozen=True)
class AdapterOptions:
    """LoRA adapters; None or [] is an option that was not given."""

    adapter: Annotated[
        str | None, typer.Option("--adapter", metavar="NAME", help="Answer with this LoRA adapter [default: none].")
    ] = None
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora",
            metavar="NAME=DIR",
            help="Load a LoRA adapter (a PEFT directory) beside those of the engine directory; may be given several "
            "times.",
        ),
    ] = None

    def applied_to(self, settings: Settings) -> dict[str, Any]:
        """The settings of adapters with these options on top, by their names; a wrong one is a usage error."""
        adapter = settings.adapter if self.adapter is None else self.adapter or None
        return {"adapter": adapter, "adapters": settings.adapters | named_directories(self.lora or ())}


@dataclass(frozen=True)
class ToolOptions:
    """What the chat template gets beside the messages; None or [] is an option that was not given."""

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
    backend: str | None,
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
        "backend": backend,
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


def with_option_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose parameters of dataclass types are options by options, as typer needs to see them.

    Every field of such a dataclass is annotated as a typer option (`Annotated[...]`) and has a default. The options
    stand in the help where the parameter stands in the function.
    """
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    # Not get_type_hints: in Python 3.10 it hides the annotation of a parameter with the default None in an Optional.
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        group = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            groups[name] = group
            parameters += _options(group)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{item.name: values.pop(item.name) for item in fields(group)})
        return function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _options(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    found = []
    for item in fields(group):
        if item.default is MISSING:
            raise TypeError(f"{group.__name__}.{item.name} has no default: an option may be left out")
        found.append(
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name]
            )
        )
    return found


@dataclass(frozen=True)
class DraftingOptions:
    """What was given on the command line; None is an option that was not."""

    draft: Annotated[
        bool | None,
        typer.Option(
            "--draft/--no-draft",
            help="Draft with the model's EAGLE head, or decode without [default: where it has one].",
            show_default=False,
        ),
    ] = None
    draft_top_k: Annotated[
        int | None, typer.Option("--draft-top-k", help="Width of a draft tree's levels; 1 is a chain.")
    ] = None
    draft_steps: Annotated[
        int | None, typer.Option("--draft-steps", help="Levels of the draft: tokens of a chain.")
    ] = None
    verify_tree_size: Annotated[
        int | None, typer.Option("--verify-tree-size", help="Nodes verified in a round, the root included.")
    ] = None
    choices: Annotated[
        str | None,
        typer.Option(
            "--choices",
            metavar="FILE",
            help="Draft a static tree: a YAML or JSON list of paths, or the name mc_sim_7b_63 or eagle_25.",
        ),
    ] = None
    acceptance: Annotated[
        str | None,
        typer.Option(
            "--acceptance",
            metavar="exact|typical",
            help="exact gives the tokens of decoding without a draft; typical is lossy: it accepts more, other text.",
        ),
    ] = None
    posterior_threshold: Annotated[
        float | None,
        typer.Option("--posterior-threshold", help="Typical acceptance: accept from this probability on [0.09]."),
    ] = None
    posterior_alpha: Annotated[
        float | None,
        typer.Option("--posterior-alpha", help="Typical acceptance: factor of exp(-entropy) [root of the threshold]."),
    ] = None
    adaptive: Annotated[
        bool | None,
        typer.Option(
            "--adaptive/--no-adaptive",
            help="Let measured speed pick a smaller draft, or none, or always draft the same [default: pick].",
            show_default=False,
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """The options that were given, under their names as settings."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def applied_to(self, settings: Settings) -> dict[str, Any]:
        """The drafting settings with these options on top; a contradiction is a usage error that names an option."""
        given = self.given()
        if not given:
            return settings.drafting
        given.setdefault("draft", True)  # who says how to draft wants a draft
        from edgellm.drafting.presets import merged_drafting

        try:
            return merged_drafting(settings.drafting, given)
        except RequestError as error:
            raise typer.BadParameter(_with_option_names(str(error))) from error


def _with_option_names(message: str) -> str:
    """An error about settings, in the words of the command line."""
    names = "|".join(item.name for item in fields(DraftingOptions) if item.name != "draft")
    message = message.replace("but draft is false", "and so is --no-draft")
    return re.sub(rf"\b({names}) is\b", lambda match: f"--{match[1].replace('_', '-')} is", message)
