"""`edgellm eval`: what a change of a model costs, as quantizing does: on a text, against a reference, on tasks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgellm.commands import models, options
from edgellm.commands.bench import require_writable, with_system_prompt, write_result
from edgellm.commands.console import ProgressDisplay, progress_display
from edgellm.commands.settings import Settings, chosen_settings
from edgellm.commands.table import Options, option, takes_options
from edgellm.engines.formats.small_files import PROMPT_BYTES, read_text
from edgellm.errors import RequestError, number_of

if TYPE_CHECKING:
    from edgellm.evaluation.inputs import Example, Window
    from edgellm.evaluation.measures import Divergence, RecordedLogits
    from edgellm.llm import LLM
    from edgellm.requests import Response
    from edgellm.text.tokenizer import Tokenizer

MAX_TOKENS = 256
#: How models answer, in the order of the table.
REFERENCE, PLAIN, DRAFTED = "reference", "plain", "drafted"


class MeasureOptions(Options, panel="Measures"):
    text: Path | None = option("Perplexity of a text (UTF-8), in windows.", metavar="FILE")
    exact_match: Path | None = option(
        "Share of prompts that are answered as expected, plain and drafted: JSON lines with prompt and answer (or "
        "completion, or summary), or with messages whose last one is the answer.",
        metavar="FILE",
    )
    rouge: Path | None = option(
        "ROUGE-1, -2 and -L of summaries, plain and drafted: JSON lines as above.", metavar="FILE"
    )
    reference: Path | None = option(
        "Compare with this engine directory of the same vocabulary: KL of next-token distributions and equal greedy "
        "tokens, on the text or else on the expected answers. It runs first, with the same adapter; its logits wait in "
        "a temporary file (in $TMPDIR): 4 bytes for each token and entry of the vocabulary.",
        metavar="DIR",
    )
    window: int | None = option("Tokens that the model reads at once [default: the context, up to 2048].", least=2)
    stride: int | None = option("Tokens from window to window [default: half a window].", least=1)
    bos: bool | None = option("Begin each window with the BOS token [default: where the tokenizer puts it].")
    tokens: int | None = option("Take the first N tokens of the text.", least=1)
    examples: int | None = option("Take the first N lines of --exact-match and --rouge.", least=1)
    output: Path | None = option("Write all figures to this JSON file.", rich_help_panel="Output")
    json_output: bool = option("Print one JSON object instead of the table.", "--json", rich_help_panel="Output")

    @property
    def files(self) -> dict[str, Path]:
        """The files of examples by what is measured on them."""
        given = {"exact_match": self.exact_match, "rouge": self.rouge}
        return {measure: path for measure, path in given.items() if path is not None}


class EvalOptions(
    options.ModelOptions,
    MeasureOptions,
    options.PromptOptions,
    options.SamplingOptions,
    options.DraftingOptions,
    options.AdapterOptions,
    options.ComputingOptions,
    options.LogOptions,
):
    """All options of the command."""


@takes_options
def eval(given: EvalOptions) -> None:
    """Measure what a change of a model costs, as quantizing does: perplexity, distance to a reference, tasks.

    Answers are greedy and have up to 256 tokens, unless options or settings say otherwise.

    Example: edgellm eval robot-int4 --reference robot --text book.txt
    """
    if given.text is None and not given.files:
        message = "nothing is to be measured: give --text, --exact-match or --rouge"
        raise typer.BadParameter(message, param_hint="--text")
    settings = chosen_settings(given)
    settings = replace(settings, sampling={"max_tokens": MAX_TOKENS, "seed": 0} | settings.sampling)
    require_writable(given.output, "--output")
    results = measure(settings, given)
    written = json.dumps(results, indent=2)
    typer.echo(written if given.json_output else "\n".join(report_lines(results)))
    if given.output is not None:
        write_result(given.output, f"{written}\n", "--output")


def measure(settings: Settings, asked: MeasureOptions) -> dict[str, Any]:
    """Measure what is asked for and return what there is to report, as JSON values."""
    from edgellm.evaluation.measures import record_logits

    with ExitStack() as opened:
        display = opened.enter_context(progress_display())
        evaluation = _Evaluation(settings, asked, display)
        other, recorded = evaluation.reference, None
        if other is not None:
            with models.open_model_with(other, None, models.chosen_adapters(other)) as llm:
                if evaluation.windows:
                    progress = partial(display, "scoring the reference")
                    recorded = opened.enter_context(record_logits(llm, evaluation.windows, settings.adapter, progress))
                evaluation.answer(llm, REFERENCE)
        drafting = models.chosen_drafting(settings) if evaluation.examples else None
        with models.open_model_with(settings, drafting, models.chosen_adapters(settings)) as llm:
            facts = {
                "model": str(llm.directory.path),
                "name": models.model_name(llm),
                "backend": llm.backend_name,
                "reference": None if other is None else str(models.described_directory(other).path),
                "adapter": settings.adapter,
                "date": date.today().isoformat(),
                "sampling": asdict(evaluation.params) if evaluation.examples else None,
            }
            scores = evaluation.scores(llm, recorded)
            llm.use_drafting(None)
            evaluation.answer(llm, PLAIN)
            if drafting is not None:
                llm.use_drafting(drafting)
                evaluation.answer(llm, DRAFTED)
    kinds = ("exact_match", "rouge")
    return facts | scores | {kind: evaluation.task(kind) if kind in evaluation.examples else None for kind in kinds}


class _Evaluation:
    """What is given, read and checked before a model is opened; then the measures, one model at a time."""

    def __init__(self, settings: Settings, asked: MeasureOptions, display: ProgressDisplay) -> None:
        """Raises EdgeLLMError for what is wrong with files, vocabularies, windows, or what is installed."""
        from edgellm.defaults import ModelDefaults
        from edgellm.evaluation.inputs import answer_windows, load_examples
        from edgellm.evaluation.measures import check_same_vocabulary, rouge_scorer, vocabulary_of

        self._settings, self._asked, self._display = settings, asked, display
        self.reference = None if asked.reference is None else replace(settings, model=asked.reference, kv_cache=None)
        directory, tokenizer = models.described_directory(settings), _tokenizer(settings)
        self._tokenizer, self._context = tokenizer, directory.limits.kv_capacity
        if self.reference is not None:
            other = models.described_directory(self.reference)
            self._context = min(self._context, other.limits.kv_capacity)
            expected = vocabulary_of(_tokenizer(self.reference), other.config.vocab_size)
            check_same_vocabulary(expected, vocabulary_of(tokenizer, directory.config.vocab_size))
        if asked.rouge is not None:
            rouge_scorer()
        self.examples: dict[str, list[Example]] = {
            kind: with_system_prompt(load_examples(path, asked.examples), settings.system)
            for kind, path in asked.files.items()
        }
        self.params = models.sampling_params(settings)
        self._text: dict[str, Any] | None = None
        self.windows: list[Window] = []
        if asked.text is not None:
            self._cut(asked.text)
        elif self.reference is not None:
            every = [example for examples in self.examples.values() for example in examples]
            self.windows = answer_windows(every, tokenizer, ModelDefaults(directory.path), self._context)
        #: The answers to the prompts of a file by measure and way, and the seconds they took.
        self._answers: dict[str, dict[str, tuple[list[Response], float]]] = {kind: {} for kind in self.examples}

    def _cut(self, path: Path) -> None:
        from edgellm.evaluation.inputs import bos_token, text_windows

        asked = self._asked
        text = read_text(path, PROMPT_BYTES, RequestError, "the text", takes_pipes=True)
        if not text.strip():
            raise RequestError(f"the text {path} is empty: expected something to predict")
        window = asked.window or min(self._context, 2048)
        if window > self._context:
            raise RequestError(
                f"the window has {window} tokens, the context {self._context}: take a smaller --window, or build with "
                "a larger --kv-capacity"
            )
        stride = asked.stride or window // 2
        bos = bos_token(self._tokenizer, asked.bos)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)[: asked.tokens]
        self.windows = text_windows(token_ids, window, stride, bos)
        counts = {"tokens": len(token_ids), "windows": len(self.windows), "window": window, "stride": stride}
        bos_text = None if bos is None else self._tokenizer.id_to_token(bos)
        self._text = {"file": str(path), **counts, "bos": bos_text}

    def scores(self, llm: LLM, recorded: RecordedLogits | None) -> dict[str, Any]:
        """Perplexity, and where the reference's logits are `recorded` the distance to it."""
        from edgellm.evaluation.measures import divergence, perplexity

        if not self.windows:
            return {"text": None, "divergence": None}
        began, progress = time.monotonic(), partial(self._display, "scoring the model")
        if recorded is None:
            found, distance = perplexity(llm, self.windows, self._settings.adapter, progress), None
        else:
            compared = divergence(llm, recorded, self._settings.adapter, progress)
            found, distance = compared.model, self._distance(compared)
        text = self._text and self._text | {
            "counted_tokens": found.tokens,
            "mean_negative_log_likelihood": found.mean_negative_log_likelihood,
            "perplexity": found.perplexity,
            "reference_perplexity": None if recorded is None else compared.reference.perplexity,
            "seconds": time.monotonic() - began,
        }
        return {"text": text, "divergence": distance}

    def _distance(self, found: Divergence) -> dict[str, Any]:
        def shown(token_id: int) -> str:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)

        return {
            "over": "the expected answers" if self._text is None else "the text",
            "tokens": found.tokens,
            "mean_kl": found.mean,
            "percentile_99_kl": found.percentile_99,
            "largest_kl": found.maximum,
            "equal_tokens": found.tokens - len(found.differences),
            "equal_share": found.equal_share,
            "differences": [
                asdict(each) | {"reference_text": shown(each.reference_token), "text": shown(each.token)}
                for each in found.differences
            ],
        }

    def answer(self, llm: LLM, way: str) -> None:
        from edgellm.evaluation.measures import answers

        for kind, examples in self.examples.items():
            began, progress = time.monotonic(), partial(self._display, f"{kind.replace('_', ' ')}, {way}")
            responses = answers(llm, examples, self.params, self._settings.adapter, progress)
            self._answers[kind][way] = responses, time.monotonic() - began

    def task(self, kind: str) -> dict[str, Any]:
        """What the answers to the prompts of a file come to."""
        from edgellm.evaluation.measures import exact_match, rouge

        examples, ways, texts, tokens = self.examples[kind], {}, {}, {}
        expected = [example.answer for example in examples]
        for way, (responses, seconds) in self._answers[kind].items():
            texts[way] = [response.text for response in responses]
            tokens[way] = [response.token_ids for response in responses]
            if kind == "rouge":
                figures = dict(rouge(texts[way], expected))
            else:
                equal = sum(exact_match(texts[way], expected))
                figures = {"equal": equal, "equal_share": equal / len(examples)}
            count = sum(map(len, tokens[way]))
            ways[way] = figures | {"tokens": count, "seconds": seconds, "tokens_per_second": count / seconds}
        pairs = zip(tokens[PLAIN], tokens[DRAFTED], strict=True) if DRAFTED in tokens else None
        return {
            "file": str(self._asked.files[kind]),
            "examples": len(examples),
            "drafted_equal_plain": None if pairs is None else sum(one == other for one, other in pairs),
            "ways": ways,
            "answers": [
                {"place": example.place, "expected": example.answer} | {way: texts[way][number] for way in texts}
                for number, example in enumerate(examples)
            ],
        }


def _tokenizer(settings: Settings) -> Tokenizer:
    from edgellm.text.tokenizer import Tokenizer

    directory = models.described_directory(settings)
    tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    tokenizer.chat_template = models.chosen_template(settings) or tokenizer.chat_template
    return tokenizer


#: So many of the tokens that differ from the reference's are in the table; all are in the JSON.
SHOWN_DIFFERENCES = 10
_TITLES = {"equal_share": "exact match", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def report_lines(results: dict[str, Any]) -> Iterator[str]:
    adapter = f", adapter {results['adapter']}" if results["adapter"] else ""
    reference = f", against {results['reference']}" if results["reference"] else ""
    yield f"{results['name']} on the {results['backend']} backend{adapter}{reference}"
    if results["text"] is not None:
        yield from _text_lines(results["text"])
    if results["divergence"] is not None:
        yield from _divergence_lines(results["divergence"])
    for kind in ("exact_match", "rouge"):
        if results[kind] is not None:
            yield from _task_lines(kind, results[kind], results["sampling"])


def _text_lines(text: dict[str, Any]) -> Iterator[str]:
    bos = f"BOS {text['bos']}" if text["bos"] else "no BOS"
    yield ""
    counts = f"{text['tokens']:,} tokens, {text['counted_tokens']:,} counted"
    yield f"{text['file']}: {counts}, in windows of {text['window']:,}, stride {text['stride']:,}, {bos}"
    if text["reference_perplexity"] is not None:
        yield f"  {'perplexity of the reference':<28}{text['reference_perplexity']:>12.4f}"
    nats = f"{text['mean_negative_log_likelihood']:.6f} nats a token"
    yield f"  {'perplexity':<28}{text['perplexity']:>12.4f}   {nats}, {text['seconds']:.1f} s"


def _divergence_lines(found: dict[str, Any]) -> Iterator[str]:
    differences = sorted(found["differences"], key=lambda each: -each["margin"])
    yield ""
    yield f"KL(reference || model) over {found['tokens']:,} tokens of {found['over']}, in nats"
    for title, key in (("mean", "mean_kl"), ("99th percentile", "percentile_99_kl"), ("largest", "largest_kl")):
        yield f"  {title:<28}{found[key]:>12.6f}"
    equal = f"{found['equal_tokens']:,} of {found['tokens']:,}"
    yield f"  {'equal greedy tokens':<28}{100 * found['equal_share']:>11.3f}%   {equal}"
    if not differences:
        return
    yield "  tokens that differ, by the margin of the reference's best logit over its second"
    yield f"    {'margin':>8}  {'window':>6}  {'token':>6}  reference -> model"
    for each in differences[:SHOWN_DIFFERENCES]:
        pair = f"{each['reference_text']!r} -> {each['text']!r}"
        yield f"    {each['margin']:>8.4f}  {each['window']:>6}  {each['position']:>6}  {pair}"
    if len(differences) > SHOWN_DIFFERENCES:
        yield f"    and {len(differences) - SHOWN_DIFFERENCES:,} more, with smaller margins: see --output and --json"


def _task_lines(kind: str, task: dict[str, Any], sampling: dict[str, Any]) -> Iterator[str]:
    ways = task["ways"]
    most = "" if sampling["max_tokens"] is None else f" of up to {sampling['max_tokens']:,} tokens"
    yield ""
    yield f"{task['file']}: {number_of(task['examples'], 'answer')}{most}, temperature {sampling['temperature']:g}"
    yield f"  {'':<28}{''.join(f'{way:>12}' for way in ways)}"
    for key, title in _TITLES.items():
        if key in next(iter(ways.values())):
            yield f"  {title:<28}" + "".join(f"{100 * figures[key]:>11.2f}%" for figures in ways.values())
    yield f"  {'tokens a second':<28}" + "".join(f"{figures['tokens_per_second']:>12.1f}" for figures in ways.values())
    if task["drafted_equal_plain"] is not None:
        equal = task["drafted_equal_plain"]
        words = f"all {equal:,}" if equal == task["examples"] > 1 else f"{equal:,} of {task['examples']:,}"
        yield f"  {words} drafted answers equal plain ones, token for token"
