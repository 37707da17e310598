"""`/v1/audio/transcriptions`: a sound in a form of several parts, what was said as its answer, whole or as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from email.parser import HeaderParser
from functools import partial
from typing import Any

from edgellm.http.answers import CompletionWriter, Piece, event
from edgellm.http.errors import HTTPError, checked, http_error, refused, wrong
from edgellm.http.fields import SAMPLING, Fields, ParsedRequest, ServedModel
from edgellm.requests import Response
from edgellm.transcription import LANGUAGES, TranscriptReader, language_name, transcription_request

_FORMATS = ("json", "text", "verbose_json")
_NO_TIMES = "the model does not say when anything was said, so that no times are known"
#: Fields whose values are no text, and numbers and truth values as JSON has them.
_TYPED = {*SAMPLING, "stream", "max_tokens", "deadline", "priority"} - {"stop", "bad_words"}
_JSON = re.compile(r"-?(0|[1-9]\d{0,30})(\.\d{1,30})?(e[-+]?\d{1,3})?|true|false")
#: A form's parts, and bytes of each but the file: far more than any field has.
_MOST_PARTS, _MOST_BYTES = 64, 1 << 16


def transcription(body: bytes, model: ServedModel) -> ParsedRequest:
    """A request to `/v1/audio/transcriptions`. Raises HTTPError."""
    from edgellm.multimodal.audio_input import heard

    form = parts_of_form(body)
    if "file" not in form:
        raise wrong("file", None, "the bytes of a sound, as a part of a form (multipart/form-data)")
    texts = {name.removesuffix("[]"): _value(name, part) for name, part in form.items() if name != "file" and part}
    fields = Fields(json.dumps(texts).encode(), model)
    request, language, prompt = fields.common(), fields.take("language", str), fields.take("prompt", str)
    shape = fields.take("response_format", str) or _FORMATS[0]
    fields.refuse("timestamp_granularities", "include", why=_NO_TIMES)
    fields.only("chunking_strategy", "auto", why="a sound is taken as a whole")
    params = fields.sampling("max_tokens")
    params = params if "temperature" in texts else replace(params, temperature=0.0)
    fields.end()
    if shape not in _FORMATS:
        raise wrong("response_format", shape, f"one of {', '.join(_FORMATS)}: {_NO_TIMES}")
    name = checked("language", language_name, language)
    try:
        sound = heard(form["file"])
    except Exception as error:
        raise http_error(error, {"": "file"}) from error
    ask = partial(transcription_request, model.family, sound, name, params=params, **request)
    asked = checked("prompt" if prompt else "language", ask, prompt)
    about: dict[str, Any] = {"ignored": tuple(fields.ignored), "fields": {"": "file"}}
    about["pixels"] = sound[0].nbytes // 3  # sounds share the room that there is for images
    echoed = {"language": name, "seconds": len(sound[0]) / sound[1], "format": shape}
    return ParsedRequest((asked,), fields.name, fields.stream, echoed=echoed, **about)


def parts_of_form(body: bytes) -> dict[str, bytes]:
    """The parts of a form (RFC 7578) by their names, of which the first line has what divides them. Raises HTTPError
    for what is no form, and for a name that is there twice."""
    divider, _, _ = body.partition(b"\r\n")
    pieces = (b"\r\n" + body).split(b"\r\n" + divider, _MOST_PARTS + 1)
    if not re.fullmatch(rb"--[^\r\n]{1,70}", divider) or not pieces[-1].startswith(b"--"):
        expected = f"expected multipart/form-data of at most {_MOST_PARTS} parts"
        raise HTTPError(400, f"the body is no form of several parts: {expected}", code="invalid_form")
    found: dict[str, bytes] = {}
    for piece in pieces[1:-1]:
        head, _, content = piece.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        headers = HeaderParser().parsestr(head[:_MOST_BYTES].decode("utf-8", "replace"))
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str) or name in found:
            raise HTTPError(400, f"the form has a part {name!r:.80} twice, or without a name", code="invalid_form")
        found[name] = content
    return found


def _value(name: str, part: bytes) -> Any:
    """A field's value, with the type that JSON has for it: a form has none."""
    try:
        text = part[:_MOST_BYTES].decode()
    except UnicodeDecodeError as error:
        raise refused(name[:80], f"{name[:80]} is no text in UTF-8") from error
    lower = text.lower()  # Python's clients write True
    return json.loads(lower) if name in _TYPED and _JSON.fullmatch(lower) else text


class TranscriptionWriter(CompletionWriter):
    """Writes what was said."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reader, self._written = TranscriptReader(self._asked.echoed["language"]), ""

    def whole(self, pieces: Sequence[Piece], responses: Sequence[Response]) -> dict[str, Any] | str:
        text = (self._reader.read(pieces[0].content) + self._reader.end()).strip()
        shape = self._asked.echoed["format"]
        if shape == "text":
            return f"{text}\n"
        if shape == "json":
            return {"text": text, "usage": self._tokens(responses)}
        codes = {name: code for code, name in LANGUAGES.items()}
        language = codes.get(self._reader.language or "", self._reader.language)
        duration = round(self._asked.echoed["seconds"], 3)
        return {"task": "transcribe", "language": language, "duration": duration, "text": text}

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        yield from self._delta_event(self._reader.read(piece.content))

    def ended(self, index: int, response: Response) -> Iterator[bytes]:
        yield from self._delta_event(self._reader.end())

    def end(self, responses: Sequence[Response]) -> Iterator[bytes]:
        usage = self._tokens(responses)
        yield event({"type": "transcript.text.done", "text": self._written.strip(), "usage": usage})

    def _delta_event(self, text: str) -> Iterator[bytes]:
        self._written += text
        if text:
            yield event({"type": "transcript.text.delta", "delta": text})

    def _tokens(self, responses: Sequence[Response]) -> Mapping[str, Any]:
        usage = self._usage(responses)
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        return {"type": "tokens", **counts, "total_tokens": usage["total_tokens"]}
