"""A benchmark: drafting configurations, as they are written on the command line, compared with plain decoding on the
same prompts, taking turns in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.configs import installed
from edgellm.drafting.config import SIZES, SUFFIX, WITHOUT_MODEL, DraftingConfig, checked_drafting, drafting_config
from edgellm.engines.errors import at_place
from edgellm.engines.formats.small_files import PROMPT_BYTES, read_text
from edgellm.engines.formats.strict_formats import parse_json
from edgellm.errors import EdgeLLMError, RequestError
from edgellm.kernels.user_paths import user_path
from edgellm.runtime import SpecDecodeRuntime
from edgellm.snapshots.contents import common_beginning
from edgellm.text.messages import checked_messages

if TYPE_CHECKING:
    from edgellm.drafting.report import DraftingReport, DraftingStatistics
    from edgellm.engines.model.limits import EngineLimits
    from edgellm.llm import LLM
    from edgellm.sampling_params import SamplingParams


PLAIN_NAME = "plain"
_MOST_DIGITS = 9
#: What the numbers behind a kind may set.
_NUMBERS: dict[str, list[tuple[str, ...]]] = {"chain": [("draft_steps",)], "tree": [SIZES], "adaptive": [(), SIZES]}
EXPECTED = (
    "expected plain, suffix, chain:STEPS, tree:TOP_K/STEPS/SIZE, choices:NAME or FILE, or adaptive[:TOP_K/STEPS/SIZE]; "
    "behind a chain there may be :sampled, behind what a draft model proposes :typical or :suffix"
)


@dataclass(frozen=True)
class BenchConfiguration:
    """A name for tables, and what it means; None decodes without a draft."""

    name: str
    drafting: DraftingConfig | None

    @property
    def is_lossless(self) -> bool:
        """Whether it must give the tokens of plain decoding: False where others are to be expected."""
        return self.drafting is None or self.drafting.gives_plain_tokens


def parse_configurations(
    text: str | None, limits: EngineLimits, backend: str, settings: Mapping[str, Any]
) -> list[BenchConfiguration]:
    """What a comma-separated list names, or what suits the engines; plain decoding, the yardstick, is always the first.

    `settings` are drafting settings that hold for all unless a configuration says otherwise. Raises RequestError for
    one that is malformed or that the engines cannot serve.
    """
    if text is None:
        names = default_configurations(limits)
    else:
        names = [name.strip() for name in text.split(",")]
        if "" in names:
            raise RequestError(f"--configurations {text} has a name that is empty: {EXPECTED}")
        names = [PLAIN_NAME, *(name for name in dict.fromkeys(names) if name != PLAIN_NAME)]
    return [_parse(name, limits, backend, settings) for name in names]


def default_configurations(limits: EngineLimits) -> list[str]:
    """Plain decoding; with a draft also chains, the largest tree, and what the controller picks, without one what was
    said before."""
    if not limits.has_draft:
        return [PLAIN_NAME, *WITHOUT_MODEL]
    lengths = sorted({min(steps, limits.draft_steps) for steps in (2, 3, 5)})
    tree = "/".join(str(getattr(limits, size)) for size in SIZES)
    return [PLAIN_NAME, *(f"chain:{steps}" for steps in lengths), f"tree:{tree}", "adaptive"]


def _parse(name: str, limits: EngineLimits, backend: str, settings: Mapping[str, Any]) -> BenchConfiguration:
    if name == PLAIN_NAME:
        return BenchConfiguration(name, None)
    if name in WITHOUT_MODEL:
        return BenchConfiguration(name, DraftingConfig(kind=name))
    if not limits.has_draft:
        raise RequestError(f"the configuration {name!r} drafts, but the engine directory has no draft model")
    common = {key: value for key, value in settings.items() if key not in ("draft", "kind", "choices", *SIZES)}
    preset = common.pop("preset", None)
    chosen = common | _settings_of(name)
    if chosen.get("acceptance") != "typical":
        chosen = {key: value for key, value in chosen.items() if not key.startswith("posterior_")}
    with at_place(f"the configuration {name!r}", EdgeLLMError, RequestError):
        checked = checked_drafting(chosen)
        config = drafting_config(limits, backend, checked, preset)
        config.plan(limits)
    return BenchConfiguration(name, config)


def _settings_of(name: str) -> dict[str, Any]:
    """The drafting settings that a configuration's name stands for."""
    kind, *rest = name.split(":")
    chosen: dict[str, Any] = {"adaptive": kind == "adaptive"}
    behind: dict[str, dict[str, Any]] = {
        "sampled": {"sampled": True},
        "typical": {"acceptance": "typical"},
        SUFFIX: {"suffix_decoding": True},
    }
    while rest and rest[-1] in behind:
        chosen |= behind[rest.pop()]
    if kind == "choices" and rest:
        return chosen | {"choices": ":".join(rest)}
    sizes = [part for given in rest for part in given.split("/")]
    named = next((names for names in _NUMBERS.get(kind, ()) if len(names) == len(sizes)), None)
    if named is None or len(rest) > 1 or not all(part.isdecimal() and len(part) <= _MOST_DIGITS for part in sizes):
        raise RequestError(f"the configuration {name!r} is unknown: {EXPECTED}")
    if kind != "adaptive":
        chosen["kind"] = kind
    return chosen | dict(zip(named, map(int, sizes), strict=True))


DEFAULT_PROMPTS = "bench_prompts"
NO_TASK = "all"


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation to answer, and the task that it belongs to."""

    messages: tuple[dict[str, Any], ...]
    task: str = NO_TASK


def default_prompts() -> list[BenchPrompt]:
    """The prompts of `configs/bench_prompts.yaml`."""
    return [_from_object(entry, DEFAULT_PROMPTS) for entry in installed(DEFAULT_PROMPTS)]


def load_prompts(path: Path) -> list[BenchPrompt]:
    """Read a file of prompts, one a line; empty lines are left out. Raises RequestError that names file and line.

    A line is plain text, or a JSON object with "prompt" (text), "messages" (a conversation) or "turns" (a list of
    texts, of which the first is asked), and, if there is one, "task" or "category".
    """
    text = read_text(user_path(path), PROMPT_BYTES, RequestError, "the prompts file", takes_pipes=True)
    prompts = []
    for number, line in enumerate(text.splitlines(), 1):
        place, is_object = f"{path}, line {number}", line.lstrip().startswith("{")
        if line.strip():
            values = parse_json(line, place, RequestError) if is_object else {"prompt": line.strip()}
            prompts.append(_from_object(values, place))
    if not prompts:
        raise RequestError(f"the prompts file {path} is empty: expected a prompt on each line")
    return prompts


def _from_object(values: dict[str, Any], place: str) -> BenchPrompt:
    task = values.get("task", values.get("category", NO_TASK))
    if not isinstance(task, str) or not task:
        raise RequestError(f"{place}: the task is {task!r}: expected text")
    given = [key for key in ("prompt", "messages", "turns") if key in values]
    if len(given) != 1:
        raise RequestError(f"{place}: expected one of the keys prompt, messages and turns, found {given or 'none'}")
    if "messages" in values:
        with at_place(place, RequestError):
            return BenchPrompt(tuple(checked_messages(values["messages"])), task)
    text = values.get("prompt")
    if "turns" in values:
        turns = values["turns"]
        text = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"{place}: the {given[0]} hold no text to ask")
    return BenchPrompt(({"role": "user", "content": text},), task)


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


def run_benchmark(
    llm: LLM,
    plain: LLM,
    prompts: Sequence[BenchPrompt],
    configurations: Sequence[BenchConfiguration],
    params: SamplingParams,
    repeat: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[BenchRun], dict[str, DraftingReport]]:
    """Answer every prompt `repeat` times with every configuration: plain decoding on `plain`, the others on `llm`.

    Configurations take turns at each prompt, another one first each time, so that a machine that gets slower or faster
    meets all of them. Each answers every prompt once before that counts: code is compiled and loaded, and graphs are
    captured, for lengths of texts and kinds of rounds. What was said then is forgotten. Beside all answers are, by
    name, what the controllers of adaptive configurations say at the end.
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
    return runs, reports


def summarize(
    runs: Sequence[BenchRun], reports: Mapping[str, DraftingReport], configurations: Sequence[BenchConfiguration]
) -> list[dict[str, Any]]:
    """One JSON object for each configuration; the first is the yardstick of ratios and outputs.

    Speeds are tokens after the first over the seconds for them; `ratio` is the speed over the yardstick's,
    `ratio_by_repeat` the same within each repetition. `outputs` counts answers whose tokens equal the yardstick's to
    the same prompt, and where others differ first. `controller` is the DraftingReport of an adaptive configuration.
    """
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
                "controller": asdict(report) if (report := reports.get(configuration.name)) else None,
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
