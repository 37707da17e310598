"""Random models of each family for the decode kernels, what the kernels' twins compute of them, and their bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
from device_bits import from_bits, relative, rounded, to_bits
from gpu_device import cuda_device
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine

from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.checkpoints.weights import ExpertMatrices
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.adapted_projections import SCALES, adapted_projections
from edgellm.engines.model.config import DecoderConfig, DraftBlock, DraftConfig, Mixture
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.draft_decoder import draft_engine_weights, draft_weights, mtp_draft
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.row_steps import TOKEN_ROWS
from edgellm.engines.model.states import decoder_states, state_edge
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels, capacity_of
from edgellm.kernels.encoder.launcher import CudaEncoder
from edgellm.kernels.experts.launcher import CudaExperts
from edgellm.kernels.launch import KernelModule
from edgellm.kernels.prefill.launcher import CudaPrefill
from edgellm.kernels.prefill.linear import CudaPromptLinear
from edgellm.kernels.recurrent.launcher import CudaRecurrent

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


#: What families change by parameters of steps.
SCALED = {
    "gemma": replace(LLAMA, hidden_act="gelu_tanh", norm_offset=1.0, embedding_scale=8.0, head_dim=32, rotary_dim=32),
    "granite": replace(
        LLAMA, embedding_scale=12.0, residual_scale=0.22, attention_scale=0.015625, logits_scale=0.125, qk_norm=True
    ),
    "smollm3": replace(LLAMA, nope_layers=(1,)),
    "gemma2": replace(LLAMA, norm_offset=1.0, post_norms=True, scores_cap=0.5, logits_cap=2.0),
    "olmo2": replace(LLAMA, pre_norms=False, post_norms=True, qk_norm=True, joint_qk_norm=True),
    "starcoder2": replace(
        FAMILIES["llama_untied_biases"], naming="starcoder2", layer_norms=True, gated_mlp=False, hidden_act="gelu_tanh"
    ),
    "exaone4": replace(LLAMA, pre_norms=False, post_norms=True, qk_norm=True, nope_layers=(1,)),
    "ernie": replace(LLAMA, rotates_neighbours=True, rotary_dim=8),
    "hunyuan": replace(LLAMA, qk_norm=True, norms_behind_rotation=True),
    "ministral3": replace(LLAMA, rope_scaling={"llama_4_scaling_beta": 0.1}),
    "gemma4": replace(
        LLAMA,
        num_layers=4,
        layer_kinds=("window", "attention") * 2,
        sliding_window=1000,  # longer than any text: windows have tests of their own
        full_heads=(1, 32),
        rotary_dim=32,
        local_rope_theta=100.0,
        attention_scale=0.3,
        qk_norm=True,
        post_norms=True,
        value_norms=True,
        layer_scalars=True,
        shared_rows=2,
        shared_intermediate_size=192,
        layer_embedding_size=8,
        embedding_scale=8.0,
        logits_cap=2.0,
        hidden_act="gelu_tanh",
    ),
    "layer_norms_and_a_gate": replace(LLAMA, layer_norms=True, post_norms=True),
}


#: Layers with a state of their own.
RECURRENT = {
    "short_convolutions": replace(
        LLAMA, naming="lfm2", num_layers=4, layer_kinds=("convolution", "attention", *["convolution"] * 2), conv_width=3
    ),
    "wide_convolutions": replace(
        LLAMA, naming="lfm2", num_layers=2, layer_kinds=("attention", "convolution"), conv_width=7, conv_bias=True
    ),
    "gated_delta_nets": replace(
        LLAMA,
        naming="qwen3_5",
        num_layers=7,
        layer_kinds=("delta", "delta", "attention", "delta", "delta", "attention", "delta"),
        conv_width=4,
        delta_heads=(2, 4, 24, 16),
        attention_gate=True,
        norm_offset=1.0,
        qk_norm=True,
        rotary_dim=4,
    ),
}
RECURRENT["state_spaces"] = replace(
    LLAMA,
    naming="granitemoehybrid",
    num_layers=4,
    layer_kinds=("mamba", "attention", "mamba", "mamba"),
    conv_width=4,
    conv_bias=True,
    delta_heads=(2, 4, 24, 16),
    nope_layers=(1,),
)
#: As Granite 4's published hybrids are: a norm of all heads, which ranks share.
RECURRENT["spaces_of_one_group"] = replace(RECURRENT["state_spaces"], delta_heads=(1, 4, 24, 16))
#: Layers of one part each, of which the last does not mix tokens; MLPs without gates.
RECURRENT["lone_parts"] = replace(
    RECURRENT["state_spaces"],
    naming="nemotron_h",
    num_layers=5,
    layer_kinds=("mamba", "mlp", "attention", "mamba", "mlp"),
    lone_parts=True,
    gated_mlp=False,
    hidden_act="relu_squared",
    nope_layers=(2,),
)
#: As checkpoints are that pack what a delta rule projects, but its gates.
RECURRENT["delta_nets_of_two_products"] = replace(
    RECURRENT["gated_delta_nets"],
    num_layers=4,
    layer_kinds=("delta", "attention", "delta", "delta"),
    delta_products=(0, 0, 1, 1),
)


#: Mixtures of experts: each kind of scores and of shares, layers with an MLP between them, an expert that all rows go
#: through with a gate and without one, experts without gates, beside an MLP, and gpt-oss's, with sinks.
MIXED = {
    "qwen3_moe": replace(FAMILIES["qwen3"], mixture=Mixture(6, 2, 24, dense_layers=(1,))),
    "olmoe": replace(SCALED["granite"], mixture=Mixture(40, 5, 32, normalized=False)),
    "lfm2_moe": replace(LLAMA, mixture=Mixture(6, 3, 24, "sigmoid", True, True, 1e-6, 1.5)),
    "gpt_oss": replace(
        FAMILIES["llama_untied_biases"],
        mlp_bias=False,
        naming="gpt_oss",
        attention_sinks=True,
        mixture=Mixture(5, 2, 24, biases=True, limit=0.5),
    ),
    "qwen3_5_moe": replace(RECURRENT["delta_nets_of_two_products"], mixture=Mixture(6, 2, 24, shared_size=40)),
    "shared_expert": replace(LLAMA, mixture=Mixture(6, 2, 24, shared_size=40, shared_gate=False)),
    "latent_experts": replace(
        LLAMA,
        hidden_act="relu_squared",
        gated_mlp=False,
        mixture=Mixture(6, 3, 24, "sigmoid", True, shared_size=40, shared_gate=False, gated=False, latent_size=16),
    ),
    "gemma4_moe": replace(
        SCALED["gemma4"],
        **{"num_layers": 2, "layer_kinds": ("window", "attention"), "shared_rows": 0, "layer_embedding_size": 0},
        **{"naming": "gemma4", "mixture": Mixture(6, 3, 24, beside_mlp=True)},
    ),
    "nemotron_h": replace(
        LLAMA,
        hidden_act="relu_squared",
        gated_mlp=False,
        mixture=Mixture(6, 3, 24, "sigmoid", True, True, 1e-20, 2.5, (0,), 40, shared_gate=False, gated=False),
    ),
}

#: parent of each node of a verified tree (None: the root); siblings, a gap between parent and child, depth up to 4
CHAIN = (None, 0, 1, 2, 3, 4, 5, 6)


TREE = (None, 0, 0, 1, 2, 2, 4, 6)


def ancestors(parents: tuple[int | None, ...]) -> np.ndarray:
    """[T, T] bool: which nodes each node sees, itself included."""
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent is not None:
            seen[node] |= seen[parent]
    return seen


def random_parents(tokens: int, seed: int, depth: int = 7) -> tuple[int | None, ...]:
    """A random tree of so many nodes, parents before their children, at most `depth` levels below the root."""
    random = np.random.default_rng(seed)
    parents: list[int | None] = [None]
    depths = [0]
    while len(parents) < tokens:
        parent = int(random.integers(0, len(parents)))
        if depths[parent] < depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return tuple(parents)


def random_model(
    config: DecoderConfig, batch: int, rows: int, starts: list[int], parents: tuple[int | None, ...] = (None,)
) -> dict[str, np.ndarray]:
    """Weights, inputs and filled caches by their names at the engine's edge, float32; `parents` make the tree."""
    tokens = len(parents)
    random = np.random.default_rng(7)
    arrays = {}
    for spec in decoder_weights(config):
        scale = 0.1 if len(spec.shape) == 1 else spec.shape[1] ** -0.5
        near_one = "norm" in spec.name or "_scal" in spec.name
        arrays[spec.name] = random.standard_normal(spec.shape, np.float32) * scale + near_one
    if config.token_row_size:
        arrays[TOKEN_ROWS] = random.standard_normal((batch, tokens, config.token_row_size), np.float32)
    arrays["inputs_embeds"] = random.standard_normal((batch, tokens, config.hidden_size), np.float32)
    angles = random.uniform(0, 6, (batch, tokens, config.rotary_columns // 2))
    arrays["rope_rotary_cos_sin"] = np.concatenate((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
    arrays["kvcache_start_index"] = np.array(starts, np.int32)
    mask = np.repeat((np.arange(rows) < np.array(starts)[:, None])[:, None, None], tokens, axis=2)
    for b, start in enumerate(starts):
        mask[b, 0, :, start : start + tokens] = ancestors(parents)
    arrays["attention_mask"] = mask
    for index in range(config.num_layers):
        heads, size = config.kv_heads(index)
        for name in ("k_cache", "v_cache") if config.rows_layer(index) == index else ():
            arrays[f"{name}_{index}"] = random.standard_normal((batch, heads, rows, size), np.float32)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def with_experts(program: Program, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Experts' matrices of a program as NumPy has them, by name."""
    found = {}
    for spec in (own for own in program.weights.values() if own.experts):
        parts = np.split(arrays[spec.name], np.cumsum([size[0] for _, size in spec.parts])[:-1])
        found[spec.name] = ExpertMatrices(spec, [(partial(np.asarray, part), "float32") for part in parts])
    return found


def computed(config: ModelConfig, shape: EngineShape, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What operations compute of a program."""
    bindings: dict[str, Any] = {name: array.copy() for name, array in arrays.items()}
    bindings |= with_experts(model_program(config, shape), bindings)
    ProgramGraph(NumpyOperations(bindings, bindings), model_program(config, shape)).run()
    return bindings


def random_adapters(config: DecoderConfig, taken: list[int | None], places: int, rank: int) -> dict[str, np.ndarray]:
    """LoRA adapters in all places, and the place that each sequence takes, by their names at the engine's edge."""
    random, arrays = np.random.default_rng(11), {}
    for each in adapted_projections(decoder_weights(config)):
        (name_a, shape_a), (name_b, shape_b) = each.edge(places, rank)
        module = np.repeat(np.arange(len(each.modules)), [rows for _, rows in each.modules])
        own = (
            np.arange(shape_b[0])[:, None] // rank % len(each.modules) == module
        )  # what other modules' ranks add is zero
        arrays[name_a] = random.standard_normal(shape_a, np.float32) * np.float32(each.inputs**-0.5)
        arrays[name_b] = random.standard_normal(shape_b, np.float32) * np.float32(rank**-0.5) * own
    arrays[SCALES] = np.array([[place == one for place in range(places)] for one in taken], np.float32)
    return arrays


EAGLE3 = DraftConfig(
    "3",
    replace(LLAMA, num_layers=1),
    53,
    True,
    (0, 1, 2),
    "none",
    "midlayer.",
    False,
    True,
    "model.embed_tokens.weight",
    "lm_head.weight",
    False,
    False,
    False,
)


BIASED = replace(EAGLE3.decoder, attention_bias=True, attention_output_bias=True, mlp_bias=True)
HEADS = {
    "eagle3": EAGLE3,
    "normed_residual": replace(EAGLE3, norm_before_residual=True),
    "fed_back_normed_with_biases": replace(EAGLE3, feed_back_normed=True, fc_bias=True, decoder=BIASED),
    "head_of_the_base": replace(EAGLE3, has_head=False, has_mapping=False, draft_vocab_size=97),
    "one_feature_and_qk_norm": replace(
        EAGLE3, feature_layers=(1,), decoder=replace(EAGLE3.decoder, qk_norm=True, rotary_dim=8)
    ),
    "straddling_slices": replace(
        EAGLE3, decoder=replace(EAGLE3.decoder, hidden_size=72, num_heads=3, num_kv_heads=1, head_dim=24, rotary_dim=24)
    ),
}


#: Drafts of blocks, as published and with what a checkpoint may have beside.
DFLASH = replace(
    EAGLE3,
    generation="dflash",
    decoder=replace(LLAMA, qk_norm=True),
    has_head=False,
    has_mapping=False,
    draft_vocab_size=97,
    layer_prefix="layers.0.",
    block=DraftBlock(7, 96),
)
BLOCKS = {
    "dflash": DFLASH,
    "dflash_of_one_layer": replace(
        DFLASH,
        decoder=replace(BIASED, num_layers=1),
        has_head=True,
        draft_vocab_size=53,
        has_mapping=True,
        fc_bias=True,
    ),
}
EAGLE1 = replace(EAGLE3, generation="1", has_head=False, has_mapping=False, draft_vocab_size=97, feature_layers=(2,))
#: Qwen3.5's attention: with gates, norms by 1 + weight, and a part of each head that is rotated.
GATED = replace(LLAMA, attention_gate=True, qk_norm=True, norm_offset=1.0, rotary_dim=8, naming="qwen3_5")
DRAFTS = {
    **HEADS,
    **BLOCKS,
    "mtp": mtp_draft(GATED, 53),
    "mtp_of_all_tokens": mtp_draft(replace(GATED, tie_word_embeddings=True)),
    "mtp_of_experts": mtp_draft(
        replace(MIXED["nemotron_h"], naming="nemotron_h", lone_parts=True, nope_layers=tuple(range(LLAMA.num_layers))),
        53,
    ),
    "eagle1": EAGLE1,
    "eagle1_with_biases": replace(EAGLE1, fc_bias=True, decoder=replace(EAGLE1.decoder, attention_bias=True)),
    "each_feature_normed": replace(EAGLE3, generation="3.1", feature_norm="each", feed_back_normed=True),
    "features_normed_together": replace(EAGLE3, generation="3.1", feature_norm="whole", norm_before_residual=True),
}


def draft_shape(phase: str, batch: int, tokens: int, rows: int) -> EngineShape:
    """With a key range below the rows that the cache holds."""
    return EngineShape(phase, batch, tokens, rows - 3, rows, tokens if phase == "propose" else 1, "draft")


def random_draft(config: DraftConfig, shape: EngineShape, starts: list[int], seed: int = 7) -> dict[str, np.ndarray]:
    """Weights, inputs and filled caches by their names at the engine's edge, float32; the mask is random."""
    random, decoder, batch, tokens = np.random.default_rng(seed), config.decoder, shape.batch, shape.tokens
    hidden = config.hidden_size

    def normal(*sizes: int) -> np.ndarray:
        return random.standard_normal(sizes, np.float32)

    own = {}
    for spec in draft_weights(config):
        scale = 0.1 if len(spec.shape) == 1 else spec.shape[1] ** -0.5
        own[spec.name] = normal(*spec.shape) * np.float32(scale) + np.float32("norm" in spec.name)
    base = {config.base_head: normal(decoder.vocab_size, hidden) * np.float32(hidden**-0.5)}
    arrays = draft_engine_weights(config, shape.phase, own, base)
    arrays["inputs_embeds"] = normal(batch, tokens, hidden)
    if shape.phase == "propose":
        arrays["hidden_states_from_draft"] = normal(batch, tokens, hidden)
    else:
        arrays["hidden_states_input"] = normal(batch, tokens, config.feature_size)
        arrays["last_token_ids"] = random.integers(0, tokens, (batch, 1)).astype(np.int32)
    angles = random.uniform(0, 6, (batch, tokens, decoder.rotary_dim // 2))
    arrays["rope_rotary_cos_sin"] = np.concatenate((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
    arrays["kvcache_start_index"] = np.array(starts, np.int32)
    mask = np.zeros((batch, 1, tokens, shape.key_range), bool)
    for b, start in enumerate(starts):
        mask[b, 0, :, : start + tokens] = random.random((tokens, start + tokens)) < 0.6
        mask[b, 0, np.arange(tokens), start + np.arange(tokens)] = True
        mask[b, 0, :, : 0 if config.block is None else start] = True  # a block sees all that is committed
    arrays["attention_mask"] = mask
    for name, (size, _) in state_edge(decoder_states(decoder), batch, shape.kv_rows).items():
        arrays[name] = normal(*size)
    known = model_program(config, shape).edge  # of an engine that puts nothing out, few of them
    return {name: np.ascontiguousarray(array) for name, array in arrays.items() if name in known}


def twin_step(config: ModelConfig, shape: EngineShape, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A step through the kernels' twins, as an engine of them runs it; writes KV rows, returns the outputs and the
    engine's scratch, by name."""
    engine, outputs = numpy_kernel_engine(config, shape), model_program(config, shape).outputs
    bound = {name: array for name, array in arrays.items() if name in engine.tensors}
    bound |= {f"present_{name}": array for name, array in bound.items() if "_cache_" in name}
    results = {
        name: np.full(size, np.nan, np.float32 if dtype == "compute" else dtype)
        for name, (size, dtype) in outputs.items()
    }
    engine.bind(bound | results)
    engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))  # NaN: nothing unwritten is read
    engine.enqueue()
    return results | engine._scratch[-1]


#: |difference| / |reference|, both as norms: what is rounded to the dtype is the normed input, context and activation
#: of each layer, and the KV rows; the spacing of float16 is 2^-11 of a value, of bfloat16 2^-8.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.fixture(scope="module")
def gpu():
    """A CUDA context with a stream, and a module for kernels."""
    with cuda_device() as device:
        device.kernel_module = KernelModule(device.gpu, device.stream)
        yield device


@lru_cache(maxsize=64)
def step_kernels(module: KernelModule, dtype: str, head_size: int) -> StepKernels:
    """The kernels for a compute dtype and heads of a size, loaded once."""
    return StepKernels(
        CudaDecodeKernels(module, dtype, head_size),
        CudaTiledKernels(module, dtype),
        capacity_of(module),
        CudaRecurrent(module),
        CudaPromptLinear(module, dtype),
        CudaPrefill(module),
        CudaEncoder(module),
        CudaExperts(module, dtype),
    )


#: widths that do not fill a warp's slice, a block's units, a head of each number of pairs, each group
ODD = {
    **FAMILIES,
    **SCALED,
    "narrow": replace(LLAMA, hidden_size=40, intermediate_size=24, num_heads=1, num_kv_heads=1, vocab_size=5),
    "wide_heads": replace(LLAMA, head_dim=256, rotary_dim=256, num_heads=2, num_kv_heads=1),
    "heads_of_128": replace(LLAMA, head_dim=128, rotary_dim=64, num_heads=6, num_kv_heads=2),
    "heads_of_80": replace(LLAMA, head_dim=80, rotary_dim=80, num_heads=7, num_kv_heads=1, qk_norm=True),
    "heads_of_gemma4": replace(
        SCALED["gemma4"],
        **{"num_heads": 8, "num_kv_heads": 1, "head_dim": 256, "full_heads": (1, 512), "rotary_dim": 512},
        attention_scale=0.05,
    ),
    "many_heads_a_group": replace(LLAMA, num_heads=16, num_kv_heads=1),
    "more_units_than_blocks": replace(LLAMA, hidden_size=1544, intermediate_size=4104, vocab_size=40_001, num_layers=1),
}


def step_shape(arrays: dict[str, np.ndarray], rows: int, prefills: bool = False) -> EngineShape:
    """The shape of a step of the base: a decode step, or one that verifies; with `prefills` one that prefills."""
    batch, tokens, _ = arrays["inputs_embeds"].shape
    if prefills:
        return EngineShape("prefill", batch, tokens, rows, rows, 1)
    return EngineShape("decode" if tokens == 1 else "verify", batch, tokens, rows, rows, tokens)


class Loaded:
    """An engine bound to device copies of `arrays`, by the implementation `way` where it is not to be the fastest."""

    def __init__(
        self,
        gpu,
        config: ModelConfig,
        shape: EngineShape,
        arrays: dict[str, np.ndarray],
        dtype: str,
        way: type | None = None,
    ) -> None:
        self.gpu, self.dtype = gpu, dtype
        limit, program = gpu.kernel_module.shared_limit, model_program(config, shape)
        choice, reason = kernel_choice(config, shape, dtype, limit, only=(way,) if way else ())
        assert choice is not None, reason
        kernels = step_kernels(gpu.kernel_module, dtype, program.attentions[0].heads[2])
        self.engine = KernelEngine(kernels, choice, config, shape, dtype)
        self.scratch = gpu.empty((self.engine.scratch_bytes,), "uint8")
        gpu.upload(self.scratch, np.full(self.scratch.shape, 0xFF, np.uint8))  # NaN, so that nothing unwritten is read
        self.engine.attach(gpu, self.scratch)
        self.arrays: dict[str, DeviceArray] = {}
        for name in [name for name in arrays if name in self.engine.tensors]:
            array = arrays[name]
            self.arrays[name] = gpu.empty(array.shape, self.engine.tensors[name][1])
            self.upload(name, array)
        for name in [name for name in self.arrays if "_cache_" in name]:
            self.arrays[f"present_{name}"] = self.arrays[name]
        for name, (size, kind) in program.outputs.items():
            self.arrays[name] = gpu.empty(size, dtype if kind == "compute" else kind)
        self.clear_logits()
        self.engine.bind(self.arrays)

    def clear_logits(self) -> None:
        logits = self.arrays.get("logits")
        if logits is not None:  # a step may write rows alone
            self.gpu.upload(logits, np.full(logits.shape, np.nan, np.float32))

    def upload(self, name: str, array: np.ndarray) -> None:
        """Set a tensor from float32 or other values of its shape."""
        is_rounded = array.dtype == np.float32 and self.arrays[name].dtype != "float32"
        self.gpu.upload(self.arrays[name], to_bits(array, self.dtype) if is_rounded else array)

    def values(self, name: str) -> np.ndarray:
        return self._read(self.arrays[name])

    def scratch_values(self, name: str) -> np.ndarray:
        """A value between the steps, of the last pass."""
        return self._read(self.engine._scratch[-1][name])

    def _read(self, array: DeviceArray) -> np.ndarray:
        values = self.gpu.download(array)
        return values if array.dtype == "float32" else from_bits(values, self.dtype)


def assert_equals_twin(
    gpu, config: ModelConfig, shape: EngineShape, starts: list[int], arrays: dict[str, np.ndarray], dtype: str
) -> None:
    """A step on the GPU, twice, against the twins': outputs, the values between the steps, new and other KV rows."""
    arrays = rounded(arrays, dtype)
    loaded = Loaded(gpu, config, shape, arrays, dtype)
    program = model_program(config, shape)
    before = {name: arrays[name].copy() for name in program.states}
    loaded.engine.enqueue()
    first = {name: gpu.download(loaded.arrays[name]) for name in program.outputs}
    expected = twin_step(config, shape, arrays)
    for name in program.outputs:
        assert relative(loaded.values(name), expected[name]) < TOLERANCE[dtype], name
    for name in before:
        found = loaded.values(name)
        for b, start in enumerate(starts):
            new = slice(start, start + shape.tokens)
            assert relative(found[b, :, new], arrays[name][b, :, new]) < TOLERANCE[dtype], name
            np.testing.assert_array_equal(np.delete(found[b], new, axis=1), np.delete(before[name][b], new, axis=1))
    for name in ("hidden", "qkv", "context", "activation"):
        if name in expected and shape.phase == "decode":
            assert relative(loaded.scratch_values(name), expected[name]) < 2 * TOLERANCE[dtype], name
    loaded.clear_logits()
    loaded.engine.enqueue()  # the same step again: the counters are as before
    for name, values in first.items():
        np.testing.assert_array_equal(gpu.download(loaded.arrays[name]), values)


def assert_step_equals_twin(
    gpu, config: DecoderConfig, starts: list[int], rows: int, dtype: str, parents: tuple[int | None, ...] = (None,)
) -> None:
    """The same of a base that decodes, or verifies a tree."""
    arrays = random_model(config, len(starts), rows, starts, parents)
    assert_equals_twin(gpu, config, step_shape(arrays, rows), starts, arrays, dtype)
