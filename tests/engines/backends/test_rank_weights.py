"""What ranks on GPUs hold: cuts of weights where they are loaded, heads of states, and what each GPU's memory takes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from absent_gpu import Module
from decode_models import RECURRENT
from golden_files import golden_folder
from golden_sequences import Sequences
from mxfp4_checkpoints import write_mxfp4
from packed_weights import GGUF_FORMATS, random_of, random_packed
from tiny_families import MIXTURES

from edgellm.engines.backends.cuda_backend import CudaBackend
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.cuda_ranks import CudaRanks
from edgellm.engines.backends.device_layouts import packed_layouts
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.backends.numpy_ranks import piece
from edgellm.engines.backends.packed_loading import _prepare
from edgellm.engines.backends.rank_weights import RankWeights, pieces_of
from edgellm.engines.backends.step_modules import step_modules
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import ExpertMatrices, load_numpy_weights
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.decoder import EMBEDDING, decoder_weights, embedding_name
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.memory_plan import plan_memory
from edgellm.engines.model.program import single_weight
from edgellm.engines.model.sharding import Cut
from edgellm.engines.model.states import decoder_states
from edgellm.engines.quantization.stored import StoredCodes, StoredWeight, columns_of, rows_of
from edgellm.engines.runners.states import ModelStates
from edgellm.kernels.acceptance.launcher import CudaAcceptance
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import PackedWeight
from edgellm.kernels.recurrent.contract import AcceptedPath
from edgellm.kernels.recurrent.launcher import CudaRecurrent
from edgellm.kernels.recurrent.twin import NumpyRecurrent
from edgellm.kernels.sampling.contract import ModelTables
from edgellm.kernels.sampling.launcher import EmbeddingTable, split_tables, step_source
from edgellm.kernels.tree.launcher import tree_source

GOLDENS = golden_folder("decoder")


class HostRank:
    """A rank whose memory is the host's."""

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def zeros_side_by_side(self, edge: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, DeviceArray]:
        return {name: on_host(np.zeros(shape, np.float32)) for name, (shape, _) in edge.items()}

    def upload(self, array: DeviceArray, values: np.ndarray) -> None:
        assert (array.shape, array.dtype) == (values.shape, values.dtype.name)
        ctypes.memmove(array.pointer, np.ascontiguousarray(values).ctypes.data, values.nbytes)

    def synchronize(self) -> None:
        pass


def on_host(values: np.ndarray) -> DeviceArray:
    return DeviceArray(values.ctypes.data, values.shape, values.dtype.name, values)


def view(array: DeviceArray) -> np.ndarray:
    """An array of the host's memory."""
    buffer = (ctypes.c_char * array.nbytes).from_address(array.pointer)
    return np.frombuffer(buffer, np.dtype(array.dtype)).reshape(array.shape)


def seen(array: DeviceArray) -> np.ndarray:
    """What is in it now."""
    return view(array).copy()


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
    """Of its table of embeddings, too, where that is no head."""
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
    assert parts.table == table
    np.testing.assert_array_equal(np.concatenate([seen(held[table]) for held in loaded]), whole[table])
    assert told[-1][0] == told[-1][1] == sum(array.nbytes for held in loaded for array in held.values())
    plan = plan_memory(config, limits, specs, "float32", {"engine scratch": 7}, adapters=True)
    for rank, held in enumerate(loaded):
        bound = parts.parts(rank, held)
        for spec in specs:
            if spec.name not in bound:
                assert spec.name == table
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
        assert own["weights"] < 0.65 * sum(array.nbytes for array in whole.values())


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


@pytest.mark.parametrize(
    ("name", "count", "takes"),
    [("awq_group32", 2, True), ("awq_group32", 4, False), ("gptq_v2_desc_act", 2, False), ("ct_nvfp4", 4, True)],
)
def test_packed_weights_that_gpus_cannot_share_are_refused_by_name(name: str, count: int, takes: bool) -> None:
    """Groups of 32 of the 64 columns of all heads, and an act order; of an MLP's 96 columns a rank may have more
    groups than another."""
    with Checkpoint.open(golden_folder("quantized") / name) as checkpoint:
        config = decoder_config(checkpoint.config, checkpoint.generation_config)
        layouts = packed_layouts(checkpoint, decoder_weights(config), "float16")
    directory: Any = SimpleNamespace(config=config, limits=EngineLimits(), dtype="float16", draft=None)
    if not takes:
        with pytest.raises(EngineError, match=r"_proj\.weight \(int4, .*\) cannot be shared by GPUs: one would have"):
            RankWeights(directory, count, layouts)
        return
    parts = RankWeights(directory, count, layouts)
    for rank in range(count):
        for weight, layout in parts.layouts[rank].items():
            assert isinstance(layout, DeviceLayout) and (layout.rows, layout.columns) == parts._shape(rank, weight)


class HostRanks(CudaRanks):
    """Ranks whose memory is the host's, and whose kernels are twins; with `by_nccl` they use their own memory alone."""

    def __init__(self, config: Any, count: int, by_nccl: bool, patch: pytest.MonkeyPatch) -> None:
        directory: Any = SimpleNamespace(config=config, limits=EngineLimits(), dtype="float32", draft=None)
        self._directory, self.gpus = directory, count
        self._parts, self._ranks = RankWeights(directory, count, {}), [self]
        self._ranks += [object.__new__(CudaBackend) for _ in range(1, count)]
        for each in self._ranks:
            each.compute_dtype, each._module = "float32", Module()  # type: ignore[assignment]
            each.rank: Any = SimpleNamespace(bring=bring)
            each.acceptance = object.__new__(CudaAcceptance)
        self.memory: Any = SimpleNamespace(nccl=by_nccl or None)
        self._buffers = {}

        def copy_rows(of_rank: Any, array: DeviceArray, values: np.ndarray, rows: int, up: bool) -> None:
            assert values.flags.c_contiguous
            pair = view(array)[:, :rows], values[:, :rows]
            np.copyto(*pair if up else pair[::-1])

        def zeros(of_rank: Any, *kind: Any) -> DeviceArray:
            return on_host(np.zeros(*kind))

        patched = {
            "current": lambda of_rank: nullcontext(),
            "synchronize": lambda of_rank: None,
            "zeros": zeros,
            "empty": zeros,
            "zeros_side_by_side": lambda of_rank, edge: {name: zeros(of_rank, *kind) for name, kind in edge.items()},
            "copy": lambda of_rank, target, source: np.copyto(view(target), view(source)),
            "upload_rows": lambda *given: copy_rows(*given[:4], up=True),
            "download_rows": lambda *given: copy_rows(*given[:4], up=False),
        }
        for name, method in patched.items():
            patch.setattr(CudaDevice, name, method)
        for name in ("commit_columns", "commit_matrices", "commit_scans"):
            patch.setattr(CudaRecurrent, name, partialmethod(_commit, name))
        patch.setattr(CudaAcceptance, "move_slots", _move_slots)

    def run(self, launches: Sequence[Sequence[Callable[[], object]]]) -> None:
        for own in launches:
            assert len(own) == 1 or (len(own) == 3 and self.memory.nccl is not None)  # indices and counts are brought
            for launch in own:
                launch()


def bring(sources: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
    return [partial(np.copyto, view(own), view(given)) for given, own in zip(sources, targets, strict=True)]


@pytest.mark.parametrize(("name", "count"), [("qwen3", 2), ("phi3_partial_tied", 4)])
def test_tokens_are_looked_up_where_ranks_have_them(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels that are told where each piece is, which steps and trees ask for."""
    config = replace(Sequences(GOLDENS / name).config, dtype="float32")
    ranks, specs = HostRanks(config, count, False, monkeypatch), decoder_weights(config)
    monkeypatch.setattr(CudaDevice, "upload", HostRank.upload)
    monkeypatch.setattr(CudaBackend, "load_kernels", lambda backend, weights: None)
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        (table,) = load_numpy_weights(checkpoint, specs[:1]).values()
        loaded = ranks.load_weights(checkpoint, specs)
    shared, vocabulary = loaded[specs[0].name], config.vocab_size
    places = seen(shared.places)
    for token in range(vocabulary):
        rank = next(rank for rank in reversed(range(count)) if token >= vocabulary * rank // count)
        row, size = token - vocabulary * rank // count, config.hidden_size
        np.testing.assert_array_equal(
            seen(DeviceArray(int(places[rank]), (row + 1, size), "float32"))[row], table[token]
        )
    tables, known = split_tables(ModelTables(shared, shared.places, shared.places))
    assert known == EmbeddingTable(pieces=count) and tables.embedding.shape == (vocabulary, config.hidden_size)
    models: Any = {"base": config}
    sources = step_modules(models, "float16", dict.fromkeys(loaded), ranks.table_pieces)
    assert {step_source("float16", known), tree_source("float16", known)} <= {*sources}


def test_a_table_that_the_first_has_whole(tiny_draft_engines: Path) -> None:
    """As a draft multiplies with it, or as kernels read no other GPU's memory."""
    opened, found = EngineDirectory.open(tiny_draft_engines), []
    assert opened.draft is not None and not opened.draft.config.has_embedding and opened.config.tie_word_embeddings
    for has_head, is_tied, shares in (
        (True, True, True),
        (False, True, True),
        (True, True, False),
        (True, False, False),
    ):
        draft = replace(opened.draft.config, has_head=has_head, draft_vocab_size=opened.config.vocab_size)
        config = replace(opened.config, tie_word_embeddings=is_tied)
        others = {"limits": opened.limits, "dtype": "float16", "draft": SimpleNamespace(config=draft)}
        parts = RankWeights(SimpleNamespace(config=config, **others), 2, {}, shares)  # type: ignore[arg-type]
        held = [parts._shape(rank, EMBEDDING)[0] for rank in range(2) if parts._holds(rank, EMBEDDING)]
        found.append((parts.table, held))
    rows = opened.config.vocab_size
    whole = None, [rows, rows // 2]  # of which the other has what its head multiplies with
    assert found == [(EMBEDDING, [rows // 2, rows // 2]), whole, whole, (None, [rows])]


def test_pieces_of_a_packed_table_lie_alike() -> None:
    """Though one has scales that need another layout than those of the other."""
    weight = random_packed(48, 128, 64, False, "float16")
    weight.scales[-1] = 2.0
    checkpoint: Any = SimpleNamespace(stored=lambda name, shape: stored(weight))
    spec, cuts = single_weight(EMBEDDING, 48, 128), [Cut(0, ((begin, begin + 24),)) for begin in (0, 24)]
    for is_alike in (False, True):
        layouts = [_prepare(checkpoint, spec, "float16", cut, is_alike)[0].layout for cut in cuts]
        assert [layout.rows for layout in layouts] == [24, 24]
        assert (layouts[0].mode == layouts[1].mode) == is_alike


def _move_slots(kernels: Any, arrays: Sequence[Any], *how: Any) -> None:
    NumpyBackend.move_slots(kernels, [*map(view, arrays)], *how)


def _commit(kernels: Any, name: str, layers: Any, path: Any) -> Any:
    own = [type(layer)(*map(view, layer)) for layer in layers]
    return getattr(NumpyRecurrent(), name)(own, AcceptedPath(*map(view, path)))


@pytest.mark.parametrize(
    ("name", "count", "by_nccl"),
    [("gated_delta_nets", 4, True), ("state_spaces", 2, False), ("short_convolutions", 2, True)],
)
def test_states_of_ranks_are_those_of_one(
    name: str, count: int, by_nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come from snapshots by parts, change places, begin anew, take what was accepted of a tree, and go back."""
    config, random, drawn, found = RECURRENT[name], np.random.default_rng(3), dict[Any, np.ndarray](), []
    for backend in (NumpyBackend(config), HostRanks(config, count, by_nccl, monkeypatch)):
        of_ranks = isinstance(backend, HostRanks)
        given: Any = on_host if of_ranks else np.asarray
        states = ModelStates(backend, decoder_states(config), 3, 20, given(np.arange(3, dtype=np.int32)), is_base=True)
        shapes, places = states.saved(20), {(slot, p.name): p for slot in range(3) for p in states.of_slot(slot, 20)}
        for key, place in places.items():
            values = drawn.setdefault(key, random.standard_normal(shapes[key[1]][0], np.float32))
            for group in range(len(values)):
                own = slice(group, group + 1)
                backend.upload_rows(place.memory[own], values[own], place.rows)
        states.move(0, 2, 20, True)
        states.move(0, 1, 20, False)
        states.clear_slot(2)
        kept: Any = states.kept_inputs(3, 5).of(2, 5)
        for key, array in kept.items():
            values = drawn.setdefault(key, -np.abs(random.standard_normal(array.shape, np.float32)))
            for ranges, part in array.parts if of_ranks else [([(0, values.shape[2])], array)]:
                columns = [values[..., begin:end] for begin, end in ranges]
                (view(part) if of_ranks else part)[...] = np.concatenate(columns, axis=-1)
        path = np.array([[0, 1, 3], [0, 2, 0]], np.int32), np.array([3, 0], np.int32)
        states.replay(slice(0, 2), kept, *map(given, path))()
        found.append({key: np.zeros_like(drawn[key]) for key in places})
        for key, place in places.items():
            backend.download_rows(place.memory, found[-1][key], place.rows)
    for (slot, name), expected in found[0].items():
        np.testing.assert_array_equal(found[1][slot, name], expected, err_msg=f"{slot} {name}")
        is_rows, is_moved = name[1] == "_", (expected == drawn[(2, 2, 0)[slot], name]).all()
        assert is_moved == (is_rows or slot == 1) and (expected == 0).all() == (slot == 2 and not is_rows)
    with pytest.raises(ValueError, match="cannot view heads of several GPUs"):
        states.tensors[name].reshape(1)
