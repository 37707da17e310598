"""What the bench of quantization measures, held against the runtime; and, slowly, the bars of the shipped model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf_models import byte_pairs, write_model
from gguf_writing import random_blocks

from edgellm import LLM, SamplingParams
from edgellm.commands.quantize import default_texts, token_pieces
from edgellm.engines.building.gguf_folder import checkpoint_folder
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.model.decoder import decoder_weights
from edgellm.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def repository_modules(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from tools.bench.quantization_error import SHIPPED

    return Tokenizer.from_directory(SHIPPED)


def test_an_answer_matches_where_the_runtime_gives_it(tokenizer: Tokenizer) -> None:
    """Logits are the runtime's, and what counts as an exact match is what it answers greedily."""
    from tools.bench.quantization_error import SHIPPED
    from tools.bench.quantization_quality import forced_conversations, open_model

    model = open_model(SHIPPED)
    with LLM(SHIPPED, backend="numpy", drafting=None) as llm:
        for text in forced_conversations(tokenizer, 11, 4):
            first = text.answers[0].start
            logits, followed = model.logits(text), following(llm, text.token_ids, first)
            assert np.allclose(logits, followed[text.places - first], atol=2e-3)
            start = 0
            for answer in text.answers:
                expected = [text.token_ids[place] for place in answer]
                right = logits[start : start + len(answer)].argmax(1).tolist() == expected
                found = llm.generate(list(text.token_ids[: answer.start]), SamplingParams(max_tokens=len(answer)))
                assert (list(found.token_ids) == expected) == right
                start += len(answer)


def test_layers_of_a_gguf_file_stand_for_the_models_own(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from tools.bench.published_quality import bits_of
    from tools.bench.quantization_quality import LAYERS, open_model, with_layers_of

    def packed(name: str, values: np.ndarray) -> Any:
        in_q8 = values.ndim == 2 and values.shape[1] % 32 == 0
        return random_blocks("q8_0", values.shape, np.random.default_rng(5)) if in_q8 else None

    keys = byte_pairs(tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json")), "gpt-2")
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | {"tokenizer.ggml.eos_token_id": 1}
    file = write_model(tiny_checkpoint, tmp_path / "made.gguf", metadata, packed)
    model = open_model(tiny_checkpoint)
    found = with_layers_of(file, model).weights
    assert found.keys() == model.weights.keys()
    for name, weight in model.weights.items():
        assert (found[name] is weight) != name.endswith(LAYERS)
        assert found[name].shape == weight.shape
    with checkpoint_folder(file) as folder:
        written = load_numpy_weights(Checkpoint.open(folder), decoder_weights(model.config))
    assert all(np.array_equal(found[name], written[name]) for name in found if name.endswith(LAYERS))
    assert bits_of(str(file)) == 8.5


def following(llm: LLM, token_ids: Sequence[int], first: int) -> np.ndarray:
    """The runtime's logits [n, V] that the tokens from number `first` on are drawn from."""
    blocks: list[np.ndarray] = []

    def take(logits: np.ndarray) -> None:
        blocks.append(logits.copy())

    llm.call(lambda runtime: runtime.following_logits(token_ids, first, take)).result()
    return np.concatenate(blocks)


def test_what_differs_is_counted(tokenizer: Tokenizer) -> None:
    from tools.bench.quantization_quality import Forced, Measured

    text = Forced([5, 6, 7, 8, 9, 6], [range(1, 3), range(4, 6)])
    assert text.places.tolist() == [1, 2, 4, 5]
    reference = np.zeros((4, 10), np.float32)
    reference[[0, 1, 2, 3], [6, 7, 9, 1]] = 2  # the last one is not what stands there
    found = reference.copy()
    found[1, 3] = 2.25
    measured = Measured()
    measured.add(text, reference, found, tokenizer)
    results = measured.results()
    assert (results["answers"], results["tokens"], results["equal_tokens_percent"]) == (2, 4, 75.0)
    assert results["exact_match_percent_of_reference"] == 50.0 and results["exact_match_percent"] == 0.0
    assert [each["margin"] for each in results["differences"]] == [2.0]
    one = np.exp(reference[1]) / np.exp(reference[1]).sum()
    other = np.exp(found[1]) / np.exp(found[1]).sum()
    assert results["largest_kl"] == pytest.approx((one * np.log(one / other)).sum(), rel=1e-3)


@pytest.mark.slow
def test_what_quantizing_may_cost_the_shipped_model(tokenizer: Tokenizer) -> None:
    from tools.bench.quantization_error import SHIPPED
    from tools.bench.quantization_quality import (
        KV_CACHE,
        QUANTIZED,
        Model,
        forced_conversations,
        measure,
        open_model,
        quantized,
    )

    reference, texts = open_model(SHIPPED), token_pieces(tokenizer, default_texts())
    names = ("int4, groups of 64", "int4, groups of 64, zero points")
    models = {name: (quantized(SHIPPED, QUANTIZED[name], texts), 300) for name in names}
    models[KV_CACHE] = Model(reference.config, reference.weights, "int8"), 40
    found = measure(reference, models, forced_conversations(tokenizer, 23, 300), tokenizer)
    for name in names:
        assert found[name]["answers"] >= 300 and found[name]["equal_tokens_percent"] >= 99.9
        # At most half a point over 5,000 answers; over 300 one of them is a third of a point.
        lost = found[name]["exact_match_percent_of_reference"] - found[name]["exact_match_percent"]
        assert lost <= 0.5 + 2 / 3
    assert found[KV_CACHE]["equal_tokens_percent"] >= 99.5
    assert all(each["margin"] <= 0.5 for each in found[KV_CACHE]["differences"])
