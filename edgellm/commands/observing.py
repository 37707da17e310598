"""`--trace` and `--nvtx`: what is taken note of while a command answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.commands.console import write_note
from edgellm.kernels.user_paths import user_path

if TYPE_CHECKING:
    from edgellm.observing.observer import Observer


@dataclass(frozen=True)
class ObservingOptions:
    """What to take note of; by default nothing, which costs nothing."""

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
        from edgellm.observing.nvtx import NvtxRanges

        observers.append(NvtxRanges())
    try:
        yield Observers(*observers)
    finally:
        if trace is not None:
            trace.save(path)
            write_note(f"The trace of {len(trace.spans)} spans is in {path}: open it at ui.perfetto.dev.")
