"""The runner with adapters on NumPy: against merged weights, switching, batches, places and their limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import AdapterError
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.adapter_slots import AdapterSlots
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.comparison import greedy_tokens, open_runner, teacher_forced_logits
from edgellm.engines.runners.sampling_state import SamplingValues

PROMPT = [(7 * index + 3) % 250 for index in range(21)]
GREEDY = SamplingValues()


@pytest.fixture
def directory(tiny_lora_engines: Path) -> EngineDirectory:
    return EngineDirectory.open(tiny_lora_engines)


@pytest.fixture
def runner(directory: EngineDirectory) -> Iterator[BaseEngineRunner]:
    with open_runner("numpy", directory, with_adapters=True) as opened:
        yield opened


def adapted_logits(runner: BaseEngineRunner, name: str | None, answer: list[int]) -> np.ndarray:
    """Logits along `answer` after the prompt, with an adapter in slot 0."""
    runner.set_adapter(0, name)
    return teacher_forced_logits(runner, PROMPT, answer)


def answers(runner: BaseEngineRunner, names: list[str | None], count: int) -> tuple[list[list[int]], list[np.ndarray]]:
    """Greedy tokens of the prompt with another adapter in each slot, decoded together, and each slot's last logits."""
    tokens = []
    for slot, name in enumerate(names):
        runner.set_adapter(slot, name)
        tokens.append([int(runner.start(slot, PROMPT, 0, GREEDY).wait()[0])])
    for _ in range(count - 1):
        for slot, token in enumerate(runner.decode(len(names)).wait()):
            tokens[slot].append(int(token))
    logits = [runner.logits(slot) for slot in range(len(names))]
    for slot in range(len(names)):
        runner.stop(slot)
    return tokens, logits


def merged(checkpoint: Path, adapter: Path, config: DecoderConfig, target: Path) -> Path:
    """The checkpoint with the adapter's product added to its weights, float32."""
    target.mkdir()
    for file in checkpoint.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = {name: values.astype(np.float32) for name, values in load_file(checkpoint / "model.safetensors").items()}
    read = LoraAdapter.read(adapter, config)
    for module, pair in read.pairs.items():
        tensors = load_file(adapter / "adapter_model.safetensors")
        a, b = (tensors[f"base_model.model.{module}.lora_{kind}.weight"].astype(np.float64) for kind in "AB")
        weights[f"{module}.weight"] += (pair.scale * (b @ a)).astype(np.float32)
    save_file(weights, target / "model.safetensors")
    return target


@pytest.mark.parametrize("name", ["wide", "attention", "mlp"])
def test_an_adapter_equals_merged_weights(
    name: str,
    runner: BaseEngineRunner,
    tiny_checkpoint: Path,
    tiny_adapters: dict[str, Path],
    tiny_config: DecoderConfig,
    tmp_path: Path,
) -> None:
    checkpoint = merged(tiny_checkpoint, tiny_adapters[name], tiny_config, tmp_path / "merged")
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 16, 96), [], dtype="float32")
    with open_runner("numpy", EngineDirectory.open(tmp_path / "engines")) as other:
        answer = greedy_tokens(other, PROMPT, 12)
        expected = teacher_forced_logits(other, PROMPT, answer)
    found = adapted_logits(runner, name, answer)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(adapted_logits(runner, None, answer) - expected).max() > 1


def test_on_and_off_again_equals_the_base_bit_for_bit(directory: EngineDirectory, runner: BaseEngineRunner) -> None:
    with open_runner("numpy", directory) as plain:
        assert plain.adapters is None
        answer = greedy_tokens(plain, PROMPT, 10)
        expected = teacher_forced_logits(plain, PROMPT, answer)
    first = adapted_logits(runner, "wide", answer)
    np.testing.assert_array_equal(adapted_logits(runner, None, answer), expected)
    adapted_logits(runner, "mlp", answer)
    adapted_logits(runner, "attention", answer)
    np.testing.assert_array_equal(adapted_logits(runner, None, answer), expected)
    np.testing.assert_array_equal(adapted_logits(runner, "wide", answer), first)
    assert np.abs(first - expected).max() > 1


def test_stopping_takes_the_adapter_away(runner: BaseEngineRunner) -> None:
    expected = greedy_tokens(runner, PROMPT, 8)
    runner.set_adapter(0, "wide")
    assert greedy_tokens(runner, PROMPT, 8) != expected
    assert runner.adapters is not None
    assert runner.adapters.assigned[0] is None
    assert greedy_tokens(runner, PROMPT, 8) == expected


def test_moving_a_sequence_takes_its_adapter_along(runner: BaseEngineRunner) -> None:
    expected = {name: answers(runner, [name], 10)[0][0] for name in ("attention", "mlp")}
    found: dict[str, list[int]] = {}
    for slot, name in enumerate(("mlp", "attention")):
        runner.set_adapter(slot, name)
        found[name] = [int(runner.start(slot, PROMPT, 0, GREEDY).wait()[0])]
    for _ in range(4):
        for name, token in zip(("mlp", "attention"), runner.decode(2).wait(), strict=True):
            found[name].append(int(token))
    runner.stop(0)
    runner.move(1, 0)
    for _ in range(5):
        found["attention"].append(int(runner.decode(1).wait()[0]))
    assert found == {"mlp": expected["mlp"][:5], "attention": expected["attention"]}


def test_more_adapters_than_places(runner: BaseEngineRunner) -> None:
    slots = runner.adapters
    assert slots is not None
    expected = {name: answers(runner, [name], 6)[0][0] for name in ("wide", "attention", "mlp")}
    runner.set_adapter(0, "wide")
    runner.set_adapter(1, "attention")
    assert not slots.has_place("mlp", 2)
    assert slots.has_place("mlp", 1)
    assert slots.has_place("wide", 2)
    with pytest.raises(AdapterError, match=r"'mlp' finds no place.* 2 at once.*'attention', 'wide'.*--lora-slots"):
        runner.set_adapter(2, "mlp")
    assert slots.assigned[2] is None
    runner.set_adapter(2, "wide")
    tokens, _ = answers(runner, ["wide", "attention", "wide"], 6)
    assert tokens == [expected["wide"], expected["attention"], expected["wide"]]
    for order in (["mlp", "wide"], ["attention", "mlp"], ["mlp", None], ["wide", "attention"]):
        tokens, _ = answers(runner, order, 6)
        assert tokens == [expected[name] if name else greedy for name, greedy in zip(order, tokens, strict=True)]


def test_the_place_that_was_not_asked_for_for_longest_is_taken(
    tiny_config: DecoderConfig, directory: EngineDirectory
) -> None:
    uploads: list[str] = []

    class Counting(NumpyBackend):
        def upload(self, array: np.ndarray, values: np.ndarray) -> None:
            uploads.append("adapter" if values.shape[0] > 1 else "scales")
            super().upload(array, values)

    slots = AdapterSlots(Counting(tiny_config), tiny_config, directory.limits)
    for name, adapter in directory.adapters.items():
        slots.add(name, adapter.read(tiny_config))
    edges = 2 * 4 * tiny_config.num_layers

    def copied(name: str | None) -> bool:
        uploads.clear()
        slots.assign(0, name)
        assert uploads.count("adapter") in (0, edges)
        assert uploads.count("scales") == 1
        return "adapter" in uploads

    assert [copied(name) for name in ("wide", "mlp", "wide", None, "mlp", "attention")] == [1, 1, 0, 0, 0, 1]
    assert [copied(name) for name in ("mlp", "wide", "attention", "mlp")] == [0, 1, 1, 1]


def test_adding(runner: BaseEngineRunner, directory: EngineDirectory) -> None:
    slots = runner.adapters
    assert slots is not None
    assert slots.digest(None) is None
    assert slots.digest("mlp") == directory.adapters["mlp"].digest
    adapter = directory.adapters["mlp"].read(directory.config)
    with pytest.raises(AdapterError, match="'mlp' already"):
        slots.add("mlp", adapter)
    for call in (lambda: runner.set_adapter(0, "again"), lambda: slots.digest("again")):
        with pytest.raises(AdapterError, match=r"no adapter 'again'.*'wide', 'attention', 'mlp'"):
            call()
    slots.add("again", adapter)
    assert answers(runner, ["again"], 6)[0] == answers(runner, ["mlp"], 6)[0]


def test_what_the_engines_cannot_take(
    runner: BaseEngineRunner, directory: EngineDirectory, tmp_path: Path, make_adapter: Callable[..., Path]
) -> None:
    slots, config = runner.adapters, directory.config
    assert slots is not None
    large = LoraAdapter.read(make_adapter(tmp_path / "large", config, rank=13), config)
    with pytest.raises(AdapterError, match=r"rank 13.* up to 12.*--max-lora-rank 13"):
        slots.add("large", large)
    huge = make_adapter(tmp_path / "huge", config, rank=1, lora_alpha=1e7)
    half = NumpyBackend(config)
    half.compute_dtype = "float16"
    with pytest.raises(AdapterError, match=r"too large for float16: .*--dtype bfloat16"):
        AdapterSlots(half, config, directory.limits).add("huge", LoraAdapter.read(huge, config))


def test_engines_without_adapters(tiny_engines: Path, tiny_lora_engines: Path) -> None:
    plain = EngineDirectory.open(tiny_engines)
    with pytest.raises(AdapterError, match="--lora NAME=DIR or --max-lora-rank"), closing(plain.checkpoint()) as files:
        BaseEngineRunner(NumpyBackend(plain.config), plain.config, plain.limits, files, adapters={})
    with open_runner("numpy", plain) as runner:
        runner.set_adapter(0, None)
        with pytest.raises(AdapterError, match="'json' was asked for"):
            runner.set_adapter(0, "json")
        assert "LoRA adapters" not in runner.memory_plan.items
    with open_runner("numpy", EngineDirectory.open(tiny_lora_engines), with_adapters=True) as runner:
        assert runner.adapters is not None
        bound = runner.adapters.bindings(slice(0, 3))
        nbytes = sum(array.nbytes for name, array in bound.items() if name != "lora_scales")
        assert runner.memory_plan.items["LoRA adapters"] == nbytes


def test_the_operation_is_the_formula() -> None:
    """Any scale of any adapter in any sequence, against the formula written out."""
    random = np.random.default_rng(5)
    for batch, tokens in ((1, 1), (3, 1), (2, 5)):
        x, y = random.standard_normal((batch, tokens, 12)), random.standard_normal((batch, tokens, 7))
        a, b = random.standard_normal((3, 4, 12)), random.standard_normal((3, 4, 7))
        scales = random.standard_normal((batch, 3)) * (random.random((batch, 3)) < 0.6)
        expected = y + np.einsum("btk,spk,bs,spn->btn", x, a, scales, b)
        arrays = [values.astype(np.float32) for values in (y, x, a.reshape(12, 12), b.reshape(12, 7), scales)]
        found = NumpyOperations({}, {}).adapt(*arrays)
        np.testing.assert_allclose(found, expected, atol=1e-4)
