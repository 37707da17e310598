"""The golden files: few and small enough for every checkout, and drawn alike on every machine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from golden_codes import codes, differences, digest
from golden_files import (
    ARCHIVE,
    SHARES,
    copy_with_tensors,
    describe,
    draw,
    largest_difference,
    read_metadata,
    read_tensors,
    share,
    share_of,
    with_gaps,
    write_description,
    write_tensors,
)
from safetensors.numpy import load_file

#: The most bytes that each folder of goldens may have.
LIMITS = {
    "agents": 21_500,
    "decoder": 80_000,
    "dflash": 7_000,
    "draft": 34_000,
    "embedding": 11_000,
    "gguf": 40_000,
    "image_prompts": 43_000,
    "images": 35_000,
    "lora": 21_000,
    "losses": 10_000,
    "mmproj": 4_000,
    "mtp": 12_000,
    "policy": 2_500,
    "published": 27_000,
    "quantized": 118_000,
    "speech": 18_000,
    "tiled": 22_000,
    "torch_files": 8_000,
    "video": 13_000,
    "vision": 11_000,
}
#: The most bytes that all tracked files may have.
CHECKOUT_LIMIT = 46 << 20


def test_goldens_stay_small(repository: Path) -> None:
    goldens = repository / "tests" / "goldens"
    sizes = {
        place.name.removesuffix(ARCHIVE): sum(
            each.stat().st_size for each in (place, *place.rglob("*")) if each.is_file()
        )
        for place in goldens.iterdir()
    }
    assert sizes.keys() == LIMITS.keys(), "a folder of goldens without a limit, or a limit without a folder"
    assert {name: size for name, size in sizes.items() if size > LIMITS[name]} == {}


def test_the_checkout_stays_small(repository: Path) -> None:
    git = shutil.which("git")
    if git is None or not (repository / ".git").exists():
        pytest.skip("not a checkout, or no git")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=repository, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip(f"git lists no files here: {listed.stderr.decode(errors='replace').strip()}")
    tracked = [repository / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    sizes = {path: path.lstat().st_size for path in tracked if path.is_symlink() or path.exists()}
    largest = [f"{path} {sizes[path]:,}" for path in sorted(sizes, key=lambda path: -sizes[path])[:40]]
    assert sum(sizes.values()) <= CHECKOUT_LIMIT, largest


DESCRIPTION = describe(
    [
        ("wide.weight", "F32", [40, 50], {"deviation": 0.25}),
        ("norm.weight", "BF16", [30], {"range": [0.5, 1.5]}),
        ("narrow.weight", "F16", [7, 3], {"deviation": 0.25}),
        ("other_norm.weight", "BF16", [5], {"range": [0.5, 1.5]}),
    ],
    seed=19,
)


def test_drawn_tensors_have_these_bits() -> None:
    """Expected values were computed with them: where they differ, every golden is wrong."""
    tensors = draw(DESCRIPTION)
    digest = hashlib.sha256(b"".join(data for _, _, data in tensors.values())).hexdigest()
    assert digest == "093512a3ea079f05ed8050e58b9c743ce8985766e0d2a0ebce77753a5e1cb4a5"
    wide = np.frombuffer(tensors["wide.weight"][2], np.float32)
    assert abs(wide.std() - 0.25) < 0.01 and abs(wide.mean()) < 0.01 and len(np.unique(wide)) > 1900
    norm = np.frombuffer(tensors["norm.weight"][2], np.uint16).astype(np.uint32) << 16
    assert 0.5 <= norm.view(np.float32).min() < 0.7 and 1.3 < norm.view(np.float32).max() <= 1.5


def test_another_seed_draws_others() -> None:
    other = draw(DESCRIPTION | {"seed": 20})
    assert all(other[name][:2] == each[:2] and other[name][2] != each[2] for name, each in draw(DESCRIPTION).items())


def test_stored_and_drawn_tensors_are_one_file(tmp_path: Path) -> None:
    source, logits = tmp_path / "source", np.arange(24, dtype=np.float32).reshape(1, 3, 8)
    (source / "model").mkdir(parents=True)
    (source / "model" / "config.json").write_text("{}")
    write_description(source / "model" / "model.drawn.json", DESCRIPTION)
    assert json.loads((source / "model" / "model.drawn.json").read_text()) == DESCRIPTION
    codes = {"codes": ("I8", [3], b"\1\2\3"), "sizes": ("I64", [1], bytes(8))}
    write_tensors(source / "model" / "model.safetensors", codes, {"format": "pt"})
    eighth = share(logits, 8)
    stored = {"logits.eighth": ("F32", list(eighth.shape), eighth.tobytes())}
    write_tensors(source / "model" / "expected.safetensors", stored, {"torch": "2"})

    whole = copy_with_tensors(source, tmp_path / "whole") / "model"
    assert sorted(path.name for path in whole.iterdir()) == ["config.json", "expected.safetensors", "model.safetensors"]
    assert read_tensors(whole / "model.safetensors") == draw(DESCRIPTION) | codes
    assert read_metadata(whole / "expected.safetensors") == {"torch": "2"}
    assert load_file(whole / "expected.safetensors")["logits"].shape == logits.shape


def test_codes_are_computed_again_and_only_as_the_package_wrote_them() -> None:
    scales, words = np.full((4, 2), 0.125, np.float16), np.arange(32, dtype=np.uint32)
    tensors = {
        "up.weight_scale": ("F16", [4, 2], scales.tobytes()),
        "up.weight_packed": ("I32", [4, 8], (words * 0x9E3779B1).tobytes()),
    }
    description = {"seed": 5, "deviation": 0.3, "dtype": "F16", "layers": {"up": [9, 4, 64]}, "sha256": digest(tensors)}
    stored = differences(tensors, description)
    assert stored["up.weight_scale"] == tensors["up.weight_scale"] and stored != tensors
    assert codes(stored, description) == tensors
    with pytest.raises(AssertionError, match="not the package's"):
        codes(stored | {"up.weight_packed": ("I32", [4, 8], bytes(128))}, description)


@pytest.mark.parametrize(("tokens", "each"), [(10, 8), (15, 8), (16, 16)])
def test_a_share_of_the_logits_has_every_token_and_every_id(tokens: int, each: int) -> None:
    logits = np.random.default_rng(0).standard_normal((2, tokens, 16)).astype(np.float32)
    assert SHARES[share_of(logits.shape)] == each
    expected = with_gaps(share(logits, each), each)
    known = np.isfinite(expected)
    assert known.sum() == logits.size / each and known.any(axis=1).all() and known.any(axis=2).all()
    np.testing.assert_array_equal(expected[known], logits[known])
    assert largest_difference(logits, expected) == 0
    wrong = logits.copy()
    wrong[1, 3, 3] += 2
    assert largest_difference(wrong, expected) == pytest.approx(2, rel=1e-6)
    wrong[0, 0, 1] = np.nan  # where nothing is expected
    with pytest.raises(AssertionError):
        largest_difference(wrong, expected)
