"""Runs a model's layers one after the other over calibration texts, and says what their linear layers take.

The texts' rows stay in memory in float32, and the weights of one layer. Layers run by the NumPy executor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.tensors import float32_into
from edgellm.engines.model.config import DecoderConfig, EngineShape
from edgellm.engines.model.decoder import EMBEDDING, decoder_layer
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.program import Program, token_inputs
from edgellm.engines.model.rotary import rotary_table

#: Of the rows that a linear layer takes, so many are kept to compute errors of outputs with.
_SAMPLED = 512
#: Of the mean square, what is added to each: a few rows then do not decide about directions that they lack.
_DAMPING = 0.01


@dataclass
class InputStatistics:
    """What a linear layer takes, over all calibration rows x of K elements.

    `magnitude` float32 [K] is the mean of |x|, `sample` float32 [S, K] some of the rows. `factors` are what
    `quantize_rows` takes: of each group of columns a matrix F with F F^T the mean of x x^T, float32 [groups, size,
    size]; where a whole row is one group, the roots of the mean squares, float32 [K].
    """

    magnitude: np.ndarray
    factors: np.ndarray
    sample: np.ndarray

    def scaled_factors(self, scales: np.ndarray) -> np.ndarray:
        """`factors` for inputs that are divided by `scales` [K]."""
        return self.factors / (scales if self.factors.ndim == 1 else scales.reshape(*self.factors.shape[:2], 1))


class CalibrationRows:
    """The residual stream of calibration texts, of token ids each, in front of a layer: first of layer 0.

    `texts` are float32 [T, H], one a text.
    """

    def __init__(
        self, config: DecoderConfig, checkpoint: Checkpoint, texts: Sequence[Sequence[int]], group: int | None
    ) -> None:
        """`group` is how many columns of a weight share a scale."""
        table, dtype = checkpoint.raw(EMBEDDING), checkpoint.info(EMBEDDING).dtype
        self._config, self._group = config, group
        self._rotary = rotary_table(config, max(map(len, texts)), config.max_position_embeddings)
        self.texts: list[np.ndarray] = []
        for text in texts:
            rows = np.empty((len(text), config.hidden_size), np.float32)
            float32_into(table[np.asarray(text)], dtype, rows)
            self.texts.append(rows * np.float32(config.embedding_scale))

    @property
    def count(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.texts))

    def observe_layer(self, index: int, weights: Mapping[str, np.ndarray]) -> dict[str, InputStatistics]:
        """Pass layer `index`, and say what each of its linear layers took, by the linear layer's name."""
        observed: dict[str, _Observation] = {}
        names = {id(array): name.removesuffix(".weight") for name, array in weights.items()}
        chosen = np.linspace(0, self.count - 1, min(_SAMPLED, self.count)).astype(np.int64)
        start = 0

        def observe(weight: np.ndarray, x: np.ndarray) -> None:
            inputs, own = x.reshape(-1, x.shape[-1]), chosen[(chosen >= start) & (chosen < start + x.shape[1])]
            name = names[id(weight)]
            if name not in observed:
                observed[name] = _Observation(weight.shape[1], self._group)
            observed[name].add(inputs, own - start)

        for number, rows in enumerate(self.texts):
            self.texts[number] = self._run(index, weights, rows, observe)
            start += len(rows)
        return {name: each.statistics() for name, each in observed.items()}

    def pass_layer(self, index: int, weights: Mapping[str, np.ndarray]) -> None:
        """Go through layer `index`, whose weights are float32 arrays by the names that its program has."""
        for number, rows in enumerate(self.texts):
            self.texts[number] = self._run(index, weights, rows, lambda weight, x: None)

    def _run(
        self,
        index: int,
        weights: Mapping[str, np.ndarray],
        rows: np.ndarray,
        observe: Callable[[np.ndarray, np.ndarray], None],
    ) -> np.ndarray:
        """One text, all of its tokens at once: every token sees those before it."""
        tokens = len(rows)
        program = layer_program(self._config, index, tokens)
        values = {
            "inputs_embeds": rows[None],
            "rope_rotary_cos_sin": self._rotary[None, :tokens],
            "attention_mask": np.tri(tokens, dtype=np.bool_)[None, None],
            "kvcache_start_index": np.zeros(1, np.int32),
        }
        values |= {name: np.empty(shape, np.float32) for name, (shape, _) in program.states.items()}
        ProgramGraph(_ObservedOperations(values, weights, observe), program).run()
        return values["hidden"][0]


class _Observation:
    """Sums over the rows that a linear layer took so far."""

    def __init__(self, columns: int, group: int | None) -> None:
        self._count = 0
        self._magnitude = np.zeros(columns)
        self._products = np.zeros(columns if group is None else (columns // group, group, group))
        self._sample: list[np.ndarray] = []

    def add(self, inputs: np.ndarray, chosen: np.ndarray) -> None:
        """Rows float32 [M, K], of which the `chosen` are kept."""
        self._count += len(inputs)
        self._magnitude += np.abs(inputs).sum(0, np.float64)
        if self._products.ndim == 1:
            self._products += np.einsum("mk,mk->k", inputs, inputs, dtype=np.float64)
        else:
            grouped = inputs.reshape(len(inputs), *self._products.shape[:2]).transpose(1, 0, 2)
            self._products += np.matmul(grouped.transpose(0, 2, 1), grouped)
        self._sample.append(inputs[chosen])

    def statistics(self) -> InputStatistics:
        """Of all rows. The products of columns are damped as Frantar et al. 2022 do, so that few rows can be enough."""
        products = self._products / self._count
        if products.ndim == 1:
            factors = np.sqrt(products)
        else:
            size = products.shape[1]
            products += np.einsum("gkk->g", products)[:, None, None] / size * _DAMPING * np.eye(size)
            values, vectors = np.linalg.eigh(products)
            factors = vectors * np.sqrt(np.maximum(values, 0))[:, None, :]
        magnitude, sample = (self._magnitude / self._count).astype(np.float32), np.concatenate(self._sample)
        return InputStatistics(magnitude, factors.astype(np.float32), sample)


class _ObservedOperations(NumpyOperations):
    """Shows what each linear layer takes, beside its weight, to `observe`."""

    def __init__(
        self,
        values: MutableMapping[str, np.ndarray],
        weights: Mapping[str, np.ndarray],
        observe: Callable[[np.ndarray, np.ndarray], None],
    ) -> None:
        super().__init__(values, weights)
        self._observe = observe

    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        self._observe(weight, x)
        return super().linear(x, weight, bias)


def layer_program(config: DecoderConfig, index: int, tokens: int) -> Program:
    """One layer by itself over so many tokens of one text, from "inputs_embeds" to "hidden"."""
    shape = EngineShape("prefill", 1, tokens, tokens, tokens, tokens)
    inputs = token_inputs(shape, config.hidden_size, config.rotary_dim)
    steps = decoder_layer(config, index, "inputs_embeds")
    return Program(shape, inputs, tuple(steps), {"hidden": (inputs["inputs_embeds"][0], "float32")}, wide_residual=True)
