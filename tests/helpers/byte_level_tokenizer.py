"""A small byte-level tokenizer with special tokens of chats."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
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


def specials(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.id_to_token(token_id) for token_id in ids if token_id in tokenizer.special_token_ids]
