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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import typer

from edgellm.errors import DeviceLostError, EdgeLLMError, number_of
from edgellm.kernels.user_paths import printable

if TYPE_CHECKING:
    from edgellm.drafting.report import DraftingStatistics
    from edgellm.generation import Generation
    from edgellm.requests import Response


LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
#: Control characters that a model's text could steer a terminal with; tab and line end are none of them.
CONTROLS = {code: "\ufffd" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\t\n"}
FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141
#: What sysexits.h calls EX_TEMPFAIL: a new process may be able to go on.
DEVICE_LOST = 75


def mebibytes(size: float) -> str:
    """ "1,234.5 MiB"."""
    return f"{size / (1 << 20):,.1f} MiB"


class StatusLine:
    """The last line of a terminal, which is rewritten while something goes on; nothing where standard error is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown = ""

    def show(self, line: str) -> None:
        """Have the line say this, cut where it is too long; "" takes it away."""
        if not (self._shown or sys.stderr.isatty()):
            return
        with self._lock:
            line = printable(line)[: shutil.get_terminal_size().columns - 1]  # a wrapped line cannot be taken back
            if line != self._shown:
                sys.stderr.write(f"\r{line}\x1b[K")
                sys.stderr.flush()
            self._shown = line


status_line = StatusLine()


class ProgressDisplay:
    """Stages with bars on a terminal, a line a stage elsewhere. Called from several threads."""

    _WIDTH = 20

    def __init__(self) -> None:
        self._stages: dict[str, tuple[int, int]] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        before, now = self._stages.get(stage), (done, total)
        self._stages[stage] = now
        if sys.stderr.isatty():
            running = [stage for stage, (done, total) in list(self._stages.items()) if done < total]
            status_line.show("   ".join(f"{stage} {self._bar(stage)}{self._amount(stage)}" for stage in running))
        elif before is None or (done >= total and before != now):
            print(f"{stage}: done{self._amount(stage)}" if done >= total else f"{stage} ...", file=sys.stderr)

    def _bar(self, stage: str) -> str:
        done, total = self._stages[stage]
        filled = self._WIDTH * done // max(1, total)
        return f"[{'#' * filled}{'.' * (self._WIDTH - filled)}]"

    def _amount(self, stage: str) -> str:
        done, total = self._stages[stage]
        if stage in ("weights", "download"):
            return f" {done >> 20:,} of {total >> 20:,} MiB"
        return f" {done} of {total}" if stage in ("plans", "layers") else ""


def write_answer(text: str) -> None:
    """Write a piece of an answer at once; a terminal gets no control characters from it."""
    if text:
        sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def write_note(text: str) -> None:
    """Write a remark beside the answers to standard error, dim where it is a terminal and NO_COLOR is not set."""
    status_line.show("")
    text = wrapped(_steering_nothing(text), sys.stderr)
    dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print(f"\x1b[2m{text}\x1b[0m" if dim else text, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Write what a command of the chat says to standard output."""
    print(wrapped(text, sys.stdout))


def wrapped(text: str, stream: TextIO) -> str:
    """Text as it is to stand on `stream`: on a terminal its lines break between words."""
    width = max(1, shutil.get_terminal_size().columns)
    wrapper = textwrap.TextWrapper(width, replace_whitespace=False, break_long_words=False, break_on_hyphens=False)
    parts = ([line] if len(line) <= width else wrapper.wrap(line) for line in text.split("\n"))
    return "\n".join(part for found in parts for part in found) if stream.isatty() else text


def write_error(error: BaseException, words: str = "") -> None:
    """Write an error, or `words` for it, to standard error, with the way it came where EDGELLM_DEBUG is set; what it
    quotes of files and names steers no terminal."""
    status_line.show("")
    if os.environ.get("EDGELLM_DEBUG"):
        traceback.print_exception(error)
    print(wrapped(f"error: {_steering_nothing(words or str(error))}", sys.stderr), file=sys.stderr, flush=True)


@contextmanager
def explaining() -> Iterator[None]:
    """Let a command end with a message and an exit code where it would end with a traceback."""
    try:
        yield
        status_line.show("")
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        _end_output()
        raise typer.Exit(BROKEN_PIPE) from None
    except (EdgeLLMError, MemoryError, OSError, RuntimeError) as error:
        words = str(error)
        if isinstance(error, RuntimeError):
            if "start new thread" not in words:
                raise
            words = "no further thread can be started: allow more tasks (ulimit -u, TasksMax, --pids-limit) or memory"
        elif isinstance(error, MemoryError):
            words = "there is not enough memory for this on the machine"
        elif isinstance(error, OSError):
            _end_output()
            words = f"{error.filename or 'the output'} cannot be read or written: {error.strerror}"
        write_error(error, words)
        raise typer.Exit(DEVICE_LOST if isinstance(error, DeviceLostError) else FAILED) from None


def _end_output() -> None:
    """Write what is still in the buffer, or drop it where that fails: it would again when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _steering_nothing(text: str) -> str:
    """Lines with what names in them could steer a terminal with written out."""
    return "\n".join(map(printable, text.split("\n")))


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let a signal unwind the command as Ctrl-C does: what is half written is removed, what is to stay kept."""

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


@contextmanager
def progress_display() -> Iterator[ProgressDisplay]:
    """Shows stages while inside, where signals end the command as `ended_by_signals` does."""
    with ended_by_signals():
        try:
            yield ProgressDisplay()
        finally:
            status_line.show("")


def read_answer(ask: Callable[[], Generation], shows: bool = True) -> Response:
    """Write the answer that `ask` begins as it grows, then a line for each call of a tool in it, and why one is
    broken. The first Ctrl-C cancels the answer, the next one raises KeyboardInterrupt. With `shows` false nothing is
    written."""
    stream, pressed = None, False

    def press(*_: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        if stream is not None:
            stream.cancel()

    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as for a background process: it stays so
    handles = not ignored and threading.current_thread() is threading.main_thread()  # no other thread gets signals
    previous = signal.signal(signal.SIGINT, press) if handles else None
    try:
        stream = ask()
        if pressed:
            stream.cancel()
        with stream:
            for chunk in stream:
                write_answer(chunk.text if shows else "")
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
    response = stream.result()
    if shows:
        write_answer("\n")
        for call in response.tool_calls:
            write_answer(f"{call.name}({call.arguments}){'' if call.complete else ' (incomplete)'}\n")
        if response.tool_call_error is not None:
            write_answer(f"({response.tool_call_error})\n")
    return response


def statistics_line(response: Response, context_length: int) -> str:
    """What one looks at after every answer: its length, speed and end, and how full the context is."""
    usage, timings = response.usage, response.timings
    speed = timings.tokens_per_second(usage.completion_tokens)
    tokens = number_of(usage.completion_tokens, "token")
    rate = f", {speed:.1f} tokens/s" if speed else ""
    context = f"context {usage.prompt_tokens + usage.completion_tokens}/{context_length}"
    return f"[{tokens}{rate} | {context} | ended by {response.finish_reason}]"


def statistics_lines(response: Response, context_length: int) -> Iterator[str]:
    """All counts, speeds and the reason of the end of an answer, a subject a line."""
    usage, timings = response.usage, response.timings
    yield f"last answer: {statistics_line(response, context_length)[1:-1]}"
    computed, prefill = usage.prompt_tokens - usage.reused_tokens, timings.prefill_seconds
    speed = f", {computed / prefill:.0f} tokens/s" if prefill > 0 else ""
    reused = f" ({usage.reused_tokens} reused)" if usage.reused_tokens else ""
    prompt = f"{number_of(usage.prompt_tokens, 'token')}{reused}, {computed} computed in {prefill:.2f} s{speed}"
    yield f"prompt: {prompt}, first token after {timings.time_to_first_token:.2f} s"
    if response.drafting is not None:
        yield f"drafting: {drafting_in_words(response.drafting)}"


def drafting_in_words(drafting: DraftingStatistics) -> str:
    """What drafting did for an answer: tokens a round, what was drafted most, and where the time went."""
    if not drafting.rounds:
        return "no draft"
    rounds = number_of(drafting.rounds, "round")
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
        line, fields = super().format(record), getattr(record, "edgellm", {})
        return f"{line} ({', '.join(f'{name}={value}' for name, value in fields.items())})" if fields else line


class LogHandler(logging.StreamHandler):  # a generic class from Python 3.11 on
    """Writes log lines to standard error; with `sums_up`, records that have a `stage` (what goes on, what it does now)
    are one line for each stage, which a terminal rewrites."""

    def __init__(self, formatter: logging.Formatter, sums_up: bool) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(formatter)
        self._sums_up = sums_up
        self._counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if not self._sums_up or not hasattr(record, "stage"):
            status_line.show("")
            super().emit(record)
            return
        stage, now = record.stage
        self._counts[stage] += 1
        try:
            if self.stream.isatty():
                status_line.show(f"{stage}: {self._counts[stage]}, {now}")
            elif self._counts[stage] == 1:
                print(stage, file=self.stream, flush=True)
        except (OSError, ValueError):  # nobody reads it any more
            self.handleError(record)


_chosen = {"level": "warning", "form": "text"}


def show_logs(level: str = "warning", form: str = "text") -> None:
    """Show what is logged from `level` on, in this form; a later call takes the place of an earlier one."""
    _chosen.update(level=level, form=form)
    is_verbose = level in ("debug", "info")
    formatter = JSONLines() if form == "json" else TextLines(is_verbose)
    handler = LogHandler(formatter, sums_up=form == "text" and not is_verbose)
    logger = logging.getLogger("edgellm")
    for other in [other for other in logger.handlers if isinstance(other, logging.StreamHandler)]:
        logger.removeHandler(other)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # what the hub's library tries again stands in errors here


def choose_logs(name: str, value: str | None) -> None:
    """Change what `show_logs` was told, where something was chosen."""
    if value is not None:
        show_logs(**_chosen | {name: value})
