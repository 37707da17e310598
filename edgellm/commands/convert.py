"""`edgellm convert`: safetensors from pickled PyTorch weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import typer

from edgellm.commands.console import mebibytes, progress_display
from edgellm.commands.table import Options, argument, option, takes_options
from edgellm.engines.building.conversion import ConversionReport, convert_checkpoint

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class ConvertOptions(Options):
    source: Path = argument("Directory with pytorch_model.bin (or shards), or a .bin/.pt/.pth file.", default=...)
    target: Path = argument("The checkpoint directory to make.", default=...)
    max_shard_size: str = option(
        "Weights beyond this size are split into files: bytes, or as in 500MB, 5GB, 4GiB.", default="5GB"
    )
    force: bool = option("Replace an existing converted checkpoint.")


@takes_options
def convert(given: ConvertOptions) -> None:
    """Make safetensors of pickled PyTorch weights, without PyTorch and without running what the pickle says.

    Example: edgellm convert old-model new-model --max-shard-size 4GB
    """
    size = size_in_bytes(given.max_shard_size, "--max-shard-size")
    with progress_display() as display:
        report = convert_checkpoint(given.source, given.target, size, given.force, display)
    typer.echo("\n".join(report_lines(report)))


def size_in_bytes(text: str, option: str) -> int:
    """A size such as "5GB" or "4GiB" in bytes; typer.BadParameter, which names the option, for what is none."""
    match = re.fullmatch(r"([0-9]{1,18}) ?([A-Za-z]*)", text.strip(), re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise typer.BadParameter(f"{option} is {text!r}: expected a size such as 500MB, 5GB or 4GiB")
    return int(match[1]) * unit


def report_lines(report: ConversionReport) -> Iterator[str]:
    """The table that ends a conversion."""
    dtypes = ", ".join(f"{dtype} ({count})" for dtype, count in sorted(report.dtypes.items()))
    yield f"{report.path}: every tensor was read back and is the same"
    yield f"  {'tensors':<10}{report.tensors:,}"
    yield f"  {'weights':<10}{mebibytes(report.nbytes)} in {report.files} file{'s' * (report.files > 1)}"
    yield f"  {'dtypes':<10}{dtypes}"
    yield f"  {'copied':<10}{', '.join(report.copied) or 'no other files'}"
    yield f"  {'time':<10}{report.seconds:.1f} s"
    yield from report.notes
