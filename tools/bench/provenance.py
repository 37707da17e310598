"""What a result says of its own making, and where it goes."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import neighbour
from device_limits import device_limits, scale_of_part

from edgellm.device.forecast import BOARDS
from edgellm.kernels.gpu import find_gpu

_CHECKOUT = Path(__file__).resolve().parents[2]


def provenance() -> dict[str, Any]:
    """The date, the command of this process with files by their names alone (folders are the machine's own), and what
    the machine is; where it is measured as another device, as which, and what was read and multiplied there now.

    Of a board: by how many times it is slower than the part that stands for it (`board_scale`), the blocks of the
    part's neighbour, what they are to leave the part, and what those that were tried leave it.
    """
    arguments = [Path(argument).name if "/" in argument else argument for argument in sys.argv[1:]]
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", *_program(), *arguments]),
        "machine": ", ".join(_machine()),
    }
    gpu = find_gpu()
    if gpu is not None and gpu.measured_as:
        limits = device_limits()
        found |= {"measured_as": gpu.measured_as, "limits": limits._asdict()}
        board = BOARDS.get(gpu.measured_as.removesuffix(neighbour.BESIDE).replace(".", "-"))
        if board is not None:
            scale = scale_of_part(board, limits.multiprocessors, limits.clock_ghz)
            found |= {"board": board.title, "board_scale": round(scale, 4)}
        beside = neighbour.current()
        if beside is not None:
            left = {blocks: round(rate, 1) for blocks, rate in sorted(beside.left.items())}
            found["neighbour"] = {"blocks": beside.blocks, "target_gb_per_s": round(beside.target, 1), "left": left}
    return found


def report(results: dict[str, Any], output: Path | None) -> None:
    """Print results as JSON, and write them to `output`."""
    text = json.dumps(results, indent=2)
    print(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")


def _program() -> list[str]:
    """How Python was told to run this process's program, from the checkout's folder."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return ["-m", spec.name]
    script = Path(sys.argv[0]).resolve()
    return [str(script.relative_to(_CHECKOUT)) if script.is_relative_to(_CHECKOUT) else script.name]


def _machine() -> list[str]:
    """GPU, processor, and the releases of what computes."""
    found, gpu = [], find_gpu()
    if gpu is not None:
        driver = ".".join(map(str, gpu.driver_cuda))
        found.append(f"{gpu.name} ({gpu.compute_capability}), driver for CUDA {driver}")
    found += [
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        f"Python {platform.python_version()}",
    ]
    for package in ("numpy", "tensorrt-rtx", "tensorrt"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found
