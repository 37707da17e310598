"""Tokenizers of GGUF files: the ids of SentencePiece, and of tokenizers as they are published beside checkpoints."""

from __future__ import annotations

import importlib.util
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf_models import byte_pairs
from gguf_writing import write_gguf
from golden_files import golden_folder
from tokenizers import AddedToken, models, trainers

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.gguf_file import open_split
from edgellm.engines.gguf.metadata import Metadata
from edgellm.engines.gguf.model_config import end_tokens
from edgellm.engines.gguf.tokenizer import tokenizer_config, tokenizer_json

GOLDEN = json.loads((golden_folder("gguf") / "pieces.json").read_text(encoding="utf-8"))
TEXTS = [
    *GOLDEN["texts"],
    "Cafe\u0301 d\u0065\u0301ja\u0300 vu, A\u030angstro\u0308m",
    "I'LL we've THEY'D it's don'T",
    "HelloWorld HTTPServer iPhone SOME_CONST x1y2 a/b//c\r\n\r\n  \t end  ",
    "हिन्दी में लिखा हुआ वाक्य १२३, ไทย ๑๒๓ ภาษา",
    "١٢٣٤٥ и ½ ² ①",
]


def _metadata(tmp_path: Path, architecture: str = "llama", **values: Any) -> Metadata:
    """The metadata of a file with these keys of the tokenizer, `chat_template` with its own."""
    keys = {f"tokenizer.{'' if key.startswith('chat_') else 'ggml.'}{key}": value for key, value in values.items()}
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": architecture} | keys, {})
    return Metadata(open_split(path))


def _read(metadata: Metadata) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))


@pytest.mark.parametrize("variant", ["prefixed", "plain"])
def test_pieces_are_those_of_sentencepiece(tmp_path: Path, variant: str) -> None:
    values = dict(GOLDEN[variant])
    expected = values.pop("ids")
    tokenizer = _read(_metadata(tmp_path, model="llama", **values))
    for text, ids in zip(GOLDEN["texts"], expected, strict=True):
        if "<s>" in text:  # which SentencePiece takes for text, and published tokenizers for a token
            assert tokenizer.encode(text).ids[1] == values["bos_token_id"]
            continue
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.encode(text).ids == [values["bos_token_id"], *ids]
        assert tokenizer.decode(ids) == text


_CONTRACTED, _REST = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
#: By `pre`, as published: the normalizer, the patterns that split texts, and whether words need no merges.
PUBLISHED: dict[str, tuple[str | None, list[Any], bool]] = {
    "llama-bpe": (None, [rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_OTHERS}|{_REST}"], True),
    "dbrx": (None, [rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_OTHERS}|{_REST}"], False),
    "qwen2": ("NFC", [rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_OTHERS}|{_REST}"], False),
    "qwen35": (
        "NFC",
        [
            rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
        ],
        False,
    ),
    "tekken": (
        None,
        [
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
        ],
        True,
    ),
    "gpt-4o": (
        None,
        [
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTED}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTED}?"
            rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
        ],
        False,
    ),
    "smollm": (None, [{"type": "Digits", "individual_digits": True}, None], False),
    "gpt-2": (None, [None], False),
    "hunyuan-dense": (
        None,
        [
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            rf"""| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}""",
        ],
        False,
    ),
}


def _published(pre: str) -> tokenizers.Tokenizer:
    """A small tokenizer as it would be published, trained on the texts, with two special tokens behind the others."""
    normalizer, splits, whole = PUBLISHED[pre]
    steps = [
        each
        if isinstance(each, dict)
        else {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in splits
        if each is not None
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": None in splits})
    made = tokenizers.Tokenizer(models.BPE())
    described = json.loads(made.to_str())
    described["normalizer"] = normalizer and {"type": normalizer}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    described["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    made = tokenizers.Tokenizer.from_str(json.dumps(described))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS * 5, trainer)
    made.add_special_tokens([AddedToken("<|begin|>", normalized=False), AddedToken("<|im_end|>", normalized=False)])
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    described = json.loads(made.to_str())
    described["model"]["ignore_merges"] = whole
    return tokenizers.Tokenizer.from_str(json.dumps(described))


def _converted(published: tokenizers.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """Its metadata, without the beginning of the keys."""
    own = {"bos_token_id": published.token_to_id("<|begin|>"), "eos_token_id": published.token_to_id("<|im_end|>")}
    return byte_pairs(published, pre) | own | {"add_bos_token": False} | more


@pytest.mark.parametrize("pre", PUBLISHED)
def test_words_are_those_of_published_tokenizers(tmp_path: Path, pre: str) -> None:
    published = _published(pre)
    found = _read(_metadata(tmp_path, **_converted(published, pre)))
    for text in [*TEXTS, "<|begin|>system\nYou are <tool> and<|im_end|>\n"]:
        expected = published.encode(text).ids
        assert found.encode(text).ids == expected
        for skip in (True, False):
            assert found.decode(expected, skip_special_tokens=skip) == published.decode(
                expected, skip_special_tokens=skip
            )
    assert found.get_vocab() == published.get_vocab()
    special = {token.content: token.special for token in found.get_added_tokens_decoder().values()}
    assert special == {"<|begin|>": True, "<|im_end|>": True, "<tool>": False}


def test_pres_differ(tmp_path: Path) -> None:
    """On these texts, so that one cannot be taken for another."""
    published = _published("gpt-2")
    found = set()
    for pre in PUBLISHED:
        tokenizer = _read(_metadata(tmp_path, **_converted(published, pre)))
        words = [tokenizer.pre_tokenizer.pre_tokenize_str(text) for text in TEXTS]
        found.add(json.dumps([words, tokenizer.normalizer is None], default=str))
    assert len(found) == len(PUBLISHED) - 1  # dbrx splits as llama-bpe


def test_texts_begin_and_end_as_the_file_says(tmp_path: Path) -> None:
    published = _published("llama-bpe")
    values = _converted(published, "llama-bpe")
    bos, eos = values["bos_token_id"], values["eos_token_id"]
    plain = published.encode("hello").ids

    def ids(**changed: Any) -> list[int]:
        kept = {key: value for key, value in (values | changed).items() if value is not None}
        return _read(_metadata(tmp_path, **kept)).encode("hello").ids

    assert ids() == plain
    assert ids(add_bos_token=True) == [bos, *plain]
    assert ids(add_bos_token=None) == [bos, *plain]
    assert ids(add_bos_token=None, pre="qwen2") == plain
    assert ids(add_bos_token=True, add_eos_token=True) == [bos, *plain, eos]
    assert ids(add_bos_token=True, bos_token_id=None) == plain


def test_named_tokens_templates_and_ends(tmp_path: Path) -> None:
    values = _converted(_published("qwen2"), "qwen2", chat_template="{{ messages }}")
    metadata = _metadata(tmp_path, **values)
    assert tokenizer_config(metadata) == {
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
        "chat_template": "{{ messages }}",
    }
    more = {"chat_templates": ["tool_use"], "chat_template.tool_use": "{{ tools }}"}
    assert tokenizer_config(_metadata(tmp_path, **values, **more))["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]
    begin, end = values["bos_token_id"], values["eos_token_id"]
    assert end_tokens(metadata) == [end]
    assert end_tokens(_metadata(tmp_path, **(values | {"eos_token_id": 5, "eot_token_id": begin}))) == [5, begin, end]


def test_an_answer_of_gpt_oss_goes_on_behind_its_first_message(tmp_path: Path) -> None:
    marks = ["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>", "<|im_end|>"]
    values = {"tokens": ["a", *marks], "token_type": [1, 3, 3, 3, 3, 4], "eos_token_id": 2}
    assert end_tokens(_metadata(tmp_path, "gpt-oss", **values)) == [2, 1, 4]
    assert end_tokens(_metadata(tmp_path, "phi3", **values)) == [2, 1, 3, 4]


def test_gemma_ends_texts_and_turns(tmp_path: Path) -> None:
    values = {"tokens": ["<pad>", "<eos>", "<end_of_turn>"], "token_type": [3, 3, 3], "eos_token_id": 2}
    assert end_tokens(_metadata(tmp_path, "gemma3", **values)) == [2, 1]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"model": "bert"}, r"'tokenizer\.ggml\.model' is 'bert', expected gpt2, llama or gemma4"),
        ({"pre": "default"}, r"'tokenizer\.ggml\.pre' is 'default', expected one of llama-bpe, "),
        ({"pre": None}, r"'tokenizer\.ggml\.pre' is None"),
        ({"tokens": None}, "expected the tokens of the model"),
        ({"token_type": [1, 2]}, "is 'of 2 tokens', expected as many as tokens"),
        ({"merges": ["a b c d"]}, "is 'a b c d', expected two tokens with a space between"),
        ({"merges": ["ab"]}, "is 'ab', expected two tokens"),
        ({"bos_token_id": 5000, "add_bos_token": True}, "is 5000, expected one of"),
        ({"bos_token_id": "x", "add_bos_token": True}, "is 'x', expected a whole number"),
        ({"model": "llama"}, r"'tokenizer\.ggml\.scores' is 'of 0 tokens', expected as many as tokens"),
    ],
)
def test_tokenizers_that_are_wrong(tmp_path: Path, changed: dict[str, Any], expected: str) -> None:
    values = {
        key: value for key, value in (_converted(_published("qwen2"), "qwen2") | changed).items() if value is not None
    }
    with pytest.raises(CheckpointError, match=expected):
        _read(_metadata(tmp_path, **values))


def test_phi_3_has_what_is_behind_its_tokens(tmp_path: Path) -> None:
    values = dict(GOLDEN["prefixed"])
    del values["ids"]
    values["tokens"] = [*values["tokens"][:-1], "<|user|>"]
    values["token_type"] = [*values["token_type"][:-1], 3]
    text = "<|user|>\n  the <s> fox"
    last = len(values["tokens"]) - 1
    found = _read(_metadata(tmp_path, "phi3", model="llama", **values)).encode(text, add_special_tokens=False)
    assert found.ids[0] == last and found.tokens[1] == "\u2581the"
    plain = _read(_metadata(tmp_path, model="llama", **values)).encode(text, add_special_tokens=False)
    assert plain.ids[0] == last and plain.tokens[1] != "\u2581the"
    values["token_type"] = [
        4 if each == "</s>" else kind for each, kind in zip(values["tokens"], values["token_type"], strict=True)
    ]
    ended = _read(_metadata(tmp_path, "phi3", model="llama", **values)).encode("</s> the", add_special_tokens=False)
    assert ended.tokens == ["</s> ", "\u2581the"]


def test_the_unknown_token_is_one_where_a_text_has_it(tmp_path: Path) -> None:
    """As in published tokenizers of SentencePiece, and in llama.cpp."""
    values = {key: each for key, each in GOLDEN["plain"].items() if key != "ids"}
    unknown = values["token_type"].index(2)
    assert _read(_metadata(tmp_path, model="llama", **values)).encode(values["tokens"][unknown]).ids[-1] == unknown


def _of_pieces_with_merges() -> tokenizers.Tokenizer:
    """A small tokenizer as Gemma 4's is published: SentencePiece's, whose merges do not follow from scores."""
    space, marks = "\u2581", ["<pad>", "<eos>", "<bos>", "<unk>"]
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = tokenizers.normalizers.Replace(" ", space)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    steps = (tokenizers.decoders.Replace(space, " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse())
    made.decoder = tokenizers.decoders.Sequence(list(steps))
    own = [*marks, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        TEXTS[:6] * 5, trainers.BpeTrainer(vocab_size=700, special_tokens=own, show_progress=False)
    )
    described = json.loads(made.to_str())
    described["added_tokens"] = [each for each in described["added_tokens"] if each["content"] in marks]
    made = tokenizers.Tokenizer.from_str(json.dumps(described))
    made.add_special_tokens([AddedToken("<|turn>", normalized=False), AddedToken("<turn|>", normalized=False)])
    made.add_tokens([AddedToken(each, normalized=False) for each in ("<|channel>", "<|tool_response>", "<|im_end|>")])
    return made


def test_pieces_with_merges_of_their_own(tmp_path: Path) -> None:
    published = _of_pieces_with_merges()
    values = byte_pairs(published, "") | {"model": "gemma4", "add_space_prefix": False, "add_bos_token": True}
    for name in ("bos", "eos", "unk"):
        values[f"{'unknown' if name == 'unk' else name}_token_id"] = published.token_to_id(f"<{name}>")
    values["scores"] = [0.0] * len(values["tokens"])
    metadata = _metadata(tmp_path, "gemma4", **values)
    found, first = _read(metadata), values["bos_token_id"]
    early = _read(_metadata(tmp_path, "gemma4", **(values | {"add_bos_token": False})))
    assert early.to_str() == found.to_str()  # what the first published files say is wrong
    bytes_taken = 0
    for text in [*TEXTS, " two  spaces\n\n\nlines\t<|turn>user\n<|channel>x<turn|>\n"]:
        expected = published.encode(text).ids
        assert found.encode(text).ids == [first, *expected]
        assert found.decode(expected, skip_special_tokens=False) == published.decode(
            expected, skip_special_tokens=False
        )
        bytes_taken += sum(4 <= each < 260 for each in expected)
    assert bytes_taken > 10
    ends = [published.token_to_id(text) for text in ("<eos>", "<turn|>", "<|tool_response>")]
    assert end_tokens(metadata) == ends  # not that which is shown of another family
    with pytest.raises(CheckpointError, match="expected two tokens with a space between"):
        _read(_metadata(tmp_path, "gemma4", **(values | {"merges": ["ab"]})))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_no_value_does_more_than_an_error(tmp_path: Path, model: str) -> None:
    if model == "gpt2":
        values = _converted(_published("qwen2"), "qwen2", add_eos_token=True, unknown_token_id=3)
    else:
        values = {key: value for key, value in GOLDEN["prefixed"].items() if key != "ids"} | {"model": "llama"}
    wrong = ("x", "", True, -1, 7, 1 << 30, 0.5, float("nan"), [], [1], ["a", "b"], ["$A", ":1", " ", "\0"], [0.5])
    few = {
        "tokens": ["$A:1", "", "a", "b", "ab", "$B"],
        "token_type": [3, 3, 1, 1, 1, 4],
        "bos_token_id": 0,
        "add_bos_token": True,
    }
    few |= {"eos_token_id": 5, "merges": ["a b"], "scores": [float("nan"), 0.0, 0.0, 1.0, 2.0, -1.0]}
    for case in ({}, few):
        for key in values:
            for value in (*wrong, values[key]):
                try:
                    metadata = _metadata(tmp_path, **(values | case | {key: value}))
                    tokenizer_config(metadata)
                    end_tokens(metadata)
                    _read(metadata).encode("a text of ab")
                except CheckpointError:
                    continue
    assert _read(_metadata(tmp_path, **(values | few))).encode("ab").tokens[0] == "$A:1"


#: Vocabularies of published models that llama.cpp's source has, with texts and their ids; of known kinds.
VOCABULARIES = ("gemma-4", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "qwen35", "refact", "starcoder")


@pytest.mark.slow
@pytest.mark.parametrize("name", VOCABULARIES)
def test_published_vocabularies_give_the_ids_that_llama_cpp_has(name: str) -> None:
    """llama.cpp composes no characters, which the published tokenizers of Qwen do: such texts are left out."""
    converter = importlib.util.find_spec("convert_hf_to_gguf")
    if converter is None or converter.origin is None:
        pytest.skip("needs llama.cpp's source folder in PYTHONPATH")
    path = Path(converter.origin).parent / f"models/ggml-vocab-{name}.gguf"
    texts = path.with_name(f"{path.name}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_name(f"{path.name}.out").read_text().splitlines()
    tokenizer = _read(Metadata(open_split(path)))
    tried = 0
    for text, line in zip(texts, lines, strict=False):  # nothing stands behind the last mark
        if unicodedata.is_normalized("NFC", text):
            assert tokenizer.encode(text, add_special_tokens=False).ids == [int(each) for each in line.split()], text
            tried += 1
    assert tried > 40
