"""`edgellm bench`: how fast drafting is here, against decoding without a draft, on given prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
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
from edgellm.engines.errors import explained
from edgellm.errors import RequestError
from edgellm.kernels.atomic_write import write_atomically

if TYPE_CHECKING:
    from edgellm.benchmark.comparing import BenchPrompt
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
    report: Path | None = option(
        "Make this folder: a page of speeds, first token, memory and device, beside the board's forecast.",
        metavar="DIR",
    )


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
    if given.report is not None:
        with explained(f"--report {given.report} cannot be made", RequestError):
            given.report.mkdir(parents=True, exist_ok=True)
        require_writable(given.report / "report.md", "--report")
    from edgellm.benchmark.comparing import default_prompts, load_prompts

    prompts = default_prompts() if given.prompts is None else load_prompts(given.prompts)
    results = measure(settings, prompts, given.configurations, given.repeat, given.report is not None)
    typer.echo("\n".join(report_lines(results)))
    if output is not None:
        write_result(output, json.dumps(results, indent=2) + "\n", "--output")
    if plot is not None:
        write_result(plot, speed_plot(results), "--plot")
    if given.report is not None:
        from edgellm.benchmark.device_report import FIGURES, PAGE, PLOT, page

        texts = {FIGURES: json.dumps(results, indent=2) + "\n", PLOT: speed_plot(results), PAGE: page(results)}
        for name, text in texts.items():
            write_result(given.report / name, text, "--report")


def measure(
    settings: Settings, prompts: Sequence[BenchPrompt], configurations: str | None, repeat: int, of_device: bool = False
) -> dict[str, Any]:
    """Run all configurations and return what to report, as JSON values; `of_device` with a page's facts, too."""
    from edgellm.benchmark import device_report
    from edgellm.benchmark.comparing import parse_configurations, run_benchmark, summarize

    limits = described_directory(settings).limits
    chosen = parse_configurations(configurations, limits, backend_name(settings), settings.drafting)
    params = sampling_params(settings)
    with ExitStack() as opened:
        plain = llm = opened.enter_context(open_model_with(settings, None))
        if drafted := [each.drafting for each in chosen if each.drafting is not None]:
            # The yardstick is the model without its draft, which plain decoding beside a draft is a little slower than.
            first = max(drafted, key=lambda drafting: drafting.needs_draft_model)
            llm = opened.enter_context(open_model_with(settings, first))
        answered = with_system_prompt(prompts, settings.system)
        try:
            asked = llm, plain, answered, chosen, params, repeat
            runs, reports = run_benchmark(*asked, lambda done, total: status_line.show(f"answer {done} of {total}"))
        finally:
            status_line.show("")
        results: dict[str, Any] = {
            "model": model_name(llm),
            "backend": llm.backend_name,
            "gpus": settings.gpus,
            "machine": device_report.processor_name(llm.backend_name),
            "date": date.today().isoformat(),
            "sampling": asdict(params),
            "prompts": len(answered),
            "repeat": repeat,
            "configurations": summarize(runs, reports, chosen),
        }
        if of_device:
            results |= device_report.of_model(llm, settings.gpus, runs, chosen, results["configurations"])
    return results | ({"device": device_report.device_facts(results["backend"])} if of_device else {})


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
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise RequestError(f"{option} {path} cannot be written: {path.parent} must be there, and open to you")


def write_result(path: Path, text: str, option: str) -> None:
    """Write a file, whole or not at all, and say so; `option` names it. Raises RequestError."""
    with explained(f"{option} {path} cannot be written", RequestError):
        write_atomically(path, text.encode())
    write_note(f"{path} written")
