"""Speech as text: what a model that transcribes is asked, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.errors import RequestError, did_you_mean, require_kind
from edgellm.requests import Request, Response

_LANGUAGES = (
    "ar:Arabic yue:Cantonese zh:Chinese cs:Czech da:Danish nl:Dutch en:English fil:Filipino fi:Finnish fr:French "
    "de:German el:Greek hi:Hindi hu:Hungarian id:Indonesian it:Italian ja:Japanese ko:Korean mk:Macedonian ms:Malay "
    "fa:Persian pl:Polish pt:Portuguese ro:Romanian ru:Russian es:Spanish sv:Swedish th:Thai tr:Turkish vi:Vietnamese"
)
#: What Qwen3-ASR calls the languages that it was trained to be told, by their codes (ISO 639).
LANGUAGES: Mapping[str, str] = dict(pair.split(":") for pair in _LANGUAGES.split())
#: Qwen3-ASR's answer is the word, a language or None, the mark, and what was said.
_WORD, _MARK, _NO_LANGUAGE = "language ", "<asr_text>", "none"
#: Voxtral is asked so, for a sound and a language by its code; its answer is what was said alone (mistral-common's
#: transcription requests).
_VOXTRAL = "<s>[INST][BEGIN_AUDIO][AUDIO][/INST]{language}[TRANSCRIBE]"
#: Voxtral Realtime writes what it hears from there on.
_REALTIME = "<s>[STREAMING_PAD]"
#: The others but Qwen3-ASR are asked in words.
_IN_WORDS = "Write down what is said{language}, as it is said. Answer with the transcription alone.{words}"
#: Before the mark there are at most so many characters.
_LONGEST_HEAD = 64


@dataclass(frozen=True)
class Transcription:
    """What was said: the `text`, its `language` by name (None where the model named none), and the model's answer."""

    text: str
    language: str | None
    response: Response


def language_name(language: str | None) -> str | None:
    """What the model calls a language, by its code or name; RequestError for one that it was not trained to be told."""
    if language is None:
        return None
    require_kind(isinstance(language, str), "language", language, 'a code or a name, such as "en" or "English"')
    known = {**LANGUAGES} | {name.lower(): name for name in LANGUAGES.values()}
    found = known.get(language.lower(), known.get(language.lower().partition("-")[0]))  # of en-US the first part
    if found is None:
        raise RequestError(f"there is no language {language!r:.80}{did_you_mean(language.lower(), list(LANGUAGES))}")
    return found


def transcription_request(
    family: str, source: Any, language: str | None = None, prompt: str | None = None, said: str = "", **options: Any
) -> Request:
    """The request to a model of a `family` (`DecoderConfig.family`) for what is said in a sound, as `heard` takes
    it; greedy unless the `options` say otherwise.

    A `language` (a code or name; None: the model finds out) and what was `said` so far begin the answer. The `prompt`
    has names and words to expect, which Voxtral does not take. The `options` are those of `Request.of`. Raises
    RequestError.
    """
    require_kind(isinstance(prompt, (str, type(None))), "prompt", prompt, "text with names and words to expect")
    if options.get("params") is None:
        options.setdefault("temperature", 0)
    if family == "voxtral_realtime":
        if prompt or language or said:
            raise RequestError("Voxtral Realtime takes neither a language nor words to expect: it writes what it hears")
        return Request.of(prompt=_REALTIME, audio=[source], **options)
    if family == "voxtral":
        if prompt:
            raise RequestError("Voxtral takes no names and words to expect: leave `prompt` out")
        codes = {name: f"lang:{code}" for code, name in LANGUAGES.items()}
        asked = _VOXTRAL.format(language=codes.get(language_name(language) or "", ""))
        return Request.of(prompt=asked + said, audio=[source], **options)
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "audio", "audio": source}]}]
    if family in ("gemma4", "qwen2_audio"):
        name, words = language_name(language), f" Names and words to expect: {prompt}" if prompt else ""
        asked = _IN_WORDS.format(language=f" in {name}" if name else "", words=words)
        messages[0]["content"].append({"type": "text", "text": asked})
        if said:
            messages.append({"role": "assistant", "content": said})
            options["continue_final_message"] = True
        return Request.of(messages=messages, **options)
    if prompt:
        messages.insert(0, {"role": "system", "content": prompt})
    if (name := language_name(language)) is not None:
        messages.append({"role": "assistant", "content": f"{_WORD}{name}{_MARK}{said}"})
        options["continue_final_message"] = True
    return Request.of(messages=messages, **options)


class TranscriptReader:
    """Parts an answer, in pieces as they come, into the language and what was said."""

    def __init__(self, language: str | None = None) -> None:
        """A `language` that was asked for stands before the answer, which then is what was said alone."""
        self.language = language
        self._held: str | None = None if language is not None else ""

    def read(self, piece: str) -> str:
        """What of the text was said, as far as a piece more tells; what may be the language is held back."""
        if self._held is None:
            return piece
        self._held += piece
        head, mark, said = self._held.partition(_MARK)
        if mark:
            language = head.removeprefix(_WORD).strip()
            self.language = None if language.lower() in ("", _NO_LANGUAGE) else language
            self._held = None
            return said
        may_be_head = len(self._held) <= _LONGEST_HEAD and self._held[: len(_WORD)] == _WORD[: len(self._held)]
        return "" if may_be_head else self.end()

    def end(self) -> str:
        """What was held back, of an answer that has ended."""
        held, self._held = self._held or "", None
        return held


def transcription_of(response: Response, language: str | None = None, said: str = "") -> Transcription:
    """What an answer says; `language` and `said` as they were asked for."""
    reader = TranscriptReader(language_name(language))
    text = reader.read(response.text) + reader.end()
    return Transcription((said + text).strip(), reader.language, response)
