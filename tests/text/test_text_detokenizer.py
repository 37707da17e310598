"""The streaming detokenizer against the decoding of the whole, by the tokenizers library and by Python's own UTF-8."""

# ruff: noqa: RUF001
from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as LibraryTokenizer

from edgellm.text.output import byte_level_characters
from edgellm.text.tokenizer import Tokenizer

TEXTS = (
    "Hello, world! It's 21:05 - isn't it?",
    "  two leading spaces, a\ttab and\n\n  lines  ",
    "Grüße aus Köln: Straße, naïve café, œuvre",
    "Привет, как дела? Їжак і ґанок",
    "你好，世界！机器人在桌子上。",
    "こんにちは、ロボットです。カタカナと漢字",
    "안녕하세요 로봇입니다",
    "नमस्ते दुनिया, क्षत्रिय",
    "السلام عليكم، كيف حالك؟",
    "שלום עולם",
    "สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, 🤖🔋",
    "math: ∑∫√ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u200d\ufeff end",
    "a genuine \ufffd replacement character, \ufffd\ufffd\ufffd\ufffd\ufffd\ufffd and on",
    "\x00\x01\x7f control",
)


PIECES = "▁ ▁▁ ▁a ▁the ▁robot l o ll h e He Hel w or ld r t i s ! , ▁ü é 你 好 ， . \u0940 \u200d"
WORDS = "[UNK] [CLS] hello world ##s ##ing do n ' t , . ! ? it is go"


def byte_level_tokenizer() -> LibraryTokenizer:
    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["<think>", "<｜tool｜>", "ünï"])
    return tokenizer


def byte_fallback_tokenizer(metaspace: bool = False) -> LibraryTokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in dict.fromkeys(PIECES.split()) if piece not in pieces]
    pieces += [chr(code) for code in range(33, 127) if chr(code) not in pieces]
    tokenizer = LibraryTokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if metaspace:
        steps = [decoders.ByteFallback(), decoders.Metaspace()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def wordpiece_tokenizer() -> LibraryTokenizer:
    tokenizer = LibraryTokenizer(models.WordPiece({w: i for i, w in enumerate(WORDS.split())}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return tokenizer


LIBRARY_TOKENIZERS = {
    "byte_level": byte_level_tokenizer(),
    "byte_fallback": byte_fallback_tokenizer(),
    "metaspace": byte_fallback_tokenizer(metaspace=True),
    "wordpiece": wordpiece_tokenizer(),
}


@pytest.fixture(params=LIBRARY_TOKENIZERS)
def library(request):
    return LIBRARY_TOKENIZERS[request.param]


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_streams_texts_of_many_scripts_unchanged(name, text):
    library = LIBRARY_TOKENIZERS[name]
    ids = library.encode(text).ids
    pieces = streamed(Tokenizer(library), ids)
    assert "".join(pieces) == text
    assert "".join(pieces) == library.decode(ids)


@pytest.mark.parametrize("text", [text for text in TEXTS if "\ufffd" not in text])
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_never_emits_part_of_a_character(name, text):
    """Every prefix of the stream is a prefix of the text, as far as the characters that are complete."""
    library = LIBRARY_TOKENIZERS[name]
    tokenizer = Tokenizer(library)
    ids = library.encode(text).ids
    pieces = streamed(tokenizer, ids)
    assert all("\ufffd" not in piece for piece in pieces)
    for count in range(len(ids) + 1):
        assert text.startswith("".join(pieces[:count]))
        shown = "".join(streamed(tokenizer, ids[:count]))
        assert shown.rstrip("\ufffd") == "".join(pieces[:count])


@pytest.mark.parametrize("skip", [True, False])
def test_random_byte_level_ids_equal_the_library(skip):
    library = LIBRARY_TOKENIZERS["byte_level"]
    tokenizer = Tokenizer(library)
    generator = random.Random(1)
    for _ in range(400):
        ids = [generator.randrange(library.get_vocab_size()) for _ in range(generator.randrange(1, 40))]
        assert "".join(streamed(tokenizer, ids, skip)) == library.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["wordpiece", "byte_fallback", "metaspace"])
def test_random_text_ids_equal_the_library(name):
    """Random ids without bytes: spaces at the start, between, after special tokens, and words glued together."""
    library = LIBRARY_TOKENIZERS[name]
    tokenizer = Tokenizer(library)
    ids_of_text = [i for i in range(library.get_vocab_size()) if not library.id_to_token(i).startswith("<0x")]
    generator = random.Random(2)
    for _ in range(400):
        ids = [generator.choice(ids_of_text) for _ in range(generator.randrange(1, 30))]
        assert "".join(streamed(tokenizer, ids)) == library.decode(ids)


def test_random_fallback_bytes_equal_pythons_utf8():
    """Where a run of bytes is ill-formed, the ill-formed parts alone are replaced, as Python does it."""
    library = LIBRARY_TOKENIZERS["byte_fallback"]
    tokenizer = Tokenizer(library)
    generator = random.Random(3)
    space = library.token_to_id("▁a")
    for _ in range(400):
        runs = [bytes(generator.choice(INTERESTING_BYTES) for _ in range(generator.randrange(1, 9))) for _ in range(4)]
        ids, expected = [library.token_to_id("h")], "h"
        for run in runs:
            ids += [library.token_to_id(f"<0x{byte:02X}>") for byte in run] + [space]
            expected += run.decode("utf-8", errors="replace") + " a"
        assert "".join(streamed(tokenizer, ids)) == expected


INTERESTING_BYTES = [
    *b"a \n",
    0x80,
    0x9F,
    0xA0,
    0xBF,
    0xC0,
    0xC3,
    0xE0,
    0xE4,
    0xED,
    0xEF,
    0xF0,
    0x9F,
    0xA4,
    0xF4,
    0xF5,
    0xFF,
]


def test_well_formed_fallback_bytes_equal_the_library_at_the_start_too():
    library = LIBRARY_TOKENIZERS["byte_fallback"]
    tokenizer = Tokenizer(library)
    for data in (b" ", b"  a", b"a b", "é".encode(), " 你".encode(), b" \n"):
        for after in ([], [library.token_to_id("▁a")], [library.token_to_id("h"), library.token_to_id("▁▁")]):
            ids = [library.token_to_id(f"<0x{byte:02X}>") for byte in data] + after
            assert "".join(streamed(tokenizer, ids)) == library.decode(ids)


def test_a_character_appears_with_its_last_byte():
    library = LIBRARY_TOKENIZERS["byte_level"]
    ids = [library.token_to_id(character) for character in spelled("🤖".encode())]
    assert streamed(Tokenizer(library), ids) == ["", "", "", "🤖", ""]


def spelled(data: bytes) -> list[str]:
    characters = {byte: character for character, byte in byte_level_characters().items()}
    return [characters[byte] for byte in data]


def test_bytes_that_cannot_become_a_character_are_replaced_at_once():
    library = LIBRARY_TOKENIZERS["byte_level"]
    ids = [library.token_to_id(character) for character in spelled(b"\xf0\x9fA\xff\xe4\xbd")]
    assert streamed(Tokenizer(library), ids) == ["", "", "\ufffdA", "\ufffd", "", "", "\ufffd"]


def test_alphabet_is_the_librarys():
    assert set(byte_level_characters()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_level_characters().values()) == list(range(256))


def test_special_tokens_are_left_out_or_shown(library):
    tokenizer = Tokenizer(library)
    for token_id in tokenizer.special_token_ids:
        assert tokenizer.decode([token_id]) == ""
        assert library.id_to_token(token_id) in tokenizer.decode([token_id], skip_special_tokens=False)


def test_unknown_ids_have_no_text(library):
    tokenizer = Tokenizer(library)
    known = 5
    assert tokenizer.decode([known, library.get_vocab_size() + 7, known]) == tokenizer.decode([known, known])


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_cost_of_a_token_does_not_grow(name, monkeypatch):
    """The tokenizer is asked to decode at most a few tokens at a time, even within an endless invalid run."""
    library = LIBRARY_TOKENIZERS[name]
    tokenizer = Tokenizer(library)
    lengths = []
    decode = type(tokenizer._token_text).decode
    monkeypatch.setattr(
        type(tokenizer._token_text), "decode", lambda self, ids: lengths.append(len(ids)) or decode(self, ids)
    )
    lead = "ä" if name == "byte_level" else "<0xE4>"
    ids = library.encode("a robot looks at the \ufffd on the table").ids + [library.token_to_id(lead)] * 500
    text = "".join(streamed(tokenizer, ids))
    assert text.endswith("\ufffd" * 500)
    assert max(lengths, default=0) <= 8


def test_spaces_around_added_tokens_are_kept():
    library = byte_fallback_tokenizer()
    library.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer = Tokenizer(library)
    ids = [library.token_to_id(token) for token in ("▁a", "<tool>", "▁the", "</s>", "▁robot")]
    assert tokenizer.decode(ids) == library.decode(ids) == "a<tool> the robot"
