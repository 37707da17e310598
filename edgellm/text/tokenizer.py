"""A model's tokenizer: text to ids, ids to text, conversations to prompts.

Text in a conversation that looks like a special token stays text: it is disguised from the template (`Disguise`), and
the template's own special tokens are found by anchors that nobody can write (`AnchoredTokenizer`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from edgellm.engines.formats.small_files import check_tokenizer_file, encoded, read_tokenizer
from edgellm.engines.formats.strict_formats import JSONObject
from edgellm.errors import ContextError, EngineDirectoryError, RequestError, TemplateError, require_kind, shown
from edgellm.text.marked_messages import EarlierCalls, FinalMessage, WriteCalls
from edgellm.text.messages import check_encodable, checked_messages, free_marks, strings_in, unsplit_parts
from edgellm.text.output import Detokenizer, TokenText
from edgellm.text.template import NAMED_TOKENS, ChatTemplate
from edgellm.text.token_sizes import TokenSizes

#: Tokenizers count tokens in 32 bits.
_IDS = 2**32
#: The second supplementary private use area of Unicode, for anchors.
ANCHORS = range(0x100000, 0x10FFFE)
WriteImages = Callable[[str, Sequence[bool]], str]


class Tokenizer:
    """A tokenizer as published with a model, in `tokenizer.json` and `tokenizer_config.json`.

    `special_tokens` names the tokens that the model's files give a role ("bos_token": "<s>"); `special_token_ids` are
    all that the tokenizer calls special, which decoding leaves out. `chat_template` is None where the model has none;
    it may be set.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special_tokens: dict[str, str] | None = None,
        additional_special_tokens: Iterable[str] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        tokenizer.no_padding()  # a file keeps what its last user asked for, which asks nothing of other texts
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        #: The kinds of media that messages may show: one marker for each piece, where the template puts it.
        self.media: Collection[str] = ()
        #: Writes out the marker that the chat template has for an image, where that is not the image's token, by
        #: whether crops of each image are shown beside it (none said: of no image).
        self.write_images: WriteImages = lambda text, cropped: text
        #: Whether a raw prompt begins with what the tokenizer puts around a text: not where `write_images` writes that.
        self.begins_prompts = True
        #: Writes calls of earlier answers where the chat template does not; None leaves them out.
        self.write_calls: WriteCalls | None = None
        # What the model's files name as special, and tokenizer.json does not: no token is added.
        named = dict.fromkeys([*self.special_tokens.values(), *additional_special_tokens])
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        missing = [text for text in named if text not in special and tokenizer.token_to_id(text) is not None]
        if missing:
            tokenizer.add_special_tokens(missing)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id: token for token_id, token in added.items() if token.special}
        self._special_pattern = _pattern(token.content for token in self._special.values())
        self._matched_after_normalizing = any(token.normalized for token in self._special.values())
        self.special_token_ids = frozenset(self._special)
        self._token_text = TokenText(tokenizer, self.special_token_ids)

    @classmethod
    def from_directory(cls, directory: str | Path, vocab_size: int | None = None) -> Tokenizer:
        """Read a model's tokenizer files; a tokenizer that has ids beyond the model's `vocab_size` is refused."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.exists():
            raise EngineDirectoryError(
                f"{path} is missing: expected the tokenizer in the format of the tokenizers library, as published with "
                "the model (convert a tokenizer.model with transformers: AutoTokenizer.from_pretrained(...)"
                ".save_pretrained(...))"
            )
        if vocab_size is None:
            parsed = read_tokenizer(path, EngineDirectoryError)
        else:
            parsed = check_tokenizer_file(path, vocab_size, EngineDirectoryError)
        config = read_json_object(directory / "special_tokens_map.json")
        config |= read_json_object(directory / "tokenizer_config.json")
        named = {name: text for name in NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
        additional = _additional_special_tokens(config, directory)
        return cls(parsed, named, additional, ChatTemplate.from_directory(directory, config))

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included; a model's vocabulary may be padded beyond it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def definition(self) -> str:
        """The tokenizer as text of a `tokenizer.json`, with the special tokens that other files name."""
        return self._tokenizer.to_str()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of the tokenizer's own end-of-sequence token, where it names one."""
        token = self.special_tokens.get("eos_token")
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        return () if token_id is None else (token_id,)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary, or None."""
        check_encodable(token, "a token")
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """A token's text in the vocabulary (byte-level alphabet and all), or None for an unknown id."""
        known = _checked_ids([token_id])
        return self._tokenizer.id_to_token(known[0]) if known else None

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for; None where it is a piece of text."""
        return self._token_text[token_id].data

    def encode(self, text: str, add_special_tokens: bool = True, capacity: int | None = None) -> list[int]:
        """The ids of raw text; special tokens written in it are recognized.

        `add_special_tokens` adds what the tokenizer puts around a text, usually the beginning of sequence. Raises
        ContextError, before anything is encoded, for a text so long that it cannot fit a context of `capacity` tokens
        together with one of an answer; one that is not as long may have too many all the same.
        """
        check_encodable(text, "the prompt")
        self._check_size(text, capacity)
        return encoded(self._tokenizer, text, add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        capacity: int | None = None,
        cropped: Sequence[bool] = (),
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The ids of a conversation, rendered by the chat template, up to where the model's answer begins.

        Messages have a `role` and a `content` (text, or a list of parts); no text in them becomes a special token.
        `variables` are handed to the template as they are (`enable_thinking=False`). With `continue_final_message` the
        last message, an assistant's, is not closed: the ids end with its text. Raises RequestError where the template
        does not write that out. `capacity` is that of `encode`, `cropped` that of `write_images`.
        """
        require_kind(isinstance(tools, (list, tuple, type(None))), "tools", tools, "a list of tools, or None")
        checked = checked_messages(messages, self.media)
        for message in checked:
            message["content"] = unsplit_parts(message["content"], self._special_pattern)
        template = self._required_template()
        fitted = template.fitted(checked, bool(tools))
        values = {"messages": fitted, "tools": list(tools) if tools else None, **variables}
        final = None
        try:
            texts = strings_in(values)
            for text in texts:
                check_encodable(text, "a message")
            if continue_final_message:
                final = FinalMessage(values["messages"][-1], texts)
                values["messages"] = [*values["messages"][:-1], final.marked]
            disguise = Disguise(self._special_pattern, values)
            given = disguise.apply(values)
        except RecursionError as error:
            raise RequestError("messages, tools or variables are nested too deeply, or hold themselves") from error
        calls = EarlierCalls(given, self.write_calls, template)
        begins = add_generation_prompt and final is None
        rendered = calls.put_into(template.render(calls.values, self.special_tokens, add_generation_prompt=begins))
        if final is not None:
            rendered = final.cut(rendered, given["messages"][-1])
        rendered = self.write_images(rendered, cropped)
        self._check_size(disguise.undo(rendered), capacity)
        if disguise.is_needed or self._matched_after_normalizing:
            return self._anchored.encode(rendered, disguise)
        return encoded(self._tokenizer, rendered)

    def template_variables(self) -> frozenset[str]:
        """The names of the variables that the chat template reads ("messages", "tools", ...); raises TemplateError."""
        return self._required_template().template_variables

    @property
    def template_origin(self) -> str:
        """Where the chat template is from, for messages; raises TemplateError where there is none."""
        return self._required_template().origin

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True, shown_ids: Iterable[int] = ()) -> str:
        """The text of ids; equals what a `Detokenizer` gives for the same ids. Unknown ids have no text."""
        detokenizer = self.detokenizer(skip_special_tokens, shown_ids)
        return "".join([*map(detokenizer.push, _checked_ids(token_ids)), detokenizer.finish()])

    def detokenizer(self, skip_special_tokens: bool = True, shown_ids: Iterable[int] = ()) -> Detokenizer:
        """A new streaming detokenizer; special tokens of `shown_ids` are not skipped."""
        return Detokenizer(self._token_text, skip_special_tokens, frozenset(shown_ids))

    def _check_size(self, text: str, capacity: int | None) -> None:
        """Raise ContextError for a text that has, whatever is in it, too many tokens for a context."""
        least = 0 if capacity is None or len(text.encode()) < capacity else self._sizes.least_tokens(text)
        if capacity is not None and least >= capacity:
            raise ContextError.of_prompt(least, capacity, is_least=True)

    @cached_property
    def _sizes(self) -> TokenSizes:
        return TokenSizes(self._tokenizer)

    @cached_property
    def _anchored(self) -> AnchoredTokenizer:
        return AnchoredTokenizer(self._tokenizer, self._special)

    def _required_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise TemplateError(
                "the model has no chat template: send a raw prompt (edgellm generate --raw), or name a template "
                "(--chat-template FILE)"
            )
        return self.chat_template


def _checked_ids(token_ids: Iterable[int]) -> list[int]:
    """Token ids without those that no tokenizer has; RequestError for what are no whole numbers."""
    try:
        ids = list(token_ids)
    except TypeError as error:
        raise RequestError(f"token ids are a {type(token_ids).__name__}: expected a list of whole numbers") from error
    if wrong := [each for each in ids if not isinstance(each, Integral)]:
        raise RequestError(f"{shown(wrong[0])} is among the token ids: expected whole numbers")
    return [int(each) for each in ids if 0 <= each < _IDS]


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file; raises `EngineDirectoryError`."""
    return JSONObject.read(path, EngineDirectoryError).values if path.exists() else {}


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _additional_special_tokens(config: dict[str, Any], directory: Path) -> list[str]:
    found: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values = config.get(key) or []
        values = list(values.values()) if isinstance(values, dict) else values
        if not isinstance(values, list):
            raise EngineDirectoryError(
                f"{directory / 'tokenizer_config.json'}: {key} is {values!r:.60}, expected a list of tokens. Copy the "
                "file anew from where the model was published"
            )
        found += [text for text in map(_token_text, values) if text is not None]
    return found


def _pattern(contents: Iterable[str], rule: Callable[[str], str] = re.escape) -> re.Pattern[str]:
    """A pattern for any of some texts, the longest at the leftmost place."""
    return re.compile("|".join(rule(content) for content in sorted(contents, key=len, reverse=True)) or r"(?!)")


class Disguise:
    """Replaces special tokens' text in the values that a template is given, and undoes it in the rendered text."""

    def __init__(self, pattern: re.Pattern[str], values: Any) -> None:
        """`values` is everything the template will be given from outside: nested lists, dictionaries and strings."""
        texts = strings_in(values)
        found = dict.fromkeys(each for text in texts for each in pattern.findall(text))
        self._pattern = pattern
        self._characters = dict(zip(found, free_marks(texts), strict=False)) if found else {}
        self._originals = str.maketrans({character: text for text, character in self._characters.items()})

    @property
    def is_needed(self) -> bool:
        """Whether any special token's text was found."""
        return bool(self._characters)

    def apply(self, value: Any) -> Any:
        """A copy of `value` in which special tokens' text is disguised, dictionary keys included."""
        if not self.is_needed:
            return value
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._characters[match[0]], value)
        if isinstance(value, dict):
            return {self.apply(key): self.apply(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.apply(item) for item in value]
        return value

    def undo(self, text: str) -> str:
        """`text` with the disguised special tokens' text as it was."""
        return text.translate(self._originals)


class AnchoredTokenizer:
    """A copy of a tokenizer in which special tokens' text is plain text, and secret anchors stand for the tokens."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special: dict[int, AddedToken]) -> None:
        """`special` are the special tokens by id."""
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        whole_words = {token.content for token in special.values() if token.single_word}
        # As tokenizers match them: the longest at the leftmost place, some only where no word goes on.
        self._pattern = _pattern(
            (token.content for token in special.values()),
            lambda text: rf"(?<!\w){re.escape(text)}(?!\w)" if text in whole_words else re.escape(text),
        )
        secret = "".join(chr(secrets.choice(ANCHORS)) for _ in range(6))
        self._anchors: dict[str, str] = {}
        self._ids: dict[int, int] = {}
        for number, (token_id, token) in enumerate(special.items()):
            anchor = secret + chr(ANCHORS.start + number)
            self._anchors[token.content] = anchor
            # Whether it is a word of its own is said by the pattern.
            strips = {"lstrip": token.lstrip, "rstrip": token.rstrip}
            self._tokenizer.add_tokens([AddedToken(anchor, **strips, normalized=False, special=False)])
            self._ids[self._tokenizer.token_to_id(anchor)] = token_id  # type: ignore[index]

    def encode(self, rendered: str, disguise: Disguise) -> list[int]:
        """The ids of a rendered template: its own special tokens as such, disguised ones as plain text."""
        anchored = self._pattern.sub(lambda match: self._anchors[match[0]], rendered)
        ids = encoded(self._tokenizer, disguise.undo(anchored))
        return [self._ids.get(token_id, token_id) for token_id in ids]
