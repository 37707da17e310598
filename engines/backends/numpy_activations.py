"""The activations of `Operations.activation` with NumPy, in the dtype that they are given."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

_ONE = np.float32(1)


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x))."""
    result = np.negative(x)
    with np.errstate(over="ignore"):  # exp of a very negative number: infinity, and silu is 0
        np.exp(result, out=result)
    result += _ONE
    np.divide(x, result, out=result)
    return result


def _gelu(x: np.ndarray) -> np.ndarray:
    """x (1 + erf(x / sqrt(2))) / 2."""
    result = _erf(x * np.float32(math.sqrt(0.5)))
    result += _ONE
    result *= x
    result *= np.float32(0.5)
    return result


def _erf(x: np.ndarray) -> np.ndarray:
    """The error function to 5e-7: formula 7.1.26 of Abramowitz and Stegun, whose own error is 1.5e-7."""
    size = np.abs(x)
    t = _ONE / (_ONE + np.float32(0.3275911) * size)
    result = np.zeros_like(x)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        result += np.float32(coefficient)
        result *= t
    result *= np.exp(-size * size)
    np.subtract(_ONE, result, out=result)
    return np.copysign(result, x, out=result)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    result = x * x
    result *= np.float32(0.044715)
    result += _ONE
    result *= x
    result *= np.float32(math.sqrt(2 / math.pi))
    np.tanh(result, out=result)
    result += _ONE
    result *= x
    result *= np.float32(0.5)
    return result


def _quick_gelu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(1.702 x)."""
    slope = np.float32(1.702)
    return silu(x * slope) / slope


def _relu_squared(x: np.ndarray) -> np.ndarray:
    """max(x, 0)^2 (So et al. 2021, "Primer")."""
    result = np.maximum(x, 0)
    result *= result
    return result


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    result = np.negative(x)
    with np.errstate(over="ignore"):  # as above: the result is 0
        np.exp(result, out=result)
    result += _ONE
    return np.divide(_ONE, result, out=result)


#: The functions of `Operations.activation` by their names.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu_squared": _relu_squared,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}
