"""`edgellm convert`: safetensors from pickled PyTorch weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer

from edgellm.commands.console import mebibytes, progress_display
from edgellm.commands.table import Options, argument, option, takes_options
from edgellm.engines.building.conversion import ConversionReport, convert_checkpoint


class ConvertOptions(Options):
    source: Path = argument("Directory with pytorch_model.bin (or shards), or a .bin/.pt/.pth file.", default=...)
    target: Path = argument("The checkpoint directory to make.", default=...)
    force: bool = option("Replace an existing converted checkpoint.")


@takes_options
def convert(given: ConvertOptions) -> None:
    """Make safetensors of pickled PyTorch weights, without PyTorch and without running what the pickle says.

    Example: edgellm convert old-model new-model
    """
    with progress_display() as display:
        report = convert_checkpoint(given.source, given.target, given.force, display)
    typer.echo("\n".join(report_lines(report)))


def report_lines(report: ConversionReport) -> Iterator[str]:
    dtypes = ", ".join(f"{dtype} ({count})" for dtype, count in sorted(report.dtypes.items()))
    yield f"{report.path}: every tensor was read back and is the same"
    yield f"  {'tensors':<10}{report.tensors:,}"
    yield f"  {'weights':<10}{mebibytes(report.nbytes)} in {report.files} file{'s' * (report.files > 1)}"
    yield f"  {'dtypes':<10}{dtypes}"
    yield f"  {'copied':<10}{', '.join(report.copied) or 'no other files'}"
    yield f"  {'time':<10}{report.seconds:.1f} s"
    yield from report.notes
