"""What formats of weights cost a published model: perplexity, mean KL and equal greedy tokens, against its own values.

Usage: python -m tools.bench.published_quality FILE.gguf [--moved] [--ways NAME ...] [--calibration FILE]
       [--text FILE] [--output RESULTS.json] [--checkpoint DIR]

The file's values, rounded to float16, are the reference. A published Q4_1 lies on a grid, which flatters formats that
have the same: with `--moved` each weight of layers is moved by up to half a step of its block, evenly drawn (seed 33),
and the moved model is the reference. Ways are NAME:GROUP:s (symmetric) or :z (zero points), where the name is "plain"
(the scale that the largest weight asks for), "rtn", "awq" or "gptq" (`edgellm quantize`, the latter two calibrated on
the texts that ship); "q4_0", "q4_1" and "q5_0" are llama.cpp's rounding without an importance matrix; "int8"; or a
GGUF file that another program made of the same checkpoint, which `--checkpoint` keeps. Embedding and head stay as they
are in all. The text is prose in the public domain, by default the passages beside this tool, in
windows of 512 tokens of which each but the first counts; NumPy computes, in float32. Results are printed and written
after each way.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgellm.commands.quantize import default_texts, load_texts, token_pieces
from edgellm.engines.building.gguf_folder import checkpoint_folder
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.families import FAMILIES
from edgellm.engines.model.program import single_weight
from edgellm.engines.quantizer.quantizer import QuantizationOptions
from edgellm.engines.quantizer.written_layout import StoredTensor, write_tensors
from edgellm.kernels.quantization.packed_weight import Codes, PackedWeight, WeightFormat
from edgellm.text.tokenizer import Tokenizer
from tools.bench.provenance import provenance, report
from tools.bench.quantization_error import plainly_rounded
from tools.bench.quantization_quality import (
    LAYERS,
    Forced,
    Model,
    log_probabilities,
    open_model,
    quantized,
    way_of,
    with_layers_of,
)

PROSE = Path(__file__).with_name("public_domain_prose.txt")
WINDOW, BLOCK, SEED = 512, 32, 33
WAYS = (
    *("q4_0", "q4_1", "q5_0", "int8"),
    *(f"{name}:{group}:{zeros}" for group in (64, 32) for zeros in "sz" for name in ("plain", "rtn", "awq", "gptq")),
)
_LEFT_OUT = ("embed_tokens.weight", "lm_head.weight", "norm.weight")


def as_checkpoint(file: Path, folder: Path, moved: bool) -> None:
    """The file's model in `folder`, in safetensors of float16."""
    random = np.random.default_rng(SEED)
    with checkpoint_folder(file) as opened, Checkpoint.open(opened) as checkpoint:
        tensors: dict[str, StoredTensor] = {}
        for name, info in checkpoint.tensors.items():
            values = load_numpy_weights(checkpoint, [single_weight(name, *info.shape)])[name]
            if moved and not name.endswith(_LEFT_OUT):
                blocks = values.reshape(-1, BLOCK)
                steps = np.ptp(blocks, 1) / np.float32(15)
                values = blocks + steps[:, None] * random.uniform(-0.5, 0.5, blocks.shape).astype(np.float32)
            tensors[name] = StoredTensor("float16", values.reshape(info.shape).astype(np.float16))
        folder.mkdir()
        write_tensors(folder / "model.safetensors", tensors)
        for each in opened.glob("tokenizer*.json"):
            shutil.copy(each, folder)
        config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        config["architectures"] = [FAMILIES[config["model_type"]].architecture]  # llama.cpp's converter asks for it
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def llama_cpp_rounded(weights: np.ndarray, name: str) -> np.ndarray:
    """Float32 [N, K] as "q4_0", "q4_1" or "q5_0" has it: blocks of 32; the scale is that for which the weight of the
    largest magnitude has the lowest code, or with minima (max - min) / 15."""
    blocks = weights.reshape(-1, BLOCK)
    codes: Codes = "int5" if name == "q5_0" else "int4"
    last = 31 if name == "q5_0" else 15
    minima = np.zeros(len(blocks), np.float32)
    if name == "q4_1":
        minima = blocks.min(1)
        scales = (blocks.max(1) - minima) / np.float32(last)
    else:
        extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)[:, 0]
        scales = -extreme / np.float32(last + 1 >> 1)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    offset = 0.5 if name == "q4_1" else (last + 1) / 2 + 0.5
    steps = np.floor((blocks - minima[:, None]) * inverse[:, None] + np.float32(offset))
    shape = len(weights), weights.shape[1] // BLOCK
    scales, minima = (each.astype(np.float16).astype(np.float32).reshape(shape) for each in (scales, minima))
    format = WeightFormat(codes, BLOCK, False, "float32", minima=name == "q4_1")
    packed = np.clip(steps, 0, last).astype(np.uint8).reshape(weights.shape)
    return PackedWeight(format, packed, scales, minima=minima if name == "q4_1" else None).values()


def bits_of(way: str) -> float:
    """Bits of a weight of the layers, scales, minima and zero points included."""
    if way.endswith(".gguf"):
        with checkpoint_folder(Path(way)) as folder, Checkpoint.open(folder) as checkpoint:
            layers = [info for name, info in checkpoint.tensors.items() if name.endswith(LAYERS)]
            return round(8 * sum(info.nbytes for info in layers) / sum(math.prod(info.shape) for info in layers), 2)
    if way in ("q4_0", "q4_1", "q5_0"):
        return {"q4_0": 4.5, "q4_1": 5.0, "q5_0": 5.5}[way]
    if way == "int8":
        return 8.0
    _, group, zeros = way.split(":")
    return 4 + (20 if zeros == "z" else 16) / int(group)


def made(directory: Path, reference: Model, way: str, texts: Sequence[Sequence[int]]) -> Model:
    """The model in one of `WAYS`, or with the layers of a GGUF file."""
    if way.endswith(".gguf"):
        return with_layers_of(Path(way), reference)
    if way == "int8":
        return quantized(directory, QuantizationOptions(8, None, True, "rtn"), ())
    if ":" in way:
        method, group, zeros = way.split(":")
        if method != "plain":
            options = QuantizationOptions(4, int(group), zeros == "s", method)
            return quantized(directory, options, () if method == "rtn" else texts)
        format = WeightFormat("int4", int(group), zeros == "z", "float16")
    weights = {
        name: (plainly_rounded(weight, format) if ":" in way else llama_cpp_rounded(weight, way))
        if name.endswith(LAYERS)
        else weight
        for name, weight in reference.weights.items()
    }
    return Model(reference.config, weights)


def compared(model: Model, windows: Sequence[Forced], expected: Sequence[np.ndarray] | None) -> dict[str, float]:
    """The measures of a model, against the reference's log-probabilities (None: of the reference)."""
    losses, divergences, equal = [], [], []
    for number, window in enumerate(windows):
        found = log_probabilities(model.logits(window))
        losses.append(-found[np.arange(len(found)), np.asarray(window.token_ids)[window.places]])
        if expected is not None:
            divergences.append((np.exp(expected[number]) * (expected[number] - found)).sum(1))
            equal.append(expected[number].argmax(1) == found.argmax(1))
    result = {"perplexity": round(float(np.exp(np.concatenate(losses).mean())), 3)}
    if expected is not None:
        result["mean_kl"] = round(float(np.concatenate(divergences).mean()), 5)
        result["equal_tokens_percent"] = round(100 * float(np.concatenate(equal).mean()), 2)
    return result


def main() -> None:
    """Print a line for each way, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--moved", action="store_true")
    help = f"of {', '.join(WAYS)}, or a GGUF file"
    parser.add_argument("--ways", nargs="*", type=way_of(WAYS), default=WAYS, metavar="NAME", help=help)
    parser.add_argument("--calibration", type=Path, help="as edgellm quantize takes it")
    parser.add_argument("--text", type=Path, default=PROSE)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="a new directory for the model that is the reference")
    arguments = parser.parse_args()
    with TemporaryDirectory() as made_in:
        directory = arguments.checkpoint or Path(made_in) / "model"
        as_checkpoint(arguments.file, directory, arguments.moved)
        tokenizer = Tokenizer.from_directory(directory)
        texts = token_pieces(tokenizer, load_texts(arguments.calibration) if arguments.calibration else default_texts())
        ids = tokenizer.encode(arguments.text.read_text(encoding="utf-8"))
        pieces = [ids[start : start + WINDOW] for start in range(0, len(ids) - 1, WINDOW)]
        windows = [Forced(piece, [range(1, len(piece))]) for piece in pieces if len(piece) > 1]
        reference = open_model(directory)
        expected = [log_probabilities(reference.logits(window)) for window in windows]
        results: dict[str, dict[str, Any]] = {"float16": {"bits": 16.0} | compared(reference, windows, None)}
        start = provenance() | {"tokens": sum(len(each.places) for each in windows), "moved": arguments.moved}
        print("float16", results["float16"], flush=True)
        for way in arguments.ways:
            started = time.perf_counter()
            model = made(directory, reference, way, texts)
            seconds = round(time.perf_counter() - started)
            name = Path(way).name
            results[name] = {"bits": bits_of(way)} | compared(model, windows, expected) | {"seconds_to_make": seconds}
            print(name, results[name], flush=True)
            report(start | {"ways": results}, arguments.output)


if __name__ == "__main__":
    main()
