"""What commands write to the terminal: answers, notes, errors, statistics, logs; and what Ctrl-C does meanwhile."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TextIO

import typer

from edgellm.commands.option_groups import LOGS
from edgellm.kernels.user_paths import printable

if TYPE_CHECKING:
    from edgellm.drafting.acceptance import DraftingStatistics
    from edgellm.requests import Response


LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
#: Control characters that a model's text could steer a terminal with; tab and line end are none of them.
CONTROLS = {code: "\ufffd" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\t\n"}


class Cancellable(Protocol):
    """An answer that grows."""

    def cancel(self) -> None: ...


def prepare_output() -> None:
    """Let standard output and error take any character: one they cannot show becomes a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def write_answer(text: str) -> None:
    """Write a piece of an answer at once; a terminal gets no control characters from it."""
    if text:
        sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def write_note(text: str, stream: TextIO | None = None) -> None:
    """Write a remark beside the answers to standard error, dim where it is a terminal and NO_COLOR is not set."""
    stream = stream or sys.stderr
    text = wrapped(_steering_nothing(text), stream)
    dim = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print(f"\x1b[2m{text}\x1b[0m" if dim else text, file=stream, flush=True)


def say(text: str) -> None:
    """Write what a command of the chat says to standard output."""
    print(wrapped(text, sys.stdout))


def wrapped(text: str, stream: TextIO) -> str:
    """Text as it is to stand on `stream`: on a terminal its lines break between words."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(part for line in text.split("\n") for part in _broken(line, width))


def _broken(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    return textwrap.wrap(line, max(1, width), replace_whitespace=False, break_long_words=False, break_on_hyphens=False)


def write_error(error: BaseException) -> None:
    """Write an error to standard error, with the way it came where EDGELLM_DEBUG is set; what it quotes of files and
    names steers no terminal."""
    if os.environ.get("EDGELLM_DEBUG"):
        traceback.print_exception(error)
    print(wrapped(f"error: {_steering_nothing(str(error))}", sys.stderr), file=sys.stderr, flush=True)


def _steering_nothing(text: str) -> str:
    """Lines with what names in them could steer a terminal with written out."""
    return "\n".join(map(printable, text.split("\n")))


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a terminating signal unwind the command as Ctrl-C does, so that it removes what is half written and keeps
    what is to stay."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class CancelOnInterrupt:
    """While inside, the first Ctrl-C cancels the answer that was given to `watch`; the next one raises.

    An answer that is given after Ctrl-C was pressed is cancelled at once.
    """

    def __init__(self) -> None:
        self._answer: Cancellable | None = None
        self._pressed = False
        self._previous: Any = None

    def watch(self, answer: Cancellable) -> None:
        """Let Ctrl-C cancel `answer`."""
        self._answer = answer
        if self._pressed:
            answer.cancel()

    def __enter__(self) -> CancelOnInterrupt:
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as for a background process: it stays so
        if not ignored and threading.current_thread() is threading.main_thread():  # no other thread gets signals
            self._previous = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _press(self, *_: Any) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True
        if self._answer is not None:
            self._answer.cancel()


def call_lines(response: Response) -> Iterator[str]:
    """A line for each call of a tool that an answer makes, and why one is broken."""
    for call in response.tool_calls:
        yield f"{call.name}({call.arguments})" + ("" if call.complete else " (incomplete)")
    if response.tool_call_error is not None:
        yield f"({response.tool_call_error})"


def statistics_line(response: Response, context_length: int) -> str:
    """What one looks at after every answer: its length, speed and end, and how full the context is."""
    usage, timings = response.usage, response.timings
    speed = timings.tokens_per_second(usage.completion_tokens)
    tokens = _counted(usage.completion_tokens, "token")
    parts = [
        f"{tokens}, {speed:.1f} tokens/s" if speed else tokens,
        f"context {usage.prompt_tokens + usage.completion_tokens}/{context_length}",
        f"ended by {response.finish_reason}",
    ]
    return "[" + " | ".join(parts) + "]"


def statistics_lines(response: Response, context_length: int) -> Iterator[str]:
    """All counts, speeds and the reason of the end of an answer, a subject a line."""
    usage, timings = response.usage, response.timings
    yield f"last answer: {statistics_line(response, context_length)[1:-1]}"
    computed, prefill = usage.prompt_tokens - usage.reused_tokens, timings.prefill_seconds
    speed = f", {computed / prefill:.0f} tokens/s" if prefill > 0 else ""
    reused = f" ({usage.reused_tokens} reused)" if usage.reused_tokens else ""
    yield (
        f"prompt: {_counted(usage.prompt_tokens, 'token')}{reused}, {computed} computed in {prefill:.2f} s{speed}, "
        f"first token after {timings.time_to_first_token:.2f} s"
    )
    if response.drafting is not None:
        yield f"drafting: {drafting_in_words(response.drafting)}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def drafting_in_words(drafting: DraftingStatistics) -> str:
    """What drafting did for an answer: tokens a round, what was drafted most, and where the time went."""
    if not drafting.rounds:
        return "no draft"
    rounds = _counted(drafting.rounds, "round")
    plain = f" and {drafting.plain_steps} plain" if drafting.plain_steps else ""
    most = max(drafting.plans, key=drafting.plans.__getitem__)
    words = f"draft {drafting.mean_acceptance_length:.2f} tokens/round, {rounds}{plain}, {most}"
    if drafting.draft_seconds is None or drafting.verify_seconds is None:
        return words
    return f"{words}, drafting {drafting.draft_seconds:.2f} s, verifying {drafting.verify_seconds:.2f} s"


class JSONLines(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, message, then what the record says beside it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; fields are what was logged with `extra={"edgellm": {...}}`."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= getattr(record, "edgellm", {})
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """The message alone; more of it where more than warnings is asked for."""

    def __init__(self, verbose: bool) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s" if verbose else "%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the fields behind it."""
        line, fields = super().format(record), getattr(record, "edgellm", {})
        return f"{line} ({', '.join(f'{name}={value}' for name, value in fields.items())})" if fields else line


_chosen = {"level": "warning", "form": "text"}


def show_logs(level: str = "warning", form: str = "text") -> None:
    """Show what is logged from `level` on; a later call takes the place of an earlier one."""
    _chosen.update(level=level, form=form)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines() if form == "json" else TextLines(level in ("debug", "info")))
    logger = logging.getLogger("edgellm")
    for other in [other for other in logger.handlers if isinstance(other, logging.StreamHandler)]:
        logger.removeHandler(other)
    logger.addHandler(handler)
    logger.setLevel(level.upper())


def _choose(name: str, among: tuple[str, ...], value: str | None) -> None:
    if value is None:
        return
    if value not in among:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(among)}")
    show_logs(**_chosen | {name: value})


def _choose_level(value: str | None) -> str | None:
    _choose("level", LEVELS, value)
    return value


def _choose_format(value: str | None) -> str | None:
    _choose("form", FORMATS, value)
    return value


LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        metavar="|".join(LEVELS),
        callback=_choose_level,
        is_eager=True,
        rich_help_panel=LOGS,
        help="What is logged to the standard error stream [default: warning].",
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format",
        metavar="|".join(FORMATS),
        callback=_choose_format,
        is_eager=True,
        rich_help_panel=LOGS,
        help="Log lines for people or, as JSON, for programs [default: text].",
    ),
]
