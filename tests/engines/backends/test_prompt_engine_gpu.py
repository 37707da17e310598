"""Prompts by kernels on the GPU: a token has the bits that it has in steps of few tokens, however the prompt is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decode_models import FAMILIES, LLAMA, ODD, SCALED, Loaded, random_model

from edgellm.engines.backends.steps.attention import PromptTokens
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.row_steps import TOKEN_ROWS

pytestmark = pytest.mark.gpu
MODELS: dict[str, DecoderConfig] = {
    "llama": replace(LLAMA, num_heads=16, num_kv_heads=8, feature_layers=(0, 1)),
    "last_features": replace(LLAMA, feature_layers=(0, 2)),
    "biases": replace(FAMILIES["llama_untied_biases"], feature_layers=(1,)),
    "qwen3": replace(FAMILIES["qwen3"], hidden_size=512, intermediate_size=1536),
    "olmo2": SCALED["olmo2"],
    "starcoder2": replace(SCALED["starcoder2"], hidden_size=512, intermediate_size=1536, feature_layers=(0, 2)),
    "layer_norms_and_a_gate": SCALED["layer_norms_and_a_gate"],
    **{name: SCALED[name] for name in ("exaone4", "ernie", "hunyuan", "ministral3")},
    "heads_of_128": ODD["heads_of_128"],
    "heads_of_80": ODD["heads_of_80"],
    "many_heads_a_group": ODD["many_heads_a_group"],
    "gemma": replace(SCALED["gemma"], head_dim=256, rotary_dim=256),
    "gemma4": replace(ODD["heads_of_gemma4"], feature_layers=(0, 3)),
    "granite": replace(SCALED["granite"], feature_layers=(0,)),
}
#: Values that have a row for each of the tokens.
_OF_TOKENS = ("inputs_embeds", "rope_rotary_cos_sin", TOKEN_ROWS)


class Sequence:
    """One sequence on the GPU, whose states the engines of its chunks share."""

    def __init__(self, gpu, config: DecoderConfig, arrays: dict[str, np.ndarray], rows: int, dtype: str) -> None:
        self._gpu, self._config, self._arrays, self._rows, self._dtype = gpu, config, arrays, rows, dtype
        self.states: dict = {}
        self.features: list[np.ndarray] = []
        self.logits = np.empty(0)

    def take(self, first: int, tokens: int, start: int, is_prompt: bool) -> None:
        """Run the tokens from `first` on as rows from `start` on; their features and the last one's logits stay."""
        arrays = dict(self._arrays)
        for name in arrays.keys() & set(_OF_TOKENS):
            arrays[name] = self._arrays[name][:, first : first + tokens].copy()
        arrays["kvcache_start_index"] = np.array([start], np.int32)
        seen = np.arange(self._rows) <= start + np.arange(tokens)[:, None]
        arrays["attention_mask"] = seen[None, None]
        arrays["last_token_ids"] = np.array([[tokens - 1]], np.int32)
        phase, selected = ("decode", 1) if tokens == 1 else ("verify", tokens)
        if is_prompt:
            phase, selected = "prefill", 1
        shape = EngineShape(phase, 1, tokens, self._rows, self._rows, selected)
        loaded = Loaded(self._gpu, self._config, shape, arrays, self._dtype, PromptTokens if is_prompt else None)
        self.states = self.states or {name: array for name, array in loaded.arrays.items() if "_cache_" in name}
        loaded.engine.bind(self.states)
        loaded.engine.enqueue()
        self.logits = self._gpu.download(loaded.arrays["logits"])[0, -1]
        if "hidden_states" in loaded.arrays:
            self.features.append(self._gpu.download(loaded.arrays["hidden_states"])[0])

    def rows(self) -> dict[str, np.ndarray]:
        """The states."""
        return {name: self._gpu.download(array) for name, array in self.states.items()}


@pytest.mark.parametrize(("start", "cuts"), [(0, (65,)), (5, (130,)), (100, (300, 1, 77)), (2040, (72, 90))], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_token_of_a_prompt_has_the_bits_of_a_small_step(
    gpu, name: str, dtype: str, start: int, cuts: tuple[int, ...]
) -> None:
    """KV rows, features and the last token's logits, against steps of 13 tokens."""
    config, count = MODELS[name], sum(cuts)
    rows = start + count + 16
    arrays = random_model(config, 1, rows, [start], (None, *range(count - 1)))
    whole, small = (Sequence(gpu, config, arrays, rows, dtype) for _ in range(2))
    first = 0
    for tokens in cuts:
        whole.take(first, tokens, start + first, True)
        first += tokens
    for first in range(0, count, 13):
        small.take(first, min(13, count - first), start + first, False)
    expected = small.rows()
    for state, found in whole.rows().items():
        np.testing.assert_array_equal(found, expected[state], err_msg=state)
    if config.feature_layers:
        np.testing.assert_array_equal(np.concatenate(whole.features), np.concatenate(small.features))
    np.testing.assert_array_equal(whole.logits, small.logits)
