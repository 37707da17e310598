"""`edgellm doctor`: what the machine has, and whether the model computes the same on it as the NumPy backend does."""

from __future__ import annotations

import importlib.util
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import typer

from edgellm.commands.console import mebibytes, status_line
from edgellm.commands.descriptions import draft_in_words, executor_facts, executors_in_words
from edgellm.commands.info import kernel_facts, kernels_in_words, packed_facts
from edgellm.commands.options import GPUOption, ModelOptions
from edgellm.commands.table import option, takes_options
from edgellm.device.proof import checked, made_by, proof
from edgellm.drafting.config import DraftingConfig, default_drafting
from edgellm.engines.backends.cuda_device import gpu_memory
from edgellm.engines.backends.plan_files import platforms_with_plans, present_platform
from edgellm.engines.backends.platform import find_tensorrt
from edgellm.engines.building.needed_kernels import WeightLayouts, needed_modules
from edgellm.engines.directories.description import edgellm_version
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.formats.small_files import PROMPT_BYTES, read_text
from edgellm.engines.formats.strict_formats import parse_json
from edgellm.engines.model.memory_plan import available_memory, recurrent_bytes
from edgellm.engines.model.states import decoder_states, state_bytes, state_edge
from edgellm.engines.runners.comparison import LOGIT_TOLERANCES, greedy_tokens, open_runner, teacher_forced_logits
from edgellm.errors import EdgeLLMError, MissingDependencyError, RequestError
from edgellm.hub.inventory import existing_directory
from edgellm.kernels.compiler import find_headers, nvrtc_version
from edgellm.kernels.gpu import choose_gpu, find_gpu, reaches, visible_gpus
from edgellm.kernels.ranks.nccl import NcclLibrary
from edgellm.kernels.user_paths import user_cache_directory
from edgellm.llm import LLM
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.sampling_params import SamplingParams
from edgellm.text.tokenizer import Tokenizer

_PROMPT = "The red cup stands on the left, and the robot"
_STEPS = 8


class DoctorOptions(ModelOptions, GPUOption):
    full: bool = option("Prove tokens, speed, memory and files on this device with the shipped model; a minute.")
    against: Path | None = option("A report of --full --json from before, whose tokens are compared.", metavar="FILE")
    as_json: bool = option("Print one JSON object.", "--json")


@takes_options
def doctor(given: DoctorOptions) -> None:
    """Say what was found on this machine, then compare a few tokens' logits with the NumPy backend.

    Example: edgellm doctor --json
    """
    if given.against is not None and not given.full:
        raise typer.BadParameter("it is compared with what --full finds: give that, too", param_hint="--against")
    earlier = None if given.against is None else _report(given.against)
    choose_gpu(given.gpu)
    facts: dict[str, Any] = {"version": edgellm_version(), "machine": {}}

    def say(*lines: str) -> None:
        status_line.show("")
        for line in () if given.as_json else lines:
            typer.echo(line)

    for name, check in _CHECKS:
        try:
            facts["machine"][name] = check()
        except Exception as error:  # of CUDA's and of packages, too: what is there but does not work is to be said
            facts["machine"][name] = f"not usable: {error}"
        say(f"{name:<12}{facts['machine'][name]}")
    gpu = find_gpu()
    facts["gpu"] = None if gpu is None else asdict(gpu)
    directory = EngineDirectory.open(existing_directory(given.chosen_model() or SHIPPED_MODEL))
    described = directory.models, directory.limits, directory.dtype
    packed: dict[str, dict[str, Any]] = {name: {} for name in directory.packed_names}
    facts |= {
        "model": {"path": str(directory.path), "family": directory.config.family, "dtype": directory.dtype},
        "kv_cache": _kv_cache(directory),
        "plans": _plans(directory),
        "kernels": _kernels(directory),
        "draft": _draft(directory),
        "executors": [] if gpu is None else executor_facts(*described, gpu.compute_capability, packed),
        "checks": [],
    }
    say(
        f"{'model':<12}{directory.path} ({directory.config.family}, {directory.dtype})",
        *(f"{'executor':<12}{text}" for text in executors_in_words(facts["executors"])),
        f"{'KV cache':<12}{facts['kv_cache']}",
        f"{'plans':<12}{facts['plans']}",
        f"{'kernels':<12}{facts['kernels']}",
        f"{'draft':<12}{facts['draft']}",
        "\nself-check",
    )
    for found in _self_checks(directory):
        facts["checks"].append(found)
        say(f"  {found['text']}")
    if given.full:
        facts["made_by"] = made_by()
        alone = "; no GPU: NumPy with itself" if gpu is None else ""
        say(f"\non this device, release {facts['made_by']['release']}, {facts['made_by']['architecture']}{alone}")
        for found in proof(earlier):
            facts["checks"].append(found)
            say(f"  {found['text']}")
    facts["ok"] = all(found["ok"] is not False for found in facts["checks"])
    if given.as_json:
        typer.echo(json.dumps(facts, indent=2))
    if not facts["ok"]:
        raise typer.Exit(1)


def _report(path: Path) -> dict[str, Any]:
    """What an earlier run wrote. Raises RequestError."""
    text = read_text(path, PROMPT_BYTES, RequestError, "the earlier report")
    found = parse_json(text, str(path), RequestError)
    if not isinstance(found, dict) or not isinstance(found.get("checks"), list) or "made_by" not in found:
        raise RequestError(f"{path} is no report of edgellm doctor --full --json")
    return found


def _self_checks(directory: EngineDirectory) -> Iterator[dict[str, Any]]:
    """Every check of the model that this machine can make; those of drafting where the others found no fault. Whatever
    fails, CUDA too, is a fault that the report says."""
    agrees = True
    try:
        for found in _logits_checks(directory):
            agrees = agrees and found["ok"] is not False
            yield found
        if agrees and directory.draft is not None:
            for backend in ["numpy"] + (["tensorrt"] if find_gpu() is not None else []):
                yield _drafting_check(directory, backend)
    except Exception as error:
        yield checked("self-check", False, f"FAILED, {type(error).__name__}: {error}")


def _gpu() -> str:
    gpu = find_gpu()
    if gpu is None:
        return "none found (no NVIDIA driver, or it shows no device): the NumPy backend is used"
    others = [f"{each.index} ({each.name})" for each in visible_gpus() if each.index != gpu.index]
    beside = f"; beside it {', '.join(others)}, which --gpu opens" if others else ""
    return f"{gpu.index}: {gpu.name}, {gpu.compute_capability}, {gpu.total_memory / 2**30:.1f} GiB{beside}"


def _exchange() -> str:
    """How GPUs give each other what they compute of a model that they share."""
    pairs = list(combinations((gpu.index for gpu in visible_gpus()), 2))
    if not pairs:
        return "fewer than two GPUs"
    apart = ", ".join(f"{one} and {other}" for one, other in pairs if not (reaches(one, other) and reaches(other, one)))
    try:
        library = NcclLibrary()
        nccl = f"NCCL {library.version}, {library.path}"
    except MissingDependencyError as error:
        nccl = str(error)
    return (
        f"GPUs {apart} do not reach each other's memory and need NCCL; {nccl}" if apart else f"by their memory; {nccl}"
    )


def _driver() -> str:
    gpu = find_gpu()
    return f"supports CUDA {gpu.driver_cuda[0]}.{gpu.driver_cuda[1]}" if gpu else "none"


def _tensorrt() -> str:
    library = find_tensorrt()
    if library is None:
        return "none: kernels run models without; --executor tensorrt, and what kernels refuse, need it"
    name = "TensorRT-RTX" if library.flavour == "rtx" else "TensorRT"
    targets = ", ".join(library.buildable_targets) or "none without its GPU"
    return f"{name} {library.version}, builds for {targets}"


def _pycuda() -> str:
    if importlib.util.find_spec("pycuda") is None:
        return "not installed (pip install '.[gpu]' in EdgeLLM's checkout, on JetPack 6 '.[jetpack6]')"
    try:
        return version("pycuda")
    except PackageNotFoundError:
        return "version unknown"


def _nvrtc() -> str:
    major, minor = nvrtc_version()
    return f"{major}.{minor}, CUDA headers in {find_headers(major)[0]}"


def _memory() -> str:
    if find_gpu() is None:
        free = available_memory()
        return f"{free / 2**30:.1f} GiB of RAM free" if free else "unknown"
    free, total = gpu_memory()
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB of GPU memory free"


_CHECKS: list[tuple[str, Callable[[], str]]] = [
    ("system", lambda: f"{platform.platform()}, Python {platform.python_version()}, NumPy {np.__version__}"),
    ("GPU", _gpu),
    ("driver", _driver),
    ("TensorRT", _tensorrt),
    ("pycuda", _pycuda),
    ("NVRTC", _nvrtc),
    ("memory", _memory),
    ("exchange", _exchange),
    ("cache", lambda: str(user_cache_directory())),
]


def _plans(directory: EngineDirectory) -> str:
    """Which platforms the directory and the user's cache hold plans for, and which this machine needs."""
    places = [directory.plans_path, *sorted((user_cache_directory() / "plans").glob("*"))]
    found = {platform.folder for place in places for platform, plans in platforms_with_plans(place) if plans}
    present = present_platform()
    here = f"; this machine needs {present.folder}" if present else ""
    kept = ", ".join(sorted(found))
    return (kept or "none: kernels need none, those of what TensorRT runs are built on first use") + here


def _kernels(directory: EngineDirectory) -> str:
    """Which compiled kernels the directory holds, and whether they are all that it can ask for on this GPU."""
    gpu, kept = find_gpu(), "; ".join(kernels_in_words(kernel_facts(directory)))
    if gpu is None:
        return kept or "none are kept with the model"
    limits, dtype = directory.limits, directory.dtype
    try:
        weights = WeightLayouts(directory.models, directory.checkpoints, dtype)
        found = directory.kept_kernels(gpu)
        needed = needed_modules(directory.models, limits, dtype, weights, found.gpu)
        lacking = [source for source in needed if found.find(source) is None]
    except EdgeLLMError as error:
        return f"not known: {error}"
    compiled = f"{len(needed) - len(lacking)} of {len(needed)} for this GPU are compiled"
    rest = ", the others when the model is opened" if lacking else ""
    return f"{compiled}{rest}; {f'kept with the model: {kept}' if kept else 'none are kept with the model'}"


def _kv_cache(directory: EngineDirectory) -> str:
    """The dtype of the model's KV rows on a GPU, and the memory that they take."""
    limits = directory.limits
    layers = decoder_states(directory.config, limits.kv_cache, limits)
    edge, recurrent = state_edge(layers, limits.max_batch, limits.kv_rows), recurrent_bytes(layers, limits.max_batch)
    dtype = directory.dtype if limits.kv_cache == "compute" else limits.kv_cache
    size = mebibytes(state_bytes(edge, directory.dtype) - recurrent)
    beside = f", and {mebibytes(recurrent)} of recurrent states" if recurrent else ""
    slots = f"{limits.kv_capacity:,} tokens in each of {limits.max_batch} slots"
    return f"{dtype}, {size} on a GPU for {slots}{beside}"


def _draft(directory: EngineDirectory) -> str:
    """The draft model, how it is stored where it is packed, and how much this machine's preset drafts."""
    config = default_drafting(directory.limits, "numpy" if find_gpu() is None else "tensorrt")
    if directory.draft is None or config is None:
        return "none: decoding is plain"
    kind = "adaptive, up to " if config.adaptive else ""
    stored = packed_facts(directory).get("draft", {}).get("stored", ())
    said = "; ".join([draft_in_words(asdict(directory.draft.config)), *stored])
    return f"{said}; here {kind}{config.plan(directory.limits).name}"


def _drafting_check(directory: EngineDirectory, backend: str) -> dict[str, Any]:
    """Decode a few tokens with and without the draft; it is a fault if NumPy finds them different. In fp16 a tie of the
    two likeliest tokens may be decided otherwise: that is said, and no failure."""
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    answers = []
    for drafting in (None, DraftingConfig.largest(directory.limits)):
        with LLM(directory.path, backend=backend, drafting=drafting) as llm:
            answers.append(llm.generate(_PROMPT, params).token_ids)
    pairs = enumerate(zip(*answers, strict=True), 1)
    different = next((number for number, (plain, drafted) in pairs if plain != drafted), None)
    name, tokens, found = f"drafting on {backend}", len(answers[0]), f"token {different} differs from plain decoding's"
    if different is None:
        found = f"{tokens} tokens equal those of plain decoding"
    ok = different is None or backend != "numpy"
    return checked(name, ok, f"{name}: {found}", tokens=tokens, first_difference=different)


def _logits_checks(directory: EngineDirectory) -> Iterator[dict[str, Any]]:
    """Whether NumPy's logits are numbers, and the GPU's the same, token by token, where there is one."""
    prompt = Tokenizer.from_directory(directory.path, directory.config.vocab_size).encode(_PROMPT)
    with open_runner("numpy", directory) as runner:
        answer = greedy_tokens(runner, prompt, _STEPS)
        reference = teacher_forced_logits(runner, prompt, answer)
    if not np.isfinite(reference).all():
        text = "NumPy: some logits are not finite: the weights are damaged (edgellm info --verify)"
        yield checked("numpy", False, text)
        return
    yield checked("numpy", True, f"NumPy: {len(answer)} tokens, all logits finite", tokens=len(answer))
    if find_gpu() is None:
        yield checked("gpu", None, "no GPU to compare with")
        return
    with open_runner("tensorrt", directory) as runner:
        found = teacher_forced_logits(runner, prompt, answer)
    difference, largest = float(np.abs(found - reference).max()), float(np.abs(reference).max())
    tolerance = LOGIT_TOLERANCES[directory.dtype]
    agrees = difference <= tolerance * largest
    share = f"{difference / largest:.2%} of the largest logit (allowed {tolerance:.0%})"
    said = f"{difference:.4g}, {share}: {'ok' if agrees else 'TOO LARGE'}"
    text = f"GPU against NumPy: largest difference of logits {said}"
    figures = {"difference": difference, "largest_logit": largest, "allowed": tolerance * largest}
    known = {name: value if np.isfinite(value) else None for name, value in figures.items()}  # JSON has no other
    yield checked("gpu", agrees, text, **known)
