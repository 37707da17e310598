"""Random blocks of every packed type of GGUF files that is read, and what gguf-py makes of them.

Run with gguf (0.19.0 here), safetensors and NumPy:
python tools/goldens/make_gguf_blocks.py tests/goldens/gguf/blocks.safetensors
Scales are small numbers, some of them zero, negative or subnormal. Of the values [rows, columns] float32 the SHA-256 is
kept, in the file's metadata.
"""

from __future__ import annotations

import hashlib
import sys
from importlib import metadata

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors.numpy import save_file

#: By type: where its blocks have float16.
TYPES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2)},
    **{"Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()},
}
COLUMNS, ROWS = 512, 3


def main(target: str) -> None:
    """Write the blocks [rows, bytes] of each type, and the digest of what they stand for."""
    random, arrays = np.random.default_rng(20), {}
    notes = {name: metadata.version(name) for name in ("gguf", "numpy")}
    for name, places in TYPES.items():
        kind = GGMLQuantizationType[name]
        elements, size = GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (ROWS * COLUMNS // elements, size), np.uint8)
        if kind == GGMLQuantizationType.MXFP4:
            blocks[:, 0] = random.integers(100, 140, len(blocks))
            blocks[:3, 0] = 0, 1, 252
        for place in places:
            scales = random.normal(0, 0.02, len(blocks)).astype("<f2")
            scales[:3] = 0, -6e-8, -1.5
            blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
        arrays[name.lower()] = blocks.reshape(ROWS, -1)
        notes[name.lower()] = hashlib.sha256(dequantize(arrays[name.lower()], kind).tobytes()).hexdigest()
    save_file(arrays, target, notes)


if __name__ == "__main__":
    main(sys.argv[1])
