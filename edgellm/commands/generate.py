"""`edgellm generate`: one prompt, one answer."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

import typer

from edgellm.commands import options
from edgellm.commands.console import read_answer, write_note
from edgellm.commands.images import read_image_file, require_vision, shown_content
from edgellm.commands.models import open_model, sampling_params, with_cached_prompt
from edgellm.commands.settings import chosen_settings
from edgellm.commands.table import argument, option, takes_options
from edgellm.errors import RequestError

if TYPE_CHECKING:
    from edgellm.llm import LLM
    from edgellm.requests import Response, TokenLogprobs


class GenerateOptions(
    options.PromptOptions,
    options.SystemCacheOptions,
    options.ImageOptions,
    options.SamplingOptions,
    options.StructureOptions,
    options.DraftingOptions,
    options.AdapterOptions,
    options.ToolOptions,
    options.ModelOption,
    options.ComputingOptions,
    options.LogOptions,
    panel="Prompt",
):
    prompt: str | None = argument(
        "What to say to the model; '-' reads standard input.", rich_help_panel="Arguments", is_free=True
    )
    file: Path | None = option("Read the prompt from a file.", "--file", "-f")
    raw: bool = option("Complete the prompt as it is, without chat template.")
    json_output: bool = option("Print one JSON object instead of the text.", "--json", rich_help_panel="Output")


@takes_options
def generate(given: GenerateOptions) -> None:
    """Answer one prompt; the answer alone goes to standard output.

    What is piped in beside a prompt is appended to it, after a blank line.

    Example: git diff | edgellm generate "Summarize this change:"
    """
    asked, raw = given.template_inputs(), given.raw
    if raw and given.images:
        raise typer.BadParameter("has no place for images: leave --raw out", param_hint="--raw")
    if raw and (given.has_system_prompt or given.chat_template is not None):
        message = "takes no system prompt and no chat template: write all into the prompt"
        raise typer.BadParameter(message, param_hint="--raw")
    if raw and any(asked):
        raise typer.BadParameter("has no chat template: leave tools and template variables out", param_hint="--raw")
    settings, tools, variables = with_cached_prompt(chosen_settings(given), given, *asked)
    if given.lora and settings.adapter is None:
        message = "loads an adapter: choose the one that answers with --adapter NAME"
        raise typer.BadParameter(message, param_hint="--lora")
    text = read_prompt(given.prompt, given.file)
    structure, logprobs = given.structure(), given.logprobs
    params = replace(sampling_params(settings).seeded(), logprobs=logprobs, structure=structure)
    with open_model(settings, tools=tools, template_variables=variables) as llm:
        if given.images:
            require_vision(llm)
        attached_images = [read_image_file(image) for image in given.images or ()]
        messages: list[dict[str, Any]] = []
        if settings.system is not None:
            messages.append({"role": "system", "content": settings.system})
        messages.append({"role": "user", "content": shown_content(attached_images, text)})
        ask = partial(llm.stream_chat, messages, tools=tools, template_variables=variables)
        if raw:
            ask = partial(llm.stream, text)
        response = read_answer(partial(ask, params, adapter=settings.adapter), not given.json_output)
        if given.json_output:
            print(json.dumps(answer_object(llm, response, params.seed, settings.adapter)))
        elif logprobs is not None:
            write_note("\n".join(logprob_lines(llm, response)))
        if response.structure_complete is False and not given.json_output:
            write_note(f"The answer is incomplete: it ended by {response.finish_reason} before its structure did.")
    if response.finish_reason == "cancelled":
        raise KeyboardInterrupt


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from wherever it is given; raises RequestError where it is empty or no text."""
    if file is not None and prompt is not None:
        raise typer.BadParameter("give a prompt or --file, not both", param_hint="--file")
    if prompt is None or prompt == "-":
        text, where = options.read_source(file, "as an argument, with --file", "PROMPT", takes_terminal=prompt == "-")
    else:
        text, where = with_piped_text(prompt), "the prompt"
    if not text.strip():
        raise RequestError(f"{where} is empty: expected something for the model to answer")
    return text


def with_piped_text(prompt: str) -> str:
    """A prompt with what is piped in, or read from a file, after it and a blank line. A pipe is read to its end, and
    where nothing comes for a while, that is said. Devices and sockets are left alone: a program that starts this one
    may keep them open."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # none, or no file of the system's, as in a program that calls this
        return prompt
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return prompt
    waiting = "Waiting for the end of standard input, which is appended to the prompt (< /dev/null: nothing is)."
    timer = Timer(2.0, write_note, [waiting])
    timer.daemon = True
    timer.start()
    try:
        piped = options.read_standard_input()
    finally:
        timer.cancel()
    return f"{prompt.rstrip()}\n\n{piped}" if piped.strip() else prompt


def answer_object(llm: LLM, response: Response, seed: int | None, adapter: str | None) -> dict[str, Any]:
    """What `--json` prints. Times are in seconds; `seed` is null where nothing was drawn, `adapter` without one."""
    drafting, report = None, llm.drafting_report
    if response.drafting is not None:
        drafting = {
            **asdict(response.drafting),
            "mean_acceptance_length": response.drafting.mean_acceptance_length,
            "acceptance_by_position": response.drafting.acceptance_by_position,
            "controller": None if report is None else asdict(report),
        }
    timings = asdict(response.timings)
    del timings["step_gaps"]  # one for each step
    timings["tokens_per_second"] = response.timings.tokens_per_second(response.usage.completion_tokens)
    return {
        "model": str(llm.directory.path),
        "backend": llm.backend_name,
        "adapter": adapter,
        "seed": seed,
        "text": response.text,
        "token_ids": list(response.token_ids),
        "tool_calls": [asdict(call) for call in response.tool_calls],
        "finish_reason": response.finish_reason,
        "stop_match": response.stop_match,
        "structure_complete": response.structure_complete,
        "parsed": response.parsed,
        "usage": asdict(response.usage),
        "timings": timings,
        "drafting": drafting,
        "logprobs": None if response.logprobs is None else [_logprobs_object(llm, each) for each in response.logprobs],
    }


def logprob_lines(llm: LLM, response: Response) -> Iterator[str]:
    """A line for each token of an answer: its log-probability, and the likeliest tokens in its place."""
    for each in response.logprobs or ():
        entry = _logprobs_object(llm, each)
        likeliest = ", ".join(f"{other['token']!r} {other['logprob']:.3f}" for other in entry["top"])
        yield f"{entry['token']!r} {entry['logprob']:.3f}{likeliest and ': '}{likeliest}"


def _logprobs_object(llm: LLM, found: TokenLogprobs) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = llm.tokenizer.decode([token_id], skip_special_tokens=False)
        return {"token_id": token_id, "token": text, "logprob": logprob}

    return entry(found.token_id, found.logprob) | {"top": [entry(*pair) for pair in found.top]}
