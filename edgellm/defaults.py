"""What a model is published with for its use: the system prompts of its conversations and its recommended sampling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from edgellm.engines.errors import at_place
from edgellm.engines.formats.small_files import read_text, size_limit
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.errors import EngineDirectoryError, RequestError, shown
from edgellm.sampling_params import SamplingParams, checked_value
from edgellm.text.messages import SYSTEM_ROLES, show_media
from edgellm.text.tokenizer import read_json_object

SYSTEM_PROMPT = "system_prompt.txt"
IMAGE_SYSTEM_PROMPT = "system_prompt_image.txt"
GENERATION_CONFIG = "generation_config.json"
#: What `GENERATION_CONFIG` may say of sampling; the last of greedy answers, too.
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class ModelDefaults:
    """The defaults of the model in an engine directory.

    `system_prompt` is that of conversations, `image_system_prompt` that of conversations which show images (the same
    where the model has no other); "" where there is none.
    """

    def __init__(self, directory: Path) -> None:
        """Reads the system prompts; raises EngineDirectoryError for a file that cannot be read."""
        self._path = directory / GENERATION_CONFIG
        self.system_prompt = _prompt_text(directory / SYSTEM_PROMPT) or ""
        own = _prompt_text(directory / IMAGE_SYSTEM_PROMPT)
        self.image_system_prompt = self.system_prompt if own is None else own

    @cached_property
    def _published(self) -> dict[str, Any]:
        return read_json_object(self._path)

    @cached_property
    def params(self) -> SamplingParams:
        """The sampling that `generation_config.json` recommends where it asks for sampling (`do_sample`), else greedy,
        with its `repetition_penalty` either way, as in transformers.

        The file is read when this is first asked for: answers that do not use it need no valid one. Raises
        EngineDirectoryError that names the file and the wrong value.
        """
        is_drawn = self._published.get("do_sample") is True
        keys, base = (SAMPLING_KEYS, {"temperature": 1.0}) if is_drawn else (SAMPLING_KEYS[-1:], {})
        found = {key: value for key in keys if (value := self._published.get(key)) is not None}
        with at_place(str(self._path), RequestError, EngineDirectoryError):
            return SamplingParams(**base | {key: checked_value(key, found[key]) for key in found})

    @property
    def unread(self) -> list[str]:
        """What changes answers in transformers of `generation_config.json`, whose `suppressed_tokens` are right."""
        published = self._published
        phrases = [ids for ids in published.get("bad_words_ids") or [] if len(ids) > 1]
        asked = {"no_repeat_ngram_size": published.get("no_repeat_ngram_size"), "bad_words_ids of several": phrases}
        return [name for name, value in asked.items() if value]

    @cached_property
    def suppressed_tokens(self) -> tuple[int, ...]:
        """The token ids that `generation_config.json` keeps out of every answer, as Gemma 4 12B does those of images
        and sounds: `suppress_tokens`, and `bad_words_ids` of one token. Raises EngineDirectoryError."""
        tokens, words = (self._published.get(key) or [] for key in ("suppress_tokens", "bad_words_ids"))
        for key, found in (("suppress_tokens", [tokens]), ("bad_words_ids", words)):
            are_lists = isinstance(found, list) and all(isinstance(ids, list) for ids in found)
            if not are_lists or not all(is_integer(each) for ids in found for each in ids):
                said = shown(self._published[key])
                raise EngineDirectoryError(f"{self._path}: {key} is {said}, expected a list of token ids")
        return (*tokens, *(ids[0] for ids in words if len(ids) == 1))

    def with_system_prompt(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages of a checked conversation (`checked_messages`) as the chat template gets them.

        Where none of them is a system message, which may be empty, the default prompt comes first, the one for images
        if any is shown.
        """
        if any(message["role"] in SYSTEM_ROLES for message in messages):
            return list(messages)
        prompt = self.image_system_prompt if show_media(messages, "image") else self.system_prompt
        return [{"role": "system", "content": prompt}, *messages] if prompt else list(messages)


def _prompt_text(path: Path) -> str | None:
    """The text of a prompt's file without line ends behind it; None where there is no file."""
    if not path.exists():
        return None
    return read_text(path, size_limit(path.name), EngineDirectoryError).rstrip("\r\n")
