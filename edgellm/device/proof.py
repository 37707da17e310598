"""What `edgellm doctor --full` proves on the device that there is: that it computes the shipped model's tokens, reads
and multiplies as it should, and has the memory and the files that it says."""

from __future__ import annotations

import hashlib
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.device.forecast import board_of, multiply_adds
from edgellm.device.sensors import sensor_facts, sensors_in_words
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.description import edgellm_version
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.directories.engine_parts import DRAFT_FOLDER
from edgellm.engines.quantizer.options import QuantizationOptions
from edgellm.engines.quantizer.quantizer import quantize_checkpoint
from edgellm.engines.runners.comparison import LOGIT_TOLERANCES, greedy_tokens, open_runner, teacher_forced_logits
from edgellm.errors import MissingDependencyError, number_of
from edgellm.kernels.gpu import GPU, find_gpu
from edgellm.llm import LLM
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.sampling_params import SamplingParams

#: Seconds after which nothing more is begun.
SECONDS = 60.0
_QUESTIONS = ("Where is the red cup?", "How full is your battery?", "What objects are on the table?")
_TOKENS = 32
#: Less than this share of what a device should read or multiply is a fault.
_LEAST_SHARE = 0.5
#: Parts of the free memory by which the largest allocation is found.
_PARTS = 32
#: A text that is long enough to be worth keeping.
_SYSTEM = "You are a robot at a table. You answer in one short sentence, and say what you see. " * 3

Found = dict[str, Any]


def checked(name: str, ok: bool | None, text: str, **figures: Any) -> Found:
    """What a check found, in words and as JSON values; `ok` is None where it could not be made."""
    return {"name": name, "ok": ok, "text": text, **figures}


def made_by() -> dict[str, str]:
    """What digests of tokens may depend on: the release, and the architecture that computed."""
    gpu = find_gpu()
    architecture = gpu.compute_capability if gpu else f"{platform.machine()}, NumPy {np.__version__}"
    return {"release": edgellm_version(), "architecture": architecture}


def proof(earlier: Mapping[str, Any] | None = None, seconds: float = SECONDS) -> Iterator[Found]:
    """Every check that this machine can make, none begun after so many seconds; `earlier` is the JSON report of a run
    before, with whose tokens those of now are compared where the same release and architecture made them."""
    gpu, end = find_gpu(), time.perf_counter() + seconds
    with ExitStack() as opened:

        def folder() -> Path:
            return Path(opened.enter_context(tempfile.TemporaryDirectory()))

        parts: list[tuple[str, Callable[[], Iterator[Found]]]] = [
            ("tokens", lambda: _token_checks("as shipped", SHIPPED_MODEL, gpu, earlier)),
            ("speed", lambda: _speed_checks(gpu)),
            ("largest allocation", lambda: _memory_check(gpu)),
            ("snapshot", lambda: _snapshot_check(folder(), gpu)),
            ("packed tokens", lambda: _token_checks("packed", _packed(folder()), gpu, earlier)),
        ]
        for name, part in parts:
            if time.perf_counter() > end:
                yield checked(name, None, f"{name}: left out, {seconds:.0f} s are over")
                continue
            try:
                yield from part()
            except MissingDependencyError as error:  # a compiler, which a device need not have
                yield checked(name, None, f"{name}: left out, {error}")
            except Exception as error:  # whatever fails here, CUDA too, is what a report is for
                yield checked(name, False, f"{name}: FAILED, {type(error).__name__}: {error}")


def _backend(gpu: GPU | None) -> str:
    return "numpy" if gpu is None else "tensorrt"


def _packed(folder: Path) -> Path:
    """The shipped model with layers of 4 bits, and its draft."""
    quantize_checkpoint(SHIPPED_MODEL, folder / "packed", QuantizationOptions(4, 64, True, "rtn"))
    limits = replace(EngineDirectory.open(SHIPPED_MODEL).limits, image_rows=(), max_lora_rank=0, lora_slots=0)
    draft = SHIPPED_MODEL / DRAFT_FOLDER
    build_engine_directory(folder / "packed", folder / "engines", limits, (), weights="link", draft=draft)
    return folder / "engines"


def _token_checks(weights: str, path: Path, gpu: GPU | None, earlier: Mapping[str, Any] | None) -> Iterator[Found]:
    """The answers of this machine's backend, plain and drafted, against NumPy's."""
    directory = EngineDirectory.open(path)
    with LLM(path, backend=_backend(gpu)) as llm:
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": each}]) for each in _QUESTIONS]
    with open_runner("numpy", directory) as runner:
        answers = [greedy_tokens(runner, prompt, _TOKENS) for prompt in prompts]
        logits = [teacher_forced_logits(runner, *pair) for pair in zip(prompts, answers, strict=True)]
    params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    for kind, drafting in (("plain", None), ("drafted", DraftingConfig.largest(directory.limits))):
        with LLM(path, backend=_backend(gpu), drafting=drafting) as llm:
            found = [list(llm.generate(prompt, params).token_ids) for prompt in prompts]
        compared = compared_tokens(answers, found, logits, LOGIT_TOLERANCES[directory.dtype])
        yield with_earlier(f"tokens, {weights}, {kind}", found, compared, earlier)


def compared_tokens(
    answers: Sequence[Sequence[int]], found: Sequence[Sequence[int]], logits: Sequence[np.ndarray], tolerance: float
) -> Found:
    """How many of the tokens of NumPy's `answers` were found, up to where each answer parts from it; how many parted
    where NumPy's margin between the two likeliest is below `tolerance` of the largest of its `logits` [tokens, V]
    (`close`), and where others did (`faults`)."""
    allowed = tolerance * max(float(np.abs(each).max()) for each in logits)
    result: Found = {"tokens": sum(map(len, answers)), "equal": 0, "close": 0, "allowed_margin": allowed, "faults": []}
    for number, (answer, other, led) in enumerate(zip(answers, found, logits, strict=True)):
        first = next((at for at, pair in enumerate(zip(answer, other, strict=True)) if pair[0] != pair[1]), None)
        result["equal"] += len(answer) if first is None else first
        if first is None:
            continue
        second, top = np.partition(led[first], -2)[-2:]
        if top - second < allowed:
            result["close"] += 1
        else:
            result["faults"].append({"answer": number, "token": first, "margin": float(top - second)})
    return result


def with_earlier(
    name: str, found: Sequence[Sequence[int]], compared: Found, earlier: Mapping[str, Any] | None
) -> Found:
    """The check of these tokens, with their digest, which is compared with that of an earlier report."""
    digest = hashlib.sha256(np.array(found, "<i4").tobytes()).hexdigest()
    text = f"{name}: {compared['equal']} of {compared['tokens']} equal NumPy's"
    if close := compared["close"]:
        text += f", {number_of(close, 'answer')} parting where its margin is below {compared['allowed_margin']:.2g}"
    for fault in compared["faults"][:1]:
        text += f", answer {fault['answer'] + 1} PARTS at token {fault['token'] + 1} (margin {fault['margin']:.3g})"
    ok, same = not compared["faults"], None
    if earlier is not None and earlier.get("made_by") == made_by():
        before = [each.get("digest") for each in earlier.get("checks", ()) if each.get("name") == name]
        if before:
            same = digest == before[0]
            ok = ok and same
            text += ", the same as in the earlier report" if same else ", OTHERS than in the earlier report"
        else:
            text += "; the earlier report left them out"
    elif earlier is not None:
        text += "; the earlier report is of another release or architecture"
    return checked(name, ok, text, **compared, digest=digest, same_as_earlier=same)


def _snapshot_check(folder: Path, gpu: GPU | None) -> Iterator[Found]:
    """A system prompt's rows, written by one model and read by another, which answers with the same tokens."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _QUESTIONS[0]}]
    params, path, answers, spans = SamplingParams(max_tokens=8, ignore_eos=True), folder / "rows", [], []
    for writes in (True, False):
        with LLM(SHIPPED_MODEL, backend=_backend(gpu)) as llm:
            started = time.perf_counter()
            kept = llm.cache_system_prompt(_SYSTEM, save=path) if writes else llm.load_snapshot(path)
            spans.append(time.perf_counter() - started)
            answers.append(llm.chat(messages, params))
    reused = [each.usage.reused_tokens for each in answers]
    ok = answers[0].token_ids == answers[1].token_ids and reused[0] == reused[1] > 0
    said = "read, and answers as before" if ok else "read, but answers OTHERWISE"
    text = f"snapshot: {kept.tokens} tokens, {path.stat().st_size:,} bytes written in {spans[0]:.2f} s, {said}"
    yield checked("snapshot", ok, text, tokens=kept.tokens, bytes=path.stat().st_size, seconds=spans, reused=reused[1])


def _speed_checks(gpu: GPU | None) -> Iterator[Found]:
    """What the GPU reads and multiplies against what its board should, and what its sensors say right behind it."""
    if gpu is None:
        yield checked("read bandwidth", None, "read bandwidth and arithmetic: no GPU to measure")
    else:
        from edgellm.device.limits import measured_limits, memory_bandwidth

        board, limits = board_of(gpu), measured_limits()
        title = board.title if board else "its memory's clock and bus"
        should = board.gb_per_s if board else memory_bandwidth()
        yield _share("read bandwidth", limits.read_gb_per_s, should, "GB/s", title)
        # Of the clock that it had meanwhile: what holds the clock back is said by the sensors.
        most = 2e-3 * multiply_adds(board) * board.multiprocessors * limits.clock_ghz if board else None
        clock = f"the board at {limits.clock_ghz:.3g} GHz" + (f" of {board.ghz:g}" if board else "")
        yield _share("arithmetic of mma.sync", limits.mma_tflop_per_s, most, "TFLOP/s", clock)
    facts = sensor_facts()
    yield checked("clocks and power", True if facts else None, f"clocks and power: {sensors_in_words(facts)}", **facts)


def _share(name: str, found: float, should: float | None, unit: str, of: str) -> Found:
    if should is None:
        return checked(name, True, f"{name}: {found:.4g} {unit}; what it should be is not known", measured=found)
    share = found / should
    ok = share >= _LEAST_SHARE
    text = f"{name}: {found:.4g} {unit}, {share:.0%} of {should:.4g} by {of}" + ("" if ok else ": TOO LITTLE")
    return checked(name, ok, text, measured=found, expected=should, share=share)


def _memory_check(gpu: GPU | None) -> Iterator[Found]:
    if gpu is None:
        yield checked("largest allocation", None, "largest allocation: no GPU to ask")
        return
    import pycuda.driver as cuda

    from edgellm.device.limits import some_context
    from edgellm.engines.model.memory_plan import available_memory

    def fits(size: int) -> bool:
        try:
            cuda.mem_alloc(size).free()
        except cuda.MemoryError:
            return False
        return True

    with some_context():
        free, total = cuda.mem_get_info()
        # Where the host has the same memory, what it needs to go on is not tried for.
        shared = cuda.Context.get_device().get_attribute(cuda.device_attribute.INTEGRATED)
        size = largest(min(free, available_memory() or free) if shared else free, fits)
    text = f"largest allocation: {size / 2**30:.2f} GiB of {free / 2**30:.2f} free and {total / 2**30:.2f} in all"
    yield checked("largest allocation", size > 0, text, bytes=size, free_bytes=free, total_bytes=total)


def largest(free: int, fits: Callable[[int], bool]) -> int:
    """The largest number of bytes that `fits`, in steps of a part of what is free, of which the last part is left."""
    return next((size for part in range(_PARTS - 1, 0, -1) if fits(size := free * part // _PARTS)), 0)
