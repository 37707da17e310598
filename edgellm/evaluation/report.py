"""The results of an evaluation for people: a table as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: So many of the tokens that differ from the reference's are in the table; all are in the JSON.
SHOWN_DIFFERENCES = 10
_TITLES = {"equal_share": "exact match", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def report_lines(results: dict[str, Any]) -> Iterator[str]:
    """The results of `commands.eval.measure` for people."""
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
    yield (
        f"{text['file']}: {text['tokens']:,} tokens, {text['counted_tokens']:,} counted, in windows of "
        f"{text['window']:,}, stride {text['stride']:,}, {bos}"
    )
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
    yield f"{task['file']}: {task['examples']:,} answers{most}, temperature {sampling['temperature']:g}"
    yield f"  {'':<28}{''.join(f'{way:>12}' for way in ways)}"
    for key, title in _TITLES.items():
        if key in next(iter(ways.values())):
            yield f"  {title:<28}" + "".join(f"{100 * figures[key]:>11.2f}%" for figures in ways.values())
    yield f"  {'tokens a second':<28}" + "".join(f"{figures['tokens_per_second']:>12.1f}" for figures in ways.values())
    if task["drafted_equal_plain"] is not None:
        equal = task["drafted_equal_plain"]
        words = f"all {equal:,}" if equal == task["examples"] else f"{equal:,} of {task['examples']:,}"
        yield f"  {words} drafted answers equal plain ones, token for token"
