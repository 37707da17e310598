"""Packs prompts that a model is asked, so that a head learns from its answers: none of those that are measured.

Usage: python -m tools.heads.prompts DATA OUTPUT.jsonl.xz [--held-out FILE ...] [--seed 35]

DATA has `chat.jsonl.xz` (`source`, `messages`: what the user says first is a prompt) and `text.jsonl.xz` (`source`,
`title`, `text`: titles and passages become prompts by the sentences below). By default held out are all prompts in
DATA/prompts, as far as a run of words gives them away.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

#: A prompt that shares so many words in a row with one that is held out is left out.
RUN = 8
#: Prompts of a source at most, so that none of them outweighs all the others.
MOST = {"fairytaleqa/qa": 1500, "gsm8k_train": 4000, "self_dialogue": 2500, "taskmaster4": 200}
_TOPICS = (
    "Explain {} in simple words.",
    "Write an essay about this topic: {}.",
    "What should I know about this topic? Give examples.\n\n{}",
    "Write a blog post with the title '{}'.",
    "List the most important points about {}, with a sentence for each.",
    "Write a dialogue between a teacher and a student about {}.",
    "What are advantages and disadvantages here? Compare them in a table.\n\n{}",
    "Write an email to a colleague who asked you about {}.",
)
_STORIES = (
    "Write a short story with the title '{}'.",
    "Write a poem with the title '{}'.",
    "Imagine that you are in the story '{}'. Tell it from your own point of view.",
)
_PASSAGES = (
    "Summarize this text in two sentences.\n\n{}",
    "Rewrite this text in simpler words.\n\n{}",
    "Continue this text.\n\n{}",
    "Ask three questions about this text, and answer them.\n\n{}",
    "Extract all names, places and numbers of this text as JSON.\n\n{}",
)
#: Headings of textbooks that say nothing of what stands below.
_EMPTY = ("introduction", "preface", "summary", "key terms", "references", "chapter")
_PASSAGE_WORDS = 110


def runs_of_words(text: str) -> set[tuple[str, ...]]:
    """All runs of `RUN` words; of a shorter text the whole."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[first : first + RUN]) for first in range(max(1, len(words) - RUN + 1))}


def held_out_runs(files: Iterable[Path]) -> set[tuple[str, ...]]:
    """The runs of words of all turns in files of JSON lines."""
    lines = (line for file in files for line in read_lines(file))
    return {run for line in lines for turn in turns_of(line) for run in runs_of_words(turn)}


def turns_of(line: dict[str, Any]) -> list[str]:
    """What a user says in a line with `turns` or `prompt`, as `edgellm bench` has both. Raises SystemExit."""
    turns = line.get("turns") or [line.get("prompt")]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise SystemExit(f'{json.dumps(line):.80}: expected {{"prompt": "..."}} or {{"turns": ["..."]}}')
    return turns


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines, compressed by xz where the name says so."""
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def from_chats(path: Path) -> Iterator[tuple[str, str]]:
    """Source and text of what users say first."""
    for record in read_lines(path):
        first = record["messages"][0]
        if first["role"] == "user":
            yield record["source"], first["content"]


def from_texts(path: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Source and prompts about titles and passages: all sentences of a title, and of each text up to three passages."""
    for record in read_lines(path):
        source, text = record["source"], record["text"]
        is_book = source.startswith("openstax")
        title = text.split("\n", 1)[0].strip() if is_book else record["title"].split("/")[-1].replace("-", " ")
        if len(title) < 70 and not title.lower().startswith(_EMPTY):
            yield from ((source, sentence.format(title)) for sentence in (_TOPICS if is_book else _STORIES))
        paragraphs = [each for each in text.split("\n\n") if _PASSAGE_WORDS // 2 < len(each.split()) < _PASSAGE_WORDS]
        for passage in draw.sample(paragraphs, min(3, len(paragraphs))):
            yield source, draw.choice(_PASSAGES).format(passage)


def select(prompts: Iterable[tuple[str, str]], held_out: set[tuple[str, ...]], draw: random.Random) -> list[dict]:
    """Different prompts in a drawn order, at most as many of a source as `MOST` says, and none that is held out."""
    unique = {text.strip(): source for source, text in prompts if text.strip()}
    drawn = list(unique.items())
    draw.shuffle(drawn)
    counts: Counter[str] = Counter()
    kept = []
    for text, source in drawn:
        if counts[source] < MOST.get(source, len(drawn)) and not runs_of_words(text) & held_out:
            counts[source] += 1
            kept.append({"source": source, "prompt": text})
    return kept


def main(given: Sequence[str] | None = None) -> None:
    """Write the prompts, and print how many there are of each source."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--held-out", type=Path, nargs="+")
    parser.add_argument("--seed", type=int, default=35)
    arguments = parser.parse_args(given)
    draw, data = random.Random(arguments.seed), arguments.data
    held_out = held_out_runs(arguments.held_out or sorted((data / "prompts").glob("*.jsonl")))
    texts = from_texts(data / "text.jsonl.xz", draw)
    kept = select([*from_chats(data / "chat.jsonl.xz"), *texts], held_out, draw)
    lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in kept)
    with lzma.open(arguments.output, "wt", encoding="utf-8") as file:
        file.write(lines)
    print(f"{len(kept):,} prompts, {arguments.output.stat().st_size:,} bytes: {Counter(e['source'] for e in kept)}")


if __name__ == "__main__":
    main()
