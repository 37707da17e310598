"""Grammars tried in a process of their own, which can be ended: what compiling costs is known only when it is done. A
server gives its `check` to `try_apart`. A grammar that ends the child, by its memory, its time or its depth, is an
error of the request, and the child is made anew."""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from edgellm.engines.recently_used import RecentlyUsed
from edgellm.errors import EngineError, RequestError

if TYPE_CHECKING:
    from edgellm.structure.grammar import Definition

#: What one grammar may take in the child.
TRIAL_SECONDS, TRIAL_BYTES = 2, 512 * 2**20
#: The child answers, or has started and read a tokenizer, within so many seconds by the clock.
_CLOCK_SECONDS, _START_SECONDS = 20, 120


class TrialProcess:
    """The child, made when the first grammar comes, and what it said. Any thread may use it; one grammar at a time."""

    def __init__(self, seconds: int = TRIAL_SECONDS, memory: int = TRIAL_BYTES) -> None:
        """`seconds` of processor time, to the next whole one, and bytes of `memory` are what one grammar may take."""
        self._seconds, self._memory = seconds, memory
        self._process: subprocess.Popen[bytes] | None = None
        #: What the child calls the vocabularies that it was told of; None is that of single bytes.
        self._defined: dict[Definition | None, int] = {}
        #: The error of each grammar, "" for none.
        self._answers: RecentlyUsed[tuple[Definition | None, str, bytes], str] = RecentlyUsed(4096)
        self._lock = threading.Lock()

    def check(self, definition: Definition | None, grammar: str, what: str) -> None:
        """Raise RequestError for a grammar, which errors call `what`, that does not compile for a vocabulary (None:
        single bytes), or takes too much; EngineError where there is no child to try it."""
        key = definition, what, hashlib.sha256(grammar.encode()).digest()
        with self._lock:
            error = self._answers.find(key)
            if error is None:
                error = self._answers.keep(key, self._tried(definition, grammar, what) or "")
        if error:
            raise RequestError(error)

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def _tried(self, definition: Definition | None, grammar: str, what: str) -> str | None:
        """The error of a grammar, by the child; None for one that compiles."""
        if self._process is None or self._process.poll() is not None:
            self._begin()
        if definition not in self._defined:
            if self._asked({"definition": definition}, _START_SECONDS) is None:
                code = self._end()
                raise EngineError(f"the process that tries grammars has ended before it was ready (exit code {code})")
            self._defined[definition] = len(self._defined)
        question = {"vocabulary": self._defined[definition], "grammar": grammar, "what": what}
        answer = self._asked(question, _CLOCK_SECONDS)
        if answer is None:
            self._end()
            self._begin()
            return (
                f"{what} takes too much to compile: more than {self._seconds} seconds, {self._memory >> 20} MiB, "
                "or what it nests is too deep; ask for a simpler one"
            )
        return answer["error"]

    def _asked(self, question: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The child's answer; None where it ended, or has not answered in time."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        waiting = select.poll()
        waiting.register(self._process.stdout, select.POLLIN)
        line = self._process.stdout.readline() if waiting.poll(1000 * seconds) else b""
        return json.loads(line) if line.endswith(b"\n") else None

    def _begin(self) -> None:
        """Start the child; Ctrl-C is for this process alone."""
        self._end()
        folders = [str(Path(entry).absolute()) for entry in sys.path if entry]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "edgellm.structure.trial", str(self._seconds), str(self._memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",  # a folder of the user's could hide a module
                env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"the process that tries grammars cannot be started: {error}") from error

    def _end(self) -> int | None:
        """End the child, and give its exit code."""
        process, self._process = self._process, None
        self._defined.clear()
        if process is None:
            return None
        process.kill()
        with suppress(OSError):  # of a request that it has not read
            process.communicate()
        return process.returncode


def serve(requests: IO[bytes], answers: IO[bytes], seconds: int, memory: int) -> None:
    """Answer requests until there are no more; a grammar may take so many seconds and bytes."""
    from edgellm.structure.grammar import Definition, GrammarVocabulary, byte_vocabulary

    vocabularies: list[GrammarVocabulary] = []
    for line in requests:
        question, error = json.loads(line), None
        if "definition" in question:
            _limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
            told = question["definition"]
            made = byte_vocabulary() if told is None else GrammarVocabulary.of_definition(Definition(*told))
            vocabularies.append(made)
            pages = int(Path("/proc/self/statm").read_text().split()[0])  # this process may have so much more
            _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
        else:
            _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))
            try:
                vocabularies[question["vocabulary"]].compiled_anew(question["grammar"], question["what"])
            except RequestError as found:
                error = str(found)
            _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
        answers.write(json.dumps({"error": error}).encode() + b"\n")
        answers.flush()


def _limit(kind: int, most: int) -> None:
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def main() -> None:
    """Serve what this process was started with, in a thread whose stack is half of those that compile afterwards."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write there
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    threading.stack_size((2**21 if stack == resource.RLIM_INFINITY else max(stack, 2**20)) // 2)
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, answers, *map(int, sys.argv[1:])))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
