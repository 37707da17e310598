"""What a prefill hands out: the rows that transformers has, where they are, and a slot that is held until they go."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import mul
from pathlib import Path

import numpy as np
import pytest
from golden_answers import make_runner
from golden_files import golden_folder
from golden_images import GoldenModel
from safetensors.numpy import load_file
from synthetic_images import synthetic_image
from tiny_families import RECURRENT

from edgellm.asynchronous import AsyncLLM
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.errors import EngineDirectoryError, EngineError
from edgellm.engines.model.decoder import head_weight_name
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.errors import RequestError
from edgellm.kernels import dlpack
from edgellm.kernels.dlpack import SharedArray
from edgellm.llm import LLM
from edgellm.prefilled import HiddenStates, PrefilledStates
from edgellm.requests import Request

PROMPT = Request("The robot stands beside the table, and the red cup stands on it.")
OTHERS = [Request(text) for text in ("Stop.", "What is a robot?", "Where?")]


@pytest.fixture
def llm(tiny_engines: Path) -> Iterator[LLM]:
    """Two slots."""
    with LLM(tiny_engines, backend="numpy") as opened:
        yield opened


def seen(states: PrefilledStates) -> list[np.ndarray]:
    """The arrays where they are."""
    return [np.from_dlpack(each) for each in (*states.keys, *states.values)]


def test_rows_and_hidden_states_of_images_are_those_of_transformers() -> None:
    """`tools/goldens/make_policy.py` lets pi0's action part read such rows in place of its own PaliGemma's."""
    golden, expected = GoldenModel("paligemma"), load_file(golden_folder("policy") / "expected.safetensors")
    layers = [1, golden.config.num_layers]
    golden.config = replace(golden.config, feature_layers=tuple(reversed(layers)))
    limits, count = EngineLimits(2, prefill_chunk=32, kv_capacity=96), len(golden.token_ids)
    runner = golden.runner(limits)
    hidden = HiddenStates(runner.backend, golden.config, limits, layers)
    hidden.allocate()
    with hidden.filled(runner, 1):
        runner.start(0, golden.token_ids, 0, SamplingValues(), golden.placed()).wait()
    for layer, sides in enumerate(zip(expected["keys"], expected["values"], strict=True)):
        for rows, wanted in zip(runner.states.shared_rows(0, layer, count, None), sides, strict=True):
            found = np.from_dlpack(rows)
            assert found.shape[:3] == (1, *wanted.shape[:2]) and np.abs(wanted).max() > 1
            np.testing.assert_allclose(found[0, :, :, ::4], wanted, atol=1e-4)
    for states, wanted in zip(hidden.shared(1, count, None), expected["hidden_states"], strict=True):
        found = np.from_dlpack(states)
        assert found.shape == (1, count, golden.config.hidden_size) and np.abs(wanted).max() > 1
        np.testing.assert_allclose(found[0, :, ::8], wanted, atol=1e-4)
    runner.close()


def test_hidden_states_are_of_the_whole_prompt_and_hold_its_slot(tiny_engines: Path) -> None:
    with LLM(tiny_engines, backend="numpy", hidden_layers=[3, 1]) as llm:
        llm.prefill(PROMPT).close()
        states = llm.prefill(PROMPT, layers=[], hidden_states=True)  # in chunks of 16
        count, size = len(states.token_ids), llm.directory.config.hidden_size
        assert (states.reused_tokens, states.keys, count > 48) == (0, (), True)
        last, first = states.hidden_states
        assert last.shape == first.shape == (1, count, size) and first.strides == (96 * 2 * size, 2 * size, 1)
        runner = llm.call(lambda runtime: runtime._open_runner()).result()
        found = np.from_dlpack(last)
        head = runner.base.weights[head_weight_name(llm.directory.config)]
        np.testing.assert_allclose(found[0, -1] @ head.T, runner.base.logits(0), atol=1e-4)
        del last
        states.close()
        usable = llm.call(lambda runtime: partial(runtime._held.usable, runner)).result()
        assert usable() == 1
        planned = llm.call(lambda runtime: runtime.planned_memory["hidden states"]).result()
        assert planned == 2 * 96 * 2 * size * 4
        del first, found
        assert usable() == 2
        with llm.prefill(PROMPT) as again:
            assert (again.reused_tokens, again.hidden_states) == (count, ())
    for wrong in ([], "1", [1.0]):
        with pytest.raises(RequestError, match="hidden_layers is"):
            LLM(tiny_engines, backend="numpy", hidden_layers=wrong).close()
    for wrong in ([4], [1, 1]):
        with pytest.raises(EngineDirectoryError, match="expected different layers of tiny, from 1 to 3"):
            LLM(tiny_engines, backend="numpy", hidden_layers=wrong).close()


def test_hidden_states_that_a_draft_takes_are_handed_out_beside_it(tiny_draft_engines: Path) -> None:
    with LLM(tiny_draft_engines, backend="numpy") as plain:
        taken, expected = plain.directory.config.feature_layers, [plain.generate(PROMPT.prompt, max_tokens=12)]
        with pytest.raises(RequestError, match="expected False for a model that was opened without hidden_layers"):
            plain.prefill(PROMPT, hidden_states=True)
    with pytest.raises(EngineDirectoryError, match=r"hidden_layers is \[3, 99\]: .*, which its draft takes"):
        LLM(tiny_draft_engines, backend="numpy", hidden_layers=[3, 99]).close()
    with LLM(tiny_draft_engines, backend="numpy", hidden_layers=taken[-1:]) as llm:
        with llm.prefill(PROMPT, hidden_states=True) as states:
            (found,) = states.hidden_states
            assert np.from_dlpack(found).std() > 0.1
            del found
        answer = llm.generate(PROMPT.prompt, max_tokens=12)  # on the rows that it left
        assert answer.usage.reused_tokens > 60 and answer.token_ids == expected[0].token_ids


def test_memory_is_the_models_own_and_every_reader_holds_the_slot(llm: LLM) -> None:
    states = llm.prefill(PROMPT, layers=[1])
    (keys,), (values,) = states.keys, states.values
    runner = llm.call(lambda runtime: runtime._open_runner()).result()
    own = runner.base.states.tensors["k_cache_1"]
    rows = np.from_dlpack(keys)
    assert rows.ctypes.data == keys.pointer == own[1:].ctypes.data and rows.dtype == np.float32
    assert keys.strides == tuple(each // 4 for each in rows.strides) and keys.shape == rows.shape
    assert (keys.shape[2], keys.dtype, keys.__dlpack_device__()) == (len(states.token_ids), "float32", (1, 0))
    assert np.any(rows != np.from_dlpack(values))
    with pytest.raises(BufferError, match="is not copied"):
        keys.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="is not copied"):
        keys.__dlpack__(dl_device=(2, 0))
    usable = llm.call(lambda runtime: partial(runtime._held.usable, runner)).result()
    capsule, part = values.__dlpack__(), rows[0, 0, 3:]
    del rows, keys, values
    states.close()
    for reader in ("capsule", "part"):
        gc.collect()
        assert usable() == 1, reader
        if reader == "capsule":
            del capsule  # which nobody has taken
    del part
    assert usable() == 2
    assert not dlpack._under_way


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # ctypes says what was under way
def test_a_reader_that_fails_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: said.append(str(found.exc_value)))
    memory, before = np.zeros((1, 2, 8, 4), np.float32), len(dlpack._under_way)
    with pytest.raises(SystemError):
        np.from_dlpack(SharedArray(memory, memory.shape, None, 0))  # of a GPU: NumPy does not take the capsule
    with pytest.raises((SystemError, ValueError)):  # NumPy 1 keeps its error
        np.from_dlpack(SharedArray(memory, memory.shape, None, None)).reshape(5)
    assert len(dlpack._under_way) == before and "Unsupported device" in said[0]


def test_a_slot_that_is_held_is_left_alone(llm: LLM) -> None:
    expected = [response.token_ids for response in llm.handle(OTHERS)]
    with llm.prefill(PROMPT) as states:
        arrays = seen(states)
        copies = [array.copy() for array in arrays]
        assert [response.token_ids for response in llm.handle(OTHERS)] == expected  # one by one, in the other slot
        with llm.prefill(OTHERS[1]) as second:
            with pytest.raises(EngineError, match="all slots of the model hold states that prefill"):
                llm.prefill(OTHERS[0])
            with pytest.raises(EngineError, match="larger --max-batch"):
                llm.generate("Hello")
            assert len(seen(second)) == len(arrays)
        assert llm.generate(OTHERS[0].prompt).token_ids == expected[0]
        for array, copy in zip(arrays, copies, strict=True):
            np.testing.assert_array_equal(array, copy)
    del arrays, array
    answers = [llm.generate(request.prompt).token_ids for request in OTHERS]
    assert answers == expected


def test_an_unchanged_beginning_is_reused_from_call_to_call(llm: LLM) -> None:
    first = llm.prefill(PROMPT)
    rows = seen(first)[0].copy()
    assert first.reused_tokens == 0
    first.close()
    with llm.prefill(Request(f"{PROMPT.prompt} Take it.")) as second:
        assert second.reused_tokens == len(first.token_ids)
        np.testing.assert_array_equal(seen(second)[0][:, :, : len(first.token_ids)], rows)
    longer = Request(f"{PROMPT.prompt} Take it.")
    with LLM(llm.directory.path, backend="numpy") as cold, cold.prefill(longer) as whole, llm.prefill(longer) as again:
        assert again.reused_tokens == len(again.token_ids)
        for found, expected in zip(seen(again), seen(whole), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_images_are_part_of_what_is_reused(multimodal_engines: Callable[[str], Path]) -> None:
    image = synthetic_image(24, 20)
    shown, other = (Request("Look: <|image_pad|> Go on.", images=[each]) for each in (image, image[::-1]))
    with LLM(multimodal_engines("qwen3_vl"), backend="numpy", drafting=None) as llm:
        reused, rows = [], []
        for request in (shown, shown, other):
            with llm.prefill(request, layers=[0]) as states:
                reused.append(states.reused_tokens)
                rows.append(seen(states)[0].copy())
    count = rows[0].shape[2]
    assert reused[:2] == [0, count] and 0 < reused[2] < count - 6
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-5)
    assert np.abs(rows[2] - rows[0]).max() > 0.01


def test_a_prefix_that_sees_itself_is_reused_as_a_whole(multimodal_engines: Callable[[str], Path]) -> None:
    image = synthetic_image(24, 20)
    prefixes = [("<|image_pad|>" * 2 + "take it", 1), ("<|image_pad|>" * 2 + "take it", -1)]
    first, other = (Request(text, images=[image, image[::turn]]) for text, turn in prefixes)
    with LLM(multimodal_engines("paligemma"), backend="numpy", drafting=None) as llm:
        reused, rows = [], []
        for request in (first, first, other, first, other):
            with llm.prefill(request) as states:
                reused.append(states.reused_tokens)
                rows.append([each.copy() for each in seen(states)])
        count = len(states.token_ids)
    assert reused == [0, count, 0, count, count] and count > 18
    for number in (1, 3):
        for found, expected in zip(rows[number], rows[0], strict=True):
            np.testing.assert_array_equal(found, expected)
    assert np.abs(rows[4][-1] - rows[0][-1]).max() > 0.01


def test_what_has_no_such_rows_is_refused_by_name(llm: LLM) -> None:
    for wrong in ([], [7], "01", [0.0], iter([0])):
        with pytest.raises(RequestError, match="layers is"):
            llm.prefill(PROMPT, layers=wrong)
    with LLM(llm.directory.path, backend="numpy", kv_cache="int8") as packed:
        with pytest.raises(EngineError, match=r"as int8, .* open the model with kv_cache='compute'"):
            packed.prefill(PROMPT)
        assert len(packed.handle(OTHERS)) == 3
        runtime = packed.call(lambda runtime: runtime).result()
        assert runtime._held.usable(runtime._open_runner()) == 2
    lfm = make_runner("lfm2")
    with pytest.raises(EngineError, match="layer 0 keeps no keys and values: name layers of attention"):
        lfm.base.states.shared_rows(0, 0, 4, None)
    lfm.close()


def test_all_layers_are_those_that_keep_rows(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", **RECURRENT["lfm2"])
    build_engine_directory(tmp_path / "checkpoint", tmp_path / "engines", EngineLimits(1, 16, 64), [])
    with LLM(tmp_path / "engines", backend="numpy") as llm, llm.prefill(Request([5, 3, 8])) as states:
        kinds = llm.directory.config.layer_kinds
        assert states.layers == tuple(index for index, kind in enumerate(kinds) if kind == "attention") != ()
        assert len(states.keys) == len(states.layers) < len(kinds)


def test_a_ring_is_handed_out_as_long_as_its_rows_are_in_order() -> None:
    runner, plain = make_runner("phi3_window_7"), make_runner("phi3")
    states = runner.base.states
    reach = states.window_reach
    ids = [3 + number * 7 % 70 for number in range(reach + 1)]
    runner.start(0, ids[:reach], 0, SamplingValues()).wait()
    runner.decode(1).wait()  # what is written behind touches no row that is handed out
    keys = np.from_dlpack(states.shared_rows(0, 0, reach, None)[0])
    plain.start(0, ids[:reach], 0, SamplingValues()).wait()
    whole = plain.base.states.shared_rows(0, 0, reach, None)[0]
    assert keys.shape == whole.shape
    runner.stop(0)
    runner.start(0, ids, 0, SamplingValues()).wait()
    with pytest.raises(EngineError, match=f"in a ring, in which {reach + 1} tokens .*: prefill at most {reach}"):
        states.shared_rows(0, 0, reach + 1, None)
    runner.close()
    plain.close()


def test_rows_that_a_longer_text_wrote_over_are_computed_again(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A step sees a window of them; who reads them sees all."""
    windows = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 3, **windows, max_position_embeddings=512)
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 64, 512), [])
    ids, shared = [3 + number * 7 % 200 for number in range(500)], 250
    with LLM(tmp_path / "engines", backend="numpy") as llm:
        with llm.prefill(Request(ids[:shared])) as first:
            expected, begun = [array.copy() for array in seen(first)], len(first.token_ids)
        with llm.prefill(Request(ids[: shared + 1])) as more:
            assert more.reused_tokens == begun == shared
        llm.generate(ids, max_tokens=1)
        for reused in (0, shared):
            with llm.prefill(Request(ids[:shared])) as states:
                assert states.reused_tokens == reused
                for found, wanted in zip(seen(states), expected, strict=True):
                    np.testing.assert_allclose(found, wanted, atol=1e-5)
                del found


def test_tokens_of_actions_are_a_choice_of_ids(llm: LLM) -> None:
    bins = range(40, 72)
    answer = llm.generate(PROMPT.prompt, max_tokens=7, allowed_token_ids=bins)
    assert len(answer.token_ids) == 7 and set(answer.token_ids) <= set(bins)


def test_an_async_model_awaits_it(tiny_engines: Path) -> None:
    async def rows() -> np.ndarray:
        async with AsyncLLM(tiny_engines, backend="numpy") as llm:
            with await llm.prefill(PROMPT, layers=[0]) as states:
                return seen(states)[0].copy()

    assert np.isfinite(asyncio.run(rows())).all()


def host_values(shared: SharedArray) -> np.ndarray:
    """A GPU's rows as a reader of the capsule finds them, as float32."""
    import pycuda.driver as cuda

    capsule = shared.__dlpack__(stream=1)
    address = dlpack._pointer(id(capsule), b"dltensor")
    tensor = dlpack.ManagedTensor.from_address(address)
    assert (tensor.device_kind, tensor.dimensions, tensor.bits) == (dlpack.CUDA, len(shared.shape), 16)
    shape, strides = ([axis[i] for i in range(tensor.dimensions)] for axis in (tensor.shape, tensor.strides))
    found = np.empty(shape, np.float16)
    for row in np.ndindex(*shape[:-1]):
        cuda.memcpy_dtoh(found[row], tensor.data + 2 * sum(map(mul, row, strides)))
    return found.astype(np.float32)


@pytest.mark.gpu
def test_a_gpus_rows_are_those_of_numpy() -> None:
    question = Request("Where is the red cup?")
    with LLM(backend="numpy") as twin:
        layers = twin.directory.config.feature_layers[1:]  # which the shipped draft takes
    with LLM(backend="numpy", hidden_layers=layers) as twin, twin.prefill(question, hidden_states=True) as states:
        expected = [np.from_dlpack(each).copy() for each in (*states.keys, *states.values, *states.hidden_states)]
    with LLM(backend="tensorrt", hidden_layers=layers) as llm:
        for again in (False, True):  # the second time of rows that are there
            with llm.prefill(question, hidden_states=not again) as states:
                rows = *states.keys, *states.values, *states.hidden_states
                assert len(rows) == len(expected) - again * len(layers)
                # the context is current in the engine's thread
                found = [llm.call(lambda runtime, each=each: host_values(each)).result() for each in rows]
                del rows
            for values, wanted in zip(found, expected, strict=False):
                assert np.abs(values - wanted).max() < 0.03 * np.abs(wanted).max()
        assert llm.generate("Hello", max_tokens=2).token_ids
