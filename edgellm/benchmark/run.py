"""Compares drafting configurations with plain decoding on the same prompts, taking turns in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from edgellm.benchmark.inputs import BenchConfiguration, BenchPrompt
from edgellm.runtime import SpecDecodeRuntime
from edgellm.snapshots.contents import common_beginning

if TYPE_CHECKING:
    from edgellm.drafting.acceptance import DraftingStatistics
    from edgellm.drafting.report import DraftingReport
    from edgellm.llm import LLM
    from edgellm.sampling_params import SamplingParams


@dataclass(frozen=True)
class BenchRun:
    """One answer: its configuration, prompt (number) and repetition, its tokens, the time from first to last, and that
    to the first, behind a prompt of so many tokens, of which some were in the KV cache already."""

    configuration: str
    task: str
    prompt: int
    repeat: int
    token_ids: tuple[int, ...]
    decode_seconds: float
    drafting: DraftingStatistics | None
    first_token_seconds: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True)
class BenchResult:
    """All answers, and of adaptive configurations what their controllers say at the end, by name."""

    runs: list[BenchRun]
    reports: dict[str, DraftingReport]


def run_benchmark(
    llm: LLM,
    plain: LLM,
    prompts: Sequence[BenchPrompt],
    configurations: Sequence[BenchConfiguration],
    params: SamplingParams,
    repeat: int,
    progress: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """Answer every prompt `repeat` times with every configuration: plain decoding on `plain`, the others on `llm`.

    Configurations take turns at each prompt, another one first each time, so that a machine that gets slower or faster
    meets all of them. Each answers every prompt once before that counts: code is compiled and loaded, and graphs are
    captured, for lengths of texts and kinds of rounds. What was said then is forgotten.
    """
    models = {each.name: plain if each.drafting is None else llm for each in configurations}
    runs: list[BenchRun] = []
    reports: dict[str, DraftingReport] = {}
    done, total = 0, (repeat + 1) * len(prompts) * len(configurations)
    for number in range(-1, repeat):
        if number == 0:
            llm.call(SpecDecodeRuntime.forget_said).result()
        for index, prompt in enumerate(prompts):
            first = (number + index) % len(configurations)
            for configuration in (*configurations[first:], *configurations[:first]):
                model = models[configuration.name]
                if model.drafting != configuration.drafting:
                    model.use_drafting(configuration.drafting)
                response = model.chat(prompt.messages, params)
                timings, usage = response.timings, response.usage
                if number >= 0:
                    own = configuration.name, prompt.task, index, number, response.token_ids, timings.decode_seconds
                    began = timings.time_to_first_token, usage.prompt_tokens, usage.reused_tokens
                    runs.append(BenchRun(*own, response.drafting, *began))
                if configuration.drafting is not None and llm.drafting_report is not None:
                    reports[configuration.name] = llm.drafting_report
                done += 1
                if progress is not None:
                    progress(done, total)
    return BenchResult(runs, reports)


def summarize(result: BenchResult, configurations: Sequence[BenchConfiguration]) -> list[dict[str, Any]]:
    """One JSON object for each configuration; the first is the yardstick of ratios and outputs.

    Speeds are tokens after the first over the seconds for them; `ratio` is the speed over the yardstick's,
    `ratio_by_repeat` the same within each repetition. `outputs` counts answers whose tokens equal the yardstick's to
    the same prompt, and where others differ first. `controller` is the DraftingReport of an adaptive configuration.
    """
    runs = result.runs
    yardstick = [run for run in runs if run.configuration == configurations[0].name]
    found = []
    for configuration in configurations:
        own = [run for run in runs if run.configuration == configuration.name]
        tasks = sorted({run.task for run in own})
        found.append(
            {
                "name": configuration.name,
                "lossless": configuration.is_lossless,
                **_figures(own, yardstick),
                "ratio_by_repeat": [
                    _ratio(_of(own, repeat=number), _of(yardstick, repeat=number))
                    for number in sorted({run.repeat for run in own})
                ],
                "tasks": {task: _figures(_of(own, task=task), _of(yardstick, task=task)) for task in tasks},
                "outputs": _compared(own, yardstick),
                "controller": asdict(report) if (report := result.reports.get(configuration.name)) else None,
            }
        )
    return found


def _of(runs: Sequence[BenchRun], **values: Any) -> list[BenchRun]:
    return [run for run in runs if all(getattr(run, name) == value for name, value in values.items())]


def _speed(runs: Sequence[BenchRun]) -> float:
    seconds = sum(run.decode_seconds for run in runs)
    return sum(max(0, len(run.token_ids) - 1) for run in runs) / seconds if seconds else 0.0


def _ratio(own: Sequence[BenchRun], yardstick: Sequence[BenchRun]) -> float | None:
    return _speed(own) / _speed(yardstick) if _speed(yardstick) else None


def _figures(own: Sequence[BenchRun], yardstick: Sequence[BenchRun]) -> dict[str, Any]:
    """Speeds and, where there were rounds, acceptance: lengths[n] rounds gave n tokens."""
    figures: dict[str, Any] = {
        "tokens": sum(len(run.token_ids) for run in own),
        "tokens_per_second": _speed(own),
        "ratio": _ratio(own, yardstick),
    }
    drafts = [run.drafting for run in own if run.drafting is not None]
    lengths = [sum(counts) for counts in zip_longest(*(draft.lengths for draft in drafts), fillvalue=0)]
    rounds = sum(lengths)
    if not rounds:
        return figures
    plans: Counter[str] = Counter()
    for draft in drafts:
        plans.update(draft.plans)
    return figures | {
        "mean_acceptance_length": sum(length * count for length, count in enumerate(lengths)) / rounds,
        "acceptance_by_position": [sum(lengths[n + 1 :]) / rounds for n in range(1, len(lengths) - 1)],
        "rounds": rounds,
        "plain_steps": sum(draft.plain_steps for draft in drafts),
        "plans": dict(plans.most_common()),
        "draft_seconds": _sum([draft.draft_seconds for draft in drafts]),
        "verify_seconds": _sum([draft.verify_seconds for draft in drafts]),
    }


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _compared(own: Sequence[BenchRun], yardstick: Sequence[BenchRun]) -> dict[str, Any]:
    expected = {run.prompt: run.token_ids for run in yardstick if run.repeat == 0}
    different = [run for run in own if run.token_ids != expected[run.prompt]]
    return {
        "compared": len(own),
        "equal": len(own) - len(different),
        "differences": [
            {"prompt": run.prompt, "repeat": run.repeat, "token": common_beginning(run.token_ids, expected[run.prompt])}
            for run in different
        ],
    }
