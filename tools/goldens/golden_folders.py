"""What the tools share that make folders of golden files: their command line, releases, and how weights are drawn."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import transformers

#: The metadata of every file of expected values.
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}


def randomize_vectors(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Norms and biases start at 1 and 0, where mistakes in them would not show; decays of states (their logarithm's
    logarithm) so that nothing is kept for long."""
    with torch.no_grad():
        for name, tensor in named_tensors:
            if name.endswith("A_log"):
                tensor.uniform_(-5.0, -0.5)
            elif name.endswith("bias"):
                tensor.uniform_(-0.5, 0.5)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)


def write_folders(
    description: str | None,
    makers: Mapping[str, Callable[[Path], None]],
    beside: Callable[[Path], None] = lambda directory: None,
) -> None:
    """The whole of a tool: `makers` fill their folders, in their order, then `beside` writes what lies beside these."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the folders go; folders of the same names are replaced")
    parser.add_argument("names", nargs="*", choices=[[], *makers], help="only these folders, and nothing beside them")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    chosen = {name: make for name, make in makers.items() if not arguments.names or name in arguments.names}
    torch.set_num_threads(1)
    for name, make in chosen.items():
        shutil.rmtree(directory / name, ignore_errors=True)
        (directory / name).mkdir(parents=True)
        make(directory / name)
    if not arguments.names:
        beside(directory)
    files = [path for path in directory.rglob("*") if path.is_file()]
    for path in files:
        path.chmod(0o644)
    print(f"{len(chosen)} folders made, {sum(path.stat().st_size for path in files) / 1e6:.2f} MB")
