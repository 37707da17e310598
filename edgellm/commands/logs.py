"""What the package logs (`logging`, loggers below "edgellm"), shown on the standard error stream.

A library is silent: nothing is shown until a program configures logging. The commands show warnings, as plain lines.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Annotated, Any

import typer

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


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


_chosen = {"level": "warning", "form": "text"}


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
        help="Log lines for people or, as JSON, for programs [default: text].",
    ),
]
