"""Quantized checkpoints: what they hold, read by an unpacking of the test's own; going on after a kill; refusals."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_multimodal
from quantized_checkpoints import dense_again, stored
from safetensors.numpy import load_file, save_file
from tiny_families import FAMILIES, RECURRENT

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.decoder import decoder_weights, unread_tensors
from edgellm.engines.quantizer.calibration import CalibrationRows, layer_program
from edgellm.engines.quantizer.quantizer import QuantizationOptions, quantize_checkpoint

TEXTS = [[(7 * index + 3) % 250 for index in range(60)], [(11 * index + 5) % 250 for index in range(50)]]
INT4, INT8 = QuantizationOptions(4, 32), QuantizationOptions(8, None)
#: In a fifth of the time, where values do not matter.
QUICK = replace(INT4, method="rtn")
Make = Callable[..., Path]
FINAL_NORMS = ("model.norm.weight", "model.embedding_norm.weight")


def hidden_states(directory: Path) -> np.ndarray:
    """Behind the first layer, of all tokens of the texts; random weights make much of small errors behind more."""
    with Checkpoint.open(directory) as checkpoint:
        config = decoder_config(checkpoint.config, dtype=checkpoint.dtype)
        rows = CalibrationRows(config, checkpoint, TEXTS, None)
        specs = list(layer_program(config, 0, 1).weights.values())
        rows.pass_layer(0, load_numpy_weights(checkpoint, specs))
        return np.concatenate(rows.texts)


METHODS = [("rtn", True), ("awq", False), ("gptq", True)]
KINDS = {"int8": (INT8, 0.05), "int4": (INT4, 0.4)}


@pytest.mark.parametrize(
    ("family", "method", "symmetric", "kind"),
    dict.fromkeys(  # every family with one of the methods and one width, and one family with each
        [
            (family, *METHODS[number % 3], [*KINDS][number // 3 % 2])
            for number, family in enumerate(FAMILIES | RECURRENT)
        ]
        + [("qwen3_5", *each, kind) for each in METHODS for kind in KINDS]
    ),
)
def test_every_family_computes_nearly_what_it_did(
    make_checkpoint: Make, tmp_path: Path, family: str, method: str, symmetric: bool, kind: str
) -> None:
    source, target = make_checkpoint(tmp_path / "source", **(FAMILIES | RECURRENT)[family]), tmp_path / "target"
    expected, before = hidden_states(source), load_file(source / "model.safetensors")
    options, most = replace(KINDS[kind][0], method=method, symmetric=symmetric), KINDS[kind][1]
    report = quantize_checkpoint(source, target, options, () if method == "rtn" else TEXTS)
    dense = dense_again(source, target, tmp_path / "dense", options.bits)
    after, written = load_file(dense / "model.safetensors"), stored(target)
    assert {name: each.shape for name, each in after.items()} == {name: each.shape for name, each in before.items()}
    packed = {name for name in after if f"{name}_packed" in written}
    linear = {name for name, each in before.items() if each.ndim == 2 and ".layers." in name}
    assert packed == {name for name in linear if not name.endswith(("in_proj_a.weight", "in_proj_b.weight"))}
    kept = {name for name in before if name not in packed and (method == "rtn" or "layers" not in name)}
    assert {"model.embed_tokens.weight", next(name for name in before if name.endswith(FINAL_NORMS))} <= kept
    assert all(after[name].tobytes() == before[name].tobytes() for name in kept)
    if method == "rtn":
        for name in packed:
            wrong = np.linalg.norm(after[name].astype(np.float32) - before[name]) / np.linalg.norm(before[name])
            assert wrong < (0.01 if kind == "int8" else 0.1)
    assert np.linalg.norm(hidden_states(dense) - expected) < most * np.linalg.norm(expected)
    assert report.layers == 3 and report.tokens == (0 if method == "rtn" else 110)


def test_a_draft_head_beside_the_decoder_stays_as_published(make_checkpoint: Make, tmp_path: Path) -> None:
    source, target = make_checkpoint(tmp_path / "source", **RECURRENT["qwen3_5"]), tmp_path / "target"
    fc = np.arange(64 * 128, dtype=np.float16).reshape(64, 128)
    save_file(load_file(source / "model.safetensors") | {"mtp.fc.weight": fc}, source / "model.safetensors")
    quantize_checkpoint(source, target, replace(INT8, method="rtn"), ())
    assert np.array_equal(stored(target)["mtp.fc.weight"], fc)
    ignored = json.loads((target / "config.json").read_text())["quantization_config"]["ignore"]
    assert r"re:^mtp\..*" in ignored
    with Checkpoint.open(target) as checkpoint:
        config = decoder_config(checkpoint.config, dtype=checkpoint.dtype)
        checkpoint.check(decoder_weights(config), unread_tensors(config))
        assert checkpoint.layout("mtp.fc.weight", (64, 128)) is None


def test_what_is_written(make_checkpoint: Make, tmp_path: Path) -> None:
    source, target = make_checkpoint(tmp_path / "source"), tmp_path / "target"
    (source / "LICENSE").write_text("free")
    (source / "optimizer.bin").write_bytes(b"1")
    report = quantize_checkpoint(source, target, replace(INT4, method="rtn", symmetric=False))
    assert report.copied == ["LICENSE", "tokenizer.json", "tokenizer_config.json"]
    files = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    assert sorted(path.name for path in target.iterdir()) == sorted(
        [*report.copied, *files, "config.json", "model.safetensors.index.json"]
    )
    config = json.loads((target / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert (settings["quant_method"], settings["format"]) == ("compressed-tensors", "pack-quantized")
    assert settings["ignore"] == ["lm_head"]
    weights = settings["config_groups"]["group_0"]["weights"]
    assert {key: weights[key] for key in ("num_bits", "type", "strategy", "group_size", "symmetric", "actorder")} == {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": False,
        "actorder": None,
    }
    tensors, module = stored(target), "model.layers.2.mlp.down_proj"
    shapes = {name.removeprefix(f"{module}."): each for name, each in tensors.items() if name.startswith(module)}
    assert {name: (each.dtype.name, each.shape) for name, each in shapes.items()} == {
        "weight_packed": ("int32", (64, 16)),
        "weight_scale": ("float16", (64, 4)),
        "weight_zero_point": ("int32", (8, 4)),
        "weight_shape": ("int64", (2,)),
    }
    assert report.bytes_after == sum(each.nbytes for each in tensors.values())
    assert not list(tmp_path.glob(".*"))  # the folder of layers is gone


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_model_that_takes_images_keeps_its_encoder(family: str, make_checkpoint: Make, tmp_path: Path) -> None:
    """Under the names that it was published with."""
    source, target = make_checkpoint(tmp_path / "source", **tiny_multimodal.FAMILIES[family]), tmp_path / "target"
    wrapped = {
        name.replace("model.layers.", "model.language_model.layers.").replace("visual.", "model.visual.", 1)
        if not name.startswith("model.visual.")
        else name: each
        for name, each in load_file(source / "model.safetensors").items()
    }
    save_file(wrapped, source / "model.safetensors")
    quantize_checkpoint(source, target, QUICK, TEXTS)
    tensors = stored(target)
    vision = [name for name in wrapped if "visual." in name]
    assert vision and all(tensors[name].tobytes() == wrapped[name].tobytes() for name in vision)
    assert "model.language_model.layers.0.mlp.down_proj.weight_packed" in tensors
    dense = ["re:.*linear_attn[.]in_proj_[ab]$"] if family == "qwen3_5" else []
    ignored = json.loads((target / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "re:.*visual[.].*", *dense]


KILLED = """
import os, signal, sys
from pathlib import Path
from edgellm.engines.quantizer.quantizer import QuantizationOptions, quantize_checkpoint
from edgellm.engines.quantizer import work_folder

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def progress(stage, done, total):
    if done == int(sys.argv[3]):
        if sys.argv[4] == "writing":  # half of the next layer is there
            work_folder.write_tensors = lambda path, tensors, *_: (path.write_bytes(b"half"), kill())
        else:
            kill()

texts = [[(7 * i + 3) % 250 for i in range(60)], [(11 * i + 5) % 250 for i in range(50)]]
quantize_checkpoint(sys.argv[1], sys.argv[2], QuantizationOptions(4, 32), texts, progress=progress)
"""


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint, quantized without a break."""
    target = tmp_path_factory.mktemp("quantized") / "whole"
    assert quantize_checkpoint(tiny_checkpoint, target, INT4, TEXTS).resumed == 0
    return target


@pytest.mark.parametrize(("layers", "moment"), [(1, "layer"), (2, "writing")])
def test_a_killed_run_goes_on_where_it_stopped(
    make_checkpoint: Make, tmp_path: Path, whole: Path, layers: int, moment: str
) -> None:
    source, target = make_checkpoint(tmp_path / "source"), tmp_path / "target"
    command = [sys.executable, "-c", KILLED, str(source), str(target), str(layers), moment]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not target.exists()
    assert quantize_checkpoint(source, target, INT4, TEXTS).resumed == layers
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


class Stop(Exception):
    pass


def interrupted(source: Path, target: Path, options: QuantizationOptions = QUICK) -> None:
    """A run that ends behind its second layer."""

    def progress(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        quantize_checkpoint(source, target, options, TEXTS, progress=progress)


def test_other_options_or_another_checkpoint_do_not_go_on(make_checkpoint: Make, tmp_path: Path) -> None:
    source, target = make_checkpoint(tmp_path / "source"), tmp_path / "target"
    interrupted(source, target)
    for options, texts, named in (
        (replace(QUICK, symmetric=False), TEXTS, "options"),
        (replace(QUICK, method="gptq"), TEXTS[:1], "options, calibration texts"),
        (QUICK, TEXTS[:1], "calibration texts"),
    ):
        with pytest.raises(CheckpointError, match=f"with other {named}. Give the command as it was"):
            quantize_checkpoint(source, target, options, texts)
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="with other checkpoint"):
        quantize_checkpoint(source, target, QUICK, TEXTS)
    assert quantize_checkpoint(source, target, replace(QUICK, symmetric=False), TEXTS, restart=True).resumed == 0


def test_a_damaged_layer_is_made_again(make_checkpoint: Make, tmp_path: Path, whole: Path) -> None:
    source, target = make_checkpoint(tmp_path / "source"), tmp_path / "target"
    interrupted(source, target, INT4)
    layer = tmp_path / ".target.quantizing" / "layer-0001.safetensors"
    data = bytearray(layer.read_bytes())
    data[-5] ^= 1  # a file of the right form all the same
    layer.write_bytes(data)
    assert quantize_checkpoint(source, target, INT4, TEXTS).resumed == 1
    found, expected = stored(target), stored(whole)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(each, found[name]) for name, each in expected.items())


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("kind", ["link to work", "link", "no job", "another job"])
def test_what_others_have_at_the_place_of_the_work_is_left_alone(
    make_checkpoint: Make, tmp_path: Path, kind: str, restart: bool
) -> None:
    source, target, decoy = make_checkpoint(tmp_path / "source"), tmp_path / "target", tmp_path / "decoy"
    work = tmp_path / ".target.quantizing"
    if kind == "link to work":
        interrupted(source, target)
        work.rename(decoy)
    else:
        decoy.mkdir()
        (decoy / "layer-0000.safetensors").write_text("mine")
    if kind == "another job":
        (decoy / "job.json").write_text('{"job": "gardener"}')
    if "link" in kind:
        work.symlink_to(decoy)
    else:
        decoy.rename(work)
    before = {path.name: path.read_bytes() for path in work.iterdir()}
    with pytest.raises(CheckpointError, match=r"\.target\.quantizing (is a link|has no job|has another job)"):
        quantize_checkpoint(source, target, QUICK, TEXTS, restart=restart)
    assert {path.name: path.read_bytes() for path in work.iterdir()} == before and not target.exists()


@pytest.mark.parametrize("restart", [False, True])
def test_what_others_put_into_the_folder_of_the_work_stays(
    make_checkpoint: Make, tmp_path: Path, restart: bool
) -> None:
    source, target = make_checkpoint(tmp_path / "source"), tmp_path / "target"
    interrupted(source, target)
    work = tmp_path / ".target.quantizing"
    (work / "notes.txt").write_text("mine")
    assert quantize_checkpoint(source, target, QUICK, TEXTS, restart=restart).resumed == (0 if restart else 2)
    assert [path.name for path in work.iterdir()] == ["notes.txt"]


def test_a_kill_while_the_work_is_removed_hinders_nobody(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_checkpoint(tmp_path / "source"), tmp_path / "target"
    interrupted(source, target)
    iterdir, unlink = Path.iterdir, Path.unlink
    unlinked: list[Path] = []

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == ".target.quantizing":
            unlinked.append(path)
            if len(unlinked) == 3:
                raise Stop
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        # A folder's order is the file system's: here the first file may be any.
        patch.setattr(Path, "iterdir", lambda path: iter(sorted(iterdir(path))))
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(Stop):
            quantize_checkpoint(source, target, QUICK, TEXTS, restart=True)
    quantize_checkpoint(source, target, QUICK, TEXTS)
    assert not (tmp_path / ".target.quantizing").exists()


def test_two_processes_do_not_share_the_work(make_checkpoint: Make, tmp_path: Path) -> None:
    source, target = make_checkpoint(tmp_path / "source"), tmp_path / "target"
    interrupted(source, target)
    descriptor = os.open(tmp_path / ".target.quantizing", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="is being quantized by another process"):
        quantize_checkpoint(source, target, QUICK, TEXTS)
    os.close(descriptor)
    assert quantize_checkpoint(source, target, QUICK, TEXTS).resumed == 2


@pytest.mark.parametrize(
    ("options", "texts", "message"),
    [
        (QuantizationOptions(4, 128), TEXTS, r"Groups of 128 .*q_proj \(64\).*--group-size 32 or 64 divides them all"),
        (QuantizationOptions(4, 16), TEXTS, "Groups of 16 were asked for: expected 32, 64, 128"),
        (QuantizationOptions(8, 32), TEXTS, "leave the group size out"),
        (QuantizationOptions(3, None), TEXTS, "expected 4 or 8"),
        (QuantizationOptions(4, 32, method="obq"), TEXTS, "expected awq, gptq or rtn"),
        (QuantizationOptions(4, 32, method="gptq"), [], "The method gptq needs calibration texts"),
        (INT4, [[]], "needs calibration texts"),
    ],
)
def test_what_cannot_be_done_is_refused(
    make_checkpoint: Make, tmp_path: Path, options: QuantizationOptions, texts: Any, message: str
) -> None:
    source = make_checkpoint(tmp_path / "source")
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, tmp_path / "target", options, texts)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_places_and_quantized_checkpoints_are_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    source, target = make_checkpoint(tmp_path / "source"), tmp_path / "target"
    with pytest.raises(CheckpointError, match="is the source"):
        quantize_checkpoint(source, source, INT8, TEXTS)
    quantize_checkpoint(source, target, replace(INT8, method="rtn"), ())
    with pytest.raises(CheckpointError, match="--force replaces it"):
        quantize_checkpoint(source, target, INT8, TEXTS)
    with pytest.raises(CheckpointError, match="quantized already with the method 'compressed-tensors'"):
        quantize_checkpoint(target, tmp_path / "again", INT8, TEXTS)
    quantize_checkpoint(source, target, QUICK, (), force=True)
    assert stored(target)["model.layers.0.mlp.up_proj.weight_scale"].shape == (128, 2)


def peak_of(source: Path, target: Path, method: str) -> int:
    """Bytes that quantizing takes at once."""
    gc.collect()
    tracemalloc.start()
    quantize_checkpoint(source, target, replace(INT4, method=method), TEXTS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("searched", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_layer_is_in_memory_at_a_time(make_checkpoint: Make, tmp_path: Path, searched: bool) -> None:
    """More layers take no more. Beside a layer and the rows of the texts there is what blocks and
    scales are searched with: a few arrays of at most 256 rows of a weight for each processor."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
    layer = 4 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 1024)
    rows, search = 4 * 110 * (256 + 3 * 1024), 6 * (os.cpu_count() or 1) * 4 * 256 * 1024
    sources = {number: make_checkpoint(tmp_path / f"{number}", num_hidden_layers=number, **sizes) for number in (1, 2)}
    if searched:
        assert peak_of(sources[1], tmp_path / "awq", "awq") < layer + rows + search
        return
    one, two = (peak_of(source, tmp_path / f"rtn-{number}", "rtn") for number, source in sources.items())
    assert two < one + layer / 4
    assert two < 2 * (layer + rows) + search / 2
