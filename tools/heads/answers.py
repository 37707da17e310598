"""Answers that a model gives itself, by this runtime: what a head learns from.

A line of the file is an answer: `ids` are the prompt's tokens and the answer's; those from `first` on the model wrote
itself. Some prompts the model wrote, too: it goes on where a user's turn begins (Z. Xu and others 2024, "Magpie"),
which gives questions like those that it was tuned on, code among them.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np

from edgellm import LLM, Request, Response, SamplingParams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import LARGEST_BATCH, EngineLimits
from edgellm.snapshots.contents import common_beginning
from edgellm.text.tokenizer import Tokenizer
from tools.heads.prompts import read_lines, runs_of_words

#: Tokens of a prompt that are computed at once.
_CHUNK = 128
#: Requests that are handed over together: batches run empty at the end of a group alone.
_GROUP = 512


@dataclass(frozen=True)
class Asking:
    """How answers are made: `tokens` of an answer at most, behind prompts of at most `prompt_tokens`; the share of
    prompts that the model writes; the share of answers that are greedy, others are drawn at `temperature`; how long
    at most (`minutes`), how many at most, and the seed."""

    tokens: int = 192
    prompt_tokens: int = 320
    own_prompts: float = 0.5
    greedy: float = 0.5
    temperature: float = 0.7
    minutes: float = 4.0
    count: int = 1_000_000
    seed: int = 35


@dataclass(frozen=True)
class Document:
    """Token ids [T] int32, of which the model wrote those from `first` on."""

    ids: np.ndarray
    first: int


def read_documents(path: Path) -> list[Document]:
    """The answers of a file."""
    return [Document(np.array(line["ids"], np.int32), line["first"]) for line in read_lines(path)]


def write_answers(base: Path, engines: Path, backend: str, prompts: Path, held_out: set, asking: Asking, to: Path):
    """Build `engines` of the checkpoint `base` and write a file of answers to the prompts of a file of `tools.heads.
    prompts`, until the time is over, the count is reached, or no prompt is left. Prints what came of it.

    Prompts that share a run of words with `held_out` are left out, those that the model writes too.
    """
    capacity = asking.prompt_tokens + asking.tokens + _CHUNK
    build_engine_directory(base, engines, EngineLimits(LARGEST_BATCH, _CHUNK, capacity), [], weights="link", force=True)
    part, began = to.with_name(to.name + ".part"), time.perf_counter()
    with LLM(engines, backend=backend, drafting=None) as llm, part.open("w", encoding="utf-8") as file:
        opened, texts = time.perf_counter(), [line["prompt"] for line in read_lines(prompts)]
        answers, written = _write_all(llm, texts, held_out, asking, file)
        seconds, where = time.perf_counter() - opened, llm.backend_name
    part.replace(to)
    print(
        f"answers: {answers:,} of {written:,} tokens, {written / seconds:,.0f} tokens/s; opened in "
        f"{opened - began:.1f} s, answered in {seconds:.1f} s on {where}",
        flush=True,
    )


def _write_all(llm: LLM, texts: list[str], held_out: set, asking: Asking, file: TextIO) -> tuple[int, int]:
    """How many answers were written, and how many tokens the model gave for them."""
    draw, end = random.Random(asking.seed), time.perf_counter() + 60 * asking.minutes
    source, answers, written = iter(texts), 0, 0
    sampled = SamplingParams(temperature=asking.temperature, max_tokens=asking.tokens)
    while answers < asking.count and time.perf_counter() < end:
        room = min(_GROUP, asking.count - answers)
        own, tokens = _own_prompts(llm, round(room * asking.own_prompts), end, draw, asking)
        given = list(islice(source, room - len(own)))
        if not own and not given:
            break
        kept = [text for text in (*own, *given) if not runs_of_words(text) & held_out]
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in kept]
        params = [replace(sampled, temperature=0.0) if draw.random() < asking.greedy else sampled for _ in kept]
        asked = [each for each in zip(prompts, params, strict=True) if len(each[0]) <= asking.prompt_tokens]
        for prompt, answer in _answered(llm, asked, end, draw):
            line = {"ids": [*prompt, *answer.token_ids], "first": len(prompt)}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            answers, tokens = answers + 1, tokens + len(answer.token_ids)
        written += tokens
    return answers, written


def _own_prompts(llm: LLM, count: int, end: float, draw: random.Random, asking: Asking) -> tuple[list[str], int]:
    """What the model writes where a user's turn begins, as far as it came to its end; and how many tokens it wrote."""
    opening = user_turn(llm.tokenizer)
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=asking.prompt_tokens // 2)
    found = _answered(llm, [(opening, params)] * count, end, draw)
    texts = [response.text.strip() for _, response in found if response.finish_reason == "stop"]
    return [each for each in texts if len(each.split()) > 2], sum(len(each.token_ids) for _, each in found)


def _answered(
    llm: LLM, asked: Sequence[tuple[list[int], SamplingParams]], end: float, draw: random.Random
) -> list[tuple[list[int], Response]]:
    """Prompts and what was answered before the time `end`, in the order of `asked`; each is drawn with its own seed."""
    left = max(0.0, end - time.perf_counter())
    requests = [Request(ids, params=replace(params, seed=draw.getrandbits(31)), deadline=left) for ids, params in asked]
    found = []
    for (ids, _), response in zip(asked, llm.handle(requests), strict=True):
        if not isinstance(response, Response):
            raise response
        if response.token_ids:
            found.append((ids, response))
    return found


def user_turn(tokenizer: Tokenizer) -> list[int]:
    """The tokens of a conversation up to where a user's text begins, by the chat template."""
    one, other = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("Hello", "7"))
    return one[: common_beginning(one, other)]
