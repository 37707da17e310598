"""The measures against brute force in float64, against transformers, and on answers whose scores are known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from golden_files import golden_folder
from tokenizers import Tokenizer, models

from edgellm import LLM, AdapterError, SamplingParams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import open_runner
from edgellm.engines.runners.following_logits import FollowingLogits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.errors import EngineError, RequestError
from edgellm.evaluation import divergence, exact_match, measures, perplexity, rouge
from edgellm.evaluation.inputs import Window, text_windows
from edgellm.evaluation.measures import record_logits

LOSSES = golden_folder("losses")
TEXT = [(13 * index * index + 7 * index + 5) % 256 for index in range(150)]
WINDOWS = text_windows(TEXT, 40, 13)


@pytest.fixture(scope="module")
def other_engines(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_engines`, with other weights."""
    folder = tmp_path_factory.mktemp("other")
    limits = EngineLimits(max_batch=2, prefill_chunk=16, kv_capacity=96)
    build_engine_directory(make_checkpoint(folder / "checkpoint", 1), folder / "engines", limits, [])
    return folder / "engines"


@pytest.fixture
def model(tiny_engines: Path) -> Iterator[LLM]:
    with LLM(tiny_engines, backend="numpy") as opened:
        yield opened


def log_probabilities(directory: Path, windows: list[Window]) -> np.ndarray:
    """[n, V] float64 of each token that counts, by prefilling all that comes before it, one token after the other."""
    rows = []
    with open_runner("numpy", EngineDirectory.open(directory)) as runner:
        for window in windows:
            for place in range(window.first, len(window.token_ids)):
                runner.start(0, window.token_ids[:place], 0, SamplingValues()).wait()
                logits = runner.logits(0).astype(np.float64)
                rows.append(logits - np.log(np.sum(np.exp(logits))))
    return np.stack(rows)


@pytest.fixture(scope="module")
def expected(tiny_engines: Path) -> np.ndarray:
    return log_probabilities(tiny_engines, WINDOWS)


def test_perplexity_is_that_of_brute_force(model: LLM, expected: np.ndarray) -> None:
    seen = []
    found = perplexity(model, WINDOWS, progress=lambda done, total: seen.append((done, total)))
    losses = -expected[np.arange(len(TEXT) - 1), TEXT[1:]]
    assert found.tokens == len(TEXT) - 1 == len(losses)
    assert found.mean_negative_log_likelihood == pytest.approx(losses.mean(), abs=1e-5)
    assert found.perplexity == pytest.approx(np.exp(losses.mean()), rel=1e-5)
    assert seen == sorted(set(seen)) and seen[-1] == (149, 149) and len(seen) == len(WINDOWS)


@pytest.mark.parametrize("name", sorted(path.name for path in LOSSES.iterdir()))
def test_perplexity_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    golden = json.loads((LOSSES / name / "expected.json").read_text())
    checkpoint = shutil.copytree(golden_folder("decoder") / golden["base"], tmp_path / "checkpoint")
    (checkpoint / "expected.safetensors").unlink()
    Tokenizer(models.WordLevel({f"t{number}": number for number in range(80)}, "t0")).save(
        str(checkpoint / "tokenizer.json")
    )
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 16, 64), [])
    with LLM(tmp_path / "engines", backend="numpy") as llm:
        for case in golden["cases"]:
            windows = text_windows(golden["token_ids"], case["window"], case["stride"], case["bos"])
            found = perplexity(llm, windows)
            assert found.mean_negative_log_likelihood == pytest.approx(case["loss"], abs=1e-4), case


def test_a_model_does_not_diverge_from_itself(model: LLM) -> None:
    with record_logits(model, WINDOWS) as recorded:
        for _ in range(2):
            found = divergence(model, recorded)
            assert (found.mean, found.percentile_99, found.maximum) == (0.0, 0.0, 0.0)
            assert found.equal_share == 1.0 and found.differences == () and found.tokens == 149
            assert found.reference == found.model == perplexity(model, WINDOWS)


def test_two_models_diverge_as_brute_force_says(
    tiny_engines: Path, other_engines: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "_MOST_VALUES", 5 * 320)  # blocks are looked at in slices of five rows
    with LLM(tiny_engines, backend="numpy") as llm:
        recorded = record_logits(llm, WINDOWS)
    with recorded, LLM(other_engines, backend="numpy") as llm:
        found = divergence(llm, recorded)
    other = log_probabilities(other_engines, WINDOWS)
    values = (np.exp(expected) * (expected - other)).sum(1)
    assert found.mean == pytest.approx(values.mean(), abs=1e-5)
    assert found.percentile_99 == pytest.approx(np.percentile(values, 99), abs=1e-4)
    assert found.maximum == pytest.approx(values.max(), abs=1e-4)
    differing = np.flatnonzero(expected.argmax(1) != other.argmax(1))
    assert len(differing) > 100
    assert found.equal_share == pytest.approx(1 - len(differing) / 149)
    places = [
        (number, place) for number, each in enumerate(WINDOWS) for place in range(each.first, len(each.token_ids))
    ]
    assert [(each.window, each.position) for each in found.differences] == [places[row] for row in differing]
    for each, row in zip(found.differences, differing, strict=True):
        best = np.sort(expected[row])
        assert (each.reference_token, each.token) == (expected[row].argmax(), other[row].argmax())
        assert each.margin == pytest.approx(best[-1] - best[-2], abs=1e-4)
    assert found.reference.perplexity != found.model.perplexity


def test_logits_that_are_no_numbers_are_refused(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As half precision gives them where activations overflow, which float32 here does not."""
    monkeypatch.setattr(FollowingLogits, "blocks", lambda self, *text: [np.full((2, 320), np.nan, np.float32)])
    with pytest.raises(EngineError, match="logits are not finite"):
        perplexity(model, WINDOWS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 384}, "the reference has 320 tokens, the model 384"),
        ({}, "token 3 is '[$]' in the reference and 'other' in the model"),
    ],
)
def test_vocabularies_that_differ_are_refused(
    model: LLM, make_checkpoint: Callable[..., Path], tmp_path: Path, change: dict[str, int], message: str
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", **change)
    if not change:
        tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        token = next(token for token, number in vocabulary.items() if number == 3)
        del vocabulary[token]
        vocabulary["other"] = 3
        (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 16, 96), [])
    with (
        record_logits(model, WINDOWS[:1]) as recorded,
        LLM(tmp_path / "engines", backend="numpy") as llm,
        pytest.raises(RequestError, match=message),
    ):
        divergence(llm, recorded)


def test_a_folder_without_room_is_refused(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures.shutil, "disk_usage", lambda folder: SimpleNamespace(free=149 * 320 * 4 - 1))
    with pytest.raises(RequestError, match=r"the reference's logits take 0 MiB, .* TMPDIR"):
        record_logits(model, WINDOWS)
    monkeypatch.setattr(measures.shutil, "disk_usage", lambda folder: SimpleNamespace(free=149 * 320 * 4))
    record_logits(model, WINDOWS).close()


def test_what_a_model_cannot_hold_is_refused_and_the_model_goes_on(model: LLM) -> None:
    before = model.generate("hello", SamplingParams(max_tokens=5))
    for windows, error, message in [
        ([Window(tuple(range(97)), 1)], EngineError, "at most 96 tokens"),
        ([Window((1, 2, 400), 1)], EngineError, "token id 400"),
        ([Window((1, "a", 3), 1)], RequestError, "'a' among its token ids"),
        ([], RequestError, "there are no windows"),
    ]:
        with pytest.raises(error, match=message):
            perplexity(model, windows)
    with pytest.raises(AdapterError, match=r"opened without adapters|no adapter"):
        perplexity(model, WINDOWS, adapter="nobody")
    assert perplexity(model, WINDOWS[:1]).tokens == 39
    assert model.generate("hello", SamplingParams(max_tokens=5)).token_ids == before.token_ids


def test_what_progress_raises_ends_the_scoring_and_the_model_goes_on(model: LLM) -> None:
    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perplexity(model, WINDOWS, progress=interrupted)
    assert perplexity(model, WINDOWS[:1]).tokens == 39


def test_scores_and_answers_do_not_disturb_each_other(tiny_draft_engines: Path, expected: np.ndarray) -> None:
    """Also where a draft is loaded, whose rows belong to other tokens after a text was scored."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = ["hello there", "another prompt"]
    with LLM(tiny_draft_engines, backend="numpy", drafting=None) as llm:
        plain = [llm.generate(prompt, params).token_ids for prompt in prompts]
    with LLM(tiny_draft_engines, backend="numpy") as llm:
        assert llm.drafting is not None
        for _ in range(2):
            assert [llm.generate(prompt, params).token_ids for prompt in prompts] == plain
            found = perplexity(llm, WINDOWS)
            losses = -expected[np.arange(149), TEXT[1:]]
            assert found.mean_negative_log_likelihood == pytest.approx(losses.mean(), abs=1e-5)
        assert llm.generate(prompts[0], params).usage.reused_tokens == 0


def test_exact_match_leaves_out_spaces_around() -> None:
    found = exact_match(["4", " four\n", "Four", ""], ["4", "four", "four", "x"])
    assert found == [True, True, False, False]


def test_rouge_of_known_pairs() -> None:
    pairs = [("the cat sat", "the cat was"), ("a summary", "a summary"), ("nothing", "alike here")]
    found = rouge([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    assert found == pytest.approx({"rouge1": (2 / 3 + 1) / 3, "rouge2": (1 / 2 + 1) / 3, "rougeL": (2 / 3 + 1) / 3})
