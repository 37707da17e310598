"""Training documents: dialogues and open text as token rows, with a weight for every token.

A row holds 2,048 tokens: whole documents, packed; attention stays within a document. A code beside each token says how
much its prediction counts (WEIGHTS) and, by FIRST, where a document begins.
"""

import json
import lzma
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.demo_model.dialogue import dialogue
from tools.demo_model.vocabulary import PAD, START, TEXT_END, render
from tools.demo_model.words import read_pool

ROW = 2048
NOTHING, CONTEXT, ANSWER, TEXT = 0, 1, 2, 3
WEIGHTS = (0.0, 0.03, 1.0, 0.3)
FIRST = 8  # added to the code of a document's first token


@dataclass
class Material:
    """What `prepare.py` wrote: tokenizer, open words, open lines, facts and texts."""

    tokenizer: Tokenizer
    pool: tuple[str, ...]
    utterances: list[str]
    facts: list[list[str]]
    texts: list[str]
    emphasis: dict[str, float] = field(default_factory=dict)


def load_material(work: Path) -> Material:
    """Read the working directory of `prepare.py`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    lines = json.loads((work / "lines.json").read_text())
    with lzma.open(work / "texts.json.xz", "rt") as file:
        texts = json.load(file)
    return Material(
        Tokenizer.from_file(str(work / "tokenizer.json")),
        read_pool(work / "pool.txt"),
        lines["utterances"],
        lines["facts"],
        texts,
    )


def _with_fact(messages: list[dict[str, str]], fact: list[str], rng: random.Random) -> list[dict[str, str]]:
    """The dialogue with a question of the open collections and its answer put in after some turn."""
    head = 1 if messages and messages[0]["role"] == "system" else 0
    place = head + 2 * rng.randrange((len(messages) - head) // 2 + 1)
    new = [{"role": "user", "content": fact[0]}, {"role": "assistant", "content": fact[1]}]
    return messages[:place] + new + messages[place:]


def chat_document(material: Material, rng: random.Random) -> str:
    """A rendered training dialogue of 3 to 14 turns, now and then up to 40."""
    turns = rng.randint(3, 14) if rng.random() < 0.93 else rng.randint(15, 40)
    messages = []
    while len(messages) < 3:
        messages = dialogue(rng, "train", turns, material.pool, material.utterances, material.emphasis)
    if material.facts and rng.random() < 0.06:
        messages = _with_fact(messages, rng.choice(material.facts), rng)
    return render(messages)


def chat_codes(ids: np.ndarray, start: int, answer_head: list[int], end: int) -> np.ndarray:
    """Codes of a rendered dialogue: ANSWER from the first token of an assistant's content to its end token."""
    codes = np.full(len(ids), CONTEXT, np.uint8)
    width = len(answer_head)
    ends = np.flatnonzero(ids == end)
    for place in np.flatnonzero(ids == start):
        if list(ids[place + 1 : place + 1 + width]) == answer_head:
            stop = ends[np.searchsorted(ends, place)]
            codes[place + 1 + width : stop + 1] = ANSWER
    return codes


def documents(
    material: Material, rng: random.Random, count: int, text_share: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, codes) of `count` documents, none longer than a row."""
    tokenizer = material.tokenizer
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id("<|im_end|>")
    head = tokenizer.encode("assistant\n").ids
    as_text = [rng.random() < text_share for _ in range(count)]
    strings = [rng.choice(material.texts) + TEXT_END if text else chat_document(material, rng) for text in as_text]
    result = []
    for text, encoding in zip(as_text, tokenizer.encode_batch(strings), strict=True):
        ids = np.asarray(encoding.ids[:ROW], np.uint16)
        if text:
            ids = ids[:1024]
            codes = np.full(len(ids), TEXT, np.uint8)
        else:
            full = np.asarray(encoding.ids + [end], np.uint16)
            codes = chat_codes(full, start, head, end)[: len(ids)]
        codes[0] += FIRST
        result.append((ids, codes))
    return result


def pack(parts: list[tuple[np.ndarray, np.ndarray]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ROW tokens, best fit among the open rows; what remains free is padding, a document of its own."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(parts)), key=lambda i: -len(parts[i][0])):
        length = len(parts[index][0])
        fits = [(space, row) for row, space in enumerate(free[-64:], max(0, len(free) - 64)) if space >= length]
        if fits:
            _, row = min(fits)
        else:
            row = len(rows)
            rows.append([])
            free.append(ROW)
        rows[row].append(index)
        free[row] -= length
    tokens = np.full((len(rows), ROW), pad, np.uint16)
    codes = np.zeros((len(rows), ROW), np.uint8)
    for number, row in enumerate(rows):
        place = 0
        for index in row:
            ids, code = parts[index]
            tokens[number, place : place + len(ids)], codes[number, place : place + len(ids)] = ids, code
            place += len(ids)
        if place < ROW:
            codes[number, place] = FIRST
    return tokens, codes


def write_shard(material: Material, path: Path, seed: str, count: int, text_share: float) -> None:
    """Write one shard (`tokens`, `codes` in an .npz), appearing only when complete."""
    rng = random.Random(seed)
    tokens, codes = pack(documents(material, rng, count, text_share), material.tokenizer.token_to_id(PAD))
    order = np.random.default_rng(rng.getrandbits(32)).permutation(len(tokens))
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        np.savez(file, tokens=tokens[order], codes=codes[order])
    temporary.rename(path)
