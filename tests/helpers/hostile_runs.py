"""Command lines with hostile input: each in a process of its own, which is killed when its time is over.

One process imports the commands once and forks for each command line, so that a run takes as long as the command does.
Started as a program, this file is that process.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

#: What a run may take beyond the process it is forked from, so that an endless one harms nobody.
MEMORY, LARGEST_FILE = 2 << 30, 256 << 20


@dataclass(frozen=True)
class Ended:
    """How a command line ended; `code` is negative for the signal that ended it, -9 where its time was over.

    `seconds` are those of the processor, which other processes do not lengthen.
    """

    code: int
    out: str
    err: str
    seconds: float

    def refusal(self) -> str:
        """The message of a refusal: one line, no traceback, nothing that steers a terminal."""
        assert self.code in (1, 2), self
        assert "Traceback" not in self.err and self.err.strip(), self
        message = self.err.strip().splitlines()[-1]
        assert len(message) <= 2200, len(message)
        assert all(character.isprintable() for character in message), message
        return message


class HostileRuns:
    """Runs command lines; `environment` holds for all of them."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def __call__(self, *arguments: object, seconds: float = 30.0, stdin: Path | None = None) -> Ended:
        """Run one command line for up to `seconds` of the processor; `stdin` is a file."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = [[str(argument) for argument in arguments], seconds, str(stdin or os.devnull)]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory, private_cache: None) -> Iterator[HostileRuns]:
    """Runs command lines that must end by themselves; see `HostileRuns`."""
    folder = tmp_path_factory.mktemp("hostile")
    settings = {"XDG_CONFIG_HOME": str(folder / "config"), "XDG_STATE_HOME": str(folder / "state")}
    runs = HostileRuns({**settings, "OPENBLAS_NUM_THREADS": "1", "EDGELLM_CONFIG": "", "EDGELLM_DEBUG": ""})
    yield runs
    runs.close()


def _serve() -> None:
    import edgellm.commands.bench
    import edgellm.commands.build
    import edgellm.commands.cache
    import edgellm.commands.chat
    import edgellm.commands.convert
    import edgellm.commands.generate
    import edgellm.commands.info
    import edgellm.engines.families.vision_config
    import edgellm.llm
    import edgellm.text.template_sandbox  # noqa: F401
    from edgellm.commands.app import run

    with suppress(SystemExit), redirect_stderr(io.StringIO()):
        run(["info", "--model", "/no/such/directory"])  # typer imports most of what it needs when a value is given

    for line in sys.stdin:
        arguments, seconds, stdin = json.loads(line)
        with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
            code, took = _run(arguments, seconds, stdin, (out, err))
            texts = [stream.seek(0) or stream.read(1 << 20).decode(errors="replace") for stream in (out, err)]
        print(json.dumps({"code": code, "out": texts[0], "err": texts[1], "seconds": took}), flush=True)


def _run(arguments: list[str], seconds: float, stdin: str, outputs: tuple[IO[bytes], IO[bytes]]) -> tuple[int, float]:
    latest = time.monotonic() + 10 * seconds  # of one that waits for ever
    child = os.fork()
    if child == 0:
        _become(arguments, stdin, outputs)
    while _processor_seconds(child) < seconds and time.monotonic() < latest:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def _processor_seconds(child: int) -> float:
    """What it has used so far: a busy machine lengthens these hardly, and what it takes by the clock much."""
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _become(arguments: list[str], stdin: str, outputs: tuple[IO[bytes], IO[bytes]]) -> None:
    """Run the command line in this process, which ends with it."""
    from edgellm.commands.app import run

    code = 70
    try:
        os.dup2(os.open(stdin, os.O_RDONLY), 0)
        for stream, number in zip(outputs, (1, 2), strict=True):
            os.dup2(stream.fileno(), number)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE,) * 2)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - to the end
        run(arguments)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 71
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
