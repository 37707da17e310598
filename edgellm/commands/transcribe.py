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
from edgellm.errors import AudioError
from edgellm.kernels.user_paths import user_path

if TYPE_CHECKING:
    from edgellm.llm import LLM
    from edgellm.transcription import Transcription


class TranscribeOptions(
    options.ModelOption, options.AdapterOptions, options.ComputingOptions, options.LogOptions, panel="Speech"
):
    words: list[str] | None = argument(
        "The engine directory (as --model takes it), unless --model names it, then the sound: WAV, or with soundfile "
        "installed FLAC and others; '-' reads standard input.",
        metavar="[ENGINE_DIR] FILE|-",
        rich_help_panel="Arguments",
        may_be_path=True,
    )
    language: str | None = option("Code or name, as in en [default: the model finds out].", is_free=True)
    prompt: str | None = option("Names and words to expect.", metavar="TEXT", is_free=True)
    every: float | None = option(
        "Take raw samples from standard input as they come, and say every so many seconds of them what was said.",
        metavar="SECONDS",
        least=0.1,
    )
    rate: int = option("Hz of raw samples, of 16 bits, little-endian, one channel.", default=16000, least=1000)
    max_tokens: int | None = option(
        "Most tokens of an answer, with --every new ones of each [default: all that the context holds].", least=1
    )
    json_output: bool = option("Print a JSON object in place of the text.", "--json", rich_help_panel="Output")


@takes_options
def transcribe(given: TranscribeOptions) -> None:
    """Write down what is said in a sound.

    Example: arecord -q -t raw -f S16_LE -r 16000 | edgellm transcribe qwen3-asr - --every 1
    """
    from edgellm.drafting.config import DraftingConfig

    words = list(given.words or ())
    if words and not given.model:
        given.engine_directory = user_path(words.pop(0))
    if len(words) != 1:
        raise typer.BadParameter("name a model, and a sound or '-'", param_hint="FILE|-")
    if given.every is not None and words != ["-"]:
        raise typer.BadParameter("takes samples from standard input: give '-' as FILE", param_hint="--every")
    settings = chosen_settings(given)
    asked: dict[str, Any] = {"prompt": given.prompt, "adapter": settings.adapter}
    asked |= {} if given.max_tokens is None else {"max_tokens": given.max_tokens}
    with open_model_with(settings, None, chosen_adapters(settings)) as llm:
        if given.every is not None:
            if not llm.directory.config.adds_sound:  # what a stream writes anew is mostly what it has written before
                llm.use_drafting(DraftingConfig(kind="suffix"))
            _follow(llm, given, given.every, asked)
            return
        sound = sys.stdin.buffer.read() if words == ["-"] else user_path(words[0])
        found = llm.transcribe(sound, given.language, **asked)
        print(json.dumps({"text": found.text, "language": found.language}) if given.json_output else found.text)


def _follow(llm: LLM, given: TranscribeOptions, every: float, asked: dict[str, Any]) -> None:
    """Print what was said so far again and again, and at the end what was said in all. Where the context has no room
    for more, that is an end, too: what follows is another stream."""
    import numpy as np

    from edgellm.speech_stream import SpeechStream

    def say(found: Transcription, is_final: bool) -> None:
        about = {"text": found.text, "language": found.language, "seconds": before + stream.seconds, "final": is_final}
        print(json.dumps(about) if given.json_output else found.text, flush=True)

    size, before, data = 2 * max(1, round(every * given.rate)), 0.0, b"\0\0"
    while len(data) > 1:
        stream, left, taken = SpeechStream(llm, given.rate, given.language, **asked), llm.context_length, 0
        # As long as there is room for as much as came last, and what is said in it.
        while left >= 2 * taken and len(data := sys.stdin.buffer.read(size)) > 1:
            if data[:4] == b"RIFF" and not before + stream.seconds:
                break
            found = stream.hear(np.frombuffer(data[: len(data) // 2 * 2], "<i2"))
            say(found, False)
            left, taken = found.response.usage.context_left, left - found.response.usage.context_left
        if stream.seconds:
            say(stream.finish(), True)
        elif not before:
            raise AudioError("standard input is empty or a WAV file: --every takes raw samples, as of arecord -t raw")
        before += stream.seconds
