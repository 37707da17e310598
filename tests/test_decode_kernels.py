"""The decode kernel's twin, its host side, and its compilation: everything that needs no GPU."""

from __future__ import annotations

import ctypes
from dataclasses import fields, replace

import numpy as np
import pytest

from edgellm.engines.cuda_decode_engine import decode_dimensions, unsupported
from edgellm.engines.decoder import DecoderDescription, decoder_weights, head_weight_name
from edgellm.engines.decoder_config import DecoderConfig, EngineShape
from edgellm.engines.numpy_operations import NumpyOperations
from edgellm.kernels import compiler, decode_kernels
from edgellm.kernels.decode_kernels import DecodeDimensions, DecodeLayer, DecodeStep, shared_memory
from edgellm.kernels.errors import KernelError
from edgellm.kernels.numpy_decode_kernels import decode_step

LLAMA = DecoderConfig("llama", 97, 64, 128, 2, 4, 2, 16, 256, 1e-5, 10000.0, 16, "float16", True)
FAMILIES = {
    "llama": LLAMA,
    "llama_untied_biases": replace(
        LLAMA, tie_word_embeddings=False, attention_bias=True, attention_output_bias=True, mlp_bias=True
    ),
    "qwen2": replace(LLAMA, family="qwen2", attention_bias=True, dtype="bfloat16"),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=32, rotary_dim=32),
    "partial_rotation": replace(LLAMA, rotary_dim=8),
    "one_kv_head": replace(LLAMA, num_heads=3, num_kv_heads=1, head_dim=24, rotary_dim=24),
}
LLAMA_1B = DecodeDimensions(16, 1, 2048, 8192, 128256, 32, 8, 64, 64, 1024)
H200, ORIN, RTX = 232_448, 166_912, 101_376


def random_model(config: DecoderConfig, batch: int, rows: int, starts: list[int]) -> dict[str, np.ndarray]:
    """Weights, inputs and filled caches by their names at the engine's edge, float32."""
    random = np.random.default_rng(7)
    arrays = {}
    for spec in decoder_weights(config):
        scale = 0.1 if len(spec.shape) == 1 else spec.shape[1] ** -0.5
        arrays[spec.name] = random.standard_normal(spec.shape, np.float32) * scale + ("norm" in spec.name)
    arrays["inputs_embeds"] = random.standard_normal((batch, 1, config.hidden_size), np.float32)
    angles = random.uniform(0, 6, (batch, 1, config.rotary_dim // 2))
    arrays["rope_rotary_cos_sin"] = np.concatenate((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
    arrays["kvcache_start_index"] = np.array(starts, np.int32)
    seen = np.arange(rows)[None, :] <= np.array(starts)[:, None]
    arrays["attention_mask"] = seen[:, None, None]
    cache = (batch, config.num_kv_heads, rows, config.head_dim)
    for index in range(config.num_layers):
        for name in ("k_cache", "v_cache"):
            arrays[f"{name}_{index}"] = random.standard_normal(cache, np.float32)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def twin_step(config: DecoderConfig, arrays: dict[str, np.ndarray], batch: int, rows: int) -> DecodeStep:
    """The arrays as the twin takes them, with empty results."""
    d = decode_dimensions(config, EngineShape("decode", batch, 1, rows, rows))

    def layer(index: int) -> DecodeLayer:
        prefix = f"model.layers.{index}."
        sources = {
            "input_norm": "input_layernorm.weight",
            "qkv": "self_attn.qkv_proj.weight",
            "qkv_bias": "self_attn.qkv_proj.bias",
            "q_norm": "self_attn.q_norm.weight",
            "k_norm": "self_attn.k_norm.weight",
            "o": "self_attn.o_proj.weight",
            "o_bias": "self_attn.o_proj.bias",
            "post_attention_norm": "post_attention_layernorm.weight",
            "gate_up": "mlp.gate_up_proj.weight",
            "gate_up_bias": "mlp.gate_up_proj.bias",
            "down": "mlp.down_proj.weight",
            "down_bias": "mlp.down_proj.bias",
        }
        weights = {name: arrays.get(prefix + source) for name, source in sources.items()}
        return DecodeLayer(**weights, k_cache=arrays[f"k_cache_{index}"], v_cache=arrays[f"v_cache_{index}"])

    def empty(*shape: int) -> np.ndarray:
        return np.full(shape, np.nan, np.float32)

    return DecodeStep(
        dimensions=d,
        epsilon=config.rms_norm_eps,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        embeddings=arrays["inputs_embeds"],
        cos_sin=arrays["rope_rotary_cos_sin"],
        start_index=arrays["kvcache_start_index"],
        norm=arrays["model.norm.weight"],
        head=arrays[head_weight_name(config)],
        logits=empty(batch, 1, config.vocab_size),
        hidden=empty(batch, d.hidden_size),
        qkv=empty(batch, d.qkv_size),
        context=empty(batch, d.query_size),
        activation=empty(batch, d.intermediate_size),
    )


@pytest.mark.parametrize(("starts", "rows"), [([0], 8), ([37], 64), ([5, 0, 63], 64)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_twin_computes_what_the_description_says(family: str, starts: list[int], rows: int) -> None:
    config, batch = FAMILIES[family], len(starts)
    arrays = random_model(config, batch, rows, starts)
    described = {name: array.copy() for name, array in arrays.items()}
    DecoderDescription(
        NumpyOperations(described, described), config, EngineShape("decode", batch, 1, rows, rows)
    ).describe()
    step = twin_step(config, arrays, batch, rows)
    decode_step(step)
    np.testing.assert_allclose(step.logits, described["logits"], atol=2e-5, rtol=2e-5)
    for index in range(config.num_layers):
        for name in (f"k_cache_{index}", f"v_cache_{index}"):
            np.testing.assert_allclose(arrays[name], described[name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("architecture", ["sm_87", "sm_90", "sm_110", "sm_120"])
def test_the_kernel_compiles_without_a_gpu(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'edgellm[test]'")
    every = compiler._sources()
    own = {name: text for name, text in every.items() if name.startswith("decode_")}
    monkeypatch.setattr(compiler, "_sources", lambda: own)
    cubin = compiler.compile_kernels(architecture)
    for name in (b"decode_step_float16", b"decode_step_bfloat16"):
        assert name in cubin


def test_arguments_have_the_size_that_the_kernel_reads() -> None:
    """14 addresses, two floats, 14 ints, as decode_arguments.cuh declares them."""
    assert ctypes.sizeof(decode_kernels._Arguments) == 14 * 8 + 2 * 4 + 14 * 4
    lines = (compiler._SOURCES / "decode_arguments.cuh").read_text().splitlines()
    source = "\n".join(line.split("//")[0] for line in lines)
    in_layer = source[source.index("struct Layer") : source.index("struct Arguments")]
    declared = [line.split("*")[1].strip(" ;") for line in in_layer.splitlines() if "* " in line and ";" in line]
    assert declared == [field.name for field in fields(DecodeLayer)]
    in_arguments = source[source.index("struct Arguments") :].split("};")[0]
    words = in_arguments.replace(";", " ").replace(",", " ").replace("*", " ").split()
    positions = [words.index(name) for name, _ in decode_kernels._Arguments._fields_]
    assert positions == sorted(positions)


@pytest.mark.parametrize("limit", [H200, ORIN, RTX])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_shared_memory_stays_within_the_limit(batch: int, limit: int) -> None:
    memory = shared_memory(replace(LLAMA_1B, batch=batch), limit)
    assert memory.total_bytes + decode_kernels._STATIC_BYTES <= limit
    assert memory.depth >= 4


def test_shared_memory_holds_a_deep_ring_where_there_is_room() -> None:
    assert shared_memory(LLAMA_1B, H200).depth == 20
    assert shared_memory(replace(LLAMA_1B, batch=8), H200).depth >= 8


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(KernelError, match=r"8 sequences of width 2048, the GPU has 101376; use a smaller batch"):
        shared_memory(replace(LLAMA_1B, batch=8), RTX)


def test_splits_of_the_keys_do_not_depend_on_the_batch() -> None:
    """A sequence's result has the same bits in every batch only if its sums have the same order."""
    assert {replace(LLAMA_1B, batch=batch).splits for batch in (1, 2, 8)} == {16}


@pytest.mark.parametrize(
    ("changes", "shape", "dtype", "reason"),
    [
        ({}, {}, "float32", "float16 and bfloat16, not float32"),
        ({}, {"tokens": 2}, "float16", "one token of each sequence, not 2"),
        ({}, {"batch": 9}, "float16", "1 to 8 sequences, not 9"),
        ({"intermediate_size": 100}, {}, "float16", "intermediate_size to be a multiple of 8, not 100"),
        ({"head_dim": 512}, {}, "float16", "heads of up to 256, not 512"),
        ({"num_heads": 34}, {}, "float16", "up to 16 query heads for each key-value head, not 34 for 2"),
        ({"feature_layers": (1,)}, {}, "float16", "does not output hidden_states"),
        ({"hidden_size": 32768}, {"batch": 8}, "float16", "bytes of shared memory"),
        ({}, {}, "float16", None),
    ],
)
def test_what_is_unsupported_is_named(changes: dict, shape: dict, dtype: str, reason: str | None) -> None:
    config = replace(LLAMA, **changes)
    found = unsupported(config, replace(EngineShape("decode", 1, 1, 64, 64), **shape), dtype, H200)
    assert (found is None) if reason is None else (reason in found)
