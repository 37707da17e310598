"""LoRA adapters in the kernels of linear layers on the GPU: against the twins, each row bit for bit as it is alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from decode_models import TOLERANCE
from decode_twins import NumpyDecodeKernels
from device_bits import from_bits, relative, to_bits
from device_weights import to_device_layout
from gpu_device import device_copy
from packed_weights import packed_copy, random_packed

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.contract import LinearAdapters, LinearWeights, NormedInput, low_words, padded_columns
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.device_layout import PackedMatrix
from edgellm.kernels.quantization.row_runs import AnyPacked, PackedRuns

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


class Case(NamedTuple):
    """A layer of fused `modules` rows and `columns`, and adapters of a rank."""

    modules: tuple[int, ...]
    columns: int
    rank: int


#: Fewer units than blocks, and more; widths that fill no slice; a rank that fills half of an instruction, and several.
CASES = [Case((64, 16, 16), 520, 16), Case((328,), 1032, 8), Case((2048, 512, 512), 264, 24), Case((72, 72), 520, 64)]
ROLES = ["norm_linear", "norm_gate_up", "linear_residual"]
STEPS = [(role, case) for role in ROLES for case in CASES if role != "norm_gate_up" or len(case.modules) == 2]


class Layer:
    """A linear layer with adapters in places, on the device and in float32 for the twin; rows x of a sequence each."""

    def __init__(self, gpu, dtype: str, case: Case, places: int) -> None:
        self.gpu, self.dtype, self.case, self._random = gpu, dtype, case, np.random.default_rng(places)
        outputs, low_rows = sum(case.modules), places * len(case.modules) * case.rank
        self.weight, self.bias = self.normal(outputs, case.columns), self.normal(outputs)
        self.norm, self.a = self.normal(case.columns), self.normal(low_rows, case.columns)
        self.b, first = np.zeros((low_rows, outputs), np.float32), 0
        for module, rows in enumerate(case.modules):  # what other layers' ranks would add is zero
            own = np.arange(low_rows) // case.rank % len(case.modules) == module
            self.b[own, first : first + rows] = self.normal(rows, places * case.rank).T
            first += rows
        self.areas = [gpu.zeros((low_words(64, places, len(case.modules), case.rank),), "uint32") for _ in range(2)]
        self.few = CudaDecodeKernels(gpu.kernel_module, dtype, 64)
        self.many = CudaTiledKernels(gpu.kernel_module, dtype)

    def normal(self, *shape: int) -> np.ndarray:
        """Random values of a size that products of a row keep, as the dtype holds them."""
        values = self._random.standard_normal(shape, np.float32) * np.float32(
            shape[-1] ** -0.5 if len(shape) > 1 else 1
        )
        return from_bits(to_bits(values, self.dtype), self.dtype)

    def on_device(self, values: np.ndarray | None, dtype: str | None = None) -> DeviceArray | None:
        """In the compute dtype, or in another."""
        if values is None:
            return None
        array = self.gpu.empty(values.shape, dtype or self.dtype)
        self.gpu.upload(array, values if dtype else to_bits(values, self.dtype))
        return array

    def result(
        self,
        role: str,
        x: np.ndarray,
        scales: np.ndarray | None,
        order: list[int] | None = None,
        many: bool = False,
        packed: AnyPacked | None = None,
    ) -> np.ndarray:
        """What the kernel of a role makes of rows x [R, K] with scales [B, S]; `order`: the adapters in the places;
        `packed`: the weight in 4 bits, for kernels of many rows."""
        adapters = None
        if scales is not None:
            a, b, given = (self.on_device(values) for values in (*self.places_in(order), scales))
            adapters = LinearAdapters(a, b, given, self.case.modules, *self.areas)
            self.areas.reverse()  # the next launch finds cleared what this one clears
        weight, bias, values, norm = (self.on_device(each) for each in (self.weight, self.bias, x, self.norm))
        output = self.gpu.empty((len(x), self.outputs(role)), self.dtype if role == "norm_gate_up" else "float32")
        if many and role != "linear_residual":
            normed = self.gpu.empty((len(x), padded_columns(self.case.columns)), self.dtype)
            self.few.norm(NormedInput(values, norm, 1e-5), normed)()
            values = normed
        linear = LinearWeights(packed or weight, bias, adapters)
        for run in linear.runs:
            if packed is not None and adapters is not None:
                self.many.low_products(values, run)()
            arguments = self.arguments(role, many, run, values, norm)
            getattr(self.many if many else self.few, role.removeprefix("norm_") if many else role)(*arguments, output)()
        found = self.gpu.download(output)
        return from_bits(found, self.dtype) if role == "norm_gate_up" else found

    def twin(self, role: str, x: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """The same by the twin."""
        adapters = LinearAdapters(self.a, self.b, scales, self.case.modules, np.zeros(0), np.zeros(0))
        arguments = self.arguments(role, False, LinearWeights(self.weight, self.bias, adapters), x, self.norm)
        output = np.full((len(x), self.outputs(role)), np.nan, np.float32)
        getattr(NumpyDecodeKernels(), role)(*arguments, output)()
        return output

    def outputs(self, role: str) -> int:
        return self.case.modules[0] if role == "norm_gate_up" else sum(self.case.modules)

    def places_in(self, order: list[int] | None) -> tuple[np.ndarray, np.ndarray]:
        """a and b with the adapters of other places."""
        if order is None:
            return self.a, self.b
        return tuple(
            np.ascontiguousarray(each.reshape(len(order), -1, each.shape[1])[order].reshape(each.shape))
            for each in (self.a, self.b)
        )

    @staticmethod
    def arguments(role: str, many: bool, linear: LinearWeights, values: Any, norm: Any) -> tuple:
        """Of a launcher, but for the output."""
        if role == "linear_residual":
            return values, linear, None
        given = values if many else NormedInput(values, norm, 1e-5)
        if role == "norm_gate_up":
            return given, linear, "silu"
        return (given, linear) if many else ([given], linear)


def one_each(taken: list[int | None], places: int) -> np.ndarray:
    """Scales of sequences that take one place each, or none."""
    scales = np.zeros((len(taken), places), np.float32)
    for sequence, place in enumerate(taken):
        if place is not None:
            scales[sequence, place] = 1
    return scales


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
@pytest.mark.parametrize(("role", "case"), STEPS, ids=str)
def test_what_adapters_add_is_what_the_twin_adds(gpu, dtype: str, rows: int, role: str, case: Case) -> None:
    """Sequences with no adapter, one, or shares of several; each step thrice, in memory that another cleared."""
    places = 3
    layer = Layer(gpu, dtype, case, places)
    x, scales = layer.normal(rows, case.columns) * 20, one_each([(b * 2) % places for b in range(rows)], places)
    if rows > 2:
        scales[1], scales[2] = 0, (0.5, 0, -2)
    expected = layer.twin(role, x, scales)
    found = [layer.result(role, x, scales) for _ in range(3)]
    assert relative(found[0], expected) < TOLERANCE[dtype]
    assert relative(found[0], layer.twin(role, x, scales * 0)) > 0.1
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@DTYPES
@pytest.mark.parametrize(("role", "case"), STEPS, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(gpu, dtype: str, role: str, case: Case) -> None:
    """Whichever adapters other rows take, whichever place holds its own, in a tree of its sequence, and without one."""
    places, taken = 4, [2, None, 0, 3, 2]
    layer = Layer(gpu, dtype, case, places)
    x = layer.normal(10, case.columns) * 20
    tree = layer.result(role, x, one_each(taken, places))  # two rows a sequence
    batch = layer.result(role, np.ascontiguousarray(x[::2]), one_each(taken, places))
    np.testing.assert_array_equal(batch, tree[::2])
    order = [3, 0, 2, 1]  # of the adapters, by place
    for sequence, adapter in enumerate(taken):
        own = np.ascontiguousarray(x[2 * sequence : 2 * sequence + 1])
        place = None if adapter is None else order.index(adapter)
        alone = layer.result(role, own, one_each([place], places), order)
        np.testing.assert_array_equal(alone[0], batch[sequence], err_msg=f"sequence {sequence}")
        if adapter is None:
            np.testing.assert_array_equal(alone, layer.result(role, own, None))


@DTYPES
@pytest.mark.parametrize("tokens", [1, 3, 6, 12])
@pytest.mark.parametrize(("role", "case"), STEPS, ids=str)
def test_kernels_of_many_rows_give_the_bits_of_few(gpu, dtype: str, tokens: int, role: str, case: Case) -> None:
    """Of five sequences, in steps of 5 to 60 rows; twice, in memory that another cleared."""
    places, taken = 4, [2, None, 0, 3, 2]
    layer = Layer(gpu, dtype, case, places)
    x = layer.normal(5 * tokens, case.columns) * 20
    scales = one_each(taken, places)
    found = [layer.result(role, x, scales, many=True) for _ in range(2)]
    np.testing.assert_array_equal(*found)
    for sequence in range(5):
        own = slice(sequence * tokens, (sequence + 1) * tokens)
        few = layer.result(role, np.ascontiguousarray(x[own]), scales[sequence : sequence + 1])
        np.testing.assert_array_equal(found[0][own], few, err_msg=f"sequence {sequence}")


@DTYPES
@pytest.mark.parametrize("rows", [1, 6, 9, 30, 64])
@pytest.mark.parametrize(("role", "case"), STEPS, ids=str)
def test_packed_layers_get_the_bits_of_the_dequantized_weight(
    gpu, dtype: str, rows: int, role: str, case: Case
) -> None:
    """Rows with an adapter, with none, and with shares of several."""
    places, layer = 4, Layer(gpu, dtype, case, 4)
    weight = random_packed(sum(case.modules), case.columns, 32, True, dtype, case.columns**-0.5 / 8)
    layout, data = to_device_layout(weight)
    layer.weight, packed = weight.values(), PackedMatrix(layout, device_copy(gpu, data))
    x, scales = layer.normal(rows, case.columns) * 20, one_each([(b * 2) % places for b in range(rows)], places)
    if rows > 2:
        scales[1], scales[2] = 0, (0.5, 0, -2, 0.25)
    expected = layer.result(role, x, scales, many=True)
    assert relative(expected, layer.twin(role, x, scales * 0)) > 0.1
    for _ in range(2):
        np.testing.assert_array_equal(layer.result(role, x, scales, many=True, packed=packed), expected)
    plain = layer.result(role, x, None, many=True)
    np.testing.assert_array_equal(layer.result(role, x, scales * 0, many=True, packed=packed), plain)


@DTYPES
@pytest.mark.parametrize("rows", [1, 9, 64])
@pytest.mark.parametrize("dense", [None, 0, -1])
@pytest.mark.parametrize("case", [case for case in CASES if len(case.modules) > 1], ids=str)
def test_runs_of_packed_rows_get_the_bits_of_the_dequantized_weight(
    gpu, dtype: str, rows: int, dense: int | None, case: Case
) -> None:
    """Each module in a launch of its own, one of which is `dense`."""
    places, layer = 4, Layer(gpu, dtype, case, 4)
    size = case.columns**-0.5 / 8
    weights = [random_packed(own, case.columns, 32, True, dtype, size, seed=own) for own in case.modules]
    layer.weight = np.concatenate([weight.values() for weight in weights])
    runs: list[Any] = [packed_copy(gpu, weight) for weight in weights]
    if dense is not None:
        runs[dense] = layer.on_device(weights[dense].values())
    packed = PackedRuns(tuple(runs))
    x, scales = layer.normal(rows, case.columns) * 20, one_each([(b * 2) % places for b in range(rows)], places)
    expected = layer.result("norm_linear", x, scales, many=True)
    np.testing.assert_array_equal(layer.result("norm_linear", x, scales, many=True, packed=packed), expected)


def test_eight_places_of_rank_64_take_more_units_than_there_are_blocks(gpu) -> None:
    case = Case((64, 8, 8), 40, 64)
    layer = Layer(gpu, "float16", case, 8)
    x, scales = layer.normal(8, 40) * 6, one_each([7, 6, 5, 4, 3, 2, 1, 0], 8)
    assert relative(layer.result("norm_linear", x, scales), layer.twin("norm_linear", x, scales)) < 2e-3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scales": (1, 9)}, "in up to 8 places"),
        ({"modules": (52, 20)}, "of rows in eights"),
        ({"scales": (3, 2)}, "do not fit a linear layer"),
        ({"low": (8,)}, "words of memory that the next launch does not use"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(gpu, changes: dict, reason: str) -> None:
    sizes = {"a": (32, 40), "b": (32, 72), "scales": (1, 2), "low": (64,), "next_low": (64,)} | changes
    modules = sizes.pop("modules", (64, 8))
    arrays = {name: gpu.zeros(size, "uint32" if "low" in name else "float16") for name, size in sizes.items()}
    linear = LinearWeights(gpu.zeros((72, 40), "float16"), None, LinearAdapters(modules=modules, **arrays))
    x, output = gpu.zeros((2, 40), "float16"), gpu.zeros((2, 72), "float32")
    with pytest.raises(KernelError, match=reason):
        CudaDecodeKernels(gpu.kernel_module, "float16", 64).linear_residual(x, linear, None, output)
