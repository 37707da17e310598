"""What a draft head learns from: prompts without those that are measured, and answers of the model's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from gguf_encoders import tokenizer_keys
from gguf_models import write_model

from edgellm import LLM
from edgellm.text.tokenizer import Tokenizer
from tools.bench.published_quality import as_checkpoint
from tools.heads.answers import Share, answer_side_by_side, build_engines, read_documents, user_turn
from tools.heads.prompts import MOST, held_out_runs, main, select
from tools.heads.settings import Asking

MEASURED = "Compose a travel blog post about a trip to Hawaii, with places to see."


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return path


def test_prompts_that_share_a_run_of_words_are_left_out(tmp_path: Path) -> None:
    lines = [{"turns": [MEASURED]}, {"prompt": "Say it again", "task": "chat"}]  # as `edgellm bench` takes both
    file = write_lines(tmp_path / "held_out.jsonl", lines)
    given = [
        ("a", "compose a TRAVEL blog post, about a trip to Hawaii!"),
        ("a", "Compose a travel blog post."),
        ("b", "say it again."),
        ("b", "Hello"),
        ("b", " Hello "),
        *(("taskmaster4", f"Coffee number {number}, please") for number in range(MOST["taskmaster4"] + 5)),
    ]
    kept = select(given, held_out_runs([file]), Random(1))
    few = sorted(each["prompt"] for each in kept if each["source"] != "taskmaster4")
    assert few == ["Compose a travel blog post.", "Hello"]
    assert len(kept) - len(few) == MOST["taskmaster4"]


def test_a_line_that_says_nothing_is_named(tmp_path: Path) -> None:
    for wrong in ({"text": "Hello"}, {"turns": "Hello"}, {"turns": [3]}):
        with pytest.raises(SystemExit, match=r'expected \{"prompt": "..."\} or \{"turns"'):
            held_out_runs([write_lines(tmp_path / "wrong.jsonl", [wrong])])


def test_titles_and_passages_become_prompts(tmp_path: Path) -> None:
    import lzma

    passage = " ".join(["word"] * 80)
    texts = [
        {"source": "openstax/business", "title": "business/m1", "text": f"How Banks Work\n\n{passage}\n\nshort"},
        {"source": "african_storybook", "title": "The Moon", "text": "The Moon\n\nshort"},
        {"source": "openstax/business", "title": "business/m2", "text": "Introduction\n\nshort"},
    ]
    chats = [{"source": "x", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "no"}]}]
    for name, records in (("text", texts), ("chat", chats)):
        with lzma.open(tmp_path / f"{name}.jsonl.xz", "wt") as file:
            file.write("\n".join(map(json.dumps, records)))
    main([str(tmp_path), str(tmp_path / "out.jsonl.xz")])
    with lzma.open(tmp_path / "out.jsonl.xz", "rt") as file:
        found = [json.loads(line)["prompt"] for line in file]
    assert "Hi" in found and "Explain How Banks Work in simple words." in found
    assert "Write a poem with the title 'The Moon'." in found
    assert sum(passage in each for each in found) == 1
    assert not any("Introduction" in each or each == "no" for each in found)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory, make_checkpoint: Callable[..., Path]) -> Path:
    """A folder with a tiny base, and answers to 4 of 5 prompts and to what the model asks itself."""
    folder = tmp_path_factory.mktemp("answers")
    make_checkpoint(folder / "base", num_hidden_layers=2)
    prompts = [*(f"What is {number}?" for number in range(4)), MEASURED]
    held_out = held_out_runs([write_lines(folder / "held_out.jsonl", [{"turns": [MEASURED]}])])
    asking = Asking(answer_minutes=0.5, answer_count=10, answer_tokens=8, prompt_tokens=100, seed=3)
    build_engines(folder / "base", folder / "engines", asking)
    shares = [Share(prompts, asking, folder / name) for name in ("answers", "beside")]
    answer_side_by_side(folder / "engines", "numpy", None, held_out, shares)
    return folder


def test_answers_are_the_models_own(answered: Path) -> None:
    tokenizer = Tokenizer.from_directory(answered / "base")
    documents = read_documents(answered / "answers")
    given = [each for each in documents if each.first > len(user_turn(tokenizer, ""))]
    asked = [tokenizer.decode(each.ids[: each.first].tolist()) for each in given]
    assert len(asked) == 4 and all("What is" in each for each in asked)  # and not what is measured
    assert all(1 <= len(each.ids) - each.first <= 8 for each in given)
    with LLM(answered / "engines", backend="numpy", drafting=None) as llm:
        greedy = [
            llm.generate(each.ids[: each.first].tolist(), temperature=0.0, max_tokens=8).token_ids for each in given
        ]
    same = [np.array_equal(each.ids[each.first :], ids) for each, ids in zip(given, greedy, strict=True)]
    assert any(same) and not all(same)  # half of them are drawn


def test_engines_side_by_side_answer_as_each_alone_would(answered: Path) -> None:
    assert (answered / "beside").read_text() == (answered / "answers").read_text()


def test_the_user_turn_ends_where_the_text_begins(answered: Path) -> None:
    tokenizer = Tokenizer.from_directory(answered / "base")
    ids = user_turn(tokenizer, "")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\n"


def test_the_checkpoint_of_a_file_is_of_its_own_family(answered: Path, tmp_path: Path) -> None:
    """A head's base in GGUF is opened by PyTorch as this: here of Qwen3's family, whose answers are the file's."""
    file = write_model(answered / "base", tmp_path / "base.gguf", tokenizer_keys(answered / "base"))
    as_checkpoint(file, tmp_path / "made", False)
    build_engines(tmp_path / "made", tmp_path / "engines", Asking(answer_tokens=8, prompt_tokens=100))
    prompt, found = user_turn(Tokenizer.from_directory(answered / "base"), ""), []
    for model, more in ((file, {"build": {"kv_capacity": 128}}), (tmp_path / "engines", {})):
        with LLM(model, backend="numpy", drafting=None, **more) as llm:
            found.append(llm.generate(prompt, temperature=0.0, max_tokens=8).token_ids)
    assert found[0] == found[1]
