"""Logits behind a text's tokens on the GPU: the bits of decode steps, and near float32 NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm import LLM, SamplingParams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import LOGIT_TOLERANCES, open_runner, teacher_forced_logits
from edgellm.engines.runners.following_logits import FollowingLogits
from edgellm.evaluation.inputs import text_windows
from edgellm.evaluation.measures import divergence, perplexity, record_logits
from edgellm.opened_model import SHIPPED_MODEL

pytestmark = pytest.mark.gpu

TEXT = "The red cup is to the left of the blue block. I can pick it up and put it next to the ball. " * 12


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    """Without a draft: no verify step is among the limits' engines."""
    target = tmp_path_factory.mktemp("engines") / request.param
    build_engine_directory(SHIPPED_MODEL, target, EngineLimits(1, 128, 256), None, dtype=request.param)
    return EngineDirectory.open(target)


def test_they_have_the_bits_of_decode_steps(directory: EngineDirectory) -> None:
    """The whole context, whose last steps are padded past its end."""
    with LLM(directory.path, backend="numpy", drafting=None) as llm:
        text = llm.tokenizer.encode(TEXT)[:256]
    assert len(text) == 256
    with open_runner("numpy", directory) as runner:
        expected = teacher_forced_logits(runner, text[:1], text[1:])
    with open_runner("tensorrt", directory) as runner:
        stepwise = teacher_forced_logits(runner, text[:1], text[1:])
        following = FollowingLogits(runner)
        for _ in range(2):
            blocks = [block.copy() for block in following.blocks(0, text, 1)]
            assert [len(block) for block in blocks] == [64, 64, 64, 16, 16, 16, 15]
            np.testing.assert_array_equal(np.concatenate(blocks), stepwise)
        after_prefill = np.concatenate([block.copy() for block in following.blocks(0, text, 200)])
    for found, wanted in ((stepwise, expected), (after_prefill, expected[199:])):
        assert np.abs(found - wanted).max() <= LOGIT_TOLERANCES[directory.dtype] * np.abs(expected).max()


def test_measures_and_answers_do_not_disturb_each_other(directory: EngineDirectory) -> None:
    """Steps are captured before and after, on the memory that scoring uses, too; NumPy is the reference."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(directory.path, backend="numpy") as llm:
        windows = text_windows(llm.tokenizer.encode(TEXT), 100, 50)
        recorded = record_logits(llm, windows)
    with recorded, LLM(directory.path, backend="tensorrt") as llm:
        before = llm.generate("Hello!", params)
        found = divergence(llm, recorded)
        assert perplexity(llm, windows) == found.model
        assert llm.generate("Hello!", params).token_ids == before.token_ids
    print(found)
    assert found.mean < 1e-3 and found.equal_share > 0.98
    assert found.model.perplexity == pytest.approx(found.reference.perplexity, rel=0.01)


def test_answers_and_texts_with_a_draft() -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(SHIPPED_MODEL, backend="tensorrt") as llm:
        windows = text_windows(llm.tokenizer.encode(TEXT), 100, 50)
        before = llm.generate("Hello!", params).token_ids
        drafted = perplexity(llm, windows)
        assert llm.generate("Hello!", params).token_ids == before
    with LLM(SHIPPED_MODEL, backend="tensorrt", drafting=None) as llm:
        assert perplexity(llm, windows) == drafted
