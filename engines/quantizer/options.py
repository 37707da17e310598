"""How weights are quantized, and what of it fits a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families.embedding import checkpoint_decoder_config
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.quantizer.calibration import layer_program
from edgellm.engines.quantizer.layers import head_shapes, is_eagle_head, linears
from edgellm.kernels.quantization.packed_weight import WeightFormat

METHODS = ("awq", "gptq", "rtn")
GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class QuantizationOptions:
    """How weights are quantized: 4 bits in groups of 32, 64 or 128 columns, or 8 bits with a scale for each row
    (`group_size` None); `method` "awq" scales columns by the activations before, "rtn" does not; "gptq" does
    and rounds columns in turn."""

    bits: int = 4
    group_size: int | None = 128
    symmetric: bool = True
    method: str = "awq"

    def format(self, dtype: str) -> WeightFormat:
        """The weights' format where the checkpoint has the dtype."""
        return WeightFormat("int4" if self.bits == 4 else "int8", self.group_size, not self.symmetric, dtype)


def check_options(options: QuantizationOptions, texts: Sequence[Sequence[int]]) -> None:
    """CheckpointError for options that there are not, or texts that are missing."""
    if options.bits not in (4, 8):
        raise CheckpointError(f"Weights of {options.bits} bits were asked for: expected 4 or 8")
    if options.bits == 4 and options.group_size not in GROUP_SIZES:
        raise CheckpointError(
            f"Groups of {options.group_size} were asked for: expected {', '.join(map(str, reversed(GROUP_SIZES)))}"
        )
    if options.bits == 8 and options.group_size is not None:
        raise CheckpointError("Weights of 8 bits have one scale for each row: leave the group size out")
    if options.method not in METHODS:
        raise CheckpointError(f"The method is {options.method!r}: expected {', '.join(METHODS[:-1])} or {METHODS[-1]}")
    if options.method != "rtn" and not any(len(text) for text in texts):
        raise CheckpointError(f"The method {options.method} needs calibration texts, and there are none")


def largest_group(source: Path) -> int | None:
    """The largest of `GROUP_SIZES` that divides the columns of all linear layers which are quantized of a checkpoint;
    None where none does. Raises CheckpointError and UnsupportedModelError."""
    with Checkpoint.open(source) as checkpoint:
        if is_eagle_head(checkpoint):
            fitting = _fitting(shape[1] for shape in head_shapes(checkpoint).values())
        else:
            config = checkpoint_decoder_config(checkpoint)
            fitting = _fitting(columns_of(config).values())
    return next(iter(fitting), None)


def _fitting(columns: Iterable[int]) -> list[int]:
    """Those of `GROUP_SIZES` that divide all of `columns`."""
    divisor = math.gcd(*columns)
    return [size for size in GROUP_SIZES if divisor % size == 0]


def columns_of(config: DecoderConfig) -> dict[str, int]:
    """The columns of the linear layers of one decoder layer of each kind, of a mixture's experts those of the first, by
    the names of their weights."""
    indices = reversed(range(config.num_layers))
    kinds = {(config.layer_kind(index), config.mixture_of(index) is None): index for index in indices}
    layers = [linear for index in sorted(kinds.values()) for linear in linears(layer_program(config, index, 1), 1)]
    return {name: linear.weight.shape[1] for linear in layers for name, _ in linear.weight.parts}


def check_groups(columns: Mapping[str, int], options: QuantizationOptions) -> None:
    """CheckpointError that names the layers whose `columns` are no whole groups, and what would divide."""
    wrong = {name: count for name, count in columns.items() if count % (options.group_size or 1)}
    if not wrong:
        return
    listed = ", ".join(f"{name.removesuffix('.weight')} ({count})" for name, count in wrong.items())
    fitting = _fitting(columns.values())[::-1]
    advice = f"--group-size {' or '.join(map(str, fitting))} divides them all"
    raise CheckpointError(
        f"Groups of {options.group_size} do not divide the columns of {listed}, nor of layers like these. "
        f"{advice if fitting else 'Take --bits 8, which has no groups'}"
    )
