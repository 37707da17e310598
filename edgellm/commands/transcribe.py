"""`edgellm transcribe`: what is said in a sound, or while somebody speaks."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from edgellm.commands import options
from edgellm.commands.models import chosen_adapters, open_model_with
from edgellm.commands.settings import chosen_settings
from edgellm.commands.table import argument, option, takes_options
from edgellm.errors import AudioError, RequestError
from edgellm.kernels.user_paths import user_path

if TYPE_CHECKING:
    from edgellm.llm import LLM
    from edgellm.transcription import Transcription

_SAMPLE_BYTES = 2


class TranscribeOptions(
    options.ModelOption, options.AdapterOptions, options.ComputingOptions, options.LogOptions, panel="Speech"
):
    words: list[str] | None = argument(
        "The engine directory (as --model takes it), unless --model names it, then the sound: WAV, or with soundfile "
        "installed FLAC and others; '-' reads standard input.",
        metavar="[ENGINE_DIR] FILE|-",
        rich_help_panel="Arguments",
        is_free=True,
    )
    language: str | None = option("Code or name, as in en [default: the model finds out].", is_free=True)
    prompt: str | None = option("Names and words to expect.", metavar="TEXT", is_free=True)
    every: float | None = option(
        "Take raw samples from standard input as they come, and say every so many seconds of them what was said.",
        metavar="SECONDS",
        least=0.1,
    )
    rate: int = option("Hz of raw samples, of 16 bits, little-endian, one channel.", default=16000, least=1000)
    max_tokens: int | None = option("Most tokens of an answer [default: all that the context holds].", least=1)
    json_output: bool = option("Print a JSON object in place of the text.", "--json", rich_help_panel="Output")


@takes_options
def transcribe(given: TranscribeOptions) -> None:
    """Write down what is said in a sound.

    Example: arecord -q -t raw -f S16_LE -r 16000 | edgellm transcribe qwen3-asr - --every 1
    """
    words = list(given.words or ())
    if given.model is None and words:
        given.engine_directory = user_path(words.pop(0))
    if len(words) != 1 or (given.model is None and given.engine_directory is None):
        raise typer.BadParameter("name a model, and a sound or '-'", param_hint="FILE|-")
    if given.every is not None and words != ["-"]:
        raise typer.BadParameter("takes samples from standard input: give '-' as FILE", param_hint="--every")
    settings = chosen_settings(given)
    asked: dict[str, Any] = {"adapter": settings.adapter}
    if given.max_tokens is not None:
        asked["max_tokens"] = given.max_tokens
    with open_model_with(settings, None, chosen_adapters(settings)) as llm:
        if given.every is not None:
            _follow(llm, given, asked)
            return
        source = sys.stdin.buffer.read() if words == ["-"] else user_path(words[0])
        found = llm.transcribe(source, given.language, given.prompt, **asked)
        _print(found, given.json_output)


def _follow(llm: LLM, given: TranscribeOptions, asked: dict[str, Any]) -> None:
    """Print what was said so far again and again, and at the end what was said in all."""
    import numpy as np

    from edgellm.transcription import SpeechStream

    assert given.every is not None
    stream = SpeechStream(llm, given.rate, given.language, given.prompt, **asked)
    size = max(1, round(given.every * given.rate)) * _SAMPLE_BYTES
    while data := sys.stdin.buffer.read(size):
        if not stream.seconds and data[:4] == b"RIFF":
            raise AudioError("standard input is a WAV file: --every takes raw samples of 16 bits, as arecord -t raw")
        samples = np.frombuffer(data[: len(data) // _SAMPLE_BYTES * _SAMPLE_BYTES], "<i2")
        if len(samples):
            _print(stream.hear(samples), given.json_output, stream.seconds)
    if not stream.seconds:
        raise RequestError("standard input is empty: expected samples of 16 bits")
    _print(stream.finish(), given.json_output, stream.seconds, is_final=True)


def _print(found: Transcription, in_json: bool, seconds: float | None = None, is_final: bool = False) -> None:
    about = {} if seconds is None else {"seconds": round(seconds, 3), "final": is_final}
    written = {"text": found.text, "language": found.language, **about}
    print(json.dumps(written, ensure_ascii=False) if in_json else found.text, flush=True)
