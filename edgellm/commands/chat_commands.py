"""The commands of `edgellm chat`, each a line that begins with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from edgellm.commands import images
from edgellm.commands.chat_file import load_conversation, save_conversation
from edgellm.commands.console import statistics_lines
from edgellm.commands.descriptions import adapters_in_words
from edgellm.commands.models import model_name
from edgellm.commands.options import json_or_text, read_schema
from edgellm.commands.settings import SAMPLING_KEYS
from edgellm.errors import RequestError, did_you_mean, number_of
from edgellm.kernels.user_paths import user_path
from edgellm.sampling_params import SamplingParams, checked_value

if TYPE_CHECKING:
    from edgellm.drafting.config import DraftingConfig
    from edgellm.llm import LLM
    from edgellm.requests import Response
    from edgellm.sessions import Session

#: The argument of a command that is a path, of any file.
FILE = "file"
#: What takes the place of an argument that a command would show without one.
NOTHING = '""'
_NOTES = '''\
A trailing backslash, or """ before and after, makes a message of several lines; // begins a message with a slash.
The path of an image file in a message, as terminals write it where a file is dropped, shows the image.
Ctrl-C stops an answer.'''


class Leave(Exception):
    """The user wants to leave."""


@dataclass
class ChatState:
    """A chat as it goes on: the model, the conversation, and what has been counted.

    `attached_images` are shown with the next question. `image_system` takes the place of the system prompt where that
    is `text_system` and images are shown, until the conversation is forgotten or nothing is shown any more.
    """

    llm: LLM
    conversation: Session
    say: Callable[[str], None]
    shows_statistics: bool = False
    last_response: Response | None = None
    last_seed: int | None = None
    answers: int = 0
    answer_tokens: int = 0
    attached_images: list[images.Part] = field(default_factory=list)
    text_system: str | None = None
    image_system: str | None = None

    @property
    def params(self) -> SamplingParams:
        return self.conversation.params or SamplingParams()

    def show(self, path: Path, question: str = "The next question") -> None:
        """Show an image with the next question, which is called `question`. RequestError or ImageError where that
        cannot be."""
        images.require_vision(self.llm)
        attached_image = images.read_image_file(path)
        self.attached_images.append(attached_image)
        self.say(f"{question} shows {images.image_in_words(attached_image)}.")
        if self._has_image_system and self.conversation.system == self.text_system:
            self.conversation.system = self.image_system
            self.say(
                "The system prompt is now the model's own for images: /system shows it, /reset takes the first one."
            )

    def return_to_first_system(self) -> bool:
        """Take the system prompt again that images took the place of; says whether they had."""
        if not self._has_image_system or self.conversation.system != self.image_system:
            return False
        self.conversation.system = self.text_system
        return True

    @property
    def _has_image_system(self) -> bool:
        return self.image_system is not None and self.image_system != self.text_system


def is_command(message: str) -> bool:
    """Whether a message is for the program: it begins with one slash, not two."""
    return message.startswith("/") and not message.startswith("//")


class Command(NamedTuple):
    """What carries a command out, its form and purpose for /help, and what completes its argument: FILE, or words."""

    run: Callable[[ChatState, str], SamplingParams | None]
    form: str
    purpose: str
    completion: str | Callable[[ChatState], Iterable[str]] | None


#: The commands by name, without the slash, in the order of /help.
COMMANDS: dict[str, Command] = {}
_ALIASES = {"?": "help", "bye": "exit", "quit": "exit"}
_Run = TypeVar("_Run", bound=Callable[..., Any])


def _command(form: str, purpose: str, completion: Any = None) -> Callable[[_Run], _Run]:
    """Makes a command of a function, which is named by the first word of its form."""

    def add(run: _Run) -> _Run:
        COMMANDS[form.split()[0].strip("/,")] = Command(run, form, purpose, completion)
        return run

    return add


def run_command(state: ChatState, line: str) -> SamplingParams | None:
    """Carry out a command; raises Leave, or RequestError for one that is unknown or wrong. Where the last question is
    to be answered again, the sampling to do that with is returned."""
    name, _, argument = line[1:].strip().partition(" ")
    name, argument = _ALIASES.get(name, name), argument.strip()
    if name not in COMMANDS:
        images.require_image_there(line)
        close = did_you_mean(name, tuple(COMMANDS))
        hint = close.replace("mean ", "mean /") if "did you mean" in close else ""
        raise RequestError(f"/{name} is no command{hint}; /help lists them")
    return COMMANDS[name].run(state, NOTHING if argument == "''" else argument)


@_command("/help, /?", "this list")
def _help(state: ChatState, argument: str) -> None:
    state.say("\n".join([*(f"{each.form:<20} {each.purpose}" for each in COMMANDS.values()), _NOTES]))


@_command("/reset", "forget the conversation, keep the system prompt (but for one that an image brought)")
def _reset(state: ChatState, argument: str) -> None:
    state.conversation.trim(0)
    state.attached_images.clear()
    returned = state.return_to_first_system()
    state.say(f"The conversation is forgotten{', and the system prompt is the first one again' if returned else ''}.")


@_command("/undo", "take the last question and its answer back")
def _undo(state: ChatState, argument: str) -> None:
    turn = state.conversation.undo()
    parts = next((message["content"] for message in turn if message["role"] == "user"), "")
    text = parts if isinstance(parts, str) else " ".join(part.get("text", "(an image)") for part in parts)
    state.say(f"Taken back: {shorten(text, 70, placeholder=' ...')}")


@_command("/retry", "answer the last question again, with a new seed where answers are drawn")
def _retry(state: ChatState, argument: str) -> SamplingParams:
    return replace(state.params, seed=None).seeded()


@_command("/trim N", "keep the last N questions and their answers, forget what came before")
def _trim(state: ChatState, argument: str) -> None:
    if not argument.isdecimal() or len(argument) > 9:
        raise RequestError(f"/trim takes how many questions to keep, not {argument[:20]!r}: /trim N")
    left = state.conversation.trim(int(argument))
    state.say(f"{turns_in_words(left).capitalize()} left the conversation.")


def turns_in_words(count: int) -> str:
    """ "3 questions and their answers"."""
    return "question and its answer" if count == 1 else f"{count} questions and their answers"


@_command("/system [TEXT]", 'show or set the system prompt; "" is none')
def _system(state: ChatState, argument: str) -> None:
    if argument:
        state.conversation.system = "" if argument == NOTHING else argument
        state.say("The system prompt is set; the conversation goes on. /reset starts a new one.")
    else:
        state.say(state.conversation.system or "There is no system prompt.")


@_command("/image [FILE]", 'show an image with the next question, or list those it will show; "" is none', FILE)
def _image(state: ChatState, argument: str) -> None:
    if argument == NOTHING:
        state.attached_images.clear()
        shows_none = not any(isinstance(message["content"], list) for message in state.conversation.messages)
        returned = shows_none and state.return_to_first_system()
        state.say(f"The next question shows no image{', and the system prompt is the first one' if returned else ''}.")
    elif argument:
        text, files = images.dropped_files(argument)
        for path in files if files and not text else [Path(argument)]:
            state.show(path)
    elif state.attached_images:
        state.say(f"The next question shows {', '.join(map(images.image_in_words, state.attached_images))}.")
    else:
        images.require_vision(state.llm)
        state.say("No image waits for a question: /image FILE shows one.")


@_command(
    "/set [NAME VALUE]",
    "show or set how answers are drawn (temperature, top_p, seed, max_tokens, stop, ...)",
    lambda _: SAMPLING_KEYS,
)
def _set(state: ChatState, argument: str) -> None:
    name, _, text = argument.partition(" ")
    params = state.params
    if not name:
        state.say("\n".join(f"{key} {shown(getattr(params, key))}" for key in SAMPLING_KEYS))
        return
    if name not in SAMPLING_KEYS:
        raise RequestError(f"there is no setting {name!r}{did_you_mean(name, SAMPLING_KEYS)}")
    if text.strip():
        params = replace(params, **{name: checked_value(name, _value(name, text.strip()))})
        state.conversation.params = params
    state.say(f"{name} {shown(getattr(params, name))}")


def _value(name: str, text: str) -> Any:
    """What the user wrote: "none" for the default, a number, true or false, a JSON string or list, or plain text."""
    if text == "none":
        return getattr(SamplingParams, name)
    value = json_or_text(text)
    return text if name == "stop" and not isinstance(value, (str, list)) else value


def shown(value: Any) -> str:
    """A setting as `/set` takes it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(repr, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


@_command("/schema [FILE]", 'show the JSON schema of answers, or ask for one; "" is none', FILE)
def _schema(state: ChatState, argument: str) -> None:
    structure = state.params.structure
    if argument:
        structure = None if argument == NOTHING else read_schema(_path(argument, "schema"))
        state.conversation.params = replace(state.params, structure=structure)
    if structure is None:
        state.say("Answers have any form: /schema FILE asks for JSON of a schema.")
    else:
        state.say(json.dumps(structure.json, indent=2, ensure_ascii=False) if not argument else "Answers are JSON now.")


@_command("/draft [KIND]", 'show or set what drafts: suffix (what was said before), chain, tree; "" is nothing')
def _draft(state: ChatState, argument: str) -> None:
    from edgellm.drafting.config import drafting_config  # it takes long to load, and the model has loaded it

    llm = state.llm
    if argument:
        chosen = None if argument == NOTHING else {"kind": argument}
        limits, backend = llm.directory.limits, llm.backend_name
        llm.use_drafting(None if chosen is None else drafting_config(limits, backend, chosen))
    state.say(f"{drafted_by(llm.drafting)}.")


def drafted_by(drafting: DraftingConfig | None) -> str:
    if drafting is None:
        return "Nothing is drafted"
    if not drafting.needs_draft_model:
        return "Drafts are what followed the same tokens before, where that should be faster"
    beside = ", or what followed the same tokens before" if drafting.suffix_decoding else ""
    return f"Drafts are those of the draft model{beside}{', where that should be faster' if drafting.adaptive else ''}"


@_command("/adapter [NAME]", 'show the LoRA adapters, or answer with one; "" is none', lambda state: state.llm.adapters)
def _adapter(state: ChatState, argument: str) -> None:
    names, conversation = state.llm.adapters, state.conversation
    if argument:
        name = None if argument == NOTHING else argument
        if name is not None and name not in names:
            hint = did_you_mean(name, names) if names else ": none is loaded (--lora NAME=DIR loads one)"
            raise RequestError(f"there is no LoRA adapter {name!r}{hint}")
        conversation.adapter = name
        state.say(f"Answers are given {f'with {name}' if name else 'without an adapter'} from now on.")
    else:
        words = adapters_in_words(names, conversation.adapter)
        state.say(f"{words}." if words else "There are no LoRA adapters; --lora NAME=DIR loads one.")


def _path(argument: str, command: str) -> Path:
    if argument[:1] in ("'", '"') and argument[-1:] == argument[:1]:  # as shells and terminals write names with spaces
        argument = argument[1:-1]
    if not argument or "\0" in argument:
        raise RequestError(f"/{command} needs the name of a file: /{command} FILE")
    return user_path(argument)


@_command("/save FILE", "write the conversation to a new file, or over a conversation", FILE)
def _save(state: ChatState, argument: str, replaces_any: bool = False) -> None:
    path = _path(argument, "save!" if replaces_any else "save")
    saved = save_conversation(path, state.conversation, model_name(state.llm), replaces_any)
    state.say(f"Saved {saved} messages to {path}.")


_command("/save! FILE", "write it over any file", FILE)(partial(_save, replaces_any=True))


@_command("/load FILE", "go on with a conversation from a file", FILE)
def _load(state: ChatState, argument: str) -> None:
    path = _path(argument, "load")
    loaded, session = load_conversation(path), state.conversation
    if loaded.adapter is not None and loaded.adapter not in state.llm.adapters:
        raise RequestError(
            f"{path}: its answers were given with the LoRA adapter {loaded.adapter!r}, which is not loaded: start with "
            f"--lora {loaded.adapter}=DIR"
        )
    if any(isinstance(message["content"], list) for message in loaded.messages):
        images.require_vision(state.llm)
    session.replace(loaded.messages)
    session.system, session.params, session.adapter = loaded.system or "", loaded.params, loaded.adapter
    state.say(f"Loaded {len(loaded.messages)} messages from {path}.")
    if loaded.model != model_name(state.llm):
        state.say(f"They were had with {loaded.model or 'another model'}; this is {model_name(state.llm)}.")


@_command("/stats", "counts and speeds of the last answer and of this session")
def _stats(state: ChatState, argument: str) -> None:
    llm, response = state.llm, state.last_response
    model = f"model: {model_name(llm)} ({llm.directory.config.family}), {llm.backend_name} backend"
    lines = [f"{model}, context {llm.context_length} tokens"]
    if llm.adapters:
        lines.append(adapters_in_words(llm.adapters, state.conversation.adapter))
    if response is None:
        lines.append("no answer yet")
    else:
        lines += statistics_lines(response, llm.context_length)
        lines.append("drawn: " + ("greedy" if state.last_seed is None else f"with seed {state.last_seed}"))
        drafting, report = response.drafting, llm.drafting_report
        if drafting is not None and drafting.rounds:
            shares = ", ".join(f"{share:.0%}" for share in drafting.acceptance_by_position)
            plans = ", ".join(f"{name} {count}" for name, count in drafting.plans.items())
            lines.append(f"draft: rounds {plans}; accepted at depth 1, 2, ...: {shares or 'nothing'}")
        if report is not None:
            lines.append(f"draft chosen: {report.reason}")
    if llm.has_vision_model:
        counts = llm.metrics()["multimodal"]
        seen = f"images: {counts['images']} in prompts, {counts['reused_images']} of them encoded before"
        lines.append(f"{seen}, {counts['image_tokens']} tokens, encoded in {counts['seconds']:.2f} s")
    lines.append(f"session: {number_of(state.answers, 'answer')}, {number_of(state.answer_tokens, 'token')}")
    state.say("\n".join(lines))


@_command("/exit, /bye", "leave (also Ctrl-D)")
def _exit(state: ChatState, argument: str) -> None:
    raise Leave
