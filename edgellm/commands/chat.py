"""`edgellm chat`: a conversation at the terminal, or with a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from edgellm.commands import options
from edgellm.commands.chat_commands import ChatState, Leave, is_command, run_command, turns_in_words
from edgellm.commands.chat_input import LineSource, PipedLines, TerminalLines, chat_completion, open_lines, read_message
from edgellm.commands.console import (
    CancelOnInterrupt,
    LogFormat,
    LogLevel,
    call_lines,
    ended_by_signals,
    prepare_output,
    say,
    statistics_line,
    write_answer,
    write_error,
    write_note,
)
from edgellm.commands.descriptions import adapters_in_words
from edgellm.commands.images import dropped_files, require_image_there, shown_content
from edgellm.commands.models import model_name, open_model, sampling_params, system_prompt, with_cached_prompt
from edgellm.commands.option_groups import LOGS, OUTPUT, DraftingOptions, with_option_groups
from edgellm.errors import EdgeLLMError
from edgellm.kernels.user_paths import user_path
from edgellm.text.messages import require_tools_shown

if TYPE_CHECKING:
    from edgellm.generation import Generation
    from edgellm.llm import LLM
    from edgellm.observing.observer import Observer
    from edgellm.requests import Response
    from edgellm.sampling_params import SamplingParams


@dataclass(frozen=True)
class ObservingOptions:
    """What to take note of; by default nothing, which costs nothing."""

    PANEL: ClassVar[str] = LOGS

    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write what the draft, verification, acceptance and the host took of each round, in Chrome's trace "
            "format (open it at ui.perfetto.dev). Rounds then run stage by stage, a little slower.",
        ),
    ] = None
    nvtx: Annotated[
        bool, typer.Option("--nvtx", help="Mark the same parts as NVTX ranges, for NVIDIA's profilers.")
    ] = False


@contextmanager
def observing(options: ObservingOptions) -> Iterator[Observer | None]:
    """What is to observe the model, None for nothing; the model must be closed when this ends.

    Raises RequestError where the trace cannot be written, MissingDependencyError where there is no NVTX.
    """
    if options.trace is None and not options.nvtx:
        yield None
        return
    from edgellm.observing.observer import Observers

    observers: list[Observer] = []
    trace = None
    if options.trace is not None:
        from edgellm.tracing import Trace

        trace, path = Trace(), user_path(options.trace)
        trace.save(path)  # what cannot be written is said now
        observers.append(trace)
    if options.nvtx:
        from edgellm.observing.observer import NvtxRanges

        observers.append(NvtxRanges())
    try:
        yield Observers(*observers)
    finally:
        if trace is not None:
            trace.save(path)
            write_note(f"The trace of {len(trace.spans)} spans is in {path}: open it at ui.perfetto.dev.")


@with_option_groups
def chat(
    *,
    engine: options.ModelOptions,
    prompting: options.PromptOptions,
    sampling: options.SamplingOptions,
    drafting: DraftingOptions,
    adapters: options.AdapterOptions,
    tooling: options.ToolOptions,
    system_cache: options.SystemCache = None,
    images: options.Images = None,
    history: Annotated[
        bool | None,
        typer.Option(
            "--history/--no-history", rich_help_panel=OUTPUT, help="Keep the questions in a file.", show_default=False
        ),
    ] = None,
    stats: Annotated[
        bool | None,
        typer.Option(
            "--stats/--no-stats",
            rich_help_panel=OUTPUT,
            help="A line of counts and speeds after answers; /stats says more.",
            show_default=False,
        ),
    ] = None,
    computing: options.ComputingOptions,
    observed: ObservingOptions,
    config: options.Config = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    debug: options.Debug = False,
) -> None:
    """Talk to a model; from a pipe, every line is a question. /help lists the commands.

    Example: edgellm chat --image cup.jpg --temperature 0.7
    """
    prepare_output()
    settings = options.chosen_settings(
        config,
        model=engine.chosen(),
        computing=computing,
        prompt=prompting,
        sampling=sampling,
        drafting=drafting,
        adapters=adapters,
        system_cache=system_cache,
    )
    settings, tools, variables = with_cached_prompt(
        settings, bool(system_cache) and not prompting.has_system_prompt, *options.template_inputs(tooling)
    )
    lines = open_lines(settings.history if history is None else history)
    with_stats = settings.stats if stats is None else stats
    with (
        ended_by_signals(),
        observing(observed) as observer,
        open_model(settings, every_adapter=True, tools=tools, template_variables=variables) as llm,
    ):
        if observer is not None:
            llm.observe(observer)
        params = sampling_params(settings, llm.default_params)
        if tools:
            require_tools_shown(tools, llm.tokenizer.template_variables(), llm.tokenizer.template_origin)
        own = system_prompt(llm, settings) or ""
        conversation = llm.create_session(own, params, settings.adapter, tools=tools, template_variables=variables)
        conversation.warn = lambda warning: write_note(f"Note: {warning}.")
        state = ChatState(llm, conversation, say=write_note)
        state.text_system, state.image_system = own, system_prompt(llm, settings, with_images=True) or ""
        for image in images or ():
            state.show(image)
        try:
            if isinstance(lines, TerminalLines):
                state.say = say
                lines.complete_with(chat_completion(state).candidates)
                write_note(_greeting(llm, settings.adapter))
                converse_at_terminal(state, lines, True if with_stats is None else with_stats)
            else:
                converse_by_pipe(state, lines, bool(with_stats))
        except (Leave, EOFError):
            pass
        finally:
            if isinstance(lines, TerminalLines):
                lines.close()


def converse_at_terminal(state: ChatState, lines: LineSource, with_stats: bool) -> None:
    """Answer until the user leaves; errors are shown and the conversation goes on. Raises Leave or EOFError."""
    interrupted = False
    while True:
        try:
            message = read_message(lines)
            interrupted = False
            _handle(state, message, with_stats)
        except EOFError:
            print()
            raise
        except KeyboardInterrupt:
            print()
            if interrupted:
                return
            interrupted = True
            write_note("Press Ctrl-C again or Ctrl-D to leave.")
        except EdgeLLMError as error:
            write_error(error)


def converse_by_pipe(state: ChatState, lines: PipedLines, with_stats: bool) -> None:
    """Answer every line, going on after errors, of which the exit code tells; a line that is no text ends it."""
    failed = False
    while True:
        try:
            message = read_message(lines)
        except EOFError:
            if failed:
                raise typer.Exit(1) from None
            raise
        try:
            _handle(state, message, with_stats)
        except Leave:
            if failed:
                raise typer.Exit(1) from None
            raise
        except EdgeLLMError as error:
            failed = True
            write_error(error)
        if state.last_response is not None and state.last_response.finish_reason == "cancelled":
            raise KeyboardInterrupt


def _handle(state: ChatState, message: str, with_stats: bool) -> None:
    text, files = dropped_files(message)
    if is_command(message) and text.startswith(message.split(maxsplit=1)[0]):  # no file that was dropped first
        again = run_command(state, message)
        if again is not None:
            _answer(state, state.conversation.retry, again, with_stats)
            if not again.needs_sampling:
                state.say("Answers are not drawn, so the same one comes again: /set temperature 0.7 draws others.")
    elif files and not state.llm.has_vision_model:
        state.say(f"This model sees no images: the path of {files[0].name} is sent as text.")
        answer(state, message, with_stats)
    elif files:
        for file in files:
            state.show(file, "This question" if text else "The next question")
        if text:
            answer(state, text, with_stats)
    elif message.strip():
        require_image_there(message)
        answer(state, message[1:] if message.startswith("//") else message, with_stats)


def answer(state: ChatState, question: str, with_stats: bool) -> None:
    """Stream the answer to a question; both become part of the conversation unless nothing was answered."""
    content = shown_content(state.attached_images, question)
    response = _answer(state, partial(state.conversation.stream, content), state.params.seeded(), with_stats)
    if response.is_answered:
        state.attached_images.clear()


def _answer(
    state: ChatState, ask: Callable[[SamplingParams], Generation], params: SamplingParams, with_stats: bool
) -> Response:
    """Stream the answer that `ask` gives with these parameters, and say what it did to the conversation."""
    with CancelOnInterrupt() as interrupt:
        stream = ask(params)
        interrupt.watch(stream)
        with stream:
            for chunk in stream:
                write_answer(chunk.text)
    write_answer("\n")
    response, context = stream.result(), state.llm.context_length
    write_answer("".join(f"{line}\n" for line in call_lines(response)))
    state.last_response, state.last_seed = response, params.seed
    state.answers += 1
    state.answer_tokens += response.usage.completion_tokens
    if with_stats:
        write_note(statistics_line(response, context))
    if response.dropped_turns and response.is_answered:
        turns = turns_in_words(response.dropped_turns)
        write_note(f"The oldest {turns} left the conversation, to make room in the context ({context} tokens).")
    if response.finish_reason == "context":
        write_note(f"The context is full ({context} tokens), the answer was cut: /set max_tokens N keeps room for N.")
    state.conversation.take_in()
    return response


def _greeting(llm: LLM, adapter: str | None) -> str:
    from importlib import metadata

    version = metadata.version("edgellm")
    adapters = adapters_in_words(llm.adapters, adapter)
    sight = ", sees images (/image FILE)" if llm.has_vision_model else ""
    return (
        f"EdgeLLM {version}: {model_name(llm)} on the {llm.backend_name} backend, context {llm.context_length} tokens"
        f"{sight}{adapters and ', '}{adapters}. "
        "/help lists the commands, Ctrl-D leaves."
    )
