"""Random models of each family for the decode kernels, what the kernels' twins compute of them, and their bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu_device import cuda_device

from edgellm.engines.backends.cuda_kernel_engine import CudaKernelEngine
from edgellm.engines.backends.cuda_tiled_engine import decoder_engine_kind
from edgellm.engines.model.config import DecoderConfig, DraftConfig, EngineShape
from edgellm.engines.model.decoder import decoder_weights, head_weight_name
from edgellm.engines.model.draft_decoder import draft_engine_weights, draft_weights
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.contract import AttentionStep, AttentionWeights, Kept, LinearWeights, NormedInput
from edgellm.kernels.decode.numpy_twins import NumpyDecodeKernels

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
        arrays[spec.name] = random.standard_normal(spec.shape, np.float32) * scale + ("norm" in spec.name)
    arrays["inputs_embeds"] = random.standard_normal((batch, tokens, config.hidden_size), np.float32)
    angles = random.uniform(0, 6, (batch, tokens, config.rotary_dim // 2))
    arrays["rope_rotary_cos_sin"] = np.concatenate((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
    arrays["kvcache_start_index"] = np.array(starts, np.int32)
    mask = np.repeat((np.arange(rows) < np.array(starts)[:, None])[:, None, None], tokens, axis=2)
    for b, start in enumerate(starts):
        mask[b, 0, :, start : start + tokens] = ancestors(parents)
    arrays["attention_mask"] = mask
    cache = (batch, config.num_kv_heads, rows, config.head_dim)
    for index in range(config.num_layers):
        for name in ("k_cache", "v_cache"):
            arrays[f"{name}_{index}"] = random.standard_normal(cache, np.float32)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def twin_step(config: DecoderConfig, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A step through the twins, in the engine's order; writes KV rows, returns logits, features and last scratch."""
    batch, tokens, _ = arrays["inputs_embeds"].shape
    epsilon, layers, twins = config.rms_norm_eps, config.feature_layers, NumpyDecodeKernels()

    def empty(width: int) -> np.ndarray:
        return np.full((batch * tokens, width), np.nan, np.float32)

    def kept(layer: int) -> Kept | None:
        return Kept(result["hidden_states"], layers.index(layer)) if layer in layers else None

    result = {
        "qkv": empty(config.query_size + 2 * config.kv_size),
        "context": empty(config.query_size),
        "activation": empty(config.intermediate_size),
        "hidden": empty(config.hidden_size),
        "logits": empty(config.vocab_size),
        "hidden_states": empty(len(layers) * config.hidden_size),
    }
    hidden = arrays["inputs_embeds"]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        qkv = linear_weights(arrays, f"{layer}self_attn.qkv_proj")
        normed = NormedInput(hidden, arrays[f"{layer}input_layernorm.weight"], epsilon)
        twins.norm_linear([normed], qkv, result["qkv"])()
        step = attention_step(arrays, index, tokens > 1)
        weights = attention_weights(config, arrays, layer)
        twins.attention(result["qkv"], weights, step, None, result["context"])()
        o = linear_weights(arrays, f"{layer}self_attn.o_proj")
        twins.linear_residual(result["context"], o, hidden, result["hidden"], kept=kept(index))()
        hidden = result["hidden"]
        normed = NormedInput(hidden, arrays[f"{layer}post_attention_layernorm.weight"], epsilon)
        gate_up = linear_weights(arrays, f"{layer}mlp.gate_up_proj")
        twins.norm_gate_up(normed, gate_up, "silu", result["activation"])()
        down = linear_weights(arrays, f"{layer}mlp.down_proj")
        twins.linear_residual(result["activation"], down, hidden, hidden)()
    normed = NormedInput(hidden, arrays["model.norm.weight"], epsilon)
    head = LinearWeights(arrays[head_weight_name(config)])
    twins.norm_linear([normed], head, result["logits"], kept=kept(config.num_layers))()
    return result


def linear_weights(arrays: dict[str, np.ndarray], name: str) -> LinearWeights:
    """The weight of that name, and its bias if there is one."""
    return LinearWeights(arrays[f"{name}.weight"], arrays.get(f"{name}.bias"))


def attention_weights(config: DecoderConfig, arrays: dict[str, np.ndarray], layer: str) -> AttentionWeights:
    """Norms and scale of a layer whose weights' names begin with `layer`."""
    norms = [arrays.get(f"{layer}self_attn.{name}.weight") for name in ("q_norm", "k_norm")]
    return AttentionWeights(*norms, config.rms_norm_eps, 0.0, config.head_dim**-0.5)


def attention_step(
    arrays: dict[str, np.ndarray], index: int, masked: bool = True, masks_all: bool = False
) -> AttentionStep:
    """The step's tokens and the caches `index`."""
    mask = arrays["attention_mask"] if masked else None
    caches = arrays[f"k_cache_{index}"], arrays[f"v_cache_{index}"]
    return AttentionStep(arrays["rope_rotary_cos_sin"], arrays["kvcache_start_index"], mask, *caches, masks_all)


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
    arrays["attention_mask"] = mask
    for kind in "kv":
        arrays[f"{kind}_cache_0"] = normal(batch, decoder.num_kv_heads, shape.kv_rows, decoder.head_dim)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def draft_twin_step(config: DraftConfig, shape: EngineShape, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A step through the twins, in the engine's order; writes KV rows, returns logits and hidden states."""
    decoder, count, chosen = config.decoder, shape.batch * shape.tokens, shape.batch * shape.selected
    hidden, epsilon, layer, twins = config.hidden_size, decoder.rms_norm_eps, "layers.0.", NumpyDecodeKernels()

    def empty(rows: int, width: int) -> np.ndarray:
        return np.full((rows, width), np.nan, np.float32)

    feature = arrays.get("hidden_states_from_draft")
    if feature is None:
        feature = empty(count, hidden)
        twins.linear_residual(arrays["hidden_states_input"], linear_weights(arrays, "fc"), None, feature)()
    qkv, normed = empty(count, decoder.query_size + 2 * decoder.kv_size), empty(count, hidden)
    inputs = [
        NormedInput(arrays["inputs_embeds"], arrays[f"{layer}input_layernorm.weight"], epsilon),
        NormedInput(feature, arrays[f"{layer}hidden_norm.weight"], epsilon),
    ]
    twins.norm_linear(inputs, linear_weights(arrays, f"{layer}self_attn.qkv_proj"), qkv, kept=Kept(normed))()
    context = empty(count, decoder.query_size)
    step = attention_step(arrays, 0, masks_all=True)
    twins.attention(qkv, attention_weights(decoder, arrays, layer), step, None, context)()
    residual, stream = normed if config.norm_before_residual else feature, empty(chosen, hidden)
    o, selected = linear_weights(arrays, f"{layer}self_attn.o_proj"), arrays.get("last_token_ids")
    twins.linear_residual(context, o, residual, stream, selected=selected)()
    activation = empty(chosen, decoder.intermediate_size)
    behind = NormedInput(stream, arrays[f"{layer}post_attention_layernorm.weight"], epsilon)
    twins.norm_gate_up(behind, linear_weights(arrays, f"{layer}mlp.gate_up_proj"), "silu", activation)()
    twins.linear_residual(activation, linear_weights(arrays, f"{layer}mlp.down_proj"), stream, stream)()
    result = {"logits": empty(chosen, config.draft_vocab_size), "hidden_states": empty(chosen, hidden)}
    kept = Kept(result["hidden_states"], raw=not config.feed_back_normed)
    final, head = NormedInput(stream, arrays["norm.weight"], epsilon), LinearWeights(arrays[config.head_name])
    twins.norm_linear([final], head, result["logits"], kept=kept)()
    return result


#: |difference| / |reference|, both as norms: what is rounded to the dtype is the normed input, context and activation
#: of each layer, and the KV rows; the spacing of float16 is 2^-11 of a value, of bfloat16 2^-8.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.fixture(scope="module")
def gpu():
    """A CUDA context with a stream, and a module for kernels in it."""
    from edgellm.kernels.launch import KernelModule

    with cuda_device() as device:
        device.kernel_module = KernelModule(device.compute_capability, device.stream.handle)
        yield device


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded to nearest even, as the bits that the device holds."""
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float16":
        return values.astype(np.float32)
    return (values.astype(np.uint32) << 16).view(np.float32)


def rounded(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """The model as its dtype holds it, in float32."""
    return {
        name: from_bits(to_bits(array, dtype), dtype) if array.dtype == np.float32 else array
        for name, array in arrays.items()
    }


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Not a number in what was found makes the result not a number, which is within no tolerance."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


#: widths that do not fill a warp's slice, a block's units, a head of each number of pairs, each group
ODD = {
    **FAMILIES,
    "narrow": replace(LLAMA, hidden_size=40, intermediate_size=24, num_heads=1, num_kv_heads=1, vocab_size=5),
    "wide_heads": replace(LLAMA, head_dim=256, rotary_dim=256, num_heads=2, num_kv_heads=1),
    "heads_of_128": replace(LLAMA, head_dim=128, rotary_dim=64, num_heads=6, num_kv_heads=2),
    "heads_of_80": replace(LLAMA, head_dim=80, rotary_dim=80, num_heads=7, num_kv_heads=1, qk_norm=True),
    "many_heads_a_group": replace(LLAMA, num_heads=16, num_kv_heads=1),
    "more_units_than_blocks": replace(LLAMA, hidden_size=1544, intermediate_size=4104, vocab_size=40_001, num_layers=1),
}


class Loaded:
    """An engine bound to device copies of `arrays`; with a `last` token one that prefills, and gives its logits.

    `kind`: of engine, where not the fastest.
    """

    def __init__(
        self,
        gpu,
        config: DecoderConfig,
        arrays: dict[str, np.ndarray],
        dtype: str,
        rows: int,
        last: int | None = None,
        kind: type[CudaKernelEngine] | None = None,
    ) -> None:
        batch, tokens, _ = arrays["inputs_embeds"].shape
        phase, selected = "decode" if tokens == 1 else "verify", tokens
        if last is not None:
            phase, selected, arrays = "prefill", 1, arrays | {"last_token_ids": np.array([[last]], np.int32)}
        self.gpu, self.dtype = gpu, dtype
        shape = EngineShape(phase, batch, tokens, rows, rows, selected)
        kernels = gpu.kernel_module
        kind = kind or decoder_engine_kind(config, shape, dtype, kernels.shared_limit)
        self.engine = kind(kernels, config, shape, dtype)
        self.scratch = gpu.empty((self.engine.scratch_bytes,), "uint8")
        gpu.upload(self.scratch, np.full(self.scratch.shape, 0xFF, np.uint8))  # NaN, so that nothing unwritten is read
        self.engine.attach(gpu, self.scratch)
        self.arrays: dict[str, DeviceArray] = {}
        for name, array in arrays.items():
            held = dtype if array.dtype == np.float32 else array.dtype.name
            self.arrays[name] = gpu.empty(array.shape, held)
            gpu.upload(self.arrays[name], to_bits(array, dtype) if array.dtype == np.float32 else array)
        for name in [name for name in arrays if "_cache_" in name]:
            self.arrays[f"present_{name}"] = self.arrays[name]
        self.arrays["logits"] = gpu.empty((batch, selected, config.vocab_size), "float32")
        self.clear_logits()
        if config.feature_layers:
            width = len(config.feature_layers) * config.hidden_size
            self.arrays["hidden_states"] = gpu.empty((batch, tokens, width), dtype)
        self.engine.bind(self.arrays)

    def clear_logits(self) -> None:
        logits = self.arrays["logits"]
        self.gpu.upload(logits, np.full(logits.shape, np.nan, np.float32))

    def values(self, name: str) -> np.ndarray:
        array = self.arrays[name]
        values = self.gpu.download(array)
        return values if array.dtype == "float32" else from_bits(values, self.dtype)


def assert_equals_twin(
    gpu, config: DecoderConfig, starts: list[int], rows: int, dtype: str, parents: tuple[int | None, ...] = (None,)
) -> None:
    arrays = rounded(random_model(config, len(starts), rows, starts, parents), dtype)
    tokens = len(parents)
    loaded = Loaded(gpu, config, arrays, dtype, rows)
    loaded.engine.enqueue()
    before = {name: array.copy() for name, array in arrays.items()}
    expected = twin_step(config, arrays)
    for name in ("logits", "hidden_states") if config.feature_layers else ("logits",):
        assert relative(loaded.values(name).reshape(expected[name].shape), expected[name]) < TOLERANCE[dtype], name
    for name in [name for name in arrays if "_cache_" in name]:
        found = loaded.values(name)
        for b, start in enumerate(starts):
            new = slice(start, start + tokens)
            assert relative(found[b, :, new], arrays[name][b, :, new]) < TOLERANCE[dtype]
            others = np.delete(found[b], new, axis=1)
            np.testing.assert_array_equal(others, np.delete(before[name][b], new, axis=1))
    for name in ("hidden", "qkv", "context", "activation"):
        array = loaded.engine._scratch[name]
        values = gpu.download(array)
        found = values if array.dtype == "float32" else from_bits(values, dtype)
        assert relative(found, expected[name]) < 2 * TOLERANCE[dtype], name
    first = gpu.download(loaded.arrays["logits"])
    loaded.clear_logits()
    loaded.engine.enqueue()  # the same step again: the counters are as before
    np.testing.assert_array_equal(gpu.download(loaded.arrays["logits"]), first)
