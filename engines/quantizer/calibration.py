"""Runs a model's layers one after the other over calibration texts, and says what their linear layers take.

The texts' rows stay in memory in float32, and the weights of one layer. Layers run by the NumPy executor, their
products by an `Arithmetic`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence

import numpy as np

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.formats.tensors import as_float32
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import EMBEDDING, decoder_layer
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program, state_inputs, token_inputs
from edgellm.engines.model.rotary import rotary_table
from edgellm.engines.quantizer.arithmetic import NUMPY, Arithmetic
from edgellm.engines.quantizer.statistics import InputStatistics, Observation

#: Of the rows that a linear layer takes, so many are kept to compute errors of outputs with.
_SAMPLED = 512
#: The same of the linear layers of each expert, of which there are many.
_SAMPLED_OF_EXPERT = 128


class CalibrationRows:
    """The residual stream of calibration texts, of token ids each, in front of a layer: first of layer 0. `texts` are
    float32 [T, H], one a text."""

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        texts: Sequence[Sequence[int]],
        group: int | None,
        arithmetic: Arithmetic = NUMPY,
        wants_moments: bool = False,
    ) -> None:
        """`group` is how many columns of a weight share a scale; `wants_moments`: see `InputStatistics`."""
        table, dtype = checkpoint.raw(EMBEDDING), checkpoint.info(EMBEDDING).dtype
        self._config, self._arithmetic = config, arithmetic
        self._observed = group, wants_moments
        self._rotary = rotary_table(config, max(map(len, texts)), config.max_position_embeddings)
        scale = np.float32(config.embedding_scale)
        self.texts = [as_float32(table[np.asarray(text)], dtype) * scale for text in texts]

    @property
    def count(self) -> int:
        return sum(map(len, self.texts))

    def observe_layer(self, index: int, weights: Mapping[str, np.ndarray]) -> dict[str, InputStatistics]:
        """Pass layer `index`, and say what each of its linear layers took, by the linear layer's name; of a mixture
        those of the experts that any row chose."""
        observed: dict[str, Observation] = {}
        names = {id(array): name.removesuffix(".weight") for name, array in weights.items()}
        mixture = self._config.mixture_of(index)
        # An expert's rows are a share of all: of those that most get, as many are kept as below.
        share = 1 if mixture is None else mixture.chosen / mixture.experts
        kept, kept_of_expert = (
            np.linspace(0, self.count - 1, min(int(most / part), self.count)).astype(np.int64)
            for most, part in ((_SAMPLED, 1), (_SAMPLED_OF_EXPERT, share))
        )

        def observe(weight: np.ndarray, inputs: np.ndarray) -> None:
            name = names[id(weight)]
            if name not in observed:
                observed[name] = self._arithmetic.observation(weight.shape[1], *self._observed)
            own = (kept_of_expert if ".experts." in name else kept) - observed[name].count
            observed[name].add(inputs, own[(own >= 0) & (own < len(inputs))])

        self.pass_layer(index, weights, observe)
        return {name: each.statistics() for name, each in observed.items()}

    def pass_layer(
        self,
        index: int,
        weights: Mapping[str, np.ndarray],
        observe: Callable[[np.ndarray, np.ndarray], None] = lambda weight, inputs: None,
    ) -> None:
        """Go through layer `index`, whose weights are float32 arrays by the names that its program has; `observe` gets
        the weight of each linear layer and what it takes. Of a text all tokens at once: each sees those before it."""
        for number, rows in enumerate(self.texts):
            tokens = len(rows)
            program = layer_program(self._config, index, tokens)
            values = {
                "inputs_embeds": rows[None],
                "rope_rotary_cos_sin": self._rotary[None, :tokens],
                "attention_mask": np.tri(tokens, dtype=np.bool_)[None, None],
                "kvcache_start_index": np.zeros(1, np.int32),
            }
            if self._config.is_recurrent:
                values["state_tokens"] = np.full(1, tokens, np.int32)
            values |= {name: np.zeros(shape, np.float32) for name, (shape, _) in program.states.items()}
            ProgramGraph(_ObservedOperations(values, weights, observe, self._arithmetic), program).run()
            self.texts[number] = values["hidden"][0]
        self._arithmetic.forget()


class _ObservedOperations(NumpyOperations):
    """Shows what each linear layer takes [M, K], beside its weight, to `observe`."""

    def __init__(
        self,
        values: MutableMapping[str, np.ndarray],
        weights: Mapping[str, np.ndarray],
        observe: Callable[[np.ndarray, np.ndarray], None],
        arithmetic: Arithmetic,
    ) -> None:
        super().__init__(values, weights)
        self._observe, self._arithmetic = observe, arithmetic

    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        inputs = x.reshape(-1, x.shape[-1])
        self._observe(weight, inputs)
        result = self._arithmetic.linear(inputs, weight)
        if bias is not None:
            result += bias
        return result.reshape(*x.shape[:-1], len(weight))


def layer_program(config: DecoderConfig, index: int, tokens: int) -> Program:
    """One layer by itself over so many tokens of one text, from "inputs_embeds" to "hidden"."""
    shape = EngineShape("prefill", 1, tokens, tokens, tokens, tokens)
    inputs = token_inputs(shape, config.hidden_size, config.rotary_columns)
    if config.is_recurrent:
        inputs |= state_inputs(shape)
    steps = decoder_layer(config, index, "inputs_embeds")
    return Program(shape, inputs, tuple(steps), {"hidden": (inputs["inputs_embeds"][0], "float32")}, wide_residual=True)
