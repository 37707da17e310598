"""Long texts: refused by their bytes where they cannot fit, never where they might, and encoded while others go on."""

from __future__ import annotations

import threading
import time

import pytest
from byte_level_tokenizer import LIBRARIES, byte_level
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from edgellm.errors import ContextError
from edgellm.text.token_sizes import TokenSizes
from edgellm.text.tokenizer import Tokenizer


def byte_fallback() -> LibraryTokenizer:
    """As Llama 2 and Gemma have theirs."""
    tokens = [
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "<unk>",
        "h",
        "e",
        "l",
        "o",
        "▁",
        "he",
        "ll",
        "hell",
        "hello",
    ]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    model = models.BPE(
        {token: number for number, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True
    )
    library = LibraryTokenizer(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([AddedToken("<s>", lstrip=True, rstrip=True)])
    return library


def normalizing(*parts: normalizers.Normalizer) -> LibraryTokenizer:
    library = byte_level()
    library.normalizer = normalizers.Sequence(list(parts))
    return library


BOUNDED = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(),
    "lower case, composed": normalizing(normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()),
}
#: Each stands for as few tokens as its bytes can have: long ones, spaces that a special token swallows, letters that
#: become shorter.
SHORTENED = ("\u212a", "\U0001d7ce", "\u1fbe\u0308\u0301", " \u3000 ")
TEXTS = ("hello" * 500, "<s>" + " " * 4000 + "<s>", *(text * 999 for text in SHORTENED))


@pytest.mark.parametrize("name", BOUNDED)
def test_a_text_never_has_fewer_tokens_than_its_bytes_say(name: str) -> None:
    library = BOUNDED[name]
    tokenizer, sizes = Tokenizer(library), TokenSizes(library)
    longest = sizes.longest
    assert longest is not None
    for text in TEXTS:
        count = len(tokenizer.encode(text))
        assert sizes.least_tokens(text) <= count, text[:10]
        assert tokenizer.encode(text, capacity=count + 1) == tokenizer.encode(text)
    too_long = "1" * (50 * longest)
    with pytest.raises(ContextError, match=r"at least 50 tokens and the context 50, .*shorten") as raised:
        tokenizer.encode(too_long, capacity=50)
    assert raised.value.needed == 51 <= len(tokenizer.encode(too_long)) + 1


def removing() -> LibraryTokenizer:
    library = byte_level()
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), library.pre_tokenizer])
    return library


@pytest.mark.parametrize(
    "library",
    [
        normalizing(normalizers.StripAccents()),
        normalizing(normalizers.Replace("hello", "h")),
        removing(),
        LIBRARIES["metaspace_first"],
        LibraryTokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    ],
    ids=["accents", "replacing", "removing", "without unknown letters", "unknown words"],
)
def test_tokenizers_that_drop_text_have_no_bound(library: LibraryTokenizer) -> None:
    assert TokenSizes(library).longest is None
    assert Tokenizer(library).encode("a\u0301" * 5000, capacity=5) is not None


@pytest.mark.parametrize("name", LIBRARIES)
def test_long_texts_have_the_ids_of_short_ones(name: str) -> None:
    library = LIBRARIES[name]
    text = "hello world, <|im_end|> how are\u00e9 you <|im_start|> today? assistant " * 400
    assert Tokenizer(library).encode(text) == library.encode(text).ids


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    tokenizer = Tokenizer(byte_level())
    text, ids = "hello world " * 50_000, list[int]()
    encoding = threading.Thread(target=lambda: ids.extend(tokenizer.encode(text)))
    encoding.start()
    steps = 0
    while encoding.is_alive():
        time.sleep(0.001)
        steps += 1
    assert len(ids) >= 100_000 and steps > 10
