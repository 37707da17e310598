"""What the tools share that make folders of golden files: their command line, releases, and how weights are drawn."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from golden_codes import differences, digest, drawn_weight
from golden_files import (
    CODES,
    DRAWN,
    LOGITS,
    SHARES,
    WHOLE,
    Law,
    copy_with_tensors,
    describe,
    read_metadata,
    read_tensors,
    share,
    share_of,
    write_description,
    write_tensors,
)
from golden_files import golden_folder as golden_folder  # for tools that read the goldens of others
from golden_files import opened as opened
from golden_files import pack as pack

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


def law_of(name: str, deviation: float) -> Law:
    """How a tensor is drawn: norms, biases and decays as `randomize_vectors` does, bounds on their side of 0, the
    others in a bell around it."""
    if name.endswith("A_log"):
        return {"range": [-5.0, -0.5]}
    if name.endswith("bias"):
        return {"range": [-0.5, 0.5]}
    if name.endswith(("put_min", "put_max")):
        return {"range": [-1.5, -0.5] if name.endswith("min") else [0.5, 1.5]}
    return (
        {"range": [0.5, 1.5]}
        if any(part in name for part in ("norm", "ln_q", "layer_scalar", "std_scale", "router.scale", "expert_scale"))
        else {"deviation": deviation}
    )


def draw_tensors(path: Path, seed: int, deviation: float, is_drawn: Callable[[str], bool] = lambda name: True) -> None:
    """Put a description of random tensors in the place of those of a safetensors file; those not drawn stay there."""
    tensors, metadata = read_tensors(path), read_metadata(path)
    kept = {name: tensor for name, tensor in tensors.items() if not is_drawn(name)}
    drawn = [(name, dtype, shape) for name, (dtype, shape, _) in tensors.items() if name not in kept]
    description = describe([(*each, law_of(each[0], deviation)) for each in drawn], seed)
    write_description(path.with_name(path.name.removesuffix(WHOLE) + DRAWN), description)
    if kept:
        write_tensors(path, kept, metadata)
    else:
        path.unlink()


def store_differences(path: Path, seed: int, deviation: float, dtype: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Put differences in the places of the codes of a safetensors file, and beside it what these are computed from.

    `weights` [N, K] by layer are float32 as torch drew them after `manual_seed(seed)`; `dtype`, F16 or BF16, is what
    they had when they were packed.
    """

    def start(weight: torch.Tensor) -> int:
        first = weight.flatten()[:16].numpy() / deviation
        for shift in range(16):
            stream = drawn_weight(seed, shift, (1 << 14, 16))
            if len(found := np.flatnonzero(np.abs(stream - first).max(axis=1) < 1e-4)):
                return shift + 16 * int(found[0])
        raise ValueError(f"{path}: torch draws otherwise than drawn_weight does, or initializes weights later")

    tensors, metadata = read_tensors(path), read_metadata(path)
    layers = {layer: [start(weight), *weight.shape] for layer, weight in weights.items()}
    description = {"seed": seed, "deviation": deviation, "dtype": dtype, "sha256": digest(tensors), "layers": layers}
    write_tensors(path, differences(tensors, description), metadata)
    path.with_name(path.name.removesuffix(WHOLE) + CODES).write_text(json.dumps(description, separators=(",", ":")))


def rename_drawn(directory: Path, renamed: Callable[[str], str]) -> None:
    """Give the drawn tensors of a model other names."""
    path = directory / f"model{DRAWN}"
    description = json.loads(path.read_text())
    for group in description["groups"]:
        group["shapes"] = {renamed(name): shape for name, shape in group["shapes"].items()}
    write_description(path, description)


def with_shares(expected: Mapping[str, torch.Tensor], names: str = LOGITS) -> dict[str, torch.Tensor]:
    """The same with a share of each of the float32 values [.., T, V] whose names match a regular expression."""
    found = dict(expected)
    for name in expected:
        if re.search(names, name):
            values = found.pop(name).float().numpy()
            kept = share_of(values.shape)
            found[name + kept] = torch.from_numpy(share(values, SHARES[kept]))
    return found


@contextmanager
def whole(directory: Path) -> Iterator[Path]:
    """A golden folder with all its tensors, as tests get it."""
    with tempfile.TemporaryDirectory() as place:
        yield copy_with_tensors(directory, Path(place))


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
    with opened(directory):
        for name, make in chosen.items():
            shutil.rmtree(directory / name, ignore_errors=True)
            (directory / name).mkdir(parents=True)
            make(directory / name)
        if not arguments.names:
            beside(directory)
        files = [path for path in directory.rglob("*") if path.is_file()]
        for path in files:
            path.chmod(0o644)
            if path.name in ("model.safetensors", "expected.safetensors") or path.name.endswith(DRAWN):
                pack(path)
            elif path.suffix == ".json":  # what is indented takes a third more
                path.write_text(json.dumps(json.loads(path.read_text()), separators=(",", ":")) + "\n")
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    print(f"{len(chosen)} folders made, {size / 1e6:.2f} MB")
