"""The file of compiled kernels: kept, read back, and ignored where it is damaged. TensorRT's own part needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.engines.backends.tensorrt_engine import RuntimeCache


class Cache:
    """What TensorRT offers: bytes out, bytes in."""

    def __init__(self) -> None:
        self.content = b"empty"

    def serialize(self) -> bytes:
        return self.content

    def deserialize(self, content: bytes) -> bool:
        self.content = content
        return True


class Configuration:
    """An `IRuntimeConfig` as far as the cache is concerned."""

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> None:
        self.cache = cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path))
    return tmp_path / "runtime"


def attached(key: str) -> tuple[RuntimeCache, Cache]:
    cache, configuration = RuntimeCache(key), Configuration()
    cache.attach(configuration)
    return cache, configuration.cache


def test_what_was_compiled_is_there_in_the_next_process(folder: Path) -> None:
    first, compiled = attached("model on sm_90")
    compiled.content = b"kernels"
    first.save()
    assert attached("model on sm_90")[1].content == b"kernels"
    assert attached("model on sm_89")[1].content == b"empty"
    assert len(list(folder.iterdir())) == 1


def test_a_damaged_file_is_ignored_and_replaced(folder: Path) -> None:
    first, compiled = attached("model")
    compiled.content = b"kernels"
    first.save()
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    second, again = attached("model")
    assert again.content == b"empty"
    again.content = b"kernels"
    second.save()
    assert attached("model")[1].content == b"kernels"


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be")
    cache, compiled = attached("model")
    compiled.content = b"kernels"
    cache.save()
    assert attached("model")[1].content == b"empty"


def test_full_tensorrt_has_no_such_cache(folder: Path) -> None:
    cache = RuntimeCache("model")
    cache.attach(object())
    cache.save()
    assert not folder.exists()
