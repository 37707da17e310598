"""Windows over texts, and files of examples: what counts, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.defaults import ModelDefaults
from edgellm.errors import RequestError
from edgellm.evaluation.inputs import Window, answer_windows, bos_token, load_examples, text_windows
from edgellm.text.tokenizer import Tokenizer


@given(count=st.integers(2, 200), window=st.integers(2, 50), data=st.data(), bos=st.sampled_from([None, 1000]))
def test_every_token_but_the_first_counts_once_with_as_much_context_as_there_is(count, window, data, bos):
    stride = data.draw(st.integers(1, window - 1))
    windows = text_windows(range(count), window, stride, bos)
    counted = [token for each in windows for token in each.counted]
    assert counted == list(range(1 if bos is None else 0, count))
    for number, each in enumerate(windows):
        assert 1 <= each.first < len(each.token_ids) <= window
        own = each.token_ids[0 if bos is None else 1 :]
        assert bos is None or each.token_ids[0] == bos
        assert own == tuple(range(number * stride, number * stride + len(own)))
        assert number == 0 or each.first >= window - stride


def test_windows_of_a_short_text():
    assert text_windows([5, 6, 7], 16, 8) == [Window((5, 6, 7), 1)]
    assert text_windows([5], 16, 8, bos=0) == [Window((0, 5), 1)]
    assert text_windows([1, 2, 3, 4, 5], 4, 2) == [Window((1, 2, 3, 4), 1), Window((3, 4, 5), 2)]
    assert text_windows([1, 2, 3, 4, 5], 4, 3, bos=0) == [Window((0, 1, 2, 3), 1), Window((0, 4, 5), 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3], 8, 8), "the stride is 8 and the window 8: expected a stride of 1 to 7 tokens"),
        (([1, 2, 3], 8, 0), "the stride is 0"),
        (([1], 8, 4), "the text has 1 tokens: expected two or more"),
        (([], 8, 4, 0), "the text has 0 tokens"),
    ],
)
def test_windows_that_count_nothing_are_refused(arguments, message):
    with pytest.raises(RequestError, match=message):
        text_windows(*arguments)


@pytest.fixture
def tokenizer(tiny_engines: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_engines)


def test_the_bos_token_is_there_where_the_tokenizer_puts_it(tokenizer: Tokenizer, checkpoint: Path) -> None:
    assert bos_token(tokenizer) is None and bos_token(tokenizer, False) is None
    with pytest.raises(RequestError, match=r"names none \(bos_token\)"):
        bos_token(tokenizer, True)
    named = Tokenizer.from_directory(checkpoint)  # names <s>, but does not put it before a text
    assert (bos_token(named), bos_token(named, True)) == (None, 0)
    from tokenizers import processors

    named._tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert (bos_token(named), bos_token(named, False)) == (0, None)


def test_examples_of_all_forms(tmp_path: Path, tokenizer: Tokenizer, tiny_engines: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text(
        '{"prompt": "one", "answer": "1"}\n\n'
        '{"prompt": "two", "completion": "2", "task": "count"}\n'
        '{"prompt": "three", "summary": "3"}\n'
        '{"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "four"}, '
        '{"role": "assistant", "content": "4"}]}\n'
    )
    found = load_examples(path)
    assert [(each.messages[-1]["content"], each.answer) for each in found] == [
        ("one", "1"),
        ("two", "2"),
        ("three", "3"),
        ("four", "4"),
    ]
    assert found[1].place == f"{path}, line 3" and found[3].messages[0]["role"] == "system"
    assert load_examples(path, 2) == found[:2]
    windows = answer_windows(found, tokenizer, ModelDefaults(tiny_engines), 96)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "one"}])
    assert windows[0] == Window((*prompt, *tokenizer.encode("1")), len(prompt))
    with pytest.raises(RequestError, match=r"line 5: prompt and answer have \d+ and 1 tokens: expected .* up to 30"):
        answer_windows(found, tokenizer, ModelDefaults(tiny_engines), 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "are empty: expected a JSON object on each line"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": ', "line 2 is not valid JSON"),
        ('["a", "b"]', "line 1: found no object; expected the key prompt and one of answer, completion, summary"),
        ('{"prompt": "a"}', "line 1: found prompt; expected"),
        ('{"answer": "a"}', "line 1: found answer; expected"),
        ('{"prompt": "a", "answer": "b", "summary": "c"}', "line 1: found prompt, answer, summary; expected"),
        ('{"messages": [], "prompt": "a"}', "line 1: found messages, prompt; expected"),
        ('{"prompt": 3, "answer": "b"}', "line 1: message 1"),
        ('{"prompt": "a", "answer": 3}', "line 1: message 2"),
        ('{"prompt": "a", "answer": " "}', "line 1: the expected answer is ' ': expected text"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1: the expected answer is 'a'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 1: nothing is asked"),
        ('{"messages": []}', "line 1: there are no messages"),
    ],
)
def test_wrong_examples_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "examples.jsonl").write_text(text)
    with pytest.raises(RequestError, match=message):
        load_examples(tmp_path / "examples.jsonl")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"the examples .*nowhere.jsonl cannot be read: No such file"):
        load_examples(tmp_path / "nowhere.jsonl")
