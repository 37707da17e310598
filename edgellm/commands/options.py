"""The options that several commands share, and what is read for them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer

from edgellm.commands.console import FORMATS, LEVELS, choose_logs
from edgellm.commands.table import OPTIONAL_KIND, Options, argument, option, options_of
from edgellm.engines.errors import at_place
from edgellm.engines.formats.small_files import PROMPT_BYTES, decoded, read_text
from edgellm.engines.formats.strict_formats import parse_json, parsed_json
from edgellm.engines.model.config import DRAFT_WEIGHTS, HEADS
from edgellm.engines.model.limits import KV_CACHES, MOST_GPUS
from edgellm.errors import RequestError, shown
from edgellm.sampling_params import checked_value
from edgellm.structure.description import Structure
from edgellm.text.messages import checked_tools, checked_variables

BACKENDS = ("auto", "numpy", "tensorrt")
EXECUTORS = ("auto", "tensorrt")
#: What is taken of the host's memory for rows and states.
_MIB: dict[str, Any] = {"least": 0, "most": 1 << 20, "expected": f"a whole number of MiB from 0 to {1 << 20}"}
_Checked = TypeVar("_Checked")
_REPEATED = "may be given several times."


def _set_debug(value: bool) -> None:
    if value:
        os.environ["EDGELLM_DEBUG"] = "1"


_MODEL = "Engine directory, GGUF file, or a name on the hub: ORG/NAME or ORG/NAME:FILE.gguf"


class ModelOption(Options, panel="Model"):
    # A list, so that of two neither is forgotten; of other options that are given twice the last one counts, as in a
    # script that adds its own behind a user's.
    model: list[Path] | None = option(f"{_MODEL} [default: the shipped model].", "--model", "-m")
    engine_directory: Path | None = None

    def chosen_model(self) -> Path | None:
        """The directory that was given, in whichever way; typer.BadParameter where there are two."""
        given = [each for each in (self.engine_directory, *(self.model or ())) if each is not None]
        if len(given) > 1:
            both = " and ".join(shown(str(each)) for each in given)
            raise typer.BadParameter(f"{both} are given: give one of them", param_hint="--model")
        return given[0] if given else None


class ModelOptions(ModelOption, panel="Model"):
    """The engine directory, as an argument or as the option that all commands share."""

    engine_directory: Path | None = argument(f"{_MODEL} [default: the shipped model].")
    model: list[Path] | None = option("The same, in place of the argument.", "--model", "-m")


class RevisionOptions(Options, panel="Models named as on the hub"):
    revision: str | None = option("Branch, tag or commit of ORG/NAME [default: main].", metavar="REVISION")
    update: bool = option("Ask the hub for the revision's present commit, not only the first time.")


class NamedModelOptions(RevisionOptions, panel="Models named as on the hub"):
    """How the directory is built of a model that has a name, or is a GGUF file."""

    max_batch: int | None = option("Sequences at once, as edgellm build takes it.")
    kv_capacity: int | None = option("Tokens of context, as edgellm build takes it.")
    head: str | None = option("Pack the head, as edgellm build does.", choices=HEADS)
    draft_checkpoint: str | None = option(
        "What drafts, as --draft of edgellm build: a directory or name of an EAGLE head, or mtp.",
        metavar="DRAFT_CHECKPOINT|mtp",
    )
    draft_weights: str | None = option("Pack the draft, as edgellm build does.", choices=DRAFT_WEIGHTS)
    tokenizer: str | None = option("Folder with the published tokenizer, in place of a GGUF file's own.", metavar="DIR")
    mmproj: str | None = option("Vision encoder of a GGUF file, as edgellm build takes it.", metavar="FILE|none")

    def build_arguments(self) -> dict[str, Any]:
        """What was given, as arguments of `edgellm.hub.directories.local_directory`'s build."""
        given = self.given(NamedModelOptions)
        renamed = {"draft": given.pop("draft_checkpoint")} if "draft_checkpoint" in given else {}
        return {name: value for name, value in given.items() if name not in ("revision", "update")} | renamed


class GPUOption(Options, panel="Model"):
    gpu: int | None = option(
        "The GPU that is opened, by its number from 0 on among those that CUDA_VISIBLE_DEVICES shows [default: the "
        "first].",
        least=0,
    )


class ComputingOptions(NamedModelOptions, GPUOption, panel="Model"):
    backend: str | None = option("What computes.", choices=BACKENDS)
    executor: str | None = option("What runs steps on a GPU: kernels, or wherever it can TensorRT.", choices=EXECUTORS)
    gpus: int | None = option(
        "How many GPUs share the model; NumPy has so many threads [default: 1].", least=1, most=MOST_GPUS
    )
    kv_cache: str | None = option(
        "Keep the KV cache in the dtype that is computed in, or in 8 bits, which takes half the memory [default: as "
        "the engine directory was built].",
        choices=KV_CACHES,
    )
    config: Path | None = option(
        "YAML settings [default: $EDGELLM_CONFIG, ~/.config/edgellm/config.yaml].",
        envvar="EDGELLM_CONFIG",
        show_envvar=False,
    )


class LogOptions(Options, panel="Logs and errors"):
    log_level: str | None = option(
        "What is logged to the standard error stream [default: warning].",
        choices=LEVELS,
        callback=lambda value: choose_logs("level", value),
        is_eager=True,
    )
    log_format: str | None = option(
        "Log lines for people or, as JSON, for programs [default: text].",
        choices=FORMATS,
        callback=lambda value: choose_logs("form", value),
        is_eager=True,
    )
    debug: bool = option("Show where an error comes from.", callback=_set_debug, is_eager=True)


def sampled(help: str, *flags: str, **details: Any) -> Any:
    """An option for a field of `SamplingParams`, which has the same name."""
    return option(help, *flags, check=checked_value, is_free=True, **details)


class SamplingOptions(Options, panel="Sampling"):
    temperature: float | None = sampled("Randomness; 0 takes the likeliest token.")
    top_p: float | None = sampled("Draw from the likeliest tokens that reach P together.")
    top_k: int | None = sampled("Draw from the K likeliest tokens; 0: all.")
    min_p: float | None = sampled("Leave out tokens P times less likely than the likeliest.")
    repetition_penalty: float | None = sampled("Above 1: fewer repetitions.")
    presence_penalty: float | None = sampled("Above 0: more new tokens.")
    frequency_penalty: float | None = sampled("Above 0: fewer frequent tokens.")
    seed: int | None = sampled("The same seed draws the same tokens [default: a random one].")
    max_tokens: int | None = sampled("Most tokens of an answer [default: what fits].")
    min_tokens: int | None = sampled("Fewest tokens of an answer [default: 0].")
    stop: list[str] | None = sampled(f"End the answer before this text; {_REPEATED}")


class StructureOptions(Options, panel="Sampling"):
    logprobs: int | None = sampled("Show each token's log-probability, and the N likeliest there.", metavar="N")
    json_schema: Path | None = option("The answer is JSON of the schema in this file.", metavar="FILE")
    regex: str | None = option("The whole answer matches this regular expression.", metavar="REGEX", is_free=True)
    choice: list[str] | None = option(
        "The answer is one of these texts; may be given several times.", metavar="TEXT", is_free=True
    )

    def structure(self) -> Structure | None:
        """The structure that was given, None without one; RequestError for a wrong one, usage errors for several."""
        given = [name for name in ("json_schema", "regex", "choice") if getattr(self, name) not in (None, [])]
        if len(given) > 1:
            flags = [f"--{name.replace('_', '-')}" for name in given]
            raise typer.BadParameter(f"is given beside {flags[0]}: an answer has one form", param_hint=flags[1])
        if self.json_schema is not None:
            return read_schema(self.json_schema)
        return Structure(**{name: getattr(self, name) for name in given}) if given else None


class ChatTemplateOption(Options, panel="Prompt"):
    chat_template: Path | None = option("File with a chat template, instead of the model's.")


class PromptOptions(ChatTemplateOption, panel="Prompt"):
    system: str | None = option("System prompt [default: the model's own]; '' is none.", is_free=True)
    system_file: Path | None = option("File with the system prompt.")

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
        return self.system


class SystemCacheOptions(Options, panel="Prompt"):
    system_cache: str | None = option(
        "Snapshot that edgellm cache build made: take the system prompt and its KV cache from it. A name as edgellm "
        "cache list shows it, or a file.",
        metavar="FILE",
        expected="a file or the name of a snapshot",
        may_be_path=True,
    )
    no_system_cache: bool = option("Begin without the snapshot that a settings file names.")


class ImageOptions(Options, panel="Prompt"):
    images: list[Path] | None = option(
        f"Show an image with the (first) question; {_REPEATED}", "--image", metavar="FILE"
    )


class LoraOption(Options, panel="LoRA adapters"):
    lora: list[str] | None = option(
        f"Load a LoRA adapter (a PEFT directory) beside those of the engine directory; {_REPEATED}", metavar="NAME=DIR"
    )


class AdapterOptions(LoraOption, panel="LoRA adapters"):
    adapter: str | None = option(
        "Answer with this LoRA adapter [default: none].", metavar="NAME", expected="the name of an adapter"
    )
    no_adapter: bool = option("Answer without the adapter that a settings file names.")


class ChatOutputOptions(Options, panel="Output"):
    history: bool | None = option("Keep the questions in a file.")
    stats: bool | None = option("A line of counts and speeds after answers; /stats says more.")


class HostMemoryOptions(Options, panel="Limits"):
    preemption_mib: int | None = option(
        "MiB of the host's memory for rows of answers that give way to more urgent ones [default: 256].", **_MIB
    )
    states_mib: int | None = option(
        "MiB of the host's memory for recurrent states at places of texts, of models that have such [default: 256].",
        **_MIB,
    )


class ToolOptions(Options, panel="Tools and template"):
    tools: Path | None = option(
        "Tell the model of functions that it may call: a JSON list, as OpenAI's API takes it.", metavar="FILE"
    )
    thinking: bool | None = option(
        "Let the model think before it answers, or not, where its template has that choice (enable_thinking)."
    )
    template_variable: list[str] | None = option(
        f"Set a variable of the chat template; VALUE is JSON, else text; {_REPEATED}", metavar="NAME=VALUE"
    )

    def template_inputs(self) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
        """The tools (None: none) and the template's variables that were given. Raises RequestError that names the file
        and the place in it, and typer.BadParameter for a wrong variable."""
        variables: dict[str, Any] = {} if self.thinking is None else {"enable_thinking": self.thinking}
        try:
            for text in self.template_variable or ():
                name, equals, value = text.partition("=")
                if not equals:
                    raise RequestError(f"{text!r}: expected NAME=VALUE")
                if name in variables:
                    raise RequestError(f"{name} is given twice")
                variables[name] = json_or_text(value)
            variables = checked_variables(variables)
        except RequestError as error:
            raise typer.BadParameter(str(error), param_hint="--template-variable") from error
        if self.tools is None:
            return None, variables
        return read_json_file(self.tools, "--tools", checked_tools), variables


class DraftingOptions(Options, panel="Drafting"):
    draft: str | None = option(
        "Draft with the model's EAGLE head, or, with suffix, from what was said before, which every model can "
        "[default: with the head where there is one].",
        metavar=OPTIONAL_KIND,
        is_free=True,
    )
    no_draft: bool = option("Decode without a draft.")
    suffix_decoding: bool | None = option("Draft from what was said before, too, beside the model's EAGLE head.")
    draft_top_k: int | None = option("Width of a draft tree's levels; 1 is a chain.")
    draft_steps: int | None = option("Levels of the draft: tokens of a chain.")
    verify_tree_size: int | None = option("Nodes verified in a round, the root included.")
    choices: str | None = option(
        "Draft a static tree: a YAML or JSON list of paths, or the name mc_sim_7b_63 or eagle_25.", metavar="FILE"
    )
    acceptance: str | None = option(
        "exact gives the tokens of decoding without a draft; typical is lossy: it accepts more, other text.",
        metavar="exact|typical",
    )
    posterior_threshold: float | None = option("Typical acceptance: accept from this probability on [0.09].")
    posterior_alpha: float | None = option("Typical acceptance: factor of exp(-entropy) [root of the threshold].")
    adaptive: bool | None = option(
        "Let measured speed pick a smaller draft, or none, or always draft the same [default: pick]."
    )

    def applied_to(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Drafting settings with these options on top; a contradiction is a usage error that names an option."""
        if self.no_draft and self.draft is not None:
            raise typer.BadParameter("--draft is given, and so is --no-draft: expected only one of them")
        given = self.given(DraftingOptions)
        kind = given.pop("draft", "")
        given |= {"kind": kind} if kind else {}
        if not given.pop("no_draft") and not given and self.draft is None:
            return settings
        given["draft"] = not self.no_draft  # who says how to draft wants a draft
        from edgellm.drafting.config import merged_drafting

        try:
            return merged_drafting(settings, given)
        except RequestError as error:  # in the words of the command line
            message = str(error).replace("but draft is false", "and so is --no-draft").replace("kind is", "--draft is")
            for name in options_of(DraftingOptions).keys() - {"draft"}:
                message = re.sub(rf"\b{name} is\b", f"--{name.replace('_', '-')} is", message)
            raise typer.BadParameter(message) from error


def read_text_file(path: Path, what: str) -> str:
    """The text of a UTF-8 file, or of a pipe, without its last line end; RequestError names `what` and the place."""
    text = read_text(path, PROMPT_BYTES, RequestError, what, takes_pipes=True)
    return text.removesuffix("\n").removesuffix("\r")


def read_json_file(path: Path, what: str, checked: Callable[[Any], _Checked]) -> _Checked:
    """What `checked` makes of the JSON value in a file; RequestError names `what` and the file."""
    value = parse_json(read_text_file(path, what), f"{what} {path}", RequestError)
    with at_place(f"{what} {path}", RequestError):
        return checked(value)


def read_schema(path: Path) -> Structure:
    """The structure of a file with a JSON schema; raises RequestError that names the file."""
    return read_json_file(path, "the JSON schema", lambda schema: Structure(json=schema))


def json_or_text(text: str) -> Any:
    """The JSON value that a user wrote; what is none is a text itself."""
    try:
        return parsed_json(text)
    except (ValueError, RecursionError):
        return text


def read_source(file: Path | None, ways: str, hint: str, takes_terminal: bool = False) -> tuple[str, str]:
    """The text of `--file`, or of standard input where there is none, and where it comes from. A terminal is a usage
    error that tells other `ways` and gives a `hint`, unless `takes_terminal`. RequestError for what is no text."""
    if file is not None:
        return read_text_file(file, "--file"), f"the file {file}"
    if not takes_terminal and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter(f"missing: give it {ways}, or on standard input", param_hint=hint)
    return read_standard_input(), "standard input"


def read_standard_input() -> str:
    """The text of standard input without its last line end; raises RequestError."""
    data = sys.stdin.buffer.read(PROMPT_BYTES + 1)
    if len(data) > PROMPT_BYTES:
        raise RequestError(f"standard input has more than the {PROMPT_BYTES:,} bytes that are read of it")
    return decoded(data, "standard input", RequestError).removesuffix("\n").removesuffix("\r")
