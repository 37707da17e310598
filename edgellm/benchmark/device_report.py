"""The page of `edgellm bench --report`: what a model does on this device, and what was to be expected of the board."""

from __future__ import annotations

import platform as machine
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from edgellm.benchmark.comparing import BenchConfiguration, BenchRun
from edgellm.benchmark.report import backend_of, report_lines
from edgellm.device.forecast import EDGE_MICROSECONDS, REACHED, Board, board_of, engine_costs, seconds
from edgellm.device.sensors import sensor_facts, sensors_in_words
from edgellm.engines.backends.device_layouts import gpu_layouts
from edgellm.engines.directories.description import edgellm_version
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.memory_plan import available_memory
from edgellm.kernels.compilations import usable_cores
from edgellm.kernels.gpu import find_gpu
from edgellm.llm import LLM

#: The files of a report's folder.
PAGE, PLOT, FIGURES = "report.md", "speed.svg", "figures.json"


def processor_name(backend: str) -> str:
    """The GPU, or the CPU with its cores, with the release of NumPy."""
    gpu = find_gpu() if backend != "numpy" else None
    if gpu is not None:
        return gpu.name
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = named[0] if named and named[0] else machine.processor() or machine.machine()
    return f"{name}, {usable_cores()} cores, NumPy {np.__version__}"


def device_facts(backend: str) -> dict[str, Any]:
    """JSON values: the GPU that computes, its board, what it reads and multiplies, and what sensors say behind that."""
    gpu = find_gpu() if backend != "numpy" else None
    facts: dict[str, Any] = {"release": edgellm_version(), "gpu": None, "board": None}
    if gpu is not None:
        from edgellm.device.limits import measured_limits

        board = board_of(gpu)
        known = {name: value for name, value in vars(gpu).items() if name != "enter_partition"}
        facts |= {"gpu": known, "board": board and asdict(board), "limits": measured_limits()._asdict()}
    return facts | {"sensors": sensor_facts()}


def of_model(
    llm: LLM,
    gpus: int,
    runs: Sequence[BenchRun],
    chosen: Sequence[BenchConfiguration],
    summaries: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What a page says of the open model beside its speeds, as JSON values; the first configuration is plain. There
    is no forecast of several `gpus`."""
    plain = [run for run in runs if run.configuration == chosen[0].name]
    gpu = find_gpu() if llm.backend_name != "numpy" else None
    board = None if gpu is None or gpus > 1 else board_of(gpu)
    context = max(run.prompt_tokens + len(run.token_ids) // 2 for run in plain)
    first = {  # medians
        "seconds": median(run.first_token_seconds for run in plain),
        "computed_tokens": median(run.prompt_tokens - run.reused_tokens for run in plain),
    }
    return {
        "memory": memory_facts(llm),
        "first_token": first,
        "context": context,
        "forecast": forecasts(llm.directory, board, chosen, summaries, context) if board else {},
    }


def memory_facts(llm: LLM) -> dict[str, int | None]:
    """Bytes that an open model takes, by what for, and what is left free beside all that is open."""
    planned = llm.call(lambda runtime: dict(runtime.planned_memory)).result()
    if llm.backend_name == "numpy":
        return planned | {"free": available_memory()}
    from edgellm.engines.backends.cuda_device import gpu_memory

    return planned | {"free": gpu_memory()[0]}


def forecasts(
    directory: EngineDirectory,
    board: Board,
    configurations: Sequence[BenchConfiguration],
    summaries: Sequence[Mapping[str, Any]],
    context: int,
) -> dict[str, dict[str, float]]:
    """Tokens a second by a configuration's name, behind so many tokens of context: `expected`, and `most`, at the whole
    bandwidth of the board. Of what drafts at the tokens a round that were measured; what chooses anew has none."""
    layouts, _ = gpu_layouts(directory.models, directory.checkpoints, directory.dtype)
    found = {}
    for each, summary in zip(configurations, summaries, strict=True):
        config, plan, tokens = each.drafting, None, 1.0
        if config is not None:
            if config.adaptive or config.proposes_given or "mean_acceptance_length" not in summary:
                continue
            plan, tokens = config.plan(directory.limits), summary["mean_acceptance_length"]
        costs = engine_costs(directory.models, directory.limits, directory.dtype, layouts, context, plan)
        spans = {"expected": seconds(costs, board), "most": seconds(costs, board, reached=1.0, edge=0.0)}
        found[each.name] = {name: tokens / span for name, span in spans.items()}
    return found


def page(results: Mapping[str, Any]) -> str:
    """Markdown, of the results of `commands.bench.measure` for a report."""
    return "\n".join([*_page(results), ""])


def _page(results: Mapping[str, Any]) -> Iterator[str]:
    device, memory, first = results["device"], results["memory"], results["first_token"]
    yield f"# {results['model']} on {device['board']['title'] if device['board'] else results['machine']}"
    yield ""
    yield f"EdgeLLM {device['release']}, {backend_of(results)}, {results['date']}. All figures: `{FIGURES}`."
    yield ""
    yield f"![Speeds]({PLOT})"
    yield from ("", "## Speed", "", "| Decoding | Tokens/s | Against plain | Tokens a round | Forecast | At most |")
    yield "|---|---|---|---|---|---|"
    for values in results["configurations"]:
        expected = results["forecast"].get(values["name"])
        forecast = f"{expected['expected']:.1f} | {expected['most']:.1f}" if expected else " | "
        tokens = values.get("mean_acceptance_length")
        ratio = "" if values["ratio"] is None else f"{values['ratio']:.2f}"
        round_ = "" if tokens is None else f"{tokens:.2f}"
        yield f"| {values['name']} | {values['tokens_per_second']:.1f} | {ratio} | {round_} | {forecast} |"
    yield ""
    if results["forecast"]:
        yield (
            f"The forecast is arithmetic: bytes and products of every step at {REACHED:.0%} of the board's bandwidth, "
            f"{EDGE_MICROSECONDS:g} microseconds between steps, and the tokens a round that were measured; at most is "
            f"without either. Behind {results['context']} tokens."
        )
    else:
        yield "There is no forecast: it is made for one GPU, of a board that is known."
    yield ""
    yield (
        f"First token: {1000 * first['seconds']:.1f} ms, the median of plain decoding. Tokens of the prompt that were "
        f"computed for it: {first['computed_tokens']:g}; the rest was in the KV cache."
    )
    yield from ("", "## Memory", "")
    if results["gpus"] > 1:
        yield from (f"As one GPU would take it; {results['gpus']} have parts of it.", "")
    yield from ("| What | MiB |", "|---|---|")
    for name, size in memory.items():
        yield f"| {name} | {'unknown' if size is None else f'{size / 2**20:,.1f}'} |"
    yield from ("", "## Device", "", f"- {results['machine']}")
    gpu, limits = device["gpu"], device.get("limits")
    if gpu is None:
        yield "- No GPU computed: what it reads, multiplies and is to give is left out."
    else:
        release = ".".join(map(str, gpu["driver_cuda"]))
        yield (
            f"- {gpu['compute_capability']}, {gpu['multiprocessors']} multiprocessors, "
            f"{gpu['total_memory'] / 2**30:.1f} GiB, driver for CUDA {release}"
        )
        board = device["board"]
        beside = f" of {board['gb_per_s']:g} by {board['source']}" if board else ""
        yield f"- reads {limits['read_gb_per_s']:.0f} GB/s{beside}"
        yield f"- multiplies {limits['mma_tflop_per_s']:.3g} TFLOP/s (mma.sync) at {limits['clock_ghz']:.3g} GHz"
    yield f"- {sensors_in_words(device['sensors'])}"
    yield from ("", "## Every configuration", "", "```", *report_lines(dict(results)), "```")
