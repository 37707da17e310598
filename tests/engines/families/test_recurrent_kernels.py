"""Families with recurrent layers on the NumPy twins of the hand-written kernels, against what transformers computed:
short prompts, plain steps, trees, and the commits between."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_files import golden_folder, largest_difference
from golden_images import GoldenModel
from numpy_kernel_device import NumpyKernelDevice, numpy_kernel_engine
from random_trees import random_trees
from recurrent_steps import ROWS, RecurrentSteps
from safetensors.numpy import save_file

from edgellm.engines.backends.steps.linear import FewRows, ManyRows
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.model.decoder import EMBEDDING, decoder_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import PRESENT
from edgellm.engines.runners.sampling_state import SamplingValues

GOLDENS = golden_folder("decoder")
#: Those whose heads have sizes that the kernels take.
NAMES = ("lfm2", "qwen3_5_text", "qwen3_5_tied", "granite4_hybrid", "nemotron_h")
MIXED = ("granite4_moe", "nemotron_h_moe", "nemotron_h_latent")


class KernelSteps(RecurrentSteps):
    """Sequences that engines of the kernels' twins run, by an implementation of the caller's choice."""

    def __init__(self, name: str, way: type | None = None, batch: int = 1, goldens: Path = GOLDENS) -> None:
        super().__init__(goldens / name, batch)
        self._way = way
        for spec in decoder_weights(self.config):
            if spec.experts:
                matrices = self.weights[spec.name]
                self.weights[spec.name] = np.concatenate([matrices.of(expert) for expert in range(spec.experts)])

    def compute(self, program: Program, bindings: dict[str, np.ndarray]) -> None:
        engine = numpy_kernel_engine(self.config, program.shape, self._way)
        for name, (shape, _) in program.outputs.items():
            bindings[name] = np.full(shape, np.nan, np.float32)
        arrays = self.weights | bindings
        arrays |= {PRESENT + name: bindings[name] for name in program.changed}
        engine.bind({name: arrays[name] for name in engine.tensors})
        engine.attach(NumpyKernelDevice(), np.full(engine.scratch_bytes, 0xFF, np.uint8))  # nothing unwritten is read
        engine.enqueue()


@pytest.mark.parametrize("way", [FewRows, ManyRows])
@pytest.mark.parametrize("name", [*NAMES, *MIXED])
def test_prompts_and_steps_have_the_logits_of_transformers(name: str, way: type) -> None:
    steps = KernelSteps(name, way)
    ids, expected = steps.token_ids[0].tolist(), steps.expected[0]
    logits = [*steps.prefill(ids[:14], chunk=5, padding=2)]
    for token in ids[14:]:
        logits.append(steps.decode([token])[0])
        steps.accept([[0]])
    assert largest_difference(np.stack(logits), expected) <= 1e-4


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_trees_are_what_steps_along_their_paths_are(name: str, batch: int) -> None:
    """Of several sequences at once; those of most nodes run in passes."""
    random = np.random.default_rng(batch)
    trees, steps = KernelSteps(name, batch=batch), KernelSteps(name)
    prompts = [random.integers(0, 80, 5 + slot).tolist() for slot in range(batch)]
    for slot, prompt in enumerate(prompts):
        one = KernelSteps(name)
        one.prefill(prompt)
        for state, cache in one.caches.items():
            trees.caches[state][slot] = cache[0]
        trees.lengths[slot] = len(prompt)
    nodes = random_trees(random, batch, 28, 80, 0.7)
    logits, paths = trees.verify(nodes.tokens, nodes.parents), []
    for slot in range(batch):
        node = int(np.argmax(nodes.depths[slot]))
        path = [node]
        while nodes.parents[slot, path[0]] >= 0:
            path.insert(0, int(nodes.parents[slot, path[0]]))
        paths.append(path)
    trees.accept(paths)
    for slot, (prompt, path) in enumerate(zip(prompts, paths, strict=True)):
        steps.restore({state: np.zeros_like(cache) for state, cache in steps.caches.items()}, [0])
        steps.prefill(prompt)
        for node in path:
            plain = steps.decode([nodes.tokens[slot, node]])[0]
            steps.accept([[0]])
        assert np.abs(plain - logits[slot, path[-1]]).max() <= 1e-4  # products of matrices round otherwise
        for state, held in steps.held().items():
            np.testing.assert_allclose(trees.held(slot)[state], held, rtol=1e-4, atol=1e-4, err_msg=state)


@pytest.mark.parametrize("layers", [(0, 3), (1, 4), (2,)])
def test_what_enters_a_layer_of_one_part_is_kept_for_drafts(layers: tuple[int, ...]) -> None:
    """A mixture's rows, too: the first and the last layer are mixtures by themselves."""
    found = []
    for steps in (RecurrentSteps(GOLDENS / "nemotron_h_moe"), KernelSteps("nemotron_h_moe")):
        steps.prefill([3, 14, 15])
        steps.config = replace(steps.config, feature_layers=layers)
        steps.decode([9])
        found.append(steps.outputs["hidden_states"])
    assert found[0].shape == (1, 1, 24 * len(layers)) and np.abs(found[0]).max() > 0.1
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-5)
    if layers[0] == 0:
        np.testing.assert_array_equal(found[0][0, 0, :24], steps.weights[EMBEDDING][9])


def behind_images(place: Path, way: type) -> tuple[KernelSteps, GoldenModel]:
    """A golden prompt with images as the NumPy backend took it, to go on from at the positions behind it."""
    golden = GoldenModel("qwen3_5")
    shutil.copytree(golden.path, place / "qwen3_5")
    one = {name: golden.expected[name][None] for name in ("token_ids", "logits")}
    metadata = {"torch": "", "transformers": ""}
    save_file(one, place / "qwen3_5" / "expected.safetensors", metadata)
    steps = KernelSteps("qwen3_5", way, goldens=place)
    images = golden.placed()
    runner = golden.runner(EngineLimits(max_batch=1, prefill_chunk=16, kv_capacity=ROWS))
    runner.start(0, golden.token_ids, 0, SamplingValues(), images).wait()
    for name, cache in steps.caches.items():
        held = runner.states.tensors[name]
        common = tuple(slice(min(sizes)) for sizes in zip(cache.shape, held.shape, strict=True))
        cache[common] = held[common]
    steps.lengths = [len(golden.token_ids)]
    assert images.position_delta < 0
    nowhere = np.full((-images.position_delta, steps.table.shape[1]), np.nan, np.float32)
    steps.table = np.concatenate([nowhere, steps.table])  # a row's position is so many less
    return steps, golden


@pytest.mark.parametrize("way", [FewRows, ManyRows])
def test_behind_images_steps_and_trees_have_the_logits_of_transformers(tmp_path: Path, way: type) -> None:
    """At M-RoPE positions, of which a part of each head is rotated."""
    steps, golden = behind_images(tmp_path, way)
    continued, expected = golden.expected["continued"].tolist(), golden.expected["continued_logits"]
    before, lengths = steps.copy(), list(steps.lengths)
    stepped = []
    for token in continued:
        stepped.append(steps.decode([token])[0])
        steps.accept([[0]])
    assert largest_difference(np.stack(stepped), expected) <= 1e-4
    steps.restore(before, lengths)
    parents = np.arange(-1, len(continued) - 1)[None]
    assert largest_difference(steps.verify(np.asarray([continued]), parents)[0], expected) <= 1e-4


def test_what_kernels_do_not_take_is_refused_by_its_layer() -> None:
    config = RecurrentSteps(GOLDENS / "qwen3_5_text_narrow").config
    decode = EngineShape("decode", 1, 1, 32, 32)
    choice, reason = kernel_choice(config, decode, "float16", 1 << 20)
    assert choice is None and "the attention of layer 0: a multiple of 4" in reason and "not 6" in reason
    config = replace(config, rotary_dim=8)
    choice, reason = kernel_choice(config, decode, "float16", 1 << 20)
    assert choice is None and "the gated delta rule of layer 1" in reason and "3 value heads of 6" in reason
    taken = replace(config, delta_heads=(2, 4, 16, 8))
    assert kernel_choice(taken, decode, "float16", 1 << 20)[0] is not None
    choice, reason = kernel_choice(replace(taken, delta_heads=(1, 2, 256, 8)), decode, "float16", 1024)
    assert choice is None
    wide = EngineShape("verify", 1, 65, 96, 96, 65)
    assert kernel_choice(taken, wide, "float16", 1 << 20) == (None, "kernels take up to 64 rows, not 65")
