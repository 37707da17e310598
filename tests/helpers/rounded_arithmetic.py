"""NumPy's arithmetic with every result rounded to a compute dtype: what the dtype alone makes of a model's logits.

A GPU rounds at other places (it may fuse operations, or add in another order), so its logits are not these; but their
distance from float32's has the same cause, and the same size. Tests on random weights, which amplify rounding by an
amount of their own, take their bounds from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from edgellm.engines.backends.base import Backend
from edgellm.engines.backends.numpy_backend import NumpyBackend, NumpyEngine
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.programs import model_program
from edgellm.engines.formats.tensors import convert, float32_into
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.operations import Scoring
from edgellm.engines.runners.base_runner import BaseEngineRunner

#: A GPU's distance from float32 may be this many times that of the rounding below. A tiny Qwen2 with an adapter had 0.8
#: to 1.6 times on an H200, the largest difference of its logits.
MARGIN = 3.0


@dataclass(frozen=True)
class Distance:
    """How far logits are from what they should be: root mean square and largest, in parts of the largest logit."""

    typical: float
    largest: float

    @classmethod
    def between(cls, found: np.ndarray, expected: np.ndarray) -> Distance:
        """Of two arrays of one shape, where anything is expected."""
        known = ~np.isnan(expected)
        differences, scale = (found - expected)[known].astype(np.float64), np.abs(expected[known]).max()
        return cls(float(np.sqrt(np.mean(differences**2)) / scale), float(np.abs(differences).max() / scale))

    def relative_to(self, other: Distance) -> float:
        """The larger of the two ratios."""
        return max(self.typical / other.typical, self.largest / other.largest)

    def __str__(self) -> str:
        return f"{self.typical:.3%} typical, {self.largest:.2%} largest"


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 values, rounded to what `dtype` can hold."""
    result = np.empty(values.shape, np.float32)
    float32_into(convert(np.ascontiguousarray(values), "float32", dtype)[0], dtype, result)
    return result


class RoundedOperations(NumpyOperations):
    """`NumpyOperations` with float32 sums whose results are of `dtype`, as an engine of it has them."""

    def __init__(self, bindings: dict[str, np.ndarray], weights: Mapping[str, np.ndarray], dtype: str) -> None:
        super().__init__(bindings, weights)
        self._dtype = dtype

    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        product = self._round(super().linear(x, weight))
        return product if bias is None else self._round(product + bias)

    def adapt(self, y: np.ndarray, x: np.ndarray, a: np.ndarray, b: np.ndarray, scales: np.ndarray) -> np.ndarray:
        low = self._round(x @ self._round(a).T).reshape(*x.shape[:2], scales.shape[1], -1) * scales[:, None, :, None]
        return self._round(y + self._round(low.reshape(*x.shape[:2], -1) @ self._round(b)))

    def rms_norm(self, x: np.ndarray, weight: np.ndarray | None, epsilon: float, offset: float = 0.0) -> np.ndarray:
        normed = self._round(super().rms_norm(x, None, epsilon))
        return normed if weight is None else self._round(normed * (weight + np.float32(offset)))

    def layer_norm(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, epsilon: float) -> np.ndarray:
        normed = self._round(super().layer_norm(x, np.ones_like(weight), np.zeros_like(bias), epsilon))
        return self._round(self._round(normed * weight) + bias)

    def activation(self, x: np.ndarray, kind: str) -> np.ndarray:
        return self._round(super().activation(x, kind))

    def to_compute(self, x: np.ndarray) -> np.ndarray:
        return self._round(x)

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self._round(a + b)

    def rotary_embedding(self, x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
        # Not the inherited one's memory of `cos_sin`: that is told by identity, which a rounded copy does not keep.
        half = cos_sin.shape[-1] // 2
        cos, sin = np.split(self._round(cos_sin)[:, None], 2, axis=-1)
        first, second, rest = np.split(x, [half, 2 * half], axis=-1)
        return self._round(np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1))

    def attention(
        self, query: np.ndarray, caches: Sequence[np.ndarray], mask: np.ndarray | None, scoring: Scoring[np.ndarray]
    ) -> np.ndarray:
        assert not scoring.cap
        keys, values = caches
        mask = np.ones((1, 1, 1, keys.shape[2]), np.bool_) if mask is None else mask
        batch, heads, tokens, size = query.shape
        kv_heads = keys.shape[1]
        scaled = self._round(query * np.float32(scoring.scale))
        grouped = scaled.reshape(batch, kv_heads, heads // kv_heads, tokens, size)
        keys, values = (cache[:, :, None, : mask.shape[3]] for cache in (keys, values))
        scores = np.where(mask[:, :, None], self._round(grouped @ keys.swapaxes(-1, -2)), np.float32(-1e30))
        largest, sinks = scores.max(axis=-1, keepdims=True), scoring.sinks
        total = np.float32(0)
        if sinks is not None:
            sinks = sinks.reshape(kv_heads, -1, 1, 1)
            largest = np.maximum(largest, sinks)
            total = np.exp(sinks - largest)
        scores = np.exp(scores - largest)
        weights = self._round(scores / (scores.sum(axis=-1, keepdims=True) + total))
        return self._round(weights @ values).reshape(batch, heads, tokens, size)

    def gated(self, gate_up: np.ndarray, kind: str) -> np.ndarray:
        gate, up = np.split(gate_up, 2, axis=-1)
        return self._round(self.activation(gate, kind) * up)

    def scale(self, x: np.ndarray, factor: float) -> np.ndarray:
        return self._round(super().scale(x, factor))

    def _round(self, values: np.ndarray) -> np.ndarray:
        return rounded(values, self._dtype)


class RoundedBackend(NumpyBackend):
    """The NumPy backend with weights and arithmetic of `dtype`."""

    def __init__(self, directory: EngineDirectory, dtype: str) -> None:
        super().__init__(directory.config, vision=directory.vision and directory.vision.config)
        self._dtype = dtype

    def load_weights(
        self, checkpoint: Checkpoint, specs: Sequence[WeightSpec], progress: Callable[[int, int], None] | None = None
    ) -> dict[str, np.ndarray]:
        weights = super().load_weights(checkpoint, specs, progress)
        arrays = {name: values for name, values in weights.items() if isinstance(values, np.ndarray)}  # not experts
        return weights | {name: rounded(values, self._dtype) for name, values in arrays.items()}

    def load_engine(self, shape: EngineShape) -> NumpyEngine:
        program = model_program(self._configs[shape.model], shape)
        engine = NumpyEngine(program)
        operations = RoundedOperations(engine._bindings, engine._bindings, self._dtype)
        engine.run = ProgramGraph(operations, program).run
        return engine


@contextmanager
def open_rounded_runner(directory: EngineDirectory, with_adapters: bool = False) -> Iterator[BaseEngineRunner]:
    """`edgellm.engines.runners.comparison.open_runner` for the arithmetic of the directory's own dtype."""
    adapters = {name: adapter.read(directory.config) for name, adapter in directory.adapters.items()}
    backend: Backend = RoundedBackend(directory, directory.dtype)
    with directory.checkpoint() as checkpoint:
        runner = BaseEngineRunner(
            backend, directory.config, directory.limits, checkpoint, adapters=adapters if with_adapters else None
        )
    try:
        yield runner
    finally:
        runner.close()
