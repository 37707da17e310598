"""What ranks on GPUs hold: cuts of weights where they are loaded, heads of states, and what each GPU's memory takes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from golden_files import golden_folder
from golden_sequences import Sequences
from mxfp4_checkpoints import write_mxfp4
from packed_weights import GGUF_FORMATS, random_of, random_packed
from tiny_families import MIXTURES

from edgellm.engines.backends.device_layouts import packed_layouts
from edgellm.engines.backends.numpy_ranks import piece
from edgellm.engines.backends.packed_loading import _prepare
from edgellm.engines.backends.rank_memory import RankedArray
from edgellm.engines.backends.rank_weights import RankWeights, pieces_of
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import ExpertMatrices, load_numpy_weights
from edgellm.engines.errors import EngineError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.decoder import decoder_weights, embedding_name
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.memory_plan import plan_memory
from edgellm.engines.model.sharding import Cut
from edgellm.engines.quantization.stored import StoredCodes, StoredWeight, columns_of, rows_of
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import PackedWeight

GOLDENS = golden_folder("decoder")


class HostRank:
    """A rank whose memory is the host's."""

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def zeros_side_by_side(self, edge: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, DeviceArray]:
        return {name: on_host(np.zeros(shape, np.float32)) for name, (shape, _) in edge.items()}

    def upload(self, array: DeviceArray, values: np.ndarray) -> None:
        assert array.shape == values.shape and values.dtype == np.float32
        ctypes.memmove(array.pointer, np.ascontiguousarray(values).ctypes.data, values.nbytes)

    def synchronize(self) -> None:
        pass


def on_host(values: np.ndarray) -> DeviceArray:
    return DeviceArray(values.ctypes.data, values.shape, values.dtype.name, values)


def seen(array: DeviceArray) -> np.ndarray:
    """What is in an array of the host's memory."""
    buffer = (ctypes.c_char * array.nbytes).from_address(array.pointer)
    return np.frombuffer(buffer, np.dtype(array.dtype)).reshape(array.shape).copy()


def _dense(weight: Any) -> np.ndarray:
    """Experts' matrices as one."""
    if isinstance(weight, ExpertMatrices):
        return np.concatenate([weight.of(expert) for expert in range(len(weight._parts))])
    return weight


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "llama_biases_head_dim_10", "phi3_partial_tied", "olmo2", "qwen3_moe", "lfm2_moe", "qwen3_5_text"),
        "gemma4",
    ],
)
def test_each_rank_gets_its_part_of_the_files_alone(name: str) -> None:
    """But for its table of embeddings, which the first rank has whole."""
    config = replace(Sequences(GOLDENS / name).config, dtype="float32")
    limits = EngineLimits(kv_capacity=64, prefill_chunk=16, max_lora_rank=4, lora_slots=2)
    directory: Any = SimpleNamespace(config=config, limits=limits, dtype="float32", draft=None)
    parts, ranks = RankWeights(directory, 2, {}), [HostRank(), HostRank()]
    specs = decoder_weights(config)
    told: list[tuple[int, int]] = []
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        whole = {name: _dense(weight) for name, weight in load_numpy_weights(checkpoint, specs).items()}
        loaded = parts.load(checkpoint, ranks, lambda *each: told.append(each))  # type: ignore[arg-type]
    table = embedding_name(config)
    np.testing.assert_array_equal(seen(loaded[0][table]), whole[table])
    assert told[-1][0] == told[-1][1] == sum(array.nbytes for held in loaded for array in held.values())
    plan = plan_memory(config, limits, specs, "float32", {"engine scratch": 7}, adapters=True)
    for rank, held in enumerate(loaded):
        bound = parts.parts(rank, held)
        for spec in specs:
            if spec.name not in bound:
                assert spec.name == table and (rank == 0 or table not in held)
                continue
            cut = parts._bound[rank].get(spec.name)
            expected = whole[spec.name] if cut is None else piece(whole[spec.name], cut)
            np.testing.assert_array_equal(seen(bound[spec.name]), expected, err_msg=f"{rank} {spec.name}")
        own = parts.plan(rank, plan, 9).items
        assert own["weights"] == sum(array.nbytes for array in held.values())
        heads = config.num_kv_heads  # of one, both have it
        assert own["engine scratch"] == 9
        assert own["KV caches"] * heads == plan.items["KV caches"] * max(1, heads // 2)
        assert plan.items["LoRA adapters"] / 2 < own["LoRA adapters"] < plan.items["LoRA adapters"]
        assert own["weights"] < 0.75 * sum(array.nbytes for array in whole.values())


def test_a_rank_reads_its_own_packed_experts_alone(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", **MIXTURES["gpt_oss"])
    with Checkpoint.open(write_mxfp4(source, tmp_path)[0]) as checkpoint:
        config = decoder_config(checkpoint.config, checkpoint.generation_config)
        layouts = packed_layouts(checkpoint, decoder_weights(config), "bfloat16")
        directory: Any = SimpleNamespace(config=config, limits=EngineLimits(), dtype="bfloat16", draft=None)
        parts = RankWeights(directory, 2, layouts)
        for spec in (spec for spec in decoder_weights(config) if spec.experts):
            (whole,) = _prepare(checkpoint, spec, "bfloat16")
            found = [_prepare(checkpoint, spec, "bfloat16", parts._held[rank][spec.name]) for rank in range(2)]
            for (own,), layouts_of_rank in zip(found, parts.layouts, strict=True):
                assert own.layout.shape == layouts_of_rank[spec.name].shape
            together = [codes.unpacked() for (own,) in found for codes in own.codes]
            np.testing.assert_array_equal(np.concatenate(together), np.concatenate([c.unpacked() for c in whole.codes]))


def test_pieces_of_cuts_are_found_wherever_tensors_are_parted() -> None:
    whole, random = np.arange(7 * 10, dtype=np.float32).reshape(7, 10), np.random.default_rng(0)
    for cut in (Cut(0, ((1, 3), (5, 7))), Cut(1, ((3, 8),)), Cut(1, ((0, 10),)), Cut(0, ((0, 1),))):
        expected = piece(whole, cut)
        for _ in range(30):
            found, ends = np.full(expected.size, -1, np.float32), np.sort(random.integers(0, 71, 3))
            for begin, end in zip([0, *ends], [*ends, 70], strict=True):
                for place, values in pieces_of(cut, whole.shape, int(begin), whole.reshape(-1)[begin:end]):
                    assert (found[place : place + values.size] == -1).all()
                    found[place : place + values.size] = values
            np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def stored(weight: PackedWeight) -> StoredWeight:
    codes = StoredCodes(weight.codes, "bytes", 8, weight.codes.shape)
    scales, minima = (None, None) if weight.levels is not None else (weight.scales, weight.minima)
    read = None if (levels := weight.levels) is None else lambda: levels
    return StoredWeight(weight.format, (codes,), scales, weight.zeros, weight.order, weight.input_scales, minima, read)


@pytest.mark.parametrize("kind", ["zeros", "whole rows", "scaled", *GGUF_FORMATS])
def test_parts_of_packed_weights_are_what_the_whole_has_there(kind: str) -> None:
    if kind in GGUF_FORMATS:
        weight = random_of(GGUF_FORMATS[kind], 24, 512)
    else:
        weight = random_packed(24, 512, None if kind == "whole rows" else 64, kind == "zeros", "float16")
    if kind == "scaled":
        weight = replace(weight, input_scales=np.linspace(1, 2, 512, dtype=np.float32))
    values, own = weight.values(), stored(weight)
    np.testing.assert_array_equal(own.unpacked().values(), values)
    rows = rows_of(own, ((2, 5), (16, 24)))
    np.testing.assert_array_equal(rows.unpacked().values(), values[[*range(2, 5), *range(16, 24)]])
    columns = columns_of(own, 256, 512)
    assert (rows.shape, columns.shape) == ((11, 512), (24, 256))
    np.testing.assert_array_equal(columns.unpacked().values(), values[:, 256:])
    if kind == "scaled":
        np.testing.assert_array_equal(columns.input_scales, weight.input_scales[256:])
    if kind != "whole rows":
        with pytest.raises(EngineError, match="columns 0 to 24 of packed weights are no whole groups of"):
            columns_of(own, 0, 24)


def test_columns_in_another_order_are_not_shared() -> None:
    weight = replace(random_packed(8, 64, 16, True, "float16"), order=np.arange(64, dtype=np.int32)[::-1])
    with pytest.raises(EngineError, match="act order"):
        columns_of(stored(weight), 0, 32)


def test_states_are_looked_at_by_slots_and_heads() -> None:
    """As transfers of snapshots do: a part of the heads, of which a rank may have none."""
    whole = np.arange(3 * 4 * 5 * 2, dtype=np.float32).reshape(3, 4, 5, 2)
    halves = [np.ascontiguousarray(whole[:, begin : begin + 2]) for begin in (0, 2)]
    parts = tuple((((begin, begin + 2),), on_host(half)) for begin, half in zip((0, 2), halves, strict=True))
    array = RankedArray(whole.shape, "float32", parts)
    one = array[1:2]
    assert array.nbytes == whole.nbytes and one.shape == (1, 4, 5, 2)
    for part, place in one.beside(on_host(whole[1:2])):
        np.testing.assert_array_equal(seen(part), seen(place))
    slot = one.reshape(4, 5, 2)
    for begin, end in ((0, 4), (1, 3), (2, 3)):
        looked = slot[begin:end]
        assert looked.shape == (end - begin, 5, 2)
        for ((first, last),), part in looked.parts:
            np.testing.assert_array_equal(seen(part), whole[1, begin + first : begin + last])
        assert sum(last - first for ((first, last),), _ in looked.parts) == end - begin
    with pytest.raises(ValueError, match="cannot view heads of several GPUs"):
        array.reshape(12, 5, 2)


@pytest.mark.parametrize(("name", "takes"), [("awq_group32", False), ("gptq_v2_desc_act", False), ("ct_nvfp4", True)])
def test_packed_weights_that_gpus_cannot_share_are_refused_by_name(name: str, takes: bool) -> None:
    """Groups of 32 of 96 columns, and an act order; groups of 16 are cut."""
    with Checkpoint.open(golden_folder("quantized") / name) as checkpoint:
        config = decoder_config(checkpoint.config, checkpoint.generation_config)
        layouts = packed_layouts(checkpoint, decoder_weights(config), "float16")
    directory: Any = SimpleNamespace(config=config, limits=EngineLimits(), dtype="float16", draft=None)
    if not takes:
        with pytest.raises(EngineError, match=r"_proj\.weight \(int4, .*\) cannot be shared by GPUs: one would have"):
            RankWeights(directory, 2, layouts)
        return
    parts = RankWeights(directory, 2, layouts)
    for rank in range(2):
        for weight, layout in parts.layouts[rank].items():
            assert isinstance(layout, DeviceLayout) and (layout.rows, layout.columns) == parts._shape(rank, weight)
