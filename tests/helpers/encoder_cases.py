"""Arguments of the kernels of vision encoders, by their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from device_bits import from_bits, to_bits
from gpu_device import device_copy

from edgellm.kernels.encoder.contract import ACTIVATIONS, Convolution


@dataclass(frozen=True)
class Compute:
    """Values that a device has in its compute dtype."""

    values: np.ndarray


@dataclass(frozen=True)
class Case:
    """A kernel and its arguments."""

    kernel: str
    arguments: tuple[Any, ...]

    @property
    def output(self) -> int:
        """The number of the argument that is written."""
        return 2 if self.kernel in ("copy_rows", "clip_rows") else len(self.arguments) - 1

    def on_host(self, dtype: str) -> list[Any]:
        """Arguments for the twin: float32, rounded where the device has the compute dtype."""
        return [
            from_bits(to_bits(each.values, dtype), dtype)
            if isinstance(each, Compute)
            else each.copy()
            if isinstance(each, np.ndarray)
            else each
            for each in self.arguments
        ]

    def on_device(self, gpu: Any, dtype: str) -> list[Any]:
        """Arguments in device memory."""
        return [
            device_copy(gpu, to_bits(each.values, dtype))
            if isinstance(each, Compute)
            else device_copy(gpu, each)
            if isinstance(each, np.ndarray)
            else each
            for each in self.arguments
        ]

    def run_twin(self, twin: Any, dtype: str = "float16") -> np.ndarray:
        """What the twin writes."""
        arguments = self.on_host(dtype)
        getattr(twin, self.kernel)(*arguments)()
        return arguments[self.output]

    def run(self, gpu: Any, kernels: Any, dtype: str, **options: int) -> tuple[np.ndarray, np.ndarray]:
        """What the device writes, in float32, and its bits."""
        arguments = self.on_device(gpu, dtype)
        getattr(kernels, self.kernel)(*arguments, **options)()
        found = gpu.download(arguments[self.output])
        return (found if found.dtype == np.float32 else from_bits(found, dtype)), found.view(
            np.uint32 if found.dtype == np.float32 else np.uint16
        )


def values(*shape: int, seed: int = 0, mean: float = 0.0) -> np.ndarray:
    """Normally distributed values around a mean."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32) + np.float32(mean)


def nothing(*shape: int) -> np.ndarray:
    """An output before it is written."""
    return np.full(shape, np.nan, np.float32)


def norm(rows: int, width: int, padded: int, layer: bool, mean: float = 0.0, wide: bool = False) -> Case:
    """A layer norm, or an RMS norm with an offset; `wide`: from float32 to float32."""
    given, output = values(rows, width, mean=mean), nothing(rows, padded)
    bias = Compute(values(width, seed=2)) if layer else None
    weight = Compute(values(width, seed=1, mean=1))
    return Case("norm", (given, weight, bias, 1e-6, 0.0 if layer else 1.0, output if wide else Compute(output)))


def activate(kind: str, width: int = 44, padded: int = 48) -> Case:
    """An activation of values that reach into its flat ends."""
    return Case("activate", (values(33, width) * np.float32(4), ACTIVATIONS[kind], Compute(nothing(33, padded))))


def rotary(rows: int, size: int) -> np.ndarray:
    """Cosines, then sines."""
    angles = np.random.default_rng(6).uniform(0, 6, (rows, size // 2))
    return np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)


def heads(rows: int, count: int, size: int, turned: bool) -> Case:
    """Heads apart."""
    given = values(rows, 3 * count * size)
    turning = rotary(rows, size) if turned else None
    return Case("prepare_heads", (given, turning, Compute(nothing(3, count, rows, size))))


def attention(
    rows: int, window: int, count: int, size: int, visible: np.ndarray | None = None, largest: float = 1.0
) -> Case:
    """Attention within windows; `largest` multiplies queries and keys."""
    given = values(3, count, rows, size)
    given[:2] *= np.float32(largest)
    return Case("attention", (Compute(given), window, visible, size**-0.5, Compute(nothing(rows, count * size))))


def first_of_each(rows: int, window: int) -> np.ndarray:
    """Which rows are visible where windows are filled from their beginnings on, each to another row, at least one."""
    return np.arange(rows) % window < 1 + np.arange(rows) // window * 37 % window


def local_attention(rows: int, heads: int, size: int, past: int) -> Case:
    """Attention to rows before, of columns 40 and on of positions."""
    given, width = values(rows, 3 * heads * size), heads * size
    positions, scale = values(past + 1, 50 + width, seed=1), Compute(values(size, seed=2))
    return Case("local_attention", (given, positions, 40, past, 2.0, scale, Compute(nothing(rows, width))))


def past_attention(rows: int, heads: int, size: int, past: int, first: int = 0) -> Case:
    """Attention of heads to rows before, the `first` ones kept, in as little room as may be."""
    given, kept = Compute(values(3, heads, rows, size)), values(2, heads, rows + past - 1, size, seed=1)
    arguments = given, Compute(kept), np.array([first], np.int32), past, size**-0.5
    return Case("past_attention", (*arguments, Compute(nothing(rows, heads * size))))


BOUNDS = Compute(np.array([-0.5, 0.75], np.float32))
CHOSEN = np.array([3, 0, 0, 6, -5, 99, 2], np.int32)
CASES = {
    "layer_norm": norm(37, 1152, 1152, True),
    "layer_norm_far_from_0": norm(5, 1280, 1280, True, mean=50.0),
    "layer_norm_in_float32": norm(9, 1024, 1024, True, wide=True),
    "layer_norm_of_odd_rows": norm(7, 75, 80, True),
    "layer_norm_of_blocks": norm(3, 4608, 4608, True),
    "rms_norm": norm(37, 160, 160, False),
    "rms_norm_in_float32": norm(4, 1280, 1280, False, wide=True),
    "rms_norm_of_padded_rows": norm(7, 1276, 1280, False),
    **{kind: activate(kind) for kind in ACTIVATIONS},
    "gelu_of_wide_rows": activate("gelu", 4304, 4304),
    "gelu_of_odd_rows": activate("gelu", 21, 24),
    "patches": Case("copy_rows", (Compute(values(20, 588)), None, Compute(nothing(20, 592)), 0)),
    "odd_patches": Case("copy_rows", (Compute(values(20, 75)), None, Compute(nothing(18, 80)), 0)),
    "chosen_rows": Case("copy_rows", (Compute(values(7, 96)), CHOSEN, Compute(nothing(7, 96)), 0)),
    "chosen_wide_rows": Case("copy_rows", (values(7, 40), CHOSEN, Compute(nothing(7, 40)), 0)),
    "a_row_in_float32": Case("copy_rows", (Compute(values(1, 32)), None, nothing(1, 32), 0)),
    "sums": Case("add_rows", (values(33, 1152), values(33, 1152, seed=1), nothing(33, 1152))),
    "sums_with_a_weight": Case("add_rows", (values(17, 75), Compute(values(17, 75, seed=1)), nothing(17, 75))),
    "scaled_sums": Case(
        "add_scaled_rows",
        (values(33, 1152), values(33, 1152, seed=1), Compute(values(1, 1152, seed=2)[0]), nothing(33, 1152)),
    ),
    "scaled_sums_one_by_one": Case(
        "add_scaled_rows", (values(17, 75), values(17, 75, seed=1), Compute(values(1, 75, seed=2)[0]), nothing(17, 75))
    ),
    "squares": Case("average_pool", (values(64, 160), 8, 2, nothing(16, 160))),
    "squares_of_blocks": Case("average_pool", (values(63, 44), 3, 3, nothing(7, 44))),
    "lines_of_squares": Case("average_pool", (values(96, 40), 8, 2, nothing(24, 40))),
    "squares_of_16": Case("average_pool", (values(64 * 64, 40), 64, 4, nothing(256, 40))),
    "odd_squares": Case("average_pool", (values(36, 75), 6, 3, nothing(4, 75))),
    "within_bounds": Case("clip_rows", (values(9, 96), BOUNDS, Compute(nothing(9, 96)), 0)),
    "odd_rows_within_bounds": Case("clip_rows", (Compute(values(9, 75)), BOUNDS, Compute(nothing(9, 80)), 0)),
    "bounded_rows_in_float32": Case("clip_rows", (values(9, 40), BOUNDS, nothing(9, 40), 0)),
    **{
        f"clipped_gate_of_{width}": Case(
            "clipped_gate",
            *[(values(9, width), values(9, width, seed=1), BOUNDS, BOUNDS, 2, Compute(nothing(9, width)))],
        )
        for width in (75, 96)
    },
    **{
        f"normed_heads_of_{size}": Case(
            "normed_heads",
            (
                *(
                    values(11, 3 * 3 * size),
                    Compute(values(size, seed=1, mean=1)),
                    Compute(values(size, seed=2, mean=1)),
                ),
                *(1e-6, nothing(11, 9 * size)),
            ),
        )
        for size in (8, 64, 72, 128)
    },
    "standard_norm": Case(
        "standard_norm",
        (
            *(values(9, 1152), Compute(values(1152, seed=1)), Compute(values(1152, seed=2, mean=1)), 34.0, 1e-6),
            nothing(9, 1152),
        ),
    ),
    "plain_standard_norm": Case("standard_norm", (values(9, 75), None, None, 9.0, 1e-6, nothing(9, 75))),
    **{
        f"centered_norm_of_{width}": Case(
            "centered_norm",
            (values(35, 128), Compute(values(width, seed=1, mean=1)), mask, 1e-6, Compute(nothing(35, width))),
        )
        for width, mask in ((128, (np.arange(35)[:, None] < 30).astype(np.float32)), (12, None))
    },
    "added_norm": Case(
        "add_normed",
        (
            *(values(9, 1024), Compute(values(1024, seed=1, mean=1)), 1e-6, values(9, 1024, seed=2), 0.5),
            nothing(9, 1024),
        ),
    ),
    "gated_convolution": Case(
        "gated_convolution",
        (
            *(values(20, 600), Compute(values(300, 5, seed=1)), Compute(values(300, seed=2, mean=1)), 1e-6),
            Compute(nothing(20, 300)),
        ),
    ),
    "local_attention": local_attention(41, 3, 128, 12),
    "local_attention_of_few": local_attention(5, 2, 40, 32),
    "past_attention": past_attention(150, 3, 64, 70),
    "past_attention_of_few": past_attention(5, 2, 40, 750, first=3),
    "past_attention_of_wide_heads": past_attention(67, 1, 128, 1, first=2),
    "past_attention_to_kept_rows": past_attention(24, 2, 64, 100, first=1000),
    "places": Case(
        "unfold", (Compute(values(2 * 9 * 7, 24)), Convolution(24, 9, 7, 3, 3, 2, 1, 1), Compute(nothing(40, 216)))
    ),
    "places_of_one_channel": Case(
        "unfold", (values(3 * 8 * 5, 1), Convolution(1, 8, 5, 3, 3, 2, 1, 1), Compute(nothing(36, 16)))
    ),
    "places_of_a_column": Case(
        "unfold", (Compute(values(4 * 6, 8)), Convolution(5, 4, 6, 4, 1, 1, 0, 0), Compute(nothing(6, 24)))
    ),
    "places_in_time": Case(
        "unfold", (values(300, 40), Convolution(40, 1, 300, 1, 3, 2, 0, 1), Compute(nothing(150, 120)))
    ),
    "product": Case("product", (values(70, 75), Compute(values(75, 40, seed=1)), 0.125, Compute(nothing(70, 40)))),
    "wide_product": Case("product", (values(256, 1152), Compute(values(1152, 136)), 1.0, Compute(nothing(256, 136)))),
    "turned_heads": heads(37, 4, 72, True),
    "turned_heads_of_80": heads(70, 2, 80, True),
    "heads": heads(37, 3, 64, False),
    "small_heads": heads(5, 2, 8, True),
    "rounded_heads": Case("prepare_heads", (Compute(values(19, 3 * 4 * 72)), None, Compute(nothing(3, 4, 19, 72)))),
    "attention": attention(577, 577, 3, 64),
    "attention_of_few": attention(5, 5, 2, 8),
    "attention_of_72": attention(300, 300, 2, 72, np.arange(300) < 257),
    "attention_of_80": attention(256, 256, 2, 80, first_of_each(256, 64)),
    "attention_of_96": attention(130, 130, 2, 96),
    "attention_of_128": attention(200, 200, 2, 128, np.arange(200) < 70),
    "windows": attention(64 * 7, 64, 4, 80, first_of_each(64 * 7, 64)),
    "odd_windows": attention(36 * 5, 36, 2, 16, first_of_each(36 * 5, 36)),
    "large_windows": attention(256 * 3, 256, 2, 72, first_of_each(256 * 3, 256)),
    "hidden_tiles": attention(520, 520, 2, 64, (np.arange(520) // 64) % 3 == 1),
    "large_scores": attention(200, 200, 2, 64, largest=4.0),
    "nothing_visible": attention(128, 64, 2, 64, np.arange(128) < 64),
}
#: Whose results the device rounds once and sums in the twin's order.
EXACT_KERNELS = ("copy_rows", "add_rows", "average_pool", "clip_rows", "unfold")
EXACT = [name for name, case in CASES.items() if case.kernel in EXACT_KERNELS]
EXACT.append("rounded_heads")
