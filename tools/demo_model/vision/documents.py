"""Training dialogues about pictures as token rows of one length, with the scenes that their pictures show.

A shard holds groups of 64 rows of 512 tokens; the first rows of a group have four pictures, others three or two, half
of them one, so that every batch of whole groups has the same number of pictures. A picture's rows are 81 times the
token `<|image|>`. To each group belong rows of dialogues and texts without pictures, which the language model must
answer as before.
"""

import os
import random
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.demo_model.documents import ANSWER, FIRST, Material, chat_codes, load_material
from tools.demo_model.documents import documents as text_documents
from tools.demo_model.vision.dialogues import PICTURE, Seen, seen_dialogue
from tools.demo_model.vision.layout import ROWS, cells_of
from tools.demo_model.vocabulary import END, START, load_vocabulary, render

LENGTH = 512
GROUP = 64
SHARD = ("tokens", "answers", "cells", "plain_tokens", "plain_answers")
PICTURES_OF_ROWS = (4,) * 3 + (3,) * 11 + (2,) * 18 + (1,) * 32
PICTURES = sum(PICTURES_OF_ROWS)
TURNS = ((5, 11), (4, 8), (3, 6), (4, 5))  # how many, at least and at most, of a dialogue by the number of its pictures
PLAIN_ROWS = 24  # rows without pictures of a group
OPEN_TEXT = 0.15  # their share of open text


def render_seen(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """The chat format: each picture of a message is a system message of its own before it."""
    parts: list[dict[str, str]] = []
    for message in messages:
        count = message["content"].count(PICTURE)
        parts += [{"role": "system", "content": PICTURE * ROWS}] * count
        parts.append(message | {"content": message["content"].replace(PICTURE, "")})
    return render(parts, add_generation_prompt)


def encode_row(tokenizer: Tokenizer, seen: Seen) -> tuple[np.ndarray, np.ndarray] | None:
    """Token ids [512] and which belong to an answer [512] bool; None where a picture would be cut off."""
    start, end, image = (tokenizer.token_to_id(token) for token in (START, END, PICTURE))
    head = tokenizer.encode("assistant\n").ids
    ids = np.asarray(tokenizer.encode(render_seen(seen.messages)).ids + [end], np.uint16)
    answers = chat_codes(ids, start, head, end) == ANSWER
    if np.count_nonzero(ids[:LENGTH] == image) != ROWS * len(seen.worlds):
        return None
    row, wanted = np.zeros(LENGTH, np.uint16), np.zeros(LENGTH, bool)
    length = min(len(ids) - 1, LENGTH)
    row[:length], wanted[:length] = ids[:length], answers[:length]
    return row, wanted


def group(tokenizer: Tokenizer, rng: random.Random) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [64, 512], answers [64, 512] and cells [PICTURES, 2, 9] of the pictures in the order of their rows."""
    rows, cells = [], []
    while len(rows) < GROUP:
        pictures = PICTURES_OF_ROWS[len(rows)]
        seen = seen_dialogue(rng, "train", rng.randint(*TURNS[pictures - 1]), pictures)
        if len(seen.worlds) != pictures:
            continue
        row = encode_row(tokenizer, seen)
        if row is None or not row[1].any():
            continue
        rows.append(row)
        cells += [cells_of(world) for world in seen.worlds]
    return np.stack([row for row, _ in rows]), np.stack([answers for _, answers in rows]), np.stack(cells)


def plain_rows(material: Material, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [PLAIN_ROWS, 512] of documents one after another, and which belong to an answer [PLAIN_ROWS, 512] bool."""
    tokens, answers = np.zeros((PLAIN_ROWS, LENGTH), np.uint16), np.zeros((PLAIN_ROWS, LENGTH), bool)
    for row in range(PLAIN_ROWS):
        place = 0
        while place < LENGTH:
            ((ids, codes),) = text_documents(material, rng, 1, OPEN_TEXT)
            part = ids[: LENGTH - place]
            stop = place + len(part)
            tokens[row, place:stop], answers[row, place:stop] = part, codes[: len(part)] % FIRST == ANSWER
            place = stop
    return tokens, answers


def write_shards(
    base: Path, folder: Path, seed: int, worker: int, workers: int, shards: int, groups: int, material: Path
) -> None:
    """Worker process: shards worker, worker + workers, ... of `groups` groups, each appearing when complete."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.nice(5)
    tokenizer, known = load_vocabulary(base), load_material(material)
    for index in range(worker, shards, workers):
        rng = random.Random(f"eyes {seed} {index}")
        tokens, answers, cells = zip(*(group(tokenizer, rng) for _ in range(groups)), strict=True)
        plain, told = zip(*(plain_rows(known, rng) for _ in range(groups)), strict=True)
        arrays = dict(zip(SHARD, map(np.stack, (tokens, answers, cells, plain, told)), strict=True))
        path = folder / f"{index:05d}.npz"
        with path.with_suffix(".part").open("wb") as file:
            np.savez(file, **arrays)
        path.with_suffix(".part").rename(path)


def shard_groups(folder: Path, rng: random.Random):
    """Endless groups: new shards as they appear, earlier ones again where none is new."""
    seen: list[Path] = []
    while True:
        fresh = sorted(set(folder.glob("*.npz")) - set(seen))
        if not fresh and not seen:
            time.sleep(0.2)
            continue
        path = fresh[0] if fresh else rng.choice(seen)
        seen += fresh[:1]
        with np.load(path) as shard:
            yield from zip(*(shard[name] for name in SHARD), strict=True)
