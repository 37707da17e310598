"""What a benchmark does to running code to see into it: engines left out or listed, waits of the host counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.tensorrt_engine import TensorRTEngine


@contextmanager
def enqueue_replaced(replacement: Callable[[Any], None] | None) -> Iterator[list[Any]]:
    """Meanwhile engines are listed as they are enqueued; with a `replacement` that is called instead of them."""
    listed: list[Any] = []
    kinds = (TensorRTEngine, KernelEngine)
    originals = {kind: kind.enqueue for kind in kinds}

    def patched(kind: type) -> Callable[[Any], None]:
        def enqueue(engine: Any) -> None:
            listed.append(engine)
            (replacement or originals[kind])(engine)

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
