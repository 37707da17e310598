"""`edgellm` in processes of its own, forked from one that has imported it: a Python that starts anew takes 1.3 s of
processor time for that, of the 2 in which a server is ready. They have their own environment, errors and exit codes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO

_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(
    [
        "forked_program",
        "edgellm.asynchronous",
        "edgellm.commands.app",
        "edgellm.commands.serve",
        "edgellm.engines.backends.numpy_backend",
        "edgellm.http.app",
        "edgellm.http.connections",
        "edgellm.opened_model",
        "edgellm.structure.trial",
        "pydantic.type_adapter",  # the command line reads it where it is installed
        "uvicorn.lifespan.off",
    ]
)


def _run(arguments: Sequence[str], environment: Mapping[str, str], errors: Connection) -> None:
    os.dup2(errors.fileno(), 2)
    errors.close()
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["edgellm", *arguments]
    from edgellm.__main__ import main

    main()


class ForkedProgram:
    """`edgellm ARGUMENTS` with this environment; the attributes are those of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        read, write = os.pipe()
        #: What it writes to its standard error.
        self.stderr: IO[str] = os.fdopen(read)
        with Connection(write, readable=False) as errors:
            self._process = _FORKING.Process(target=_run, args=(arguments, environment, errors), daemon=True)
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, as soon as there is one. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("edgellm", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to it, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
