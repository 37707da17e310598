"""Uploads by way of pinned buffers: what arrives is what was given, however late the GPU gets to its copies."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_device import cuda_device

from edgellm.engines.backends import pinned_ring
from edgellm.engines.backends.pinned_ring import PinnedRing


class LateGpu:
    """Stands for pycuda's driver, and for a stream: its copies run when something waits for them, and no sooner."""

    event_flags = SimpleNamespace(DISABLE_TIMING=2)

    def __init__(self) -> None:
        self.enqueued, self.done = list[tuple[int, np.ndarray]](), 0

    def memcpy_htod_async(self, pointer: int, values: np.ndarray, stream: Any) -> None:
        assert stream is self
        self.enqueued.append((pointer, values))

    def synchronize(self, count: int | None = None) -> None:
        """Run the first `count` copies, or all."""
        for pointer, values in self.enqueued[self.done : count]:
            ctypes.memmove(pointer, values.ctypes.data, values.nbytes)
            self.done += 1

    def Event(self, flags: int) -> Any:
        last = [0]
        return SimpleNamespace(
            record=lambda stream: last.append(len(stream.enqueued)), synchronize=lambda: self.synchronize(last[-1])
        )


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_ring, "_PIECE", 64)


@pytest.mark.usefixtures("small_buffers")
def test_what_is_uploaded_arrives_though_it_changes_afterwards() -> None:
    """Of any sizes, and dtypes: some go into one buffer, one into more than there are; several uploads follow."""
    gpu, random = LateGpu(), np.random.default_rng(0)
    ring, memory, begin = PinnedRing(gpu, gpu, np.empty(192, np.uint8)), np.zeros(1 << 14, np.uint8), 0
    expected = np.zeros_like(memory)
    for sizes in [(3,), (64,), (65, 0, 1), (5, 7, 500, 64, 100), (1000,), (), (1, 2, 3), (64, 64, 64, 64)]:
        parts = [random.integers(0, 1 << 16, (size, 2), np.uint16) for size in sizes]
        given = b"".join(part.tobytes() for part in parts)
        ring.upload(memory.ctypes.data + begin, parts)
        for part in parts:
            part[:] = 0
        expected[begin : begin + len(given)] = np.frombuffer(given, np.uint8)
        begin += len(given)
    assert 0 < gpu.done < len(gpu.enqueued)  # buffers were used again, and the last copies have yet to run
    ring.close()
    assert gpu.done == len(gpu.enqueued)
    np.testing.assert_array_equal(memory, expected)


@pytest.mark.usefixtures("small_buffers")
def test_an_error_leaves_no_copy_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another buffer is being filled then."""
    gpu, fill, goes_on = LateGpu(), pinned_ring._fill, threading.Event()
    filled = []

    def failing(buffer: np.ndarray, views: list[np.ndarray]) -> int:
        if views[0][0] == 1:
            raise MemoryError
        goes_on.wait(10)
        filled.append(fill(buffer, views))
        return filled[-1]

    monkeypatch.setattr(pinned_ring, "_fill", failing)
    monkeypatch.setattr(pinned_ring, "usable_cores", lambda: 3)
    ring, memory = PinnedRing(gpu, gpu, np.empty(192, np.uint8)), np.zeros(192, np.uint8)
    with pytest.raises(MemoryError):
        ring.upload(memory.ctypes.data, [np.repeat(np.arange(1, 4, dtype=np.uint8), 64)])
    assert not filled
    threading.Timer(0.05, goes_on.set).start()
    ring.close()
    assert filled == [64, 64] and not gpu.enqueued and not memory.any()


@pytest.mark.gpu
def test_large_arrays_arrive_on_a_gpu() -> None:
    """Of more bytes than all buffers have, and small ones between, in the order of the stream: what is copied on the
    device behind an upload is what was uploaded before."""
    random = np.random.default_rng(0)
    large = random.integers(0, 256, (3, (150 << 20) + 5), np.uint8)
    with cuda_device() as gpu:
        array, small = gpu.empty(large[0].shape, "uint8"), gpu.empty((1000,), "uint8")
        copies = [gpu.empty(array.shape, "uint8") for _ in large]
        with gpu.large_uploads(array.nbytes):
            for values, copy in zip(large, copies, strict=True):
                given = values.copy()
                gpu.upload(array, given)
                gpu.upload(small, given[:1000])
                given[:] = 0
                gpu.copy(copy, array)
            parts = [large[0][:3], large[1][: 20 << 20], large[2][:0], large[2][:1001]]
            gpu.upload_parts(array[: sum(part.size for part in parts)], parts)
        assert gpu._ring is None
        for values, copy in zip(large, copies, strict=True):
            np.testing.assert_array_equal(gpu.download(copy), values)
        np.testing.assert_array_equal(gpu.download(small), large[2][:1000])
        joined = np.concatenate(parts)
        np.testing.assert_array_equal(gpu.download(array)[: joined.size], joined)
        np.testing.assert_array_equal(gpu.download(array)[joined.size :], large[2][joined.size :])


@pytest.mark.gpu
def test_an_error_between_uploads_leaves_the_gpu_usable() -> None:
    """As of a bad value in a file, while copies are under way."""
    values = np.arange(40 << 20, dtype=np.uint32)
    with cuda_device() as gpu:
        array = gpu.empty(values.shape, "uint32")
        with pytest.raises(ValueError, match="bad"), gpu.large_uploads(values.nbytes):
            gpu.upload(array, values)
            raise ValueError("bad")
        np.testing.assert_array_equal(gpu.download(array), values)
        gpu.upload(array, values + 1)
        np.testing.assert_array_equal(gpu.download(array), values + 1)
