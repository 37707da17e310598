"""Every engine of a directory with a draft on a GPU against the NumPy backend, which the reference proves right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edgellm.engines.backends.base import Backend, Engine
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.formats.tensors import convert, float32_into
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import EMBEDDING, decoder_weights
from edgellm.engines.model.draft_decoder import draft_engine_weights, draft_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import plan_memory
from edgellm.engines.model.rotary import rotary_table
from edgellm.kernels.arrays import Array

pytestmark = pytest.mark.gpu

LIMITS = EngineLimits(2, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12)
#: Largest difference relative to the largest value. Random weights amplify rounding more than trained ones.
TOLERANCES = {"float16": 0.03, "bfloat16": 0.2}
STARTS = (21, 34)


class Engines:
    """All engines of a directory on one backend, with the weights of base and draft."""

    def __init__(self, backend: Backend, directory: EngineDirectory) -> None:
        assert directory.draft is not None
        self.backend, self.directory, self.draft = backend, directory, directory.draft.config
        shapes = directory.limits.engine_shapes()
        self.engines: dict[EngineShape, Engine] = {shape: backend.load_engine(shape) for shape in shapes}
        specs = decoder_weights(directory.config)
        plan = plan_memory(directory.config, directory.limits, specs, backend.compute_dtype, None, self.draft)
        backend.check_memory(plan)
        with directory.checkpoint() as checkpoint:
            base = backend.load_weights(checkpoint, specs)
        with directory.draft.checkpoint() as checkpoint:
            own = backend.load_weights(checkpoint, draft_weights(self.draft))
        draft = {
            phase: draft_engine_weights(self.draft, phase, own, base) for phase in ("prefill", "accept", "propose")
        }
        if not directory.config.tie_word_embeddings:
            del base[EMBEDDING]
        self.weights = {"base": base, "draft": draft}

    def run(self, shape: EngineShape, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Logits, hidden states and the caches afterwards, float32."""
        engine, config, decoder = self.engines[shape], self.directory.config, self.decoder(shape)
        vocabulary, rows, width = config.vocab_size, shape.tokens, self.draft.feature_size
        if shape.model == "draft":
            vocabulary, rows, width = self.draft.draft_vocab_size, shape.selected, self.draft.hidden_size
        bindings: dict[str, Array] = {name: self._array(values) for name, values in inputs.items()}
        for layer in range(decoder.num_layers):
            for kind in "kv":
                bindings[f"present_{kind}_cache_{layer}"] = bindings[f"{kind}_cache_{layer}"]
        bindings["hidden_states"] = self.backend.zeros((shape.batch, rows, width), "compute")
        bindings["logits"] = self.backend.zeros((shape.batch, shape.selected, vocabulary), "float32")
        weights = self.weights[shape.model]
        engine.bind(bindings | (weights[shape.phase] if shape.model == "draft" else weights))
        engine.enqueue()
        self.backend.synchronize()
        results = {"logits", "hidden_states", *(name for name in bindings if name.startswith(("k_cache", "v_cache")))}
        return {name: self._values(bindings[name]) for name in results}

    def decoder(self, shape: EngineShape) -> DecoderConfig:
        """The layers that the shape's engine has."""
        return self.draft.decoder if shape.model == "draft" else self.directory.config

    def _array(self, values: np.ndarray) -> Array:
        dtype = "compute" if values.dtype == np.float32 else values.dtype.name
        if dtype == "compute":
            values, _ = convert(values, "float32", self.backend.compute_dtype)
        array = self.backend.empty(values.shape, dtype)
        self.backend.upload(array, values)
        return array

    def _values(self, array: Array) -> np.ndarray:
        values = np.asarray(self.backend.read(array).wait())
        result = np.empty(values.shape, np.float32)
        float32_into(values, "bfloat16" if values.dtype == np.uint16 else values.dtype.name, result)
        return result


@contextmanager
def opened(name: str, directory: EngineDirectory, executor: str = "auto") -> Iterator[Engines]:
    backend = open_backend(name, directory, executor)
    try:
        engines = Engines(backend, directory)
        yield engines
        engines.engines.clear()
        engines.weights.clear()
    finally:
        backend.close()


def inputs_of(engines: Engines, shape: EngineShape, seed: int) -> dict[str, np.ndarray]:
    """Random inputs: sequences of different lengths, and the mask of a chunk or of a random tree behind each."""
    random, decoder = np.random.default_rng(seed), engines.decoder(shape)
    batch, tokens, starts = shape.batch, shape.tokens, STARTS[: shape.batch]
    hidden = engines.draft.hidden_size
    table = rotary_table(decoder, shape.kv_rows)
    mask = np.zeros((batch, 1, tokens, shape.key_range), bool)
    cos_sin = np.empty((batch, tokens, decoder.rotary_dim), np.float32)
    for b, start in enumerate(starts):
        mask[b, :, :, :start] = True
        for t in range(tokens):
            is_tree = shape.phase in ("verify", "propose")
            parent = int(random.integers(-1, t)) if is_tree and t else -1
            if is_tree and parent >= 0:
                mask[b, 0, t] |= mask[b, 0, parent]
            elif not is_tree:
                mask[b, 0, t, start : start + t] = True
            mask[b, 0, t, start + t] = True
            cos_sin[b, t] = table[mask[b, 0, t].sum() - 1]  # as deep as it sees
    inputs = {
        "inputs_embeds": random.standard_normal((batch, tokens, hidden)).astype(np.float32),
        "rope_rotary_cos_sin": cos_sin,
        "attention_mask": mask,
        "kvcache_start_index": np.asarray(starts, np.int32),
    }
    if shape.model == "draft":
        proposing = shape.phase == "propose"
        name = "hidden_states_from_draft" if proposing else "hidden_states_input"
        width = hidden if proposing else engines.draft.feature_size
        inputs[name] = random.standard_normal((batch, tokens, width)).astype(np.float32)
    if shape.selected < tokens:
        inputs["last_token_ids"] = random.integers(0, tokens, (batch, shape.selected)).astype(np.int32)
    for layer in range(decoder.num_layers):
        for kind in "kv":
            cache = np.zeros((batch, decoder.num_kv_heads, shape.kv_rows, decoder.head_dim), np.float32)
            for b, start in enumerate(starts):
                cache[b, :, :start] = random.standard_normal(cache[b, :, :start].shape)
            inputs[f"{kind}_cache_{layer}"] = cache
    return inputs


HEADS = {"eagle3": {}, "eagle3_normed_residual": {"norm_before_residual": True}, "eagle31": {"norm_output": True}}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("executor", "attention"), [("auto", "composed"), ("tensorrt", "composed"), ("tensorrt", "native")]
)
@pytest.mark.parametrize("head", HEADS)
def test_engines_agree_with_numpy(
    head: str,
    executor: str,
    attention: str,
    dtype: str,
    tmp_path: Path,
    make_checkpoint: Callable[..., Path],
    make_draft: Callable[..., Path],
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, tie_word_embeddings=head != "eagle31")
    draft = make_draft(tmp_path / "draft", 1, **HEADS[head])
    built, plans = tmp_path / "engines", executor == "tensorrt"
    build_engine_directory(
        checkpoint, built, LIMITS, None, dtype=dtype, attention=attention, draft=draft, all_plans=plans
    )
    directory = EngineDirectory.open(built)
    with opened("numpy", directory) as numpy_engines, opened("tensorrt", directory, executor) as engines:
        worst = {}
        for seed, shape in enumerate(LIMITS.engine_shapes()):
            inputs = inputs_of(engines, shape, seed)
            expected, found = numpy_engines.run(shape, dict(inputs)), engines.run(shape, dict(inputs))
            assert expected.keys() == found.keys()
            differences = [
                np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max() for name in expected
            ]
            worst[shape.name] = max(differences)
    print(
        f"\n{head} {executor} {attention} {dtype}: " + ", ".join(f"{name} {value:.2%}" for name, value in worst.items())
    )
    assert max(worst.values()) <= TOLERANCES[dtype]


def test_tree_verification_equals_each_path_alone(
    tmp_path: Path, make_checkpoint: Callable[..., Path], make_draft: Callable[..., Path]
) -> None:
    """A node's logits do not depend on its siblings: those of a chain are the same bits in a tree around it."""
    checkpoint, draft = make_checkpoint(tmp_path / "checkpoint", 1), make_draft(tmp_path / "draft", 1)
    build_engine_directory(checkpoint, tmp_path / "engines", LIMITS, None, draft=draft)
    directory = EngineDirectory.open(tmp_path / "engines")
    shapes = [shape for shape in LIMITS.engine_shapes() if shape.phase == "verify" and shape.batch == 1]
    shape = next(shape for shape in shapes if shape.tokens == 8)
    with opened("tensorrt", directory) as engines:
        inputs = inputs_of(engines, shape, 3)
        path = np.flatnonzero(inputs["attention_mask"][0, 0, -1, STARTS[0] :])
        changed = {name: values.copy() for name, values in inputs.items()}
        others = np.setdiff1d(np.arange(shape.tokens), path)
        assert others.size
        changed["inputs_embeds"][0, others] *= -1
        first, second = engines.run(shape, inputs), engines.run(shape, changed)
    for name in ("logits", "hidden_states"):
        np.testing.assert_array_equal(first[name][0, path], second[name][0, path])
        assert np.abs(first[name][0, others] - second[name][0, others]).max() > 0
