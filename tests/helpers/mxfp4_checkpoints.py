"""gpt-oss's experts in blocks and scales of MXFP4, and the same numbers dense and transposed, as both are published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

MODEL = "model.safetensors"
#: What the four bits of MXFP4 stand for, as the OCP's formats have them.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def write_mxfp4(source: Path, folder: Path, experts: int = 8) -> tuple[Path, Path]:
    """Two copies of a checkpoint whose experts, one by one, become random ones: `folder`/packed and `folder`/twin."""
    tensors, random, packed, twin = load_file(source / MODEL), np.random.default_rng(3), {}, {}
    for name in [each for each in tensors if each.endswith("experts.0.gate_up_proj.weight")]:
        module = name.removesuffix(".0.gate_up_proj.weight")
        for part in ("gate_up_proj", "down_proj"):
            of_each = [tensors.pop(f"{module}.{expert}.{part}.weight") for expert in range(experts)]
            rows, columns = of_each[0].shape
            codes = random.integers(0, 16, (experts, rows, columns), np.uint8)
            scales = random.integers(122, 126, (experts, rows, columns // 32), np.uint8)
            values = E2M1[codes] * np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=2)
            twin[f"{module}.{part}"] = np.ascontiguousarray(values.transpose(0, 2, 1), np.float32)
            blocks = codes[..., ::2] | codes[..., 1::2] << 4
            packed[f"{module}.{part}_blocks"] = blocks.reshape(experts, rows, -1, 16)
            packed[f"{module}.{part}_scales"] = scales
    for name, own in (("packed", packed), ("twin", twin)):
        shutil.copytree(source, folder / name)
        save_file(tensors | own, folder / name / MODEL)
    path = folder / "packed" / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(config))
    return folder / "packed", folder / "twin"
