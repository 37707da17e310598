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

#: Of the rows that a linear layer takes, so many are kept to compute errors of outputs with, and left out of moments.
_SAMPLED = 512
#: Elements whose products with each other are summed up: the memory that moments take grows with their number.
_SPAN = 2048


@dataclass
class InputStatistics:
    """What a linear layer takes, over the calibration rows x of K elements.

    `magnitude` float32 [K] is the mean of |x|. `moments` float32 [S, S] are the means of x x^T of at most `_SPAN`
    elements of x each, one span behind the other. `sample` float32 [n, K] are some rows that are in none of these.
    """

    magnitude: np.ndarray
    moments: list[np.ndarray]
    sample: np.ndarray

    @property
    def root_mean_squares(self) -> np.ndarray:
        """Of each element: float32 [K]."""
        return np.sqrt(np.concatenate([np.diagonal(each) for each in self.moments]))

    def divide(self, scales: np.ndarray) -> None:
        """Make it that of inputs divided by `scales` [K]."""
        self.magnitude /= scales
        self.sample /= scales
        start = 0
        for each in self.moments:
            own = scales[start : start + len(each)]
            np.divide(each, own * own[:, None], out=each)
            start += len(each)


class CalibrationRows:
    """The residual stream of calibration texts, of token ids each, in front of a layer: first of layer 0.

    `texts` are float32 [T, H], one a text.
    """

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, texts: Sequence[Sequence[int]]) -> None:
        table, dtype = checkpoint.raw(EMBEDDING), checkpoint.info(EMBEDDING).dtype
        self._config = config
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
        chosen = np.linspace(0, self.count - 1, min(_SAMPLED, self.count // 8)).astype(np.int64)
        start = 0

        def observe(weight: np.ndarray, x: np.ndarray) -> None:
            inputs, own = x.reshape(-1, x.shape[-1]), chosen[(chosen >= start) & (chosen < start + x.shape[1])]
            name = names[id(weight)]
            if name not in observed:
                observed[name] = _Observation(weight.shape[1])
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

    def __init__(self, columns: int) -> None:
        self._count = 0
        self._magnitude = np.zeros(columns)
        self._products = [np.zeros((min(_SPAN, columns - at),) * 2, np.float32) for at in range(0, columns, _SPAN)]
        self._sample: list[np.ndarray] = []

    def add(self, inputs: np.ndarray, chosen: np.ndarray) -> None:
        """Rows float32 [M, K], of which the `chosen` are kept for the sample."""
        self._sample.append(inputs[chosen])
        inputs = np.delete(inputs, chosen, 0)
        self._count += len(inputs)
        self._magnitude += np.abs(inputs).sum(0, np.float64)
        for number, products in enumerate(self._products):
            own = inputs[:, number * _SPAN : (number + 1) * _SPAN]
            np.add(products, own.T @ own, out=products)

    def statistics(self) -> InputStatistics:
        """Of all rows."""
        moments = [each / np.float32(self._count) for each in self._products]
        return InputStatistics(
            (self._magnitude / self._count).astype(np.float32), moments, np.concatenate(self._sample)
        )


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
