"""How much the outputs of quantized layers differ from those of the dense ones, on texts not used for calibration.

Usage: python -m tools.bench.quantization_error [--model DIR] [--bits 4] [--group-size 64] [--calibration FILE]

The shipped model by default, on conversations of its evaluation. For each linear layer with weight W and the held-out
inputs x that it has in the dense model: |x (W' - W)^T| / |x W^T|, and for each layer of the model the same of what it
adds to the residual stream; means over all of them, for plain rounding to nearest (as compressed-tensors has it: a
scale of 2 max|w| / (2^b - 1), with zero points (max - min) / (2^b - 1)), for the search of the clipping, with scaled
columns, and with these rounded in turn.
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np

from edgellm.commands.quantize import default_texts, load_texts, token_pieces
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.families import decoder_config
from edgellm.engines.model.program import Program
from edgellm.engines.quantizer.arithmetic import NUMPY
from edgellm.engines.quantizer.calibration import CalibrationRows, layer_program
from edgellm.engines.quantizer.feedback import quantize_in_turn
from edgellm.engines.quantizer.layers import linears, scale_layer
from edgellm.engines.quantizer.rounding import rounded
from edgellm.engines.quantizer.scaling import foldings, search_scales
from edgellm.engines.quantizer.statistics import InputStatistics
from edgellm.kernels.quantization.packed_weight import Codes, PackedWeight, WeightFormat
from edgellm.text.tokenizer import Tokenizer
from tools.demo_model.evaluate import evaluation_items

SHIPPED = Path(__file__).parents[2] / "edgellm" / "shipped"
HELD_OUT_SEED = 7


def main() -> None:
    """Print a table for either symmetry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64, help="0: a scale for each row")
    parser.add_argument("--calibration", type=Path)
    arguments = parser.parse_args()
    group, tokenizer = arguments.group_size or None, Tokenizer.from_directory(arguments.model)
    entries = load_texts(arguments.calibration) if arguments.calibration else default_texts()
    codes: Codes = "int4" if arguments.bits == 4 else "int8"
    for zeros in (False, True):
        with Checkpoint.open(arguments.model) as checkpoint:
            config = decoder_config(checkpoint.config, checkpoint.generation_config, dtype=checkpoint.dtype)
            format = WeightFormat(codes, group, zeros, checkpoint.dtype or "float16")
            texts, held_out = token_pieces(tokenizer, entries), held_out_texts(tokenizer)
            calibration = CalibrationRows(config, checkpoint, texts, group, NUMPY, True)
            unseen = CalibrationRows(config, checkpoint, held_out, group)
            errors: dict[tuple[str, str], list[float]] = defaultdict(list)
            for index in range(config.num_layers):
                program = layer_program(config, index, 1)
                weights = load_numpy_weights(checkpoint, list(program.weights.values()))
                compare_layer(index, program, weights, (calibration, unseen), format, errors)
        print(f"{'zero points' if zeros else 'symmetric'}, {calibration.count} tokens read, {unseen.count} held out")
        for (kind, way), found in errors.items():
            share = np.mean(found) / np.mean(errors[kind, "plain"])
            print(f"  {kind:<14}{way:<10}{np.mean(found):8.4f}{share:8.3f}", flush=True)


def held_out_texts(tokenizer: Tokenizer) -> list[list[int]]:
    """Conversations of the shipped model's evaluation, with the right answers."""
    items = evaluation_items(HELD_OUT_SEED, 1)
    random.Random(HELD_OUT_SEED).shuffle(items)
    answered = [[*item["messages"], {"role": "assistant", "content": item["accepted"][0]}] for item in items[:40]]
    return [tokenizer.encode_chat(messages, add_generation_prompt=False) for messages in answered]


def compare_layer(
    index: int,
    program: Program,
    weights: dict[str, np.ndarray],
    rows: tuple[CalibrationRows, CalibrationRows],
    format: WeightFormat,
    errors: dict[tuple[str, str], list[float]],
) -> None:
    """Add the errors of a layer to `errors`, by the kind of layer and the way of quantizing; pass the layer."""
    calibration, unseen = rows
    before = list(unseen.texts)
    seen, inputs = calibration.observe_layer(index, weights), unseen.observe_layer(index, weights)
    after = list(unseen.texts)
    added = [out - start for start, out in zip(before, after, strict=True)]
    for way, (scales, quantize) in WAYS.items():
        for linear in linears(program):
            weight, own = weights[linear.weight.name], deepcopy(seen[linear.name])
            factors = np.ones(weight.shape[1], np.float32)
            if scales and linear.name in foldings(program.steps):
                factors = search_scales(weight, own, format)
                own = own.scaled(factors)
            difference = quantize(weight * factors, format, own) / factors - weight
            taken = inputs[linear.name].sample
            error = float(np.linalg.norm(taken @ difference.T) / np.linalg.norm(taken @ weight.T))
            for kind in ("all linears", linear.name.rpartition(".")[2]):
                errors[kind, way].append(error)
        changed, given = {name: weight.copy() for name, weight in weights.items()}, deepcopy(seen)
        if scales:
            given = scale_layer(program, changed, given, format, dict.fromkeys(weights, "float32"))
        for linear in linears(program):
            changed[linear.weight.name] = quantize(changed[linear.weight.name], format, given[linear.name])
        unseen.texts = list(before)
        unseen.pass_layer(index, changed)
        outputs = [found - out for found, out in zip(list(unseen.texts), after, strict=True)]
        sizes = [np.linalg.norm(np.concatenate(each)) for each in (outputs, added)]
        errors["whole layers", way].append(float(sizes[0] / sizes[1]))
    unseen.texts = after


def plainly_rounded(weights: np.ndarray, format: WeightFormat) -> np.ndarray:
    """Float32 [N, K], each weight to the nearest code in the scale that the largest of its group asks for."""
    grouped = weights.reshape(len(weights), -1, format.group or weights.shape[1])
    last = (1 << format.bits) - 1
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    largest = (high - low if format.zeros else 2 * np.maximum(high, -low)) / np.float32(last)
    scales = rounded(np.where(largest == 0, np.float32(1), largest), format.dtype)
    zeros = np.rint(-low / scales) if format.zeros else np.full_like(scales, last + 1 >> 1)
    codes = np.clip(np.rint(grouped / scales[..., None]) + zeros[..., None], 0, last).astype(np.uint8)
    kept = zeros.astype(np.uint8) if format.zeros else None
    return PackedWeight(format, codes.reshape(weights.shape), scales, kept).values()


def nearest(weights: np.ndarray, format: WeightFormat, seen: InputStatistics) -> np.ndarray:
    """Float32 [N, K], each weight to the nearest code, in scales that were searched."""
    return NUMPY.quantize_rows(weights, format, seen.factors).values()


def in_turn(weights: np.ndarray, format: WeightFormat, seen: InputStatistics) -> np.ndarray:
    """Float32 [N, K] each column making up for the errors of those before."""
    return quantize_in_turn(weights, format, seen).values()


#: Whether columns are scaled before, and how weights are rounded.
WAYS: dict[str, tuple[bool, Callable[[np.ndarray, WeightFormat, InputStatistics], np.ndarray]]] = {
    "plain": (False, lambda weights, format, seen: plainly_rounded(weights, format)),
    "clipping": (False, nearest),
    "awq": (True, nearest),
    "gptq": (True, in_turn),
}

if __name__ == "__main__":
    main()
