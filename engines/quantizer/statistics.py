"""What a linear layer takes, summed over calibration rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

#: Of the mean square, what is added to each: a few rows then do not decide about directions that they lack.
_DAMPING = 0.01
#: Elements whose products with each other are summed up: the memory that moments take grows with their number.
_SPAN = 2048


@dataclass
class InputStatistics:
    """What a linear layer takes, over all calibration rows x of K elements.

    `magnitude` float32 [K] is the mean of |x|, `sample` float32 [S, K] some of the rows. `factors` are what
    `quantize_rows` takes: of each group of columns a matrix F with F F^T the mean of x x^T, float32 [groups, size,
    size]; where a whole row is one group, the roots of the mean squares, float32 [K]. `moments`, where they were asked
    for, are the means of x x^T over the rows that are not in the sample, float32 [S, S] for at most `_SPAN` elements of
    x each, one span behind the other. `rows` are how many there were.
    """

    magnitude: np.ndarray
    factors: np.ndarray
    sample: np.ndarray
    moments: list[np.ndarray] = field(default_factory=list)
    rows: int = 0

    def scaled(self, scales: np.ndarray) -> InputStatistics:
        """The statistics of inputs which are divided by `scales` [K]; `moments` are changed in place."""
        start = 0
        for each in self.moments:
            own = scales[start : start + len(each)]
            np.divide(each, own * own[:, None], out=each)
            start += len(each)
        magnitude, factors, sample = self.magnitude / scales, self.scaled_factors(scales), self.sample / scales
        return InputStatistics(magnitude, factors, sample, self.moments, self.rows)

    def scaled_factors(self, scales: np.ndarray) -> np.ndarray:
        """`factors` for inputs that are divided by `scales` [K]."""
        return self.factors / (scales if self.factors.ndim == 1 else scales.reshape(*self.factors.shape[:2], 1))

    def squared_outputs(self, weights: np.ndarray) -> float:
        """The sum of the squared outputs of `weights` [N, K] for the sampled inputs."""
        outputs = np.dot(weights, self.sample.T)
        return float(np.einsum("ns,ns->", outputs, outputs, dtype=np.float64))


class Observation:
    """Sums over the rows that a linear layer took so far, `count` in all."""

    def __init__(self, columns: int, group: int | None, wants_moments: bool = False) -> None:
        self.count = self._outside = 0
        starts = range(0, columns, _SPAN) if wants_moments else ()
        self._moments = [np.zeros((min(_SPAN, columns - start),) * 2, np.float32) for start in starts]
        self._magnitude = np.zeros(columns)
        self._products = np.zeros(columns if group is None else (columns // group, group, group))
        self._sample: list[np.ndarray] = []

    def add(self, inputs: np.ndarray, chosen: np.ndarray) -> None:
        """Rows float32 [M, K], of which the `chosen` are kept."""
        self.count += len(inputs)
        self._add_products(inputs)
        self._sample.append(inputs[chosen])
        if self._moments:
            others = np.delete(inputs, chosen, 0)
            self._outside += len(others)
            for number, moments in enumerate(self._moments):
                own = others[:, number * _SPAN : (number + 1) * _SPAN]
                np.add(moments, own.T @ own, out=moments)

    def _add_products(self, inputs: np.ndarray) -> None:
        self._magnitude += np.abs(inputs).sum(0, np.float64)
        if self._products.ndim == 1:
            self._products += np.einsum("mk,mk->k", inputs, inputs, dtype=np.float64)
        else:
            grouped = inputs.reshape(len(inputs), *self._products.shape[:2]).transpose(1, 0, 2)
            self._products += np.matmul(grouped.transpose(0, 2, 1), grouped)

    def statistics(self) -> InputStatistics:
        """The statistics of all rows. The products of columns are damped as Frantar et al. 2022 do, so that few rows
        can be enough."""
        products = self._products / self.count
        if products.ndim == 1:
            factors = np.sqrt(products)
        else:
            size = products.shape[1]
            products += np.einsum("gkk->g", products)[:, None, None] / size * _DAMPING * np.eye(size)
            values, vectors = np.linalg.eigh(products)
            factors = vectors * np.sqrt(np.maximum(values, 0))[:, None, :]
        magnitude, sample = (self._magnitude / self.count).astype(np.float32), np.concatenate(self._sample)
        moments = [each / np.float32(max(1, self._outside)) for each in self._moments]
        return InputStatistics(magnitude, factors.astype(np.float32), sample, moments, self.count)
