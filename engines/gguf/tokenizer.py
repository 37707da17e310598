"""The tokenizer of a GGUF file, as the tokenizers library has it, and what `tokenizer_config.json` would say of it.

Three kinds are known: "gpt2", byte pairs with merges, whose `pre` names how texts are split into words before; "llama",
SentencePiece's byte pairs, whose merges follow from the scores of what they give; and "gemma4", the same with merges.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from edgellm.engines.gguf.metadata import Metadata

if TYPE_CHECKING:
    import tokenizers

#: The types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_SPACE = "\u2581"
#: Of pieces that are looked for in others; SentencePiece's own have 16 characters unless it is told otherwise.
_LONGEST_PIECE = 1024
#: Of Phi-3's control tokens those with nothing of what is behind them.
_PLAIN = ("<unk>", "<s>", "<|endoftext|>")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(letters: str, digits: str, marks: str = "") -> str:
    """Contractions; `letters` behind at most one other character; `digits`; others, then ends of lines; ends of lines
    and spaces. `marks` are no others."""
    others = rf" ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}|{others}|{_ENDS}"


def _by_case(contractions: str, digits: str) -> str:
    """Words that begin with capitals, or consist of them; `contractions` belong to the word before."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = (rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{a}{lower}{b}{contractions}" for a, b in (("*", "+"), ("+", "*")))
    return rf"{'|'.join(words)}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"


class _Pre(NamedTuple):
    """How texts become words: by `pattern` (None: as GPT-2's), digits apart or not, behind what is split `before`;
    normalized to composed characters (`composes`). `whole`: a word of the vocabulary is a token, whatever merges say.
    `begins`: with BOS, unless the file says otherwise."""

    pattern: str | None = None
    apart: bool = False
    composes: bool = False
    whole: bool = False
    begins: bool = False
    before: tuple[str, ...] = ()


_LLAMA3 = _Pre(_words(r"\p{L}+", r"\p{N}{1,3}"), whole=True, begins=True)
_SEED = _Pre(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_ENDS}")
#: A mark of ASCII belongs to the letters of ASCII behind it; numbers, and Chinese and Japanese, are apart before.
_HUNYUAN = _Pre(
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _ENDS,
    before=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
)
#: By `tokenizer.ggml.pre`, of the families that there are.
_PRES = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3._replace(whole=False, begins=False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Pre(_words(r"\p{L}+", r"\p{N}"), composes=True)),
    "qwen35": _Pre(_words(r"[\p{L}\p{M}]+", r"\p{N}", r"\p{M}"), composes=True),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Pre(apart=True)),
    **dict.fromkeys(("gpt-2", "olmo", "exaone4"), _Pre()),
    "tekken": _Pre(_by_case("", r"\p{N}"), whole=True, begins=True),
    "gpt-4o": _Pre(_by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")),
    "seed-coder": _SEED,
    "hunyuan-dense": _HUNYUAN,
}


class _Vocabulary(NamedTuple):
    """Of each token its text, type, and id; unused ones are left out, of equal texts all but the first."""

    ids: dict[str, int]
    kinds: dict[str, int]
    texts: list[str]


def tokenizer_json(metadata: Metadata) -> dict[str, Any]:
    """What `tokenizer.json` would say; CheckpointError for a tokenizer of an unknown kind, or one that contradicts
    itself."""
    from tokenizers import AddedToken

    vocabulary, kind = _vocabulary(metadata), metadata.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, begins = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        prefixed = metadata.flag("tokenizer.ggml.add_space_prefix") is not False
        tokenizer, begins = _sentence_pieces(metadata, vocabulary, _merges(metadata, vocabulary), prefixed), True
    elif kind == "gemma4":
        tokenizer, begins = _sentence_pieces(metadata, vocabulary, _listed_merges(metadata, vocabulary), False), True
    else:
        raise metadata.error("tokenizer.ggml.model", kind, "gpt2, llama or gemma4")
    # Spaces and line ends behind Phi-3's own tokens belong to them.
    strips = metadata.architecture == "phi3" and kind == "llama"
    added = []
    for text, own in vocabulary.kinds.items():
        if text and own in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            strip = strips and (own == _CONTROL or text == "</s>") and text not in _PLAIN
            added.append(AddedToken(text, normalized=False, rstrip=strip, special=own != _USER_DEFINED))
    tokenizer.add_tokens(added)
    return json.loads(tokenizer.to_str()) | {"post_processor": _frame(metadata, vocabulary, begins)}


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """What `tokenizer_config.json` would say: named tokens and chat templates."""
    vocabulary = _vocabulary(metadata)
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {f"{short}_token": _named(metadata, vocabulary, name) for name, short in names.items()}
    config: dict[str, Any] = {key: text for key, text in found.items() if text is not None}
    template = metadata.text("tokenizer.chat_template")
    others = metadata.entries("tokenizer.chat_templates", str, "texts")
    named = {name: metadata.text(f"tokenizer.chat_template.{name}") for name in others}
    if template is not None and any(named.values()):
        templates = {"default": template} | {name: text for name, text in named.items() if text is not None}
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif template is not None:
        config["chat_template"] = template
    return config


def used_tokens(metadata: Metadata) -> list[tuple[int, str]]:
    """The ids and texts of tokens as published tokenizers have them: those of pieces that were defined by hand, whose
    spaces the file writes as such, and unused ones are left out."""
    vocabulary = _vocabulary(metadata)
    return [(index, text) for text, index in vocabulary.ids.items() if vocabulary.kinds[text] != _USER_DEFINED]


def _vocabulary(metadata: Metadata) -> _Vocabulary:
    texts = metadata.entries("tokenizer.ggml.tokens", str, "texts")
    if not texts:
        raise metadata.error("tokenizer.ggml.tokens", texts, "the tokens of the model")
    kinds = metadata.entries("tokenizer.ggml.token_type", int, "whole numbers") or [_NORMAL] * len(texts)
    if len(kinds) != len(texts):
        raise metadata.error("tokenizer.ggml.token_type", f"of {len(kinds)} tokens", f"as many as tokens, {len(texts)}")
    ids: dict[str, int] = {}
    for index, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind != _UNUSED:
            ids.setdefault(text, index)
    return _Vocabulary(ids, {text: kinds[index] for text, index in ids.items()}, texts)


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte pairs by merges, and whether texts begin with BOS."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.text("tokenizer.ggml.pre")
    pre = _PRES.get(name or "")
    if pre is None:
        words = f"one of {', '.join(_PRES)}, or the model's published tokenizer (edgellm build --tokenizer DIR)"
        raise metadata.error("tokenizer.ggml.pre", name, words)
    merges = _listed_merges(metadata, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=pre.whole))
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.apart else []
    splits += [pre_tokenizers.Split(Regex(each), "isolated") for each in (*pre.before, pre.pattern) if each is not None]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.begins


def _listed_merges(metadata: Metadata, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges that a file has."""
    merges, ids = [], vocabulary.ids
    for merge in metadata.entries("tokenizer.ggml.merges", str, "texts"):
        first, space, second = merge.partition(" ")
        if not (space and first in ids and second in ids and first + second in ids):
            raise metadata.error("tokenizer.ggml.merges", merge, "two tokens with a space between, which give a token")
        merges.append((first, second))
    return merges


def _sentence_pieces(
    metadata: Metadata, vocabulary: _Vocabulary, merges: list[tuple[str, str]], prefixed: bool
) -> tokenizers.Tokenizer:
    """Pieces with a mark for each space, and one before a text if it is `prefixed`; bytes stand for what is in no
    piece."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = _named(metadata, vocabulary, "unknown")
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    before = [normalizers.Prepend(_SPACE)] if prefixed else []
    after = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def _merges(metadata: Metadata, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every pair of pieces that gives one of up to `_LONGEST_PIECE` characters, those with the highest scores first, of
    equal ones the first pieces."""
    scores = metadata.entries("tokenizer.ggml.scores", float, "numbers")
    if len(scores) != len(vocabulary.texts):
        expected = f"as many as tokens, {len(vocabulary.texts)}"
        raise metadata.error("tokenizer.ggml.scores", f"of {len(scores)} tokens", expected)
    ids = {text: index for text, index in vocabulary.ids.items() if vocabulary.kinds[text] in (_NORMAL, _USER_DEFINED)}
    found = []
    for text, index in ids.items():
        for place in range(1, len(text) if len(text) <= _LONGEST_PIECE else 0):
            first, second = ids.get(text[:place]), ids.get(text[place:])
            if first is not None and second is not None:
                found.append((-scores[index], index, first, second))
    found.sort()
    return [(vocabulary.texts[first], vocabulary.texts[second]) for _, _, first, second in found]


def _frame(metadata: Metadata, vocabulary: _Vocabulary, begins: bool) -> dict[str, Any] | None:
    """What lets texts begin with BOS and end with EOS, as the file says or the kind of tokenizer has it."""
    ends, asked = metadata.flag("tokenizer.ggml.add_eos_token"), metadata.flag("tokenizer.ggml.add_bos_token")
    if metadata.text("tokenizer.ggml.model") == "gemma4":  # whose first files say, wrongly, that texts begin without
        asked = True
    first = _named(metadata, vocabulary, "bos") if (begins if asked is None else asked) else None
    last = _named(metadata, vocabulary, "eos") if ends else None
    if first is None and last is None:
        return None

    def framed(sequence: str, number: int) -> list[dict[str, Any]]:
        parts = (("SpecialToken", first), ("Sequence", sequence), ("SpecialToken", last))
        return [{kind: {"id": text, "type_id": number}} for kind, text in parts if text is not None]

    special = {
        text: {"id": text, "ids": [vocabulary.ids[text]], "tokens": [text]}
        for text in (first, last)
        if text is not None
    }
    both = [*framed("A", 0), *framed("B", 1)]
    return {"type": "TemplateProcessing", "single": framed("A", 0), "pair": both, "special_tokens": special}


def _named(metadata: Metadata, vocabulary: _Vocabulary, name: str) -> str | None:
    """The text of the token that the file gives a role; None where it gives none."""
    key = f"tokenizer.ggml.{name}_token_id"
    if metadata.get(key) is None:
        return None
    index = metadata.count(key)
    if index >= len(vocabulary.texts):
        raise metadata.error(key, index, f"one of {len(vocabulary.texts)} tokens")
    text = vocabulary.texts[index]
    return text if text in vocabulary.ids else None
