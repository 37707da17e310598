"""Makes the files of `tests/goldens/torch_files` with PyTorch, which is the reference of the reader of such files.

    python tools/goldens/make_torch_files.py tests/goldens/torch_files

Needs torch and safetensors. NAME.bin is what `torch.save` writes, NAME.safetensors the values that it stands for, as
the safetensors library writes them; `sharded` is a directory in Hugging Face's layout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from golden_files import opened

_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)


def make_values() -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    """For each name what is saved, and the tensors that it stands for."""
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    linear = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    state = linear.state_dict()
    dtypes = {str(dtype).removeprefix("torch."): (torch.randn(3, 5) * 40).abs().to(dtype) for dtype in _DTYPES}
    dtypes["bool"] = torch.tensor([True, False, True])
    dtypes["scalar"], dtypes["empty"] = torch.tensor(2.5), torch.empty(0, 4)
    strided = {
        "transposed": base.t(),
        "column": base[:, 2],
        "step": base[1::2, ::3],
        "expanded": torch.tensor([1.5, -2.5]).expand(3, 2),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    }
    shared = {"embedding": base, "head": base, "rows": base[2:4]}
    bfloat16 = {
        "weight": torch.randn(4, 6).bfloat16(),
        "special": torch.tensor([0.0, -0.0, torch.inf, torch.nan]).bfloat16(),
    }
    parameters = OrderedDict((name, torch.nn.Parameter(value.clone())) for name, value in state.items())
    return {
        "plain": (state, state),
        "dtypes": (dtypes, dtypes),
        "bfloat16": (bfloat16, bfloat16),
        "parameters": (parameters, dict(parameters)),
        "strided": (strided, strided),
        "shared": (shared, shared),
        "nested": (
            {"state_dict": state, "epoch": 3, "loss": 0.25, "optimizer": {"state": {0: {"step": base[0, 0]}}}},
            state,
        ),
        "ambiguous": ({"model": state, "model_ema": state}, {}),
    }


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that share nothing, as safetensors wants them."""
    return {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}


def make_sharded(directory: Path) -> None:
    """A checkpoint of two shards with their index."""
    directory.mkdir(exist_ok=True)
    tensors = {f"layer.{number}.weight": torch.randn(4, 4).half() for number in range(4)}
    names = list(tensors)
    shards = {"pytorch_model-00001-of-00002.bin": names[:3], "pytorch_model-00002-of-00002.bin": names[3:]}
    for shard, held in shards.items():
        torch.save({name: tensors[name] for name in held}, directory / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2) + "\n")
    save_file(tensors, directory / "expected.safetensors")


def main() -> None:
    """Write all files into a directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    with opened(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, (saved, tensors) in make_values().items():
            torch.save(saved, directory / f"{name}.bin")
            if tensors:
                save_file(expected(tensors), directory / f"{name}.safetensors")
        make_sharded(directory / "sharded")


if __name__ == "__main__":
    main()
