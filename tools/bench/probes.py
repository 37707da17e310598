"""What a benchmark does to running code to see into it: engines listed, named or left out, the host's waits counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.tensorrt_engine import TensorRTEngine
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import HEAD
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import weight_bytes as spec_bytes
from edgellm.engines.model.states import KVRows, WindowRows, decoder_states, state_bytes
from edgellm.kernels.quantization.row_runs import PackedLayout


def executor_name(engine: Any) -> str:
    """What runs an engine's steps: hand-written kernels of few or many rows, TensorRT, or both."""
    return " and ".join(engine.choice.names) if isinstance(engine, KernelEngine) else "TensorRT"


#: Parts of a step's bytes, by what is in the names of their weights; the first that fits, else "others".
_PARTS = {
    "router": (".mlp.gate.", ".shared_expert_gate.", ".expert_bias"),
    "experts": (".mlp.experts.",),
    "shared experts and MLPs": (".mlp.",),
    "attention and mixers": (".self_attn.", ".linear_attn.", ".conv.", ".mamba."),
    "head": (HEAD, "embed_tokens"),
}


def weight_parts(
    config: ModelConfig, shape: EngineShape, dtype: str, packed: Mapping[str, PackedLayout] | None = None
) -> dict[str, float]:
    """Bytes of the weights that a step of an engine reads, by what they are for: the embedding only where it is the
    head, of experts those that so many rows choose if all are as likely, each once. `packed` are the layouts of those
    that are."""
    layouts, program, found = packed or {}, model_program(config, shape), dict.fromkeys((*_PARTS, "others"), 0.0)
    for spec in program.weights.values():
        part = next((part for part, words in _PARTS.items() if any(word in spec.name for word in words)), "others")
        layout, read = layouts.get(spec.name), 1.0
        if part == "experts":
            mixture = program.mixtures[0].mixture
            read -= (1 - mixture.chosen / mixture.experts) ** shape.tokens
        found[part] += read * (spec_bytes(spec, dtype) if layout is None else math.prod(layout.shape))
    return found


def weight_bytes(
    config: ModelConfig, shape: EngineShape, dtype: str, packed: Mapping[str, PackedLayout] | None = None
) -> float:
    """All of `weight_parts`."""
    return sum(weight_parts(config, shape, dtype, packed).values())


def state_traffic(config: DecoderConfig, limits: EngineLimits, dtype: str, tokens: int) -> dict[str, int]:
    """Bytes of the states that a decode step behind so many tokens cannot do without: the KV rows in reach, read, and
    recurrent states, read and written once."""
    read, rows = 0, {}
    for state in decoder_states(config, limits.kv_cache, limits):
        if isinstance(state, KVRows):
            window = state.window if isinstance(state, WindowRows) else tokens
            rows |= state.of_sequence(min(tokens, window))
        else:
            read += state_bytes(state.tensors(1, 1), dtype)
    return {"KV rows": state_bytes(rows, dtype), "states": 2 * read}


@contextmanager
def enqueue_replaced(replacement: Callable[[Any], None] | None) -> Iterator[list[Any]]:
    """Meanwhile engines are listed as they are enqueued; with a `replacement` that is called instead of them."""
    listed: list[Any] = []
    kinds = (TensorRTEngine, KernelEngine)
    running: list[Any] = []  # those of runs of steps are not listed themselves
    originals = {kind: kind.enqueue for kind in kinds}

    def patched(kind: type) -> Callable[[Any], None]:
        def enqueue(engine: Any) -> None:
            if not running:
                listed.append(engine)
            running.append(engine)
            try:
                (replacement or originals[kind])(engine)
            finally:
                running.pop()

        return enqueue

    for kind in kinds:
        kind.enqueue = patched(kind)
    try:
        yield listed
    finally:
        for kind in kinds:
            kind.enqueue = originals[kind]


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Meanwhile every call by which the host waits for the GPU is listed: event, stream, context, blocking copies."""
    import pycuda.driver as cuda

    waits: list[str] = []
    places = [(cuda.Event, "synchronize"), (cuda.Stream, "synchronize"), (cuda.Context, "synchronize")]
    places += [(cuda, name) for name in ("memcpy_dtoh", "memcpy_htod", "memcpy_dtod")]
    originals = [(owner, name, vars(owner)[name]) for owner, name in places]

    def counting(label: str, original: Any) -> Callable[..., Any]:
        called = original.__func__ if isinstance(original, staticmethod) else original

        def call(*arguments: Any, **named: Any) -> Any:
            waits.append(label)
            return called(*arguments, **named)

        return call

    for owner, name, original in originals:
        call = counting(f"{owner.__name__}.{name}", original)
        setattr(owner, name, staticmethod(call) if isinstance(original, staticmethod) else call)
    try:
        yield waits
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
