"""Models whose tensors are packed in GGUF files, several types in one: what NumPy loads, and what kernels get."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf_models import MIXTURE, MIXTURE_HEADS, write_mixture
from gguf_writing import dense, random_blocks, write_gguf
from golden_files import golden_folder, largest_difference
from golden_sequences import Sequences

from edgellm.engines.backends.device_layouts import packed_layouts
from edgellm.engines.backends.executors import SHARED_MEMORY
from edgellm.engines.building.needed_kernels import WeightLayouts, needed_modules
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import described_parts, iterate_weight_parts, load_numpy_weights
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families import decoder_config
from edgellm.engines.formats.gguf_file import GgufFile, open_split
from edgellm.engines.formats.tensors import convert
from edgellm.engines.gguf.model_config import model_config
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.quantization.gguf_blocks import BlockLayout
from edgellm.engines.quantization.layout import LinearTensors
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.quantization.row_runs import DenseRows


def _as_stored(folder: Path, name: str) -> np.ndarray:
    """The values of a tensor as the file has it."""
    file = GgufFile(folder / "model.gguf")
    info = file.tensors[name]
    if info.dtype == "float32":
        return file.bytes_of(info).view(np.float32).reshape(info.shape)
    rows, columns = info.shape
    found = LinearTensors("x", (rows, columns), lambda _: (info.dtype, info.shape, file.bytes_of(info)))
    return BlockLayout(info.dtype).read(found).unpacked().values()


def _unpaired(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of rotated pairs as they are published: the first of all pairs of a head, then the second."""
    rows = [head * (len(values) // heads) + 2 * pair + half for head in range(heads) for half in (0, 1)
            for pair in range(len(values) // heads // 2)]  # fmt: skip
    return values[rows]


def test_a_file_of_llama_cpps_own_quantizer(tmp_path: Path) -> None:
    """Asked for Q4_K_M: several types, two of them where matrices are too narrow for the others. The logits are those
    of transformers on the values that gguf-py reads; those of the model before it was quantized are 2 away."""
    file = Path(shutil.copy(golden_folder("gguf") / "llama_q4_k_m.gguf", tmp_path / "model.gguf"))
    kinds = Counter(info.dtype for info in GgufFile(file).tensors.values())
    assert kinds == {"q4_k": 4, "q6_k": 2, "q5_0": 1, "q8_0": 1, "float32": 3}
    (tmp_path / "config.json").write_text(json.dumps(model_config(open_split(file))))
    shutil.copy(golden_folder("gguf") / "llama_q4_k_m.safetensors", tmp_path / "expected.safetensors")
    sequences = Sequences(tmp_path)
    assert largest_difference(sequences.logits(sequences.token_ids, [0]), sequences.expected) <= 5e-5


def test_numpy_loads_the_values_of_the_file(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path / "model")
    with Checkpoint.open(folder) as checkpoint:
        config = decoder_config(checkpoint.config)
        assert (config.dtype, config.tie_word_embeddings) == ("float16", False)
        checkpoint.check(decoder_weights(config))
        found = load_numpy_weights(checkpoint, decoder_weights(config))
    stored = {name: _as_stored(folder, name) for name in GgufFile(folder / "model.gguf").tensors}
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], stored["token_embd.weight"])
    np.testing.assert_array_equal(found["lm_head.weight"], stored["output.weight"])
    for layer in range(2):
        parts = [stored[f"blk.{layer}.attn_{each}.weight"] for each in "qkv"]
        qkv = np.concatenate((_unpaired(parts[0], MIXTURE_HEADS), _unpaired(parts[1], 2), parts[2]))
        np.testing.assert_array_equal(found[f"model.layers.{layer}.self_attn.qkv_proj.weight"], qkv)
        np.testing.assert_array_equal(
            found[f"model.layers.{layer}.mlp.down_proj.weight"], stored[f"blk.{layer}.ffn_down.weight"]
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_get_what_they_take_packed_and_the_rest_dense(tmp_path: Path, dtype: str) -> None:
    folder = write_mixture(tmp_path / "model")
    with Checkpoint.open(folder) as checkpoint:
        config = decoder_config(checkpoint.config)
        specs = decoder_weights(config)
        packed = packed_layouts(checkpoint, specs, dtype)
        layers = [f"model.layers.{layer}." for layer in range(2)]
        names = "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"
        expected = {f"{layer}{name}.weight" for layer in layers for name in names}
        assert packed.keys() == expected | {"lm_head.weight", "model.embed_tokens.weight"}
        of_numpy = load_numpy_weights(checkpoint, specs)
        rest = [spec for spec in specs if spec.name not in packed]
        whole = {spec.name: np.empty(spec.shape, np.float16 if dtype == "float16" else np.uint16) for spec in rest}
        for spec, offset, values in iterate_weight_parts(checkpoint, rest, dtype):
            whole[spec.name].reshape(-1)[offset // 2 : offset // 2 + values.size] = values.reshape(-1)
        for name, values in whole.items():
            np.testing.assert_array_equal(values, convert(of_numpy[name], "float32", dtype)[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kinds", [MIXTURE, dict.fromkeys(MIXTURE, "q4_0")], ids=["mixture", "q4_0"])
def test_kernels_of_a_gpu_that_is_not_there_take_them(tmp_path: Path, kinds: dict[str, str], dtype: str) -> None:
    """The loader reads the file, and all engines prepare their launches."""
    folder = write_mixture(tmp_path / "model", kinds)
    models = {"base": decoder_config(json.loads((folder / "config.json").read_text()))}
    weights = WeightLayouts(models, {"base": partial(Checkpoint.open, folder)}, dtype)
    packed = {name: layout for name, layout in weights.loaded["base"].items() if layout is not None}
    assert packed.keys() == weights.planned["base"].keys() and len(packed) > 4
    found = {(run.format.codes, run.kind) for layout in packed.values() for run in layout.runs}
    plain = "narrow" if dtype == "float16" else "float16"
    levels = {(codes, "levels") for codes in ("int4", "int6", "iq4")} if "iq4_xs" in kinds.values() else set()
    assert found == {("int4", plain), ("int8", plain)} | levels
    gpu = absent_gpu("sm_86", 16, SHARED_MEMORY["sm_86"])
    limits = EngineLimits(1, 16, 64, packed=True)
    names = {source.name for source in needed_modules(models, limits, dtype, weights, gpu)}
    assert {f"shuffle-{codes}-8" for codes, _ in found} <= names


def test_equal_formats_and_others_in_one_step(tmp_path: Path) -> None:
    same = dict.fromkeys(MIXTURE, "q4_0")
    with Checkpoint.open(write_mixture(tmp_path / "same", same)) as checkpoint:
        specs = decoder_weights(decoder_config(checkpoint.config))
        names = packed_layouts(checkpoint, specs, "float16").keys()
        assert "model.layers.1.self_attn.qkv_proj.weight" in names
        assert "model.embed_tokens.weight" in names
        words = "GGUF Q4_0: int4, groups of 32"
        assert described_parts(checkpoint, specs)[words][0] == 14
    mixed = same | {"attn_v": "q8_0", "ffn_up": "q4_1"}
    with Checkpoint.open(write_mixture(tmp_path / "mixed", mixed)) as checkpoint:
        layouts = packed_layouts(checkpoint, specs, "float16")
        runs = layouts["model.layers.1.self_attn.qkv_proj.weight"].runs
        assert [(run.format.codes, run.rows) for run in runs] == [("int4", 384), ("int8", 128)]
        runs = layouts["model.layers.1.mlp.gate_up_proj.weight"].runs
        assert [(run.format.minima, run.rows) for run in runs] == [(False, 256), (True, 256)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dense_parts_stand_beside_packed_ones_in_one_step(tmp_path: Path, dtype: str) -> None:
    """As they are: neither makes the other dense, and the step takes little more than the file has of it."""
    kinds = dict.fromkeys(MIXTURE, "q4_k") | {"attn_v": "float16", "ffn_up": "float16"}
    folder = write_mixture(tmp_path / "model", kinds)
    models = {"base": decoder_config(json.loads((folder / "config.json").read_text()))}
    weights = WeightLayouts(models, {"base": partial(Checkpoint.open, folder)}, dtype)
    packed = weights.loaded["base"]
    step, gates = packed["model.layers.1.self_attn.qkv_proj.weight"], packed["model.layers.1.mlp.gate_up_proj.weight"]
    assert step is not None and gates is not None
    assert (step.runs[0].rows, step.runs[1]) == (384, DenseRows(128, 256, dtype))
    assert (gates.runs[0].rows, gates.runs[1]) == (256, DenseRows(256, 256, dtype))
    sizes = {name: info.nbytes for name, info in GgufFile(folder / "model.gguf").tensors.items()}
    for layout, names in ((step, ("attn_q", "attn_k", "attn_v")), (gates, ("ffn_gate", "ffn_up"))):
        assert math.prod(layout.shape) <= 1.08 * sum(sizes[f"blk.1.{name}.weight"] for name in names)
    limits, gpu = EngineLimits(1, 128, 160, packed=True), absent_gpu("sm_86", 16, SHARED_MEMORY["sm_86"])
    names = [each for source in needed_modules(models, limits, dtype, weights, gpu) for each in source.expressions]
    prompts = [name.count(",") for name in names if name.startswith("prefill::linear<")]
    assert {*prompts} == {7, 9}  # with the numbers of a format, and without
    info = GgufFile(folder / "model.gguf").tensors["blk.1.attn_v.weight"]
    with (folder / "model.gguf").open("r+b") as file:
        file.seek(info.offset + 6)
        file.write(np.float16(np.inf).tobytes())
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_proj.*\[0, 3\]"):
        WeightLayouts(models, {"base": partial(Checkpoint.open, folder)}, dtype)


def test_columns_of_the_delta_rule_are_put_back(tmp_path: Path) -> None:
    """Value heads of 32 columns, two for each of two key heads: packed and dense alike."""
    random = np.random.default_rng(12)
    own = {"block_count": 1, "embedding_length": 32, "attention.head_count": 2, "full_attention_interval": 4}
    own |= {"ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 128}
    metadata = {"general.architecture": "qwen35"} | {f"qwen35.{key}": value for key, value in own.items()}
    for kind in ("q4_1", "float32"):
        packed = random_blocks("q4_1", (32, 128), random)
        values = random.normal(size=(32, 128)).astype(np.float32)
        tensors = {"blk.0.ssm_out.weight": packed if kind == "q4_1" else dense(values)}
        folder = tmp_path / kind
        folder.mkdir()
        write_gguf(folder / "model.gguf", metadata, tensors)
        (folder / "config.json").write_text("{}")
        stored = _as_stored(folder, "blk.0.ssm_out.weight")
        expected = np.concatenate([stored[:, 32 * head : 32 * head + 32] for head in (0, 2, 1, 3)], axis=1)
        name = "model.layers.0.linear_attn.out_proj.weight"
        with Checkpoint.open(folder) as checkpoint:
            weight = checkpoint.packed(name, (32, 128))
            found = checkpoint.raw(name) if weight is None else weight.values()
        np.testing.assert_array_equal(found, expected)


def test_packed_norms_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 512}
    (folder / "config.json").write_text(json.dumps(config))
    with Checkpoint.open(folder) as checkpoint:
        wrong = r"wrong shape: model\.layers\.0\.mlp\.gate_proj\.weight is \[256, 256\], expected \[512, 256\]"
        with pytest.raises(CheckpointError, match=wrong):
            checkpoint.check(decoder_weights(decoder_config(config)))
    metadata = {"general.architecture": "gemma", "gemma.block_count": 1}
    norm = random_blocks("q8_0", (32,), np.random.default_rng(1))
    write_gguf(folder / "model.gguf", metadata, {"output_norm.weight": norm})
    with pytest.raises(CheckpointError, match=r"'output_norm\.weight' has the type q8_0, expected one of float32"):
        Checkpoint.open(folder)
