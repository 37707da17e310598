"""What quantizing a model computes most: by NumPy, or by the kernels of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.quantizer import rounding
from edgellm.engines.quantizer.statistics import InputStatistics, Observation
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.gpu import find_gpu
from edgellm.kernels.launch import KernelModule
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat
from edgellm.kernels.quantization.quantizing import Quantized, add_moments, linear_rows, search

#: What computes; "auto": a GPU where there is one.
ARITHMETICS = ("auto", "numpy", "cuda")
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


class Arithmetic:
    """NumPy, on all processors."""

    def close(self) -> None:
        """Give back what it holds."""

    def quantize_rows(
        self,
        weights: np.ndarray,
        format: WeightFormat,
        factors: np.ndarray | None = None,
        clipping: rounding.Clipping | None = None,
    ) -> PackedWeight:
        """The weight float32 [N, K] as `rounding.quantize_rows` finds its codes, by default with `CLIPPING`, without
        factors with `BLIND_CLIPPING` or `BLIND_WITH_ZEROS`, and with the scales of `unbiased`."""
        blind = rounding.BLIND_WITH_ZEROS if format.zeros else rounding.BLIND_CLIPPING
        clipping = clipping or (blind if factors is None else rounding.CLIPPING)
        return rounding.unbiased(weights, self._searched(weights, format, factors, clipping), factors)

    def _searched(
        self, weights: np.ndarray, format: WeightFormat, factors: np.ndarray | None, clipping: rounding.Clipping
    ) -> PackedWeight:
        return rounding.quantize_rows(weights, format, factors, clipping)

    def linear(self, inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """float32 [M, N]: `inputs` [M, K] times the transpose of `weight` [N, K], which may be kept until `forget`."""
        return np.ascontiguousarray(np.dot(weight, inputs.T).T)

    def forget(self) -> None:
        """The arrays that were given may change from now on."""

    def observation(self, columns: int, group: int | None, wants_moments: bool = False) -> Observation:
        return Observation(columns, group, wants_moments)

    def each(self, function: Callable[[_Item], _Found], items: Iterable[_Item]) -> list[_Found]:
        """What the function gives for each item, side by side where that can be."""
        return rounding.side_by_side(function, items)


NUMPY = Arithmetic()


class CudaArithmetic(Arithmetic):
    """A GPU, from the thread that opened it. What is near to equal it may choose otherwise than NumPy: sums have
    another order."""

    def __init__(self) -> None:
        """Raises MissingDependencyError without a GPU or what drives it."""
        self._device = CudaDevice()
        self._module = KernelModule(self._device.gpu, self._device.stream)
        self._resident: dict[int, tuple[np.ndarray, DeviceArray]] = {}

    def close(self) -> None:
        self.forget()
        self._module.close()
        self._device.close()

    def _searched(
        self, weights: np.ndarray, format: WeightFormat, factors: np.ndarray | None, clipping: rounding.Clipping
    ) -> PackedWeight:
        device, (rows, columns) = self._device, weights.shape
        groups = format.groups(columns)
        target = Quantized(
            device.empty((rows, columns), "uint8"),
            device.empty((rows, groups), "float32"),
            device.empty((rows, groups), "float32"),
        )
        # Launches know addresses alone: what they read is held here until they are done.
        given = self._copy(weights), None if factors is None else self._copy(factors), self._copy(np.array(clipping))
        search(self._module, format, *given, target)()
        codes, scales = device.download(target.codes), device.download(target.scales)
        zeros = device.download(target.zeros).astype(np.uint8) if format.zeros else None
        return PackedWeight(format, codes, scales, zeros)

    def linear(self, inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
        own, outputs = self._copy(inputs), self._device.empty((len(inputs), len(weight)), "float32")
        if id(weight) not in self._resident:
            self._resident[id(weight)] = weight, self._copy(weight)
        linear_rows(self._module, own, self._resident[id(weight)][1], outputs)()
        return self._device.download(outputs)

    def forget(self) -> None:
        self._device.synchronize()
        self._resident.clear()

    def observation(self, columns: int, group: int | None, wants_moments: bool = False) -> Observation:
        if group is None or wants_moments:
            return Observation(columns, group, wants_moments)
        return _DeviceObservation(columns, group, self._device, self._module)

    def each(self, function: Callable[[_Item], _Found], items: Iterable[_Item]) -> list[_Found]:
        return list(map(function, items))

    def _copy(self, values: np.ndarray) -> DeviceArray:
        array = self._device.empty(values.shape, "float32")
        self._device.upload(array, np.asarray(values, np.float32))
        return array


class _DeviceObservation(Observation):
    """Whose sums are in a GPU's memory."""

    def __init__(self, columns: int, group: int, device: CudaDevice, module: KernelModule) -> None:
        super().__init__(columns, group)
        self._device, self._module = device, module
        self._device_products = device.zeros((columns // group, group, group), "float32")
        self._device_magnitude = device.zeros((columns,), "float32")

    def _add_products(self, inputs: np.ndarray) -> None:
        own = self._device.empty(inputs.shape, "float32")
        self._device.upload(own, inputs)
        add_moments(self._module, own, self._device_products, self._device_magnitude)()
        self._device.synchronize()

    def statistics(self) -> InputStatistics:
        self._products = self._device.download(self._device_products).astype(np.float64)
        self._magnitude = self._device.download(self._device_magnitude).astype(np.float64)
        return super().statistics()


def open_arithmetic(name: str) -> Arithmetic:
    """One of `ARITHMETICS`; the caller closes it. Raises MissingDependencyError."""
    if name == "numpy" or (name == "auto" and find_gpu() is None):
        return NUMPY
    return CudaArithmetic()
