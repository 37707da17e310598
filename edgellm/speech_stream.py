"""`SpeechStream`: what somebody says, written down while it is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from edgellm.errors import is_whole, require
from edgellm.llm import LLM
from edgellm.multimodal.log_mel import Sound
from edgellm.requests import Request
from edgellm.transcription import LANGUAGES, Transcription, language_name, transcription_of, transcription_request


class SpeechStream:
    """Transcribes what somebody says while it goes on: give `hear` the samples as they come, and call `finish` then.

    Each call answers with all that was said so far. Windows of the encoder that are full keep their rows and KV rows;
    the open one is encoded anew. Of the text the last `unfixed` tokens are written anew, those before stay. What
    `finish` gives is what `LLM.transcribe` gives of the whole. A loud noise that comes late changes what all quiet
    parts before it look like to the model, so that they are encoded anew, too. Voxtral Realtime's rows and tokens stay
    where what they were written for was heard. Not thread-safe.
    """

    def __init__(
        self,
        llm: LLM,
        rate: int,
        language: str | None = None,
        prompt: str | None = None,
        unfixed: int = 5,
        **options: Any,
    ) -> None:
        """Samples have `rate` Hz; the others are those of `transcription_request`, `max_tokens` the most new ones of a
        call. Raises RequestError, AudioError for a wrong rate."""
        require(is_whole(unfixed, 0), "unfixed", unfixed, "a whole number of tokens, from 0 on")
        self._llm, self._prompt, self._unfixed, self._options = llm, prompt, unfixed, options
        self._family = llm.directory.config.family
        #: The language that was asked for, and the one that answers begin with since it is known; what they begin with.
        self._asked = self._language = language_name(language)
        self._sound, self._said, self._tokens = Sound(rate), "", 0
        #: Where sound is added: the prompt, and what was written that stays.
        self._ids: list[int] = []
        # The first request need not wait for what it shares with all, as the chat template's compilation.
        first = self._request(self._sound.followed_by(np.zeros(1)), self._asked, "")
        self._prompt_tokens = llm._runtime.count_tokens(first)
        assert llm.directory.audio is not None  # it counted a sound's tokens
        self._audio = llm.directory.audio

    @property
    def seconds(self) -> float:
        """How long what was heard is."""
        return self._sound.count / self._sound.rate

    def hear(self, samples: np.ndarray) -> Transcription:
        """What was said so far, with `samples` [N] or [N, channels] more. Raises AudioError, and ContextError where the
        whole is longer than the context holds; where it raises, nothing was heard: `finish`, and begin another stream
        with these samples."""
        sound = self._sound.followed_by(samples)
        if self._llm.directory.config.adds_sound:
            return self._written_on(sound)
        found = self._transcribed(sound, self._language, self._said)
        self._sound = sound
        if self._language is None and found.language in LANGUAGES.values():
            self._language = found.language
        tokenizer = self._llm.tokenizer
        ids = tokenizer.encode(found.text)
        self._tokens = len(ids)
        if self._language is not None or self._family != "qwen3_asr":  # answers of others name none
            kept = tokenizer.decode(ids[: max(0, len(ids) - self._unfixed)])
            self._said = kept.rstrip("\N{REPLACEMENT CHARACTER}")  # a part of a character
        return found

    def finish(self) -> Transcription:
        """What was said, written anew as a whole."""
        return self._transcribed(self._sound, self._asked, "")

    def _written_on(self, sound: Sound) -> Transcription:
        """What was said, with the tokens that are new behind those that stay."""
        request = transcription_request(self._family, sound, **self._options)
        known = self._ids or self._llm.call(lambda runtime: runtime.prompt_ids(request)).result()
        with self._llm.submit(replace(request, prompt=known)) as generation:
            response = generation.result()
        ids, first = [*known, *response.token_ids], self._prompt_tokens
        kept = ids[: self._audio.settled(sound.count / sound.rate)]
        self._sound, self._tokens, self._ids = sound, len(ids) - first, kept if len(kept) > first else []
        return Transcription(self._llm.tokenizer.decode(ids[first:]).strip(), None, response)

    def _transcribed(self, sound: Sound, language: str | None, said: str) -> Transcription:
        with self._llm.submit(self._request(sound, language, said)) as generation:
            return transcription_of(generation.result(), language, said)

    def _request(self, sound: Sound, language: str | None, said: str) -> Request:
        options = self._options
        if self._tokens and not said and options.get("max_tokens") is not None:  # what is known is written anew
            options = options | {"max_tokens": options["max_tokens"] + self._tokens}
        return transcription_request(self._family, sound, language, self._prompt, said, **options)
