"""Ways of serving against one request at a time, token for token: snapshots, conversations, batches in every order.

    python -m tools.bench.serving_equality [--model ENGINE_DIR] [--backend numpy] [--prompts 100] [--tokens 32]
                                           [--ways snapshot ...] [--draftings plain ...] [--samplings greedy ...]
                                           [--processes 1] [--record RECORD.jsonl] [--output RESULTS.json]

The model is built with eight slots, its draft and its adapters. Its held-out conversations take turns with the adapters
and without one, so that each request switches. What is compared with is plain decoding of one request at a time, of
whose rows nothing is reused. The ways:

    alone       again, one at a time, but for what earlier requests left
    snapshot    the conversation's system prompt is computed ahead
    turns       the answer and a next question follow, in a session with others in between
    batch of 3  in all six orders
    batch of 8  in 8 orders: each request once in each place, and once before each other (Williams 1949)

Every other order of a batch begins with slots that hold nothing, the next reuses what it left.

Answers go on behind the end of the turn, where the model means nothing by its tokens and the likeliest are close. Where
one differs, `gap` is how far plain decoding was from drawing the other token. Exits with 1 where a gap is larger than
rounding explains (1e-4 on NumPy, 4 spacings of the dtype on a GPU), or on a GPU answers of more than a tenth of the
conversations differ. What is done is written to the record as it comes; a run that finds one goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import permutations, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgellm import LLM, Request, Response, SpecDecodeRuntime
from edgellm.drafting import DraftingConfig
from edgellm.engines.builder import build_engine_directory
from edgellm.engines.comparison import teacher_forced_logits
from edgellm.engines.decoder_config import EngineLimits
from edgellm.engines.digests import hash_bytes
from edgellm.engines.draw_comparison import draw_gap, first_difference, spacing
from edgellm.llm import SHIPPED_MODEL
from edgellm.preparation import sampling_values
from tools.bench.drafting_equality import GPU_SPACINGS, NUMPY_GAP, Difference, parameters
from tools.bench.provenance import provenance
from tools.demo_model.evaluate import SOURCES, evaluation_items

SLOTS = 8
LIMITS = EngineLimits(SLOTS, 128, 1024, draft_top_k=10, draft_steps=6, verify_tree_size=16)
DRAFTINGS = {"plain": None, "drafted": DraftingConfig(kind="chain", draft_steps=5)}
SAMPLINGS = ("greedy", "sampled")
WAYS = ("alone", "snapshot", "turns", "batch of 3", "batch of 8")
NEXT_QUESTION = {"role": "user", "content": "Thank you. What else is on the table?"}
#: On a GPU answers of this share of the conversations may differ, where rounding decides.
GPU_SHARE = 0.1

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Asked:
    """The conversation `number`, with an adapter (None: without one), and the answer that plain decoding gives to it
    alone."""

    number: int
    messages: Messages
    adapter: str | None
    answer: tuple[int, ...] = ()
    next_messages: Messages = field(default_factory=list)
    next_answer: tuple[int, ...] = ()


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

    def explained(self, backend: str) -> bool:
        """Whether rounding explains the differences."""
        few = backend == "numpy" or self.different_prompts <= GPU_SHARE * self.prompts
        return few and all(each.gap < each.allowed for each in self.differences)


def held_out_conversations(count: int) -> list[Messages]:
    """Conversations that training never saw, all skills in turn."""
    per_skill = math.ceil(count / len(SOURCES))
    items = evaluation_items(11, per_skill)
    ordered = [items[skill * per_skill + index] for index in range(per_skill) for skill in range(len(SOURCES))]
    return [item["messages"] for item in ordered[:count]]


def build(model: Path, target: Path, backend: str) -> Path:
    """An engine directory of a model, its draft and its adapters, with eight slots."""
    adapters = {path.name: path for path in sorted((model / "lora").glob("*"))}
    limits = replace(LIMITS, max_lora_rank=16, lora_slots=2) if adapters else LIMITS
    targets = [] if backend == "numpy" else None
    build_engine_directory(model, target, limits, targets, draft=model / "draft", adapters=adapters)
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
        started, answers = time.perf_counter(), list(self._answers(llm, way, asked))
        differences = []
        for each, follows, response in answers:
            difference = self._difference(each, follows, response.token_ids)
            if difference is not None:
                differences.append(difference)
        usages = [response.usage for _, _, response in answers]
        return Served(
            way,
            drafting,
            self._sampling,
            len(asked),
            len(answers),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.reused_tokens for usage in usages),
            differences,
            round(time.perf_counter() - started, 1),
        )

    def _answers(self, llm: LLM, way: str, asked: Sequence[Asked]) -> Iterator[tuple[Asked, bool, Response]]:
        """What was asked, whether it is what follows, and the response."""
        if way == "alone":
            for each in asked:
                yield each, False, llm.chat(each.messages, self._params, each.adapter)
        elif way == "snapshot":
            for each in asked:
                llm.cache_system_prompt(each.messages[0]["content"], each.adapter)
                llm.call(forget_rows).result()
                yield each, False, llm.chat(each.messages, self._params, each.adapter)
        elif way == "turns":
            for few in groups(asked, SLOTS):  # as many as have rows of their own
                for each in few:
                    yield each, False, llm.chat(each.messages, self._params, each.adapter)
                for each in reversed(few):
                    yield each, True, llm.chat(each.next_messages, self._params, each.adapter)
        else:
            size = int(way.rsplit(maxsplit=1)[-1])
            for few in groups(asked, size):
                for number, order in enumerate(orders(few)):
                    if number % 2 == 0:  # the others reuse rows
                        llm.call(forget_rows).result()
                    requests = [Request(None, each.messages, self._params, each.adapter) for each in order]
                    for each, response in zip(order, llm.handle(requests), strict=True):
                        if not isinstance(response, Response):
                            raise response
                        yield each, False, response

    def _answer_alone(self, messages: Messages, adapter: str | None) -> Response:
        self._plain.call(forget_rows).result()
        response = self._plain.chat(messages, self._params, adapter)
        assert response.usage.reused_tokens == 0
        return response

    def _difference(self, asked: Asked, follows: bool, found: Sequence[int]) -> Difference | None:
        messages, expected = (asked.next_messages, asked.next_answer) if follows else (asked.messages, asked.answer)
        place = first_difference(expected, found)
        if place is None:
            return None
        prompt = self._plain.tokenizer.encode_chat(messages)
        logits = self._logits(prompt, expected[: place + 1], asked.adapter)
        values = sampling_values(self._params)
        gap = draw_gap(logits, prompt, expected[:place], values, expected[place], found[place])
        allowed = NUMPY_GAP
        if self._plain.backend_name != "numpy":
            allowed = GPU_SPACINGS * spacing(float(np.abs(logits).max()), self._plain.directory.dtype)
        return Difference(asked.number, place, gap, allowed)

    def _logits(self, prompt: Sequence[int], answer: Sequence[int], adapter: str | None) -> np.ndarray:
        """The very logits that plain decoding had drawn the last token of an answer from."""

        def computed(runtime: SpecDecodeRuntime) -> np.ndarray:
            base = runtime._open_runner().base
            base.set_adapter(0, adapter)
            logits = teacher_forced_logits(base, prompt, answer)[-1]
            forget_rows(runtime)
            return logits

        return self._plain.call(computed).result()


def forget_rows(runtime: SpecDecodeRuntime) -> None:
    """Reuse nothing of what slots hold."""
    for contents in runtime._contents:
        contents.replace((), 0 if runtime.has_draft_model else None)


def groups(asked: Sequence[Asked], size: int) -> list[Sequence[Asked]]:
    """Groups of so many, of which the last may be smaller."""
    return [asked[first : first + size] for first in range(0, len(asked), size)]


def orders(few: Sequence[Asked]) -> Iterator[Sequence[Asked]]:
    """All orders of up to three; of more those of a design in which each stands equally often in each place, and
    equally often right before each other (Williams 1949): n orders, 2 n where n is odd."""
    size = len(few)
    if size <= 3:
        yield from permutations(few)
        return
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(size)]
    for first in range(size):
        order = [few[(first + step) % size] for step in zigzag]
        yield order
        if size % 2:
            yield order[::-1]


def compare_all(
    directory: Path,
    backend: str,
    conversations: Sequence[Messages],
    tokens: int,
    ways: Sequence[str] = WAYS,
    draftings: Sequence[str] = tuple(DRAFTINGS),
    samplings: Sequence[str] = SAMPLINGS,
    record: Record | None = None,
    share: int = 0,
) -> list[Served]:
    """Every way, with and without a draft, greedy and sampled; each is added to the `record` as it is done."""
    results = []
    with LLM(directory, backend=backend, drafting=None) as plain:
        compared = {name: Comparison(plain, name, tokens) for name in samplings}
        asked = {name: compared[name].alone(conversations, share * SLOTS) for name in samplings}
        for drafting in draftings:
            with LLM(directory, backend=backend, drafting=DRAFTINGS[drafting]) as llm:
                for name in samplings:
                    for way in ways:
                        results.append(compared[name].compare(llm, way, drafting, asked[name]))
                        if record is not None:
                            record.add(share, results[-1])
    return results


@dataclass(frozen=True)
class Record:
    """A file with a line for each way of a share of the conversations that is done, and a heading: what is compared.

    Any process may add to it.
    """

    path: Path
    heading: dict[str, Any]

    def begin(self) -> None:
        """Make the file where it is not there; ValueError where it is that of another comparison."""
        if not self.path.exists():
            self._append(self.heading)
        elif not self.path.read_text().endswith("\n"):
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")  # what was cut off stays a line of its own
        if (found := json.loads(self.path.read_text().splitlines()[0])) != self.heading:
            raise ValueError(f"{self.path} records {found}, expected {self.heading}: remove it, or name another")

    def add(self, share: int, served: Served) -> None:
        """One way is done."""
        self._append({"share": share, **asdict(served)})
        print(f"share {share}: {line(served)}", flush=True)

    def done(self) -> list[tuple[int, Served]]:
        """All that is done, each with its share; a line that was not written to its end is none."""
        found = []
        for text in self.path.read_text().splitlines()[1:]:
            with suppress(ValueError):
                values = json.loads(text)
                values["differences"] = [Difference(**each) for each in values["differences"]]
                found.append((values.pop("share"), Served(**values)))
        return found

    def _append(self, values: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


class Job(NamedTuple):
    """What one process does at a time."""

    share: int
    draftings: tuple[str, ...]
    samplings: tuple[str, ...]
    ways: tuple[str, ...]


def jobs_left(record: Record, arguments: argparse.Namespace, shares: int) -> list[Job]:
    """What is not recorded yet. On NumPy jobs are small, so that processes end together; on a GPU few, for each
    opens the engines."""
    done = {(share, served.drafting, served.sampling, served.way) for share, served in record.done()}
    samplings = [(name,) for name in arguments.samplings]
    if arguments.backend != "numpy":
        samplings = [tuple(arguments.samplings)]
    jobs = []
    for drafting, share, names in product(reversed(arguments.draftings), range(shares), samplings):
        ways = [way for way in arguments.ways if any((share, drafting, name, way) not in done for name in names)]
        if ways:
            jobs.append(Job(share, (drafting,), names, tuple(ways)))
    return jobs


def run_jobs(processes: int, jobs: Sequence[Job], call: Callable[[Job], Any]) -> list[str]:
    """Do all jobs, in so many processes; what failed, in words."""
    if processes == 1:
        for job in jobs:
            call(job)
        return []
    failures = []
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        running = {pool.submit(call, job): job for job in jobs}
        for future in as_completed(running):
            if (error := future.exception()) is not None:
                failures.append(f"{running[future]}: {type(error).__name__}: {error}")
                print(failures[-1], flush=True)
    return failures


def run_job(
    job: Job, directory: Path, backend: str, shares: Sequence[Sequence[Messages]], tokens: int, record: Record
) -> None:
    """One job; what it finds is in the record."""
    conversations = shares[job.share]
    compare_all(directory, backend, conversations, tokens, job.ways, job.draftings, job.samplings, record, job.share)


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
    largest = max(served.differences, key=lambda each: each.gap / each.allowed, default=None)
    found = f" of {served.different_prompts} prompts" if largest else ""
    if largest:
        found += f" (the largest gap is {largest.gap:.3g}, where less than {largest.allowed:.3g} is allowed)"
    return (
        f"{served.way:10} {served.drafting:7} {served.sampling:7}: {served.answers} answers, {served.tokens} tokens, "
        f"{served.reused} of {served.prompt_tokens} prompt tokens reused, {len(served.differences)} differ{found}, "
        f"{served.seconds:.0f} s"
    )


def main() -> None:
    """Compare, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL, help="a directory with a model and its draft/")
    parser.add_argument("--backend", choices=("numpy", "tensorrt"), default="numpy")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--draftings", nargs="+", choices=list(DRAFTINGS), default=list(DRAFTINGS))
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--record", type=Path, help="by default it lies beside the results")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that are made
    asked = held_out_conversations(arguments.prompts)
    shares = groups(asked, SLOTS if arguments.backend == "numpy" else max(1, len(asked)))
    heading = {name: getattr(arguments, name) for name in ("backend", "prompts", "tokens")}
    heading["model"] = hash_bytes((arguments.model / "edgellm.json").read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        beside = Path(folder) / "record" if arguments.output is None else arguments.output.with_suffix(".jsonl")
        record = Record(arguments.record or beside, heading)
        record.begin()
        directory = build(arguments.model, Path(folder) / "engines", arguments.backend)
        call = partial(
            run_job,
            directory=directory,
            backend=arguments.backend,
            shares=shares,
            tokens=arguments.tokens,
            record=record,
        )
        failures = run_jobs(arguments.processes, jobs_left(record, arguments, len(shares)), call)
        left = jobs_left(record, arguments, len(shares))
        found = merged(record.done())
    print("\n".join(map(line, found)))
    explained = not left and all(served.explained(arguments.backend) for served in found)
    different = sum(len(served.differences) for served in found)
    prompts = len({each.prompt for served in found for each in served.differences})
    print(f"{sum(served.answers for served in found)} answers, {different} of {prompts} prompts differ; ", end="")
    print("every difference is explained by rounding" if explained else "some differences are not explained")
    if left:
        print(f"not done: {left}; failed: {failures}")
    if arguments.output is not None:
        content = provenance() | {"backend": arguments.backend, "results": [asdict(served) for served in found]}
        arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if explained else 1)


if __name__ == "__main__":
    main()
