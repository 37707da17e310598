"""The shipped model, or one like it, with its layers quantized here: what equality is shown of, too."""

from __future__ import annotations

from pathlib import Path

from edgellm.engines.quantizer.quantizer import QuantizationOptions, quantize_checkpoint

#: What the linear layers of the base may be; its draft and its adapters are dense.
WEIGHTS = ("published", "int4")


def base_of(model: Path, weights: str, folder: Path) -> Path:
    """The model itself, or in `folder` its checkpoint with layers of 4 bits, rounded in symmetric groups of 64."""
    if weights == "published":
        return model
    target = folder / "int4"
    quantize_checkpoint(model, target, QuantizationOptions(4, 64, True, "rtn"))
    return target
