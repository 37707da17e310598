"""The kernels of linear layers over weights of 4 to 8 bits: which tiles they take, and their launches."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.kernels.decode.arguments import CUDA_TYPES, decode_kernel
from edgellm.kernels.decode.contract import SLICES, padded_columns
from edgellm.kernels.decode.tilings import Capacity, slices_end_every
from edgellm.kernels.errors import KernelError
from edgellm.kernels.fitted import fitted
from edgellm.kernels.launch import Kernel
from edgellm.kernels.quantization.code_words import BLOCK_COLUMNS
from edgellm.kernels.quantization.device_layout import DeviceLayout

#: What `fitted.json` says of each.
_FORMS, _STAYING = fitted("packed layers whose warps share K", "forms", "staying")
#: Bytes of activations of a row in a block of weights.
_ROW_BYTES = 2 * BLOCK_COLUMNS + 64


@dataclass(frozen=True)
class PackedTiling:
    """Tiles of `weight_tiles` times 16 weight rows, times `token_tiles` times 8 rows of activations.

    `warps` share K, 4 (a group of slices each) or 16 (a slice); `depth` blocks of each warp's weights find room;
    `blocks` are on a multiprocessor. `ahead` steps of activations, too; 0: they are copied once and stay.
    """

    token_tiles: int
    weight_tiles: int
    warps: int
    depth: int
    blocks: int
    ahead: int

    def shared_bytes(self, block_bytes: int, columns: int, batch: int, adapted: bool = False) -> int:
        """Bytes of a block: rings of weights, sums, activations, what LoRA adapters add. `block_bytes`: of
        `DeviceLayout`."""
        weights = self.warps * self.depth * 2 * self.weight_tiles * block_bytes
        sums = (self.warps + adapted) * 8 * self.token_tiles * (16 * self.weight_tiles + 4) * 4
        activations = padded_columns(columns) // BLOCK_COLUMNS * batch * _ROW_BYTES
        return weights + sums + (self.warps * self.ahead * self.token_tiles * 512 if self.ahead else activations)

    def grid(self, rows: int, gpu: Capacity) -> tuple[int, int, int]:
        """Blocks that walk over a matrix's tiles."""
        return min(-(-rows // (16 * self.weight_tiles)), self.blocks * gpu.multiprocessors), 1, 1


def packed_kernel(
    name: str, dtype: str, tiling: PackedTiling, layout: DeviceLayout, argument_bytes: int, adapted: bool = False
) -> Kernel:
    """A kernel of packed_linear.cu, whose structure of arguments has so many bytes; `adapted`: with LoRA adapters."""
    every = slices_end_every(layout.columns)
    sizes = tiling.token_tiles, tiling.weight_tiles, tiling.warps, tiling.depth, every, layout.scales, layout.mode
    chosen = f"{', '.join(map(str, sizes))}, {tiling.ahead}, {tiling.blocks}" + (", true" if adapted else "")
    macros = (
        ("HOST_TILED_LINEAR_BYTES", argument_bytes),
        ("HOST_PACKED_BYTES", PackedTiling(2, 1, 4, 3, 1, 8).shared_bytes(576, 0, 0)),
        ("HOST_STAYING_BYTES", PackedTiling(1, 2, 16, 2, 1, 0).shared_bytes(528, 2048, 3)),
    )
    return decode_kernel("packed_linear.cu", f"decode::packed::{name}<{CUDA_TYPES[dtype]}, {chosen}>", macros)


def packed_tilings(batch: int, layout: DeviceLayout, gpu: Capacity, adapted: bool = False) -> list[PackedTiling]:
    """All that take `batch` rows of activations in the shared memory that a block gets, the best known first."""
    token_tiles = next(tiles for tiles in (1, 2, 4, 8) if 8 * tiles >= batch)
    stays = padded_columns(layout.columns) // BLOCK_COLUMNS * batch * _ROW_BYTES <= _STAYING
    found = []
    for warps, weight_tiles, depth, blocks in _FORMS[token_tiles]:
        if warps == SLICES and slices_end_every(layout.columns) != 4:  # a warp's slice is whole blocks of weights
            continue
        rings = (0,) if stays else tuple(ahead for ahead in (8, 5, 3) if ahead <= 4 * (depth - 1) + 1)
        possible = [PackedTiling(token_tiles, weight_tiles, warps, depth, blocks, ahead) for ahead in rings]
        sizes = [tiling.shared_bytes(layout.block_bytes, layout.columns, batch, adapted) for tiling in possible]
        # The longest ring that leaves room for the other blocks of a multiprocessor, or the shortest.
        room = gpu.shared_limit // blocks - 1024 * (blocks > 1)
        beside = [tiling for tiling, size in zip(possible, sizes, strict=True) if size <= room]
        if sizes[-1] <= gpu.shared_limit:
            found.append(beside[0] if beside else possible[-1])
    if not found:
        raise no_room(batch, layout, gpu)
    return found


def no_room(batch: int, layout: DeviceLayout, gpu: Capacity) -> KernelError:
    """The error where no way of multiplying `batch` rows of activations has the shared memory that it needs."""
    return KernelError(
        f"no packed layer of {batch} rows and {layout.columns} columns fits in the {gpu.shared_limit} bytes of shared "
        "memory that a block has"
    )
