"""The number of BLAS threads during a small model's step."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from golden_files import golden_folder

from edgellm.engines.backends import numpy_backend as blas_threads
from edgellm.engines.backends.numpy_backend import NumpyBackend, one_blas_thread
from edgellm.engines.families import decoder_config
from edgellm.engines.model.limits import EngineShape


@pytest.fixture
def threads():
    functions = blas_threads._openblas()
    if functions is None:
        pytest.skip("NumPy does not use OpenBLAS here")
    get, set_threads = functions
    before = get()
    yield functions
    set_threads(before)


def test_one_thread_inside_and_the_former_number_afterwards(threads) -> None:
    get, set_threads = threads
    set_threads(2)
    with one_blas_thread():
        assert get() == 1
        np.dot(np.ones((64, 64), np.float32), np.ones(64, np.float32))
    assert get() == 2
    with pytest.raises(KeyError), one_blas_thread():
        raise KeyError
    assert get() == 2


def test_engines_of_large_models_share_rows_among_as_many(threads, monkeypatch: pytest.MonkeyPatch) -> None:
    threads[1](2)
    asked = []
    monkeypatch.setattr(blas_threads, "NumpyOperations", lambda *arguments: asked.append(arguments[3]))
    monkeypatch.setattr(blas_threads, "ProgramGraph", lambda operations, program: SimpleNamespace(run=None))
    config = decoder_config(json.loads((golden_folder("decoder") / "qwen3" / "config.json").read_text()))
    for limit in (1, blas_threads._SMALL_MODEL):
        monkeypatch.setattr(blas_threads, "_SMALL_MODEL", limit)
        NumpyBackend(config).load_engine(EngineShape("decode", 1, 1, 16, 16))
    assert asked == [2, 0]


def test_without_openblas_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas_threads, "_openblas", lambda: None)
    assert blas_threads.blas_threads() == 0
    with one_blas_thread():
        pass
