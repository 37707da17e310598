"""Answers that a model gives itself, by this runtime: what a head learns from.

A line of the file is an answer: `ids` are the prompt's tokens and the answer's; those from `first` on are learned from.
Some prompts the model wrote, too: it goes on where a user's turn begins (Z. Xu and others 2024, "Magpie"), which gives
questions like those that it was tuned on, code among them. Of these the question is learned from, as well.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
from tools.heads.settings import Asking

#: Tokens of a prompt that are computed at once.
_CHUNK = 128
#: Questions that are longer hardly come to an end: SmolLM2 ended 11 of 16 within 56 tokens, the others not within 160.
_OWN_TOKENS = 96
#: Requests that are handed over together: batches run empty at the end of a group alone.
_GROUP = 512


@dataclass(frozen=True)
class Document:
    """Token ids [T] int32, of which the model wrote those from `first` on."""

    ids: np.ndarray
    first: int


@dataclass(frozen=True)
class Share:
    """What one engine is asked, how, and the file that it writes."""

    texts: list[str]
    asking: Asking
    to: Path


def read_documents(path: Path) -> list[Document]:
    """The answers of a file."""
    return [Document(np.array(line["ids"], np.int32), line["first"]) for line in read_lines(path)]


def build_engines(base: Path, engines: Path, asking: Asking) -> None:
    """Build the engine directory that answers are made with, without a draft."""
    capacity = asking.prompt_tokens + asking.answer_tokens + _CHUNK
    build_engine_directory(base, engines, EngineLimits(LARGEST_BATCH, _CHUNK, capacity), [], weights="link", force=True)


def answer_side_by_side(engines: Path, backend: str, gpu: str | None, held_out: set, shares: Sequence[Share]) -> None:
    """In a process of its own, before it looks for a GPU: an engine for each of the `shares`. All are open, and have
    captured their steps, before one of them answers: nothing else may use the GPU's memory while a step is captured."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    began = time.perf_counter()
    with ExitStack() as stack, ThreadPoolExecutor(len(shares)) as pool:
        opened = [stack.enter_context(LLM(engines, backend=backend, drafting=None)) for _ in shares]
        for llm in opened:
            llm.call(lambda runtime: runtime.capture_decoding_cuda_graph()).result()
        print(f"{len(opened)} engines opened in {time.perf_counter() - began:.1f} s", flush=True)
        for each in [pool.submit(write_answers, *given, held_out) for given in zip(opened, shares, strict=True)]:
            each.result()


def write_answers(llm: LLM, share: Share, held_out: set) -> None:
    """Write a file of answers to prompts until the time is over, the count is reached, or no prompt is left, and print
    what came of it. Prompts that share a run of words with `held_out` are left out, those that the model writes too."""
    part, began = share.to.with_name(share.to.name + ".part"), time.perf_counter()
    with part.open("w", encoding="utf-8") as file:
        answers, written = _write_all(llm, share.texts, held_out, share.asking, file)
    part.replace(share.to)
    seconds = time.perf_counter() - began
    print(
        f"answers: {answers:,} of {written:,} tokens, questions included: {written / seconds:,.0f} tokens/s; "
        f"answered in {seconds:.1f} s on {llm.backend_name}",
        flush=True,
    )


def _write_all(llm: LLM, texts: list[str], held_out: set, asking: Asking, file: TextIO) -> tuple[int, int]:
    """How many answers were written, and how many tokens the model gave for them."""
    draw, end = random.Random(asking.seed), time.perf_counter() + 60 * asking.answer_minutes
    sampled = SamplingParams(temperature=asking.temperature, max_tokens=asking.answer_tokens)
    system = llm.default_system_prompt
    source, opening, answers, written = iter(texts), user_turn(llm.tokenizer, system), 0, 0
    while answers < asking.answer_count and time.perf_counter() < end:
        room = min(_GROUP, asking.answer_count - answers)
        own, tokens = _own_prompts(llm, opening, round(room * asking.own_prompts), end, draw, asking)
        given = list(islice(source, room - len(own)))
        if not own and not given:
            break
        asked, first = [], []
        for number, text in enumerate((*own, *given)):
            ids = chat_ids(llm.tokenizer, system, text)
            if len(ids) <= asking.prompt_tokens and not runs_of_words(text) & held_out:
                greedy = draw.random() < asking.greedy
                asked.append((ids, replace(sampled, temperature=0.0) if greedy else sampled))
                first.append(len(opening) if number < len(own) else len(ids))
        for (ids, _), begin, answer in zip(asked, first, _answered(llm, asked, end, draw), strict=True):
            if answer.token_ids:
                line = {"ids": [*ids, *answer.token_ids], "first": begin}
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                answers, tokens = answers + 1, tokens + len(answer.token_ids)
        written += tokens
    return answers, written


def _own_prompts(
    llm: LLM, opening: list[int], count: int, end: float, draw: random.Random, asking: Asking
) -> tuple[list[str], int]:
    """What the model writes behind the `opening` of a user's turn, as far as it came to its end; and how many tokens it
    wrote."""
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=min(_OWN_TOKENS, asking.prompt_tokens // 2))
    found = _answered(llm, [(opening, params)] * count, end, draw)
    texts = [each.text.strip() for each in found if each.finish_reason == "stop"]
    return [each for each in texts if len(each.split()) > 2], sum(len(each.token_ids) for each in found)


def _answered(
    llm: LLM, asked: Sequence[tuple[list[int], SamplingParams]], end: float, draw: random.Random
) -> list[Response]:
    """Answers in the order of `asked`, those after the time `end` without tokens; each is drawn with its own seed."""
    left = max(0.0, end - time.perf_counter())
    requests = [Request(ids, params=replace(params, seed=draw.getrandbits(31)), deadline=left) for ids, params in asked]
    found = []
    for response in llm.handle(requests):
        if not isinstance(response, Response):
            raise response
        found.append(response)
    return found


def chat_ids(tokenizer: Tokenizer, system: str, text: str) -> list[int]:
    """The tokens of a conversation that a user's text begins, as `LLM.chat` has them."""
    given = [{"role": "system", "content": system}] if system else []
    return tokenizer.encode_chat([*given, {"role": "user", "content": text}])


def user_turn(tokenizer: Tokenizer, system: str) -> list[int]:
    """The tokens of a conversation up to where a user's text begins."""
    one, other = (chat_ids(tokenizer, system, text) for text in ("Hello", "7"))
    return one[: common_beginning(one, other)]
