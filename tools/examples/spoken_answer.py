"""An answer that is spoken while it is still being written: each sentence as soon as it has ended.

Run it: python tools/examples/spoken_answer.py QUESTION [--model ENGINE_DIR] [--voice COMMAND]
The command reads text line by line and speaks it, as espeak-ng and Piper do.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from edgellm import LLM


def sentences(pieces: Iterable[str]) -> Iterator[str]:
    """The sentences of a text that comes in pieces, each as soon as white space stands behind it; last what is left."""
    rest = ""
    for piece in pieces:
        *ended, rest = re.split(r"(?<=[.!?])\s+|\n+", rest + piece)
        yield from filter(None, ended)
    if rest.strip():
        yield rest.strip()


def main() -> None:
    """Answer, aloud."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--voice", default="espeak-ng", help="what the shell runs (espeak-ng)")
    parser.add_argument("--model", type=Path, help="default: the shipped model")
    options = parser.parse_args()
    program = shlex.split(options.voice)[0]
    if shutil.which(program) is None:
        parser.error(f"{program} is not installed: name a program that speaks what it reads, as in --voice espeak-ng")
    voice = subprocess.Popen(options.voice, shell=True, stdin=subprocess.PIPE, text=True)
    with LLM(options.model) as llm, voice:
        for sentence in sentences(chunk.text for chunk in llm.stream_chat(options.question)):
            print(sentence)
            print(sentence, file=voice.stdin, flush=True)


if __name__ == "__main__":
    main()
