"""Speech as text in Python, on the command line and over HTTP, whole and while it goes on."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from command_line import Edgellm
from http_server import ServerProcess, running
from speech_models import encoded_frames
from synthetic_sound import RATE, sound, wav

from edgellm import LLM, AsyncLLM, DraftingConfig, SamplingParams, SpeechStream
from edgellm.errors import AudioError, ContextError, RequestError
from edgellm.http.errors import TRANSCRIPTIONS, HTTPError
from edgellm.http.fields import ServedModel
from edgellm.http.transcriptions import parts_of_form, transcription
from edgellm.multimodal.audio_input import heard
from edgellm.transcription import TranscriptReader, language_name, transcription_request

SPEECH = sound(3.0)
FILE = wav(SPEECH)
SHORT: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


def as_finished(llm: LLM, samples: np.ndarray, before: str, language: str | None = None) -> Any:
    """What a stream should end with: of the whole, so many tokens more than it has told `before`."""
    told = len(llm.tokenizer.encode(before))
    return llm.transcribe((samples, RATE), language, **SHORT | {"max_tokens": 12 + told})


@pytest.fixture(scope="module")
def llm(speech_engines: Path) -> Iterator[LLM]:
    with LLM(speech_engines, backend="numpy", drafting=None) as opened:
        yield opened


@pytest.mark.parametrize(
    ("answer", "asked", "language", "text"),
    [
        ("language English<asr_text>Hello there.", None, "English", "Hello there."),
        ("language None<asr_text>", None, None, ""),
        ("language <asr_text>x", None, None, "x"),
        ("Hello <asr_text> there", "English", "English", "Hello <asr_text> there"),
        ("languid, they said", None, None, "languid, they said"),
        ("language " * 20, None, None, "language " * 20),
        ("lang", None, None, "lang"),
    ],
)
def test_answers_are_parted_alike_in_any_pieces(answer: str, asked: Any, language: Any, text: str) -> None:
    for size in (1, 3, 1000):
        reader = TranscriptReader(asked)
        pieces = [reader.read(answer[start : start + size]) for start in range(0, len(answer), size)]
        assert ("".join(pieces) + reader.end(), reader.language) == (text, language)


def test_the_prompt_is_what_the_model_was_trained_with(llm: LLM) -> None:
    request = transcription_request("qwen3_asr", (SPEECH, RATE), "en", "EdgeLLM, Jetson")
    ids, token = llm._runtime.prompt_ids(request), llm.directory.config.audio_token_id
    text = llm.tokenizer.decode([each for each in ids if each != token], skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nEdgeLLM, Jetson<|im_end|>\n<|im_start|>user\n<|audio_start|><|audio_end|><|im_end|>\n"
        "<|im_start|>assistant\nlanguage English<asr_text>"
    )
    assert ids.count(token) == 3 * 13
    assert request.params is not None and request.params.temperature == 0
    spellings = ("de", "GERMAN", "de-AT", None)
    assert [language_name(each) for each in spellings] == ["German", "German", "German", None]


def test_gemma_4_is_asked_in_words_and_goes_on_from_what_it_wrote(gemma4_engines: Path) -> None:
    with LLM(gemma4_engines, backend="numpy", drafting=None) as other:
        ids = other._runtime.prompt_ids(transcription_request("gemma4", (SPEECH, RATE), "en", "EdgeLLM", "So"))
        text = other.tokenizer.decode(ids, skip_special_tokens=False)
        assert text.startswith(
            f"<bos><turn>user\n<|audio>{'<|audio|>' * 75}<audio|>Write down what is said in English,"
        )
        assert text.endswith("Names and words to expect: EdgeLLM\n<turn>assistant\nSo")
        stream = SpeechStream(other, RATE, **SHORT)
        for part in np.array_split(SPEECH, 3):
            found = stream.hear(part)
        assert found.response.usage.reused_tokens == 13 + 4 * 12  # chunks of rows that are final
        assert stream.finish().text == as_finished(other, SPEECH, found.text).text


def test_qwen2_audio_is_asked_in_words(qwen2_audio_engines: Path) -> None:
    with LLM(qwen2_audio_engines, backend="numpy", drafting=None) as other:
        ids = other._runtime.prompt_ids(transcription_request("qwen2_audio", (SPEECH, RATE), said="So"))
        text = other.tokenizer.decode(ids, skip_special_tokens=False)
        begun = f"<|im_start|>user\nAudio 1: <|audio_bos|>{'<|AUDIO|>' * 75}<|audio_eos|>\nWrite down what is said,"
        assert text.startswith(begun) and text.endswith("<|im_start|>assistant\nSo")
        stream = SpeechStream(other, RATE, **SHORT)
        for part in np.array_split(SPEECH, 2):
            found = stream.hear(part)
        assert stream.finish().text == as_finished(other, SPEECH, found.text).text


def test_voxtral_is_asked_its_own_way(voxtral_engines: Path) -> None:
    """As mistral-common writes transcription requests."""
    with LLM(voxtral_engines, backend="numpy", drafting=None) as other:
        for language, asked in (("French", "lang:fr"), (None, "")):
            ids = other._runtime.prompt_ids(transcription_request("voxtral", (SPEECH, RATE), language))
            text = other.tokenizer.decode(ids, skip_special_tokens=False)
            assert text == f"<s>[INST][BEGIN_AUDIO]{'[AUDIO]' * 40}[/INST]{asked}[TRANSCRIBE]"  # four windows of 0.8 s
        with pytest.raises(RequestError, match="Voxtral takes no names and words to expect"):
            other.transcribe((SPEECH, RATE), "en", "EdgeLLM")
        stream = SpeechStream(other, RATE, "en", **SHORT)
        for start in range(0, len(SPEECH), RATE // 2):
            found = stream.hear(SPEECH[start : start + RATE // 2])
        assert found.response.usage.reused_tokens >= 10  # of windows that are full
        said, whole = stream.finish(), as_finished(other, SPEECH, found.text, "en")
        assert (said.text, said.response.token_ids) == (whole.text, whole.response.token_ids)


def test_a_stream_ends_with_what_is_said_in_the_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encoded_frames(monkeypatch)
    samples = sound(5.0)[::-1].copy()
    samples[:1600] = np.sin(np.arange(1600) * 0.7)  # the loudest comes first
    stream = SpeechStream(llm, RATE, "en", **SHORT)
    found = [stream.hear(samples[start : start + RATE]) for start in range(0, len(samples), RATE)]
    # A window of two seconds, once the last frames before its end have heard what is behind it, is encoded no more.
    assert encoded == [100, 200, 200, 100, 200, 200, 100]
    kept = llm.tokenizer.encode(found[-2].text)[:-5]
    assert llm.tokenizer.encode(found[-1].text)[: len(kept)] == kept
    assert found[-1].response.usage.reused_tokens >= 2 * 13  # of the window that is final
    final, encoded[:] = stream.finish(), []
    assert stream.seconds == 5.0 and encoded == []
    expected = as_finished(llm, samples, found[-1].text, "en").response.token_ids
    assert final.response.token_ids == expected and len(expected) > 12  # not cut where a call's answer would be
    assert final.language == "English" and final.text


def test_a_stream_writes_the_same_where_it_drafts_from_what_it_wrote(speech_engines: Path) -> None:
    samples, told = sound(6.0), list[list[int]]()
    for drafting in (None, DraftingConfig(kind="suffix")):
        with LLM(speech_engines, backend="numpy", drafting=drafting) as other:
            letters = [other.tokenizer.encode(letter, False)[0] for letter in "abcdefgh"]
            stream = SpeechStream(other, RATE, "en", **SHORT, allowed_token_ids=letters)
            found = [stream.hear(samples[start : start + RATE // 2]) for start in range(0, len(samples), RATE // 2)]
        told.append([token for each in found for token in each.response.token_ids])
    assert told[0] == told[1]


def test_a_transcription_may_be_awaited(llm: LLM, speech_engines: Path) -> None:
    async def run() -> Any:
        async with AsyncLLM(speech_engines, backend="numpy", drafting=None) as other:
            with pytest.raises(RequestError, match="no language 'xx'"):
                await other.transcribe(FILE, "xx")
            return await other.transcribe(FILE, "en", "EdgeLLM", **SHORT)

    found, expected = asyncio.run(run()), llm.transcribe(FILE, "en", "EdgeLLM", **SHORT)
    assert (found.text, found.language, found.response.token_ids) == (
        expected.text,
        "English",
        expected.response.token_ids,
    )


def test_what_is_no_speech_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt is a int"):
        llm.transcribe((SPEECH, RATE), None, 3)  # type: ignore[arg-type]
    with pytest.raises(AudioError, match="is no sound"):
        SpeechStream(llm, RATE).hear(np.zeros(0, np.int16))
    with pytest.raises(ContextError, match="the prompt has 411 tokens and the context 400"):
        llm.transcribe((sound(30.0), RATE))


def test_the_command_writes_what_is_said(edgellm: Edgellm, speech_engines: Path, tmp_path: Path, llm: LLM) -> None:
    path = tmp_path / "said.wav"
    path.write_bytes(FILE)
    code, out, err = edgellm("transcribe", speech_engines, path, "--json")
    assert (code, json.loads(out)["text"]) == (0, llm.transcribe(path).text), err
    assert edgellm("transcribe", speech_engines)[0] == edgellm("transcribe", speech_engines, "")[0] == 2
    path = path.rename(tmp_path / "said\udcff.wav")  # as recorders of other systems may name it
    assert edgellm("transcribe", speech_engines, path)[0] == 0
    assert edgellm("transcribe", "-m", speech_engines, path, "--every", 1)[0] == 2
    code, _, err = edgellm("transcribe", "-m", speech_engines, "-", stdin=FILE[44:])  # samples alone
    assert code == 1 and "raw samples need a WAV header, or edgellm transcribe's --every and --rate" in err
    follow = ("transcribe", "-m", speech_engines, "-", "--every", 1.25, "--language", "en", "--json", "--max-tokens", 9)
    code, out, err = edgellm(*follow, stdin=FILE[44:] + b"x")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0, err
    assert [(each["seconds"], each["final"]) for each in lines] == [(1.25, False), (2.5, False), (3, False), (3, True)]
    told = len(llm.tokenizer.encode(lines[-2]["text"]))
    assert lines[-1]["text"] == llm.transcribe(path, "en", max_tokens=9 + told).text
    for data in (b"", FILE):
        assert "standard input is empty or a WAV file" in edgellm(*follow, stdin=data)[2]


def test_what_a_synthesizer_says_is_heard_from_a_pipe_and_in_pieces(
    edgellm: Edgellm, speech_engines: Path, llm: LLM
) -> None:
    program = shutil.which("espeak-ng")
    if program is None:
        pytest.skip("espeak-ng is not installed")
    asked = [program, "--stdout", "Please pick up the red cup."]  # whose WAV header knows no length
    said = subprocess.run(asked, stdout=subprocess.PIPE, check=True).stdout
    samples, rate = heard(said)
    assert rate != RATE and 1 < len(samples) / rate < 4 and samples.std() > 0.01
    code, out, err = edgellm("transcribe", speech_engines, "-", "--json", "--max-tokens", 12, stdin=said)
    assert (code, json.loads(out)["text"]) == (0, llm.transcribe(said, max_tokens=12).text), err
    stream = SpeechStream(llm, rate, "en", **SHORT)
    for piece in np.array_split(samples, 4):
        found = stream.hear(piece)
    most = 12 + len(llm.tokenizer.encode(found.text))
    expected = llm.transcribe(said, "en", **SHORT | {"max_tokens": most})
    assert stream.finish().response.token_ids == expected.response.token_ids


def test_what_outgrows_the_context_goes_on_as_another_stream(edgellm: Edgellm, speech_engines: Path) -> None:
    """The context has room for 30 seconds."""
    samples = np.rint(32767 * sound(50.0)).astype("<i2").tobytes()
    follow = ("transcribe", "-m", speech_engines, "-", "--every", 5, "--language", "en", "--json", "--max-tokens", 4)
    code, out, err = edgellm(*follow, stdin=samples)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0, err
    ends = [each["seconds"] for each in lines if each["final"]]
    assert len(ends) == 3 and ends == sorted(ends) and ends[-1] == 50.0
    assert [each["seconds"] for each in lines if not each["final"]] == [5.0 * count for count in range(1, 11)]


def form(file: bytes | None = FILE, fields: Any = ()) -> bytes:
    """A body as clients write it."""
    head = '--frontier\r\nContent-Disposition: form-data; name="'
    parts = [f'{head}{name}"\r\n\r\n{value}\r\n'.encode() for name, value in dict(fields).items()]
    if file is not None:
        parts.append(f'{head}file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'.encode() + file + b"\r\n")
    return b"".join([*parts, b"--frontier--\r\n"])


NAMED = {"model": "ears"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (form(fields=NAMED | {"response_format": "srt"}), "is 'srt': expected one of json, text, verbose_json"),
        (form(fields=NAMED | {"timestamp_granularities[]": "word"}), "timestamp_granularities is not served"),
        (form(fields=NAMED | {"include[]": "logprobs"}), "include is not served"),
        (form(fields=NAMED | {"chunking_strategy": "server_vad"}), "a sound is taken as a whole"),
        (form(fields=NAMED | {"language": "xx"}), "there is no language 'xx'"),
        (form(fields=NAMED | {"temperature": "warm"}), "temperature"),
        (form(fields=NAMED | {"temperature": "00"}), "temperature is '00': expected a number"),
        (form(fields=NAMED | {"seed": "9" * 5000}), "seed is '999"),
        (form(fields=NAMED | {"speaker": "me"}), "the field 'speaker' is unknown"),
        (form(fields={"model": "other"}), "there is no model"),
        (b"", "no form of several parts"),
        (form()[:-10], "no form of several parts"),
        (b"--a\r\n\r\nx\r\n" * 70 + b"--a--", "at most 64 parts"),
        (form(fields={"file": "x"}), "'file' twice"),
        (form(None, NAMED), "file is missing"),
        (form(b"no sound", NAMED), r"is no (WAV file|sound)"),
    ],
)
def test_what_a_form_asks_for_in_vain_is_named(body: bytes, message: str) -> None:
    with pytest.raises(HTTPError, match=message) as caught:
        transcription(body, ServedModel("ears"))
    assert caught.value.status in (400, 404)


def test_a_form_has_numbers_as_text_and_fields_that_say_nothing() -> None:
    fields = {"temperature": "1e-06", "max_tokens": "3", "ignore_eos": "True", "deadline": "2.5", "stop": "5"}
    (asked,) = transcription(form(fields=NAMED | fields | {"language": "", "prompt": ""}), ServedModel("ears")).requests
    assert asked.params == SamplingParams(max_tokens=3, ignore_eos=True, stop="5") and asked.deadline == 2.5


def test_a_form_asks_the_model_its_familys_way() -> None:
    fields = NAMED | {"language": "de"}
    voxtral, qwen = (transcription(form(fields=fields), ServedModel("ears", family=name)) for name in ("voxtral", "q"))
    assert voxtral.requests[0].prompt == "<s>[INST][BEGIN_AUDIO][AUDIO][/INST]lang:de[TRANSCRIBE]"
    assert qwen.requests[0].messages[-1]["content"] == "language German<asr_text>"  # type: ignore[index]
    realtime = ServedModel("ears", family="voxtral_realtime")
    assert transcription(form(fields=NAMED), realtime).requests[0].prompt == "<s>[STREAMING_PAD]"
    with pytest.raises(HTTPError, match="takes neither a language nor words") as caught:
        transcription(form(fields=fields), realtime)
    assert caught.value.param == "language"
    with pytest.raises(HTTPError, match="takes no names and words to expect"):
        transcription(form(fields=fields | {"prompt": "EdgeLLM"}), ServedModel("ears", family="voxtral"))


def test_parts_keep_their_bytes() -> None:
    data = b"\r\n--frontie\r\n\0\xff--frontier\r\r\n\r\n"
    assert parts_of_form(form(data, NAMED)) == {"model": b"ears", "file": data}


def test_openais_client_hears_whole_and_in_pieces(speech_engines: Path, llm: LLM) -> None:
    with running("--model", speech_engines) as server:
        expected, client = llm.transcribe(FILE, "en"), server.client()

        def create(**more: Any) -> Any:
            file = ("said.wav", io.BytesIO(FILE))
            return client.audio.transcriptions.create(file=file, model="qwen3_asr", language="en", **more)

        found = create()
        assert found.text == expected.text
        assert found.usage.input_tokens == expected.response.usage.prompt_tokens
        assert create(response_format="text").strip() == expected.text
        events = list(create(stream=True))
        assert [each.type for each in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
        assert "".join(each.delta for each in events[:-1]).strip() == events[-1].text == expected.text
        body = form(fields={"model": "qwen3_asr", "response_format": "verbose_json"})
        _, verbose, _ = server.ask("POST", TRANSCRIPTIONS, body, {"content-type": "multipart/form-data"})
        assert (verbose["duration"], verbose["task"]) == (3.0, "transcribe") and "segments" not in verbose
        assert server.ask("POST", TRANSCRIPTIONS, body)[0] == 415
        _chat(server, llm)


def _chat(server: ServerProcess, llm: LLM) -> None:
    given = {"data": base64.b64encode(FILE).decode(), "format": "wav"}
    create = server.client().chat.completions.create
    asked: dict[str, Any] = {"model": "qwen3_asr", "temperature": 0, "max_tokens": 12}
    parts: list[Any] = [{"type": "input_audio", "input_audio": given}]
    found = create(messages=[{"role": "user", "content": parts}], **asked)
    own = [{"role": "user", "content": [{"type": "audio", "audio": FILE}]}]
    assert found.choices[0].message.content == llm.chat(own, temperature=0, max_tokens=12).text
    body = {"model": "qwen3_asr", "temperature": 0, "max_output_tokens": 12, "store": True}
    created = server.client().responses.create(input=[{"role": "user", "content": parts}], **body)
    assert created.output_text == found.choices[0].message.content
    parts[0] = {"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}
    with pytest.raises(openai.BadRequestError, match="sounds are taken as base64 and data URLs alone"):
        create(messages=[{"role": "user", "content": parts}], **asked)
