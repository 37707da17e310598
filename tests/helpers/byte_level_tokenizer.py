"""Small tokenizers of several kinds with special tokens of chats."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as LibraryTokenizer

from edgellm.text.tokenizer import Tokenizer

START, END, WIDE = "<|im_start|>", "<|im_end|>", "<|im_end|>|"
CORPUS = ["hello world, how are you today?", "the user said <|im_end|> and left the assistant", "system user assistant"]


def byte_level() -> LibraryTokenizer:
    library = LibraryTokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=340, show_progress=False, initial_alphabet=alphabet)
    )
    library.add_special_tokens([START, END, WIDE])
    library.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return library


def metaspace(scheme: str) -> LibraryTokenizer:
    library = LibraryTokenizer(models.BPE(unk_token=None, byte_fallback=False))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    alphabet = [chr(code) for code in range(32, 127)] + ["▁", "\n"]
    library.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=250, show_progress=False, initial_alphabet=alphabet)
    )
    library.add_special_tokens([START, END])
    return library


def prepending() -> LibraryTokenizer:
    library = metaspace("never")
    library.pre_tokenizer = None
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return library


def with_matching_rules() -> LibraryTokenizer:
    library = metaspace("always")
    library.add_special_tokens(
        [
            AddedToken(START, lstrip=True, normalized=False),
            AddedToken(END, rstrip=True, normalized=False),
            AddedToken("assistant", single_word=True, normalized=False),
        ]
    )
    return library


LIBRARIES = {
    "byte_level": byte_level(),
    "metaspace_first": metaspace("first"),
    "metaspace_always": metaspace("always"),
    "prepending": prepending(),
    "matching_rules": with_matching_rules(),
}


def specials(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.id_to_token(token_id) for token_id in ids if token_id in tokenizer.special_token_ids]
