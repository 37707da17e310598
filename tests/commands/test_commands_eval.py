"""`edgellm eval` on tiny models: the table, the JSON, and what is refused."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Edgellm

from edgellm import LLM, SamplingParams
from edgellm.commands.eval import SHOWN_DIFFERENCES
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.evaluation.inputs import text_windows
from edgellm.evaluation.measures import perplexity

TEXT = "The quick brown fox jumps over the lazy dog, and nobody has seen it since then. " * 2


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    path = tmp_path / "examples.jsonl"
    path.write_text('{"prompt": "one", "answer": "1"}\n{"prompt": "two", "answer": "2"}\n')
    return path


@pytest.fixture(scope="module")
def other_engines(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_engines`, with other weights and less room."""
    folder = tmp_path_factory.mktemp("other")
    limits = EngineLimits(max_batch=1, prefill_chunk=16, kv_capacity=80)
    build_engine_directory(make_checkpoint(folder / "checkpoint", 1), folder / "engines", limits, [])
    return folder / "engines"


def test_perplexity_of_a_text(edgellm: Edgellm, tiny_engines: Path, text: Path, tmp_path: Path) -> None:
    code, out, err = edgellm("eval", tiny_engines, "--text", text, "--output", tmp_path / "r.json")
    assert code == 0, err
    with LLM(tiny_engines, backend="numpy") as llm:
        expected = perplexity(llm, text_windows(llm.tokenizer.encode(TEXT), 96, 48))
    results = json.loads((tmp_path / "r.json").read_text())
    found = results["text"]
    assert found.pop("seconds") > 0
    assert found == {
        "file": str(text),
        "tokens": 160,
        "windows": 3,
        "window": 96,
        "stride": 48,
        "bos": None,
        "counted_tokens": 159,
        "mean_negative_log_likelihood": expected.mean_negative_log_likelihood,
        "perplexity": expected.perplexity,
        "reference_perplexity": None,
    }
    assert {key: results[key] for key in ("divergence", "exact_match", "rouge", "reference", "sampling")} == {
        **dict.fromkeys(("divergence", "exact_match", "rouge", "reference", "sampling"))
    }
    assert (results["model"], results["backend"], results["adapter"]) == (str(tiny_engines), "numpy", None)
    assert out.splitlines()[0] == "tiny on the numpy backend"
    assert f"{text}: 160 tokens, 159 counted, in windows of 96, stride 48, no BOS" in out
    assert f"{expected.perplexity:.4f}" in out and "KL(" not in out
    assert "scoring the model: done" in err and "r.json written" in err


def test_options_of_windows(edgellm: Edgellm, tiny_engines: Path, text: Path) -> None:
    options = ("--window", 20, "--stride", 19, "--tokens", 50, "--json")
    code, out, err = edgellm("eval", "--model", tiny_engines, "--text", text, *options)
    assert code == 0, err
    found = json.loads(out)["text"]
    assert [found[key] for key in ("tokens", "counted_tokens", "windows", "window", "stride")] == [50, 49, 3, 20, 19]


def test_the_distance_to_a_reference(
    edgellm: Edgellm, tiny_engines: Path, other_engines: Path, text: Path, tmp_path: Path
) -> None:
    options = ("--text", text, "--reference", other_engines, "--output", tmp_path / "r.json")
    code, out, err = edgellm("eval", tiny_engines, *options)
    assert code == 0, err
    results = json.loads((tmp_path / "r.json").read_text())
    found = results["divergence"]
    assert results["text"]["window"] == 80 and results["reference"] == str(other_engines)
    assert results["text"]["reference_perplexity"] != results["text"]["perplexity"]
    assert found["over"] == "the text" and found["tokens"] == 159
    assert 0 < found["mean_kl"] < found["percentile_99_kl"] <= found["largest_kl"]
    assert found["equal_tokens"] == 159 - len(found["differences"]) and len(found["differences"]) > SHOWN_DIFFERENCES
    first = found["differences"][0]
    assert set(first) == {*("window", "position", "reference_token", "token", "margin", "reference_text", "text")}
    largest = max(each["margin"] for each in found["differences"])
    assert f"against {other_engines}" in out and f"{largest:.4f}" in out and "perplexity of the reference" in out
    assert f"and {len(found['differences']) - SHOWN_DIFFERENCES} more, with smaller margins" in out
    assert "scoring the reference: done" in err


def test_answers_plain_and_drafted(
    edgellm: Edgellm, tiny_draft_engines: Path, tiny_engines: Path, tmp_path: Path
) -> None:
    """Of answers that the model itself gave, and one that it did not give."""
    with LLM(tiny_engines, backend="numpy") as llm:
        params = SamplingParams(max_tokens=12)
        asked = ["one", "two", "three"]
        own = [llm.chat([{"role": "user", "content": prompt}], params).text for prompt in asked]
    assert all(answer.strip() for answer in own)
    lines = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(asked, own, strict=True)]
    lines.append({"prompt": "four", "summary": "certainly not this answer"})
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--exact-match", path, "--rouge", path, "--max-tokens", 12, "--output", tmp_path / "r.json")
    code, out, err = edgellm("eval", tiny_draft_engines, *options, "--reference", tiny_engines)
    assert code == 0, err
    results = json.loads((tmp_path / "r.json").read_text())
    for kind in ("exact_match", "rouge"):
        found = results[kind]
        assert list(found["ways"]) == ["reference", "plain", "drafted"]
        assert (found["examples"], found["drafted_equal_plain"]) == (4, 4)
        for figures in found["ways"].values():
            assert figures["tokens_per_second"] == pytest.approx(figures["tokens"] / figures["seconds"])
        assert [each["plain"] for each in found["answers"]] == [each["drafted"] for each in found["answers"]]
    for figures in results["exact_match"]["ways"].values():
        assert (figures["equal"], figures["equal_share"]) == (3, 0.75)
    assert [each["plain"] for each in results["exact_match"]["answers"]][:3] == own
    assert results["exact_match"]["answers"][3]["place"] == f"{path}, line 4"
    scores = [{key: way[key] for key in ("rouge1", "rouge2", "rougeL")} for way in results["rouge"]["ways"].values()]
    assert scores[0] == scores[1] == scores[2] and all(0 <= score <= 1 for score in scores[0].values())
    assert results["sampling"]["max_tokens"] == 12 and results["text"] is None
    header = next(line for line in out.splitlines() if line.split() == ["reference", "plain", "drafted"])
    assert out.count(header) == 2 and "exact match" in out and "ROUGE-L" in out
    assert out.count("all 4 drafted answers equal plain ones, token for token") == 2
    assert "exact match, drafted: done" in err
    code, out, err = edgellm("eval", tiny_draft_engines, "--exact-match", path, "--no-draft", "--examples", 2, "--json")
    assert code == 0, err
    results = json.loads(out)["exact_match"]
    assert list(results["ways"]) == ["plain"] and results["examples"] == 2 and results["drafted_equal_plain"] is None


def test_an_adapter_takes_part(
    edgellm: Edgellm, tiny_checkpoint: Path, make_adapter: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", read_decoder_config(tiny_checkpoint), 1, 4)
    limits = EngineLimits(1, 16, 96, max_lora_rank=4, lora_slots=1)
    build_engine_directory(tiny_checkpoint, tmp_path / "engines", limits, [])
    options = ("eval", tmp_path / "engines", "--text", text, "--json")
    plain = json.loads(edgellm(*options)[1])
    code, out, err = edgellm(*options, "--lora", f"house={adapter}", "--adapter", "house")
    assert code == 0, err
    assert json.loads(out)["adapter"] == "house"
    assert json.loads(out)["text"]["perplexity"] != plain["text"]["perplexity"]
    assert math.isfinite(json.loads(out)["text"]["perplexity"])


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 2, "nothing is to be measured: give --text, --exact-match or --rouge"),
        (("--reference", "ENGINES"), 2, "nothing is to be measured"),
        (("--text", "nowhere.txt"), 1, "the text nowhere.txt cannot be read: No such file"),
        (("--text", "EMPTY"), 1, "is empty: expected something to predict"),
        (("--text", "ONE"), 1, "the text has 1 tokens: expected two or more"),
        (("--text", "TEXT", "--window", 97), 1, "the window has 97 tokens, the context 96"),
        (("--text", "TEXT", "--window", 1), 2, "--window"),
        (("--text", "TEXT", "--window", 8, "--stride", 8), 1, "the stride is 8 and the window 8"),
        (("--text", "TEXT", "--bos"), 1, "names none (bos_token)"),
        (("--text", "TEXT", "--reference", "nowhere"), 1, "nowhere"),
        (("--text", "TEXT", "--adapter", "house"), 1, "there is no LoRA adapter 'house'"),
        (("--text", "TEXT", "--output", "/no/such/folder/r.json"), 1, "cannot be written"),
        (("--exact-match", "TEXT"), 1, "line 1 is not valid JSON"),
        (("--rouge", "EMPTY"), 1, "are empty: expected a JSON object on each line"),
        (("--text", "TEXT", "--reference", "WIDER"), 1, "the vocabularies differ: the reference has 384 tokens"),
    ],
)
def test_what_is_wrong_is_named(
    edgellm: Edgellm,
    tiny_engines: Path,
    make_checkpoint: Callable[..., Path],
    text: Path,
    tmp_path: Path,
    options: tuple[object, ...],
    code: int,
    message: str,
) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "one.txt").write_text("x")
    named = {"TEXT": text, "EMPTY": tmp_path / "empty.txt", "ONE": tmp_path / "one.txt", "ENGINES": tiny_engines}
    if "WIDER" in options:
        named["WIDER"] = tmp_path / "wider"
        checkpoint = make_checkpoint(tmp_path / "checkpoint", vocab_size=384)
        build_engine_directory(checkpoint, named["WIDER"], EngineLimits(1, 16, 96), [])
    found, _, err = edgellm("eval", tiny_engines, *(named.get(option, option) for option in options))
    assert found == code
    assert message in " ".join(err.split())


def test_rouge_is_refused_at_once_where_its_package_is_missing(
    edgellm: Edgellm, tiny_engines: Path, examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    code, out, err = edgellm("eval", tiny_engines, "--rouge", examples)
    assert code == 1 and out == "" and "pip install 'rouge-score>=0.1.2'" in " ".join(err.split())
    assert "plain" not in err
