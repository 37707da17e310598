"""`edgellm bench`: how fast drafting is here, against decoding without a draft, on given prompts."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from edgellm.benchmark.report import report_lines, speed_plot
from edgellm.commands import options
from edgellm.commands.console import prepare_output, write_note
from edgellm.commands.models import (
    backend_name,
    described_directory,
    model_name,
    open_model_with,
    sampling_params,
)
from edgellm.commands.option_groups import DraftingOptions, with_option_groups
from edgellm.errors import RequestError
from edgellm.kernels.user_paths import user_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.benchmark.inputs import BenchPrompt
    from edgellm.commands.settings import Settings
    from edgellm.evaluation.inputs import Example

MAX_TOKENS = 64
#: What has `messages` to answer.
_Asking = TypeVar("_Asking", "BenchPrompt", "Example")


@with_option_groups
def bench(
    *,
    engine: options.ModelOptions,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="A prompt a line, or JSON lines with prompt, messages or turns, and task [default: a few].",
        ),
    ] = None,
    configurations: Annotated[
        str | None,
        typer.Option(
            "--configurations",
            help="Comma-separated: suffix, chain:STEPS, tree:TOP_K/STEPS/SIZE, choices:FILE, adaptive; :sampled, "
            ":typical or :suffix may follow [default: some of each].",
        ),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Times that each prompt is answered.")] = 3,
    output: Annotated[Path | None, typer.Option("--output", help="Write all figures to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw speeds and acceptance into this SVG file.")] = None,
    prompting: options.PromptOptions,
    sampling: options.SamplingOptions,
    computing: options.ComputingOptions,
    config: options.Config = None,
    debug: options.Debug = False,
) -> None:
    """Compare the speed of drafting configurations with decoding without a draft, and their answers with its.

    Example: edgellm bench --configurations chain:3,adaptive --plot speed.svg
    """
    prepare_output()
    if plot is not None and plot.suffix.lower() != ".svg":
        raise typer.BadParameter(f"{plot} is no SVG file: expected a name that ends in .svg", param_hint="--plot")
    settings = options.chosen_settings(
        config,
        model=engine.chosen(),
        computing=computing,
        prompt=prompting,
        sampling=sampling,
        drafting=DraftingOptions(),
    )
    settings = replace(settings, sampling={"max_tokens": MAX_TOKENS, "seed": 0} | settings.sampling)
    for option, path in (("--output", output), ("--plot", plot)):
        require_writable(path, option)
    from edgellm.benchmark.inputs import default_prompts, load_prompts

    results = measure(settings, default_prompts() if prompts is None else load_prompts(prompts), configurations, repeat)
    for line in report_lines(results):
        typer.echo(line)
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
    progress = _Progress()
    with ExitStack() as opened:
        plain = llm = opened.enter_context(open_model_with(settings, None))
        drafted = [each.drafting for each in chosen if each.drafting is not None]
        if drafted:
            # The yardstick is the model without its draft, which plain decoding beside a draft is a little slower than.
            first = max(drafted, key=lambda drafting: drafting.needs_draft_model)
            llm = opened.enter_context(open_model_with(settings, first))
        answered = with_system_prompt(prompts, settings.system)
        try:
            result = run_benchmark(llm, plain, answered, chosen, params, repeat, progress)
        finally:
            progress.clear()
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

    def under_it(prompt: _Asking) -> _Asking:
        if prompt.messages[0]["role"] == "system":
            return prompt
        return replace(prompt, messages=(system, *prompt.messages))

    return list(map(under_it, prompts))


def require_writable(path: Path | None, option: str) -> None:
    """Raise RequestError for a file that cannot be written, before minutes are spent on what is to stand there."""
    if path is None:
        return
    path = user_path(path)
    if path.is_dir():
        raise RequestError(f"{option} {path} is a directory: expected the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RequestError(f"{option} {path} cannot be written: {path.parent} must be there, and open to you")


def write_result(path: Path, text: str, option: str) -> None:
    """Write a file, and say so; `option` names it. Raises RequestError."""
    try:
        user_path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{option} {path} cannot be written: {error.strerror or error}") from error
    write_note(f"{path} written")


class _Progress:
    """A count on the terminal's last line."""

    def __init__(self) -> None:
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            self._shown = True
            print(f"\ranswer {done} of {total}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the count away."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
