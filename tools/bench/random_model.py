"""Models with the shapes of published ones and random weights that are made where they are used: for measuring speed.

Nothing is written but TensorRT's plans: eight billion weights are there in seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from device_weights import to_device_layout
from random_checkpoint import SHAPES
from random_draft import DRAFT_VOCABULARY, HEAD_SCALE, SCALE
from random_gguf import MIXTURES
from random_layouts import draft_layouts, even_weight, gguf_layouts, packed_layers

from edgellm.engines.backends.base import uploaded
from edgellm.engines.backends.cuda_backend import CudaBackend
from edgellm.engines.backends.cuda_ranks import CudaRanks
from edgellm.engines.backends.device_layouts import PackedLayouts
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.building.shipped_draft import DRAFT_VOCABULARY as SHORTLIST
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.directories.engine_parts import EngineDraft
from edgellm.engines.families import decoder_config
from edgellm.engines.formats.digests import hash_bytes
from edgellm.engines.formats.safetensors_file import TensorInfo
from edgellm.engines.model.config import DFLASH, DRAFT_HEAD, HEADS, DecoderConfig, DraftBlock, DraftConfig, WeightSpec
from edgellm.engines.model.decoder import HEAD, decoder_weights, head_format, head_weight_name
from edgellm.engines.model.draft_decoder import mtp_draft
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.bfloat16 import store_rounded
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.kernels.quantization.row_runs import AnyPacked, PackedLayout, PackedRuns

#: Random values are drawn once and cut anew for each tensor.
_DRAWN = 1 << 24
#: How the names of vectors end that are added to something.
_ADDED = ("bias", "sinks")
#: The layers of z-lab's DFlash drafts of Qwen3-4B and 8B.
BLOCK_LAYERS = 5
#: What the layers of a model may be; behind a plus its head, where that is packed; behind a stroke the draft, where it
#: is not as `edgellm build` makes it, which packs it as the layers are.
WEIGHTS = (
    *("float16", "int4", "int4+int8", "int4+int4", "int4/float16", "mxfp4", "mxfp4+int8", "mxfp4+int4"),
    *("q4_0", "q8_0", "q4_k_m", "mxfp4_moe"),
)


@dataclass(frozen=True)
class RandomTensors:
    """Stands for a checkpoint: what a backend with `RandomWeights` fills its buffers with.

    Vectors are ones, or zeros where they are added, so that each token has experts of its own. Matrices are normally
    distributed, with the standard deviation of their name, or `SCALE`. The `table` [V, P] of tokens' own embeddings is
    zeros, which take no memory.
    """

    scales: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    table: tuple[int, int] = (0, 0)

    def part_infos(self, name: str, shape: tuple[int, ...]) -> list[TensorInfo]:
        """Of the table."""
        return [TensorInfo(name, "bfloat16", self.table, Path(name), 0, 0)]

    def reader(self, name: str, shape: tuple[int, ...]) -> None:
        """It is not packed."""

    def row_reader(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        """Its values' bytes."""
        return np.zeros(self.table, np.uint16).view(np.uint8).__getitem__

    def close(self) -> None:
        """There is nothing to close."""


@dataclass(frozen=True, eq=False)
class RandomDirectory(EngineDirectory):
    """An engine directory without weight files; its folder is where plans are kept. `layouts` are those of packed
    weights by model."""

    layouts: PackedLayouts = field(default_factory=dict)

    def checkpoint(self) -> Any:
        return RandomTensors(table=(self.config.vocab_size, self.config.token_row_size))


class RandomDraft(EngineDraft):
    """A draft head without files. Its head's weights are larger: see `random_draft`; the more so in narrow models."""

    def checkpoint(self) -> Any:
        narrow = max(1.0, 2048 / self.config.decoder.hidden_size)
        return RandomTensors({DRAFT_HEAD: HEAD_SCALE * narrow**0.5}, seed=1)


class RandomWeights:
    """In front of a backend: its weights are made, not loaded."""

    compute_dtype: str
    empty: Callable[..., Any]
    upload: Callable[..., None]

    def load_weights(
        self, checkpoint: Any, specs: Sequence[WeightSpec], progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """A buffer for each spec, filled as `RandomTensors` says; of one name and shape with the same values."""
        normal, weights = np.random.default_rng(checkpoint.seed).standard_normal(_DRAWN, np.float32), {}
        blocks: dict[tuple[float, str], np.ndarray] = {}
        for spec in specs:
            weights[spec.name] = self.empty(spec.shape, spec.dtype)
            flat, dtype = weights[spec.name].reshape(-1), self.compute_dtype if spec.dtype == "compute" else spec.dtype
            size = int(np.prod(spec.shape))
            if len(spec.shape) == 1:
                self.upload(flat, _stored(np.full(size, not spec.name.endswith(_ADDED), np.float32), dtype))
                continue
            kind, place = (checkpoint.scales.get(spec.name, SCALE), dtype), 0
            random = np.random.default_rng([checkpoint.seed, *spec.name.encode()])
            if kind not in blocks:
                blocks[kind] = _stored(normal * kind[0], dtype)
            block = blocks[kind]
            while place < size:
                first = int(random.integers(0, _DRAWN // 2))
                end = min(size, place + _DRAWN - first)
                self.upload(flat[place:end], block[first : first + end - place])
                place = end
        return weights


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    found = np.empty(values.shape, np.uint16 if dtype == "bfloat16" else dtype)
    store_rounded(values, found)
    return found


class RandomTensorRTBackend(RandomWeights, CudaBackend):
    """The backend of a GPU, which repeats packed weights of 4 MiB."""

    def __init__(self, directory: RandomDirectory) -> None:
        super().__init__(directory, directory.layouts)

    def load_weights(
        self, checkpoint: Any, specs: Sequence[WeightSpec], progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """As `RandomWeights` does, those of the directory's layouts packed."""
        every = [each for layouts in self._packed.values() for each in layouts.items()]
        packed = {
            spec.name: layout
            for spec in specs
            for name, layout in every
            if spec.name == name and spec.shape == (sum(run.rows for run in layout.runs), layout.runs[0].columns)
        }
        found = super().load_weights(checkpoint, [spec for spec in specs if spec.name not in packed], progress)
        found |= random_packed(self, packed)
        self.load_kernels(found)
        return found


class RandomRanks(CudaRanks):
    """GPUs that share a model without a draft: each has random weights of the shapes of its part."""

    def __init__(self, directory: RandomDirectory, gpus: Sequence[int]) -> None:
        super().__init__(directory, directory.layouts, gpus=gpus)

    def load_weights(
        self, checkpoint: Any, specs: Sequence[WeightSpec], progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """As `RandomWeights` does, on each GPU."""
        parts = self._parts

        def made(rank: int, backend: CudaBackend) -> dict[str, Any]:
            packed, held = parts.layouts[rank], [spec for spec in specs if parts._holds(rank, spec.name)]
            dense = [replace(own, shape=parts._shape(rank, own.name)) for own in held if own.name not in packed]
            return RandomWeights.load_weights(backend, checkpoint, dense) | random_packed(backend, packed)

        parts.load = lambda *given: self.each(made)  # type: ignore[method-assign]
        try:
            return super().load_weights(checkpoint, specs, progress)
        finally:
            del parts.load


def random_packed(backend: Any, layouts: Mapping[str, PackedLayout]) -> dict[str, AnyPacked]:
    """Packed weights of layouts, in memory of a GPU: the blocks of an `even_weight`, again and again."""
    templates, found = dict[WeightFormat, DeviceArray](), dict[str, AnyPacked]()

    def repeated(layout: DeviceLayout) -> PackedMatrix:
        if layout.format not in templates:
            made, values = to_device_layout(even_weight(layout.format, 1024, 8192), layout.dtype)
            assert (made.small, made.block_bytes) == (layout.small, layout.block_bytes)
            templates[layout.format] = uploaded(backend, values.reshape(-1))
        data, template = backend.empty(layout.shape, "uint8"), templates[layout.format]
        flat, size = data.reshape(-1), template.nbytes
        for place in range(0, flat.nbytes, size):
            backend.copy(flat[place : place + size], template[: flat.nbytes - place])
        return PackedMatrix(layout, data)

    for name, layout in layouts.items():
        made = tuple(map(repeated, layout.runs))
        found[name] = made[0] if len(made) == 1 else PackedRuns(made)
    return found


class RandomNumpyBackend(RandomWeights, NumpyBackend):
    """The backend without one."""


def random_directory(
    folder: Path, config: DecoderConfig, limits: EngineLimits, dtype: str = "float16", weights: str = WEIGHTS[0]
) -> RandomDirectory:
    """A directory of a base, and where `limits` have one of a draft head; plans are kept in `folder`. `weights`, one of
    `WEIGHTS`, of "int4": the layers of the base are packed in symmetric groups of 128, of "mxfp4" its experts alone,
    and its head is dense. Of a GGUF file's all of the base are packed."""
    base_is, _, draft_is = weights.partition("/")
    layers_are, _, head = base_is.partition("+")
    own = block_draft_of(config, limits.draft_block) if limits.draft_block else draft_of(config)
    config = replace(config, head=head or HEADS[0])
    limits = replace(limits, window_rows=limits.rows_for_window(config.window))
    if head:
        own = replace(own, base_head=head_weight_name(config))
    draft = RandomDraft(folder / "draft", own, {}) if limits.has_draft else None
    if draft is not None:
        config = replace(config, feature_layers=draft.config.feature_layers)
    layouts: dict[str, dict[str, PackedLayout]] = {}
    limits = replace(limits, packed=layers_are != "float16")
    if limits.packed:
        layouts_of = gguf_layouts if layers_are in MIXTURES else packed_layers
        layouts["base"] = layouts_of(config, layers_are, dtype)
    if head:
        format = head_format(head, config.hidden_size, dtype)
        assert format is not None
        small = head == "int4" and dtype == "float16"
        layouts["base"][HEAD] = DeviceLayout(format, config.vocab_size, config.hidden_size, small)
    if draft is not None and not draft_is and layouts:
        layers = next(layout for name, layout in layouts["base"].items() if ".layers." in name)
        layouts["draft"] = draft_layouts(own, layers.runs[0].format, dtype)
    description = hash_bytes(repr((config, limits, dtype, draft, weights)).encode())
    return RandomDirectory(folder, config, dtype, "auto", limits, {}, "", description, draft, layouts=layouts)


def draft_of(base: DecoderConfig) -> DraftConfig:
    """An EAGLE-3 head for a base of at least seven layers, whose embedding it takes; of Qwen3.5 the head that ships
    with it, with the first ids of the vocabulary."""
    if base.naming == "qwen3_5":
        return replace(mtp_draft(base, min(SHORTLIST, base.vocab_size)), has_mapping=False)
    layers = base.num_layers
    embedding = decoder_weights(base)[0].name
    plain = {"qk_norm": False, "attention_bias": False, "layer_kinds": (), "conv_width": 0, "naming": "llama"}
    plain |= {"lone_parts": False, "mixture": None, "gated_mlp": True, "hidden_act": "silu"}
    whole = {
        "sliding_window": None,
        "local_rope_theta": None,
        "pre_norms": True,
        "post_norms": False,
        "rope_scaling": None,
        **{"full_heads": (), "rotary_dim": base.local_rotary_dim or base.rotary_dim, "value_norms": False},
        **{"shared_rows": 0, "layer_scalars": False, "layer_embedding_size": 0, "values_are_keys": False},
    }
    return DraftConfig(
        generation="3",
        decoder=replace(base, num_layers=1, tie_word_embeddings=False, **plain, **whole),
        draft_vocab_size=min(DRAFT_VOCABULARY, base.vocab_size),
        has_mapping=False,
        feature_layers=(2, layers // 2, layers - 3),
        feature_norm="none",
        layer_prefix="midlayer.",
        has_embedding=False,
        has_head=True,
        base_embedding=embedding,
        base_head=embedding,
        fc_bias=False,
        norm_before_residual=False,
        feed_back_normed=False,
    )


def block_draft_of(base: DecoderConfig, block: int, layers: int = BLOCK_LAYERS) -> DraftConfig:
    """A DFlash draft of so many of a base's layers that fills blocks of `block` tokens, with embedding and head of its
    base."""
    head = draft_of(base)
    count = base.num_layers
    taps = np.linspace(2, count - 2, layers).round().astype(int)  # as the published ones lie, from near to near the end
    return replace(
        head,
        generation=DFLASH,
        decoder=replace(head.decoder, num_layers=layers, qk_norm=True),
        draft_vocab_size=base.vocab_size,
        feature_layers=tuple(taps.tolist()),
        layer_prefix="layers.0.",
        has_head=False,
        base_head=head_weight_name(base),
        image_embeddings=False,
        block=DraftBlock(block, base.vocab_size - 1),
    )


def shape_directory(folder: Path, shape: str, limits: EngineLimits, weights: str = WEIGHTS[0]) -> RandomDirectory:
    """The directory of one of `SHAPES` for these limits, in a folder of its own below `folder`."""
    draft = f"draft{limits.verify_tree_size}-{limits.draft_block}" if limits.has_draft else "plain"
    parts = shape, limits.prefill_chunk, limits.kv_capacity, limits.kv_cache, draft
    place = folder / "-".join(map(str, (*parts, *([weights.replace("/", "-")] if weights != WEIGHTS[0] else []))))
    config = decoder_config(SHAPES[shape])
    return random_directory(place, config, limits, config.dtype, weights)


def random_backend(kind: str, directory: RandomDirectory) -> Any:
    """A backend whose weights are made: "tensorrt" or "numpy"."""
    if kind == "tensorrt":
        return RandomTensorRTBackend(directory)
    return RandomNumpyBackend(directory.config, None if directory.draft is None else directory.draft.config)


@contextmanager
def random_runner(directory: RandomDirectory, kind: str = "tensorrt") -> Iterator[Any]:
    """A runner of a directory's model with random weights, closed at the end: a `DecodingRunner` if it
    has a draft."""
    backend = random_backend(kind, directory)
    runner: Any
    if directory.draft is None:
        runner = BaseEngineRunner(backend, directory.config, directory.limits, directory.checkpoint())
    else:
        runner = DecodingRunner.open(backend, directory)
    try:
        yield runner
    finally:
        runner.close()


def random_prompt(tokens: int) -> list[int]:
    """So many token ids."""
    return np.random.default_rng(0).integers(0, 1000, tokens).tolist()


def loop_milliseconds(runner: BaseEngineRunner, tokens: int, steps: int) -> float:
    """Wall time of a plain step behind a prompt of so many tokens, whose rows are computed once; the host reads each
    token while the next step runs."""
    runner.start(0, random_prompt(tokens), runner.lengths[0] and tokens - 1, SamplingValues()).wait()
    for _ in range(3):
        runner.decode(1).wait()
    unread = [runner.decode(1)]
    begin = time.perf_counter()
    for _ in range(steps):
        unread.append(runner.decode(1))
        unread.pop(0).wait()
    seconds = time.perf_counter() - begin
    unread.pop(0).wait()
    return seconds / steps * 1000
