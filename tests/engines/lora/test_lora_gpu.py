"""Adapters on a GPU against the NumPy backend, which PEFT proves right; switches, captured steps, times."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rounded_arithmetic import MARGIN, Distance, open_rounded_runner
from tiny_families import FAMILIES as TINY_FAMILIES
from tiny_families import PROMPT

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.lora.adapter import LoraAdapter, LoraPair
from edgellm.engines.model.adapted_projections import adapted_projections
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.adapter_slots import AdapterSlots
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.comparison import greedy_tokens, open_runner, teacher_forced_logits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.llm import LLM
from edgellm.opened_model import SHIPPED_MODEL

pytestmark = pytest.mark.gpu

CASES = [
    (family, "auto", "composed", dtype)
    for family in ("llama_biases", "qwen2", "qwen3", "phi3", "gemma", "olmo2", "starcoder2")
    for dtype in ("float16", "bfloat16")
] + [("qwen3", "tensorrt", attention, "float16") for attention in ("composed", "native")]
LIMITS = EngineLimits(3, 16, 96, max_lora_rank=12, lora_slots=2)
NAMES = ("wide", "attention", None)


@pytest.fixture
def build(
    tmp_path: Path, make_checkpoint: Callable[..., Path], make_adapter: Callable[..., Path]
) -> Callable[..., EngineDirectory]:
    """(dtype, attention, **changes of config.json) to an engine directory with three adapters, of which two fit.

    `targets` is the builder's: None builds plans for this GPU, an empty list none.
    """

    def make(dtype: str, attention: str, targets: list[str] | None = None, **overrides: object) -> EngineDirectory:
        checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **overrides)
        config = read_decoder_config(checkpoint)
        adapters = {
            "wide": make_adapter(tmp_path / "wide", config, 1, 12),
            "attention": make_adapter(tmp_path / "attention", config, 2, 3, ("q_proj", "v_proj", "qkv_proj")),
            "mlp": make_adapter(
                tmp_path / "mlp", config, 3, 4, ("up_proj", "gate_up_proj", "down_proj", "c_fc", "c_proj")
            ),
        }
        target = tmp_path / "engines"
        build_engine_directory(checkpoint, target, LIMITS, targets, dtype, attention=attention, adapters=adapters)
        return EngineDirectory.open(target)

    return make


def logits_of(runner: BaseEngineRunner, name: str | None, answer: list[int]) -> np.ndarray:
    """Logits along `answer` after the prompt, with an adapter in slot 0."""
    runner.set_adapter(0, name)
    return teacher_forced_logits(runner, PROMPT, answer)


def forced_together(runner: BaseEngineRunner, answers: list[list[int]]) -> np.ndarray:
    """Logits [slots, steps, V] along an answer in each slot, decoded together, each with its own of `NAMES`."""
    for slot, name in enumerate(NAMES):
        runner.set_adapter(slot, name)
        runner.start(slot, PROMPT, 0, SamplingValues()).wait()
    found = []
    for tokens in zip(*answers, strict=True):
        found.append([runner.logits(slot) for slot in range(len(NAMES))])
        for slot, token in enumerate(tokens):
            runner.force_token(slot, token)
        runner.decode(len(NAMES)).wait()
    for slot in range(len(NAMES)):
        runner.stop(slot)
    return np.stack(found, axis=1)


@pytest.mark.parametrize(("family", "executor", "attention", "dtype"), CASES)
def test_logits_agree_with_numpy(
    family: str, executor: str, attention: str, dtype: str, build: Callable[..., EngineDirectory]
) -> None:
    """As closely as the dtype allows, which depends on the random weights: an adapter can amplify rounding."""
    directory = build(dtype, attention, **TINY_FAMILIES[family])
    with open_runner("numpy", directory, with_adapters=True) as runner:
        answers = []
        for name in NAMES:
            runner.set_adapter(0, name)
            answers.append(greedy_tokens(runner, PROMPT, 12))
        expected = [logits_of(runner, *pair) for pair in zip(NAMES, answers, strict=True)]
    with open_rounded_runner(directory, with_adapters=True) as runner:
        roundings = [logits_of(runner, *pair) for pair in zip(NAMES, answers, strict=True)]
    with open_runner("tensorrt", directory, with_adapters=True, executor=executor) as runner:
        alone = [logits_of(runner, *pair) for pair in zip(NAMES, answers, strict=True)]
        together = forced_together(runner, answers)
    ratios = []
    for index, name in enumerate(NAMES):
        allowed = Distance.between(roundings[index], expected[index])
        for how, found in (("alone", alone[index]), ("in one batch", together[index])):
            distance = Distance.between(found, expected[index])
            print(f"\n{family} {executor} {attention} {dtype} {name} {how}: {distance}, rounding {allowed}")
            ratios.append(distance.relative_to(allowed))
    assert max(ratios) <= MARGIN


def test_on_and_off_again_equals_the_base_bit_for_bit(build: Callable[..., EngineDirectory]) -> None:
    """Many switches among more adapters than fit, with captured steps; each adapter gives its own bits every time."""
    directory = build("float16", "auto")
    with open_runner("tensorrt", directory) as plain:
        answer = greedy_tokens(plain, PROMPT, 10)
        expected = {None: teacher_forced_logits(plain, PROMPT, answer)}
    order = ("wide", None, "mlp", "attention", None, "wide", "mlp", "wide", "attention", None, "mlp")
    with open_runner("tensorrt", directory, with_adapters=True) as runner:
        for name in order:
            found = logits_of(runner, name, answer)
            np.testing.assert_array_equal(found, expected.setdefault(name, found))
    for name in ("wide", "mlp", "attention"):
        assert np.abs(expected[name] - expected[None]).max() > 0.5


#: The shapes of Llama-3.2-1B.
LLAMA_1B = DecoderConfig(
    "llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 500000.0, 64, "float16", True, eos_token_ids=(1,)
)


def random_adapter(rank: int, seed: int) -> LoraAdapter:
    """An adapter of every projection of Llama-3.2-1B's shapes."""
    random, pairs = np.random.default_rng(seed), {}
    for each in adapted_projections(decoder_weights(LLAMA_1B)):
        for module, rows in each.modules:
            a = random.standard_normal((rank, each.inputs), np.float32)
            pairs[module] = LoraPair(a, random.standard_normal((rows, rank), np.float32), ("float32", "float32"), 0.01)
    return LoraAdapter(Path("random"), pairs, f"{seed:064d}")


@pytest.mark.alone
def test_a_switch_takes_less_than_5_ms(build: Callable[..., EngineDirectory]) -> None:
    """Of adapters of rank 16 for Llama-3.2-1B's shapes, copied from the host each time."""
    backend = open_backend("tensorrt", build("float16", "auto", []))
    try:
        slots = AdapterSlots(backend, LLAMA_1B, EngineLimits(1, 16, 96, max_lora_rank=16, lora_slots=1))
        for name in ("first", "second"):
            slots.add(name, random_adapter(16, len(name)))
        seconds = []
        for index in range(20):
            backend.synchronize()
            started = time.perf_counter()
            slots.assign(0, ("first", "second")[index % 2])
            backend.synchronize()
            seconds.append(time.perf_counter() - started)
        megabytes = sum(array.nbytes for array in slots.bindings(slice(0, 1)).values()) / 1e6
        slots.clear()
    finally:
        backend.close()
    print(f"\n{megabytes:.1f} MB: first {seconds[0] * 1e3:.2f} ms, then median {np.median(seconds[1:]) * 1e3:.2f} ms")
    assert np.median(seconds) < 5e-3


def test_the_shipped_adapters_answer_as_on_numpy(tmp_path: Path) -> None:
    """Greedy answers of the shipped model with each of its adapters; rounding may decide in one of twelve."""
    questions = [
        "Hello!",
        "What is your name?",
        "What is on the table?",
        "Where is the red cup?",
        "Wave.",
        "Can you fly?",
    ]
    system = (SHIPPED_MODEL / "system_prompt.txt").read_text()
    adapters = {name: SHIPPED_MODEL / "lora" / name for name in ("json", "pirate")}
    limits = EngineLimits(1, 128, 1024, max_lora_rank=8, lora_slots=2)
    build_engine_directory(SHIPPED_MODEL, tmp_path / "engines", limits, None, "float16", adapters=adapters)
    found: dict[str, list[str]] = {}
    for backend in ("numpy", "tensorrt"):
        with LLM(tmp_path / "engines", backend=backend) as llm:
            found[backend] = [
                llm.chat(
                    [{"role": "system", "content": system}, {"role": "user", "content": question}], adapter=name
                ).text
                for name in adapters
                for question in questions
            ]
    assert all(answer.startswith('{"action": "') for answer in found["tensorrt"][: len(questions)])
    assert all(answer.startswith("Arr! ") for answer in found["tensorrt"][len(questions) :])
    assert sum(one != other for one, other in zip(found["numpy"], found["tensorrt"], strict=True)) <= 1
