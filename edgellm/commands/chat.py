"""`edgellm chat`: a conversation at the terminal, or with a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgellm import __version__
from edgellm.commands import console, models, options
from edgellm.commands.chat_commands import COMMANDS, ChatState, Leave, is_command, run_command, turns_in_words
from edgellm.commands.chat_input import PipedLines, TerminalLines, candidates, open_lines, read_message
from edgellm.commands.descriptions import adapters_in_words
from edgellm.commands.images import dropped_files, require_image_there, shown_content
from edgellm.commands.settings import chosen_settings
from edgellm.commands.table import Options, option, takes_options
from edgellm.errors import DeviceLostError, EdgeLLMError
from edgellm.text.messages import require_tools_shown

if TYPE_CHECKING:
    from edgellm.generation import Generation
    from edgellm.llm import LLM
    from edgellm.requests import Response
    from edgellm.sampling_params import SamplingParams
    from edgellm.tracing import Observer


class ObservingOptions(Options, panel="Logs and errors"):
    """What to take note of; by default nothing, which costs nothing."""

    trace: Path | None = option(
        "Write what the draft, verification, acceptance and the host took of each round, in Chrome's trace format "
        "(open it at ui.perfetto.dev). Rounds then run stage by stage, a little slower.",
        metavar="FILE",
    )
    nvtx: bool = option("Mark the same parts as NVTX ranges, for NVIDIA's profilers.")


class ChatOptions(
    options.ModelOptions,
    options.PromptOptions,
    options.SystemCacheOptions,
    options.ImageOptions,
    options.SamplingOptions,
    options.DraftingOptions,
    options.AdapterOptions,
    options.ToolOptions,
    options.ChatOutputOptions,
    options.ComputingOptions,
    ObservingOptions,
    options.LogOptions,
):
    """All options of the command."""


@contextmanager
def observing(asked: ObservingOptions) -> Iterator[Observer | None]:
    """What is to observe the model, None for nothing; the model must be closed when this ends. Raises RequestError
    where the trace cannot be written, MissingDependencyError where there is no NVTX."""
    if asked.trace is None and not asked.nvtx:
        yield None
        return
    from edgellm.tracing import NvtxRanges, Observers, Trace

    trace, path = Trace(), asked.trace
    if path is not None:
        trace.save(path)  # what cannot be written is said now
    ranges = [NvtxRanges()] if asked.nvtx else []
    try:
        yield Observers(*([] if path is None else [trace]), *ranges)
    finally:
        if path is not None:
            trace.save(path)
            console.write_note(f"The trace of {len(trace.spans)} spans is in {path}: open it at ui.perfetto.dev.")


@takes_options
def chat(given: ChatOptions) -> None:
    """Talk to a model; from a pipe, every line is a question. /help lists the commands.

    Example: edgellm chat --image cup.jpg --temperature 0.7
    """
    settings, tools, variables = models.with_cached_prompt(chosen_settings(given), given, *given.template_inputs())
    lines = open_lines(settings.history)
    with (
        console.ended_by_signals(),
        observing(given) as observer,
        models.open_model(settings, every_adapter=True, tools=tools, template_variables=variables) as llm,
    ):
        if observer is not None:
            llm.observe(observer)
        params = models.sampling_params(settings, llm.default_params)
        if tools:
            require_tools_shown(tools, llm.tokenizer.template_variables(), llm.tokenizer.template_origin)
        own = models.system_prompt(llm, settings) or ""
        conversation = llm.create_session(own, params, settings.adapter, tools=tools, template_variables=variables)
        conversation.warn = lambda warning: console.write_note(f"Note: {warning}.")
        state = ChatState(llm, conversation, console.write_note, bool(settings.stats))
        state.text_system, state.image_system = own, models.system_prompt(llm, settings, with_images=True) or ""
        for image in given.images or ():
            state.show(image)
        try:
            if isinstance(lines, TerminalLines):
                state.say, state.shows_statistics = console.say, settings.stats is not False
                words = {name: each.completion for name, each in COMMANDS.items()}
                possible = {name: partial(each, state) if callable(each) else each for name, each in words.items()}
                lines.complete_with(partial(candidates, possible))
                console.write_note(_greeting(llm, settings.adapter))
                converse_at_terminal(state, lines)
            else:
                converse_by_pipe(state, lines)
        except (Leave, EOFError):
            pass
        finally:
            if isinstance(lines, TerminalLines):
                lines.close()


def converse_at_terminal(state: ChatState, lines: TerminalLines) -> None:
    """Answer until the user leaves; errors are shown and the conversation goes on. Raises Leave or EOFError."""
    interrupted = False
    while True:
        try:
            message = read_message(lines)
            interrupted = False
            _handle(state, message)
        except EOFError:
            print()
            raise
        except KeyboardInterrupt:
            print()
            if interrupted:
                return
            interrupted = True
            console.write_note("Press Ctrl-C again or Ctrl-D to leave.")
        except DeviceLostError:
            raise
        except EdgeLLMError as error:
            console.write_error(error)


def converse_by_pipe(state: ChatState, lines: PipedLines) -> None:
    """Answer every line, going on after errors, of which the exit code tells; a line that is no text ends it."""
    failed = False
    try:
        while True:
            message = read_message(lines)
            try:
                _handle(state, message)
            except DeviceLostError:
                raise
            except EdgeLLMError as error:
                failed = True
                console.write_error(error)
            if state.last_response is not None and state.last_response.finish_reason == "cancelled":
                raise KeyboardInterrupt
    except (EOFError, Leave):
        if failed:
            raise typer.Exit(1) from None
        raise


def _handle(state: ChatState, message: str) -> None:
    text, files = dropped_files(message)
    if is_command(message) and text.startswith(message.split(maxsplit=1)[0]):  # no file that was dropped first
        if (again := run_command(state, message)) is not None:
            _answer(state, state.conversation.retry, again)
            if not again.needs_sampling:
                state.say("Answers are not drawn, so the same one comes again: /set temperature 0.7 draws others.")
    elif files and not state.llm.has_vision_model:
        state.say(f"This model sees no images: the path of {files[0].name} is sent as text.")
        answer(state, message)
    elif files:
        for file in files:
            state.show(file, "This question" if text else "The next question")
        if text:
            answer(state, text)
    elif message.strip():
        require_image_there(message)
        answer(state, message[1:] if message.startswith("//") else message)


def answer(state: ChatState, question: str) -> None:
    """Stream the answer to a question; both become part of the conversation unless nothing was answered."""
    content = shown_content(state.attached_images, question)
    response = _answer(state, partial(state.conversation.stream, content), state.params.seeded())
    if response.is_answered:
        state.attached_images.clear()


def _answer(state: ChatState, ask: Callable[[SamplingParams], Generation], params: SamplingParams) -> Response:
    """Stream the answer that `ask` gives with these parameters, and say what it did to the conversation."""
    response, context = console.read_answer(partial(ask, params)), state.llm.context_length
    state.last_response, state.last_seed = response, params.seed
    state.answers += 1
    state.answer_tokens += response.usage.completion_tokens
    if state.shows_statistics:
        console.write_note(console.statistics_line(response, context))
    if response.dropped_turns and response.is_answered:
        turns = turns_in_words(response.dropped_turns)
        console.write_note(f"The oldest {turns} left the conversation, to make room in the context ({context} tokens).")
    if response.finish_reason == "context":
        cut = f"The context is full ({context} tokens), the answer was cut"
        console.write_note(f"{cut}: /set max_tokens N keeps room for N.")
    state.conversation.take_in()
    return response


def _greeting(llm: LLM, adapter: str | None) -> str:
    name, adapters = models.model_name(llm), adapters_in_words(llm.adapters, adapter)
    sight = ", sees images (/image FILE)" if llm.has_vision_model else ""
    toy = (
        "\nIt is a toy of 10.8 M parameters, which knows its table with cups, toys and the like, and English alone: "
        "edgellm build prepares a model of your own."
    )
    return (
        f"EdgeLLM {__version__}: {name} on the {llm.backend_name} backend, context {llm.context_length} tokens"
        f"{sight}{adapters and ', '}{adapters}. "
        f"/help lists the commands, Ctrl-D leaves.{toy if name == models.SHIPPED_NAME else ''}"
    )
