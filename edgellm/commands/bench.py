"""`edgellm bench`: how fast drafting is here, against decoding without a draft, on given prompts."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from edgellm.benchmark.report import report_lines, speed_plot
from edgellm.commands import options
from edgellm.commands.console import status_line, write_note
from edgellm.commands.models import backend_name, described_directory, model_name, open_model_with, sampling_params
from edgellm.commands.settings import Settings, chosen_settings
from edgellm.commands.table import option, takes_options
from edgellm.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.benchmark.inputs import BenchPrompt
    from edgellm.evaluation.inputs import Example

MAX_TOKENS = 64
#: What has `messages` to answer.
_Asking = TypeVar("_Asking", bound="BenchPrompt | Example")


class BenchOptions(
    options.ModelOptions, options.PromptOptions, options.SamplingOptions, options.ComputingOptions, options.LogOptions
):
    prompts: Path | None = option(
        "A prompt a line, or JSON lines with prompt, messages or turns, and task [default: a few]."
    )
    configurations: str | None = option(
        "Comma-separated: suffix, chain:STEPS, tree:TOP_K/STEPS/SIZE, choices:FILE, adaptive; :sampled, :typical or "
        ":suffix may follow [default: some of each]."
    )
    repeat: int = option("Times that each prompt is answered.", default=3, least=1)
    output: Path | None = option("Write all figures to this JSON file.")
    plot: Path | None = option("Draw speeds and acceptance into this SVG file.")


@takes_options
def bench(given: BenchOptions) -> None:
    """Compare the speed of drafting configurations with decoding without a draft, and their answers with its.

    Example: edgellm bench --configurations chain:3,adaptive --plot speed.svg
    """
    output, plot = given.output, given.plot
    if plot is not None and plot.suffix.lower() != ".svg":
        raise typer.BadParameter(f"{plot} is no SVG file: expected a name that ends in .svg", param_hint="--plot")
    settings = chosen_settings(given)
    settings = replace(settings, sampling={"max_tokens": MAX_TOKENS, "seed": 0} | settings.sampling)
    require_writable(output, "--output")
    require_writable(plot, "--plot")
    from edgellm.benchmark.inputs import default_prompts, load_prompts

    prompts = default_prompts() if given.prompts is None else load_prompts(given.prompts)
    results = measure(settings, prompts, given.configurations, given.repeat)
    typer.echo("\n".join(report_lines(results)))
    if output is not None:
        write_result(output, json.dumps(results, indent=2) + "\n", "--output")
    if plot is not None:
        write_result(plot, speed_plot(results), "--plot")


def measure(
    settings: Settings, prompts: Sequence[BenchPrompt], configurations: str | None, repeat: int
) -> dict[str, Any]:
    """Run all configurations and return what there is to report, as JSON values."""
    from edgellm.benchmark.inputs import parse_configurations
    from edgellm.benchmark.run import run_benchmark, summarize
    from edgellm.drafting.costs import Device

    limits = described_directory(settings).limits
    chosen = parse_configurations(configurations, limits, backend_name(settings), settings.drafting)
    params = sampling_params(settings)
    with ExitStack() as opened:
        plain = llm = opened.enter_context(open_model_with(settings, None))
        drafted = [each.drafting for each in chosen if each.drafting is not None]
        if drafted:
            # The yardstick is the model without its draft, which plain decoding beside a draft is a little slower than.
            first = max(drafted, key=lambda drafting: drafting.needs_draft_model)
            llm = opened.enter_context(open_model_with(settings, first))
        answered = with_system_prompt(prompts, settings.system)
        try:
            result = run_benchmark(llm, plain, answered, chosen, params, repeat, _show_answers)
        finally:
            status_line.show("")
        return {
            "model": model_name(llm),
            "backend": llm.backend_name,
            "machine": Device.present(llm.directory, llm.backend_name).processor,
            "date": date.today().isoformat(),
            "sampling": asdict(params),
            "prompts": len(answered),
            "repeat": repeat,
            "configurations": summarize(result, chosen),
        }


def with_system_prompt(prompts: Sequence[_Asking], text: str | None) -> list[_Asking]:
    """The prompts under this system prompt where they have no other (None: under the model's own, "": under none)."""
    if text is None:
        return list(prompts)
    system = {"role": "system", "content": text}
    return [
        prompt if prompt.messages[0]["role"] == "system" else replace(prompt, messages=(system, *prompt.messages))
        for prompt in prompts
    ]


def require_writable(path: Path | None, option: str) -> None:
    """Raise RequestError for a file that cannot be written, before minutes are spent on what is to stand there."""
    if path is None:
        return
    if path.is_dir():
        raise RequestError(f"{option} {path} is a directory: expected the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RequestError(f"{option} {path} cannot be written: {path.parent} must be there, and open to you")


def write_result(path: Path, text: str, option: str) -> None:
    """Write a file, and say so; `option` names it. Raises RequestError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{option} {path} cannot be written: {error.strerror or error}") from error
    write_note(f"{path} written")


def _show_answers(done: int, total: int) -> None:
    status_line.show(f"answer {done} of {total}")
