"""The golden files: few and small enough for every checkout."""

from __future__ import annotations

from pathlib import Path

#: The most bytes that each folder of goldens may have.
LIMITS = {
    "decoder": 2_700_000,
    "draft": 700_000,
    "image_prompts": 860_000,
    "images": 100_000,
    "lora": 520_000,
    "losses": 10_000,
    "mtp": 150_000,
    "quantized": 3_200_000,
    "torch_files": 100_000,
    "vision": 1_200_000,
}


def test_goldens_stay_small(repository: Path) -> None:
    goldens = repository / "tests" / "goldens"
    sizes = {
        folder.name: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        for folder in goldens.iterdir()
    }
    assert sizes.keys() == LIMITS.keys(), "a folder of goldens without a limit, or a limit without a folder"
    assert {name: size for name, size in sizes.items() if size > LIMITS[name]} == {}
