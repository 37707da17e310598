"""Modules of kernels that are compiled side by side.

NVRTC lets other threads of Python run, and compiles several modules at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from edgellm.kernels.compiler import CompiledModule, ModuleSource, compile_module, compiled_now
from edgellm.kernels.errors import MissingDependencyError
from edgellm.kernels.kept import KeptKernels
from edgellm.kernels.made import COMPILED, Made

logger = logging.getLogger("edgellm.kernels")

#: Each takes 17 MiB; a model has some dozens of modules.
_MOST_WORKERS = 16


def compiling_threads() -> int:
    """As many as there are cores for this process, up to 16."""
    return min(usable_cores(), _MOST_WORKERS)


class Compilations:
    """The compiled modules for one GPU: as they were kept, or compiled now by threads of their own."""

    def __init__(self, architecture: str, kept: KeptKernels, made: Made | None = None) -> None:
        """What is compiled is counted in `made`."""
        self._architecture, self._kept, self._made = architecture, kept, made or Made()
        self._pool: ThreadPoolExecutor | None = None
        self._futures: dict[ModuleSource, Future[CompiledModule]] = {}
        #: What nothing loads yet.
        self._optional: set[ModuleSource] = set()
        #: What was kept: with the code between `begin` and `wait`.
        self._found: dict[ModuleSource, CompiledModule | None] = {}

    def begin(self, source: ModuleSource, optional: bool = False) -> bool:
        """Begin to compile a module that was kept nowhere; whether it is compiled now. `optional`: where there is no
        compiler, only who asks for the module is told. Raises KernelError for a file that is not as described."""
        if not optional:
            self._optional.discard(source)
        elif source not in self._futures:
            self._optional.add(source)
        if source in self._futures:
            return not self._futures[source].done()
        if source in self._found:
            return False
        if (found := self._kept.find(source)) is not None:
            self._found[source] = found
            return False
        if self._pool is None:
            self._pool = ThreadPoolExecutor(compiling_threads(), "edgellm-kernels")
        self._futures[source] = self._pool.submit(self._compiled, source)
        return True

    def module(self, source: ModuleSource) -> CompiledModule:
        """The module, once it is compiled. Raises MissingDependencyError where it was kept nowhere and there is no
        compiler, with what makes it, and KernelError."""
        future = self._futures.get(source)
        if future is None and (found := self._found.get(source) or self._kept.find(source)) is not None:
            return found
        try:
            return self._compiled(source) if future is None else future.result()
        except MissingDependencyError as error:
            refusal = self._kept.refusal(source)
            if refusal is None:
                raise
            raise MissingDependencyError(f"{refusal}. Here it cannot be compiled: {error}") from error

    def _compiled(self, source: ModuleSource) -> CompiledModule:
        with self._made.counting(COMPILED):
            return compiled_now(source, self._architecture)

    def wait(self) -> None:
        """Wait for all that was begun. Raises what `module` raises, but for what is optional."""
        lacking = []
        for source in list(self._futures):
            try:
                self.module(source)
            except MissingDependencyError as error:
                if source not in self._optional:
                    raise
                lacking.append((source.name, error))
                del self._futures[source]
        if lacking:
            names = ", ".join(name for name, _ in lacking)
            logger.warning("What needs the kernels %s does not run here: %s", names, lacking[0][1])
        self.close()
        self._found = dict.fromkeys(self._found)

    def close(self) -> None:
        """Compile nothing more of what was begun and has not started."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None


def compile_all(
    sources: Sequence[ModuleSource], architecture: str, release: tuple[int, int] | None = None
) -> Iterator[tuple[ModuleSource, CompiledModule]]:
    """Compile modules side by side, with the compiler of a CUDA release (None: the newest that is there); they come as
    they are done. Who leaves the iteration ends it. Raises what `compile_module` raises."""
    with ThreadPoolExecutor(compiling_threads(), "edgellm-kernels") as pool:
        futures = {pool.submit(compile_module, source, architecture, release): source for source in sources}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def usable_cores() -> int:
    """The cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
