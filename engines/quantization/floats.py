"""Weights of 8-bit floats, with one scale, one of each row, or one of each block, of 4-bit floats (NVFP4, MXFP4) as
weights alone; and Hugging Face's FP8 and gpt-oss's MXFP4."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from edgellm.engines.quantization.layout import FLOATS, FP8, Layout, LinearTensors, Quantization, Settings, Stored
from edgellm.engines.quantization.stored import StoredCodes, StoredWeight
from edgellm.kernels.quantization.packed_weight import WeightFormat, rounded

#: Columns of NVFP4 that share a scale.
GROUP = 16
#: Codes that are looked at at a time.
_PIECE = 1 << 22


@dataclass(frozen=True)
class Fp8Layout(Layout):
    """`weight` [N, K] and its scales: one ("tensor"), [N, 1] ("channel"), or one of each `block` of rows and columns.

    `dtype` is that in which a weight is rounded (None: the scales' own), `rounds_scale` whether the scale is, before.
    """

    name: str
    strategy: str
    block: tuple[int, int] = (1, 1)
    scale_tensor: str = "weight_scale"
    dtype: str | None = None
    rounds_scale: bool = False
    group = None  # the last block of a row may be cut

    def tensors(self, rows: int, columns: int) -> dict[str, Stored]:
        if self.strategy == "tensor":
            shapes: tuple[tuple[int, ...], ...] = ((1,), (), (1, 1))
        elif self.strategy == "channel":
            shapes = ((rows, 1), (rows,))
        else:
            shapes = ((-(-rows // self.block[0]), -(-columns // self.block[1])),)
        scale = Stored(tuple((shape, FLOATS) for shape in shapes))
        return {"weight": Stored.of((rows, columns), *FP8), self.scale_tensor: scale}

    def format(self, scale_dtype: str) -> WeightFormat:
        group = self.block[1] if self.strategy == "block" else None
        return WeightFormat("fp8", group, False, self.dtype or scale_dtype)

    def read(self, tensors: LinearTensors) -> StoredWeight:
        """The weight; a block's scale belongs to each of its rows."""
        rows, _ = tensors.shape
        codes = tensors.integers("weight")
        step = max(1, _PIECE // codes.shape[1])
        if any((codes[start : start + step] & 127 == 127).any() for start in range(0, len(codes), step)):
            tensors.check("weight", codes & 127 != 127, codes, "numbers (the bits 127 and 255 are NaN)")
        scales = tensors.scales(self.scale_tensor)
        if self.strategy == "block":
            scales = np.repeat(scales, self.block[0], 0)[:rows]
        else:
            scales = np.broadcast_to(scales.reshape(-1, 1), (rows, 1))
        format = self.format(tensors.dtype(self.scale_tensor))
        if self.rounds_scale:
            scales = rounded(scales, format.dtype)
        return StoredWeight(format, (StoredCodes(codes, "bytes", 8, tensors.shape),), np.ascontiguousarray(scales))


@dataclass(frozen=True)
class Nvfp4Layout(Layout):
    """`codes` uint8 [N, K / 2], of each byte the low half first; `weight_scale` [N, K / 16]; `whole` float32, by which
    scales are multiplied, or with `divides` divided. A weight is rounded in `dtype`.

    With `scaled` there may be `pre_quant_scale` [K], by which activations are multiplied; else it was folded before.
    """

    name: str
    codes: str
    whole: str
    divides: bool
    dtype: str
    scaled: bool = False
    group, input_tensor = GROUP, "pre_quant_scale"

    def tensors(self, rows: int, columns: int) -> dict[str, Stored]:
        wanted = {
            self.codes: Stored.of((rows, columns // 2), "uint8"),
            "weight_scale": Stored.of((rows, columns // GROUP), *FP8),
            self.whole: Stored((((1,), ("float32",)), ((), ("float32",)))),
        }
        if self.scaled:
            wanted[self.input_tensor] = Stored.of((columns,), *FLOATS, optional=True)
        return wanted

    def format(self, scale_dtype: str) -> WeightFormat:
        return WeightFormat("fp4", GROUP, False, self.dtype, scaled=self.scaled)

    def read(self, tensors: LinearTensors) -> StoredWeight:
        """The weight. A group of small weights may have the scale 0, which 8 bits round it to."""
        scales = tensors.scales("weight_scale", may_vanish=True)
        whole = tensors.scales(self.whole).reshape(())
        scales = scales / whole if self.divides else scales * whole
        codes = StoredCodes(tensors.integers(self.codes), "rows", 4, tensors.shape)
        inputs = tensors.input_scales(self.input_tensor) if self.scaled else None
        format = WeightFormat("fp4", GROUP, False, self.dtype, scaled=inputs is not None)
        return StoredWeight(format, (codes,), np.asarray(scales, np.float32), input_scales=inputs)


@dataclass(frozen=True)
class Mxfp4Layout(Layout):
    """`codes` uint8 [N, K / 2], of each byte the low half first; `scale_tensor` uint8 [N, K / 32], exponents of two
    that count from 127."""

    codes: str
    scale_tensor: str
    name: str = "MXFP4"
    group: int = 32

    def tensors(self, rows: int, columns: int) -> dict[str, Stored]:
        return {
            self.codes: Stored.of((rows, columns // 2), "uint8"),
            self.scale_tensor: Stored.of((rows, columns // self.group), "uint8"),
        }

    def format(self, scale_dtype: str) -> WeightFormat:
        return WeightFormat("fp4", self.group, False, "float32", scaling="powers")

    def read(self, tensors: LinearTensors) -> StoredWeight:
        exponents = tensors.integers(self.scale_tensor)
        tensors.check(self.scale_tensor, exponents < 255, exponents, "exponents below 255, which is NaN")
        codes = StoredCodes(tensors.integers(self.codes), "rows", 4, tensors.shape)
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
        return StoredWeight(self.format(""), (codes,), scales.astype(np.float32))


class Mxfp4(Quantization):
    """Hugging Face's `quant_method` mxfp4: experts alone are packed."""

    method = "mxfp4"

    def __init__(self, settings: Settings, dtype: str) -> None:
        settings.choice("dequantize", (False,), False)
        self._layout = Mxfp4Layout("weight_blocks", "weight_scales")

    def layout(self, names: tuple[str, ...]) -> Layout | None:
        return self._layout if any(".mlp.experts." in name for name in names) else None


class FineGrainedFp8(Quantization):
    """Hugging Face's `quant_method` fp8: `weight_scale_inv` multiplies, whatever its name says. Files of AutoFP8 have
    the same method without `weight_block_size`: one `weight_scale` of each weight."""

    method = "fp8"

    def __init__(self, settings: Settings, dtype: str) -> None:
        settings.choice("scale_fmt", ("float",), "float")
        settings.choice("fmt", ("e4m3",), "e4m3")
        if settings.names("modules_to_convert"):
            raise settings.refused("modules_to_convert", "nothing: tables are not read packed")
        scale = "weight_scale_inv" if "weight_block_size" in settings.values else "weight_scale"
        if settings.values.get("weight_block_size") is None:
            self._layout = Fp8Layout("FP8", "tensor", scale_tensor=scale, dtype=dtype)
        else:
            self._layout = Fp8Layout("fine-grained FP8", "block", settings.block("weight_block_size"), scale, dtype)
        listed = settings.names("modules_to_not_convert") or settings.names("ignored_layers") or ("lm_head",)
        self._names = listed
        plain = [name for name in listed if re.fullmatch(r"[\w.]+", name)]
        #: Of what names begin: there may be hundreds, which take long as patterns. Others are patterns.
        self._beginnings = tuple(f"{name.rstrip('.')}." for name in plain)
        others = [name for name in listed if name not in plain]
        self._patterns = [settings.pattern(rf"(?:{name})(?:(?<=\.)|(?=\.|$))") for name in others]
        if settings.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static":
            self.notes = ("The scales of activations are ignored: 8-bit floats are weights only here.",)

    def layout(self, names: tuple[str, ...]) -> Layout | None:
        """The layout of all linear layers but those named; names are whole, or begin or end a module's name."""
        if any(name.endswith(self._names) or f"{name}.".startswith(self._beginnings) for name in names):
            return None
        return None if any(pattern.match(name) for pattern in self._patterns for name in names) else self._layout
