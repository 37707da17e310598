"""Judges what a served model answers in every way by what plain decoding answers to one request at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgellm import LLM, Response, SpecDecodeRuntime
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import teacher_forced_logits
from tools.bench.differences import SAMPLINGS, Difference, difference, parameters
from tools.bench.held_out_prompts import Messages, as_they_are
from tools.bench.quantized_model import WEIGHTS, base_of
from tools.bench.serving_ways import SLOTS, WAYS, Asked, answers, forget_rows

#: Of a picture of the shipped model.
IMAGE_ROWS = (81,)
LIMITS = EngineLimits(SLOTS, 128, 1024, draft_top_k=10, draft_steps=6, verify_tree_size=16)
DRAFTINGS = {"plain": None, "drafted": DraftingConfig(kind="chain", draft_steps=5)}
NEXT_QUESTION = {"role": "user", "content": "Thank you. What else is on the table?"}


@dataclass(frozen=True)
class Served:
    """All answers of one way; `reused` are the prompts' tokens whose rows were reused."""

    way: str
    drafting: str
    sampling: str
    prompts: int
    answers: int
    tokens: int
    prompt_tokens: int
    reused: int
    differences: list[Difference]
    seconds: float

    @property
    def different_prompts(self) -> int:
        """Conversations of which an answer differs."""
        return len({each.prompt for each in self.differences})

    @property
    def explained(self) -> bool:
        """Whether rounding explains the differences."""
        return all(each.gap < each.allowed for each in self.differences)


class Server(NamedTuple):
    """What answers: `backend` and `executor` of `LLM`, rows of `kv_cache`, the base's layers of `weights`; `images`:
    with the model's encoder."""

    backend: str = "numpy"
    executor: str = "auto"
    kv_cache: str = "compute"
    weights: str = WEIGHTS[0]
    images: bool = False


def build(model: Path, target: Path, server: Server) -> Path:
    """An engine directory of a model, with its draft and its adapters, and eight slots."""
    adapters = {path.name: path for path in sorted((model / "lora").glob("*"))}
    limits = replace(LIMITS, kv_cache=server.kv_cache, image_rows=IMAGE_ROWS if server.images else ())
    if adapters:
        limits = replace(limits, max_lora_rank=16, lora_slots=2)
    targets = [] if server.backend == "numpy" else None
    base = base_of(model, server.weights, target.parent)
    build_engine_directory(
        base,
        target,
        limits,
        targets,
        draft=model / "draft",
        vision=model / "vision" if server.images else None,
        adapters=adapters,
        all_plans=server.executor == "tensorrt",
    )
    return target


class Comparison:
    """Asks a served model in every way, and judges its answers by `plain`, which decodes them one at a time."""

    def __init__(self, plain: LLM, sampling: str, tokens: int) -> None:
        self._plain, self._sampling = plain, sampling
        self._params = parameters(sampling, tokens)

    def alone(self, conversations: Sequence[Messages], first: int = 0) -> list[Asked]:
        """The conversations, adapters in turn, with plain decoding's answers to them and to what is asked next; they
        are numbered from `first` on."""
        names = [choice for name in self._plain.adapters for choice in (None, name)] or [None]
        found = []
        for index, messages in enumerate(conversations):
            adapter = names[index % len(names)]
            response = self._answer_alone(messages, adapter)
            following = [*messages, {"role": "assistant", "content": response.text}, NEXT_QUESTION]
            next_ids = self._answer_alone(following, adapter).token_ids
            found.append(Asked(first + index, messages, adapter, response.token_ids, following, next_ids))
        return found

    def compare(self, llm: LLM, way: str, drafting: str, asked: Sequence[Asked]) -> Served:
        """All answers of a way."""
        started = time.perf_counter()
        given = list(answers(llm, way, asked, self._params))
        differences = [self._difference(each, follows, response.token_ids) for each, follows, response in given]
        usages = [response.usage for _, _, response in given]
        return Served(
            way,
            drafting,
            self._sampling,
            len(asked),
            len(given),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.reused_tokens for usage in usages),
            [each for each in differences if each is not None],
            round(time.perf_counter() - started, 1),
        )

    def _answer_alone(self, messages: Messages, adapter: str | None) -> Response:
        self._plain.call(forget_rows).result()
        response = self._plain.chat(as_they_are(messages), self._params, adapter)
        assert response.usage.reused_tokens == 0
        return response

    def _difference(self, asked: Asked, follows: bool, found: Sequence[int]) -> Difference | None:
        messages, expected = (asked.next_messages, asked.next_answer) if follows else (asked.messages, asked.answer)
        prompt = self._plain.tokenizer.encode_chat(messages)
        backend, dtype = self._plain.backend_name, self._plain.directory.dtype
        return difference(
            asked.number,
            prompt,
            expected,
            found,
            self._params,
            backend,
            dtype,
            lambda answer: self._logits(prompt, answer, asked.adapter),
        )

    def _logits(self, prompt: Sequence[int], answer: Sequence[int], adapter: str | None) -> np.ndarray:
        """The very logits that plain decoding had drawn the last token of an answer from."""

        def computed(runtime: SpecDecodeRuntime) -> np.ndarray:
            base = runtime._open_runner().base
            base.set_adapter(0, adapter)
            logits = teacher_forced_logits(base, prompt, answer)[-1]
            forget_rows(runtime)
            return logits

        return self._plain.call(computed).result()


def compare_all(
    directory: Path,
    server: Server,
    conversations: Sequence[Messages],
    tokens: int,
    ways: Sequence[str] = WAYS,
    draftings: Sequence[str] = tuple(DRAFTINGS),
    samplings: Sequence[str] = tuple(SAMPLINGS),
    first: int = 0,
    done: Callable[[Served], object] | None = None,
) -> list[Served]:
    """Every way, with and without a draft, greedy and sampled; each is given to `done` as it is done.

    The conversations are numbered from `first` on.
    """
    results = []
    opened = partial(LLM, directory, backend=server.backend, executor=server.executor)
    with opened(drafting=None) as plain:
        compared = {name: Comparison(plain, name, tokens) for name in samplings}
        asked = {name: compared[name].alone(conversations, first) for name in samplings}
        for drafting in draftings:
            with opened(drafting=DRAFTINGS[drafting]) as llm:
                for name in samplings:
                    for way in ways:
                        results.append(compared[name].compare(llm, way, drafting, asked[name]))
                        if done is not None:
                            done(results[-1])
    return results


def merged(parts: Sequence[tuple[int, Served]]) -> list[Served]:
    """The shares' results, added up; `seconds` are those of all processes together."""
    counted = ("prompts", "answers", "tokens", "prompt_tokens", "reused", "seconds")
    found: dict[tuple[str, str, str], dict[int, Served]] = {}
    for share, served in parts:
        found.setdefault((served.drafting, served.sampling, served.way), {})[share] = served
    return [
        replace(
            next(iter(same.values())),
            differences=[each for part in same.values() for each in part.differences],
            **{name: round(sum(getattr(part, name) for part in same.values()), 1) for name in counted},
        )
        for same in found.values()
    ]


def line(served: Served) -> str:
    """A line of the printed table."""
    largest = max(served.differences, key=lambda each: each.gap, default=None)
    found = f" of {served.different_prompts} prompts" if largest else ""
    if largest:
        found += f" (the largest gap is {largest.gap:.3g}, where less than {largest.allowed:.3g} is allowed)"
    return (
        f"{served.way:10} {served.drafting:7} {served.sampling:7}: {served.answers} answers, {served.tokens} tokens, "
        f"{served.reused} of {served.prompt_tokens} prompt tokens reused, {len(served.differences)} differ{found}, "
        f"{served.seconds:.0f} s"
    )
