"""Linear layers of any number of rows on the GPU: which tiles, and the launches.

No bit depends on the tiles; what decides is time alone, estimated in clocks of what limits a layer.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.decode.arguments import CUDA_TYPES, MACROS, addresses
from edgellm.kernels.decode.contract import STEP, LinearWeights
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels, TiledLinear
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.encoder.contract import ACTIVATION_MACROS, NO_ACTIVATION
from edgellm.kernels.fitted import fitted
from edgellm.kernels.launch import Kernel, Launch
from edgellm.kernels.quantization.code_words import BLOCK_COLUMNS, BLOCK_ROWS
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix

#: The most rows of activations, and stages of a ring; columns of a stage of dense weights; bytes of a row in a step.
MAX_PROMPT_ROWS, _MOST_STAGES, _DENSE_COLUMNS, _ROW_BYTES = 65_536, 4, 64, 2 * STEP
#: Bytes that a multiprocessor keeps for each block; bytes a clock of its shared memory.
_KEPT_BYTES, _SHARED = 1024, 128
#: What `fitted.json` says of each.
_FITTED = "linear layers of prompts"
_TILE, _OUTPUT, _LATENCY, _UNHIDDEN = fitted(_FITTED, "tile", "output", "latency", "unhidden")
_JOINED, _HIDING = fitted(_FITTED, "joined", "hiding")
_ADDITIONS, _STEP_INSTRUCTIONS = fitted(_FITTED, "additions", "step_instructions")
_DEQUANTIZES, _IN_FLOAT32 = fitted(_FITTED, "dequantizes", "in_float32")
#: Where sums of groups are added, and how many groups there are.
REGISTERS, SHARED, JOINED = range(3)
_GROUPS = 4


class PromptTiling(NamedTuple):
    """Template arguments of `Geometry` in linear_tiles.cuh, and how many blocks registers have room for.

    A warp has `row_tiles` of 16 rows of activations times `column_tiles` of 8 weight rows. `totals`: where sums of
    groups of slices are added: in registers, in shared memory, or by teams of warps, one for each group, that join.
    `block_bytes`: of packed weights, see `DeviceLayout`; 0: weights are dense.
    """

    row_tiles: int
    column_tiles: int
    row_warps: int
    column_warps: int
    blocks: int
    totals: int
    block_bytes: int = 0

    @property
    def rows(self) -> int:
        """Rows of activations of a tile."""
        return 16 * self.row_tiles * self.row_warps

    @property
    def weight_rows(self) -> int:
        """Weight rows of a tile."""
        return 8 * self.column_tiles * self.column_warps

    @property
    def teams(self) -> int:
        """Teams of warps."""
        return _GROUPS if self.totals == JOINED else 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.row_warps * self.column_warps * self.teams

    @property
    def stage_bytes(self) -> int:
        """Bytes of 64 columns of weights and activations for each team, or of a block's columns of packed weights."""
        columns = BLOCK_COLUMNS if self.block_bytes else _DENSE_COLUMNS
        return (self.rows * _ROW_BYTES + self._step_bytes(self.weight_rows)) * columns // STEP * self.teams

    def _step_bytes(self, weight_rows: int) -> int:
        """Bytes of so many weight rows, of a step of columns."""
        if self.block_bytes:
            return weight_rows // BLOCK_ROWS * self.block_bytes * STEP // BLOCK_COLUMNS
        return weight_rows * _ROW_BYTES

    def shared_bytes(self, stages: int) -> int:
        """Bytes of a block's ring, and of its sums."""
        return stages * self.stage_bytes + (self.totals == SHARED) * self.rows * self.weight_rows * 4

    def resident(self, stages: int, gpu: Capacity) -> int:
        """Blocks that a multiprocessor has at once; 0 where shared memory does not take one."""
        room = gpu.shared_limit + _KEPT_BYTES
        return min(self.blocks, room // (self.shared_bytes(stages) + _KEPT_BYTES))

    def stages(self, gpu: Capacity) -> int:
        """Stages of the ring: as many as leave room for as many blocks as two stages do."""
        fitting = range(2, _MOST_STAGES + 1)
        return max(count for count in fitting if count == 2 or self.resident(count, gpu) == self.resident(2, gpu))

    def tiles(self, batch: int, weight_rows: int) -> int:
        """Tiles of so many rows of activations times weight rows."""
        return -(-batch // self.rows) * -(-weight_rows // self.weight_rows)

    def grid(self, batch: int, weight_rows: int, gpu: Capacity) -> tuple[int, int, int]:
        """Blocks that walk over the tiles."""
        tiles, at_once = self.tiles(batch, weight_rows), gpu.multiprocessors * self.resident(self.stages(gpu), gpu)
        return (tiles if self.totals == JOINED else min(tiles, at_once)), 1, 1

    def _issued(self, dequantizes: int) -> float:
        """Instructions of a step of packed weights, of all warps; of dense ones they limit nothing."""
        tiles = self.row_tiles * self.column_tiles
        own = 2 * tiles + _ADDITIONS * tiles + 2 * self.row_tiles + dequantizes * self.column_tiles + _STEP_INSTRUCTIONS
        return self.threads // 32 * own if self.block_bytes else 0

    def clocks(self, batch: int, weight_rows: int, columns: int, gpu: Capacity, dequantizes: int) -> float:
        """Clocks of `batch` rows of activations times a matrix [weight_rows, columns]; `dequantizes`: see
        `dequantizing`."""
        warps, own = self.threads // 32, -(-self.tiles(batch, weight_rows) // gpu.multiprocessors)
        fragments = warps * (16 * self.row_tiles * _ROW_BYTES + self._step_bytes(8 * self.column_tiles))
        copied = self.teams * (self.rows * _ROW_BYTES + self._step_bytes(self.weight_rows))
        products = self.teams * self.rows * self.weight_rows * STEP / gpu.speeds[1]
        spans = sorted(((fragments + copied) / _SHARED, products, self._issued(dequantizes) / 4))
        stages = self.stages(gpu)
        beside = min(own, self.resident(stages, gpu))
        steps, rounds = -(-columns // (STEP * self.teams)), -(-own // beside)
        step = (spans[-1] + _UNHIDDEN * spans[-2]) * (_JOINED if self.totals == JOINED else 1)
        step *= beside + _HIDING[self.block_bytes > 0] / warps  # of all blocks, whose warps hide each other's reads
        ends = _TILE + _OUTPUT * self.rows * self.weight_rows
        return rounds * (steps * max(step, _LATENCY / (stages - 1)) + ends)


#: All tilings, the largest tiles first.
TILINGS = (
    PromptTiling(2, 8, 4, 2, 1, SHARED),
    PromptTiling(3, 4, 2, 4, 1, REGISTERS),
    PromptTiling(2, 8, 2, 2, 2, SHARED),
    PromptTiling(3, 4, 1, 4, 2, REGISTERS),
    PromptTiling(2, 8, 2, 1, 1, JOINED),
    PromptTiling(2, 4, 2, 2, 2, REGISTERS),
    PromptTiling(1, 4, 2, 2, 3, REGISTERS),
)

#: Those of packed weights: few warps make values of the same codes, which four weight tiles of a warp leave room for.
PACKED_TILINGS = (
    PromptTiling(4, 4, 1, 4, 2, SHARED),
    PromptTiling(3, 4, 1, 4, 2, SHARED),
    PromptTiling(4, 4, 1, 2, 1, JOINED),
    PromptTiling(2, 4, 2, 2, 2, REGISTERS),
    PromptTiling(2, 4, 1, 2, 1, JOINED),
    PromptTiling(2, 2, 1, 4, 3, REGISTERS),
)


def prompt_tilings(gpu: Capacity, block_bytes: int = 0) -> list[PromptTiling]:
    """All tilings whose blocks find room in a GPU's shared memory; at least one. `block_bytes`: of packed weights."""
    every = [each._replace(block_bytes=block_bytes) for each in PACKED_TILINGS] if block_bytes else TILINGS
    return [tiling for tiling in every if tiling.resident(2, gpu)]


def dequantizing(layout: DeviceLayout | None) -> int:
    """Instructions of a warp that make values of a step of eight rows of packed weights."""
    return _DEQUANTIZES if layout is None or layout.kind == "narrow" else _IN_FLOAT32


@cache
def prompt_tiling(
    batch: int, weight_rows: int, columns: int, gpu: Capacity, layout: DeviceLayout | None = None
) -> PromptTiling:
    """The fastest tiling for `batch` rows of activations times a matrix [weight_rows, columns]; `layout`: packed so."""
    tilings, dequantizes = prompt_tilings(gpu, layout.block_bytes if layout else 0), dequantizing(layout)
    return min(tilings, key=lambda tiling: tiling.clocks(batch, weight_rows, columns, gpu, dequantizes))


@cache
def prompt_kernel(
    name: str,
    dtype: str,
    tiling: PromptTiling,
    stages: int,
    adapted: bool = False,
    activation: int = NO_ACTIVATION,
    packed: tuple[int, int] | None = None,
) -> Kernel:
    """A kernel of linear.cu with a ring of so many stages; `adapted`: with LoRA adapters; `activation`: of each
    element, by its number, of `activated` alone; `packed`: `DeviceLayout.scales` and `mode` of weights that are."""
    macros = (
        *ACTIVATION_MACROS,
        ("HOST_ACTIVATION", activation),
        ("HOST_STAGES", stages),
        ("HOST_STAGE_BYTES", tiling.stage_bytes),
        ("HOST_TILED_LINEAR_BYTES", ctypes.sizeof(TiledLinear)),
    )
    sizes = [int(each) for each in (*tiling[:6], adapted, *(packed or ()))]
    expression = f"prefill::{name}<{CUDA_TYPES[dtype]}, {', '.join(map(str, sizes))}>"
    module = "-".join(map(str, ("prefill", name, dtype, *sizes, stages, *[activation] * (name == "activated"))))
    return Kernel(ModuleSource(module, ("prefill/linear.cu",), (expression,), (*MACROS, *macros)), expression)


def packed_prompt_kernel(
    name: str, layout: DeviceLayout, tiling: PromptTiling, stages: int, adapted: bool = False
) -> Kernel:
    """`prompt_kernel` over packed weights of a layout; `tiling` need not say of how many bytes their blocks are."""
    tiling = tiling._replace(block_bytes=layout.block_bytes)
    return prompt_kernel(name, layout.compute, tiling, stages, adapted, packed=(layout.scales, layout.mode))


class CudaPromptLinear(CudaTiledKernels):
    """The kernels for one GPU, stream and dtype: methods and results of `CudaTiledKernels`, of 1 to 65,536 rows.

    Of LoRA adapters `low_products` must be launched before a layer that has them. Each is loaded when a launch first
    needs it. `tiling`: other than the fastest. Weights are read before the launch before has finished.
    """

    most_rows = MAX_PROMPT_ROWS
    tiling: PromptTiling | None = None

    def activated(self, x: DeviceArray, linear: LinearWeights, activation: int, output: DeviceArray) -> Launch:
        """See `NumpyEncoderLinear.activated`."""
        arguments = self._arguments(x, linear, output, linear.weight.shape[0], 1.0)
        arguments.activation = activation
        return self._launch("activated", x, linear, arguments)

    def load(
        self, name: str, rows: int, weight: tuple[int, int], adapted: bool = False, packed: DeviceLayout | None = None
    ) -> None:
        """Compile and load what the method `name` needs for so many rows times a weight of this shape, or `packed`."""
        self.module.load(self._kernel(name, rows, weight, adapted, packed)[0].source)

    def low_products(self, x: DeviceArray, linear: LinearWeights, selected: DeviceArray | None = None) -> Launch:
        """See `NumpyTiledKernels.low_products`; what a layer with adapters takes in any case."""
        assert linear.adapters is not None
        arguments = self._arguments(x, linear, x, 0, 1.0, selected)
        (arguments.selected,) = addresses(selected)
        return self._prompt_launch("low_products", linear.adapters.a, arguments)

    def _launch(
        self, name: str, x: DeviceArray, linear: LinearWeights, arguments: TiledLinear, tiling: Any = None
    ) -> Launch:
        if isinstance(linear.weight, PackedMatrix):
            self._check_packed(name, linear.weight.layout)
        name, adapted = name.replace("selected", "linear"), linear.adapters is not None
        return self._prompt_launch(name, linear.weight, arguments, adapted, tiling)

    def _prompt_launch(
        self,
        name: str,
        weight: DeviceArray | PackedMatrix,
        arguments: TiledLinear,
        adapted: bool = False,
        tiling: PromptTiling | None = None,
    ) -> Launch:
        """The launch of a kernel over all rows of a weight."""
        batch, activation = arguments.linear.batch, arguments.activation if name == "activated" else NO_ACTIVATION
        layout, (every_row, columns) = weight.layout if isinstance(weight, PackedMatrix) else None, weight.shape
        sizes, tiling = (every_row, columns), tiling or self.tiling
        kernel, tiling = self._kernel(name, batch, sizes, adapted, layout, tiling, activation)
        stages = arguments.stages = tiling.stages(self.gpu)
        grid = tiling.grid(batch, every_row, self.gpu)
        return Launch(self.module, kernel, grid, tiling.threads, tiling.shared_bytes(stages), (arguments,))

    def _kernel(
        self,
        name: str,
        rows: int,
        weight: tuple[int, int],
        adapted: bool,
        layout: DeviceLayout | None,
        tiling: PromptTiling | None = None,
        activation: int = NO_ACTIVATION,
    ) -> tuple[Kernel, PromptTiling]:
        """A kernel and its tiling, the fastest if none is given, or one for packed weights though this one is not."""
        if tiling is None or (layout is None and tiling.block_bytes):
            tiling = prompt_tiling(rows, *weight, self.gpu, layout)
        stages = tiling.stages(self.gpu)
        if layout is not None:
            return packed_prompt_kernel(name, layout, tiling, stages, adapted), tiling
        return prompt_kernel(name, self.dtype, tiling, stages, adapted, activation), tiling
